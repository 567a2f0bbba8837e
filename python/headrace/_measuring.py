"""What the measuring programs share: contenders in turns, memory that is reused, a line of progress."""

from __future__ import annotations

import ctypes
import math
import sys
import time
from typing import Callable, Dict, List, Mapping, TypeVar

Result = TypeVar("Result")

MEMORY = ("reused", "fresh")
MEMORY_HELP = ("reused: what is freed stays with the process; fresh: as the C library does it, so that every call pays "
               "for new pages of its large tensors")

PAUSE = 0.1  # seconds


def _reuse_memory() -> bool:
    """Asks the C library to keep what is freed; whether it does."""
    mmap_max, trim_threshold = -4, -1  # M_MMAP_MAX, M_TRIM_THRESHOLD of glibc's malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(mmap_max, 0)) and bool(mallopt(trim_threshold, -1))


def keep_memory(memory: str) -> str:
    """Sets what `memory`, one of MEMORY, asks for; what is true afterwards, in words."""
    return "memory reused from call to call" if memory == "reused" and _reuse_memory() else "memory fresh in every call"


def progress(text: str) -> None:
    """Replaces the line of progress on a terminal; elsewhere nothing is written."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def seconds_of(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def turn_of(call: Callable[[], object], seconds: float) -> List[float]:
    """The seconds of calls right after each other, for `seconds`; one before them is not counted."""
    call()
    times: List[float] = []
    begin = time.perf_counter()
    while not times or time.perf_counter() - begin < seconds:
        times.append(seconds_of(call))
    return times


def in_turns(
    calls: Mapping[str, Callable[[], Result]], seconds: float = 0.0, rounds: int = 3, title: str = "",
    later: float = 0.0,
) -> Dict[str, List[Result]]:
    """What the calls return, by name: rounds in which each of them runs once, after one that is not counted.

    At least `rounds`, and for at least `seconds` of each contender. A pause before each call, because what a call
    leaves to other threads (JAX frees its buffers there, those of PyTorch and onnxruntime spin) would be counted in the
    next. The line of progress says `title` and the time left, with the seconds that are needed `later`.
    """
    title = f"{title}: " if title else ""
    for name, call in calls.items():
        progress(f"{title}warming up {name}")
        call()
    results: Dict[str, List[Result]] = {name: [] for name in calls}
    begin = time.perf_counter()
    taken, passed = 0, 0.0
    while taken < rounds or passed < seconds * len(calls):
        left = max(seconds * len(calls) - passed, passed / taken * (rounds - taken) if taken else 0.0)
        for name, call in calls.items():
            progress(f"{title}round {taken + 1}, {name}, {math.ceil(left + later)} s left")
            time.sleep(PAUSE)
            results[name].append(call())
        taken, passed = taken + 1, time.perf_counter() - begin
    progress("")
    return results
