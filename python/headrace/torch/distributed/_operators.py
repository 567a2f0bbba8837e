"""headrace::cp_forward and headrace::cp_backward: a call of an operator on sequences that are cut over ranks.

They take the context as a tensor, its handle: graphs that torch.compile makes serve other batches too. `entered` and
`kept` are sizes of what the backward needs beside the inputs: states that entered the rank's slots; of summaries other
ranks' M, of rings what is known about the roundings in the states.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from headrace import _core
from headrace._arguments import DIFFERENTIABLE
from headrace.torch import _vmap
from headrace.torch._library import Function, k_first, like, once, placed, register
from headrace.torch.distributed import _heads, _local, _ring, _summary
from headrace.torch.distributed._context import CPContext, context_of
from headrace.torch.distributed._exchange import Conversation
from headrace.torch.distributed._local import Call, Gradients

Maybe = Optional[Tensor]

_TENSORS = len(DIFFERENTIABLE)


def _fields(context: CPContext, call: Call, strategy: str, extra: Any) -> Dict[str, Any]:
    """What the ranks of one call have to have in common."""
    given = {name: (x.dtype, x.shape[2:] if name in _local.TOKENS else x.shape[1:] if name == "initial_state" else
                    x.shape) for name, x in call.tensors.items() if x is not None}
    return {"cp_context": context._digest, "tensors": sorted(given), "dtypes": {n: d for n, (d, _) in given.items()},
            "shapes": {n: tuple(s) for n, (_, s) in given.items()}, "options": tuple(call.rest),
            "strategy": strategy, "gradients": extra}


def _state_shape(call_v: Tensor, q: Tensor, count: Any, state_v_first: bool) -> Tuple[Any, ...]:
    K, (HV, V) = q.shape[3], call_v.shape[2:]
    return (count, HV, V, K) if state_v_first else (count, HV, K, V)


def _results(q: Tensor, v: Tensor, cu_seqlens: Tensor, final_state: bool, state_v_first: bool, entered: int,
             kept: List[int], strategy: str) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """o, final state, the states that entered, and what else the backward needs: without values.

    A ring hands states on in float64, which holds all that kernels may know of them, and keeps what they know beside.
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    count = cu_seqlens.shape[0] - 1
    if strategy == "ring":
        kept = [*kept, v.shape[2], _core.roundings_size(int(q.shape[3]))]
    state = q.new_empty(_state_shape(v, q, count, state_v_first) if final_state else (0,), dtype=dtype)
    return (q.new_empty(v.shape), state,
            q.new_empty(_state_shape(v, q, entered, False), dtype=torch.float64 if strategy == "ring" else dtype),
            q.new_empty(kept, dtype=torch.float32 if strategy == "ring" else dtype))


def _forward(
    op: str, q: Tensor, k: Tensor, v: Tensor, p: Maybe, g: Maybe, gv: Maybe, g_gamma: Maybe, beta: Maybe, A_log: Maybe,
    dt_bias: Maybe, initial_state: Maybe, handle: Tensor, cu_seqlens: Tensor, final_state: bool, recorded: bool,
    scale: Optional[float], reverse: bool, qk_l2norm: bool, gate_form: str, lower_bound: float, beta_form: str,
    chunk: int, state_v_first: bool, strategy: str, exchange: str, entered: int, kept: List[int],
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    context = context_of(handle)
    layout = context._layout
    with Conversation(context._ranks, f"{op} forward") as talk:
        call = Call.of(op, (q, k, v, p, g, gv, g_gamma, beta, A_log, dt_bias, initial_state),
                     (scale, reverse, qk_l2norm, gate_form, lower_bound, beta_form, chunk, state_v_first), layout)
        _local.check(call, layout)
        talk.agree(_fields(context, call, strategy, (final_state, recorded)))
        o, state, states, transitions = _results(q, v, cu_seqlens, final_state, state_v_first, entered, kept, strategy)
        after = k_first(state.zero_(), state_v_first) if final_state else None
        if strategy == "heads":
            _heads.forward(talk, call, layout, o, after)
        elif strategy == "ring":
            _ring.forward(talk, call, layout, o, after, states, transitions)
        else:
            transitions = _summary.forward(talk, call, layout, exchange, o, after, states)
    return o, state, states, transitions


def _forward_shapes(op, q, k, v, p, g, gv, g_gamma, beta, A_log, dt_bias, initial_state, handle, cu_seqlens,
                    final_state, recorded, scale, reverse, qk_l2norm, gate_form, lower_bound, beta_form, chunk,
                    state_v_first, strategy, exchange, entered, kept):
    return _results(q, v, cu_seqlens, final_state, state_v_first, entered, kept, strategy)


def _backward(
    op: str, q: Tensor, k: Tensor, v: Tensor, p: Maybe, g: Maybe, gv: Maybe, g_gamma: Maybe, beta: Maybe, A_log: Maybe,
    dt_bias: Maybe, initial_state: Maybe, handle: Tensor, entered: Tensor, kept: Tensor, d_o: Maybe,
    d_final_state: Maybe, wanted: List[int], final_state: bool, scale: Optional[float], reverse: bool, qk_l2norm: bool,
    gate_form: str, lower_bound: float, beta_form: str, chunk: int, state_v_first: bool, strategy: str, exchange: str,
) -> List[Tensor]:
    context = context_of(handle)
    layout = context._layout
    with Conversation(context._ranks, f"{op} backward") as talk:
        call = Call.of(op, (q, k, v, p, g, gv, g_gamma, beta, A_log, dt_bias, initial_state),
                     (scale, reverse, qk_l2norm, gate_form, lower_bound, beta_form, chunk, state_v_first), layout)
        d_after = k_first(d_final_state, state_v_first)
        if strategy == "heads":
            talk.agree(_fields(context, call, strategy, (final_state, wanted)))
            d_o = torch.zeros_like(v) if d_o is None else d_o
            d_after = call.new_states(layout.pieces) if final_state and d_after is None else d_after
            results = _heads.backward(talk, call, layout, d_o, d_after, wanted)
        else:
            talk.agree(_fields(context, call, strategy, final_state))
            gradients = Gradients(call, wanted)
            if strategy == "ring":
                _ring.backward(talk, call, layout, entered, kept, d_o, d_after, gradients)
            else:
                _summary.backward(talk, call, layout, exchange, entered, kept, d_o, d_after, gradients)
            results = gradients.results()
    return results


def _backward_shapes(op, q, k, v, p, g, gv, g_gamma, beta, A_log, dt_bias, initial_state, handle, entered, kept, d_o,
                     d_final_state, wanted, *rest):
    return like([q, k, v, p, g, gv, g_gamma, beta, A_log, dt_bias, initial_state], wanted)


class _Across(Function):
    """The derivative of cp_forward; `run` computes it."""

    @staticmethod
    def forward(ctx, run, op, *arguments):
        tensors, (handle, cu_seqlens, final_state, _), rest = (
            arguments[:_TENSORS], arguments[_TENSORS : _TENSORS + 4], arguments[_TENSORS + 4 :])
        o, state, entered, kept = run(op, *arguments)
        ctx.op, ctx.final_state, ctx.rest = op, final_state, rest[:-2]
        ctx.save_for_backward(*tensors, handle, entered, kept)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(entered, kept, *(() if final_state else (state,)))
        return o, state, entered, kept

    @staticmethod
    def backward(ctx, d_o, d_final_state, *_):
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[2 : _TENSORS + 2]) if needed]
        gradients = torch.ops.headrace.cp_backward(
            ctx.op, *ctx.saved_tensors, d_o, d_final_state if ctx.final_state else None, wanted, ctx.final_state,
            *ctx.rest)
        return (None, None, *placed(gradients, wanted, _TENSORS + 4 + len(ctx.rest) + 2))


def _next_forward(*arguments):
    return Function.run("cp_forward", *arguments)


def _forward_with_autograd(op, *arguments):
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arguments[:_TENSORS]):
        return _Across.record(_next_forward, op, *arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.headrace.cp_forward(op, *arguments)


_refused = _vmap.refused("cp_context: expected no vmap over a call whose sequences are cut over ranks")
register("cp_forward", _forward, _forward_shapes, _forward_with_autograd, _refused)
register("cp_backward", _backward, _backward_shapes, once("cp_backward"), _refused)
