"""Operators for JAX on CPUs, through XLA's foreign function interface: they compile, map, shard and differentiate.

    from headrace.jax import chunk_kda
    o, final_state = chunk_kda(q, k, v, g, beta, output_final_state=True)

``attention(op, q, k, v, ...)`` computes any operator; the other functions have the names and the argument order of
``headrace.torch``. Shapes: q, k, p [B, T, H, K]; v, o [B, T, HV, V], HV a multiple of H; g [B, T, HV], or
[B, T, HV, K] for gla and kda; gv [B, T, HV, V]; beta [B, T, HV] or [B, T, HV, V]; g_gamma, A_log [HV]; dt_bias [HV],
[HV, K] or [HV * K]; states [N, HV, K, V], or [N, HV, V, K] with state_v_first. q, k, v and p share one of float64,
float32, bfloat16, float16; gates, beta and states may have any of them. N is B, or len(cu_seqlens) - 1 with B = 1.

Every function returns (o, final_state), the latter float32 (float64 for float64 q) or None, and has gradients by all its
floating arguments, of first order and in reverse mode. Wrong shapes, types and options raise ValueError or TypeError
while tracing; wrong values (a gate that is positive or NaN, offsets) raise jax.errors.JaxRuntimeError when they are seen.
"""

try:
    import jax as _jax
except ImportError as error:
    raise ImportError("headrace.jax: expected jax 0.10 or newer, found none: pip install 'headrace[jax]'") from error
if _jax.__version_info__ < (0, 10):
    raise ImportError(f"headrace.jax: expected jax 0.10 or newer, got {_jax.__version__}")

from headrace.jax._functions import (  # noqa: E402
    attention,
    chunk_comba,
    chunk_delta_rule,
    chunk_gated_delta_rule,
    chunk_gdn,
    chunk_gla,
    chunk_kda,
    chunk_lightning_attn,
    chunk_retention,
    chunk_simple_gla,
)

__all__ = ["attention", "chunk_comba", "chunk_delta_rule", "chunk_gated_delta_rule", "chunk_gdn", "chunk_gla", "chunk_kda",
           "chunk_lightning_attn", "chunk_retention", "chunk_simple_gla"]
