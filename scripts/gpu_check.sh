#!/usr/bin/env bash
# Checks and times headrace on this machine's GPU in one run of at most eight minutes; without a GPU, in the interpreter.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
. scripts/common.sh

usage() {
    cat <<'TEXT'
usage: bash scripts/gpu_check.sh [OPTION...]
Builds for the GPU that is here, compares every operator with the oracle, runs compute-sanitizer, graphs and streams, the
Python tests on device tensors, and times the problems of problems/gpu.txt, each stage within a time limit. Needs nvcc,
cmake, a C++ compiler and python3, no network. A tool that is missing is named and left out. Without a GPU the kernels run
in the interpreter of tests/ptx, on small problems, and nothing is timed.
The exit status is 1 if a check failed or the oracle was not asked. Results go to build/gpu_check: results.jsonl, logs.

  --out FOLDER      another place for them
  --seconds N       for all of it; 470, without a GPU 1200
  --problems FILE   what is timed, problems/gpu.txt
  --build FOLDER    a build with HEADRACE_BUILD_GPU_CHECK, instead of one of this script's
  --interpreter     the interpreter although there is a GPU
TEXT
}

out=build/gpu_check total='' build='' mode=auto problems=problems/gpu.txt
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --interpreter) mode=interpreter; shift; continue ;;
        --out | --seconds | --problems | --build) [ $# -gt 1 ] || die "$1: expected a value" ;;
        *) usage >&2; die "unknown option '$1'" ;;
    esac
    case $1 in
        --out) out=$2 ;;
        --build) build=$2 ;;
        --problems) problems=$2 ;;
        --seconds) [[ $2 =~ ^[1-9][0-9]{0,4}$ ]] || die "$1: expected a number of seconds, got '$2'"; total=$2 ;;
    esac
    shift 2
done
command -v python3 >/dev/null || die "python3 is needed"
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
stages=$out/logs results=$out/results.jsonl
rm -rf "$stages" "$results"
mkdir -p "$stages"

reserve=0  # seconds that a stage leaves to those after it
left() { echo $((total - SECONDS - reserve)); }

# note NAME STATUS SECONDS [WHAT]: the outcome of a stage.
note() {
    printf '%s\n' "$2" >"$stages/$1.status"
    python3 - "$@" >>"$results" <<'PYTHON'
import json
import sys
name, status, seconds, *what = sys.argv[1:]
print(json.dumps({"stage": "stages", "name": name, "status": status, "seconds": int(seconds), "what": " ".join(what)}))
PYTHON
    printf '%4d s  %-24s %-12s %s\n' "$SECONDS" "$1" "$2" "${4:-}"
}

# stage NAME LIMIT COMMAND...: ends it after LIMIT seconds, or when the time for all of it is over. A word @seconds of the
# command becomes a time below that, to begin nothing after it; a stage with a name in '!' keeps to it, or hangs.
stage() {
    local name=${1%!} limit=$2 log=$stages/${1%!}.log begin=$SECONDS late="out of time" status rest last
    [ "$name" = "$1" ] || late=FAILED
    shift 2
    rest=$(left)
    [ "$limit" -le "$rest" ] || limit=$rest
    if [ "$limit" -lt 5 ]; then
        note "$name" "not run" 0 "no time was left"
        return 1
    fi
    printf '%4d s  %-24s up to %d s\n' "$SECONDS" "$name" "$limit"
    timeout -k 5 "$limit" "${@/#@seconds/$((limit * 3 / 4))}" >"$log" 2>&1 </dev/null
    status=$?
    last=$(grep -v '^ *$' "$log" | tail -n 1 | cut -c 1-150)
    case $status in
        0) note "$name" ok $((SECONDS - begin)) "$last" ;;
        124 | 137) note "$name" "$late" $((SECONDS - begin)) "was ended; $last" ;;
        *)
            note "$name" FAILED $((SECONDS - begin)) "$last"
            tail -n 25 "$log" | cut -c 1-300 | sed 's/^/          | /'
            ;;
    esac
    return "$status"
}

not_run() { note "$1" "not run" 0 "$2"; }

# ---- which GPU ----

architecture=native
if [ $mode = auto ]; then
    if capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader -i 0 2>/dev/null) &&
        [[ $capability =~ ^[0-9]+\.[0-9]$ ]]; then
        mode=gpu architecture=${capability/./}-real
        [ "$architecture" != 90-real ] || architecture=90a-real
        nvidia-smi --query-gpu=name,compute_cap,driver_version,memory.total --format=csv,noheader -i 0
    elif [ -e /dev/nvidia0 ]; then
        mode=gpu
    else
        mode=interpreter
    fi
fi
build_limit=240
if [ $mode = interpreter ]; then
    total=${total:-1200} build_limit=900
    echo "no GPU is used: the kernels run as PTX in the interpreter, on a few small problems; no time means anything"
fi

total=${total:-470}

# ---- build: what is ready when its time ends is kept for the next run ----

finish() {
    echo
    python3 scripts/gpu_check_table.py "$results"
    echo "$SECONDS s, results in $results"
    grep -qs ok "$stages/conformance.status" && ! grep -qs FAILED "$stages"/*.status
    exit
}

python_here() { python3 -c 'import nanobind, numpy, ml_dtypes, sys, sysconfig, pathlib
sys.exit(not (pathlib.Path(sysconfig.get_path("include")) / "Python.h").exists())' 2>/dev/null; }

with_python=OFF
if [ $mode = gpu ] && [ -z "$build" ] && python_here; then with_python=ON; fi
if [ -z "$build" ]; then
    build=$PWD/build/gpu_check/$mode
    options=(-DCMAKE_BUILD_TYPE=Release -DHEADRACE_CUDA=ON -DHEADRACE_BUILD_GPU_CHECK=ON -DHEADRACE_BUILD_TESTS=OFF
             -DHEADRACE_BUILD_TOOLS=OFF "-DHEADRACE_BUILD_PYTHON=$with_python")
    [ $with_python = OFF ] || options+=("-DPython_EXECUTABLE=$(command -v python3)")
    targets=(gpu_check)
    if [ $mode = gpu ]; then
        options+=("-DCMAKE_CUDA_ARCHITECTURES=$architecture" -DHEADRACE_CUDA_PLAIN_PTX=OFF)
    else
        options+=(-DHEADRACE_CUDA_PLAIN_PTX=ON -DCMAKE_CUDA_RUNTIME_LIBRARY=Shared)
        targets+=(headrace_cudart)
    fi
    if command -v ninja >/dev/null && [ ! -e "$build/Makefile" ]; then options+=(-G Ninja); fi
    stage configure 60 cmake -S . -B "$build" "${options[@]}" || finish
    stage build $build_limit cmake --build "$build" -j "$jobs" --target "${targets[@]}" || finish
fi
build=$(cd "$build" && pwd) || die "there is no build to use"
check=$build/tests/cuda/gpu_check/gpu_check
[ -x "$check" ] || die "$check is not there"
if [ $mode = interpreter ]; then
    export LD_LIBRARY_PATH=$build/tests/ptx/runtime
    [ -e "$LD_LIBRARY_PATH/libcudart.so" ] || die "$build holds no stand-in for the CUDA runtime"
fi
stage device 60 "$check" device --results "$results" || finish

# ---- in the interpreter: a little of each ----

if [ $mode = interpreter ]; then
    stage conformance! 120 "$check" conformance --file problems/gpu_small.txt --seconds @seconds --results "$results"
    stage "sample of all!" 60 "$check" conformance --count 20 --seconds @seconds --results "$results"
    stage streams! 60 "$check" streams --seconds @seconds --results "$results"
    stage bench 60 "$check" bench "kda:fwd t40 h1 k32 v16 bf16 cuda" "kda:step t1 h1 k32 v16 cuda" --results "$results"
    for name in memcheck racecheck initcheck synccheck; do not_run $name "needs a GPU; the interpreter has its own checks"; done
    for name in torch jax peers; do not_run $name "needs a GPU"; done
    finish
fi

# ---- what is right, all at the same time: the oracle takes the processor, the sanitizers the GPU ----

conformance() {  # SECONDS
    local shard count=$((jobs / 3 < 6 ? jobs / 3 : 6)) pids=() status=0 pid
    [ "$count" -gt 0 ] || count=1
    for ((shard = 0; shard < count; ++shard)); do
        OMP_NUM_THREADS=2 "$check" conformance --shard "$shard/$count" --seconds "$1" --results "$results" &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid" || status=1; done
    return "$status"
}

sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
sanitize() {  # TOOL SECONDS
    "$sanitizer" --tool "$1" --error-exitcode 9 --print-limit 20 "$check" conformance --file problems/gpu_small.txt \
        --seconds "$2"
}

# The package, built with the program: its files beside its binary.
site=$PWD/build/gpu_check/site
make_site() {
    cmake --build "$build" -j "$jobs" --target headrace_python && rm -rf "$site" && mkdir -p "$site" &&
        cp -r python/headrace "$site" && cp "$build"/python/_core*.so "$site/headrace"
}
python_tests() {  # NAME of the framework
    cd tests/python && PYTHONPATH=$site XLA_PYTHON_CLIENT_PREALLOCATE=false \
        python3 -m pytest -q -p no:cacheprovider "test_gpu_$1.py"
}
has_gpu() {
    case $1 in
        torch) python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ;;
        jax) XLA_PYTHON_CLIENT_PREALLOCATE=false python3 -c 'import jax; jax.devices("cuda")' ;;
    esac 2>/dev/null
}
python_stages() {
    local name
    if [ $with_python = OFF ]; then
        for name in torch jax; do not_run $name "needs nanobind, numpy, ml_dtypes, the headers of python3, no --build"; done
        return
    fi
    stage "python package" 120 "${shell[@]}" make_site || return
    for name in torch jax; do
        if [ ! -e "tests/python/test_gpu_$name.py" ]; then
            not_run $name "there is no tests/python/test_gpu_$name.py"
        elif ! python3 -c 'import pytest' 2>/dev/null; then
            not_run $name "needs pytest"
        elif ! has_gpu $name; then
            not_run $name "no $name with CUDA in python3"
        else
            stage $name 90 "${shell[@]}" python_tests $name
        fi
    done
}

export check results sanitizer build jobs site
export -f conformance sanitize make_site python_tests
shell=(bash -c '"$@"' bash)  # for a function in a process of its own, which timeout can end

reserve=90
stage conformance! 100 "${shell[@]}" conformance @seconds &
stage streams! 70 "$check" streams --seconds @seconds --results "$results" &
if [ -z "$sanitizer" ]; then
    reason="there is no compute-sanitizer"
elif ! refusal=$(timeout 30 "$sanitizer" "$check" device 2>&1); then
    reason="compute-sanitizer does not work here: $(grep -iE 'error|not supported' <<<"$refusal" | head -n 1)"
else
    reason=''
fi
for name in memcheck racecheck initcheck synccheck; do
    if [ -n "$reason" ]; then not_run $name "$reason"; else stage $name 90 "${shell[@]}" sanitize $name @seconds & fi
done
python_stages &
wait
reserve=0

# ---- what is fast, with nothing beside it ----

stage bench 120 "$check" bench --file "$problems" --seconds @seconds --results "$results"
if has_gpu torch; then
    stage peers $(($(left) - 10)) python3 scripts/gpu_peers.py "$results"
else
    not_run peers "no torch with CUDA in python3"
fi
finish
