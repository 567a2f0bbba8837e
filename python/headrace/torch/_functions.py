"""The functions of headrace.torch: user arguments in, one custom operator out. Sources of the formulas: docs/math.md."""

from __future__ import annotations

import warnings
from typing import Optional, Tuple

import torch
from torch import Tensor

from headrace._arguments import beta_form, gate_form
from headrace.torch import _library
from headrace.torch._pool import step_on_pool

Result = Tuple[Tensor, Optional[Tensor]]
Maybe = Optional[Tensor]


def _in_autocast_type(*tensors: Maybe) -> Tuple[Maybe, ...]:
    """Under autocast q, k, v and p arrive in mixed types: all take the autocast type, except float64."""
    device = tensors[0].device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x is None or x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def _offsets(cu_seqlens: Maybe, cu_seqlens_cpu: Maybe, device: torch.device) -> Maybe:
    if cu_seqlens is None and cu_seqlens_cpu is not None:
        raise ValueError("cu_seqlens_cpu: expected together with cu_seqlens, of which it is the host copy, got it alone")
    return cu_seqlens if cu_seqlens_cpu is None or device.type == "cpu" else cu_seqlens_cpu


def _v_first(state_v_first: bool, transpose_state_layout: Optional[bool]) -> bool:
    if transpose_state_layout is None:
        return state_v_first
    if state_v_first:
        raise ValueError("transpose_state_layout: expected only one of it and state_v_first, of which it is the old name, got both")
    warnings.warn("transpose_state_layout is the old name of state_v_first", DeprecationWarning, stacklevel=4)
    return transpose_state_layout


def _run(
    op: str, q: Tensor, k: Tensor, v: Tensor, *, p: Maybe = None, g: Maybe = None, gv: Maybe = None, g_gamma: Maybe = None,
    beta: Maybe = None, A_log: Maybe = None, dt_bias: Maybe = None, initial_state: Maybe = None,
    output_final_state: bool = False, cu_seqlens: Maybe = None, cu_seqlens_cpu: Maybe = None, scale: Optional[float] = None,
    reverse: bool = False, l2norm: bool = False, gate: str = "log_decay", lower_bound: Optional[float] = None,
    beta_is: str = "value", chunk_size: Optional[int] = None, state_v_first: bool = False,
    transpose_state_layout: Optional[bool] = None, serving: Optional[dict] = None,
) -> Result:
    q, k, v, p = _in_autocast_type(q, k, v, p)
    _library._check(q, k, v)
    if gate == "log_decay":
        A_log = dt_bias = None  # given for a gate that is computed outside
    elif A_log is None:
        raise ValueError("A_log: expected a tensor [HV] with use_gate_in_kernel, got None")
    state_v_first = _v_first(state_v_first, transpose_state_layout)
    cu_seqlens = _offsets(cu_seqlens, cu_seqlens_cpu, q.device)
    rest = (scale, reverse, l2norm, gate, -5.0 if lower_bound is None else lower_bound, beta_is, chunk_size or 0, state_v_first)
    tensors = (q, k, v, p, g, gv, g_gamma, beta, A_log, dt_bias, initial_state, cu_seqlens)
    if serving is not None and any(value is not None for value in serving.values()):
        return step_on_pool(op, tensors, rest, **serving)
    o, final_state = torch.ops.headrace.forward(op, *tensors, output_final_state, *rest)
    return o, final_state if output_final_state else None


# ---- additive rule ----

def chunk_gla(q, k, v, g, scale=None, initial_state=None, output_final_state=False, state_v_first=False, cu_seqlens=None,
              cu_seqlens_cpu=None, chunk_size=None, g_gamma=None, transpose_state_layout=None) -> Result:
    """Gated linear attention. g [B, T, HV, K]: log decay of every key channel."""
    return _run("gla", q, k, v, g=g, g_gamma=g_gamma, scale=scale, initial_state=initial_state,
                output_final_state=output_final_state, state_v_first=state_v_first, cu_seqlens=cu_seqlens,
                cu_seqlens_cpu=cu_seqlens_cpu, chunk_size=chunk_size, transpose_state_layout=transpose_state_layout)


def fused_recurrent_gla(q, k, v, gk=None, gv=None, scale=None, initial_state=None, output_final_state=False, reverse=False,
                        state_v_first=False, cu_seqlens=None, ssm_state_indices=None, inplace_final_state=None,
                        num_accepted_tokens=None, out=None) -> Result:
    """Gated linear attention. gk [B, T, HV, K], gv [B, T, HV, V]: log decays of key and value channels.

    With ssm_state_indices, initial_state is a pool of states: see docs/python.md.
    """
    return _run("gla", q, k, v, g=gk, gv=gv, scale=scale, initial_state=initial_state,
                output_final_state=output_final_state, reverse=reverse, state_v_first=state_v_first, cu_seqlens=cu_seqlens,
                serving=_serving(ssm_state_indices, inplace_final_state, num_accepted_tokens, out))


def chunk_simple_gla(q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False,
                     state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, chunk_size=64,
                     transpose_state_layout=None) -> Result:
    """Linear attention with one decay per head: g [B, T, HV] per step, g_gamma [HV] constant, or their sum."""
    return _run("simple_gla", q, k, v, g=g, g_gamma=g_gamma, scale=scale, initial_state=initial_state,
                output_final_state=output_final_state, state_v_first=state_v_first, cu_seqlens=cu_seqlens,
                cu_seqlens_cpu=cu_seqlens_cpu, chunk_size=_hint(chunk_size, 64), transpose_state_layout=transpose_state_layout)


def fused_chunk_simple_gla(q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False,
                           cu_seqlens=None) -> Result:
    """As chunk_simple_gla."""
    return chunk_simple_gla(q, k, v, g, g_gamma, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def fused_recurrent_simple_gla(q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False,
                               reverse=False, state_v_first=False, cu_seqlens=None, ssm_state_indices=None,
                               inplace_final_state=None, num_accepted_tokens=None, out=None) -> Result:
    """As chunk_simple_gla; `reverse` runs every sequence from its last token to its first."""
    return _run("simple_gla", q, k, v, g=g, g_gamma=g_gamma, scale=scale, initial_state=initial_state,
                output_final_state=output_final_state, reverse=reverse, state_v_first=state_v_first, cu_seqlens=cu_seqlens,
                serving=_serving(ssm_state_indices, inplace_final_state, num_accepted_tokens, out))


def _retention_gates(v: Tensor) -> Tensor:
    heads = torch.arange(v.shape[2], dtype=torch.float32, device=v.device)
    return torch.log1p(-torch.exp2(-5 - heads))


def chunk_retention(q, k, v, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None) -> Result:
    """Retention: head h decays by 1 - 2^(-5-h)."""
    return chunk_simple_gla(q, k, v, None, _retention_gates(v), scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def fused_recurrent_retention(q, k, v, scale=None, initial_state=None, output_final_state=False, reverse=False,
                              cu_seqlens=None) -> Result:
    """As chunk_retention; `reverse` runs every sequence from its last token to its first."""
    return fused_recurrent_simple_gla(q, k, v, None, _retention_gates(v), scale, initial_state, output_final_state, reverse,
                                      cu_seqlens=cu_seqlens)


def _lightning_gates(v: Tensor, layer_idx: int, num_layers: int) -> Tensor:
    heads = torch.arange(v.shape[2], dtype=torch.float32, device=v.device)
    return heads * (-8 / v.shape[2] * (1 - layer_idx / num_layers))


def chunk_lightning_attn(q, k, v, layer_idx, num_layers, scale=None, initial_state=None, output_final_state=False,
                         cu_seqlens=None) -> Result:
    """Lightning attention: log decay -8 h / H (1 - layer_idx / num_layers) of head h."""
    return chunk_simple_gla(q, k, v, None, _lightning_gates(v, layer_idx, num_layers), scale, initial_state,
                            output_final_state, cu_seqlens=cu_seqlens)


def fused_recurrent_lightning_attn(q, k, v, layer_idx, num_layers, scale=None, initial_state=None, output_final_state=False,
                                   reverse=False, cu_seqlens=None) -> Result:
    """As chunk_lightning_attn; `reverse` runs every sequence from its last token to its first."""
    return fused_recurrent_simple_gla(q, k, v, None, _lightning_gates(v, layer_idx, num_layers), scale, initial_state,
                                      output_final_state, reverse, cu_seqlens=cu_seqlens)


# ---- delta rule ----

def chunk_delta_rule(q, k, v, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
                     cu_seqlens=None, state_v_first=False, chunk_size=None) -> Result:
    """The delta rule without a gate. beta [B, T, HV]."""
    return _run("delta_rule", q, k, v, beta=beta, scale=scale, initial_state=initial_state, state_v_first=state_v_first,
                output_final_state=output_final_state, l2norm=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens,
                chunk_size=chunk_size)


def fused_recurrent_delta_rule(q, k, v, beta=None, scale=None, initial_state=None, output_final_state=False, reverse=False,
                               use_qk_l2norm_in_kernel=False, cu_seqlens=None, state_v_first=False, ssm_state_indices=None,
                               inplace_final_state=None, num_accepted_tokens=None, out=None) -> Result:
    """As chunk_delta_rule; beta may also be [B, T, HV, V], None is 1."""
    return _run("delta_rule", q, k, v, beta=beta, scale=scale, initial_state=initial_state, state_v_first=state_v_first,
                output_final_state=output_final_state, reverse=reverse, l2norm=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens,
                serving=_serving(ssm_state_indices, inplace_final_state, num_accepted_tokens, out))


def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
                           use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
                           state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None,
                           use_gate_in_kernel=False, A_log=None, dt_bias=None, chunk_size=64, g_gamma=None,
                           transpose_state_layout=None) -> Result:
    """The gated delta rule. g, beta [B, T, HV]; with use_gate_in_kernel g <- -exp(A_log) softplus(g + dt_bias).

    chunk_indices is accepted and not needed.
    """
    _no_context(cp_context)
    return _run("gated_delta_rule", q, k, v, g=g, g_gamma=g_gamma, beta=beta, scale=scale, initial_state=initial_state,
                output_final_state=output_final_state, l2norm=use_qk_l2norm_in_kernel,
                beta_is=beta_form(use_beta_sigmoid_in_kernel, allow_neg_eigval), state_v_first=state_v_first,
                cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, gate=gate_form(use_gate_in_kernel, None), A_log=A_log,
                dt_bias=dt_bias, chunk_size=_hint(chunk_size, 64), transpose_state_layout=transpose_state_layout)


def fused_recurrent_gated_delta_rule(q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, initial_state=None,
                                     output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False,
                                     A_log=None, dt_bias=None, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
                                     state_v_first=False, cu_seqlens=None, ssm_state_indices=None, inplace_final_state=None,
                                     num_accepted_tokens=None, out=None) -> Result:
    """As chunk_gated_delta_rule, with log decays of heads (g), key channels (gk) and value channels (gv).

    beta may also be [B, T, HV, V]; None is 1. With ssm_state_indices, initial_state is a pool: see docs/python.md.
    """
    if gk is not None and g is not None:
        if use_gate_in_kernel:
            raise ValueError("gk: expected without g where the gate is computed in the kernel, got both")
        gk = gk + g.unsqueeze(-1)
    return _run("gated_delta_rule" if gk is None else "kda", q, k, v, g=g if gk is None else gk, gv=gv, beta=beta, scale=scale,
                initial_state=initial_state, output_final_state=output_final_state, l2norm=use_qk_l2norm_in_kernel,
                gate=gate_form(use_gate_in_kernel, None), A_log=A_log, dt_bias=dt_bias,
                beta_is=beta_form(use_beta_sigmoid_in_kernel, allow_neg_eigval), state_v_first=state_v_first,
                cu_seqlens=cu_seqlens, serving=_serving(ssm_state_indices, inplace_final_state, num_accepted_tokens, out))


def chunk_comba(q, k, v, p, g, beta=None, scale=None, initial_state=None, output_final_state=False,
                use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None, state_v_first=False,
                chunk_size=None) -> Result:
    """Comba: the gated delta rule with an erase key p [B, T, H, K] against the state before the token's own gate."""
    return _run("comba", q, k, v, p=p, g=g, beta=beta, scale=scale, initial_state=initial_state, state_v_first=state_v_first,
                output_final_state=output_final_state, l2norm=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens,
                cu_seqlens_cpu=cu_seqlens_cpu, chunk_size=chunk_size)


def fused_recurrent_comba(q, k, p, v, g, beta=None, scale=None, initial_state=None, output_final_state=False,
                          use_qk_l2norm_in_kernel=False, cu_seqlens=None, state_v_first=False, ssm_state_indices=None,
                          inplace_final_state=None, num_accepted_tokens=None, out=None) -> Result:
    """As chunk_comba, but p stands before v."""
    return _run("comba", q, k, v, p=p, g=g, beta=beta, scale=scale, initial_state=initial_state, state_v_first=state_v_first,
                output_final_state=output_final_state, l2norm=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens,
                serving=_serving(ssm_state_indices, inplace_final_state, num_accepted_tokens, out))


def chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
              use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False,
              lower_bound=None, disable_recompute=False, return_intermediate_states=False, state_v_first=False,
              cu_seqlens=None, cu_seqlens_cpu=None, cp_context=None, A_log=None, dt_bias=None, chunk_size=64, g_gamma=None,
              transpose_state_layout=None) -> Result:
    """Kimi delta attention: the delta rule with a log decay of every key channel, g [B, T, HV, K].

    safe_gate and disable_recompute are hints without effect on results.
    """
    _no_context(cp_context)
    if return_intermediate_states:
        raise ValueError("return_intermediate_states: expected False, got True: the states between chunks are not kept")
    return _run("kda", q, k, v, g=g, g_gamma=g_gamma, beta=beta, scale=scale, initial_state=initial_state,
                output_final_state=output_final_state, l2norm=use_qk_l2norm_in_kernel,
                gate=gate_form(use_gate_in_kernel, lower_bound), lower_bound=lower_bound,
                beta_is=beta_form(use_beta_sigmoid_in_kernel, allow_neg_eigval), state_v_first=state_v_first,
                cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, A_log=A_log, dt_bias=dt_bias,
                chunk_size=_hint(chunk_size, 64), transpose_state_layout=transpose_state_layout)


def fused_recurrent_kda(q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, initial_state=None, output_final_state=False,
                        use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False,
                        allow_neg_eigval=False, lower_bound=None, state_v_first=False, cu_seqlens=None,
                        ssm_state_indices=None, inplace_final_state=None, num_accepted_tokens=None, out=None) -> Result:
    """As chunk_kda; beta may also be [B, T, HV, V]. With ssm_state_indices, initial_state is a pool: see docs/python.md."""
    return _run("kda", q, k, v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, scale=scale, initial_state=initial_state,
                output_final_state=output_final_state, l2norm=use_qk_l2norm_in_kernel,
                gate=gate_form(use_gate_in_kernel, lower_bound), lower_bound=lower_bound,
                beta_is=beta_form(use_beta_sigmoid_in_kernel, allow_neg_eigval), state_v_first=state_v_first,
                cu_seqlens=cu_seqlens, serving=_serving(ssm_state_indices, inplace_final_state, num_accepted_tokens, out))


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule


def _hint(chunk_size: int, default: int) -> int:
    """The default of the interface leaves the choice to the library; another value is a hint to it."""
    return 0 if chunk_size == default else chunk_size


def _no_context(cp_context) -> None:
    if cp_context is not None:
        raise ValueError("cp_context: expected None, got a context: sequences are not split over processes")


def _serving(ssm_state_indices, inplace_final_state, num_accepted_tokens, out) -> dict:
    return {"ssm_state_indices": ssm_state_indices, "inplace_final_state": inplace_final_state,
            "num_accepted_tokens": num_accepted_tokens, "out": out}
