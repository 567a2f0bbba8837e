"""The cases of an inference: steps of decoding, short sequences, small heads and long sequences.

A case is a problem line, as `headrace bench` takes it; the lines of each group are also in problems/GROUP.txt.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, NamedTuple

import torch

from headrace.bench._training import inputs


class Case(NamedTuple):
    """One problem. A step changes a pool of states; a forward returns states, and starts from some in bf16."""

    operator: str
    direction: str
    B: int
    T: int
    H: int
    D: int
    threads: int = 2
    dtype: torch.dtype = torch.float32

    @property
    def line(self) -> str:
        """The problem line. bf16 is as in serving: q and k get unit length inside, a step computes its gates too."""
        sizes = ([f"b{self.B}"] if self.B > 1 else []) + [f"t{self.T} h{self.H} k{self.D}"]
        words = [f"{self.operator}:{self.direction}", *sizes] + (["bf16"] if self.is_bf16 else [])
        if not self.is_step:
            words.append("state=inout" if self.is_bf16 else "state=out")
        if self.is_raw:
            words.append("rawgate beta=sigmoid")
        return " ".join(words + (["l2norm"] if self.is_bf16 else []) + [f"threads={self.threads}"])

    @property
    def label(self) -> str:
        """The same for a reader, beside the name of its group."""
        sizes = f"B {self.B}" if self.is_step else f"T {self.T}"
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return f"{self.operator}  {sizes}  H {self.H}  D {self.D}{'  bf16' if self.is_bf16 else ''}  {threads}"

    @property
    def is_step(self) -> bool:
        return self.direction == "step"

    @property
    def is_bf16(self) -> bool:
        return self.dtype == torch.bfloat16

    @property
    def is_raw(self) -> bool:
        """Whether g and beta are pre-activations."""
        return self.is_step and self.is_bf16


def _steps(operator: str, *sizes: tuple, **more: Any) -> List[Case]:
    return [Case(operator, "step", B, 1, H, D, threads, **more) for B, H, D, threads in sizes]


def _forwards(operator: str, *sizes: tuple, **more: Any) -> List[Case]:
    return [Case(operator, "fwd", 1, T, H, D, **more) for T, H, D in sizes]


_BATCHES = ((1, 16, 128, 1), (1, 16, 128, 2), (8, 16, 128, 2), (32, 16, 128, 2))
_BF16 = {"dtype": torch.bfloat16}

CASES: Dict[str, List[Case]] = {
    "decode": [
        *_steps("gated_delta_rule", *_BATCHES, (1, 4, 128, 1), (1, 4, 128, 2), (1, 32, 128, 1), (1, 32, 128, 2),
                (1, 16, 64, 1), (1, 16, 64, 2), (1, 16, 256, 1), (1, 16, 256, 2)),
        *_steps("kda", *_BATCHES),
        *_steps("gla", *_BATCHES),
        *_steps("gated_delta_rule", (1, 16, 128, 1), (1, 16, 128, 2), (8, 16, 128, 2), (1, 32, 128, 2), **_BF16),
    ],
    "short": [
        *(case for operator in ("gated_delta_rule", "kda", "gla")
          for case in _forwards(operator, (1, 16, 128), (4, 16, 128), (8, 16, 128))),
        *_forwards("gated_delta_rule", (64, 4, 64)),
        *_forwards("gated_delta_rule", (16, 1, 64), threads=1),
        *_forwards("gated_delta_rule", (16, 1, 64)),
    ],
    "small": _forwards("gated_delta_rule", (4096, 16, 16), (4096, 16, 32), (4096, 16, 64)),
    "long": [
        *(case for operator in ("gated_delta_rule", "kda", "gla", "simple_gla")
          for case in _forwards(operator, (4096, 16, 128))),
        *_forwards("gated_delta_rule", (16384, 16, 128)),
        *_forwards("gated_delta_rule", (4096, 16, 128), **_BF16),
    ],
}


TITLES = {"decode": "a step of decoding", "short": "short sequences", "small": "small heads", "long": "long sequences"}


def tensors_of(case: Case) -> Dict[str, torch.Tensor]:
    """By name: q, k, v, g, beta where the rule has one, A_log and dt_bias of raw gates, the state in float32."""
    tensors = inputs(case.operator, case.T, case.H, case.D, B=case.B)
    draw = torch.Generator().manual_seed(1)
    if case.is_raw:
        tensors["g"], tensors["beta"] = torch.randn(2, case.B, case.T, case.H, generator=draw)
    for name in ("q", "k", "v", "beta", *(("g",) if case.is_raw else ())):
        if name in tensors:
            tensors[name] = tensors[name].to(case.dtype)
    if case.is_raw:
        tensors["A_log"], tensors["dt_bias"] = torch.randn(2, case.H, generator=draw)
    state = torch.randn(case.B, case.H, case.D, case.D, generator=draw) / math.sqrt(case.D)
    return {**tensors, "state": state}
