"""Lightning attention: the additive rule with a constant decay per head, as Ling, Ring and MiniMax models have it."""

from __future__ import annotations

import math
from typing import Callable, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace._arguments import checked
from headrace.torch import fused_recurrent_simple_gla
from headrace.torch._dtensor import part_of
from headrace.torch.nn._layer import Layer, heads
from headrace.torch.nn._modules import RMSNormGated

# By how much layer l of L multiplies the slopes. The off-by-one of the first belongs to the published checkpoints.
_LAYER_SCALES = {
    "bailing": lambda l, L: 1 - (l - 1) / max(L - 1, 1) + 1e-5,
    "maxtext": lambda l, L: 1 - l / max(L - 1, 1) + 1e-5,
    "minimax": lambda l, L: 1 - l / (L - 1 + 1e-5) + 1e-5,
}


def _slopes(num_heads: int) -> list:
    """2^(-8 (h + 1) / n) for n heads; where n is no power of two, every second slope of the next power fills up."""
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    return slopes if power == num_heads else slopes + _slopes(2 * power)[::2][: num_heads - power]


def lightning_gates(num_heads: int, layer_idx: int, num_layers: int, gate_convention: str = "bailing") -> Tensor:
    """g_gamma [num_heads], float64, of layer layer_idx = 0 ... num_layers - 1: minus slope times layer scale.

    gate_convention: "bailing" (checkpoints of Ling and Ring), "maxtext" (also Megatron's) or "minimax". Raises
    ValueError.
    """
    if gate_convention not in _LAYER_SCALES:
        raise ValueError(f"gate_convention: expected one of {', '.join(_LAYER_SCALES)}, got {gate_convention!r}")
    if not 0 <= layer_idx < num_layers:
        raise ValueError(f"layer_idx: expected 0 to num_layers - 1 = {num_layers - 1}, got {layer_idx}")
    layer_scale = _LAYER_SCALES[gate_convention](layer_idx, num_layers)
    return torch.tensor(_slopes(num_heads), dtype=torch.float64) * -layer_scale


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding by halves of the first R channels of x [B, T, H, K]; cos, sin: [B, T, R]."""
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    turned, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    first, second = turned.chunk(2, -1)
    turned = turned * cos + torch.cat([-second, first], -1) * sin
    return torch.cat([turned.to(x.dtype), rest], -1)


class LightningAttention(Layer):
    """Lightning attention. Head h decays by exp(g_gamma[h]) at each token, g_gamma = lightning_gates(...) a buffer.

    Source: Qin et al., Lightning Attention-2, arXiv:2401.04658; the variants are those of MiniMax-Text-01 and of the
    Ling and Ring linear models. q, k and v pass `activation` (None or "silu"), q and k an RMS norm of each head
    (qk_norm) and a rotation, where forward gets position_embeddings = (cos, sin), [B or 1, T, R] each, for their first
    R channels. The output passes an RMS norm over norm_groups equal parts and a sigmoid gate. num_kv_heads: heads of k
    and v, a divisor of num_heads. scale: of q, None is head_dim^(-1/2). MiniMax-Text-01: gate_convention "minimax",
    activation "silu", scale 1. Parameters: q_proj, k_proj, v_proj, g_proj, g_norm, o_proj, with qk_norm q_norm and
    k_norm. Raises ValueError.
    """

    g_gamma: Tensor
    own_heads = slice(None)  # those of this rank, where heads are distributed

    @checked
    def __init__(self, hidden_size: int = 2048, num_heads: int = 16, head_dim: Optional[int] = None,
                 num_kv_heads: Optional[int] = None, *, num_layers: int, layer_idx: int,
                 gate_convention: str = "bailing", activation: Optional[str] = None, qk_norm: bool = False,
                 norm_groups: int = 1, scale: Optional[float] = None, norm_eps: float = 1e-5) -> None:
        head_dim = hidden_size // num_heads if head_dim is None else head_dim
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads: expected a divisor of num_heads {num_heads}, got {num_kv_heads}")
        if activation not in (None, "silu"):
            raise ValueError(f"activation: expected None or 'silu', got {activation!r}")
        size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
        super().__init__(hidden_size, size, kv_size, size, kv_size, head_dim, head_dim, None, False, layer_idx)
        self.num_heads, self.num_kv_heads, self.num_layers = num_heads, num_kv_heads, num_layers
        self.gate_convention, self.activation, self.scale = gate_convention, activation, scale
        self.q_norm = RMSNormGated(head_dim, eps=norm_eps) if qk_norm else None
        self.k_norm = RMSNormGated(head_dim, eps=norm_eps) if qk_norm else None
        self.g_proj = nn.Linear(hidden_size, size, bias=False)
        self.g_norm = RMSNormGated(size, eps=norm_eps, activation="sigmoid", groups=norm_groups)
        self.register_buffer("g_gamma", self._gates().float(), persistent=False)

    def _gates(self) -> Tensor:
        gates = lightning_gates(self.num_heads, self._place(), self.num_layers, self.gate_convention)
        return gates[self.own_heads]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LightningAttention:
        """Conversions of the module leave the gates at least float32: their digits are memory lengths."""
        super()._apply(fn, recurse)
        gates = self._gates().to(self.g_gamma.device, torch.promote_types(self.g_gamma.dtype, torch.float32))
        self.g_gamma = part_of(self.g_gamma, gates)
        return self

    def _without_convolution(self, x: Tensor) -> Tensor:
        return x if self.activation is None else F.silu(x)

    def _operator(self, x, q, k, v, options, positions):
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if positions:
            q, k = _rotated(q, *positions), _rotated(k, *positions)
        if self.num_kv_heads < self.num_heads:
            k, v = (t.repeat_interleave(self.num_heads // self.num_kv_heads, 2) for t in (k, v))
        g_gamma = self.g_gamma
        if q.dtype == torch.float64 and g_gamma.dtype != torch.float64:  # parameters were assigned, not converted
            g_gamma = self._gates().to(q.device)
        return fused_recurrent_simple_gla(q, k, v, g_gamma=g_gamma, scale=self.scale, **options)

    def _output(self, x: Tensor, o: Tensor) -> Tensor:
        return self.g_norm(o.flatten(-2), self.g_proj(x))
