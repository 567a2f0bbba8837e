"""The functions of headrace.jax: user arguments in, one differentiable operator out. Formulas: docs/math.md."""
# over 400 lines: nearly all are the signatures and calls of nineteen functions that differ in their arguments alone.

from __future__ import annotations

from typing import Any, Callable, Optional, Tuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from headrace import _core
from headrace._arguments import (INPUTS, beta_form, bound, check_gate_parameter, check_sum, chunk_hint, depth, flag,
                                 gate_form, number, options, text)
from headrace.jax import _primitive
from headrace.jax._calls import vary_alike
from headrace.numpy import _call_type, _native

Result = Tuple[Array, Optional[Array]]
Maybe = Optional[ArrayLike]


def _array(name: str, x: Any) -> Array:
    array = _native(name, x) if isinstance(x, np.ndarray) else x
    try:
        return jnp.asarray(array)
    except (TypeError, ValueError, OverflowError) as error:
        of = f" of {x.dtype}" if isinstance(x, np.ndarray) else ""
        raise TypeError(f"{name}: expected an array, got {type(x).__name__}{of}") from error


def _floating(name: str, x: Any) -> Array:
    array = _array(name, x)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name}: expected a floating dtype, got {array.dtype}")
    return array


def _checked_rank(name: str, x: Array) -> Array:
    if x.ndim != 4:
        last = "V" if name == "v" else "K"
        raise ValueError(f"{name}: expected 4 dimensions [B, T, H, {last}], got shape {list(x.shape)}")
    return x


def _checked_arrays(tensors: dict, gate_form: str) -> dict:
    """The arrays given, and the A_log of a bounded gate without one; what must hold before an output has a shape.

    q, k, v and p come in the type of the call, A_log and dt_bias with one dimension.
    """
    required = ("q", "k", "v", "states")
    given = {name: x for name, x in tensors.items() if x is not None or name in required}
    arrays = {name: _array(name, x) if name == "cu_seqlens" else _floating(name, x) for name, x in given.items()}
    for name, x in arrays.items():
        if name in ("q", "k", "v"):
            _checked_rank(name, x)
        if x.ndim == 0 and name not in ("A_log", "dt_bias"):
            raise ValueError(f"{name}: expected at least one dimension, got a number")
    arrays.update(_of_one_type({name: arrays[name] for name in ("q", "k", "v", "p") if name in arrays}))
    q, v, g = arrays["q"], arrays["v"], arrays.get("g")
    for name in ("A_log", "dt_bias"):
        if name in arrays:
            arrays[name] = _gate_parameter(name, arrays[name], q, v, g)
    if gate_form == "bounded":
        arrays.setdefault("A_log", jnp.zeros(v.shape[2], jnp.float32))
    return arrays


def _of_one_type(arrays: dict) -> dict:
    dtype = _call_type([x.dtype for x in arrays.values()])
    for name, x in arrays.items():
        if dtype != x.dtype and x.dtype.itemsize == 1:
            raise TypeError(f"{name}: expected a floating dtype of 16, 32 or 64 bits, got {x.dtype}")
    return {name: _in_type(x, dtype) for name, x in arrays.items()}


def _in_type(x: Array, dtype: Any) -> Array:
    return x if x.dtype == dtype else x.astype(dtype)  # the latter takes its time even where there is nothing to do


def _gate_parameter(name: str, x: Array, q: Array, v: Array, g: Optional[Array]) -> Array:
    """A gate's A_log or dt_bias, of one dimension."""
    channels = q.shape[3] if name == "dt_bias" and g is not None and g.ndim == 4 else 0
    check_gate_parameter(name, x.shape, v.shape[2], channels)
    return x if x.ndim == 1 else x.reshape(-1)


def _stand_in(shape: tuple, dtype: Any, turned: bool = False) -> object:
    """An array with one value in memory, for checks of a call by its shape and type; `turned`: V-first states."""
    array = np.broadcast_to(np.zeros((), dtype), shape)
    return array.swapaxes(-1, -2) if turned and array.ndim == 4 else array


def _offsets_stand_in(cu_seqlens: Array, T: int) -> np.ndarray:
    """The offsets, or, where only their number is known or a GPU would be waited for, some that are right."""
    if not isinstance(cu_seqlens, jax.core.Tracer) and all(x.platform == "cpu" for x in cu_seqlens.devices()):
        return np.asarray(cu_seqlens)
    offsets = np.zeros(cu_seqlens.shape, cu_seqlens.dtype)
    offsets[-1:] = T
    return offsets


def _check(settings: _primitive.Settings, tensors: dict) -> None:
    """Raises the library's errors about shapes, types and options; `tensors` with "states" are those of a step."""
    q, v, cu_seqlens, states = tensors["q"], tensors["v"], tensors.get("cu_seqlens"), tensors.get("states")
    stand_ins = {n: _stand_in(x.shape, x.dtype, settings.state_v_first and n == "initial_state")
                 for n, x in tensors.items()}
    if cu_seqlens is not None:
        stand_ins["cu_seqlens"] = _offsets_stand_in(cu_seqlens, q.shape[1])
    # What would be written has memory of its own, but is never written, so its pages are never there.
    # The final state needs no check: its shape follows from the inputs'.
    outputs = [np.empty(v.shape, q.dtype), None]
    pool = []
    if states is not None:
        room = np.empty(states.shape, states.dtype)
        pool = [room.swapaxes(-1, -2) if settings.state_v_first and room.ndim == 4 else room, None, None]
    _core.plan("forward" if states is None else "step", settings.op, [stand_ins.get(name) for name in INPUTS],
               outputs, pool,
               options(settings.scale, settings.reverse, settings.qk_l2norm, settings.gate_form, settings.lower_bound,
                       settings.beta_form, settings.chunk))


def _settings(op: str, q: Array, scale: Optional[float], reverse: bool, qk_l2norm: bool, gate_form: str,
              lower_bound: Optional[float], beta_form: str, chunk: Optional[int], state_v_first: bool,
              final_state: bool) -> _primitive.Settings:
    return _primitive.Settings(
        op=text("op", op), final_state=flag("output_final_state", final_state),
        scale=float(max(q.shape[-1], 1) ** -0.5 if scale is None else number("scale", scale)),
        reverse=flag("reverse", reverse), qk_l2norm=flag("qk_l2norm", qk_l2norm),
        gate_form=text("gate_form", gate_form),
        lower_bound=-5.0 if lower_bound is None else float(bound(lower_bound)), beta_form=text("beta_form", beta_form),
        chunk=chunk_hint(chunk, "chunk"), state_v_first=flag("state_v_first", state_v_first))


def attention(
    op: str, q: ArrayLike, k: ArrayLike, v: ArrayLike, *, p: Maybe = None, g: Maybe = None, gv: Maybe = None,
    g_gamma: Maybe = None, beta: Maybe = None, A_log: Maybe = None, dt_bias: Maybe = None, initial_state: Maybe = None,
    cu_seqlens: Maybe = None, scale: Optional[float] = None, reverse: bool = False, qk_l2norm: bool = False,
    gate_form: str = "log_decay", lower_bound: Optional[float] = None, beta_form: str = "value",
    chunk: Optional[int] = None, state_v_first: bool = False, output_final_state: bool = False,
) -> Result:
    """Operator `op` by its name: "simple_gla", "gla", "delta_rule", "gated_delta_rule", "comba", "kda", ...

    gate_form: "log_decay", "softplus" or "bounded"; beta_form: "value", "sigmoid" or "two_sigmoid"; chunk: a hint.
    """
    q = _floating("q", q)
    tensors = _checked_arrays({"q": q, "k": k, "v": v, "p": p, "g": g, "gv": gv, "g_gamma": g_gamma, "beta": beta,
                               "A_log": A_log, "dt_bias": dt_bias, "initial_state": initial_state,
                               "cu_seqlens": cu_seqlens}, gate_form)
    settings = _settings(op, tensors["q"], scale, reverse, qk_l2norm, gate_form, lower_bound, beta_form, chunk,
                         state_v_first, output_final_state)
    _check(settings, tensors)
    outputs = _primitive.operator(settings, vary_alike(tensors))
    return _in_type(outputs["o"], q.dtype), outputs.get("final_state")


def step(
    op: str, q: ArrayLike, k: ArrayLike, v: ArrayLike, states: ArrayLike, *, p: Maybe = None, g: Maybe = None,
    gv: Maybe = None, g_gamma: Maybe = None, beta: Maybe = None, A_log: Maybe = None, dt_bias: Maybe = None,
    cu_seqlens: Maybe = None, scale: Optional[float] = None, qk_l2norm: bool = False, gate_form: str = "log_decay",
    lower_bound: Optional[float] = None, beta_form: str = "value", state_v_first: bool = False,
) -> Tuple[Array, Array]:
    """(o, the new states) of one token, or a few, behind `states`; for decoding: it has no gradient.

    q, k [B, 1, H, K], v [B, 1, HV, V] and so on as in attention(); states [N, HV, K, V], float32 (float64 for float64
    q), or bfloat16 or float16, to which the new states are rounded. Inside jax.jit they are updated where they are:
    donate the argument, or carry it through jax.lax.scan, and no copy is made.
    """
    q = _floating("q", q)
    tensors = _checked_arrays({"q": q, "k": k, "v": v, "p": p, "g": g, "gv": gv, "g_gamma": g_gamma, "beta": beta,
                               "A_log": A_log, "dt_bias": dt_bias, "cu_seqlens": cu_seqlens, "states": states},
                              gate_form)
    settings = _settings(op, tensors["q"], scale, False, qk_l2norm, gate_form, lower_bound, beta_form, None,
                         state_v_first, True)
    _check(settings, tensors)
    outputs = _primitive.step(settings, vary_alike(tensors))
    return _in_type(outputs["o"], q.dtype), outputs["states"]


def _call(
    op: str, q: ArrayLike, k: ArrayLike, v: ArrayLike, *, g: Maybe = None, use_gate_in_kernel: bool = False,
    lower_bound: Optional[float] = None, A_log: Maybe = None, dt_bias: Maybe = None,
    use_qk_l2norm_in_kernel: bool = False, chunk_size: Optional[int] = None, **rest: Any,
) -> Result:
    """attention() by the arguments of the functions below; it checks A_log and dt_bias of a gate from outside."""
    form = gate_form(use_gate_in_kernel, lower_bound)
    if form == "softplus" and A_log is None:
        raise ValueError("A_log: expected an array [HV] with use_gate_in_kernel, got None")
    parameters: Any = {name: x for name, x in (("A_log", A_log), ("dt_bias", dt_bias)) if x is not None}
    if form == "log_decay" and parameters:
        _checked_arrays({"q": q, "k": k, "v": v, "g": g, **parameters}, form)
        parameters = {}
    return attention(op, q, k, v, g=g, gate_form=form, lower_bound=lower_bound, **parameters,
                     qk_l2norm=flag("use_qk_l2norm_in_kernel", use_qk_l2norm_in_kernel),
                     chunk=None if chunk_size is None else chunk_hint(chunk_size), **rest)


# ---- additive rule ----

def chunk_gla(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, g: ArrayLike, scale: Optional[float] = None, initial_state: Maybe = None,
    output_final_state: bool = False, state_v_first: bool = False, cu_seqlens: Maybe = None, *,
    chunk_size: Optional[int] = None, g_gamma: Maybe = None, use_gate_in_kernel: bool = False, A_log: Maybe = None,
    dt_bias: Maybe = None, lower_bound: Optional[float] = None,
) -> Result:
    """Gated linear attention. g [B, T, HV, K]: log decay of every key channel."""
    return _call("gla", q, k, v, g=g, g_gamma=g_gamma, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens,
                 output_final_state=output_final_state, state_v_first=state_v_first, chunk_size=chunk_size,
                 use_gate_in_kernel=use_gate_in_kernel, lower_bound=lower_bound, A_log=A_log, dt_bias=dt_bias)


def chunk_simple_gla(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, g: Maybe = None, g_gamma: Maybe = None, scale: Optional[float] = None,
    initial_state: Maybe = None, output_final_state: bool = False, state_v_first: bool = False,
    cu_seqlens: Maybe = None, chunk_size: Optional[int] = None, *, use_gate_in_kernel: bool = False,
    A_log: Maybe = None, dt_bias: Maybe = None, lower_bound: Optional[float] = None,
) -> Result:
    """Linear attention with one decay per head: g [B, T, HV] per step, g_gamma [HV] constant, or their sum."""
    return _call("simple_gla", q, k, v, g=g, g_gamma=g_gamma, scale=scale, initial_state=initial_state,
                 cu_seqlens=cu_seqlens, output_final_state=output_final_state, state_v_first=state_v_first,
                 chunk_size=chunk_size, use_gate_in_kernel=use_gate_in_kernel, lower_bound=lower_bound, A_log=A_log,
                 dt_bias=dt_bias)


def fused_chunk_simple_gla(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, g: Maybe = None, g_gamma: Maybe = None, scale: Optional[float] = None,
    initial_state: Maybe = None, output_final_state: bool = False, cu_seqlens: Maybe = None, *,
    state_v_first: bool = False, chunk_size: Optional[int] = None, use_gate_in_kernel: bool = False,
    A_log: Maybe = None, dt_bias: Maybe = None, lower_bound: Optional[float] = None,
) -> Result:
    """As chunk_simple_gla."""
    return chunk_simple_gla(q, k, v, g, g_gamma, scale, initial_state, output_final_state, state_v_first, cu_seqlens,
                            chunk_size, use_gate_in_kernel=use_gate_in_kernel, A_log=A_log, dt_bias=dt_bias,
                            lower_bound=lower_bound)


def fused_recurrent_gla(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, gk: Maybe = None, gv: Maybe = None, scale: Optional[float] = None,
    initial_state: Maybe = None, output_final_state: bool = False, reverse: bool = False, state_v_first: bool = False,
    cu_seqlens: Maybe = None, *, g_gamma: Maybe = None, use_gate_in_kernel: bool = False, A_log: Maybe = None,
    dt_bias: Maybe = None, lower_bound: Optional[float] = None,
) -> Result:
    """Gated linear attention. gk [B, T, HV, K], gv [B, T, HV, V]: log decays of key and value channels.

    With use_gate_in_kernel gk is a pre-activation.
    """
    return _call("gla", q, k, v, g=gk, gv=gv, g_gamma=g_gamma, scale=scale, initial_state=initial_state,
                 cu_seqlens=cu_seqlens, output_final_state=output_final_state, reverse=reverse,
                 state_v_first=state_v_first, use_gate_in_kernel=use_gate_in_kernel, lower_bound=lower_bound,
                 A_log=A_log, dt_bias=dt_bias)


def fused_recurrent_simple_gla(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, g: Maybe = None, g_gamma: Maybe = None, scale: Optional[float] = None,
    initial_state: Maybe = None, output_final_state: bool = False, reverse: bool = False, state_v_first: bool = False,
    cu_seqlens: Maybe = None, *, use_gate_in_kernel: bool = False, A_log: Maybe = None, dt_bias: Maybe = None,
    lower_bound: Optional[float] = None,
) -> Result:
    """As chunk_simple_gla; `reverse` runs every sequence from its last token to its first."""
    return _call("simple_gla", q, k, v, g=g, g_gamma=g_gamma, scale=scale, initial_state=initial_state,
                 cu_seqlens=cu_seqlens, output_final_state=output_final_state, reverse=reverse,
                 state_v_first=state_v_first, use_gate_in_kernel=use_gate_in_kernel, lower_bound=lower_bound,
                 A_log=A_log, dt_bias=dt_bias)


def _head_gates(q: ArrayLike, k: ArrayLike, v: ArrayLike, decays: Callable[[np.ndarray], np.ndarray]) -> Array:
    """g_gamma [HV], float64 where the call is, as a function of the heads' numbers."""
    arrays = [_floating(name, x) for name, x in (("q", q), ("k", k), ("v", v))]
    heads = np.arange(_checked_rank("v", arrays[2]).shape[2], dtype=np.float64)
    return jnp.asarray(decays(heads), jnp.promote_types(_call_type([x.dtype for x in arrays]), jnp.float32))


def _retention_gates(q: ArrayLike, k: ArrayLike, v: ArrayLike) -> Array:
    return _head_gates(q, k, v, lambda heads: np.log1p(-np.exp2(-5 - heads)))


def _lightning_gates(q: ArrayLike, k: ArrayLike, v: ArrayLike, layer_idx: int, num_layers: int) -> Array:
    rest = 1 - depth(layer_idx, num_layers)
    return _head_gates(q, k, v, lambda heads: heads * (-8 / max(len(heads), 1) * rest))


def chunk_retention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, scale: Optional[float] = None, initial_state: Maybe = None,
    output_final_state: bool = False, cu_seqlens: Maybe = None, *, state_v_first: bool = False,
    chunk_size: Optional[int] = None,
) -> Result:
    """Retention: head h decays by 1 - 2^(-5-h). Under shard_map, h counts the heads of the shard."""
    return chunk_simple_gla(q, k, v, None, _retention_gates(q, k, v), scale, initial_state, output_final_state,
                            state_v_first, cu_seqlens, chunk_size)


def fused_recurrent_retention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, scale: Optional[float] = None, initial_state: Maybe = None,
    output_final_state: bool = False, reverse: bool = False, state_v_first: bool = False, cu_seqlens: Maybe = None,
) -> Result:
    """As chunk_retention; `reverse` runs every sequence from its last token to its first."""
    return fused_recurrent_simple_gla(q, k, v, None, _retention_gates(q, k, v), scale, initial_state,
                                      output_final_state, reverse, state_v_first, cu_seqlens)


def chunk_lightning_attn(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, layer_idx: int, num_layers: int, scale: Optional[float] = None,
    initial_state: Maybe = None, output_final_state: bool = False, cu_seqlens: Maybe = None, *,
    state_v_first: bool = False, chunk_size: Optional[int] = None,
) -> Result:
    """Lightning attention: log decay -8 h / H (1 - layer_idx / num_layers) of head h, counted as in chunk_retention."""
    return chunk_simple_gla(q, k, v, None, _lightning_gates(q, k, v, layer_idx, num_layers), scale, initial_state,
                            output_final_state, state_v_first, cu_seqlens, chunk_size)


def fused_recurrent_lightning_attn(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, layer_idx: int, num_layers: int, scale: Optional[float] = None,
    initial_state: Maybe = None, output_final_state: bool = False, reverse: bool = False, cu_seqlens: Maybe = None, *,
    state_v_first: bool = False,
) -> Result:
    """As chunk_lightning_attn; `reverse` runs every sequence from its last token to its first."""
    return fused_recurrent_simple_gla(q, k, v, None, _lightning_gates(q, k, v, layer_idx, num_layers), scale,
                                      initial_state, output_final_state, reverse, state_v_first, cu_seqlens)


# ---- delta rule ----

def chunk_delta_rule(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, beta: ArrayLike, scale: Optional[float] = None,
    initial_state: Maybe = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Maybe = None, *, state_v_first: bool = False, chunk_size: Optional[int] = None,
) -> Result:
    """The delta rule without a gate. beta [B, T, HV]."""
    return _call("delta_rule", q, k, v, beta=beta, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens,
                 output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                 state_v_first=state_v_first, chunk_size=chunk_size)


def fused_recurrent_delta_rule(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, beta: Maybe = None, scale: Optional[float] = None,
    initial_state: Maybe = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Maybe = None, *, reverse: bool = False, state_v_first: bool = False,
) -> Result:
    """As chunk_delta_rule; beta may also be [B, T, HV, V], None is 1."""
    return _call("delta_rule", q, k, v, beta=beta, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens,
                 output_final_state=output_final_state, reverse=reverse,
                 use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, state_v_first=state_v_first)


def chunk_gated_delta_rule(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, g: ArrayLike, beta: ArrayLike, scale: Optional[float] = None,
    initial_state: Maybe = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, state_v_first: bool = False,
    cu_seqlens: Maybe = None, use_gate_in_kernel: bool = False, A_log: Maybe = None, dt_bias: Maybe = None,
    chunk_size: Optional[int] = None, *, g_gamma: Maybe = None, lower_bound: Optional[float] = None,
) -> Result:
    """The gated delta rule. g, beta [B, T, HV]."""
    return _call("gated_delta_rule", q, k, v, g=g, g_gamma=g_gamma, beta=beta, scale=scale, initial_state=initial_state,
                 cu_seqlens=cu_seqlens, output_final_state=output_final_state,
                 use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                 beta_form=beta_form(use_beta_sigmoid_in_kernel, allow_neg_eigval), state_v_first=state_v_first,
                 chunk_size=chunk_size, use_gate_in_kernel=use_gate_in_kernel, lower_bound=lower_bound, A_log=A_log,
                 dt_bias=dt_bias)


def fused_recurrent_gated_delta_rule(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, g: Maybe = None, gk: Maybe = None, gv: Maybe = None, beta: Maybe = None,
    scale: Optional[float] = None, initial_state: Maybe = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False, A_log: Maybe = None, dt_bias: Maybe = None,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, state_v_first: bool = False,
    cu_seqlens: Maybe = None, *, g_gamma: Maybe = None, lower_bound: Optional[float] = None,
) -> Result:
    """As chunk_gated_delta_rule, with log decays of heads (g), key channels (gk) and value channels (gv).

    beta may also be [B, T, HV, V]; None is 1.
    """
    if gk is not None and g is not None:
        if flag("use_gate_in_kernel", use_gate_in_kernel):
            raise ValueError("gk: expected without g where the gate is computed in the kernel, got both")
        gk, g = _floating("gk", gk), _floating("g", g)
        check_sum(gk, g)
        gk = gk.astype(_call_type([jnp.promote_types(x.dtype, jnp.float32) for x in (gk, g)])) + g[..., None]
    return _call("gated_delta_rule" if gk is None else "kda", q, k, v, g=g if gk is None else gk, gv=gv, beta=beta,
                 g_gamma=g_gamma, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens,
                 output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                 state_v_first=state_v_first, beta_form=beta_form(use_beta_sigmoid_in_kernel, allow_neg_eigval),
                 use_gate_in_kernel=use_gate_in_kernel, lower_bound=lower_bound, A_log=A_log, dt_bias=dt_bias)


def chunk_comba(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, p: ArrayLike, g: ArrayLike, beta: Maybe = None,
    scale: Optional[float] = None, initial_state: Maybe = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Maybe = None, *, state_v_first: bool = False,
    chunk_size: Optional[int] = None, use_gate_in_kernel: bool = False, A_log: Maybe = None, dt_bias: Maybe = None,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, g_gamma: Maybe = None,
    lower_bound: Optional[float] = None,
) -> Result:
    """Comba: the gated delta rule with an erase key p [B, T, H, K] against the state before the token's own gate."""
    return _call("comba", q, k, v, p=p, g=g, g_gamma=g_gamma, beta=beta, scale=scale, initial_state=initial_state,
                 cu_seqlens=cu_seqlens, output_final_state=output_final_state,
                 use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                 beta_form=beta_form(use_beta_sigmoid_in_kernel, allow_neg_eigval), state_v_first=state_v_first,
                 chunk_size=chunk_size, use_gate_in_kernel=use_gate_in_kernel, lower_bound=lower_bound, A_log=A_log,
                 dt_bias=dt_bias)


def fused_recurrent_comba(
    q: ArrayLike, k: ArrayLike, p: ArrayLike, v: ArrayLike, g: ArrayLike, beta: Maybe = None,
    scale: Optional[float] = None, initial_state: Maybe = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Maybe = None, *, state_v_first: bool = False,
    use_gate_in_kernel: bool = False, A_log: Maybe = None, dt_bias: Maybe = None,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, g_gamma: Maybe = None,
    lower_bound: Optional[float] = None,
) -> Result:
    """As chunk_comba, but p stands before v."""
    return chunk_comba(q, k, v, p, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
                       cu_seqlens, state_v_first=state_v_first, use_gate_in_kernel=use_gate_in_kernel, A_log=A_log,
                       dt_bias=dt_bias, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
                       allow_neg_eigval=allow_neg_eigval, g_gamma=g_gamma, lower_bound=lower_bound)


def chunk_kda(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, g: ArrayLike, beta: ArrayLike, scale: Optional[float] = None,
    initial_state: Maybe = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    lower_bound: Optional[float] = None, state_v_first: bool = False, cu_seqlens: Maybe = None, A_log: Maybe = None,
    dt_bias: Maybe = None, chunk_size: Optional[int] = None, *, g_gamma: Maybe = None,
) -> Result:
    """Kimi delta attention: the delta rule with a log decay of every key channel, g [B, T, HV, K]."""
    return _call("kda", q, k, v, g=g, g_gamma=g_gamma, beta=beta, scale=scale, initial_state=initial_state,
                 cu_seqlens=cu_seqlens, output_final_state=output_final_state,
                 use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                 beta_form=beta_form(use_beta_sigmoid_in_kernel, allow_neg_eigval), state_v_first=state_v_first,
                 chunk_size=chunk_size, use_gate_in_kernel=use_gate_in_kernel, lower_bound=lower_bound, A_log=A_log,
                 dt_bias=dt_bias)


def fused_recurrent_kda(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, g: ArrayLike, beta: ArrayLike, A_log: Maybe = None, dt_bias: Maybe = None,
    scale: Optional[float] = None, initial_state: Maybe = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False, lower_bound: Optional[float] = None, state_v_first: bool = False,
    cu_seqlens: Maybe = None, *, g_gamma: Maybe = None,
) -> Result:
    """As chunk_kda; beta may also be [B, T, HV, V]."""
    return chunk_kda(q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
                     use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound, state_v_first,
                     cu_seqlens, A_log, dt_bias, g_gamma=g_gamma)


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule
