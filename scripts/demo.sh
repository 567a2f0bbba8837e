#!/usr/bin/env bash
# Five families at the shapes of real layers: files of inputs, forward and backward, the oracle's verdict, one table.
#
# usage: bash scripts/demo.sh [TOKENS] [CHECKED_TOKENS]
# TOKENS (4096) are computed and timed. The check draws the same layer anew, one batch row of CHECKED_TOKENS (as many),
# because the oracle walks token by token in double precision; the whole takes about two minutes after the build.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/common.sh

tokens=${1:-4096} checked=${2:-${1:-4096}}
for count in "$tokens" "$checked"; do
    [[ $count =~ ^[1-9][0-9]{0,6}$ ]] || die "expected a number of tokens from 1 to 9999999, got '$count'"
done
presets=(ling-mini-linear gla-1.3b qwen3-next-80b comba-1.3b kimi-linear-48b)
operators=(simple_gla gla gated_delta_rule comba kda)

install_missing "${build_packages[@]}" python3
say "building"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
{ cmake --preset release && cmake --build build/release -j "$jobs"; } >"$folder/build.log" 2>&1 ||
    { tail -n 40 "$folder/build.log" >&2; die "the build failed"; }
headrace=build/release/tools/headrace/headrace

# Runs headrace, quietly; on a failure shows what it said and stops.
quietly() {
    "$headrace" "$@" >"$folder/log" 2>&1 || { cat "$folder/log" >&2; die "failed: headrace $*"; }
}

for i in "${!presets[@]}"; do
    preset=${presets[i]} operator=${operators[i]}
    say "$preset: $operator"
    quietly bench linear_attention:fwd t256 h4 k64 --json "$folder/$preset.peaks.json"  # for the machine's peaks
    for direction in fwd bwd; do
        results=$folder/$preset.$direction
        flag=()
        [ $direction = fwd ] || flag=(--backward)
        echo "$direction: gen and run, $tokens tokens"
        quietly gen "$preset:$direction" "t$tokens" --out "$folder/in.safetensors"
        "$headrace" run "$operator" --in "$folder/in.safetensors" --out "$folder/out.safetensors" "${flag[@]}" \
            --repeat 5 --json >"$results.run.json" || die "headrace run failed on $preset"
        echo "$direction: check, $checked tokens"
        quietly check "$preset:$direction" b1 "t$checked" --json "$results.check.json"
    done
    rm -f "$folder"/*.safetensors
done

python3 scripts/demo_table.py "$folder" "$checked" "${presets[@]}"
