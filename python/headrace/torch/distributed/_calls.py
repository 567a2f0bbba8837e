"""What the functions of headrace.torch do with a context: is it one, which strategy runs, who hears of an error."""

from __future__ import annotations

from typing import Any, Callable, NoReturn, Optional, Sequence, Tuple

import torch
from torch import Tensor

from headrace.torch.distributed import _convolution, _cost, _summary
from headrace.torch.distributed._context import CPContext
from headrace.torch.distributed._exchange import Conversation
from headrace.torch.distributed._fla import converted
from headrace.torch.distributed._local import Call

Maybe = Optional[Tensor]


def accepted_any(cp_context: Any) -> CPContext:
    return cp_context if isinstance(cp_context, CPContext) else converted(cp_context)


def accepted(cp_context: Any, **others: Any) -> Tuple[Optional[CPContext], Maybe]:
    """(the context, None), or (None, offsets) where one rank has all tokens. `others` may not be given beside it."""
    context = accepted_any(cp_context)
    for name, x in others.items():
        if x is not None:
            fail(context, "cp_context", ValueError(
                f"{name}: expected None with a cp_context, which has the offsets of the batch, got it too"))
    return (None, context.cu_seqlens) if context._size == 1 else (context, None)


def fail(context: CPContext, name: str, error: Exception) -> NoReturn:
    """Raises the error on all ranks: the others are in a call with the same context, and hear of it."""
    if context._size > 1:
        with Conversation(context._ranks, name):
            raise error
    raise error


def call(context: CPContext, op: str, prepare: Callable, given: tuple) -> Tuple[Tensor, Maybe]:
    """(o, final state or None) of the call that prepare(*given) describes."""
    o_dtype, final_state, arguments = _guarded(context, f"{op} forward", lambda: _prepared(context, op, prepare, given))
    o, state, _, _ = torch.ops.headrace.cp_forward(*arguments)
    return o if o.dtype == o_dtype else o.to(o_dtype), state if final_state else None


def _guarded(context: CPContext, name: str, prepare: Callable[[], Any]) -> Any:
    """prepare(), whose error is raised on all ranks; in a trace by torch.compile, which all ranks make, on each."""
    if torch.compiler.is_compiling():
        return prepare()
    try:
        return prepare()
    except Exception as error:
        fail(context, name, error)


def _prepared(context: CPContext, op: str, prepare: Callable, given: tuple) -> tuple:
    _, tensors, o_dtype, rest, final_state = prepare(*given)
    return o_dtype, final_state, _arguments(context, op, tensors[:-1], rest, final_state)


def _arguments(context: CPContext, op: str, tensors: Sequence[Maybe], rest: Sequence[Any], final_state: bool) -> tuple:
    """Of headrace::cp_forward, from tensors in the order of DIFFERENTIABLE and options as Call.of takes them."""
    described = Call.of(op, tensors, rest)
    strategy, exchange = context.strategy, context.exchange
    if strategy == "auto":
        strategy = _cost.choose(described, context._size, context._longest, context._chain, context.threads,
                                context.link_gbits)
    if strategy == "summary" and not _cost.may_summarise(described):
        raise ValueError("strategy: expected 'ring', 'heads' or 'auto' with gv or a beta of value channels, got "
                         "'summary'")
    if exchange == "auto":
        exchange = "all_gather" if context._size <= 8 else "doubling"
    entered, kept = 0 if strategy == "heads" else context._entered[described.reverse], [0]
    if strategy == "summary":
        kept = _summary.kept_shape(described, context._kept[exchange][described.reverse])
    elif strategy == "ring":
        kept = [entered + context._entered[not described.reverse]]  # what enters against the order, leaves in it
    recorded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    return (op, *tensors, context._handle, context.cu_seqlens, final_state, recorded, *rest, strategy, exchange,
            entered, kept)


def convolve(context: CPContext, prepare: Callable[[], tuple]) -> Tuple[Tensor, Tensor]:
    """(y, final state) of the short convolution.

    prepare() gives x, weight, bias, initial_state, None, whether there is a final state, and the activation.
    """
    *tensors, _, final_state, activation = _guarded(context, "short_convolution forward", prepare)
    recorded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    y, state, _ = torch.ops.headrace.cp_convolution(
        *tensors, context._handle, context.cu_seqlens, final_state, recorded, activation, context._entered[False])
    return y, state
