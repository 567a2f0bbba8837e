"""What layers put around the operators: short convolution and gated RMS normalisation (docs/math.md, 10 and 11)."""

from __future__ import annotations

from typing import Optional, Tuple

import torch
from torch import Tensor

from headrace.torch import _layer_library  # noqa: F401, registers the operators

_ACTIVATIONS = {None: "none", "silu": "silu", "swish": "silu"}
_GATES = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}


def _named(activation: Optional[str], names: dict) -> str:
    if activation not in names:
        raise ValueError(f"activation: expected one of {', '.join(map(repr, names))}, got {activation!r}")
    return names[activation]


def _check(x: Tensor, **others: Optional[Tensor]) -> None:
    """What must hold before outputs can be allocated; the library checks the rest."""
    for name, tensor in {"x": x, **others}.items():
        if tensor is None:
            continue
        if not tensor.dtype.is_floating_point:
            raise TypeError(f"{name}: expected a floating dtype, got {tensor.dtype}")
        if tensor.device != x.device:
            raise ValueError(f"{name}: expected device {x.device} as x, got {tensor.device}")


def _check_sizes(x: Tensor, sizes: str, weight: Tensor) -> None:
    if x.dim() != sizes.count(",") + 1:
        raise ValueError(f"x: expected {sizes.count(',') + 1} dimensions {sizes}, got shape {list(x.shape)}")
    if weight.dim() != 2:
        raise ValueError(f"weight: expected 2 dimensions [D, W], got shape {list(weight.shape)}")


def short_convolution(
    x: Tensor, weight: Tensor, bias: Optional[Tensor] = None, initial_state: Optional[Tensor] = None,
    output_final_state: bool = False, activation: Optional[str] = None, cu_seqlens: Optional[Tensor] = None,
) -> Tuple[Tensor, Optional[Tensor]]:
    """Causal depth-wise convolution along the tokens: y_t = activation(bias + sum_i weight[:, i] x_{t - (W-1) + i}).

    x [B, T, D]; weight [D, W], W from 1 to 64, the newest token's weight last (conv1d's [D, 1, W] squeezed); bias [D];
    activation None, "silu" or its other name "swish". initial_state [N, D, W] holds the last W inputs before x, oldest
    first; N is B, or len(cu_seqlens) - 1 with B = 1. Every tensor may have its own floating dtype; sums are float32
    (float64 for float64 x).

    Returns (y [B, T, D] in the dtype of x, final state [N, D, W] or None). The state has the dtype of initial_state, or
    of x without one. Differentiable by x, weight, bias and initial_state, through both. Raises ValueError or TypeError
    naming the argument, what was expected and what came.
    """
    _check(x, weight=weight, bias=bias, initial_state=initial_state)
    _check_sizes(x, "[B, T, D]", weight)
    if cu_seqlens is not None and (cu_seqlens.dim() != 1 or len(cu_seqlens) == 0):
        raise ValueError(f"cu_seqlens: expected 1 dimension [N + 1], got shape {list(cu_seqlens.shape)}")
    y, final_state = torch.ops.headrace.short_convolution(
        x, weight, bias, initial_state, cu_seqlens, output_final_state, _named(activation, _ACTIVATIONS))
    return y, final_state if output_final_state else None


def short_convolution_step(
    x: Tensor, state: Tensor, weight: Tensor, bias: Optional[Tensor] = None, activation: Optional[str] = None,
    indices: Optional[Tensor] = None,
) -> Tensor:
    """One token of short_convolution for each of N sequences, without gradients (use torch.no_grad).

    x [N, D] or [N, 1, D]; state [rows, D, W], as the states of short_convolution, is updated in place. indices [N],
    int32 or int64, names the row of each sequence, each row once; -1 is padding, whose output is zero; not given: row
    n. Rows that no index names stay as they are. Returns y in the shape and dtype of x. Errors as in short_convolution.
    """
    if x.dim() == 3 and x.shape[1] == 1:
        return short_convolution_step(x.squeeze(1), state, weight, bias, activation, indices).unsqueeze(1)
    _check(x, state=state, weight=weight, bias=bias)
    _check_sizes(x, "[N, D]", weight)
    return torch.ops.headrace.short_convolution_step(x, state, weight, bias, indices, _named(activation, _ACTIVATIONS))


def rms_norm_gated(
    x: Tensor, gate: Optional[Tensor] = None, weight: Optional[Tensor] = None, eps: float = 1e-5,
    activation: str = "silu",
) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight * activation(gate) over the last dimension.

    x, gate and y [..., D]; weight [D]; activation "silu", its other name "swish", or "sigmoid". What is not given is
    left out of the product. Every tensor may have its own floating dtype, y that of x; sums are float32 (float64 for
    float64 x). Differentiable by x, gate and weight. Raises ValueError or TypeError naming the argument, what was
    expected and what came.
    """
    _check(x, gate=gate, weight=weight)
    if x.dim() == 0:
        raise ValueError("x: expected at least 1 dimension, got 0")
    if gate is not None and gate.shape != x.shape:
        raise ValueError(f"gate: expected shape {list(x.shape)} as x, got {list(gate.shape)}")
    folded = x.dim() > 4  # the library reads up to four dimensions
    operands = [t if t is None or not folded else t.flatten(0, -4) for t in (x, gate)]
    y = torch.ops.headrace.rms_norm_gated(*operands, weight, eps, _named(activation, _GATES))
    return y.view(x.shape) if folded else y
