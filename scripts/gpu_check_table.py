#!/usr/bin/env python3
"""Prints the tables of scripts/gpu_check.sh from its lines of JSON: the stages, what failed, the times."""
import json
import pathlib
import sys


def table(header, rows):
    """Columns; all but the first flushed right."""
    rows = [header] + rows
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    for row in rows:
        cells = [row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
        print("  ".join(cells).rstrip())
    print()


def print_counts(lines):
    for name, stage in (("conformance", "conformance_done"), ("streams", "streams_done")):
        done = [line for line in lines if line["stage"] == stage]
        if done:
            runs, missed = sum(line["runs"] for line in done), sum(line["missed"] for line in done)
            print(f"{name}: {runs} runs, {missed} wrong")
    shares = [(line["share_of_bar"], line["problem"]) for line in lines if line["stage"] == "conformance"
              and line["ok"] and line.get("share_of_bar")]
    if shares:
        print(f"closest to its bar: {max(shares)[0]:.2f} of it in {max(shares)[1]}")
    print()


def print_failures(lines, most=20):
    wrong = [line for line in lines if line.get("ok") is False]
    for line in wrong[:most]:
        print(f"WRONG {line.get('check', line['stage'])}: {line['problem']}\n    {line.get('message', '')}")
    if len(wrong) > most:
        print(f"and {len(wrong) - most} more")
    if wrong:
        print()


def figure(value, digits=3):
    return "-" if value is None else f"{value:.{digits}f}"


def print_times(lines, means_something):
    peaks = [line for line in lines if line["stage"] == "peaks"]
    library = [line for line in lines if line["stage"] == "matmul"]
    rows = []
    peers = {(line["problem"], line["peer"]): line.get("device_ms_min") for line in lines if line["stage"] == "peer"}
    names = sorted({peer for _, peer in peers})
    for line in lines:
        if line["stage"] != "bench" or not line["ok"]:
            continue
        bound = max(line["bound_ms_bytes"], line["bound_ms_flop"])
        rows.append([line["problem"], line["implementation"], figure(line["device_ms_min"]),
                     figure(line["device_ms_median"]), figure(line["device_ms_tail"]), figure(bound),
                     f"{100 * bound / line['device_ms_min']:.1f} %", figure(line["call_us_min"], 1),
                     figure(line["call_us_median"], 1),
                     *(figure(peers.get((line["problem"], name))) for name in names)])
    if not rows:
        return
    if not means_something:
        print(f"{len(rows)} problems went through the benchmark; no GPU, so no times")
        return
    table(["problem", "implementation", "device ms", "median", "95 %", "bound", "share", "call us", "median", *names], rows)
    for line in peaks:
        print(f"measured beside it: copy {line['copy_gbs']:.0f} GB/s, mma.sync bf16 {line['bf16_gflops'] / 1e3:.0f} "
              f"TFLOP/s, fp32 {line['f32_gflops'] / 1e3:.1f} TFLOP/s, fp64 {line['f64_gflops'] / 1e3:.1f} TFLOP/s")
    for line in library:
        print(f"PyTorch's bf16 matrix product: {line['tflops']:.0f} TFLOP/s")
    print("bound: the larger of the least bytes over the copy and the useful work over the peak of the type; device: between "
          "events\naround queued calls; call: the host in one asynchronous call, a workspace given")


def main():
    path = pathlib.Path(sys.argv[1])
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    for line in lines:
        if line["stage"] == "device":
            print(f"{line['name']}, compute capability {line['capability']}, {line['multiprocessors']} multiprocessors")
    means_something = all(line.get("interpreter") is not True for line in lines if line["stage"] == "device")
    table(["stage", "outcome", "s"],
          [[line["name"], line["status"], str(line["seconds"])] for line in lines if line["stage"] == "stages"])
    print_counts(lines)
    print_failures(lines)
    print_times(lines, means_something)


if __name__ == "__main__":
    main()
