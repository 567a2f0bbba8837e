"""The serving form: states live in a pool that the call updates in place; no gradients."""

from __future__ import annotations

import torch

from headrace import _core
from headrace._arguments import options
from headrace.torch._library import check_tensors


def step_on_pool(op, tensors, rest, *, ssm_state_indices, inplace_final_state, num_accepted_tokens, out):
    """Runs `op` from the rows of the pool that ssm_state_indices names, and leaves the new states there.

    Returns (o, pool). Rows that no index names stay as they are, bit by bit.
    """
    *inputs, pool, cu_seqlens = tensors
    *arguments, state_v_first = rest
    check_tensors(("q", "ssm_state_indices", "num_accepted_tokens", "out"),
                  (inputs[0], ssm_state_indices, num_accepted_tokens, out), 1)
    if pool is None:
        raise ValueError("initial_state: expected the pool of states [rows, HV, K, V], got None")
    if inplace_final_state is False:
        raise ValueError("inplace_final_state: expected True with a pool of states, got False")
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*inputs, pool)):
        raise ValueError("ssm_state_indices: expected no gradients with a pool of states (use torch.no_grad), got "
                         "tensors that require them")
    q, v = inputs[0], inputs[2]
    if out is None:
        out = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    states = pool.transpose(-1, -2) if state_v_first and pool.dim() == 4 else pool
    inputs = [x if x is None else x.detach() for x in inputs]
    _core.run("step", op, inputs + [None, cu_seqlens], [out, None],
              [states.detach(), ssm_state_indices, num_accepted_tokens], options(*arguments))
    if not pool.is_inference():
        torch.autograd.graph.increment_version(pool)  # saved for another call's backward, it is not what it was
    return out, pool
