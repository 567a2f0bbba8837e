"""The layers of the additive rule whose gates depend on the data: gated linear attention, by channel and by head."""

from __future__ import annotations

from functools import partial
from typing import Callable, Dict, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace._arguments import checked
from headrace.torch import fused_recurrent_gla, fused_recurrent_simple_gla
from headrace.torch.nn._layer import Layer, heads
from headrace.torch.nn._modules import RMSNormGated


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


_ACTIVATIONS: Dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "logsigmoid": F.logsigmoid,
    "silu": F.silu,
    "swish": F.silu,
    "sqrelu": _squared_relu,
    "gelu": partial(F.gelu, approximate="tanh"),
}


def _activation(argument: str, name: str) -> Callable[[Tensor], Tensor]:
    if name not in _ACTIVATIONS:
        raise ValueError(f"{argument}: expected one of {', '.join(_ACTIVATIONS)}, got {name!r}")
    return _ACTIVATIONS[name]


def _share(argument: str, hidden_size: int, expand: float, num_heads: int) -> int:
    """hidden_size * expand, which the heads share."""
    size = round(hidden_size * expand)
    if abs(size - hidden_size * expand) > 1e-9 * hidden_size or size % num_heads:
        raise ValueError(f"{argument}: expected hidden_size {hidden_size} times it to be a multiple of num_heads "
                         f"{num_heads}, got {expand}")
    return size


class _AdditiveLayer(Layer):
    """Queries may have more heads than keys and values, and a feature map; any activation may gate the output."""

    def __init__(self, hidden_size: int, expand_k: float, expand_v: float, num_heads: int, num_kv_heads: Optional[int],
                 feature_map: Optional[str], conv_size: Optional[int], conv_bias: bool, use_output_gate: bool,
                 gate_fn: str, elementwise_affine: Optional[bool], norm_eps: float, fuse_norm: bool,
                 layer_idx: Optional[int]) -> None:
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads: expected a divisor of num_heads {num_heads}, got {num_kv_heads}")
        self.num_kv_groups = num_heads // self.num_kv_heads
        key_dim = _share("expand_k", hidden_size, expand_k, num_heads)
        value_dim = _share("expand_v", hidden_size, expand_v, num_heads)
        super().__init__(hidden_size, key_dim, key_dim // self.num_kv_groups, value_dim,
                         value_dim // self.num_kv_groups, key_dim // num_heads, value_dim // num_heads, conv_size,
                         conv_bias, layer_idx)
        self.feature_map_fn = None if feature_map is None else _activation("feature_map", feature_map)
        self.use_output_gate = use_output_gate
        self.gate_fn = _activation("gate_fn", gate_fn)
        self.fuse_norm_and_gate = gate_fn == "swish" and fuse_norm and use_output_gate
        if use_output_gate:
            self.g_proj = nn.Linear(hidden_size, value_dim, bias=False)
        affine = bool(elementwise_affine)
        if self.fuse_norm_and_gate:
            self.g_norm_swish_gate = RMSNormGated(self.head_v_dim, affine, norm_eps)
        else:
            self.g_norm = RMSNormGated(self.head_v_dim, affine, norm_eps, dtype=torch.float32)

    def _without_convolution(self, x: Tensor) -> Tensor:
        return x

    def _grouped(self, x: Tensor) -> Tensor:
        """[B, T, kv heads, D] as [B, T, heads, D]."""
        return x if self.num_kv_groups == 1 else x.repeat_interleave(self.num_kv_groups, 2)

    def _mapped(self, q: Tensor, k: Tensor) -> Tuple[Tensor, Tensor]:
        return (q, k) if self.feature_map_fn is None else (self.feature_map_fn(q), self.feature_map_fn(k))

    def _output(self, x: Tensor, o: Tensor) -> Tensor:
        if not self.use_output_gate:
            return self.g_norm(o).flatten(-2)
        gate = heads(self.g_proj(x), self.head_v_dim)
        if self.fuse_norm_and_gate:
            return self.g_norm_swish_gate(o, gate).flatten(-2)
        return (self.g_norm(o) * self.gate_fn(gate)).flatten(-2)


class GatedLinearAttention(_AdditiveLayer):
    """Gated linear attention, a decay for every key channel: logsigmoid(gk_proj(x)) / gate_logit_normalizer.

    Source: Yang et al., Gated Linear Attention Transformers with Hardware-Efficient Training, arXiv:2312.06635.
    Arguments and parameters are those of flash-linear-attention's layer; `mode` changes nothing, the library chooses
    the form. num_kv_heads: heads of k, v and gates, a divisor of num_heads. clamp_min: least log decay. Raises
    ValueError.
    """

    @checked
    def __init__(self, mode: str = "chunk", hidden_size: int = 1024, expand_k: float = 0.5, expand_v: float = 1.0,
                 num_heads: int = 4, num_kv_heads: Optional[int] = None, feature_map: Optional[str] = None,
                 use_short_conv: bool = False, conv_size: int = 4, conv_bias: bool = False,
                 use_output_gate: bool = True, gate_fn: str = "swish", elementwise_affine: Optional[bool] = True,
                 norm_eps: float = 1e-5, gate_logit_normalizer: float = 16, gate_low_rank_dim: int = 16,
                 clamp_min: Optional[float] = None, fuse_norm: bool = True, layer_idx: Optional[int] = None) -> None:
        super().__init__(hidden_size, expand_k, expand_v, num_heads, num_kv_heads, feature_map,
                         conv_size if use_short_conv else None, conv_bias, use_output_gate, gate_fn, elementwise_affine,
                         norm_eps, fuse_norm, layer_idx)
        self.gk_proj = nn.Sequential(nn.Linear(hidden_size, gate_low_rank_dim, bias=False),
                                     nn.Linear(gate_low_rank_dim, self.key_dim // self.num_kv_groups))
        self.gate_logit_normalizer, self.clamp_min = gate_logit_normalizer, clamp_min

    def _operator(self, x, q, k, v, options, positions):
        q, k = self._mapped(q, k)
        gk = F.logsigmoid(heads(self.gk_proj(x), self.head_k_dim)) / self.gate_logit_normalizer
        if self.clamp_min is not None:
            gk = gk.clamp_min(self.clamp_min)
        return fused_recurrent_gla(q, self._grouped(k), self._grouped(v), self._grouped(gk), **options)


class SimpleGatedLinearAttention(_AdditiveLayer):
    """Gated linear attention with one decay per head: logsigmoid(gk_proj(x)) / gate_logit_normalizer.

    Arguments and parameters are those of flash-linear-attention's layer; `mode` changes nothing. num_kv_heads: heads of
    k and v, a divisor of num_heads. Raises ValueError.
    """

    @checked
    def __init__(self, mode: str = "chunk", hidden_size: int = 1024, expand_k: float = 1.0, expand_v: float = 1.0,
                 num_heads: int = 4, num_kv_heads: Optional[int] = None, feature_map: Optional[str] = None,
                 use_short_conv: bool = True, conv_size: int = 4, conv_bias: bool = False, gate_fn: str = "swish",
                 elementwise_affine: Optional[bool] = True, norm_eps: float = 1e-5, gate_logit_normalizer: float = 16,
                 fuse_norm: bool = True, layer_idx: Optional[int] = None) -> None:
        super().__init__(hidden_size, expand_k, expand_v, num_heads, num_kv_heads, feature_map,
                         conv_size if use_short_conv else None, conv_bias, True, gate_fn, elementwise_affine, norm_eps,
                         fuse_norm, layer_idx)
        self.gk_proj = nn.Linear(hidden_size, num_heads)
        self.gate_logit_normalizer = gate_logit_normalizer

    def _operator(self, x, q, k, v, options, positions):
        q, k = self._mapped(q, k)
        g = F.logsigmoid(self.gk_proj(x)) / self.gate_logit_normalizer
        return fused_recurrent_simple_gla(q, self._grouped(k), self._grouped(v), g, **options)
