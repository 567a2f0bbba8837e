"""Layers for training and decoding, with the parameter names of flash-linear-attention's layers.

    cache = Cache()
    for tokens in (prompt, next_token, ...):                  # [B, T, hidden_size] each
        o, _, _ = layer(tokens, past_key_values=cache, use_cache=True)

layer(hidden_states, attention_mask, past_key_values, use_cache, cu_seqlens=...) returns (o, None, past_key_values). For
a cache, layers need their layer_idx.
"""

from headrace.torch.nn._cache import Cache
from headrace.torch.nn._delta import Comba, GatedDeltaNet, KimiDeltaAttention
from headrace.torch.nn._gated_linear_attention import GatedLinearAttention, SimpleGatedLinearAttention
from headrace.torch.nn._lightning import LightningAttention, lightning_gates
from headrace.torch.nn._modules import FusedRMSNormGated, RMSNormGated, ShortConvolution

__all__ = [
    "Cache", "Comba", "FusedRMSNormGated", "GatedDeltaNet", "GatedLinearAttention", "KimiDeltaAttention",
    "LightningAttention", "RMSNormGated", "ShortConvolution", "SimpleGatedLinearAttention", "lightning_gates",
]
