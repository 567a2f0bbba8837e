#!/usr/bin/env python3
"""Times flash-linear-attention, where it is installed, on the problems that were timed, and a matrix product.

    gpu_peers.py RESULTS

RESULTS: the lines of JSON of scripts/gpu_check.sh, to which it adds. A problem that the peer does not take is named and
left out.
"""
import importlib
import json
import re
import statistics
import sys

import torch

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
OPERATORS = {"gated_delta_rule": "gated_delta_rule", "kda": "kda", "simple_gla": "simple_gla", "gla": "gla",
             "delta_rule": "delta_rule"}


def milliseconds(call, calls=20, seconds=0.5):
    """Times of one call between two events, after two that compile and tune."""
    for _ in range(2):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    while len(times) < 3 or (len(times) < calls and sum(times) < seconds * 1e3):
        torch.cuda.synchronize()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return times


def parse(text):
    """The sizes of a line that names nothing but operator, direction, sizes, dtype and varlen; None of others."""
    first, *words = text.split()
    operator, direction = first.split(":")
    line = {"operator": operator, "direction": direction, "b": 1, "t": 256, "h": 4, "k": 64, "dtype": torch.float32}
    for word in words:
        if size := re.fullmatch(r"(b|t|h|hv|k|v)(\d+)", word):
            line[size[1]] = int(size[2])
        elif word in DTYPES:
            line["dtype"] = DTYPES[word]
        elif word.startswith("varlen="):
            line["varlen"] = [int(offset) for offset in word.removeprefix("varlen=").split(",")]
            line["t"] = line["varlen"][-1]
        elif word != "cuda":
            return None
    line.setdefault("hv", line["h"])
    line.setdefault("v", line["k"])
    return line if direction in ("fwd", "bwd") and operator in OPERATORS else None


def chunk_call(line):
    """A call of the peer's chunk form; for bwd its backward alone, through the graph of one forward."""
    name = OPERATORS[line["operator"]]
    function = getattr(importlib.import_module(f"fla.ops.{name}"), f"chunk_{name}")
    B, T, H, HV, K, V = (line[size] for size in ("b", "t", "h", "hv", "k", "v"))
    backward = line["direction"] == "bwd"

    def normal(*sizes):
        return torch.randn(*sizes, device="cuda", dtype=line["dtype"])

    arguments = {"q": normal(B, T, H, K), "k": torch.nn.functional.normalize(normal(B, T, H, K), dim=-1),
                 "v": normal(B, T, HV, V)}
    if line["operator"] != "delta_rule":
        channel = (K,) if line["operator"] in ("gla", "kda") else ()
        arguments["g"] = torch.nn.functional.logsigmoid(torch.randn(B, T, HV, *channel, device="cuda") + 2)
        if line["operator"] == "gla":
            arguments["g"] = arguments["g"].to(line["dtype"])
    if "delta" in line["operator"] or line["operator"] == "kda":
        arguments["beta"] = torch.sigmoid(normal(B, T, HV))
    leaves = [x.requires_grad_(backward) for x in arguments.values()]
    if "varlen" in line:
        arguments["cu_seqlens"] = torch.tensor(line["varlen"], device="cuda")
    if not backward:
        return lambda: function(**arguments)
    o = function(**arguments)[0]
    d_o = torch.randn_like(o)
    return lambda: torch.autograd.grad(o, leaves, d_o, retain_graph=True)


def product_tflops(size=8192):
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2e-9 * size**3 / min(milliseconds(lambda: a @ b))


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        lines = [json.loads(text) for text in file]
    problems = [line["problem"] for line in lines if line["stage"] == "bench" and line["ok"]]
    with open(sys.argv[1], "a", encoding="utf-8") as results:

        def write(**line):
            results.write(json.dumps(line) + "\n")
            results.flush()

        write(stage="matmul", tflops=product_tflops())
        try:
            import fla
        except ImportError as error:
            print(f"matrix product timed; flash-linear-attention is not installed: {error}")
            return
        timed = 0
        for problem in problems:
            line = parse(problem)
            if line is None:
                continue
            try:
                times = milliseconds(chunk_call(line))
            except Exception as error:  # of the peer: whatever it raises is its answer
                print(f"{problem}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", flush=True)
                continue
            timed += 1
            write(stage="peer", peer=f"fla {fla.__version__}", problem=problem, device_ms_min=min(times),
                  device_ms_median=statistics.median(times))
            print(f"{problem}: {min(times):.3f} ms", flush=True)
            torch.cuda.empty_cache()
        print(f"matrix product and {timed} problems of flash-linear-attention {fla.__version__} timed")


if __name__ == "__main__":
    main()
