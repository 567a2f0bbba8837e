"""`python -m headrace.latency`: how steady the time of a decode step is beside busy neighbours.

Neighbours are loops of their own processes, at nice 0 or 19. Beside them, in fresh processes that have used PyTorch
(whose threads share the cores), steps of one token with the default number of threads and with one run in turns; then
training steps. Printed for each kind of neighbour: the median of the processes' medians, the 90th and 99th percentile
of the worst process, and the longest step, in microseconds; how often the 99th percentile of the default is above that
of one thread; the median training step. One thread, too, is preempted now and then: that is the floor.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Dict, List, NamedTuple, Optional, Sequence

from headrace._measuring import progress, seconds_of
from headrace._versions import require

require("headrace.latency", "torch")

import torch  # noqa: E402

import headrace.torch as ht  # noqa: E402

NEIGHBOURS = {"none": (0, 0), "1 at nice 19": (1, 19), "1 at nice 0": (1, 0), "2 at nice 19": (2, 19),
              "2 at nice 0": (2, 0)}

TURN = 50  # steps after each other, as a program decodes


class Process(NamedTuple):
    """What one process measured, seconds: steps with the default number of threads, with one, and training steps."""

    default: List[float]
    one: List[float]
    training: List[float]


def percentile(times: Sequence[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, int(share * len(times)))]


def measure(steps: int, heads: int, dim: int) -> Process:
    """In this process, which uses PyTorch first."""
    torch.randn(1 << 20).exp().sum()
    q, k, v = torch.randn(3, 1, 1, heads, dim)
    g, beta = -torch.rand(1, 1, heads), torch.rand(1, 1, heads)
    pool, rows = torch.zeros(1, heads, dim, dim), torch.tensor([0])
    threads = torch.get_num_threads()

    def step() -> None:
        ht.fused_recurrent_gated_delta_rule(q, k, v, g=g, beta=beta, initial_state=pool, ssm_state_indices=rows,
                                            use_qk_l2norm_in_kernel=True)

    def timed(count: int) -> List[float]:
        torch.set_num_threads(count)
        return [seconds_of(step) for _ in range(TURN)]

    with torch.no_grad():
        for _ in range(20):
            step()
        turns = [(timed(threads), timed(1)) for _ in range(max(1, steps // TURN))]
    torch.set_num_threads(threads)
    tokens = 1024
    long_q, long_k, long_v = (torch.randn(1, tokens, heads, dim).requires_grad_() for _ in range(3))
    long_g, long_beta = -torch.rand(1, tokens, heads), torch.rand(1, tokens, heads)
    d_o = torch.randn(1, tokens, heads, dim)

    def train() -> None:
        o, _ = ht.chunk_gated_delta_rule(long_q, long_k, long_v, g=long_g, beta=long_beta, use_qk_l2norm_in_kernel=True)
        torch.autograd.grad(o, (long_q, long_k, long_v), d_o)

    train()
    default, one = ([time for turn in of for time in turn] for of in zip(*turns))
    return Process(default, one, [seconds_of(train) for _ in range(15)])


def in_fresh_process(a: argparse.Namespace) -> Process:
    command = [sys.executable, "-m", "headrace.latency", "--worker", "--steps", str(a.steps), "--heads", str(a.heads),
               "--dim", str(a.dim)]
    return Process(**json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))


def beside(count: int, nice: int, a: argparse.Namespace) -> List[Process]:
    busy = ["nice", "-n", str(nice), sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(busy) for _ in range(count)]
    try:
        time.sleep(0.2)
        return [in_fresh_process(a) for _ in range(a.processes)]
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


def row(name: str, processes: Sequence[Process]) -> str:
    cells = [f"{name:14}"]
    for times in ([p.default for p in processes], [p.one for p in processes]):
        cells += [f"{1e6 * value:8.0f}" for value in (statistics.median(map(statistics.median, times)),
                                                      max(percentile(t, 0.9) for t in times),
                                                      max(percentile(t, 0.99) for t in times), max(map(max, times)))]
    worse = sum(percentile(p.default, 0.99) > 1.2 * percentile(p.one, 0.99) for p in processes)
    training = statistics.median(statistics.median(p.training) for p in processes)
    cells += [f"{worse:3} of {len(processes)}", f"{1e3 * training:8.1f}"]
    return " | ".join(cells)


def parse(arguments: Optional[Sequence[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m headrace.latency", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=10, metavar="N", help="beside each kind of neighbour [10]")
    parser.add_argument("--steps", type=int, default=1000, metavar="N",
                        help="of each process, with either number of threads [1000]")
    parser.add_argument("--heads", type=int, default=16, metavar="H", help="[16]")
    parser.add_argument("--dim", type=int, default=128, metavar="D", help="K and V [128]")
    parser.add_argument("--json", metavar="FILE", help="keep every time, seconds, in this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    a = parser.parse_args(arguments)
    for name in ("processes", "steps", "heads", "dim"):
        if getattr(a, name) < 1:
            parser.error(f"--{name}: expected a positive number, got {getattr(a, name)}")
    return a


def main(arguments: Optional[Sequence[str]] = None) -> Dict[str, List[Process]]:
    a = parse(arguments)
    if a.worker:
        print(json.dumps(measure(a.steps, a.heads, a.dim)._asdict()))
        return {}
    print(f"steps of gated_delta_rule, B 1, H {a.heads}, D {a.dim}, float32, {torch.get_num_threads()} threads and "
          "one: microseconds")
    print("neighbours     |   median |      p90 |      p99 |  longest | one: median |   p90 |      p99 |  longest | "
          "p99 above 1.2 x one | training ms")
    results = {}
    for name, (count, nice) in NEIGHBOURS.items():
        progress(f"beside {name}")
        results[name] = beside(count, nice, a)
        progress("")
        print(row(name, results[name]), flush=True)
    if a.json:
        with open(a.json, "w") as file:
            json.dump({name: [p._asdict() for p in processes] for name, processes in results.items()}, file)
    return results


if __name__ == "__main__":
    main()
