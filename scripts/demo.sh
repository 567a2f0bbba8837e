#!/usr/bin/env bash
# Five families at the shapes of real layers in one table; then a small language model, at last on two processes.
set -euo pipefail
called_from=$PWD
cd "$(dirname "$0")/.."
. scripts/common.sh

usage() {
    cat <<'TEXT'
usage: bash scripts/demo.sh [OPTION...]
About ten minutes after the build: a table of five families, then a language model of bytes, and a small one trained
by one process and by two. Pictures, a sample and a checkpoint of the model go to build/demo.

  --operator NAME   of the language model: kda (default), gated_delta_rule, comba, gla, simple_gla or lightning_attn
  --text FILE       what it learns; by default the sources of this project
  --seconds N       length of its training, 120
  --steps N         the same in steps, instead of seconds
  --out FOLDER      another place for its pictures and its checkpoint
  --resume          goes on from the checkpoint, with the same operator and text; the length is that of both runs
  --tokens N        tokens of the table's layers, 4096
  --checked N       tokens that the oracle checks, as many: it walks token by token, in double precision, over one row
TEXT
}

tokens=4096 checked='' model=()
operator_names='kda gated_delta_rule comba gla simple_gla lightning_attn'
while [ $# -gt 0 ]; do
    option=$1 value=${2:-}
    case $option in
        -h | --help) usage; exit 0 ;;
        --resume) model+=("$option"); shift; continue ;;
    esac
    [ $# -gt 1 ] || { usage >&2; die "expected an option and its value, got '$option'"; }
    case $option in
        --operator)
            [[ " $operator_names " == *" $value "* ]] || die "$option: expected one of $operator_names, got '$value'" ;;
        --text)
            value=$(cd "$called_from" && realpath -e -- "$value" 2>/dev/null) ||
                die "$option: expected a file, got '$2'" ;;
        --out) value=$(cd "$called_from" && realpath -m -- "$value") ;;
        --seconds | --steps | --tokens | --checked)
            [[ $value =~ ^[1-9][0-9]{0,6}$ ]] || die "$option: expected a number from 1 to 9999999, got '$value'" ;;
        *) usage >&2; die "unknown option '$option'" ;;
    esac
    case $option in
        --tokens) tokens=$value ;;
        --checked) checked=$value ;;
        *) model+=("$option" "$value") ;;
    esac
    shift 2
done
checked=${checked:-$tokens}
presets=(ling-mini-linear gla-1.3b qwen3-next-80b comba-1.3b kimi-linear-48b)
operators=(simple_gla gla gated_delta_rule comba kda)

install_missing "${build_packages[@]}" "${python_packages[@]}"
say "building"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# Runs a command; on a failure shows the end of what it said and stops.
quietly() {
    "$@" >"$folder/log" 2>&1 </dev/null || { tail -n 40 "$folder/log" >&2; die "failed: $*"; }
}

quietly cmake --preset release
quietly cmake --build build/release -j "$jobs"
headrace=build/release/tools/headrace/headrace

for i in "${!presets[@]}"; do
    preset=${presets[i]} operator=${operators[i]}
    say "$preset: $operator"
    # for the peak that judges bf16
    quietly "$headrace" bench linear_attention:fwd t256 h4 k64 bf16 --json "$folder/$preset.peaks.json"
    for direction in fwd bwd; do
        results=$folder/$preset.$direction
        flag=()
        [ $direction = fwd ] || flag=(--backward)
        echo "$direction: gen and run, $tokens tokens"
        quietly "$headrace" gen "$preset:$direction" "t$tokens" --out "$folder/in.safetensors"
        "$headrace" run "$operator" --in "$folder/in.safetensors" --out "$folder/out.safetensors" "${flag[@]}" \
            --repeat 5 --json >"$results.run.json" || die "headrace run failed on $preset"
        echo "$direction: check, $checked tokens"
        quietly "$headrace" check "$preset:$direction" b1 "t$checked" --json "$results.check.json"
    done
    rm -f "$folder"/*.safetensors
done

python3 scripts/demo_table.py "$folder" "$checked" "${presets[@]}"

say "Python packages (the first time a minute or two)"
quietly python3 -m venv "$venv"
quietly pip_install -r examples/language_model/requirements.txt -c tests/python/requirements.txt
say "building the Python package headrace (the first time a few minutes)"
quietly pip_install --no-deps --config-settings=cmake.define.HEADRACE_CUDA=OFF .
say "a language model of bytes"
"$venv/bin/python" examples/language_model "${model[@]}"
say "a sequence in one process, and cut over two"
OMP_NUM_THREADS=1 "$venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 examples/language_model \
    --cp 2 --batch 1 --hidden 64 --layers 2 --steps 12 --sample 60 --dtype f32 --beside-one --out build/demo/two_processes
