"""What layers put around the operators: short convolution and gated RMS normalisation (docs/math.md, 10 and 11)."""

from __future__ import annotations

import dataclasses
from math import prod
from typing import Any, Dict, Optional, Tuple, Union

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from headrace._arguments import ACTIVATIONS, GATES, count_sequences, flag, named, number
from headrace.jax._calls import Kind, attributes_of, custom_call, differentiable, gradients, vary_alike
from headrace.jax._functions import _array, _floating, _in_type
from headrace.jax._partition import Labels

Maybe = Optional[ArrayLike]


# ---- short convolution ----

def _convolution_labels(tensors: dict) -> dict[str, Labels]:
    rows = None if "cu_seqlens" in tensors else "rows"
    labels: dict = dict.fromkeys(("x", "y", "d_y"), ("rows", None, "channels"))
    labels |= dict.fromkeys(("initial_state", "final_state", "d_final_state"), (rows, "channels", None))
    return labels | {"weight": ("channels", None), "bias": ("channels",), "cu_seqlens": (None,)}


_CONVOLUTION = Kind(
    ("x", "weight", "bias", "initial_state", "cu_seqlens", "d_y", "d_final_state"),
    ("x", "weight", "bias", "initial_state"), _convolution_labels, ("weight", "bias"),
    {"x": 2, "y": 2, "d_y": 2, "weight": 0, "bias": 0, "initial_state": 1, "final_state": 1, "d_final_state": 1})


@dataclasses.dataclass(frozen=True)
class _ConvolutionSettings:
    activation: str
    final_state: bool

    def attributes(self) -> dict:
        return attributes_of(self, without=("final_state",))


def _convolve(settings, tensors, wide):
    x, weight = tensors["x"], tensors["weight"]
    results = [("y", x.shape, x.dtype)]
    if settings.final_state:
        N = count_sequences(x.shape[0], tensors.get("cu_seqlens"))
        results.append(("final_state", (N, *weight.shape), tensors.get("initial_state", x).dtype))
    return custom_call(_CONVOLUTION, "convolution_forward", settings.attributes(), tensors, results,
                       ("y", "final_state"))


def _convolve_backward(settings, wanted, tensors, wide):
    return gradients(_CONVOLUTION, "convolution_backward", settings.attributes(), wanted, tensors, wide)


_convolution = differentiable(_CONVOLUTION, ("convolution_forward", "convolution_backward"), _convolve,
                              _convolve_backward)


def _check_shape(name: str, x: Array, shape: tuple) -> None:
    if x.shape != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(x.shape)}")


def check_convolution(tensors: Dict[str, Array], cu_seqlens: Optional[Array]) -> None:
    """Raises a ValueError that names the first of the tensors, or of the offsets, whose shape is wrong."""
    x, weight = tensors["x"], tensors["weight"]
    if x.ndim != 3:
        raise ValueError(f"x: expected 3 dimensions [B, T, D], got shape {list(x.shape)}")
    if weight.ndim != 2 or not 1 <= weight.shape[1] <= 64:
        raise ValueError(f"weight: expected 2 dimensions [D, W], W from 1 to 64, got shape {list(weight.shape)}")
    B, _, D = x.shape
    _check_shape("weight", weight, (D, weight.shape[1]))
    if cu_seqlens is not None and B != 1:
        raise ValueError(f"x: expected batch 1 with cu_seqlens, got {B}")
    for name, shape in (("bias", (D,)), ("initial_state", (count_sequences(B, cu_seqlens), *weight.shape))):
        if name in tensors:
            _check_shape(name, tensors[name], shape)


def convolution_tensors(x: ArrayLike, weight: ArrayLike, bias: Maybe, initial_state: Maybe) -> dict:
    """The floating tensors of a convolution that are given, by name."""
    given: Any = {"x": x, "weight": weight, "bias": bias, "initial_state": initial_state}
    return {name: _floating(name, value) for name, value in given.items() if value is not None}


def short_convolution(
    x: ArrayLike, weight: ArrayLike, bias: Maybe = None, initial_state: Maybe = None, output_final_state: bool = False,
    activation: Optional[str] = None, cu_seqlens: Maybe = None,
) -> Tuple[Array, Optional[Array]]:
    """Causal depth-wise convolution along the tokens: y_t = activation(bias + sum_i weight[:, i] x_{t - (W-1) + i}).

    x [B, T, D]; weight [D, W], W from 1 to 64, the newest token's weight last; bias [D]; activation None, "silu" or its
    other name "swish". initial_state [N, D, W] holds the last W inputs before x, oldest first; N is B, or
    len(cu_seqlens) - 1 with B = 1. Every array may have its own floating dtype; sums are float32 (float64 for float64
    x).

    Returns (y [B, T, D] in the dtype of x, final state [N, D, W] or None). The state has the dtype of initial_state, or
    of x without one. Gradients by x, weight, bias and initial_state, through both, of first order and in reverse mode.
    Raises ValueError or TypeError naming the argument while tracing; wrong offsets raise jax.errors.JaxRuntimeError.
    """
    tensors = convolution_tensors(x, weight, bias, initial_state)
    if cu_seqlens is not None:
        tensors["cu_seqlens"] = _array("cu_seqlens", cu_seqlens)
    check_convolution(tensors, tensors.get("cu_seqlens"))
    settings = _ConvolutionSettings(named("activation", activation, ACTIVATIONS),
                                    flag("output_final_state", output_final_state))
    outputs = _convolution(settings, vary_alike(tensors))
    return outputs["y"], outputs.get("final_state")


# ---- gated RMS normalisation ----

def _norm_labels(tensors: dict) -> dict[str, Labels]:
    rows: Labels = (*(f"rows{i}" for i in range(tensors["x"].ndim - 1)), None)
    return dict.fromkeys(("x", "gate", "y", "d_y"), rows) | {"weight": (None,)}


_NORM = Kind(("x", "gate", "weight", "d_y"), ("x", "gate", "weight"), _norm_labels, ("weight",), {})


@dataclasses.dataclass(frozen=True)
class _NormSettings:
    eps: float
    activation: str


def _normalise(settings, tensors, wide):
    x = tensors["x"]
    return custom_call(_NORM, "norm_forward", attributes_of(settings), tensors, [("y", x.shape, x.dtype)], ("y",))


def _normalise_backward(settings, wanted, tensors, wide):
    return gradients(_NORM, "norm_backward", attributes_of(settings), wanted, tensors, wide)


_norm = differentiable(_NORM, ("norm_forward", "norm_backward"), _normalise, _normalise_backward)


def _gated_norm(x: Array, g: Optional[Array], weight: Optional[Array], settings: _NormSettings) -> Array:
    """rms_norm_gated without a residual."""
    shape = x.shape
    # The library reads up to four dimensions, and vmap wants rows.
    rows = (prod(shape[:-3]), *shape[-3:]) if len(shape) > 4 else shape if len(shape) > 1 else (1, *shape)
    tensors = {"x": x.reshape(rows)}
    if g is not None:
        tensors["gate"] = g.reshape(rows)
    if weight is not None:
        tensors["weight"] = weight
    return _norm(settings, vary_alike(tensors))["y"].reshape(shape)


def rms_norm_gated(
    x: ArrayLike, g: Maybe = None, weight: Maybe = None, bias: None = None, activation: str = "swish",
    residual: Maybe = None, prenorm: bool = False, residual_in_fp32: bool = False, eps: float = 1e-6,
) -> Union[Array, Tuple[Array, Array]]:
    """y = s / sqrt(mean(s^2) + eps) * weight * activation(g) over the last dimension of s = x + residual.

    x, g, residual and y [..., D]; weight [D]; activation "swish", its other name "silu", or "sigmoid". What is not
    given is left out of the formula; there is no bias. Every array may have its own floating dtype, y that of x; sums
    are float32 (float64 for float64 x). Gradients by x, g, weight and residual, of first order and in reverse mode.

    Returns y; with prenorm (y, s), s in the dtype of the residual, without one in that of x, or in float32 with
    residual_in_fp32. Raises ValueError or TypeError naming the argument while tracing.
    """
    if bias is not None:
        raise ValueError("bias: expected None, which an RMS norm has, got a bias")
    is_prenorm, in_fp32 = flag("prenorm", prenorm), flag("residual_in_fp32", residual_in_fp32)
    given: Any = {"x": x, "g": g, "weight": weight, "residual": residual}
    arrays = {name: _floating(name, value) for name, value in given.items() if value is not None}
    x = s = arrays["x"]
    if x.ndim == 0:
        raise ValueError("x: expected at least 1 dimension, got 0")
    for name, shape in (("g", x.shape), ("residual", x.shape), ("weight", x.shape[-1:])):
        if name in arrays:
            _check_shape(name, arrays[name], shape)
    kept = jnp.float32 if in_fp32 else x.dtype
    if "residual" in arrays:
        wide, kept = jnp.promote_types(x.dtype, jnp.float32), arrays["residual"].dtype
        s = x.astype(wide) + arrays["residual"].astype(wide)
    settings = _NormSettings(float(number("eps", eps)), named("activation", activation, GATES))
    y = _in_type(_gated_norm(s, arrays.get("g"), arrays.get("weight"), settings), x.dtype)
    return (y, s.astype(kept)) if is_prenorm else y
