"""What layers put around the operators: short convolution and gated RMS normalisation (docs/math.md, 10 and 11)."""

from __future__ import annotations

from typing import Any, Optional, Tuple, Union

import torch
from torch import Tensor

from headrace._arguments import ACTIVATIONS, GATES, flag, named, number
from headrace.torch import _dtensor
from headrace.torch._layer_library import run_convolution, run_convolution_step, run_norm
from headrace.torch._library import check_tensors, mark_written, route


def _check(required: int, **tensors: Any) -> Optional[bool]:
    """What must hold before outputs can be allocated; the library checks the rest. `required`: as in check_tensors.

    Returns the way of the call, as in route().
    """
    way = route(tuple(tensors.values()), required)
    if way is None:
        check_tensors(tuple(tensors), tuple(tensors.values()), required)
    for name, tensor in tensors.items():
        if tensor is not None and name not in ("cu_seqlens", "indices") and not tensor.dtype.is_floating_point:
            raise TypeError(f"{name}: expected a floating dtype, got {tensor.dtype}")
    return way


def _check_sizes(x: Tensor, sizes: str, weight: Tensor) -> None:
    if x.dim() != sizes.count(",") + 1:
        raise ValueError(f"x: expected {sizes.count(',') + 1} dimensions {sizes}, got shape {list(x.shape)}")
    if weight.dim() != 2:
        raise ValueError(f"weight: expected 2 dimensions [D, W], got shape {list(weight.shape)}")


def _check_shape(name: str, tensor: Tensor, x: Tensor) -> None:
    if tensor.shape != x.shape:
        raise ValueError(f"{name}: expected shape {list(x.shape)} as x, got {list(tensor.shape)}")


def short_convolution(
    x: Tensor, weight: Tensor, bias: Optional[Tensor] = None, initial_state: Optional[Tensor] = None,
    output_final_state: bool = False, activation: Optional[str] = None, cu_seqlens: Optional[Tensor] = None, *,
    cp_context: Any = None,
) -> Tuple[Tensor, Optional[Tensor]]:
    """Causal depth-wise convolution along the tokens: y_t = activation(bias + sum_i weight[:, i] x_{t - (W-1) + i}).

    x [B, T, D]; weight [D, W], W from 1 to 64, the newest token's weight last (conv1d's [D, 1, W] squeezed); bias [D];
    activation None, "silu" or its other name "swish". initial_state [N, D, W] holds the last W inputs before x, oldest
    first; N is B, or len(cu_seqlens) - 1 with B = 1. Every tensor may have its own floating dtype; sums are float32
    (float64 for float64 x). cp_context: x holds the rank's tokens of a batch that is cut over ranks, see
    headrace.torch.distributed.

    Returns (y [B, T, D] in the dtype of x, final state [N, D, W] or None). The state has the dtype of initial_state, or
    of x without one. Differentiable by x, weight, bias and initial_state, through both. Raises ValueError or TypeError
    naming the argument, what was expected and what came.
    """
    if cp_context is not None:
        from headrace.torch.distributed import _calls  # which needs a PyTorch with torch.distributed

        context, cu_seqlens = _calls.accepted(cp_context, cu_seqlens=cu_seqlens)
        tensors = x, weight, bias, initial_state, cu_seqlens
        if _dtensor.among(tensors):
            return _convolution_on_ranks((*tensors[:-1], None), output_final_state, activation, cp_context)
        if context is not None:
            y, state = _calls.convolve(context, lambda: _convolution_arguments(
                x, weight, bias, initial_state, None, output_final_state, activation)[1])
            return y, state if output_final_state else None
    way, arguments = _convolution_arguments(x, weight, bias, initial_state, cu_seqlens, output_final_state, activation)
    if way is None and _dtensor.among(arguments[:5]):
        return _convolution_on_ranks(arguments[:5], output_final_state, activation, None)
    y, final_state = run_convolution(way, arguments)
    return y, final_state if arguments[-2] else None


def _convolution_arguments(x: Tensor, weight: Tensor, bias: Optional[Tensor], initial_state: Optional[Tensor],
                           cu_seqlens: Optional[Tensor], output_final_state: bool,
                           activation: Optional[str]) -> Tuple[Optional[bool], tuple]:
    """(the way to the operator, its arguments), checked."""
    way = _check(2, x=x, weight=weight, bias=bias, initial_state=initial_state, cu_seqlens=cu_seqlens)
    _check_sizes(x, "[B, T, D]", weight)
    keep = flag("output_final_state", output_final_state)
    return way, (x, weight, bias, initial_state, cu_seqlens, keep, named("activation", activation, ACTIVATIONS))


def _convolution_on_ranks(tensors: tuple, output_final_state: bool, activation: Optional[str],
                          context: Any) -> Tuple[Tensor, Optional[Tensor]]:
    """short_convolution of DTensors."""
    def run(x, weight, bias, state, offsets):
        return short_convolution(x, weight, bias, state, output_final_state, activation, offsets, cp_context=context)

    keep = flag("output_final_state", output_final_state)
    if context is not None:
        _dtensor.check_context(tensors[0], context, keep or tensors[3] is not None)
    return _dtensor.on_ranks(run, ("x", "weight", "bias", "initial_state", "cu_seqlens"), tensors,
                             _dtensor.channel_cuts(tensors[0].dim(), False, context is not None), (True, keep))


def short_convolution_step(
    x: Tensor, state: Tensor, weight: Tensor, bias: Optional[Tensor] = None, activation: Optional[str] = None,
    indices: Optional[Tensor] = None,
) -> Tensor:
    """One token of short_convolution for each of N sequences, without gradients (use torch.no_grad).

    x [N, D] or [N, 1, D]; state [rows, D, W], as the states of short_convolution, is updated in place. indices [N],
    int32 or int64, names the row of each sequence, each row once; -1 is padding, whose output is zero; not given: row
    n. Rows that no index names stay as they are. Returns y in the shape and dtype of x. Errors as in short_convolution.
    """
    way = _check(3, x=x, state=state, weight=weight, bias=bias, indices=indices)
    tokens = x.squeeze(1) if x.dim() == 3 and x.shape[1] == 1 else x
    _check_sizes(tokens, "[N, D]", weight)
    if way is None and _dtensor.among((x, state, weight, bias, indices)):
        return _step_on_ranks((x, state, weight, bias, indices), activation)
    y = run_convolution_step(way, tokens, state, weight, bias, indices, named("activation", activation, ACTIVATIONS))
    return y if tokens is x else y.unsqueeze(1)


def _step_on_ranks(tensors: tuple, activation: Optional[str]) -> Tensor:
    """short_convolution_step of DTensors."""
    def run(x, state, weight, bias, indices):
        return short_convolution_step(x, state, weight, bias, activation, indices),

    cuts = _dtensor.channel_cuts(tensors[0].dim(), tensors[-1] is not None)
    y, = _dtensor.on_ranks(run, ("x", "state", "weight", "bias", "indices"), tensors, cuts, (True,), ("state",))
    mark_written(tensors[1:2])
    return y


def rms_norm_gated(
    x: Tensor, g: Optional[Tensor] = None, weight: Optional[Tensor] = None, bias: None = None,
    activation: str = "swish", residual: Optional[Tensor] = None, prenorm: bool = False,
    residual_in_fp32: bool = False, eps: float = 1e-6,
) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    """y = s / sqrt(mean(s^2) + eps) * weight * activation(g) over the last dimension of s = x + residual.

    x, g, residual and y [..., D]; weight [D]; activation "swish", its other name "silu", or "sigmoid". What is not
    given is left out of the formula; there is no bias. Every tensor may have its own floating dtype, y that of x; sums
    are float32 (float64 for float64 x). Differentiable by x, g, weight and residual.

    Returns y; with prenorm (y, s), s in the dtype of the residual, without one in that of x, or in float32 with
    residual_in_fp32. Raises ValueError or TypeError naming the argument, what was expected and what came.
    """
    if bias is not None:
        raise ValueError("bias: expected None, which an RMS norm has, got a bias")
    is_prenorm, in_fp32 = flag("prenorm", prenorm), flag("residual_in_fp32", residual_in_fp32)
    if residual is None:
        s, kept = x, torch.float32 if in_fp32 else None
    else:
        _check(2, x=x, residual=residual)
        _check_shape("residual", residual, x)
        wide = torch.promote_types(x.dtype, torch.float32)
        s, kept = x.to(wide) + residual.to(wide), residual.dtype
    y = gated_norm(s, g, weight, activation, eps)
    y = y if y.dtype == x.dtype else y.to(x.dtype)
    return (y, s.to(kept or x.dtype)) if is_prenorm else y


def gated_norm(x: Tensor, g: Optional[Tensor], weight: Optional[Tensor], activation: str, eps: float) -> Tensor:
    """rms_norm_gated without a residual."""
    way = _check(1, x=x, g=g, weight=weight)
    if x.dim() == 0:
        raise ValueError("x: expected at least 1 dimension, got 0")
    if g is not None:
        _check_shape("g", g, x)
    if way is None and _dtensor.among((x, g, weight)):
        return _norm_on_ranks((x, g, weight), activation, eps)
    folded = x.dim() > 4  # the library reads up to four dimensions
    operands = [t if t is None or not folded else t.flatten(0, -4) for t in (x, g)]
    y = run_norm(way, (*operands, weight, number("eps", eps), named("activation", activation, GATES)))
    return y.view(x.shape) if folded else y


def _norm_on_ranks(tensors: tuple, activation: str, eps: float) -> Tensor:
    """gated_norm of DTensors."""
    def run(x, g, weight):
        return gated_norm(x, g, weight, activation, eps),

    y, = _dtensor.on_ranks(run, ("x", "g", "weight"), tensors, _dtensor.row_cuts(tensors[0].dim()), (True,))
    return y
