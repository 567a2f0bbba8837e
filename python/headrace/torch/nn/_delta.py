"""The layers of the delta rule: Gated DeltaNet, Comba and Kimi delta attention."""

from __future__ import annotations

import math
from typing import Optional

import torch
from torch import Tensor, nn

from headrace._arguments import checked
from headrace.torch import fused_recurrent_comba, fused_recurrent_gated_delta_rule, fused_recurrent_kda
from headrace.torch.nn._layer import Layer, heads
from headrace.torch.nn._modules import RMSNormGated


def _undecayed(values: Tensor) -> nn.Parameter:
    """A parameter with the mark by which training scripts leave it out of weight decay."""
    parameter = nn.Parameter(values)
    parameter._no_weight_decay = True  # type: ignore[attr-defined]
    return parameter


def _log_uniform_rates(num_heads: int, low: float, high: float) -> nn.Parameter:
    return _undecayed(torch.empty(num_heads, dtype=torch.float32).uniform_(low, high).log())


def _time_step_bias(size: int) -> nn.Parameter:
    """Values whose softplus lies between 0.001 and 0.1, uniformly in the logarithm."""
    step = torch.exp(torch.empty(size, dtype=torch.float32).uniform_(math.log(0.001), math.log(0.1)))
    return _undecayed(step + torch.log(-torch.expm1(-step)))


class _DeltaLayer(Layer):
    """Sizes are given per head; value heads may be a multiple of the others."""

    g_proj: Optional[nn.Module]

    def __init__(self, hidden_size: int, expand_v: float, head_dim: int, num_heads: int, num_v_heads: Optional[int],
                 conv_size: Optional[int], conv_bias: bool, layer_idx: Optional[int]) -> None:
        self.num_heads = num_heads
        self.num_v_heads = num_heads if num_v_heads is None else num_v_heads
        head_v_dim = round(head_dim * expand_v)
        if not math.isclose(head_dim * expand_v, head_v_dim, rel_tol=1e-5):
            raise ValueError(f"expand_v: expected head_dim {head_dim} times it to be a whole number, got {expand_v}")
        if self.num_v_heads % num_heads:
            raise ValueError(f"num_v_heads: expected a multiple of num_heads {num_heads}, got {num_v_heads}")
        key_dim, value_dim = num_heads * head_dim, self.num_v_heads * head_v_dim
        super().__init__(hidden_size, key_dim, key_dim, value_dim, value_dim, head_dim, head_v_dim, conv_size,
                         conv_bias, layer_idx)
        self.b_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)

    def _add_step_gate(self) -> None:
        """The gate -exp(A_log) softplus(a_proj(x) + dt_bias), one for each step and value head."""
        self.a_proj = nn.Linear(self.hidden_size, self.num_v_heads, bias=False)
        self.A_log = _log_uniform_rates(self.num_v_heads, 0, 16)
        self.dt_bias = _time_step_bias(self.num_v_heads)

    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        """Checkpoints have an A_log of any shape, Kimi Linear's [1, 1, HV, 1]."""
        A_log = state_dict.get(f"{prefix}A_log")
        if A_log is not None and A_log.numel() == self.A_log.numel():
            state_dict[f"{prefix}A_log"] = A_log.reshape(self.A_log.shape)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _add_output(self, use_gate: bool, activation: str, norm_eps: float) -> None:
        self.g_proj = nn.Linear(self.hidden_size, self.value_dim, bias=False) if use_gate else None
        self.o_norm = RMSNormGated(self.head_v_dim, eps=norm_eps, activation=activation)

    def _output(self, x: Tensor, o: Tensor) -> Tensor:
        gate = None if self.g_proj is None else heads(self.g_proj(x), self.head_v_dim)
        return self.o_norm(o, gate).flatten(-2)


class GatedDeltaNet(_DeltaLayer):
    """The gated delta rule, with unit-length q and k, gate -exp(A_log) softplus(a_proj(x) + dt_bias) and write strength
    sigmoid(b_proj(x)), twice that with allow_neg_eigval.

    Source: Yang, Kautz, Hatamizadeh, Gated Delta Networks, arXiv:2412.06464. Arguments and parameters are those of
    flash-linear-attention's layer; `mode` changes nothing, the library chooses the form. Raises ValueError.
    """

    @checked
    def __init__(self, hidden_size: int = 2048, expand_v: float = 2, head_dim: int = 256, num_heads: int = 6,
                 num_v_heads: Optional[int] = None, mode: str = "chunk", use_gate: bool = True,
                 use_short_conv: bool = True, allow_neg_eigval: bool = False, conv_size: int = 4,
                 conv_bias: bool = False, layer_idx: Optional[int] = None, norm_eps: float = 1e-5,
                 output_gate_activation: str = "swish") -> None:
        super().__init__(hidden_size, expand_v, head_dim, num_heads, num_v_heads, conv_size if use_short_conv else None,
                         conv_bias, layer_idx)
        self.allow_neg_eigval = allow_neg_eigval
        self._add_step_gate()
        self._add_output(use_gate, output_gate_activation, norm_eps)

    def _operator(self, x, q, k, v, options, positions):
        return fused_recurrent_gated_delta_rule(
            q, k, v, g=self.a_proj(x), beta=self.b_proj(x), use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
            A_log=self.A_log, dt_bias=self.dt_bias, use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=self.allow_neg_eigval, **options)


class Comba(_DeltaLayer):
    """Comba: the gated delta rule whose erase key is k sigmoid(decay), and whose query is corrected by -D times that.

    Source: Hu et al., Comba: Improving Bilinear RNNs with Closed-loop Control, arXiv:2506.02475. Arguments and
    parameters are those of flash-linear-attention's layer; `mode` changes nothing. correction_factor: D at the start.
    Raises ValueError.
    """

    @checked
    def __init__(self, hidden_size: int = 2048, expand_v: float = 2, head_dim: int = 256, num_heads: int = 6,
                 num_v_heads: Optional[int] = None, mode: str = "chunk", use_short_conv: bool = True,
                 use_output_gate: bool = True, use_output_correction: bool = True, use_inner_decay: bool = True,
                 correction_factor: float = 1.0, conv_size: int = 4, conv_bias: bool = False,
                 layer_idx: Optional[int] = None, norm_eps: float = 1e-5) -> None:
        super().__init__(hidden_size, expand_v, head_dim, num_heads, num_v_heads, conv_size if use_short_conv else None,
                         conv_bias, layer_idx)
        self._add_step_gate()
        self.decay = nn.Parameter(torch.ones(num_heads)) if use_inner_decay else None
        self.D = _undecayed(torch.full((num_heads,), float(correction_factor))) if use_output_correction else None
        self._add_output(use_output_gate, "sigmoid", norm_eps)

    def _operator(self, x, q, k, v, options, positions):
        p = k if self.decay is None else (k * self.decay.sigmoid().unsqueeze(-1)).to(k.dtype)
        if self.D is not None:
            q = (q - self.D.unsqueeze(-1) * p).to(q.dtype)
        return fused_recurrent_comba(
            q, k, p, v, g=self.a_proj(x), beta=self.b_proj(x), use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
            A_log=self.A_log, dt_bias=self.dt_bias, use_beta_sigmoid_in_kernel=True, **options)


class KimiDeltaAttention(_DeltaLayer):
    """Kimi delta attention: the delta rule with unit-length q and k and a decay for every key channel and value head,
    -exp(A_log) softplus(f), or with a lower_bound lower_bound sigmoid(exp(A_log) f), where f = f_proj(x) + dt_bias.

    Source: Kimi Team, Kimi Linear: An Expressive, Efficient Attention Architecture, arXiv:2510.26692. Arguments and
    parameters are those of flash-linear-attention's layer; `mode` changes nothing. safe_gate: A_log starts at 0. Raises
    ValueError.
    """

    @checked
    def __init__(self, hidden_size: int = 2048, expand_v: float = 1, head_dim: int = 128, num_heads: int = 16,
                 num_v_heads: Optional[int] = None, mode: str = "chunk", use_short_conv: bool = True,
                 allow_neg_eigval: bool = False, safe_gate: bool = False, lower_bound: Optional[float] = None,
                 conv_size: int = 4, conv_bias: bool = False, layer_idx: Optional[int] = None,
                 norm_eps: float = 1e-5) -> None:
        super().__init__(hidden_size, expand_v, head_dim, num_heads, num_v_heads, conv_size if use_short_conv else None,
                         conv_bias, layer_idx)
        self.allow_neg_eigval, self.lower_bound = allow_neg_eigval, lower_bound
        gate_dim = self.num_v_heads * head_dim
        self.f_proj = nn.Sequential(nn.Linear(hidden_size, self.head_v_dim, bias=False),
                                    nn.Linear(self.head_v_dim, gate_dim, bias=False))
        self.A_log = (_undecayed(torch.zeros(self.num_v_heads)) if safe_gate
                      else _log_uniform_rates(self.num_v_heads, 1, 16))
        self.dt_bias = _time_step_bias(gate_dim)
        self.g_proj = nn.Sequential(nn.Linear(hidden_size, self.head_v_dim, bias=False),
                                    nn.Linear(self.head_v_dim, self.value_dim))
        self.o_norm = RMSNormGated(self.head_v_dim, eps=norm_eps, activation="sigmoid")

    def _operator(self, x, q, k, v, options, positions):
        return fused_recurrent_kda(
            q, k, v, g=heads(self.f_proj(x), self.head_k_dim), beta=self.b_proj(x), A_log=self.A_log,
            dt_bias=self.dt_bias, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True, allow_neg_eigval=self.allow_neg_eigval, lower_bound=self.lower_bound,
            **options)
