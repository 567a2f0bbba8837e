"""headrace::cp_convolution: the short convolution of sequences that are cut over ranks.

The W - 1 inputs before a piece, its halo, are sent by the ranks that hold them: several, if they hold few, and the one
where the sequence begins if the halo reaches into the initial state. Gradients of the halo go back the same way.
"""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from headrace import _core
from headrace.torch import _vmap
from headrace.torch._library import Function, empty_like, like, once, placed, register
from headrace.torch.distributed._context import CPContext, context_of
from headrace.torch.distributed._exchange import Conversation
from headrace.torch.distributed._layout import Layout

Maybe = Optional[Tensor]


class Transfer(NamedTuple):
    """Tokens of slot `source` that the first piece of slot `target` reads, and where."""

    source: int
    target: int
    tokens: slice  # of the source's rank
    columns: slice  # of the state before the target
    piece: int  # of the source's rank, whose last `initial` columns of the initial state are read too
    initial: int
    initial_columns: slice


def transfers(layout: Layout, W: int) -> List[Transfer]:
    """All transfers, in an order that all ranks know."""
    result = []
    for target, slot in enumerate(layout.slots):
        reach = slot.begin - (W - 1)
        for source in layout.sources(target, False):
            held = layout.slots[source]
            start = int(layout.offsets[slot.first])
            low, high = max(reach, start, held.begin), held.end
            is_start = start >= held.begin
            initial = max(0, start - reach) if is_start else 0
            if low >= high and not initial:
                break
            low = min(low, high)
            local, column = held.offset - held.begin, W - slot.begin  # what is added to a token's place in the batch
            result.append(Transfer(source, target, slice(low + local, high + local), slice(low + column, high + column),
                                   held.piece + held.pieces - 1, initial,
                                   slice(start - initial + column, start + column)))
    return result


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _check(context: CPContext, x: Tensor, weight: Tensor, initial_state: Maybe) -> None:
    width, given, layout = weight.shape[1], context.conv1d_kernel_size, context._layout
    if given is not None and width != given:
        raise ValueError(f"weight: expected [D, {given}] as conv1d_kernel_size of the context, got shape "
                         f"{list(weight.shape)}")
    tokens = layout.lengths[layout.rank]
    if x.shape[0] != 1 or x.shape[1] != tokens:
        raise ValueError(f"x: expected the {tokens} tokens of this rank in the context's batch, [1, {tokens}, D], got "
                         f"shape {list(x.shape)}")
    if initial_state is not None and list(initial_state.shape) != [layout.pieces, x.shape[2], width]:
        raise ValueError(f"initial_state: expected shape {[layout.pieces, x.shape[2], width]}, a state for each piece "
                         f"of the rank, got {list(initial_state.shape)}")


def _fields(context: CPContext, x: Tensor, weight: Tensor, bias: Maybe, initial_state: Maybe, *rest: Any) -> dict:
    state = None if initial_state is None else initial_state.dtype
    return {"cp_context": context._digest, "tensors": (bias is None, state is None), "dtypes": (x.dtype, state),
            "shapes": (x.shape[2:], weight.shape), "options": rest}


def _start(layout: Layout, x: Tensor, W: int, initial_state: Maybe, halo: Tensor) -> Maybe:
    """The states before the rank's pieces: the caller's, and the halos."""
    if initial_state is None and not len(halo):
        return None
    start = halo.new_zeros((layout.pieces, x.shape[2], W))
    if initial_state is not None:
        begins = torch.from_numpy(layout.flags(True))
        start[begins] = initial_state[begins].to(start.dtype)
    for row, slot in enumerate(layout.entered(False)):
        start[layout.entered_piece(slot, False)] = halo[row]
    return start


def _forward(x: Tensor, weight: Tensor, bias: Maybe, initial_state: Maybe, handle: Tensor, cu_seqlens: Tensor,
             final_state: bool, recorded: bool, activation: str, entered: int) -> Tuple[Tensor, Tensor, Tensor]:
    context = context_of(handle)
    layout = context._layout
    with Conversation(context._ranks, "short_convolution forward") as talk:
        _check(context, x, weight, initial_state)
        talk.agree(_fields(context, x, weight, bias, initial_state, activation, final_state, recorded))
        y, state, halo = _results(x, weight, initial_state, cu_seqlens, final_state, entered)
        rows = {slot: row for row, slot in enumerate(layout.entered(False))}
        moves = transfers(layout, weight.shape[1])
        for move in moves:
            if layout.slots[move.source].rank == layout.rank:
                parts = [x[0, move.tokens]]
                if initial_state is not None and move.initial:
                    parts.append(initial_state[move.piece, :, -move.initial :])
                talk.send(layout.slots[move.target].rank, move[:2], *parts)
        for move in moves:
            if layout.slots[move.target].rank == layout.rank:
                row = halo[rows[move.target]]
                tokens = x.new_empty((move.columns.stop - move.columns.start, x.shape[2]))
                parts = [tokens]
                if initial_state is not None and move.initial:
                    parts.append(initial_state.new_empty((x.shape[2], move.initial)))
                talk.receive(layout.slots[move.source].rank, move[:2], *parts)
                row[:, move.columns] = tokens.T
                for part in parts[1:]:
                    row[:, move.initial_columns] = part
        start = _start(layout, x, weight.shape[1], initial_state, halo)
        _core.short_convolution_forward([x, weight, bias, start, cu_seqlens], [y, state if final_state else None],
                                        activation)
        if final_state:
            state[torch.from_numpy(~layout.flags(False))] = 0
    return y, state, halo


def _results(x, weight, initial_state, cu_seqlens, final_state, entered):
    sizes = (cu_seqlens.shape[0] - 1, x.shape[2], weight.shape[1])
    dtype = x.dtype if initial_state is None else initial_state.dtype
    return (empty_like(x), x.new_empty(sizes if final_state else (0,), dtype=dtype),
            x.new_zeros((entered, *sizes[1:]), dtype=_wide(x)))


def _forward_shapes(x, weight, bias, initial_state, handle, cu_seqlens, final_state, recorded, activation, entered):
    return _results(x, weight, initial_state, cu_seqlens, final_state, entered)


def _backward(x: Tensor, weight: Tensor, bias: Maybe, initial_state: Maybe, handle: Tensor, cu_seqlens: Tensor,
              halo: Tensor, d_y: Maybe, d_final_state: Maybe, wanted: List[int], activation: str) -> List[Tensor]:
    context = context_of(handle)
    layout, inputs = context._layout, [x, weight, bias, initial_state]
    with Conversation(context._ranks, "short_convolution backward") as talk:
        talk.agree(_fields(context, x, weight, bias, initial_state, activation))
        gradients = placed(like(inputs, wanted), wanted, 4)
        start = _start(layout, x, weight.shape[1], initial_state, halo)
        d_start = None if start is None else torch.empty_like(start)
        if d_final_state is not None:
            d_final_state = d_final_state.clone()
            d_final_state[torch.from_numpy(~layout.flags(False))] = 0
        targets = [*gradients[:3], d_start]
        if any(target is not None for target in targets):
            d_y = torch.zeros_like(x) if d_y is None else d_y
            _core.short_convolution_backward([x, weight, bias, start, cu_seqlens], [d_y, d_final_state], targets,
                                             activation)
        moves = transfers(layout, weight.shape[1])
        for move in moves:
            if layout.slots[move.target].rank == layout.rank and d_start is not None:
                row = d_start[layout.entered_piece(move.target, False)]
                parts = [row[:, move.columns]]
                if initial_state is not None and move.initial:
                    parts.append(row[:, move.initial_columns])
                talk.send(layout.slots[move.source].rank, move[:2], *parts)
        d_x, d_initial = gradients[0], gradients[3]
        if d_initial is not None and d_start is not None:
            begins = torch.from_numpy(layout.flags(True))
            d_start[~begins] = 0
        for move in moves:
            if layout.slots[move.source].rank == layout.rank:
                tokens = halo.new_empty((x.shape[2], move.columns.stop - move.columns.start))
                parts = [tokens]
                if initial_state is not None and move.initial:
                    parts.append(halo.new_empty((x.shape[2], move.initial)))
                talk.receive(layout.slots[move.target].rank, move[:2], *parts)
                if d_x is not None:
                    d_x[0, move.tokens] = (d_x[0, move.tokens].to(halo.dtype) + tokens.T).to(d_x.dtype)
                if d_start is not None:
                    for part in parts[1:]:
                        d_start[move.piece, :, -move.initial :] += part
        if d_initial is not None and d_start is not None:
            d_initial.copy_(d_start)
    return [x for x in gradients if x is not None]


def _backward_shapes(x, weight, bias, initial_state, handle, cu_seqlens, halo, d_y, d_final_state, wanted, activation):
    return like([x, weight, bias, initial_state], wanted)


class _Convolution(Function):
    @staticmethod
    def forward(ctx, x, weight, bias, initial_state, handle, cu_seqlens, final_state, recorded, activation, entered):
        y, state, halo = Function.run("cp_convolution", x, weight, bias, initial_state, handle, cu_seqlens, final_state,
                                      recorded, activation, entered)
        ctx.final_state, ctx.activation = final_state, activation
        ctx.save_for_backward(x, weight, bias, initial_state, handle, cu_seqlens, halo)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(halo, *(() if final_state else (state,)))
        return y, state, halo

    @staticmethod
    def backward(ctx, d_y, d_final_state, _):
        wanted = [i for i in range(4) if ctx.needs_input_grad[i]]
        gradients = torch.ops.headrace.cp_convolution_backward(
            *ctx.saved_tensors, d_y, d_final_state if ctx.final_state else None, wanted, ctx.activation)
        return tuple(placed(gradients, wanted, 10))


def _with_autograd(*arguments):
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arguments[:4]):
        return _Convolution.record(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.headrace.cp_convolution(*arguments)


_refused = _vmap.refused("cp_context: expected no vmap over a call whose sequences are cut over ranks")
register("cp_convolution", _forward, _forward_shapes, _with_autograd, _refused)
register("cp_convolution_backward", _backward, _backward_shapes, once("cp_convolution_backward"), _refused)
