"""The functions of headrace.jax: user arguments in, one differentiable operator out. Sources of the formulas: docs/math.md."""

from __future__ import annotations

from typing import Optional, Tuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from headrace import _core
from headrace._arguments import INPUTS, beta_form, gate_form, options
from headrace.jax import _primitive
from headrace.numpy import _view

Result = Tuple[Array, Optional[Array]]


def _checked_arrays(tensors: dict) -> dict:
    """The arrays given; what must hold before an output has a shape."""
    arrays = {name: jnp.asarray(x) for name, x in tensors.items() if x is not None}
    q = arrays["q"]
    for name, x in arrays.items():
        if name in ("q", "k", "v") and x.ndim != 4:
            last = "V" if name == "v" else "K"
            raise ValueError(f"{name}: expected 4 dimensions [B, T, H, {last}], got shape {list(x.shape)}")
        if x.ndim == 0:
            raise ValueError(f"{name}: expected at least one dimension, got a number")
        if name != "cu_seqlens" and not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name}: expected a floating dtype, got {x.dtype}")
        if name in ("k", "v", "p") and x.dtype != q.dtype:
            raise TypeError(f"{name}: expected dtype {q.dtype} as in q, got {x.dtype}")
    return arrays


def _stand_in(shape, dtype, turned: bool = False) -> object:
    """An array with one value in memory, by whose shape and type the library checks a call; `turned`: V-first states."""
    array = np.broadcast_to(np.zeros((), dtype), shape)
    return _view(array.swapaxes(-1, -2) if turned and array.ndim == 4 else array)


def _offsets_stand_in(cu_seqlens, T: int) -> np.ndarray:
    """The offsets, or, where only their number is known, some that are right."""
    if not isinstance(cu_seqlens, jax.core.Tracer):
        return np.asarray(cu_seqlens)
    offsets = np.zeros(cu_seqlens.shape, cu_seqlens.dtype)
    offsets[-1:] = T
    return offsets


def _check(settings: _primitive.Settings, tensors: dict) -> None:
    """Raises the library's errors about shapes, types and options."""
    q, v, cu_seqlens = tensors["q"], tensors["v"], tensors.get("cu_seqlens")
    stand_ins = {n: _stand_in(x.shape, x.dtype, settings.state_v_first and n == "initial_state") for n, x in tensors.items()}
    if cu_seqlens is not None:
        stand_ins["cu_seqlens"] = _offsets_stand_in(cu_seqlens, q.shape[1])
    # The final state needs no check: its shape follows from the inputs'. o is never written, so its pages are never there.
    _core.plan("forward", settings.op, [stand_ins.get(name) for name in INPUTS], [_view(np.empty(v.shape, q.dtype)), None], [],
               options(settings.scale, settings.reverse, settings.qk_l2norm, settings.gate_form, settings.lower_bound,
                       settings.beta_form, settings.chunk))


def attention(op: str, q, k, v, *, p=None, g=None, gv=None, g_gamma=None, beta=None, A_log=None, dt_bias=None,
              initial_state=None, cu_seqlens=None, scale: Optional[float] = None, reverse: bool = False,
              qk_l2norm: bool = False, gate_form: str = "log_decay", lower_bound: Optional[float] = None,
              beta_form: str = "value", chunk: int = 0, state_v_first: bool = False,
              output_final_state: bool = False) -> Result:
    """Operator `op` by its name: "simple_gla", "gla", "delta_rule", "gated_delta_rule", "comba", "kda", ... (docs/math.md, 2).

    gate_form: "log_decay", "softplus" or "bounded"; beta_form: "value", "sigmoid" or "two_sigmoid"; chunk: a hint.
    """
    if gate_form not in ("log_decay", "softplus", "bounded"):
        raise ValueError(f"gate_form: expected log_decay, softplus or bounded, got {gate_form!r}")
    if beta_form not in ("value", "sigmoid", "two_sigmoid"):
        raise ValueError(f"beta_form: expected value, sigmoid or two_sigmoid, got {beta_form!r}")
    tensors = _checked_arrays({"q": q, "k": k, "v": v, "p": p, "g": g, "gv": gv, "g_gamma": g_gamma, "beta": beta,
                               "A_log": A_log, "dt_bias": dt_bias, "initial_state": initial_state, "cu_seqlens": cu_seqlens})
    K = tensors["q"].shape[-1]
    settings = _primitive.Settings(
        op=op, final_state=bool(output_final_state), scale=float(max(K, 1) ** -0.5 if scale is None else scale),
        reverse=bool(reverse), qk_l2norm=bool(qk_l2norm), gate_form=gate_form,
        lower_bound=-5.0 if lower_bound is None else float(lower_bound), beta_form=beta_form, chunk=int(chunk or 0),
        state_v_first=bool(state_v_first))
    _check(settings, tensors)
    outputs = _primitive.operator(settings, _primitive.vary_alike(tensors))
    return outputs["o"], outputs.get("final_state")


def _gate_inside(use_gate_in_kernel: bool, lower_bound: Optional[float], A_log, dt_bias) -> dict:
    """The arguments of a gate that is computed from g inside; A_log and dt_bias of one that is not are left out."""
    if use_gate_in_kernel and A_log is None:
        raise ValueError("A_log: expected an array [HV] with use_gate_in_kernel, got None")
    form = gate_form(use_gate_in_kernel, lower_bound)
    if form == "log_decay":
        return {}
    return {"gate_form": form, "lower_bound": lower_bound, "A_log": A_log, "dt_bias": dt_bias}


# ---- additive rule ----

def chunk_gla(q, k, v, g, scale=None, initial_state=None, output_final_state=False, state_v_first=False, cu_seqlens=None,
              chunk_size=None, g_gamma=None) -> Result:
    """Gated linear attention. g [B, T, HV, K]: log decay of every key channel."""
    return attention("gla", q, k, v, g=g, g_gamma=g_gamma, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens,
                     output_final_state=output_final_state, state_v_first=state_v_first, chunk=chunk_size)


def chunk_simple_gla(q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False,
                     state_v_first=False, cu_seqlens=None, chunk_size=None) -> Result:
    """Linear attention with one decay per head: g [B, T, HV] per step, g_gamma [HV] constant, or their sum."""
    return attention("simple_gla", q, k, v, g=g, g_gamma=g_gamma, scale=scale, initial_state=initial_state,
                     cu_seqlens=cu_seqlens, output_final_state=output_final_state, state_v_first=state_v_first,
                     chunk=chunk_size)


def chunk_retention(q, k, v, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None) -> Result:
    """Retention: head h decays by 1 - 2^(-5-h). Under shard_map, h counts the heads of the shard."""
    heads = jnp.arange(v.shape[2], dtype=jnp.float32)
    return chunk_simple_gla(q, k, v, None, jnp.log1p(-jnp.exp2(-5 - heads)), scale, initial_state, output_final_state,
                            cu_seqlens=cu_seqlens)


def chunk_lightning_attn(q, k, v, layer_idx, num_layers, scale=None, initial_state=None, output_final_state=False,
                         cu_seqlens=None) -> Result:
    """Lightning attention: log decay -8 h / H (1 - layer_idx / num_layers) of head h, counted as in chunk_retention."""
    heads = jnp.arange(v.shape[2], dtype=jnp.float32)
    gates = heads * (-8 / v.shape[2] * (1 - layer_idx / num_layers))
    return chunk_simple_gla(q, k, v, None, gates, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


# ---- delta rule ----

def chunk_delta_rule(q, k, v, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
                     cu_seqlens=None, state_v_first=False, chunk_size=None) -> Result:
    """The delta rule without a gate. beta [B, T, HV]."""
    return attention("delta_rule", q, k, v, beta=beta, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens,
                     output_final_state=output_final_state, qk_l2norm=use_qk_l2norm_in_kernel, state_v_first=state_v_first,
                     chunk=chunk_size)


def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
                           use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
                           state_v_first=False, cu_seqlens=None, use_gate_in_kernel=False, A_log=None, dt_bias=None,
                           chunk_size=None, g_gamma=None) -> Result:
    """The gated delta rule. g, beta [B, T, HV]; with use_gate_in_kernel g <- -exp(A_log) softplus(g + dt_bias)."""
    return attention("gated_delta_rule", q, k, v, g=g, g_gamma=g_gamma, beta=beta, scale=scale, initial_state=initial_state,
                     cu_seqlens=cu_seqlens, output_final_state=output_final_state, qk_l2norm=use_qk_l2norm_in_kernel,
                     beta_form=beta_form(use_beta_sigmoid_in_kernel, allow_neg_eigval), state_v_first=state_v_first,
                     chunk=chunk_size, **_gate_inside(use_gate_in_kernel, None, A_log, dt_bias))


def chunk_comba(q, k, v, p, g, beta=None, scale=None, initial_state=None, output_final_state=False,
                use_qk_l2norm_in_kernel=False, cu_seqlens=None, state_v_first=False, chunk_size=None) -> Result:
    """Comba: the gated delta rule with an erase key p [B, T, H, K] against the state before the token's own gate."""
    return attention("comba", q, k, v, p=p, g=g, beta=beta, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens,
                     output_final_state=output_final_state, qk_l2norm=use_qk_l2norm_in_kernel, state_v_first=state_v_first,
                     chunk=chunk_size)


def chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
              use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, lower_bound=None,
              state_v_first=False, cu_seqlens=None, A_log=None, dt_bias=None, chunk_size=None, g_gamma=None) -> Result:
    """Kimi delta attention: the delta rule with a log decay of every key channel, g [B, T, HV, K]."""
    return attention("kda", q, k, v, g=g, g_gamma=g_gamma, beta=beta, scale=scale, initial_state=initial_state,
                     cu_seqlens=cu_seqlens, output_final_state=output_final_state, qk_l2norm=use_qk_l2norm_in_kernel,
                     beta_form=beta_form(use_beta_sigmoid_in_kernel, allow_neg_eigval), state_v_first=state_v_first,
                     chunk=chunk_size, **_gate_inside(use_gate_in_kernel, lower_bound, A_log, dt_bias))


chunk_gdn = chunk_gated_delta_rule
