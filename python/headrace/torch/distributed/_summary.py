"""Summaries: what a piece does to the state that enters it, S_out = M S_in + R and D_in = M^T D_out + Dx, is exchanged.

Formulas: docs/math.md, 9. M is sent only of pieces that fill a run of tokens, and only where it depends on the data;
the backward needs no other M than the forward's, which the ranks have kept.
"""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence, Tuple, Type, Union

import torch
from torch import Tensor

from headrace import _core
from headrace.torch.distributed import _local
from headrace.torch.distributed._exchange import Conversation
from headrace.torch.distributed._layout import Layout, Part
from headrace.torch.distributed._local import DELTA, Call, Gradients

Maybe = Optional[Tensor]
Summary = Tuple[Maybe, Tensor]  # M, or None where it is not needed or is 1; R


class Transitions:
    """What M is like in a call: [HV, K, K] of the delta rule, [HV, K] or [HV] of gates from data, else from lengths."""

    def __init__(self, call: Call, layout: Layout) -> None:
        self.call, self.layout = call, layout
        self.are_sent = call.op in DELTA or call.tensors["g"] is not None
        self.shape = kept_shape(call, 0)[1:]

    def new(self, count: int) -> Tensor:
        return self.call["q"].new_empty((count, *self.shape), dtype=self.call.dtype)

    def known(self, slots: Sequence[int]) -> Maybe:
        """M [HV] of pieces that fill these slots, of a gate that is constant or 0; None for 1."""
        decay = self.call.tensors["g_gamma"]
        if decay is None:
            return None
        tokens = sum(self.layout.slots[slot].end - self.layout.slots[slot].begin for slot in slots)
        return (decay.double() * tokens).exp().to(self.call.dtype)


def moved(M: Maybe, x: Tensor, plus: Maybe, transposed: bool = False) -> Tensor:
    """M x + plus, or M^T x + plus."""
    if M is None:
        return x if plus is None else x + plus
    out = torch.empty_like(x)
    plus = torch.zeros_like(x) if plus is None else plus
    _core.apply([M.unsqueeze(0), plus.unsqueeze(0)], x.unsqueeze(0), transposed, out.unsqueeze(0))
    return out


# ---- summaries of pieces ----


def _summarize(call: Call, part: Part, transitions: Transitions) -> Summary:
    """R of a piece that a state leaves, and M if one also enters it."""
    state = call.new_states(1)
    M = transitions.new(1) if part.enters and transitions.are_sent else None
    heads = call.all_heads()
    start = None if part.enters else _local.start_states(call, part, heads, None)
    inputs = call.inputs(slice(part.begin, part.end), heads, start, part.cu_seqlens)
    with _local.naming("of the rank", part.begin, heads):
        _core.summarize(call.op, inputs, [M, state], call.options)
    if M is not None:
        return M[0], state[0]
    return (transitions.known([part.slot]) if part.enters else None), state[0]


def _adjoint(call: Call, part: Part, d_o: Maybe, d_after: Maybe) -> Tensor:
    """Dx of a piece that a state enters, with what the caller's gradient of the last state adds if it ends there."""
    heads, tokens = call.all_heads(), slice(part.begin, part.end)
    result = call.new_states(1)
    d_state = None if part.enters or d_after is None else d_after[part.first : part.last]
    if d_o is None and d_state is None:
        return result[0]
    if d_o is not None:
        d_o = call.cut("o", d_o, tokens, heads)
    with _local.naming("of the rank", part.begin, heads):
        _core.summarize_backward(call.op, call.inputs(tokens, heads, None, part.cu_seqlens), [d_o, d_state], result,
                                 call.options)
    return result[0]


# ---- exchanges: E of slots that a state enters, from R of slots that one leaves; and the transposed of that ----


class AllGather:
    """Every slot's summary goes to all ranks that need it, which fold them in order."""

    def __init__(self, talk: Conversation, layout: Layout, reverse: bool, transitions: Transitions) -> None:
        self.talk, self.layout, self.transitions = talk, layout, transitions
        self.sources = {slot: layout.sources(slot, reverse) for slot in layout.entered(reverse)}
        self.targets: Dict[int, List[int]] = {slot: [] for slot in layout.left(reverse)}
        for target, slot in enumerate(layout.slots):
            for source in layout.sources(target, reverse) if slot.enters(reverse) else ():
                if source in self.targets:
                    self.targets[source].append(target)
        self.kept = self.plan(layout, reverse) if transitions.are_sent else []

    @staticmethod
    def plan(layout: Layout, reverse: bool) -> List[int]:
        """The slots whose M the rank applies, if it is sent."""
        return sorted({source for slot in layout.entered(reverse) for source in layout.sources(slot, reverse)[:-1]})

    def _rank(self, slot: int) -> int:
        return self.layout.slots[slot].rank

    def forward(self, own: Dict[int, Summary]) -> Tuple[Dict[int, Tensor], Tensor]:
        """(E by slots, M of other ranks' slots [kept, ...] for the backward)."""
        call, transitions = self.transitions.call, self.transitions
        for slot, (M, R) in own.items():
            tensors = (R,) if M is None or not transitions.are_sent else (R, M)
            for rank in sorted({self._rank(target) for target in self.targets[slot]}):
                self.talk.send(rank, (slot,), *tensors)
        kept, all_R = transitions.new(len(self.kept)), {}
        for slot in sorted({source for sources in self.sources.values() for source in sources}):
            R = all_R[slot] = call.new_states(1)[0]
            also = [kept[self.kept.index(slot)]] if slot in self.kept else []
            self.talk.receive(self._rank(slot), (slot,), R, *also)
        result = {}
        for slot, sources in self.sources.items():
            state = all_R[sources[-1]]
            for source in reversed(sources[:-1]):
                state = moved(self._transition(source, kept), state, all_R[source])
            result[slot] = state
        return result, kept

    def backward(self, own: Dict[int, Tensor], kept: Tensor) -> Dict[int, Tensor]:
        """D_out by slots, from Dx of the slots that states entered."""
        for slot, sources in self.sources.items():
            adjoint = own[slot]
            for source in sources:
                self.talk.send(self._rank(source), (source, slot), adjoint)
                if source != sources[-1]:
                    adjoint = moved(self._transition(source, kept), adjoint, None, transposed=True)
        result = {}
        for slot, targets in self.targets.items():
            total = torch.zeros_like(self.transitions.call.new_states(1)[0])
            for target in targets:
                part = torch.empty_like(total)
                self.talk.receive(self._rank(target), (slot, target), part)
                total += part
            result[slot] = total
        return result

    def _transition(self, slot: int, kept: Tensor) -> Maybe:
        return kept[self.kept.index(slot)] if self.transitions.are_sent else self.transitions.known([slot])


class Doubling:
    """Summaries of twice as many slots in every round: log2 messages for each slot, in a chain of slots."""

    def __init__(self, talk: Conversation, layout: Layout, reverse: bool, transitions: Transitions) -> None:
        self.talk, self.layout, self.transitions, self.reverse = talk, layout, transitions, reverse
        self.chains = {slot: layout.sources(slot, reverse) for slot, s in enumerate(layout.slots) if s.enters(reverse)}
        self.own, self.left = layout.entered(reverse), layout.left(reverse)
        self.steps = self._steps(self.chains)
        self.kept = self.plan(layout, reverse) if transitions.are_sent else []

    @staticmethod
    def _steps(chains: Dict[int, List[int]]) -> List[int]:
        """2^n in round n, in which a slot whose summary has an M takes that of 2^n slots before."""
        return [2**n for n in range((max(map(len, chains.values()), default=1) - 1).bit_length())]

    @classmethod
    def plan(cls, layout: Layout, reverse: bool) -> List[Tuple[int, int]]:
        """The rounds and slots whose M the rank applies, if it is sent."""
        chains = {slot: layout.sources(slot, reverse) for slot in layout.entered(reverse)}
        return [(step, slot) for step in cls._steps(chains) for slot in chains if len(chains[slot]) > step]

    def _incomplete(self, slot: int, step: int) -> bool:
        """Whether the summary of `step` slots before this one still has an M."""
        return slot in self.chains and len(self.chains[slot]) > step

    def _rank(self, slot: int) -> int:
        return self.layout.slots[slot].rank

    def _shifted(self, slot: int, steps: int) -> int:
        return slot + steps if self.reverse else slot - steps

    def _takes(self, slot: int, step: int) -> bool:
        """Whether a slot `step` behind takes this slot's summary."""
        return self._incomplete(self._shifted(slot, -step), step)

    def forward(self, own: Dict[int, Summary]) -> Tuple[Dict[int, Tensor], Tensor]:
        call, transitions = self.transitions.call, self.transitions
        kept = transitions.new(len(self.kept))
        for slot, summary in own.items():
            target = self._shifted(slot, -1)
            self._send((0, target), target, *summary)
        held: Dict[int, Summary] = {slot: self._receive((0, slot), self._shifted(slot, 1), self._incomplete(slot, 1))
                                    for slot in self.own}
        for step in self.steps:
            for slot, summary in held.items():
                if self._takes(slot, step):
                    target = self._shifted(slot, -step)
                    self._send((step, target), target, *summary)
            after = dict(held)
            for slot, (M, R) in held.items():
                if not self._incomplete(slot, step):
                    continue
                first, last = self._receive((step, slot), self._shifted(slot, step), self._incomplete(slot, 2 * step))
                if M is not None and transitions.are_sent:
                    kept[self.kept.index((step, slot))] = M
                else:
                    M = transitions.known(self.chains[slot][:step])
                after[slot] = self._composed(M, R, first, last)
            held = after
        assert call.dtype == kept.dtype
        return {slot: R for slot, (_, R) in held.items()}, kept

    def _composed(self, M: Maybe, R: Tensor, first_M: Maybe, first_R: Tensor) -> Summary:
        """The second summary (M, R) behind the first."""
        state = moved(M, first_R, R)
        if M is None or first_M is None:
            return None, state
        both = torch.empty_like(M)
        _core.compose([M.unsqueeze(0), R.unsqueeze(0)], [first_M.unsqueeze(0), first_R.unsqueeze(0)],
                      [both.unsqueeze(0), None], 0)
        return both, state

    def _send(self, label: Tuple[int, int], slot: int, M: Maybe, R: Tensor) -> None:
        tensors = (R,) if M is None or not self.transitions.are_sent else (R, M)
        self.talk.send(self._rank(slot), label, *tensors)

    def _receive(self, label: Tuple[int, int], source: int, with_transition: bool) -> Summary:
        R = self.transitions.call.new_states(1)[0]
        M = self.transitions.new(1)[0] if with_transition and self.transitions.are_sent else None
        self.talk.receive(self._rank(source), label, R, *(() if M is None else (M,)))
        return M, R

    def backward(self, own: Dict[int, Tensor], kept: Tensor) -> Dict[int, Tensor]:
        """The messages of the forward in reverse order, from their receivers to their senders."""
        held = dict(own)
        for step in reversed(self.steps):
            for slot, adjoint in held.items():
                if self._incomplete(slot, step):
                    M = (kept[self.kept.index((step, slot))] if self.transitions.are_sent
                         else self.transitions.known(self.chains[slot][:step]))
                    source = self._shifted(slot, step)
                    self.talk.send(self._rank(source), (step, slot), moved(M, adjoint, None, transposed=True))
            for slot in held:
                if self._takes(slot, step):
                    held[slot] = held[slot] + self._receive((step, self._shifted(slot, -step)),
                                                            self._shifted(slot, -step), False)[1]
        for slot, adjoint in held.items():
            self.talk.send(self._rank(self._shifted(slot, 1)), (0, slot), adjoint)
        return {slot: self._receive((0, self._shifted(slot, -1)), self._shifted(slot, -1), False)[1]
                for slot in self.left}


EXCHANGES: Dict[str, Union[Type[AllGather], Type[Doubling]]] = {"all_gather": AllGather, "doubling": Doubling}


# ---- the strategy ----


def forward(talk: Conversation, call: Call, layout: Layout, exchange: str, o: Tensor, after: Maybe,
            entered: Tensor) -> Tensor:
    """Writes o, the last states and those that enter, as in a ring; returns what the backward needs of M."""
    reverse, heads, transitions = call.reverse, call.all_heads(), Transitions(call, layout)
    parts = layout.parts(reverse)
    own: Dict[int, Summary] = {}
    # Where a sequence begins the delta rule's own pass takes no longer than the summaries of others, and gives R.
    first = [part for part in parts if part.leaves and not part.enters and call.op in DELTA]
    for part in parts:
        if part in first:
            result = call.new_states(1)
            _local.forward(call, part, heads, _local.start_states(call, part, heads, None), o, result)
            own[part.slot] = None, result[0]
        elif part.leaves:
            own[part.slot] = _summarize(call, part, transitions)
    states, kept = EXCHANGES[exchange](talk, layout, reverse, transitions).forward(own)
    rows = {slot: row for row, slot in enumerate(layout.entered(reverse))}
    for part in parts:
        state = states[part.slot].unsqueeze(0) if part.enters else None
        if state is not None:
            entered[rows[part.slot]] = state[0]
        if part not in first:
            last = None if after is None or part.leaves else after[part.first : part.last]
            _local.forward(call, part, heads, _local.start_states(call, part, heads, state), o, last)
    return kept


def backward(talk: Conversation, call: Call, layout: Layout, exchange: str, entered: Tensor, kept: Tensor, d_o: Maybe,
             d_after: Maybe, gradients: Gradients) -> None:
    reverse, heads = call.reverse, call.all_heads()
    parts = layout.parts(not reverse)  # where a state entered, its adjoint leaves
    own = {part.slot: _adjoint(call, part, d_o, d_after) for part in parts if part.leaves}
    adjoints = EXCHANGES[exchange](talk, layout, reverse, Transitions(call, layout)).backward(own, kept)
    rows = {slot: row for row, slot in enumerate(layout.entered(reverse))}
    for part in parts:
        state = entered[rows[part.slot]].unsqueeze(0) if part.leaves else None
        d_state = adjoints[part.slot].unsqueeze(0) if part.enters else None
        gradients.backward(part, heads, state, d_o, d_state, call.new_states(1) if part.leaves else None, d_after)


def kept_count(layout: Layout, exchange: str, reverse: bool) -> int:
    """How many M, where they are sent, the forward of a rank keeps."""
    return len(EXCHANGES[exchange].plan(layout, reverse))


def kept_shape(call: Call, count: int) -> List[int]:
    """Of what the forward keeps."""
    _, HV, K, _ = call.sizes
    gate = call.tensors["g"]
    if call.op in DELTA:
        return [count, HV, K, K]
    return [0] if gate is None else [count, HV, K] if gate.dim() == 4 else [count, HV]
