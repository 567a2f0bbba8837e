"""What cutting sequences over ranks costs: CPU seconds and bytes measured here, times on other links modelled.

    python -m headrace.torch.distributed --op gated_delta_rule --tokens 16384 --ranks 4

Ranks are processes of this machine with one thread each. Their CPU seconds do not depend on how many cores there are;
the whole problem in one process is measured by all of them at once, too, so that neighbours cost the same. How long
ranks would take side by side is a model: the slowest rank's CPU seconds, a ring's wait for the ranks before it, and the
bytes that the busiest rank sends, at the speed of the link.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from datetime import timedelta
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

import headrace.torch as api
from headrace.torch.distributed import build_cp_context, shard, traffic

_OPERATORS: Dict[str, Tuple[Callable[..., Any], Tuple[str, ...]]] = {
    "linear_attention": (api.chunk_simple_gla, ()),
    "simple_gla": (api.chunk_simple_gla, ("g",)),
    "gla": (api.chunk_gla, ("gk",)),
    "delta_rule": (api.chunk_delta_rule, ("beta",)),
    "gated_delta_rule": (api.chunk_gated_delta_rule, ("g", "beta")),
    "kda": (api.chunk_kda, ("gk", "beta")),
}
_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
_STRATEGIES = ("summary", "ring", "heads")
_LINKS = (1, 10, 100, 400)  # Gbit/s


class Measured(NamedTuple):
    """Of one rank: the least CPU seconds of forward and backward, and the bytes it sent in them."""

    seconds: float
    bytes: int


def _inputs(options: argparse.Namespace, tokens: int) -> Dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    H, D, dtype = options.heads, options.head_dim, _DTYPES[options.dtype]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    keys = torch.nn.functional.normalize(normal(1, tokens, H, D), dim=-1)
    tensors = {"q": normal(1, tokens, H, D).to(dtype), "k": keys.to(dtype), "v": normal(1, tokens, H, D).to(dtype)}
    wanted = _OPERATORS[options.op][1]
    if "g" in wanted:
        tensors["g"] = -0.1 * torch.rand((1, tokens, H), generator=generator)
    if "gk" in wanted:
        tensors["g"] = -0.1 * torch.rand((1, tokens, H, D), generator=generator)
    if "beta" in wanted:
        tensors["beta"] = torch.rand((1, tokens, H), generator=generator)
    return tensors


def _measure(options: argparse.Namespace, tensors: Dict[str, Tensor], **context: Any) -> Measured:
    """One forward and backward."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    d_o = torch.ones_like(leaves["v"])
    begin, before = time.process_time(), traffic()
    o, _ = _OPERATORS[options.op][0](**leaves, **context)
    torch.autograd.grad(o, list(leaves.values()), d_o)
    return Measured(time.process_time() - begin, traffic().payload_bytes - before.payload_bytes)


def _run_rank(rank: int, port: int, options: argparse.Namespace, pipe: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, options.ranks + 1, False, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks, timeout=timedelta(seconds=600))
    group = dist.group.WORLD
    assert group is not None
    whole = _inputs(options, options.tokens)
    calls: Dict[str, Tuple[Dict[str, Tensor], Dict[str, Any]]] = {"one process": (whole, {})}
    for strategy in _STRATEGIES:
        if strategy != "heads" or options.heads % options.ranks == 0:
            context = build_cp_context(torch.tensor([0, options.tokens]), group, strategy=strategy)
            calls[strategy] = {name: shard(x, context) for name, x in whole.items()}, {"cp_context": context}
    results: Dict[str, Measured] = {}
    for turn in range(options.repeats + 1):
        for name, (tensors, arguments) in calls.items():
            dist.barrier()
            if name == "one process" and rank != 0:
                continue
            measured = _measure(options, tensors, **arguments)
            if turn > 0:  # the first warms up
                results[name] = min(measured, results.get(name, measured))
    pipe.send(results)
    dist.barrier()
    dist.destroy_process_group()


def measure(options: argparse.Namespace) -> List[Dict[str, Measured]]:
    """What every rank measured, by strategy, and of the whole in one process."""
    store = dist.TCPStore("127.0.0.1", 0, options.ranks + 1, True, wait_for_workers=False)
    methods = multiprocessing.get_context("spawn")
    pipes = [methods.Pipe() for _ in range(options.ranks)]
    processes = [methods.Process(target=_run_rank, args=(rank, store.port, options, theirs), daemon=True)
                 for rank, (_, theirs) in enumerate(pipes)]
    for process in processes:
        process.start()
    results = []
    try:
        for (mine, _), process in zip(pipes, processes):
            while not mine.poll(1):
                if not process.is_alive():
                    raise RuntimeError(f"a rank ended with exit code {process.exitcode}")
            results.append(mine.recv())
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.kill()
    return results


def table(results: List[Dict[str, Measured]], options: argparse.Namespace) -> List[str]:
    """Lines to print: measured columns, then a model of the time on links of several speeds."""
    one, ranks = results[0]["one process"].seconds, len(results)
    groups = min(ranks, options.heads)
    lines = [f"{options.op}, T {options.tokens}, {options.heads} heads of {options.head_dim} x {options.head_dim}, "
             f"{options.dtype}, forward and backward on {ranks} ranks of one thread",
             "",
             "          |            measured             |     model: times faster than one process, links of",
             "strategy  | CPU s  one / sum   MiB sent     | " + "".join(f"{link:>7} Gbit/s" for link in options.link)]
    lines.append(f"{'one process':<12}{one:7.3f}")
    for strategy in _STRATEGIES:
        if strategy not in results[0]:
            lines.append(f"{strategy:<12}needs heads that the ranks divide")
            continue
        mine = [result[strategy] for result in results]
        total, slowest, sent = sum(m.seconds for m in mine), max(m.seconds for m in mine), max(m.bytes for m in mine)
        wait = slowest * (ranks - 1) / groups if strategy == "ring" else 0.0
        modelled = [one / (slowest + wait + sent * 8 / (link * 1e9)) for link in options.link]
        lines.append(f"{strategy:<12}{total:7.3f}{one / total:11.2f}{sent / 2**20:11.2f}       "
                     + "".join(f"{times:14.2f}" for times in modelled))
    lines += ["",
              "CPU s: seconds of CPU time, of all ranks together. MiB sent: by the busiest rank. The model adds to the",
              "slowest rank's CPU time what a ring waits for the ranks before it, and its bytes at the link's speed."]
    return lines


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
    return value


def main(arguments: Optional[List[str]] = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m headrace.torch.distributed", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=sorted(_OPERATORS), default="gated_delta_rule")
    parser.add_argument("--tokens", type=_positive, default=16384, metavar="T", help="of the one sequence [16384]")
    parser.add_argument("--heads", type=_positive, default=8, metavar="H", help="[8]")
    parser.add_argument("--head-dim", type=_positive, default=128, metavar="D", help="of keys and values [128]")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="bf16", help="[bf16]")
    parser.add_argument("--ranks", type=_positive, default=4, metavar="P", help="processes [4]")
    parser.add_argument("--repeats", type=_positive, default=5, metavar="N",
                        help="turns of all, of which the least counts [5]")
    parser.add_argument("--link", type=_positive, nargs="+", default=list(_LINKS), metavar="GBITS",
                        help="speeds to model [1 10 100 400]")
    options = parser.parse_args(arguments)
    print("\n".join(table(measure(options), options)))
