"""All to all: every rank gets the whole sequences of some heads, computes as one process would, and sends back."""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from headrace._arguments import DIFFERENTIABLE
from headrace.torch.distributed._exchange import Conversation
from headrace.torch.distributed._layout import Layout
from headrace.torch.distributed._local import TOKENS, Call, Heads, naming

Maybe = Optional[Tensor]
Tensors = Dict[str, Tensor]  # of tokens, by name: inputs, or what has their shapes; o and its gradient as "o"


class _Shares:
    """Which heads belong to which rank, and which rows of states."""

    def __init__(self, talk: Conversation, call: Call, layout: Layout) -> None:
        self.talk, self.call, self.layout = talk, call, layout
        ranks, (H, _, _, _) = len(layout.ranges), call.sizes
        if H % ranks:
            raise ValueError(f"strategy: expected a number of heads of q that the {ranks} ranks divide, for 'heads', "
                             f"got {H}")
        self.heads: List[Heads] = [(r * (H // ranks), (r + 1) * (H // ranks)) for r in range(ranks)]
        self.own = self.heads[layout.rank]

    def cut(self, name: str, x: Tensor, heads: Heads) -> Tensor:
        return self.call.cut(name, x, slice(None), heads)

    def _rows(self, rank: int, at_begin: bool) -> Tuple[Tensor, Tensor]:
        pieces, sequences = self.layout.sequences_of(rank, at_begin)
        return torch.from_numpy(pieces), torch.from_numpy(sequences)

    def to_heads(self, tensors: Tensors, states: Maybe, at_begin: bool) -> Tuple[Tensors, Maybe]:
        """The whole sequences of the rank's heads from the tokens of all ranks.

        states [pieces, HV, K, V]: rows of sequences that begin (end) on the rank become those of all sequences.
        """
        pieces, _ = self._rows(self.layout.rank, at_begin)
        for rank, heads in enumerate(self.heads):
            parts = [self.cut(name, x, heads) for name, x in tensors.items()]
            rows = [] if states is None else [states[pieces][:, self.call.values(heads)].to(self.call.dtype)]
            self.talk.send(rank, (0,), *parts, *rows)
        result = {}
        for name, x in tensors.items():
            part = self.cut(name, x, self.own)
            result[name] = part.new_empty((1, self.layout.tokens, *part.shape[2:]))
        whole = None if states is None else self.call.new_states(self.layout.sequences, self.own)
        for rank in range(len(self.heads)):
            _, sequences = self._rows(rank, at_begin)
            rows = [] if whole is None else [whole.new_empty((len(sequences), *whole.shape[1:]))]
            self.talk.receive(rank, (0,), *self._of_rank(rank, result), *rows)
            if whole is not None:
                whole[sequences] = rows[0]
        return result, whole

    def _of_rank(self, rank: int, tensors: Tensors) -> List[Tensor]:
        """Of tensors with all tokens those that a rank has, in its order."""
        return [x[:, begin:end] for x in tensors.values() for begin, end in self.layout.ranges[rank]]

    def to_tokens(self, tensors: Tensors, like: Tensors, states: Maybe, rows: Maybe, at_begin: bool) -> None:
        """Back: `tensors` [1, tokens, own heads, ...] into `like` [1, own tokens, heads, ...], states into rows."""
        for rank in range(len(self.heads)):
            _, sequences = self._rows(rank, at_begin)
            rows_of_rank = [] if states is None else [states[sequences]]
            self.talk.send(rank, (1,), *self._of_rank(rank, tensors), *rows_of_rank)
        pieces, _ = self._rows(self.layout.rank, at_begin)
        for rank, heads in enumerate(self.heads):
            chosen = self.call.values(heads)
            got = [] if rows is None else [rows.new_empty((len(pieces), chosen.stop - chosen.start, *rows.shape[2:]))]
            self.talk.receive(rank, (1,), *(self.cut(name, x, heads) for name, x in like.items()), *got)
            if rows is not None:
                rows[pieces, chosen] = got[0]

    def inputs(self, d_o: Maybe) -> Tuple[List[Maybe], Tensors]:
        """The inputs of the library for the rank's heads, and d_o among what came along."""
        call, reverse = self.call, self.call.reverse
        tensors = {name: call[name] for name in TOKENS if call.tensors[name] is not None}
        if d_o is not None:
            tensors["o"] = d_o
        whole, start = self.to_heads(tensors, call.tensors["initial_state"], not reverse)
        given = {name: x for name, x in call.tensors.items() if x is not None and name not in TOKENS}
        whole_or_own = {**whole, **{name: self.cut(name, x, self.own) for name, x in given.items()
                                    if name != "initial_state"}}
        inputs = [*(whole_or_own.get(name) for name in DIFFERENTIABLE[:-1]), start]
        return [*inputs, torch.from_numpy(self.layout.offsets)], whole


def forward(talk: Conversation, call: Call, layout: Layout, o: Tensor, after: Maybe) -> None:
    """Writes o and the states after pieces with which sequences end."""
    shares = _Shares(talk, call, layout)
    inputs, whole = shares.inputs(None)
    result = whole["v"].new_empty(whole["v"].shape)
    states = None if after is None else call.new_states(layout.sequences, shares.own)
    with naming("of the batch", 0, shares.own):
        call.run("forward", inputs, [result, states], [], [None, None])
    shares.to_tokens({"o": result}, {"o": o}, states, after, call.reverse)


def backward(talk: Conversation, call: Call, layout: Layout, d_o: Tensor, d_after: Maybe,
             wanted: Sequence[int]) -> List[Tensor]:
    """The gradients of the inputs whose places are wanted; of parameters, what the rank's heads give."""
    shares, names = _Shares(talk, call, layout), [DIFFERENTIABLE[i] for i in wanted]
    inputs, whole = shares.inputs(d_o)
    d_states = None
    if d_after is not None:
        _, d_states = shares.to_heads({}, d_after, call.reverse)
    by_name = dict(zip(DIFFERENTIABLE, inputs))
    targets = {name: torch.empty_like(x) for name, x in by_name.items() if name in names and x is not None}
    if targets:
        with naming("of the batch", 0, shares.own):
            call.run("backward", inputs, [whole["o"], d_states], [targets.get(n) for n in DIFFERENTIABLE],
                     [None, None, None])
    results = {name: torch.empty_like(call[name]) if name in TOKENS else torch.zeros_like(call[name])
               for name in names if name != "initial_state"}
    rows = call.new_states(layout.pieces) if "initial_state" in names else None
    for_tokens = [name for name in names if name in TOKENS]
    shares.to_tokens({name: targets[name] for name in for_tokens}, {name: results[name] for name in for_tokens},
                     targets.get("initial_state"), rows, not call.reverse)
    for name, x in results.items():
        if name not in TOKENS:
            shares.cut(name, x, shares.own).copy_(targets[name])
    if rows is not None:
        results["initial_state"] = call.as_given(rows.to(call["initial_state"].dtype))
    return [results[name] for name in names]
