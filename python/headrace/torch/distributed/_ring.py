"""States from rank to rank: each waits for its neighbour's, by groups of heads, so that ranks overlap.

With its state a rank hands on what the kernels know about the roundings in it (Options::piece), so that a cut at a
multiple of 64 tokens of a sequence changes no bit. A state crosses in float64 where float32 does not hold all of it.
"""

from __future__ import annotations

from typing import Callable, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from headrace import _core
from headrace.torch.distributed import _local
from headrace.torch.distributed._exchange import Conversation
from headrace.torch.distributed._layout import Layout, Part
from headrace.torch.distributed._local import Call, Gradients, Heads, head_groups

Maybe = Optional[Tensor]

_FLOAT32, _FLOAT64, _NOTHING = range(3)  # forms of a message
_VOTE = -1  # the label of a question to all ranks, where others have a slot
_IN_DOUBLE = 512  # of a state's last rounding: beyond, a forward in f32 has gone on in f64, which a backward does not


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
    """What the forward leaves for the backward: states that entered the rank's slots, and the roundings of these and of
    those that left."""

    def __init__(self, call: Call, layout: Layout, entered: Tensor, roundings: Tensor) -> None:
        self.call, self.entered = call, entered
        self.roundings, self.left_roundings = roundings.split([len(entered), len(roundings) - len(entered)])
        self.rows = {slot: row for row, slot in enumerate(layout.entered(call.reverse))}
        self.left_rows = {slot: row for row, slot in enumerate(layout.left(call.reverse))}

    def __getitem__(self, place: Tuple[Part, Heads]) -> State:
        part, heads = place
        row, values = self.rows[part.slot], self.call.values(heads)
        return State(self.entered[row : row + 1, values], self.roundings[row : row + 1, values])

    def __setitem__(self, place: Tuple[Part, Heads], state: State) -> None:
        for target, x in zip(self[place], state):
            target.copy_(x)

    def left(self, part: Part, heads: Heads) -> Tensor:
        """The roundings [heads, R] of the state that left."""
        return self.left_roundings[self.left_rows[part.slot], self.call.values(heads)]


def forward(talk: Conversation, call: Call, layout: Layout, o: Tensor, after: Maybe, entered: Tensor,
            roundings: Tensor) -> None:
    """Writes o, the states after pieces with which sequences end, if `after` is given, and what the backward needs."""
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
        if leaving is not None:
            kept.left(part, heads).copy_(leaving.roundings[0])
        return True

    _walk(talk, call, layout, call.reverse, 0, compute)


def backward(talk: Conversation, call: Call, layout: Layout, entered: Tensor, roundings: Tensor, d_o: Maybe,
             d_after: Maybe, gradients: Gradients) -> None:
    """The same against the order: adjoints leave where states entered."""
    kept = _Kept(call, layout, entered.clone(), roundings.clone())
    _enter_as_one_backward(talk, call, layout, kept, d_o, d_after, gradients)

    def compute(part: Part, heads: Heads, d_state: Optional[State], d_leaving: Optional[State]) -> bool:
        state = None if d_leaving is None else kept[part, heads]
        gradients.backward(
            part, heads, None if state is None else state.value, d_o, None if d_state is None else d_state.value,
            None if d_leaving is None else d_leaving.value, d_after,
            (None if state is None else state.roundings, None if d_state is None else d_state.roundings,
             None if d_leaving is None else d_leaving.roundings))
        return True

    _walk(talk, call, layout, not call.reverse, 1, compute)


def _enter_as_one_backward(talk: Conversation, call: Call, layout: Layout, kept: _Kept, d_o: Maybe, d_after: Maybe,
                           gradients: Gradients) -> None:
    """Replaces the forward's states by those that one backward would recompute, where these have other bits."""

    def arguments(part: Part, heads: Heads, entering: Optional[State]) -> Tuple[list, list, list]:
        d_entered = call.new_states(1, heads, torch.float64) if part.enters else None
        return gradients.arguments(part, heads, None if entering is None else entering.value, d_o,
                                   call.new_states(1, heads, torch.float64), d_entered, d_after)

    def differs(part: Part, heads: Heads) -> bool:
        entering = kept[part, heads] if part.enters else None
        return bool((kept.left(part, heads)[:, -1] > _IN_DOUBLE).any()) or not _core.states_agree(
            call.op, *arguments(part, heads, entering), call.options, call.whole)

    def compute(part: Part, heads: Heads, state: Optional[State], leaving: Optional[State]) -> bool:
        if state is not None:
            kept[part, heads] = state
        if leaving is None or (state is None and not differs(part, heads)):
            return False
        entering = kept[part, heads] if part.enters else None
        call.run("backward_states", *arguments(part, heads, entering),
                 [None if entering is None else entering.roundings, leaving.value, leaving.roundings])
        return True

    leaving = [part for part in layout.parts(call.reverse) if part.leaves]
    if any(talk.numbers((_VOTE,), any(differs(part, call.all_heads()) for part in leaving))):
        _walk(talk, call, layout, call.reverse, 0, compute)
