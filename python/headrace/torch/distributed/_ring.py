"""States from rank to rank: each waits for its neighbour's, by groups of heads, so that ranks overlap.

With its state a rank hands on what the kernels know about the roundings in it (Options::piece), so that a cut at a
multiple of 64 tokens of a sequence changes no bit. A state crosses in float64 where float32 does not hold all of it.
"""

from __future__ import annotations

from typing import Callable, NamedTuple, Optional

import torch
from torch import Tensor

from headrace import _core
from headrace.torch.distributed import _local
from headrace.torch.distributed._exchange import Conversation
from headrace.torch.distributed._layout import Layout, Part
from headrace.torch.distributed._local import Call, Gradients, Heads, head_groups

Maybe = Optional[Tensor]

_FLOAT32, _FLOAT64, _NOTHING = range(3)  # forms of a message


class State(NamedTuple):
    """A state, or the gradient of one, [1, heads, K, V] float64, and its roundings [1, heads, R]."""

    value: Tensor
    roundings: Tensor

    @classmethod
    def new(cls, call: Call, heads: Heads) -> State:
        return cls(call.new_states(1, heads, torch.float64), call.new_roundings(1, heads))

    def of(self, values: slice) -> State:
        return State(self.value[:, values], self.roundings[:, values])


def _send(talk: Conversation, rank: int, label: tuple, state: Optional[State]) -> None:
    if state is None:
        return talk.send(rank, label, form=_NOTHING)
    single = state.value.float()
    if torch.equal(single.double(), state.value):
        return talk.send(rank, label, single, state.roundings, form=_FLOAT32)
    talk.send(rank, label, state.value, state.roundings, form=_FLOAT64)


def _receive(talk: Conversation, rank: int, label: tuple, state: State) -> bool:
    """Writes what comes into the state; False if nothing does."""
    data, form = talk.take(rank, label)
    if form == _NOTHING:
        return False
    value = state.value if form == _FLOAT64 else state.value.float()
    talk.place(rank, data, (value, state.roundings))
    state.value.copy_(value)
    return True


def _walk(talk: Conversation, call: Call, layout: Layout, reverse: bool, sweep: int,
          compute: Callable[[Part, Heads, Optional[State], Optional[State]], bool]) -> None:
    """compute(part, heads, the state that enters, where the state that leaves goes) for all parts of the rank.

    It says whether it has made the state that leaves. There are as many groups of heads as ranks: then all ranks
    compute most of the time.
    """
    groups = head_groups(len(layout.ranges), call.sizes[0])
    for part in layout.parts(reverse):
        source, target = layout.before(part.slot, reverse), layout.after(part.slot, reverse)
        leaving = State.new(call, call.all_heads()) if part.leaves else None
        is_made = not part.enters and compute(part, call.all_heads(), None, leaving)
        for number, heads in enumerate(groups):
            mine = None if leaving is None else leaving.of(call.values(heads))
            if part.enters:
                state = State.new(call, heads)
                has_come = _receive(talk, layout.slots[source].rank, (part.slot, number, sweep), state)
                is_made = compute(part, heads, state if has_come else None, mine)
            if part.leaves:
                _send(talk, layout.slots[target].rank, (target, number, sweep), mine if is_made else None)


class _Kept:
    """The states that entered the rank's slots, and their roundings, as the forward left them for the backward."""

    def __init__(self, call: Call, layout: Layout, entered: Tensor, roundings: Tensor) -> None:
        self.call, self.entered, self.roundings = call, entered, roundings
        self.rows = {slot: row for row, slot in enumerate(layout.entered(call.reverse))}

    def __getitem__(self, place: tuple) -> State:
        part, heads = place
        row, values = self.rows[part.slot], self.call.values(heads)
        return State(self.entered[row : row + 1, values], self.roundings[row : row + 1, values])

    def __setitem__(self, place: tuple, state: State) -> None:
        for target, x in zip(self[place], state):
            target.copy_(x)


def forward(talk: Conversation, call: Call, layout: Layout, o: Tensor, after: Maybe, entered: Tensor,
            roundings: Tensor) -> None:
    """Writes o, the states after pieces with which sequences end, where `after` is given, and those that enter."""
    kept = _Kept(call, layout, entered, roundings)

    def compute(part: Part, heads: Heads, state: Optional[State], leaving: Optional[State]) -> bool:
        if state is not None:
            kept[part, heads] = state
        last = None if leaving is None else leaving.value
        if leaving is None and after is not None:
            last = after[part.first : part.last, call.values(heads)]
        start = _local.start_states(call, part, heads, None if state is None else state.value)
        _local.forward(call, part, heads, start, o, last,
                       (None if state is None else state.roundings, None if leaving is None else leaving.roundings))
        return True

    _walk(talk, call, layout, call.reverse, 0, compute)


def backward(talk: Conversation, call: Call, layout: Layout, entered: Tensor, roundings: Tensor, d_o: Maybe,
             d_after: Maybe, gradients: Gradients) -> None:
    """The same against the order: adjoints leave where states entered."""
    kept = _Kept(call, layout, entered.clone(), roundings.clone())
    _states_of_backward(talk, call, layout, kept, d_o, d_after, gradients)

    def compute(part: Part, heads: Heads, d_state: Optional[State], d_leaving: Optional[State]) -> bool:
        state = None if d_leaving is None else kept[part, heads]
        gradients.backward(
            part, heads, None if state is None else state.value, d_o, None if d_state is None else d_state.value,
            None if d_leaving is None else d_leaving.value, d_after,
            (None if state is None else state.roundings, None if d_state is None else d_state.roundings,
             None if d_leaving is None else d_leaving.roundings))
        return True

    _walk(talk, call, layout, not call.reverse, 1, compute)


def _states_of_backward(talk: Conversation, call: Call, layout: Layout, kept: _Kept, d_o: Maybe, d_after: Maybe,
                        gradients: Gradients) -> None:
    """Replaces the forward's states by those that one backward would recompute, where these have other bits."""

    def compute(part: Part, heads: Heads, state: Optional[State], leaving: Optional[State]) -> bool:
        if state is not None:
            kept[part, heads] = state
        if leaving is None:
            return False
        entering = kept[part, heads] if part.enters else None
        d_entered = call.new_states(1, heads, torch.float64) if part.enters else None
        arguments = gradients.arguments(part, heads, None if entering is None else entering.value, d_o,
                                        call.new_states(1, heads, torch.float64), d_entered, d_after)
        if _core.states_agree(call.op, *arguments, call.options, call.whole):
            return False
        call.run("backward_states", *arguments,
                 [None if entering is None else entering.roundings, leaving.value, leaving.roundings])
        return True

    _walk(talk, call, layout, call.reverse, 0, compute)


