"""Operators for PyTorch under the names, argument orders and layouts of flash-linear-attention's public interface.

Shapes: q, k, p [B, T, H, K]; v, o [B, T, HV, V], HV a multiple of H; g [B, T, HV], or [B, T, HV, K] for gla and kda;
beta [B, T, HV]; g_gamma, A_log [HV]; dt_bias [HV], for gla and kda also [HV, K] or [HV * K], as A_log also in other
shapes of as many values; states [N, HV, K, V], or [N, HV, V, K] with state_v_first. Types: float64, float32, bfloat16,
float16; gates, beta and states float64 only beside float64 q. Where q, k, v and p have several, the call computes in
the least that holds them all, and gradients have the types of their inputs. N is B, or len(cu_seqlens) - 1 with B = 1.
g is a log decay; with use_gate_in_kernel it is made from g, as -exp(A_log) softplus(g + dt_bias), or lower_bound
sigmoid(exp(A_log) (g + dt_bias)) where a lower_bound in [-5, 0) is given, with which A_log may be None and is 0. Every
function returns (o, final_state), the latter float32 (float64 in a float64 call) or None, and is differentiable by all
its tensors. They lie on the CPU, or on one CUDA device in a build with CUDA: such a call is queued on the current
stream, and no values are checked there; cu_seqlens may stay on the CPU. DTensors on one mesh, replicas, cut by heads
(q: Shard(2)) or by sequences (Shard(0)), are computed where they lie and give DTensors. All raise ValueError or
TypeError naming the argument, what was expected and what came.
Formulas: docs/math.md of the project, recurrences in its section 2, gradients in 3.
"""

from headrace._arguments import document
from headrace._versions import require

require("headrace.torch", "torch")

from headrace.torch._bind import bind  # noqa: E402, F401
from headrace.torch._functions import (  # noqa: E402, F401
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
)
from headrace.torch._layer_functions import (  # noqa: E402, F401
    rms_norm_gated,
    short_convolution,
    short_convolution_step,
)

__all__ = [name for name in dir() if name.startswith(("chunk_", "fused_"))]

document({globals()[name] for name in __all__}, __doc__)

__all__ += ["bind", "rms_norm_gated", "short_convolution", "short_convolution_step"]
