"""One call on one rank: the library on a part of its tokens and heads, tensors read and written where they lie."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from headrace import _core
from headrace._arguments import DIFFERENTIABLE, options
from headrace.torch._library import empty_like, k_first
from headrace.torch.distributed._layout import Layout, Part

Maybe = Optional[Tensor]
Heads = Tuple[int, int]  # key heads first to last - 1, and the value heads that belong to them

# The undivided problem: its tokens, those of its longest sequence, its sequences and key heads. The library chooses
# implementations and types by it, so that pieces are computed as the whole would be.
Whole = Tuple[int, int, int, int]

DELTA = ("delta_rule", "gated_delta_rule", "comba", "kda")
_OF_KEY_HEADS, _OF_VALUE_HEADS = ("q", "k", "p"), ("v", "g", "gv", "beta")
_OF_PARAMETERS = ("g_gamma", "A_log", "dt_bias")
TOKENS = (*_OF_KEY_HEADS, *_OF_VALUE_HEADS)  # inputs [1, T, heads, ...]


def head_groups(count: int, heads: int) -> List[Heads]:
    """`count` groups of nearly as many heads, fewer where there are not so many."""
    count = max(1, min(count, heads))
    ends = [heads * i // count for i in range(count + 1)]
    return list(zip(ends, ends[1:]))


@dataclass
class Call:
    """The inputs of a call by name, states with their keys first, and its options as the library takes them."""

    op: str
    tensors: Dict[str, Maybe]
    rest: Sequence[Any]
    whole: Whole = (0, 0, 0, 0)
    memory: Optional[_core.Memory] = None  # of its calls of the library

    @classmethod
    def of(cls, op: str, inputs: Sequence[Maybe], rest: Sequence[Any], layout: Optional[Layout] = None) -> Call:
        """rest: scale, reverse, qk_l2norm, gate_form, lower_bound, beta_form, chunk, state_v_first."""
        tensors = dict(zip(DIFFERENTIABLE, inputs))
        tensors["initial_state"] = k_first(tensors["initial_state"], rest[-1])
        call = cls(op, tensors, rest)
        if layout is not None:
            call.whole = (layout.tokens, layout.longest, layout.sequences, call.sizes[0])
        return call

    def __getitem__(self, name: str) -> Tensor:
        x = self.tensors[name]
        assert x is not None
        return x

    @property
    def options(self) -> _core.Options:
        return options(*self.rest[:-1])

    @property
    def reverse(self) -> bool:
        return self.rest[1]

    @property
    def dtype(self) -> torch.dtype:
        """Of states."""
        return torch.float64 if self["q"].dtype == torch.float64 else torch.float32

    @property
    def sizes(self) -> Tuple[int, int, int, int]:
        """H, HV, K, V."""
        (_, _, H, K), (_, _, HV, V) = self["q"].shape, self["v"].shape
        return H, HV, K, V

    def values(self, heads: Heads) -> slice:
        H, HV, _, _ = self.sizes
        return slice(heads[0] * (HV // H), heads[1] * (HV // H))

    def all_heads(self) -> Heads:
        return 0, self.sizes[0]

    def as_given(self, states: Tensor) -> Tensor:
        """States with their values first where the caller's are."""
        return states.mT.contiguous() if self.rest[-1] else states

    def new_states(self, count: int, heads: Optional[Heads] = None, dtype: Optional[torch.dtype] = None) -> Tensor:
        _, HV, K, V = self.sizes
        chosen = self.values(heads or self.all_heads())
        return self["q"].new_zeros((count, chosen.stop - chosen.start, K, V), dtype=dtype or self.dtype)

    def new_roundings(self, count: int, heads: Optional[Heads] = None) -> Tensor:
        """What the kernels know about the roundings in so many states."""
        chosen = self.values(heads or self.all_heads())
        size = _core.roundings_size(self.sizes[2])
        return self["q"].new_zeros((count, chosen.stop - chosen.start, size), dtype=torch.float32)

    def run(self, direction: str, inputs: List[Maybe], first: List[Maybe], second: List[Maybe],
            roundings: List[Maybe]) -> None:
        """A call of the library on a piece of the whole."""
        if self.memory is None:
            self.memory = _core.Memory()
        _core.run_piece(direction, self.op, inputs, first, second, self.options, self.whole, roundings,
                        self.memory)

    def cut(self, name: str, x: Tensor, tokens: slice, heads: Heads) -> Tensor:
        """Of an input, or of what has its shape, the tokens and heads; a view."""
        if name in _OF_KEY_HEADS:
            return x[:, tokens, heads[0] : heads[1]]
        chosen = self.values(heads)
        if name in _OF_VALUE_HEADS or name == "o":
            return x[:, tokens, chosen]
        per_head = x.numel() // self.sizes[1]  # dt_bias may have K numbers for each
        return x[chosen.start * per_head : chosen.stop * per_head]

    def inputs(self, tokens: slice, heads: Heads, start: Maybe, cu_seqlens: Tensor) -> List[Maybe]:
        """What the library takes."""
        given = ((name, self.tensors[name]) for name in DIFFERENTIABLE[:-1])
        return [*(None if x is None else self.cut(name, x, tokens, heads) for name, x in given), start, cu_seqlens]


def check(call: Call, layout: Layout) -> None:
    """What has to hold before an output can be cut into parts; the library checks the rest."""
    tokens = layout.lengths[layout.rank]
    for name in TOKENS:
        x = call.tensors[name]
        if x is not None and (x.dim() < 3 or x.shape[0] != 1 or x.shape[1] != tokens):
            raise ValueError(f"{name}: expected the {tokens} tokens of this rank in the context's batch, [1, {tokens}, "
                             f"...], got shape {list(x.shape)}")
    H, HV, K, V = call.sizes
    if H == 0 or HV % H:
        raise ValueError(f"v: expected a multiple of the {H} heads of q, got {HV}")
    for name, heads in ((n, H if n in _OF_KEY_HEADS else HV) for n in TOKENS):
        x = call.tensors[name]
        if x is not None and x.shape[2] != heads:
            raise ValueError(f"{name}: expected {heads} heads, got shape {list(x.shape)}")
    for name in _OF_PARAMETERS:
        x = call.tensors[name]
        if x is not None and (x.dim() != 1 or x.numel() == 0 or x.numel() % HV):
            raise ValueError(f"{name}: expected the values of {HV} heads, got shape {list(x.shape)}")
    state = call.tensors["initial_state"]
    if state is not None and tuple(state.shape) != (layout.pieces, HV, K, V):
        raise ValueError(f"initial_state: expected shape {[layout.pieces, HV, K, V]}, a state for each piece of the "
                         f"rank, got {list(state.shape)} (keys first)")


def start_states(call: Call, part: Part, heads: Heads, state: Maybe) -> Maybe:
    """The states before a part's pieces: the one that enters, else the caller's."""
    given = call.tensors["initial_state"]
    if state is not None or given is None:
        return state
    return given[part.first : part.last, call.values(heads)]


@contextmanager
def naming(whose: str, begin: int, heads: Heads) -> Iterator[None]:
    """Says of what part of the tensors an error speaks, whose indices are those of the part."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error} (in the tokens {whose} from {begin}, heads of q from {heads[0]})") from error


def forward(call: Call, part: Part, heads: Heads, start: Maybe, o: Tensor, after: Maybe,
            roundings: Tuple[Maybe, Maybe] = (None, None)) -> None:
    """Computes the part of o, and the states after its pieces into `after` [pieces, heads, K, V].

    roundings: of the states before and after.
    """
    tokens = slice(part.begin, part.end)
    with naming("of the rank", part.begin, heads):
        call.run("forward", call.inputs(tokens, heads, start, part.cu_seqlens),
                 [call.cut("o", o, tokens, heads), after], [], list(roundings))


class Gradients:
    """The gradients of a call's inputs, made part by part: those of tokens written once, of parameters summed up."""

    def __init__(self, call: Call, wanted: Sequence[int]) -> None:
        self.call, self.wanted = call, [DIFFERENTIABLE[i] for i in wanted]
        self.tensors: Dict[str, Tensor] = {}
        for name in self.wanted:
            if name in TOKENS:
                self.tensors[name] = empty_like(call[name])
            elif name in _OF_PARAMETERS:
                self.tensors[name] = torch.zeros_like(call[name], dtype=torch.float64)
            else:
                self.tensors[name] = call.new_states(call[name].shape[0])

    def backward(self, part: Part, heads: Heads, state: Maybe, d_o: Maybe, d_state: Maybe, d_entered: Maybe,
                 d_after: Maybe, roundings: Tuple[Maybe, Maybe, Maybe] = (None, None, None)) -> None:
        """Adds what the part gives.

        state: that entered, and d_entered: where its gradient goes. d_state: the gradient of the state that left, which
        others used; of pieces with which sequences end it is in d_after [pieces, HV, K, V]. roundings: of state,
        d_state and d_entered.
        """
        arguments = self.arguments(part, heads, state, d_o, d_state, d_entered, d_after)
        targets = dict(zip(DIFFERENTIABLE, arguments[2]))
        if all(target is None for target in arguments[2]):
            return
        with naming("of the rank", part.begin, heads):
            self.call.run("backward", *arguments, list(roundings))
        for name in _OF_PARAMETERS:
            target = targets[name]
            if target is not None:
                self.call.cut(name, self.tensors[name], slice(None), heads).add_(target)

    def arguments(self, part: Part, heads: Heads, state: Maybe, d_o: Maybe, d_state: Maybe, d_entered: Maybe,
                  d_after: Maybe) -> Tuple[List[Maybe], List[Maybe], List[Maybe]]:
        """(inputs, gradients of outputs, gradients) of the library's backward."""
        call, tokens, chosen = self.call, slice(part.begin, part.end), self.call.values(heads)
        d_start = self.tensors.get("initial_state")
        if d_entered is not None:
            d_start = d_entered
        elif d_start is not None:
            d_start = d_start[part.first : part.last, chosen]
        if d_state is None and d_after is not None:
            d_state = d_after[part.first : part.last, chosen]
        targets: Dict[str, Tensor] = {}
        for name, x in self.tensors.items():
            if name in TOKENS:
                targets[name] = call.cut(name, x, tokens, heads)
            elif name in _OF_PARAMETERS:
                targets[name] = torch.empty_like(call.cut(name, call[name], tokens, heads), dtype=call.dtype)
        if d_start is not None:
            targets["initial_state"] = d_start
        if d_o is not None:
            d_o = call.cut("o", d_o, tokens, heads)
        elif d_state is None:
            d_o = torch.zeros_like(call.cut("v", call["v"], tokens, heads))
        inputs = call.inputs(tokens, heads, start_states(call, part, heads, state), part.cu_seqlens)
        return inputs, [d_o, d_state], [targets.get(name) for name in DIFFERENTIABLE]

    def results(self) -> List[Tensor]:
        """In the order of `wanted`, in the types and layouts of the inputs."""
        results = []
        for name in self.wanted:
            x = self.tensors[name].to(self.call[name].dtype)
            results.append(self.call.as_given(x) if name == "initial_state" else x)
        return results
