"""Whole tensors from what the ranks hold of them, and back: shard, unshard, gather_final_states.

Gradients are those of the sum of all ranks' losses, as everywhere here: where ranks compute the same loss of a whole
tensor, each token's gradient comes as many times.
"""

from __future__ import annotations

from typing import Callable, Tuple

import torch
from torch import Tensor

from headrace._arguments import flag, integer
from headrace.torch import _vmap
from headrace.torch._library import Function, register
from headrace.torch.distributed._calls import accepted_any, fail
from headrace.torch.distributed._context import CPContext, context_of
from headrace.torch.distributed._exchange import Conversation


def _rows(context: CPContext, kind: str, rank: int) -> Tuple[Tensor, Tensor]:
    """(rows of the rank's tensor, the same rows of the whole one): tokens, or states where sequences begin or end."""
    layout = context._layout
    if kind == "tokens":
        places = layout.places(rank)
        return torch.arange(len(places)), torch.from_numpy(places)
    pieces, sequences = layout.sequences_of(rank, kind == "begins")
    return torch.from_numpy(pieces), torch.from_numpy(sequences)


def _gather(x: Tensor, handle: Tensor, kind: str, dim: int, count: int) -> Tensor:
    """x of every rank at its places of one tensor, the same on all ranks; `count` rows along dim."""
    context = context_of(handle)
    with Conversation(context._ranks, f"gather of {kind}") as talk:
        rows = x.movedim(dim, 0)
        talk.agree({"cp_context": context._digest, "dtypes": x.dtype, "shapes": tuple(rows.shape[1:]), "dim": dim})
        mine, places = _rows(context, kind, context._ranks.rank)
        whole = rows.new_zeros((count, *rows.shape[1:]))
        whole[places] = rows[mine]
        for rank in talk.others:
            talk.send(rank, (0,), rows[mine])
        for rank in talk.others:
            _, places = _rows(context, kind, rank)
            part = rows.new_empty((len(places), *rows.shape[1:]))
            talk.receive(rank, (0,), part)
            whole[places] = part
    return whole.movedim(0, dim).contiguous()


def _scatter(x: Tensor, handle: Tensor, kind: str, dim: int, count: int) -> Tensor:
    """The transposed: the sum over ranks of what stands at the places of this rank; `count` rows along dim."""
    context = context_of(handle)
    with Conversation(context._ranks, f"gather of {kind}, backward") as talk:
        whole = x.movedim(dim, 0)
        talk.agree({"cp_context": context._digest, "dtypes": x.dtype, "shapes": tuple(whole.shape[1:]), "dim": dim})
        mine, places = _rows(context, kind, context._ranks.rank)
        for rank in talk.others:
            talk.send(rank, (0,), whole[_rows(context, kind, rank)[1]])
        total = whole[places].to(torch.promote_types(x.dtype, torch.float32))
        part = whole.new_empty((len(places), *whole.shape[1:]))
        for rank in talk.others:
            talk.receive(rank, (0,), part)
            total += part
        rows = whole.new_zeros((count, *whole.shape[1:]))
        rows[mine] = total.to(x.dtype)
    return rows.movedim(0, dim).contiguous()


def _resized(x, handle, kind, dim, count):
    return x.new_empty([count if d == dim else size for d, size in enumerate(x.shape)])


class _Moved(Function):
    """cp_gather and cp_scatter are each other's transposed."""

    @staticmethod
    def forward(ctx, name, transposed, x, handle, kind, dim, count):
        ctx.save_for_backward(handle)
        ctx.transposed, ctx.arguments = transposed, (kind, dim, x.shape[dim])
        return Function.run(name, x, handle, kind, dim, count)

    @staticmethod
    def backward(ctx, d):
        operator = getattr(torch.ops.headrace, ctx.transposed)
        return None, None, operator(d, *ctx.saved_tensors, *ctx.arguments), None, None, None, None


def _with_autograd(name: str, transposed: str) -> Callable:
    def kernel(x, *arguments):
        if torch.is_grad_enabled() and x.requires_grad:
            return _Moved.record(name, transposed, x, *arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(torch.ops.headrace, name)(x, *arguments)

    return kernel


_refused = _vmap.refused("cp_context: expected no vmap over a call whose sequences are cut over ranks")
register("cp_gather", _gather, _resized, _with_autograd("cp_gather", "cp_scatter"), _refused)
register("cp_scatter", _scatter, _resized, _with_autograd("cp_scatter", "cp_gather"), _refused)


def _dimension(context: CPContext, x: Tensor, dim: int, size: int, what: str) -> int:
    if not isinstance(x, Tensor):
        fail(context, "shard", TypeError(f"x: expected a torch.Tensor, got {type(x).__name__}"))
    place = integer("dim", dim)
    if not -x.dim() <= place < x.dim() or x.shape[place] != size:
        fail(context, "shard", ValueError(f"x: expected {size} {what} along dimension {dim}, got shape "
                                          f"{list(x.shape)}"))
    return place % x.dim()


def shard(x: Tensor, ctx: CPContext, dim: int = 1) -> Tensor:
    """The rank's tokens, in its own order, of x, which has all tokens of the batch along `dim` on every rank.

    Nothing is sent. The gradient of x is zero at the tokens of other ranks.
    """
    context = accepted_any(ctx)
    dim = _dimension(context, x, dim, context._layout.tokens, "tokens of the batch")
    return x.index_select(dim, context._places_on(x.device))


def unshard(x: Tensor, ctx: CPContext, dim: int = 1) -> Tensor:
    """All tokens of the batch along `dim`, in the batch's order, from the tokens x of every rank; on every rank.

    The gradient of x is the sum over all ranks of their gradients at its tokens.
    """
    context = accepted_any(ctx)
    dim = _dimension(context, x, dim, context._tokens, "tokens of the rank")
    return torch.ops.headrace.cp_gather(x, context._handle, "tokens", dim, context._layout.tokens)


def gather_final_states(state: Tensor, ctx: CPContext, *, reverse: bool = False) -> Tensor:
    """The states [N, ...] of all sequences of the batch, on every rank, from final states [pieces, ...] of every rank.

    reverse: of calls with reverse=True, in which a sequence ends at its first token. Differentiable as unshard.
    """
    context = accepted_any(ctx)
    _dimension(context, state, 0, context.num_seqs, "pieces of the rank")
    kind = "begins" if flag("reverse", reverse) else "ends"
    return torch.ops.headrace.cp_gather(state, context._handle, kind, 0, context._layout.sequences)
