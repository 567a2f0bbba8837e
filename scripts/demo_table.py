#!/usr/bin/env python3
"""Prints the table of scripts/demo.sh from the JSON files that headrace run, check and bench wrote."""
import json
import pathlib
import sys

HEADER = ["layer", "operator", "forward", "backward", "tokens/s", "tokens/s", "share of limit", "worst error", "bar"]
BELOW = ["", "", "ms", "ms", "forward", "backward", "fwd    bwd", "rel-L2", "rel-L2"]


def load(path):
    return json.loads(path.read_text(encoding="utf-8"))


def row_of(folder, preset, peak):
    runs = [load(folder / f"{preset}.{direction}.run.json") for direction in ("fwd", "bwd")]
    checks = [load(folder / f"{preset}.{direction}.check.json") for direction in ("fwd", "bwd")]
    errors = [error for check in checks for result in check["results"] for error in result["errors"]
              if error["bar"] > 0]
    worst = max(errors, key=lambda error: error["error"] / error["bar"])
    shares = "  ".join(f"{100 * run['useful_gflops'] / peak:4.1f}%" for run in runs)
    return [preset, runs[0]["operator"], *(f"{run['ms_min']:.1f}" for run in runs),
            *(f"{run['tokens_per_second']:,.0f}" for run in runs), shares, f"{worst['error']:.1e} {worst['name']}",
            f"{worst['bar']:.1e}"]


def main():
    folder, checked, presets = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    # Measured before every layer; a machine that others use as well shows its true peak in its best spell only.
    benches = [load(folder / f"{preset}.peaks.json") for preset in presets]
    threads = benches[0]["peaks"][0]["threads"]
    peak = max(case["useful_flop"] / case["floor_ms_flop"] * 1e-6 for bench in benches for case in bench["cases"])
    rows = [HEADER, BELOW] + [row_of(folder, preset, peak) for preset in presets]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
    lines = ["  ".join(cell.ljust(width) if i < 2 else cell.rjust(width)
                       for i, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in rows]
    rule = "-" * max(map(len, lines))
    print("\n" + "\n".join(lines[:2] + [rule] + lines[2:] + [rule]))
    print(f"bf16 inputs; best of 5 calls on {threads} threads; "
          f"limit: best measured peak of bf16 or fp32 arithmetic, {peak:.0f} GFLOP/s.\n"
          f"Error: the output or gradient closest to its bar, against the oracle, on {checked} tokens of the layer.")


if __name__ == "__main__":
    main()
