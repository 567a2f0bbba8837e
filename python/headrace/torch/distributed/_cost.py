"""Which strategy a call takes where the user leaves it open: the least of what a model of three times says.

A token costs a rank F = 4 K V + C (K + V) operations for each value head of the additive rule and 6 K V + 2 C (K + V)
of the delta rule, C = 64; a backward takes 3 F, summaries take shares of F, on a GPU no less than a forward. Threads
are taken to make 5e10 operations in a second, a GPU 1e14, of tensors of more than 16 bits 1e13, and a link of unknown
speed to carry 8 Gbit; to pack, send and unpack a byte takes 2 ns beside that. A ring of n slots with G groups of heads
waits (n - 1) / G of its own time.
"""

from __future__ import annotations

from math import prod
from typing import Optional

from torch import Tensor

from headrace.torch.distributed._local import DELTA, TOKENS, Call

_OPERATIONS, _GPU_OPERATIONS, _WIDE_GPU_OPERATIONS, _GBITS = 5e10, 1e14, 1e13, 8.0  # in a second
_BYTE, _MESSAGE = 2e-9, 2e-4  # seconds


def choose(call: Call, ranks: int, tokens: int, chain: int, threads: int, link_gbits: Optional[float]) -> str:
    """The same on all ranks. tokens, threads: of a rank; chain: how many slots a state passes, at most."""
    operations, byte = _operations(call["q"], threads), _BYTE + 8e-9 / (link_gbits or _GBITS)
    H, HV, K, V = call.sizes
    is_delta = call.op in DELTA
    per_token = (6 * K * V + 128 * (K + V)) if is_delta else (4 * K * V + 64 * (K + V))
    own = 4 * tokens * HV * per_token / operations  # forward and backward
    state = 4 * HV * K * V * byte
    times = {"ring": own * (1 + chain / min(ranks, H)) + 2 * chain * (state + _MESSAGE)}
    if may_summarise(call):
        share = (1.19 + 1.0) / 4 if is_delta else 0.8 / 4
        if call["q"].device.type == "cuda":
            share = 2.5 / 4
        fold = chain * HV * K * K * V * 4 / operations if is_delta else 0
        times["summary"] = own * (1 + share * (chain > 0)) + fold + 2 * chain * ((1 + is_delta) * state + _MESSAGE)
    if H % ranks == 0:
        inputs = (call.tensors[name] for name in TOKENS)
        moved = tokens * sum(prod(x.shape[2:]) * x.element_size() for x in inputs if x is not None)
        times["heads"] = own + 4 * moved * (ranks - 1) / ranks * byte + 4 * ranks * _MESSAGE
    return min(times, key=lambda name: times[name])


def _operations(q: Tensor, threads: int) -> float:
    if q.device.type != "cuda":
        return _OPERATIONS * threads
    return _GPU_OPERATIONS if q.element_size() == 2 else _WIDE_GPU_OPERATIONS


def may_summarise(call: Call) -> bool:
    """Whether M is a matrix for each head alone: gates and betas of value channels make one for each channel."""
    beta = call.tensors["beta"]
    return call.tensors["gv"] is None and (beta is None or beta.dim() == 3)
