"""What the layers share: projections, short convolutions, states from call to call, padding, the output."""

from __future__ import annotations

from typing import Any, Dict, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace._arguments import flag
from headrace.torch.nn._cache import Cache
from headrace.torch.nn._modules import ShortConvolution
from headrace.torch.nn._padding import repad, take, unpad

Maybe = Optional[Tensor]


def heads(x: Tensor, size: int) -> Tensor:
    """[B, T, heads * size] as [B, T, heads, size]."""
    return x.view(*x.shape[:-1], x.shape[-1] // size, size)


def steps_in_place(x: Tensor, state: Tensor, keep: bool, cu_seqlens: Maybe) -> bool:
    """Whether x [B, T, ...] is one token after a state that may be overwritten, because no gradient needs it."""
    return (keep and x.shape[1] == 1 and cu_seqlens is None and not torch.is_grad_enabled()
            and not state.requires_grad)


class Layer(nn.Module):
    """q, k, v projections -> convolutions or an activation -> operator -> norm, gated -> output projection.

    A layer adds its gates and defines `_operator` and `_output`.
    """

    def __init__(self, hidden_size: int, key_dim: int, kv_key_dim: int, value_dim: int, kv_value_dim: int,
                 head_k_dim: int, head_v_dim: int, conv_size: Optional[int], conv_bias: bool,
                 layer_idx: Optional[int]) -> None:
        """key_dim, value_dim: sizes of q and o; kv_key_dim, kv_value_dim: k and v. conv_size None: no convolutions."""
        super().__init__()
        self.hidden_size, self.layer_idx = hidden_size, layer_idx
        self.key_dim, self.value_dim, self.head_k_dim, self.head_v_dim = key_dim, value_dim, head_k_dim, head_v_dim
        self.use_short_conv = conv_size is not None
        self.q_proj = nn.Linear(hidden_size, key_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, kv_key_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, kv_value_dim, bias=False)
        if conv_size is not None:
            self.q_conv1d = ShortConvolution(key_dim, conv_size, conv_bias)
            self.k_conv1d = ShortConvolution(kv_key_dim, conv_size, conv_bias)
            self.v_conv1d = ShortConvolution(kv_value_dim, conv_size, conv_bias)
        self.o_proj = nn.Linear(value_dim, hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, attention_mask: Maybe = None, past_key_values: Optional[Cache] = None,
                use_cache: Optional[bool] = False, output_attentions: Optional[bool] = False, **kwargs: Any,
                ) -> Tuple[Tensor, None, Optional[Cache]]:
        """(o [B, T, hidden_size], None, past_key_values).

        hidden_states: [B, T, hidden_size]. attention_mask [B, S >= T]: 0 is padding, on either side or in between; it
        leaves the states alone and its outputs are zero. past_key_values: a Cache, from which the states come; with
        use_cache the states after hidden_states go there. kwargs: cu_seqlens [N + 1] of a ragged batch (B = 1), which
        goes before the mask, position_embeddings (LightningAttention), and cp_context: hidden_states are the rank's
        tokens of a batch that is cut over ranks (headrace.torch.distributed), without mask and cache. Others are
        ignored.
        There are no attention weights to output.
        """
        cp_context = kwargs.get("cp_context")
        if cp_context is not None:
            for name, value in (("attention_mask", attention_mask), ("past_key_values", past_key_values)):
                if value is not None:
                    raise ValueError(f"{name}: expected None with a cp_context, got it too")
        if output_attentions is not None:
            flag("output_attentions", output_attentions)
        B, T, _ = hidden_states.shape
        x, cu_seqlens, places = unpad(hidden_states, attention_mask, kwargs.get("cu_seqlens"))
        state, conv_state = self._past(past_key_values)
        cache = past_key_values if use_cache is not None and flag("use_cache", use_cache) else None
        keep = cache is not None
        q, k, v, conv_state = self._q_k_v(x, conv_state, keep, cu_seqlens, cp_context)
        if state is not None and steps_in_place(x, state, keep, cu_seqlens):
            options: Dict[str, Any] = {"initial_state": state, "inplace_final_state": True}
        else:
            options = {"initial_state": state, "output_final_state": keep, "cu_seqlens": cu_seqlens,
                       "cp_context": cp_context}
        positions = tuple(take(t.expand(B, T, -1), places) for t in kwargs.get("position_embeddings") or ())
        o, state = self._operator(x, q, k, v, options, positions)
        if cache is not None:
            cache.update(recurrent_state=state, conv_state=conv_state, layer_idx=self._place(), offset=T)
        o = self.o_proj(self._output(x, o))
        return repad(o, places, B, T), None, past_key_values

    def _operator(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, options: Dict[str, Any],
                  positions: Tuple[Tensor, ...]) -> Tuple[Tensor, Maybe]:
        """(o [B, T, HV, V], final state) of q, k [B, T, H, K] and v [B, T, HV, V].

        options: arguments of the operator about states and sequences. positions: nothing or (cos, sin), [B, T, R] each.
        The layers call the fused_recurrent form in training too: it is the chunk form by its other name.
        """
        raise NotImplementedError

    def _output(self, x: Tensor, o: Tensor) -> Tensor:
        """o [B, T, HV, V] normalised and gated, [B, T, HV * V]."""
        raise NotImplementedError

    def _place(self) -> int:
        if self.layer_idx is None:
            raise ValueError("layer_idx: expected the layer's place in the cache with past_key_values, got None")
        return self.layer_idx

    def _past(self, past_key_values: Optional[Cache]) -> Tuple[Maybe, Optional[Tuple[Tensor, ...]]]:
        """The states from which to start, of the operator and of the convolutions."""
        if past_key_values is None:
            return None, None
        place = self._place()
        past = past_key_values[place] if len(past_key_values) > place else None
        return (past["recurrent_state"], past["conv_state"]) if past else (None, None)

    def _q_k_v(self, x: Tensor, past: Optional[tuple], keep: bool, cu_seqlens: Maybe,
               cp_context: Any) -> tuple:
        """q, k, v by heads, and the states of their convolutions."""
        projected: Sequence[Tensor] = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        states = None
        if self.use_short_conv:
            convolutions = self.q_conv1d, self.k_conv1d, self.v_conv1d
            if past is not None and not keep:
                past = tuple(cache.clone() for cache in past)  # a convolution may overwrite its own
            projected, states = zip(*(
                convolution(y, cache=cache, output_final_state=keep, cu_seqlens=cu_seqlens,
                            cp_context=cp_context)
                for convolution, y, cache in zip(convolutions, projected, past or (None, None, None))))
        else:
            projected = [self._without_convolution(y) for y in projected]
        q, k, v = projected
        return heads(q, self.head_k_dim), heads(k, self.head_k_dim), heads(v, self.head_v_dim), states

    def _without_convolution(self, x: Tensor) -> Tensor:
        """What q, k and v pass through in a layer without convolutions."""
        return F.silu(x)
