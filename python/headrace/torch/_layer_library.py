"""The custom operators behind the layer functions: kernels, shapes without data, autograd and vmap, as in _library."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, List, Optional, Tuple

import torch
from torch import Tensor

from headrace import _core
from headrace._arguments import count_sequences
from headrace.torch import _vmap
from headrace.torch._library import (Function, empty_like, like, mark_written, once, placed, register, route,
                                     without_gradients)

Maybe = Optional[Tensor]


# ---- short convolution ----


def _convolution_state(x, weight, initial_state, cu_seqlens, final_state):
    N = count_sequences(x.shape[0], cu_seqlens)
    if not final_state:
        return None
    dtype = x.dtype if initial_state is None else initial_state.dtype
    return x.new_empty((N, x.shape[-1], weight.shape[-1]), dtype=dtype)


def _convolution_outputs(x, weight, bias, initial_state, cu_seqlens, final_state, activation):
    state = _convolution_state(x, weight, initial_state, cu_seqlens, final_state)
    return empty_like(x), x.new_empty((0,)) if state is None else state


def _convolve(x: Tensor, weight: Tensor, bias: Maybe, initial_state: Maybe, cu_seqlens: Maybe, final_state: bool,
              activation: str) -> Tuple[Tensor, Maybe]:
    y, state = empty_like(x), _convolution_state(x, weight, initial_state, cu_seqlens, final_state)
    _core.short_convolution_forward([x, weight, bias, initial_state, cu_seqlens], [y, state], activation)
    return y, state


def short_convolution(x: Tensor, weight: Tensor, bias: Maybe, initial_state: Maybe, cu_seqlens: Maybe,
                      final_state: bool, activation: str) -> Tuple[Tensor, Tensor]:
    y, state = _convolve(x, weight, bias, initial_state, cu_seqlens, final_state, activation)
    return y, x.new_empty((0,)) if state is None else state


def short_convolution_backward(x: Tensor, weight: Tensor, bias: Maybe, initial_state: Maybe, cu_seqlens: Maybe,
                               d_y: Maybe, d_final_state: Maybe, wanted: List[int], activation: str) -> List[Tensor]:
    """Gradients of those of x, weight, bias and initial_state whose places are `wanted`."""
    inputs = [x, weight, bias, initial_state, cu_seqlens]
    gradients = like(inputs, wanted)
    _core.short_convolution_backward(inputs, [d_y, d_final_state], placed(gradients, wanted, 4), activation)
    return gradients


def _convolution_gradients(x, weight, bias, initial_state, cu_seqlens, d_y, d_final_state, wanted, activation):
    return like([x, weight, bias, initial_state], wanted)


class _Convolution(Function):
    @staticmethod
    def forward(ctx, run, *arguments):
        *tensors, ctx.final_state, ctx.activation = arguments
        y, state = run(*arguments)
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        if not ctx.final_state and state is not None:
            ctx.mark_non_differentiable(state)
        return y, state

    @staticmethod
    def backward(ctx, d_y, d_final_state):
        wanted = [i for i in range(4) if ctx.needs_input_grad[1 + i]]
        if not ctx.final_state:
            d_final_state = None
        if not wanted or (d_y is None and d_final_state is None):
            return (None,) * 8
        tensors = (*ctx.saved_tensors, d_y, d_final_state)
        straight = route(tensors, 2) is False
        run: Callable = short_convolution_backward if straight else torch.ops.headrace.short_convolution_backward
        return (None, *placed(run(*tensors, wanted, ctx.activation), wanted, 7))


_next_convolution = partial(Function.run, "short_convolution")


def _convolution_with_autograd(*arguments):
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arguments[:4]):
        return _Convolution.record(_next_convolution, *arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.headrace.short_convolution(*arguments)


def run_convolution(way: Optional[bool], arguments: tuple) -> Tuple[Tensor, Maybe]:
    """The results of headrace::short_convolution, the `way` that route() found for its tensors."""
    if way is None:
        return torch.ops.headrace.short_convolution(*arguments)
    return _Convolution.apply(_convolve, *arguments) if way else _convolve(*arguments)


def short_convolution_step(x: Tensor, state: Tensor, weight: Tensor, bias: Maybe, indices: Maybe,
                           activation: str) -> Tensor:
    y = empty_like(x)
    _core.short_convolution_step([x, weight, bias, None, None], [y], [state, indices], activation)
    return y


def _step_outputs(x, state, weight, bias, indices, activation):
    return empty_like(x)


def run_convolution_step(way: Optional[bool], x: Tensor, state: Tensor, *rest: Any) -> Tensor:
    """headrace::short_convolution_step, the `way` that route() found for its tensors."""
    if way is not False:
        return torch.ops.headrace.short_convolution_step(x, state, *rest)
    y = short_convolution_step(x, state, *rest)
    mark_written((state,))
    return y


_step_without_gradients = without_gradients(
    "short_convolution_step", ValueError,
    "state: expected no gradients in a step, which changes it in place (use torch.no_grad), got tensors that require "
    "them", written=(1,))


# ---- gated RMS normalisation ----


def rms_norm_gated(x: Tensor, gate: Maybe, weight: Maybe, eps: float, activation: str) -> Tensor:
    y = empty_like(x)
    _core.rms_norm_gated_forward([x, gate, weight], [y], eps, activation)
    return y


def _norm_outputs(x, gate, weight, eps, activation):
    return empty_like(x)


def rms_norm_gated_backward(x: Tensor, gate: Maybe, weight: Maybe, d_y: Tensor, wanted: List[int], eps: float,
                            activation: str) -> List[Tensor]:
    """Gradients of those of x, gate and weight whose places are `wanted`."""
    inputs = [x, gate, weight]
    gradients = like(inputs, wanted)
    _core.rms_norm_gated_backward(inputs, [d_y], placed(gradients, wanted, 3), eps, activation)
    return gradients


def _norm_gradients(x, gate, weight, d_y, wanted, eps, activation):
    return like([x, gate, weight], wanted)


class _Norm(Function):
    @staticmethod
    def forward(ctx, run, *arguments):
        *tensors, ctx.eps, ctx.activation = arguments
        y = run(*arguments)
        ctx.save_for_backward(*tensors)
        return y

    @staticmethod
    def backward(ctx, d_y):
        wanted = [i for i in range(3) if ctx.needs_input_grad[1 + i]]
        tensors = (*ctx.saved_tensors, d_y)
        straight = route(tensors, 1) is False
        run: Callable = rms_norm_gated_backward if straight else torch.ops.headrace.rms_norm_gated_backward
        return (None, *placed(run(*tensors, wanted, ctx.eps, ctx.activation), wanted, 5))


_next_norm = partial(Function.run, "rms_norm_gated")


def _norm_with_autograd(*arguments):
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arguments[:3]):
        return _Norm.record(_next_norm, *arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.headrace.rms_norm_gated(*arguments)


def run_norm(way: Optional[bool], arguments: tuple) -> Tensor:
    """The result of headrace::rms_norm_gated, the `way` that route() found for its tensors."""
    if way is None:
        return torch.ops.headrace.rms_norm_gated(*arguments)
    return _Norm.apply(rms_norm_gated, *arguments) if way else rms_norm_gated(*arguments)


# ---- registration ----

# Where channels stand in the arguments of the convolution; cu_seqlens has none.
_CHANNELS = (2, 0, 0, 1, None)
# Where rows stand in those of the norm; the weight has none, nor has its gradient.
_ROWS = (-2, -2, None)


def _channels_of_outputs(*arguments):
    return 2, 1 if arguments[5] else 0


def _channels_of_gradients(*arguments):
    return [_CHANNELS[i] for i in arguments[7]]


def _rows_of_output(*arguments):
    return -2


def _rows_of_gradients(*arguments):
    wanted = arguments[4]
    return None if 2 in wanted else [_ROWS[i] for i in wanted]


register("short_convolution", short_convolution, _convolution_outputs, _convolution_with_autograd,
         _vmap.folded("short_convolution", _convolution_outputs, _CHANNELS, _channels_of_outputs))
register("short_convolution_backward", short_convolution_backward, _convolution_gradients,
         once("short_convolution_backward"),
         _vmap.folded("short_convolution_backward", _convolution_gradients, (*_CHANNELS, 2, 1),
                      _channels_of_gradients))
register("short_convolution_step", short_convolution_step, _step_outputs, _step_without_gradients,
         _vmap.refused("state: expected no vmap over a step, which changes it in place and whose rows are a batch "
                       "already"),
         mutates=("state",))
register("rms_norm_gated", rms_norm_gated, _norm_outputs, _norm_with_autograd,
         _vmap.folded("rms_norm_gated", _norm_outputs, _ROWS, _rows_of_output))
register("rms_norm_gated_backward", rms_norm_gated_backward, _norm_gradients, once("rms_norm_gated_backward"),
         _vmap.folded("rms_norm_gated_backward", _norm_gradients, (*_ROWS, -2), _rows_of_gradients))
