"""The serving form: states live in a pool, which the custom operator headrace::step updates in place; no gradients."""

from __future__ import annotations

import re
from typing import Callable, Optional

import torch
from torch import Tensor

from headrace import _core
from headrace._arguments import options
from headrace.torch import _vmap
from headrace.torch._library import check_tensors, empty_like, k_first, mark_written, register, without_gradients

Maybe = Optional[Tensor]

# The library's names of arguments, as users of this form know them.
_NAMES = {"pool.states": "initial_state", "pool.indices": "ssm_state_indices",
          "pool.num_accepted_tokens": "num_accepted_tokens", "o": "out"}


def renamed(error: ValueError) -> ValueError:
    """A step's error in the words of this form."""
    return ValueError(re.sub(r"pool\.\w+|\bo\b", lambda found: _NAMES[found[0]], str(error)))


def step(
    op: str, q: Tensor, k: Tensor, v: Tensor, p: Maybe, g: Maybe, gv: Maybe, g_gamma: Maybe, beta: Maybe, A_log: Maybe,
    dt_bias: Maybe, pool: Tensor, cu_seqlens: Maybe, ssm_state_indices: Maybe, num_accepted_tokens: Maybe, out: Tensor,
    scale: Optional[float], reverse: bool, qk_l2norm: bool, gate_form: str, lower_bound: float, beta_form: str,
    chunk: int, state_v_first: bool,
) -> None:
    inputs = [q, k, v, p, g, gv, g_gamma, beta, A_log, dt_bias, None, cu_seqlens]
    states = [k_first(pool, state_v_first), ssm_state_indices, num_accepted_tokens]
    try:
        _core.run("step", op, inputs, [out, None], states,
                  options(scale, reverse, qk_l2norm, gate_form, lower_bound, beta_form, chunk))
    except ValueError as error:
        raise renamed(error) from None


# `written`: the places of pool and out
register("step", step, lambda *arguments: None,
         without_gradients("step", ValueError, "ssm_state_indices: expected no gradients with a pool of states (use "
                           "torch.no_grad), got tensors that require them", written=(11, 15)),
         _vmap.refused("ssm_state_indices: expected no vmap over a pool of states, which changes in place and whose "
                       "rows are a batch already"),
         mutates=("pool", "out"))


def step_on_pool(way, op, tensors, rest, ssm_state_indices, num_accepted_tokens, out):
    """Runs `op` from the rows of the pool that ssm_state_indices names, and leaves the new states there.

    Returns (o, pool). Rows that no index names stay as they are, bit by bit.
    """
    q, v, pool = tensors[0], tensors[2], tensors[-2]
    more = (ssm_state_indices, num_accepted_tokens, out)
    straight = way is False and _core.plain((q, *more), 1, torch.is_grad_enabled()) is False
    if not straight:
        check_tensors(("q", "ssm_state_indices", "num_accepted_tokens", "out"), (q, *more), 1)
    if pool is None:
        raise ValueError("initial_state: expected the pool of states [rows, HV, K, V], got None")
    written = (pool,) if out is None else (pool, out)
    if out is None:
        out = empty_like(v)
    run: Callable = step if straight else torch.ops.headrace.step
    run(op, *tensors, ssm_state_indices, num_accepted_tokens, out, *rest)
    if straight:  # else autograd's kernel says so
        mark_written(written)
    return out, pool
