#!/usr/bin/env bash
# Builds and runs every test on a Debian or Ubuntu machine, installing what is missing; the last line counts them.
#
# usage: bash scripts/test.sh [STAGE...]     stages: gcc random cuda python clang asan tsan fuzz aarch64 (all, in this order)
# HEADRACE_TEST_SEED fixes the seed of the random problems that is otherwise new in every run.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
. scripts/common.sh

stages=("$@")
[ ${#stages[@]} -gt 0 ] || stages=(gcc random cuda python clang asan tsan fuzz aarch64)
seed=${HEADRACE_TEST_SEED:-$(date +%s)}
logs=build/logs
passed=0 failed=0
launcher=() options=()
started=$SECONDS
export OMP_WAIT_POLICY=passive  # tests run side by side: waiting threads of PyTorch leave their cores to others

# run NAME COMMAND...: one step, timed; its output goes to a log, of which a failure shows the end.
run() {
    local name=$1 log=$logs/${1//[^a-z0-9]/_}.log begin=$SECONDS
    shift
    printf '%-44s ' "$name"
    if "$@" >"$log" 2>&1 </dev/null; then
        printf 'ok      %4d s\n' $((SECONDS - begin))
        return 0
    fi
    printf 'FAILED  %4d s   (%s)\n' $((SECONDS - begin)) "$log"
    grep -vE '^\[( RUN|       OK|---)' "$log" | tail -n 150 | sed 's/^/    /'
    return 1
}

# A step that counts as one test.
step() {
    if run "$@"; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        return 1
    fi
}

# build PRESET TARGET...: a failure is shown and counted here, and ends the stage. `options` are more for CMake.
build() {
    local preset=$1
    shift
    step "$preset: configure" cmake --preset "$preset" "${options[@]}" &&
        step "$preset: build" cmake --build "build/$preset" -j "$jobs" --target "$@" -- -k 0
}

# tests PRESET CTEST_ARGUMENT...: every ctest entry counts as one test.
tests() {
    local preset=$1 log summary count bad
    shift
    run "$preset: tests" "${launcher[@]}" ctest --test-dir "build/$preset" -j "$jobs" --output-on-failure --no-tests=error "$@"
    log=$logs/${preset}__tests.log
    summary=$(grep -E '^[0-9]+% tests passed, ' "$log" | tail -n 1)
    if [[ $summary =~ passed,\ ([0-9]+)\ tests?\ failed\ out\ of\ ([0-9]+) ]]; then
        bad=${BASH_REMATCH[1]} count=${BASH_REMATCH[2]}
        grep -E '^ *[0-9]+/[0-9]+ Test' "$log" | sed -E 's/^ *[0-9]+\/[0-9]+ Test +#[0-9]+: /    /'
        passed=$((passed + count - bad)) failed=$((failed + bad))
    else
        failed=$((failed + 1))
    fi
}

# Kernels compile for minutes, under sanitizers above all: g++ compiles them all, the address sanitizer's clang those that
# the machine can run, and those of AVX2 alone serve a release by clang and the thread sanitizer.
# Of the lines of conformance a quarter or less runs with clang and under sanitizers; all run with g++.
runnable=(-DHEADRACE_AVX512=ON)
[ ! -r /proc/cpuinfo ] || grep -qw avx512vl /proc/cpuinfo || runnable=(-DHEADRACE_AVX512=OFF)

# The library's threads are its own, and the thread sanitizer sees all they do. A test that calls from inside an OpenMP
# region needs the uninstrumented run-time of OpenMP ignored.
# Newer kernels place memory where older sanitizers cannot follow, unless address randomisation is off (setarch -R).
# Three threads even on one core. The list of regressions is of numbers, and left to the others.
export TSAN_OPTIONS="ignore_noninstrumented_modules=1 halt_on_error=1"
export UBSAN_OPTIONS="print_stacktrace=1"
stage_tsan() {
    local options=(-DHEADRACE_AVX512=OFF)
    build tsan sanitize_tests headrace_cli || return
    local launcher=(env OMP_NUM_THREADS=3 HEADRACE_CONFORMANCE_SHARE=0.1)
    setarch "$(uname -m)" -R true 2>/dev/null && launcher+=(setarch "$(uname -m)" -R)
    tests tsan -L sanitize -E check_regressions
}

stage_gcc() {
    build ci all || return
    tests ci
}

stage_random() {
    local headrace=build/ci/tools/headrace/headrace
    [ -x "$headrace" ] || build ci headrace_cli || return
    step "random problems, seed 1" "$headrace" check --random 2000 --seed 1
    # With the bf16 dot product also where fp32 is faster.
    step "random problems, seed $seed" env HEADRACE_MAX_ISA=avx512_bf16 "$headrace" check --random 2000 --seed "$seed"
}

# The kernels of src/cuda as PTX in the interpreter of tests/ptx: no GPU, but nvcc.
stage_cuda() {
    if ! command -v nvcc >/dev/null; then
        printf '%-44s not run: no nvcc in PATH\n' "cuda: kernels in the interpreter"
        return
    fi
    local options=(-DHEADRACE_BUILD_PYTHON=OFF)  # which an earlier run's stage of Python has left on
    build ptx ptx_tests headrace_cli || return
    tests ptx -L cuda
    local interpreter=(env LD_LIBRARY_PATH="$PWD/build/ptx/tests/ptx/runtime" HEADRACE_PTX_ORDER=random
                       HEADRACE_PTX_SEED="$seed" HEADRACE_PTX_CAPABILITY=$((8 + seed % 2)).0)
    step "cuda: random problems, seed $seed" "${interpreter[@]}" build/ptx/tools/headrace/headrace \
        check --random 150 --seed "$seed" --device cuda
}

# python_tests NAME PYTEST_ARGUMENT...: every Python test counts as one test.
python_tests() {
    local name=$1 log=$logs/${1//[^a-z0-9]/_}.log summary
    shift
    run "$name" "${launcher[@]}" timeout 1200 "$venv/bin/python" -m pytest -q -rfE --strict-markers "$@"
    summary=$(tail -n 1 "$log")
    if [[ $summary =~ ([0-9]+)\ passed ]]; then passed=$((passed + BASH_REMATCH[1])); else failed=$((failed + 1)); fi
    if [[ $summary =~ ([0-9]+)\ failed ]]; then failed=$((failed + BASH_REMATCH[1])); fi
    if [[ $summary =~ ([0-9]+)\ (error|skipped) ]]; then failed=$((failed + BASH_REMATCH[1])); fi
    printf '    %s\n' "$summary"
}

# The wheel is built beside the requirements, which keep one core busy; with the flags of the preset ci, whose objects
# ccache then has.
wheel_and_requirements() {
    local status=0 settings=(--config-settings=build-dir=build/wheel
                             --config-settings=cmake.define.{HEADRACE_CUDA=OFF,HEADRACE_WERROR=ON,CMAKE_{C,CXX}_FLAGS_RELEASE=-O3})
    pip_install -r tests/python/requirements.txt &
    "$venv/bin/python" -m pip wheel --no-deps --wheel-dir "$1" "${settings[@]}" . || status=1
    wait $! && return $status
}

# The package as a user installs it, from a wheel in an environment of its own.
stage_python() {
    local wheels=build/wheels alone
    step "python: environment" python3 -m venv "$venv" || return
    rm -rf "$wheels"
    step "python: pip wheel ., requirements" wheel_and_requirements "$wheels" || return
    step "python: install the wheel" pip_install --no-deps --force-reinstall "$wheels"/headrace-*.whl || return
    python_tests "python: tests" -m "not alone" -n "$jobs" --ignore-glob="*/test_gpu_*.py" tests/python
    printf '%-44s not run: these are for machines with a GPU\n' "python: tests/python/test_gpu_*.py"
    local launcher=(env -u OMP_WAIT_POLICY)  # as a user's process has it
    mapfile -t alone < <(grep -l "pytest.mark.alone" tests/python/test_*.py)
    python_tests "python: tests that measure" -m alone "${alone[@]}"
    local networks=(timeout 300 "$venv/bin/python" tests/python/two_networks.py) reason
    if reason=$("${networks[@]}" --possible 2>&1); then
        step "python: two ranks in two networks" "${networks[@]}"
    else
        printf '%-44s not run: %s\n' "python: two ranks in two networks" "$reason"
    fi
    python_on_stand_in
}

# headrace.torch on CUDA tensors, with the kernels in the interpreter.
python_on_stand_in() {
    local name="python: CUDA tensors in the interpreter" package=build/ptx/package
    if ! command -v nvcc >/dev/null; then
        printf '%-44s not run: no nvcc in PATH\n' "$name"
        return
    fi
    local options=(-DHEADRACE_BUILD_PYTHON=ON -DPython_EXECUTABLE="$PWD/$venv/bin/python")
    build ptx headrace_cudart headrace_python || return
    rm -rf "$package" && mkdir -p "$package" && cp -r python/headrace build/ptx/python/_core.*.so "$package"
    mv "$package"/_core.*.so "$package/headrace"
    local launcher=(env LD_LIBRARY_PATH="$PWD/build/ptx/tests/ptx/runtime" PYTHONPATH="$PWD/$package")
    python_tests "$name" -n "$jobs" tests/python/torch_on_stand_in.py tests/python/ranks_on_stand_in.py
}

stage_clang() {
    local options=(-DHEADRACE_AVX512=OFF) launcher=(env HEADRACE_CONFORMANCE_SHARE=0.25)
    build clang sanitize_tests headrace_cli || return
    tests clang -L sanitize
}

stage_asan() {
    local options=("${runnable[@]}") launcher=(env HEADRACE_CONFORMANCE_SHARE=0.15)
    build asan sanitize_tests headrace_cli fuzzers || return
    tests asan -L sanitize
}

# The fuzzers side by side, a minute each.
fuzz_all() {
    local name pid status=0 pids=()
    for name in parse_fuzz safetensors_fuzz problem_fuzz; do
        "build/asan/tests/fuzz/$name" -max_total_time=60 -max_len=4096 -print_final_stats=1 \
            -artifact_prefix="$logs/$name-" &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid" || status=1; done
    return $status
}

stage_fuzz() {
    local options=("${runnable[@]}")
    [ -x build/asan/tests/fuzz/problem_fuzz ] || build asan fuzzers || return
    step "fuzz: reader, parser and Problem, 60 s" fuzz_all
}

# NEON in an emulator, on machines of another kind: what gcc builds there is native.
stage_aarch64() {
    if [ "$(uname -m)" = aarch64 ]; then
        printf 'this machine is one\n'
        return
    fi
    install_missing g++-aarch64-linux-gnu qemu-user-static
    local headrace=(qemu-aarch64-static -L /usr/aarch64-linux-gnu build/aarch64/tools/headrace/headrace)
    build aarch64 headrace_cli || return
    step "aarch64: random problems, seed $seed" "${headrace[@]}" check --random 300 --seed "$seed"
}

install_missing "${build_packages[@]}" clang libomp-dev llvm libgtest-dev pkg-config libmpich-dev mpich iproute2 \
    "${python_packages[@]}"
# Clang's sanitizer run-time is a package of its own in newer releases, named after clang's version.
runtime=libclang-rt-$(clang -dumpversion | cut -d. -f1)-dev
if apt-cache show "$runtime" >/dev/null 2>&1; then install_missing "$runtime"; fi

mkdir -p "$logs"
for stage in "${stages[@]}"; do
    declare -F "stage_$stage" >/dev/null || die "unknown stage '$stage': expected gcc random cuda python clang asan tsan fuzz aarch64"
    say "$stage"
    "stage_$stage"
done

printf '\n%d min %d s in all, logs in %s\n' $(((SECONDS - started) / 60)) $(((SECONDS - started) % 60)) "$logs"
printf '%d passed, %d failed\n' "$passed" "$failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
