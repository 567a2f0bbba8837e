"""The functions of headrace.torch: user arguments in, one custom operator out. Formulas: docs/math.md."""
# over 400 lines: nearly all are the signatures and calls of nineteen functions that differ in their arguments alone.

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any, Callable, Dict, Optional, Tuple

import torch
from torch import Tensor

from headrace._arguments import (INPUTS, beta_form, check_gate_parameter, check_sum, chunk_hint, depth, flag, gate_form,
                                 integer, number)
from headrace.torch import _dtensor, _library
from headrace.torch._pool import renamed, step_on_pool

Result = Tuple[Tensor, Optional[Tensor]]
Maybe = Optional[Tensor]
Serving = Tuple[Maybe, Maybe, Maybe]  # ssm_state_indices, num_accepted_tokens, out


def _call_type(q: Tensor, k: Tensor, v: Tensor, p: Maybe, device: str) -> Tuple[torch.dtype, bool]:
    """The type in which a call computes, and whether it is autocast's.

    Else it is that of q, k, v and p, of several the least that holds them all. Autocast leaves float64 alone.
    """
    dtype = q.dtype
    known = device in ("cpu", "cuda")  # of which no question: torch.compile cannot trace it in all releases
    is_autocast = (known or torch.amp.is_autocast_available(device)) and torch.is_autocast_enabled(device)
    if not is_autocast and k.dtype == dtype and v.dtype == dtype and (p is None or p.dtype == dtype):
        return dtype, False
    for name, x in (("q", q), ("k", k), ("v", v), ("p", p)):
        if x is not None:
            if x.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
                raise TypeError(f"{name}: expected a floating dtype of 16, 32 or 64 bits, got {x.dtype}")
            dtype = torch.promote_types(dtype, x.dtype)
    if is_autocast and dtype != torch.float64:
        return torch.get_autocast_dtype(device), True
    return dtype, False


def _gate_parameter(name: str, x: Maybe, g: Maybe, q: Tensor, v: Tensor, gate: str) -> Maybe:
    """A gate's A_log or dt_bias, of one dimension, right in size also where the gate is computed outside."""
    if x is None or (x.dim() == 1 and gate != "log_decay"):  # the library checks what it reads
        return x
    if not x.dtype.is_floating_point:
        raise TypeError(f"{name}: expected a floating dtype, got {x.dtype}")
    channels = q.shape[-1] if name == "dt_bias" and g is not None and g.dim() == 4 else 0
    check_gate_parameter(name, x.shape, v.shape[2], channels)
    return x if x.dim() == 1 else x.reshape(x.numel())


def _offsets(cu_seqlens: Maybe, cu_seqlens_cpu: Tensor, device: torch.device) -> Maybe:
    _library.check_tensors(("cu_seqlens_cpu",), (cu_seqlens_cpu,), 0)
    if cu_seqlens is None:
        raise ValueError("cu_seqlens_cpu: expected together with cu_seqlens, of which it is the host copy, got it "
                         "alone")
    if cu_seqlens_cpu.shape != cu_seqlens.shape or cu_seqlens_cpu.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens_cpu: expected an int32 or int64 copy of cu_seqlens {list(cu_seqlens.shape)}, got "
                         f"{cu_seqlens_cpu.dtype} {list(cu_seqlens_cpu.shape)}")
    if device.type == "cpu":
        return cu_seqlens
    if cu_seqlens_cpu.device.type != "cpu":
        raise ValueError(f"cu_seqlens_cpu: expected device cpu, got {cu_seqlens_cpu.device}")
    return cu_seqlens_cpu


def _v_first(state_v_first: bool, transpose_state_layout: Optional[bool]) -> bool:
    if transpose_state_layout is None:
        return flag("state_v_first", state_v_first)
    if flag("state_v_first", state_v_first):
        raise ValueError("transpose_state_layout: expected only one of it and state_v_first, of which it is the old "
                         "name, got both")
    warnings.warn("transpose_state_layout is the old name of state_v_first", DeprecationWarning, stacklevel=5)
    return flag("transpose_state_layout", transpose_state_layout)


def _decays_of(decays: tuple, heads: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """g_gamma [heads]: a function of the heads' numbers, float64, and what else it takes."""
    formula, *numbers = decays
    places = torch.arange(heads, dtype=torch.float64, device=device)
    return formula(places, *numbers).to(torch.promote_types(dtype, torch.float32))


@lru_cache(maxsize=1024)
def _kept_decays_of(decays: tuple, heads: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same, kept: PyTorch's operators take as long as a short call. It may be saved outside of inference mode.

    On the CPU only: on another device it would belong to the stream, and to the graph that is captured, of its making.
    """
    with torch.inference_mode(False), torch.autocast("cpu", enabled=False):
        return _decays_of(decays, heads, dtype, device)


def _run(
    op: str, q: Tensor, k: Tensor, v: Tensor, *, p: Maybe = None, g: Maybe = None, gv: Maybe = None,
    g_gamma: Maybe = None, beta: Maybe = None, A_log: Maybe = None, dt_bias: Maybe = None, initial_state: Maybe = None,
    output_final_state: bool = False, cu_seqlens: Maybe = None, cu_seqlens_cpu: Maybe = None,
    scale: Optional[float] = None, reverse: bool = False, l2norm: bool = False, gate: str = "log_decay",
    lower_bound: Optional[float] = None, beta_is: str = "value", chunk_size: Optional[int] = None,
    state_v_first: bool = False, transpose_state_layout: Optional[bool] = None, serving: Optional[Serving] = None,
    decays: Optional[tuple] = None, o_as_v: bool = False, cp_context: object = None,
) -> Result:
    """decays: g_gamma, as in _decays_of. o_as_v: o has the type of v, else that of q."""
    context = None
    if cp_context is not None:
        from headrace.torch.distributed import _calls  # which needs a PyTorch with torch.distributed

        context, cu_seqlens = _calls.accepted(cp_context, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu,
                                              ssm_state_indices=serving)
    tensors = (q, k, v, p, g, gv, g_gamma, beta, A_log, dt_bias, initial_state, cu_seqlens)
    watched = _library.is_watched()
    if (decays is cu_seqlens_cpu is chunk_size is transpose_state_layout is context is None and not watched
            and not torch._C._is_any_autocast_enabled()):
        try:
            result = _library.run_plain(op, tensors, serving, torch.is_grad_enabled(), output_final_state,
                                        state_v_first, scale, reverse, l2norm, gate, lower_bound, beta_is)
        except ValueError as error:
            raise (error if serving is None else renamed(error)) from None
        if result is not None:
            return result
    way = _library.route(tensors, 3, watched)
    if way is None and _dtensor.among((*tensors, *(serving or ()))):
        return _run_on_ranks(op, tensors, cu_seqlens_cpu, serving, decays, dict(
            output_final_state=output_final_state, scale=scale, reverse=reverse, l2norm=l2norm, gate=gate,
            lower_bound=lower_bound, beta_is=beta_is, chunk_size=chunk_size, state_v_first=state_v_first,
            transpose_state_layout=transpose_state_layout, o_as_v=o_as_v, cp_context=cp_context))
    given = (op, tensors, cu_seqlens_cpu, decays, way, o_as_v, scale, reverse, l2norm, gate, lower_bound, beta_is,
             chunk_size, state_v_first, transpose_state_layout, output_final_state)
    if context is not None:
        return _calls.call(context, op, _prepared, given)
    way, tensors, o_dtype, rest, output_final_state = _prepared(*given)
    if serving is not None:
        return _step(way, op, tensors, rest, o_dtype, *serving)
    o, final_state = _library.run(way, (op, *tensors, output_final_state, *rest))
    return o if o.dtype == o_dtype else o.to(o_dtype), final_state if output_final_state else None


def _prepared(
    op: str, tensors: tuple, cu_seqlens_cpu: Maybe, decays: Optional[tuple], way: Optional[bool], o_as_v: bool,
    scale: Optional[float], reverse: bool, l2norm: bool, gate: str, lower_bound: Optional[float], beta_is: str,
    chunk_size: Optional[int], state_v_first: bool, transpose_state_layout: Optional[bool], output_final_state: bool,
) -> tuple:
    """What an operator is called with: (the way to it, tensors, the type of o, options, output_final_state)."""
    q, k, v, p, g, gv, g_gamma, beta, A_log, dt_bias, initial_state, cu_seqlens = tensors
    if way is None:
        _library.check_tensors(INPUTS, tensors, 3)
    device = q.device.type if way is None or q.is_cuda else "cpu"  # the first takes longer
    dtype, is_autocast = _call_type(q, k, v, p, device)
    o_dtype = dtype if is_autocast else v.dtype if o_as_v else q.dtype
    if q.dtype != dtype or k.dtype != dtype or v.dtype != dtype or (p is not None and p.dtype != dtype):
        q, k, v, p = q.to(dtype), k.to(dtype), v.to(dtype), None if p is None else p.to(dtype)
    _library.check_alike(q, k, v)
    if A_log is not None or dt_bias is not None:
        A_log = _gate_parameter("A_log", A_log, g, q, v, gate)
        dt_bias = _gate_parameter("dt_bias", dt_bias, g, q, v, gate)
    if gate == "log_decay":
        A_log = dt_bias = None  # given for a gate that is computed outside
    elif A_log is None and gate == "softplus":
        raise ValueError("A_log: expected a tensor [HV] with use_gate_in_kernel, got None")
    elif A_log is None:
        A_log = torch.zeros(v.shape[2], device=v.device)
    if decays is not None:
        is_kept = way is not None and v.device.type == "cpu"
        g_gamma = (_kept_decays_of if is_kept else _decays_of)(decays, v.shape[2], dtype, v.device)
    state_v_first = _v_first(state_v_first, transpose_state_layout)
    cu_seqlens = cu_seqlens if cu_seqlens_cpu is None else _offsets(cu_seqlens, cu_seqlens_cpu, q.device)
    rest = (None if scale is None else number("scale", scale), flag("reverse", reverse),
            flag("use_qk_l2norm_in_kernel", l2norm), gate,
            -5.0 if lower_bound is None else number("lower_bound", lower_bound), beta_is, chunk_hint(chunk_size),
            state_v_first)
    tensors = (q, k, v, p, g, gv, g_gamma, beta, A_log, dt_bias, initial_state, cu_seqlens)
    return way, tensors, o_dtype, rest, flag("output_final_state", output_final_state)


def _run_on_ranks(op: str, tensors: tuple, cu_seqlens_cpu: Maybe, serving: Optional[Serving], decays: Optional[tuple],
                  options: Dict[str, Any]) -> Result:
    """_run of DTensors, by heads, by sequences, or with a context by tokens."""
    _library.check_tensors(INPUTS, tensors, 3)
    q, k, v, p, *_, A_log, dt_bias, initial_state, _ = tensors
    keep = serving is not None or flag("output_final_state", options["output_final_state"])
    context = options["cp_context"]
    if context is not None:
        tensors = (*tensors[:-1], None)  # the context has the offsets
        _dtensor.check_context(q, context, keep or initial_state is not None)
    if decays is not None:
        dtype = _call_type(q, k, v, p, q.device.type)[0]
        g_gamma = _dtensor.replicated_beside(tensors, _decays_of(decays, v.shape[2], dtype, v.device))
        tensors = (*tensors[:6], g_gamma, *tensors[7:])

    def run(q, k, v, *rest):
        named = dict(zip((*INPUTS[3:], "cu_seqlens_cpu"), rest))
        return _run(op, q, k, v, **named, serving=serving and rest[-3:], **options)

    names = (*INPUTS, "cu_seqlens_cpu", "ssm_state_indices", "num_accepted_tokens", "out")
    states = serving or (None, None, None)
    cuts = _dtensor.operator_cuts(A_log, dt_bias, states[0] is not None, context is not None)
    o, state = _dtensor.on_ranks(run, names, (*tensors, cu_seqlens_cpu, *states), cuts, (True, keep),
                                 () if serving is None else ("initial_state", "out"))
    if serving is None:
        return o, state
    out = states[2]
    _library.mark_written(x for x in (initial_state, out) if x is not None)
    return o if out is None else out, initial_state


def _step(way: Optional[bool], op: str, tensors: tuple, rest: tuple, o_dtype: torch.dtype, ssm_state_indices: Maybe,
          num_accepted_tokens: Maybe, out: Maybe) -> Result:
    """step_on_pool, and o in its type where q, k and v have several."""
    states = ssm_state_indices, num_accepted_tokens
    if tensors[0].dtype == o_dtype:
        return step_on_pool(way, op, tensors, rest, *states, out)
    _library.check_tensors(("q", "out"), (tensors[0], out), 1)
    if out is not None and (out.dtype != o_dtype or out.shape != tensors[2].shape):
        raise ValueError(f"out: expected dtype {o_dtype} and shape {list(tensors[2].shape)}, got {out.dtype} "
                         f"{list(out.shape)}")
    o, pool = step_on_pool(way, op, tensors, rest, *states, None)
    return o.to(o_dtype) if out is None else out.copy_(o), pool


# ---- additive rule ----

def chunk_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: Optional[float] = None, initial_state: Maybe = None,
    output_final_state: bool = False, state_v_first: bool = False, cu_seqlens: Maybe = None,
    cu_seqlens_cpu: Maybe = None, *, chunk_size: Optional[int] = None, g_gamma: Maybe = None,
    use_gate_in_kernel: bool = False, A_log: Maybe = None, dt_bias: Maybe = None, lower_bound: Optional[float] = None,
    transpose_state_layout: Optional[bool] = None, cp_context: object = None,
) -> Result:
    """Gated linear attention. g [B, T, HV, K]: log decay of every key channel."""
    return _run("gla", q, k, v, g=g, g_gamma=g_gamma, scale=scale, initial_state=initial_state,
                output_final_state=output_final_state, state_v_first=state_v_first, cu_seqlens=cu_seqlens,
                cu_seqlens_cpu=cu_seqlens_cpu, gate=gate_form(use_gate_in_kernel, lower_bound), A_log=A_log,
                dt_bias=dt_bias, lower_bound=lower_bound, chunk_size=chunk_size,
                transpose_state_layout=transpose_state_layout, o_as_v=True, cp_context=cp_context)


def fused_recurrent_gla(
    q: Tensor, k: Tensor, v: Tensor, gk: Maybe = None, gv: Maybe = None, scale: Optional[float] = None,
    initial_state: Maybe = None, output_final_state: bool = False, reverse: bool = False, state_v_first: bool = False,
    cu_seqlens: Maybe = None, *, ssm_state_indices: Maybe = None, inplace_final_state: Optional[bool] = None,
    num_accepted_tokens: Maybe = None, out: Maybe = None, g_gamma: Maybe = None, use_gate_in_kernel: bool = False,
    A_log: Maybe = None, dt_bias: Maybe = None, lower_bound: Optional[float] = None,
    transpose_state_layout: Optional[bool] = None, cp_context: object = None,
) -> Result:
    """Gated linear attention. gk [B, T, HV, K], gv [B, T, HV, V]: log decays of key and value channels.

    With use_gate_in_kernel gk is a pre-activation. With ssm_state_indices, initial_state is a pool: see docs/python.md.
    """
    return _run("gla", q, k, v, g=gk, gv=gv, g_gamma=g_gamma, scale=scale, initial_state=initial_state,
                output_final_state=output_final_state, reverse=reverse, state_v_first=state_v_first,
                cu_seqlens=cu_seqlens, gate=gate_form(use_gate_in_kernel, lower_bound), A_log=A_log, dt_bias=dt_bias,
                lower_bound=lower_bound, transpose_state_layout=transpose_state_layout,
                serving=_serving(ssm_state_indices, inplace_final_state, num_accepted_tokens, out),
                cp_context=cp_context)


def chunk_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Maybe = None, g_gamma: Maybe = None, scale: Optional[float] = None,
    initial_state: Maybe = None, output_final_state: bool = False, state_v_first: bool = False,
    cu_seqlens: Maybe = None, cu_seqlens_cpu: Maybe = None, chunk_size: int = 64, *, use_gate_in_kernel: bool = False,
    A_log: Maybe = None, dt_bias: Maybe = None, lower_bound: Optional[float] = None,
    transpose_state_layout: Optional[bool] = None, cp_context: object = None,
) -> Result:
    """Linear attention with one decay per head: g [B, T, HV] per step, g_gamma [HV] constant, or their sum."""
    return _run("simple_gla", q, k, v, g=g, g_gamma=g_gamma, scale=scale, initial_state=initial_state,
                output_final_state=output_final_state, state_v_first=state_v_first, cu_seqlens=cu_seqlens,
                cu_seqlens_cpu=cu_seqlens_cpu, gate=gate_form(use_gate_in_kernel, lower_bound), A_log=A_log,
                dt_bias=dt_bias, lower_bound=lower_bound, chunk_size=_hint(chunk_size, 64),
                transpose_state_layout=transpose_state_layout, cp_context=cp_context)


def fused_chunk_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Maybe = None, g_gamma: Maybe = None, scale: Optional[float] = None,
    initial_state: Maybe = None, output_final_state: bool = False, cu_seqlens: Maybe = None, *,
    state_v_first: bool = False, chunk_size: int = 64, use_gate_in_kernel: bool = False, A_log: Maybe = None,
    dt_bias: Maybe = None, lower_bound: Optional[float] = None, cp_context: object = None,
) -> Result:
    """As chunk_simple_gla."""
    return chunk_simple_gla(q, k, v, g, g_gamma, scale, initial_state, output_final_state, state_v_first, cu_seqlens,
                            chunk_size=chunk_size, use_gate_in_kernel=use_gate_in_kernel, A_log=A_log, dt_bias=dt_bias,
                            lower_bound=lower_bound, cp_context=cp_context)


def fused_recurrent_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Maybe = None, g_gamma: Maybe = None, scale: Optional[float] = None,
    initial_state: Maybe = None, output_final_state: bool = False, reverse: bool = False, state_v_first: bool = False,
    cu_seqlens: Maybe = None, *, ssm_state_indices: Maybe = None, inplace_final_state: Optional[bool] = None,
    num_accepted_tokens: Maybe = None, out: Maybe = None, use_gate_in_kernel: bool = False, A_log: Maybe = None,
    dt_bias: Maybe = None, lower_bound: Optional[float] = None, transpose_state_layout: Optional[bool] = None,
    cp_context: object = None,
) -> Result:
    """As chunk_simple_gla; `reverse` runs every sequence from its last token to its first."""
    return _run("simple_gla", q, k, v, g=g, g_gamma=g_gamma, scale=scale, initial_state=initial_state,
                output_final_state=output_final_state, reverse=reverse, state_v_first=state_v_first,
                cu_seqlens=cu_seqlens, gate=gate_form(use_gate_in_kernel, lower_bound), A_log=A_log, dt_bias=dt_bias,
                lower_bound=lower_bound, transpose_state_layout=transpose_state_layout,
                serving=_serving(ssm_state_indices, inplace_final_state, num_accepted_tokens, out),
                cp_context=cp_context)


def _retention_decays(heads: Tensor) -> Tensor:
    return torch.log1p(-torch.exp2(-5 - heads))


def chunk_retention(
    q: Tensor, k: Tensor, v: Tensor, scale: Optional[float] = None, initial_state: Maybe = None,
    output_final_state: bool = False, cu_seqlens: Maybe = None, *, state_v_first: bool = False, chunk_size: int = 64,
    cp_context: object = None,
) -> Result:
    """Retention: head h decays by 1 - 2^(-5-h)."""
    return _run("simple_gla", q, k, v, decays=(_retention_decays,), scale=scale, initial_state=initial_state,
                output_final_state=output_final_state, state_v_first=state_v_first, cu_seqlens=cu_seqlens,
                chunk_size=_hint(chunk_size, 64), cp_context=cp_context)


def fused_recurrent_retention(
    q: Tensor, k: Tensor, v: Tensor, scale: Optional[float] = None, initial_state: Maybe = None,
    output_final_state: bool = False, reverse: bool = False, state_v_first: bool = False, cu_seqlens: Maybe = None, *,
    transpose_state_layout: Optional[bool] = None, cp_context: object = None,
) -> Result:
    """As chunk_retention; `reverse` runs every sequence from its last token to its first."""
    return _run("simple_gla", q, k, v, decays=(_retention_decays,), scale=scale, initial_state=initial_state,
                output_final_state=output_final_state, reverse=reverse, state_v_first=state_v_first,
                cu_seqlens=cu_seqlens, transpose_state_layout=transpose_state_layout, cp_context=cp_context)


def _lightning_decays(heads: Tensor, rest: float) -> Tensor:
    return heads * (-8 / max(heads.shape[0], 1) * rest)


def _lightning(layer_idx: int, num_layers: int) -> Tuple[Callable[..., Tensor], float]:
    return _lightning_decays, 1 - depth(layer_idx, num_layers)


def chunk_lightning_attn(
    q: Tensor, k: Tensor, v: Tensor, layer_idx: int, num_layers: int, scale: Optional[float] = None,
    initial_state: Maybe = None, output_final_state: bool = False, cu_seqlens: Maybe = None, *,
    state_v_first: bool = False, chunk_size: int = 64, cp_context: object = None,
) -> Result:
    """Lightning attention: log decay -8 h / H (1 - layer_idx / num_layers) of head h."""
    return _run("simple_gla", q, k, v, decays=_lightning(layer_idx, num_layers), scale=scale,
                initial_state=initial_state, output_final_state=output_final_state, state_v_first=state_v_first,
                cu_seqlens=cu_seqlens, chunk_size=_hint(chunk_size, 64), cp_context=cp_context)


def fused_recurrent_lightning_attn(
    q: Tensor, k: Tensor, v: Tensor, layer_idx: int, num_layers: int, scale: Optional[float] = None,
    initial_state: Maybe = None, output_final_state: bool = False, reverse: bool = False, cu_seqlens: Maybe = None, *,
    state_v_first: bool = False, cp_context: object = None,
) -> Result:
    """As chunk_lightning_attn; `reverse` runs every sequence from its last token to its first."""
    return _run("simple_gla", q, k, v, decays=_lightning(layer_idx, num_layers), scale=scale,
                initial_state=initial_state, output_final_state=output_final_state, reverse=reverse,
                state_v_first=state_v_first, cu_seqlens=cu_seqlens, cp_context=cp_context)


# ---- delta rule ----

def chunk_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, scale: Optional[float] = None, initial_state: Maybe = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Maybe = None,
    cu_seqlens_cpu: Maybe = None, *, state_v_first: bool = False, chunk_size: Optional[int] = None,
    cp_context: object = None,
) -> Result:
    """The delta rule without a gate. beta [B, T, HV]."""
    return _run("delta_rule", q, k, v, beta=beta, scale=scale, initial_state=initial_state, state_v_first=state_v_first,
                output_final_state=output_final_state, l2norm=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens,
                cu_seqlens_cpu=cu_seqlens_cpu, chunk_size=chunk_size, cp_context=cp_context)


def fused_recurrent_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Maybe = None, scale: Optional[float] = None, initial_state: Maybe = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Maybe = None, *,
    reverse: bool = False, state_v_first: bool = False, ssm_state_indices: Maybe = None,
    inplace_final_state: Optional[bool] = None, num_accepted_tokens: Maybe = None, out: Maybe = None,
    cp_context: object = None,
) -> Result:
    """As chunk_delta_rule; beta may also be [B, T, HV, V], None is 1."""
    return _run("delta_rule", q, k, v, beta=beta, scale=scale, initial_state=initial_state, state_v_first=state_v_first,
                output_final_state=output_final_state, reverse=reverse, l2norm=use_qk_l2norm_in_kernel,
                cu_seqlens=cu_seqlens,
                serving=_serving(ssm_state_indices, inplace_final_state, num_accepted_tokens, out),
                cp_context=cp_context)


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: Optional[float] = None,
    initial_state: Maybe = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, state_v_first: bool = False,
    cu_seqlens: Maybe = None, cu_seqlens_cpu: Maybe = None, chunk_indices: object = None, cp_context: object = None,
    use_gate_in_kernel: bool = False, A_log: Maybe = None, dt_bias: Maybe = None, chunk_size: int = 64, *,
    g_gamma: Maybe = None, lower_bound: Optional[float] = None, transpose_state_layout: Optional[bool] = None,
) -> Result:
    """The gated delta rule. g, beta [B, T, HV].

    chunk_indices is accepted and not needed.
    """
    return _run("gated_delta_rule", q, k, v, g=g, g_gamma=g_gamma, beta=beta, scale=scale, initial_state=initial_state,
                output_final_state=output_final_state, l2norm=use_qk_l2norm_in_kernel,
                beta_is=beta_form(use_beta_sigmoid_in_kernel, allow_neg_eigval), state_v_first=state_v_first,
                cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu,
                gate=gate_form(use_gate_in_kernel, lower_bound), A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
                chunk_size=_hint(chunk_size, 64), transpose_state_layout=transpose_state_layout, cp_context=cp_context)


def fused_recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Maybe = None, gk: Maybe = None, gv: Maybe = None, beta: Maybe = None,
    scale: Optional[float] = None, initial_state: Maybe = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False, A_log: Maybe = None, dt_bias: Maybe = None,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, state_v_first: bool = False,
    cu_seqlens: Maybe = None, *, ssm_state_indices: Maybe = None, inplace_final_state: Optional[bool] = None,
    num_accepted_tokens: Maybe = None, out: Maybe = None, g_gamma: Maybe = None, lower_bound: Optional[float] = None,
    transpose_state_layout: Optional[bool] = None, cp_context: object = None,
) -> Result:
    """As chunk_gated_delta_rule, with log decays of heads (g), key channels (gk) and value channels (gv).

    beta may also be [B, T, HV, V]; None is 1. With ssm_state_indices, initial_state is a pool: see docs/python.md.
    """
    if gk is not None and g is not None:
        if flag("use_gate_in_kernel", use_gate_in_kernel):
            raise ValueError("gk: expected without g where the gate is computed in the kernel, got both")
        _library.check_tensors(("gk", "g"), (gk, g), 2)
        check_sum(gk, g)
        for name, x in (("gk", gk), ("g", g)):
            if not x.dtype.is_floating_point:
                raise TypeError(f"{name}: expected a floating dtype, got {x.dtype}")
        wide = torch.promote_types(gk.dtype, torch.promote_types(g.dtype, torch.float32))
        gk = gk.to(wide) + g.unsqueeze(-1)
    return _run("gated_delta_rule" if gk is None else "kda", q, k, v, g=g if gk is None else gk, gv=gv, beta=beta,
                g_gamma=g_gamma, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
                l2norm=use_qk_l2norm_in_kernel,
                gate=gate_form(use_gate_in_kernel, lower_bound), A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
                beta_is=beta_form(use_beta_sigmoid_in_kernel, allow_neg_eigval), state_v_first=state_v_first,
                cu_seqlens=cu_seqlens, transpose_state_layout=transpose_state_layout, o_as_v=True,
                serving=_serving(ssm_state_indices, inplace_final_state, num_accepted_tokens, out),
                cp_context=cp_context)


def chunk_comba(
    q: Tensor, k: Tensor, v: Tensor, p: Tensor, g: Tensor, beta: Maybe = None, scale: Optional[float] = None,
    initial_state: Maybe = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Maybe = None, cu_seqlens_cpu: Maybe = None, *, state_v_first: bool = False,
    chunk_size: Optional[int] = None, use_gate_in_kernel: bool = False, A_log: Maybe = None, dt_bias: Maybe = None,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, g_gamma: Maybe = None,
    lower_bound: Optional[float] = None, cp_context: object = None,
) -> Result:
    """Comba: the gated delta rule with an erase key p [B, T, H, K] against the state before the token's own gate."""
    return _run("comba", q, k, v, p=p, g=g, g_gamma=g_gamma, beta=beta, scale=scale, initial_state=initial_state,
                state_v_first=state_v_first, output_final_state=output_final_state, l2norm=use_qk_l2norm_in_kernel,
                cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, gate=gate_form(use_gate_in_kernel, lower_bound),
                A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
                beta_is=beta_form(use_beta_sigmoid_in_kernel, allow_neg_eigval), chunk_size=chunk_size,
                cp_context=cp_context)


def fused_recurrent_comba(
    q: Tensor, k: Tensor, p: Tensor, v: Tensor, g: Tensor, beta: Maybe = None, scale: Optional[float] = None,
    initial_state: Maybe = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Maybe = None, *, state_v_first: bool = False, ssm_state_indices: Maybe = None,
    inplace_final_state: Optional[bool] = None, num_accepted_tokens: Maybe = None, out: Maybe = None,
    use_gate_in_kernel: bool = False, A_log: Maybe = None, dt_bias: Maybe = None,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, g_gamma: Maybe = None,
    lower_bound: Optional[float] = None, cp_context: object = None,
) -> Result:
    """As chunk_comba, but p stands before v."""
    return _run("comba", q, k, v, p=p, g=g, g_gamma=g_gamma, beta=beta, scale=scale, initial_state=initial_state,
                state_v_first=state_v_first, output_final_state=output_final_state, l2norm=use_qk_l2norm_in_kernel,
                cu_seqlens=cu_seqlens, gate=gate_form(use_gate_in_kernel, lower_bound), A_log=A_log, dt_bias=dt_bias,
                lower_bound=lower_bound, beta_is=beta_form(use_beta_sigmoid_in_kernel, allow_neg_eigval),
                serving=_serving(ssm_state_indices, inplace_final_state, num_accepted_tokens, out),
                cp_context=cp_context)


def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: Optional[float] = None,
    initial_state: Maybe = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    safe_gate: bool = False, lower_bound: Optional[float] = None, disable_recompute: bool = False,
    return_intermediate_states: bool = False, state_v_first: bool = False, cu_seqlens: Maybe = None,
    cu_seqlens_cpu: Maybe = None, cp_context: object = None, A_log: Maybe = None, dt_bias: Maybe = None,
    chunk_size: int = 64, *, g_gamma: Maybe = None, transpose_state_layout: Optional[bool] = None,
    use_graph: bool = False, max_num_seqs: Optional[int] = None,
) -> Result:
    """Kimi delta attention: the delta rule with a log decay of every key channel, g [B, T, HV, K].

    safe_gate, disable_recompute, use_graph and max_num_seqs are hints without effect on results.
    """
    for name, hint in (("safe_gate", safe_gate), ("disable_recompute", disable_recompute), ("use_graph", use_graph)):
        flag(name, hint)
    if max_num_seqs is not None:
        integer("max_num_seqs", max_num_seqs)
    if flag("return_intermediate_states", return_intermediate_states):
        raise ValueError("return_intermediate_states: expected False, got True: the states between chunks are not kept")
    return _run("kda", q, k, v, g=g, g_gamma=g_gamma, beta=beta, scale=scale, initial_state=initial_state,
                output_final_state=output_final_state, l2norm=use_qk_l2norm_in_kernel,
                gate=gate_form(use_gate_in_kernel, lower_bound), lower_bound=lower_bound,
                beta_is=beta_form(use_beta_sigmoid_in_kernel, allow_neg_eigval), state_v_first=state_v_first,
                cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, A_log=A_log, dt_bias=dt_bias,
                chunk_size=_hint(chunk_size, 64), transpose_state_layout=transpose_state_layout, cp_context=cp_context)


def fused_recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Maybe = None, dt_bias: Maybe = None,
    scale: Optional[float] = None, initial_state: Maybe = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False, lower_bound: Optional[float] = None, state_v_first: bool = False,
    cu_seqlens: Maybe = None, *, ssm_state_indices: Maybe = None, inplace_final_state: Optional[bool] = None,
    num_accepted_tokens: Maybe = None, out: Maybe = None, g_gamma: Maybe = None,
    transpose_state_layout: Optional[bool] = None, cp_context: object = None,
) -> Result:
    """As chunk_kda; beta may also be [B, T, HV, V]. With ssm_state_indices, initial_state is a pool: docs/python.md."""
    return _run("kda", q, k, v, g=g, g_gamma=g_gamma, beta=beta, A_log=A_log, dt_bias=dt_bias, scale=scale,
                initial_state=initial_state, output_final_state=output_final_state, l2norm=use_qk_l2norm_in_kernel,
                gate=gate_form(use_gate_in_kernel, lower_bound), lower_bound=lower_bound,
                beta_is=beta_form(use_beta_sigmoid_in_kernel, allow_neg_eigval), state_v_first=state_v_first,
                cu_seqlens=cu_seqlens, transpose_state_layout=transpose_state_layout, o_as_v=True,
                serving=_serving(ssm_state_indices, inplace_final_state, num_accepted_tokens, out),
                cp_context=cp_context)


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule


def _hint(chunk_size: int, default: int) -> Optional[int]:
    """The default of the interface leaves the choice to the library; another value is a hint to it."""
    return None if isinstance(chunk_size, int) and chunk_size == default else chunk_size


def _serving(ssm_state_indices: Maybe, inplace_final_state: Optional[bool], num_accepted_tokens: Maybe,
             out: Maybe) -> Optional[Serving]:
    """The arguments of a call on a pool of states; None for a call without one."""
    in_place = None if inplace_final_state is None else flag("inplace_final_state", inplace_final_state)
    if in_place or (in_place is None and ssm_state_indices is not None):
        return ssm_state_indices, num_accepted_tokens, out
    if ssm_state_indices is not None:
        raise ValueError("inplace_final_state: expected True with ssm_state_indices, got False (new states come from "
                         "initial_state=pool[ssm_state_indices] without them)")
    for name, value in (("num_accepted_tokens", num_accepted_tokens), ("out", out)):
        if value is not None:
            raise ValueError(f"{name}: expected together with ssm_state_indices or inplace_final_state=True, got it "
                             "alone")
    return None
