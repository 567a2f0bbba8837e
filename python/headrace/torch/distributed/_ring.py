"""States from rank to rank: each waits for its neighbour's, by groups of heads, so that ranks overlap."""

from __future__ import annotations

from typing import Callable, Optional

from torch import Tensor

from headrace.torch.distributed import _local
from headrace.torch.distributed._exchange import Conversation
from headrace.torch.distributed._layout import Layout, Part
from headrace.torch.distributed._local import Call, Gradients, Heads, head_groups

Maybe = Optional[Tensor]


def _walk(talk: Conversation, call: Call, layout: Layout, reverse: bool,
          compute: Callable[[Part, Heads, Maybe, Maybe], None]) -> None:
    """compute(part, heads, the state that enters, where the state that leaves goes) for all parts of the rank.

    There are as many groups of heads as ranks: then all ranks compute most of the time.
    """
    groups = head_groups(len(layout.ranges), call.sizes[0])
    for part in layout.parts(reverse):
        source, target = layout.before(part.slot, reverse), layout.after(part.slot, reverse)
        leaving = call.new_states(1) if part.leaves else None

        def pass_on(number: int, heads: Heads) -> None:
            if leaving is not None:
                talk.send(layout.slots[target].rank, (target, number), leaving[:, call.values(heads)])

        if not part.enters:
            compute(part, call.all_heads(), None, leaving)
        for number, heads in enumerate(groups):
            if part.enters:
                state = call.new_states(1, heads)
                talk.receive(layout.slots[source].rank, (part.slot, number), state)
                compute(part, heads, state, None if leaving is None else leaving[:, call.values(heads)])
            pass_on(number, heads)


def forward(talk: Conversation, call: Call, layout: Layout, o: Tensor, after: Maybe, entered: Tensor) -> None:
    """Writes o, the states after pieces with which sequences end, where `after` is given, and those that enter."""
    rows = {slot: row for row, slot in enumerate(layout.entered(call.reverse))}

    def compute(part: Part, heads: Heads, state: Maybe, leaving: Maybe) -> None:
        chosen = call.values(heads)
        if state is not None:
            entered[rows[part.slot], chosen] = state[0]
        if leaving is None and after is not None:
            leaving = after[part.first : part.last, chosen]
        _local.forward(call, part, heads, _local.start_states(call, part, heads, state), o, leaving)

    _walk(talk, call, layout, call.reverse, compute)


def backward(talk: Conversation, call: Call, layout: Layout, entered: Tensor, d_o: Maybe, d_after: Maybe,
             gradients: Gradients) -> None:
    """The same against the order: adjoints leave where states entered."""
    rows = {slot: row for row, slot in enumerate(layout.entered(call.reverse))}

    def compute(part: Part, heads: Heads, d_state: Maybe, d_leaving: Maybe) -> None:
        state = None if d_leaving is None else entered[rows[part.slot], call.values(heads)].unsqueeze(0)
        gradients.backward(part, heads, state, d_o, d_state, d_leaving, d_after)

    _walk(talk, call, layout, not call.reverse, compute)
