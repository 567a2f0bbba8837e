"""What a stack of layers remembers between calls of decoding."""

from __future__ import annotations

from typing import Callable, Iterator, List, Optional, Tuple, TypedDict

from torch import Tensor


class State(TypedDict):
    recurrent_state: Optional[Tensor]
    conv_state: Optional[Tuple[Tensor, ...]]


class Cache:
    """The states of the layers of one model, from call to call: pass it as past_key_values, with use_cache=True.

    cache[layer_idx] is None or {"recurrent_state": [N, HV, K, V], "conv_state": three [N, D, W], oldest input first, or
    None}, N sequences. A call of one token without autograd updates the states in place.
    """

    def __init__(self) -> None:
        self._layers: List[Optional[State]] = []
        self._seen_tokens: List[int] = []

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, layer_idx: int) -> Optional[State]:
        return self._layers[layer_idx]

    def __iter__(self) -> Iterator[Optional[State]]:
        return iter(self._layers)

    def update(self, recurrent_state: Optional[Tensor] = None, conv_state: Optional[Tuple[Tensor, ...]] = None,
               layer_idx: int = 0, offset: int = 1) -> State:
        """Replaces the states that are given, and counts `offset` more tokens. Returns the states of the layer."""
        while len(self._layers) <= layer_idx:
            self._layers.append(None)
            self._seen_tokens.append(0)
        state = self._layers[layer_idx] or {"recurrent_state": None, "conv_state": None}
        if recurrent_state is not None:
            state["recurrent_state"] = recurrent_state
        if conv_state is not None:
            state["conv_state"] = conv_state
        self._layers[layer_idx] = state
        self._seen_tokens[layer_idx] += offset
        return state

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that the layer has seen, padding included."""
        return self._seen_tokens[layer_idx] if layer_idx < len(self._layers) else 0

    def reset(self) -> None:
        """Forgets everything."""
        self._layers.clear()
        self._seen_tokens.clear()

    def select(self, indices: Tensor) -> None:
        """Keeps the sequences `indices` [M], in that order; the same one may come twice (beam search)."""
        self._replace(lambda state: state.index_select(0, indices))

    reorder_cache = select

    def detach(self) -> None:
        """Copies the states without their history: gradients of later calls end here (truncated backpropagation)."""
        self._replace(lambda state: state.detach().clone())

    def _replace(self, function: Callable[[Tensor], Tensor]) -> None:
        for state in filter(None, self._layers):
            if state["recurrent_state"] is not None:
                state["recurrent_state"] = function(state["recurrent_state"])
            if state["conv_state"] is not None:
                state["conv_state"] = tuple(map(function, state["conv_state"]))
