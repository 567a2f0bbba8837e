"""Operators for JAX on CPUs and GPUs, through XLA's foreign function interface: they compile, map and differentiate.

    from headrace.jax import chunk_kda
    o, final_state = chunk_kda(q, k, v, g, beta, output_final_state=True)

``attention(op, q, k, v, ...)`` computes any operator, ``step`` a token of it for decoding; the other functions have the
names and the argument order of ``headrace.torch``. Shapes: q, k, p [B, T, H, K]; v, o [B, T, HV, V], HV a multiple of
H; g [B, T, HV], or [B, T, HV, K] for gla and kda; gv [B, T, HV, V]; beta [B, T, HV] or [B, T, HV, V]; g_gamma, A_log
[HV]; dt_bias [HV], [HV, K] or [HV * K], as A_log also in other shapes of as many values; states [N, HV, K, V], or
[N, HV, V, K] with state_v_first. Types: float64, float32, bfloat16, float16; gates, beta and states float64 only beside
float64 q. Where q, k, v and p have several, the call computes in the least that holds them all; o has the type of q,
gradients have those of their inputs. N is B, or len(cu_seqlens) - 1 with B = 1. g is a log decay; with
use_gate_in_kernel it is made from g, as -exp(A_log) softplus(g + dt_bias), or lower_bound sigmoid(exp(A_log) (g +
dt_bias)) where a lower_bound in [-5, 0) is given, with which A_log may be None and is 0.

Every function returns (o, final_state), the latter float32 (float64 in a float64 call) or None, and has gradients by
all its floating arguments, of first order and in reverse mode; step has none. Wrong shapes, types and options raise
ValueError or TypeError while tracing; wrong values (a gate that is positive or NaN, offsets) raise
jax.errors.JaxRuntimeError when they are seen; on a GPU nobody looks: a wrong gate makes NaN of its head. Formulas:
docs/math.md of the project, recurrences in its section 2, gradients in 3.
"""

from headrace._arguments import document
from headrace._versions import require

require("headrace.jax", "jax")

from headrace.jax._functions import (  # noqa: E402, F401
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
    fused_chunk_simple_gla,
    fused_recurrent_comba,
    fused_recurrent_delta_rule,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn,
    fused_recurrent_gla,
    fused_recurrent_kda,
    fused_recurrent_lightning_attn,
    fused_recurrent_retention,
    fused_recurrent_simple_gla,
    step,
)
from headrace.jax._layer_functions import rms_norm_gated, short_convolution  # noqa: E402, F401

__all__ = [name for name in dir() if name.startswith(("chunk_", "fused_"))] + ["attention", "step"]

document({globals()[name] for name in __all__}, __doc__)

__all__ += ["rms_norm_gated", "short_convolution"]
