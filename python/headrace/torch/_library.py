"""The custom operators headrace::forward and headrace::backward: kernels, shapes without data, autograd and vmap.

Registered at the dispatcher's keys by hand: the autograd that torch.library generates takes longer per call (about 90
microseconds for an operator of 22 arguments) than a short sequence takes to compute. The transforms of torch.func
arrive at the same keys, one level after the other.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from headrace import _core
from headrace._arguments import DIFFERENTIABLE, count_sequences, options
from headrace.torch import _vmap

Maybe = Optional[Tensor]


def like(tensors: List[Maybe], wanted: List[int]) -> List[Tensor]:
    """Tensors for the gradients of those at the places `wanted`."""
    return [torch.empty_like(x, memory_format=torch.contiguous_format)
            for x in (tensors[i] for i in wanted) if x is not None]


def placed(gradients: List[Tensor], wanted: List[int], count: int) -> List[Maybe]:
    """The gradients at the places of their inputs, None elsewhere."""
    places = dict(zip(wanted, gradients))
    return [places.get(i) for i in range(count)]


def _state_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def k_first(state: Maybe, state_v_first: bool) -> Maybe:
    """The view [N,HV,K,V] of a state, which is how the library counts its dimensions."""
    return state.transpose(-1, -2) if state is not None and state_v_first and state.dim() == 4 else state


def _empty_outputs(q: Tensor, v: Tensor, cu_seqlens: Maybe, final_state: bool,
                   state_v_first: bool) -> Tuple[Tensor, Tensor]:
    N = count_sequences(q.shape[0], cu_seqlens)
    o = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    if not final_state:
        return o, q.new_empty((0,), dtype=_state_dtype(q))
    K, V = q.shape[-1], v.shape[-1]
    sizes = (N, v.shape[2], V, K) if state_v_first else (N, v.shape[2], K, V)
    return o, q.new_empty(sizes, dtype=_state_dtype(q))


def check_tensors(names: Sequence[str], tensors: Sequence[Any], required: int) -> None:
    """Every argument is a dense tensor on the device of the first, or None behind the `required` ones.

    The dispatcher chooses the kernel by all tensors: one on `meta` is enough for outputs that nothing has written.
    """
    device = None
    for place, (name, x) in enumerate(zip(names, tensors)):
        if x is None and place >= required:
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
        if x.layout is not torch.strided or x.is_nested:
            raise TypeError(f"{name}: expected a dense tensor, got one of layout {x.layout}")
        if device is None:
            device = x.device
        elif x.device != device:
            raise ValueError(f"{name}: expected device {device} as {names[0]}, got {x.device}")


def check_rank(name: str, x: Tensor) -> None:
    if x.dim() != 4:
        raise ValueError(f"{name}: expected 4 dimensions [B, T, H, {'V' if name == 'v' else 'K'}], got shape "
                         f"{list(x.shape)}")


def check_alike(q: Tensor, k: Tensor, v: Tensor) -> None:
    """What must hold before an output can be allocated; the library checks the rest and names the argument."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_rank(name, x)
        if not x.dtype.is_floating_point:
            raise TypeError(f"{name}: expected a floating dtype, got {x.dtype}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: expected dtype {q.dtype} as in q, got {x.dtype}")


def forward(
    op: str, q: Tensor, k: Tensor, v: Tensor, p: Maybe, g: Maybe, gv: Maybe, g_gamma: Maybe, beta: Maybe, A_log: Maybe,
    dt_bias: Maybe, initial_state: Maybe, cu_seqlens: Maybe, final_state: bool, scale: Optional[float], reverse: bool,
    qk_l2norm: bool, gate_form: str, lower_bound: float, beta_form: str, chunk: int, state_v_first: bool,
) -> Tuple[Tensor, Tensor]:
    o, state = _empty_outputs(q, v, cu_seqlens, final_state, state_v_first)
    inputs = [q, k, v, p, g, gv, g_gamma, beta, A_log, dt_bias, k_first(initial_state, state_v_first), cu_seqlens]
    outputs = [o, k_first(state, state_v_first) if final_state else None]
    _core.run("forward", op, inputs, outputs, [],
              options(scale, reverse, qk_l2norm, gate_form, lower_bound, beta_form, chunk))
    return o, state


def _forward_shapes(op, q, k, v, p, g, gv, g_gamma, beta, A_log, dt_bias, initial_state, cu_seqlens, final_state, scale,
                    reverse, qk_l2norm, gate_form, lower_bound, beta_form, chunk, state_v_first):
    return _empty_outputs(q, v, cu_seqlens, final_state, state_v_first)


def backward(
    op: str, q: Tensor, k: Tensor, v: Tensor, p: Maybe, g: Maybe, gv: Maybe, g_gamma: Maybe, beta: Maybe, A_log: Maybe,
    dt_bias: Maybe, initial_state: Maybe, cu_seqlens: Maybe, d_o: Maybe, d_final_state: Maybe, wanted: List[int],
    scale: Optional[float], reverse: bool, qk_l2norm: bool, gate_form: str, lower_bound: float, beta_form: str,
    chunk: int, state_v_first: bool,
) -> List[Tensor]:
    """Gradients of the inputs whose places in DIFFERENTIABLE are `wanted`."""
    inputs = [q, k, v, p, g, gv, g_gamma, beta, A_log, dt_bias, initial_state]
    gradients = like(inputs, wanted)
    targets = placed(gradients, wanted, len(inputs))
    inputs[-1] = k_first(initial_state, state_v_first)
    targets[-1] = k_first(targets[-1], state_v_first)
    _core.run("backward", op, inputs + [cu_seqlens], [d_o, k_first(d_final_state, state_v_first)], targets,
              options(scale, reverse, qk_l2norm, gate_form, lower_bound, beta_form, chunk))
    return gradients


def _backward_shapes(op, q, k, v, p, g, gv, g_gamma, beta, A_log, dt_bias, initial_state, cu_seqlens, d_o,
                     d_final_state, wanted, scale, reverse, qk_l2norm, gate_form, lower_bound, beta_form, chunk,
                     state_v_first):
    inputs = [q, k, v, p, g, gv, g_gamma, beta, A_log, dt_bias, initial_state]
    return like(inputs, wanted)


_TENSORS = len(DIFFERENTIABLE) + 1  # places 1 to _TENSORS of the forward's arguments; op stands at 0


class Function(_SingleLevelFunction):
    """An autograd.Function of an autograd kernel: it belongs to one level of torch.func, that of the kernel's tensors.

    Its forward has autograd switched off. That holds for its own level: run() goes on to the next one as it would
    without this one.
    """

    apply: Callable[..., Any]  # of the base in C++

    @classmethod
    def record(cls, *arguments):
        if not torch._C._are_functorch_transforms_active():
            return cls.apply(*arguments)
        with enable_single_level_autograd_function():
            return cls.apply(*arguments)

    @staticmethod
    def run(name, *arguments):
        operator = getattr(torch.ops.headrace, name)
        if not torch._C._are_functorch_transforms_active():
            with torch._C._AutoDispatchBelowAutograd():
                return operator(*arguments)
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)


class _Forward(Function):
    @staticmethod
    def forward(ctx, op, *arguments):
        tensors, final_state, rest = arguments[:_TENSORS], arguments[_TENSORS], arguments[_TENSORS + 1 :]
        o, state = Function.run("forward", op, *arguments)
        ctx.op, ctx.final_state, ctx.rest = op, final_state, rest
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        if not final_state:
            ctx.mark_non_differentiable(state)
        return o, state

    @staticmethod
    def backward(ctx, d_o, d_final_state):
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[1:_TENSORS]) if needed]
        arguments = _TENSORS + 1 + len(ctx.rest)
        if not ctx.final_state:
            d_final_state = None
        if not wanted or (d_o is None and d_final_state is None):
            return (None,) * (1 + arguments)
        # Where nobody can ask for a derivative of the gradients, autograd's kernel would only cost time.
        asked = torch.is_grad_enabled() or forward_ad._current_level >= 0
        with nullcontext() if asked else torch._C._AutoDispatchBelowAutograd():
            gradients = torch.ops.headrace.backward(ctx.op, *ctx.saved_tensors, d_o, d_final_state, wanted, *ctx.rest)
        return (None, *placed(gradients, wanted, arguments))


def _forward_with_autograd(op, *arguments):
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arguments[:_TENSORS]):
        return _Forward.record(op, *arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.headrace.forward(op, *arguments)


_library = torch.library.Library("headrace", "DEF")


def _refuse_tangents(name: str, arguments: Sequence[Any]) -> None:
    """No argument is a dual number, whose tangent an operator without forward mode would drop."""
    if any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in arguments):
        raise NotImplementedError(f"headrace::{name}: forward-mode derivatives are not computed; expected reverse mode "
                                  "(torch.func.grad, vjp, jacrev)")


def register(name: str, kernel: Callable, shapes: Callable, autograd: Callable, vmap: Callable,
             mutates: Sequence[str] = ()) -> None:
    """Defines headrace::<name>: its kernel on CPU tensors, its outputs without data, its autograd, its vmap."""

    def derivatives(*arguments):
        if forward_ad._current_level >= 0:
            _refuse_tangents(name, arguments)
        return autograd(*arguments)

    def batched(*arguments):
        raise NotImplementedError(f"headrace::{name}: vectorize and is_grads_batched of torch.autograd are not served; "
                                  "expected torch.func (jacrev, vmap)")

    schema = torch.library.infer_schema(kernel, mutates_args=mutates)
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, kernel, "CPU")
    _library.impl(name, derivatives, "Autograd")
    _library.impl(name, batched, "Batched")  # the key of torch.autograd's own vmap
    torch.library.register_fake(f"headrace::{name}", shapes, lib=_library)
    torch.library.register_vmap(f"headrace::{name}", vmap, lib=_library)


def without_gradients(name: str, error: type, message: str, written: Sequence[int] = ()) -> Callable:
    """The autograd of an operator that has none: `error` with the message where one would be needed.

    The arguments at the places `written` change in place: saved for another call's backward, they are not what they
    were.
    """

    def kernel(*arguments):
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments):
            raise error(message)
        with torch._C._AutoDispatchBelowAutograd():
            result = getattr(torch.ops.headrace, name)(*arguments)
        for place in written:
            if not arguments[place].is_inference():
                torch.autograd.graph.increment_version(arguments[place])
        return result

    return kernel


def once(name: str) -> Callable:
    """The autograd of an operator that computes gradients: theirs are refused when they are asked for."""

    class Gradients(Function):
        @staticmethod
        def forward(ctx, *arguments):
            return tuple(Function.run(name, *arguments))

        @staticmethod
        def backward(ctx, *d_gradients):
            raise NotImplementedError(f"headrace::{name}: second derivatives are not computed")

    def kernel(*arguments):
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments):
            return list(Gradients.record(*arguments))
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(torch.ops.headrace, name)(*arguments)

    return kernel


# ---- vmap ----

# Where heads stand in the forward's arguments, op at first and cu_seqlens at last.
_HEADS = (None, 2, 2, 2, 2, 2, 2, 0, 2, 0, 0, 1, None)
_WANTED = _TENSORS + 3  # its place among the backward's arguments, behind d_o and d_final_state


def _heads_of_outputs(*arguments):
    return 2, 1 if arguments[_TENSORS + 1] else 0


def _heads_of_gradients(*arguments):
    return [_HEADS[1 + i] for i in arguments[_WANTED]]


register("forward", forward, _forward_shapes, _forward_with_autograd,
         _vmap.folded("forward", _forward_shapes, _HEADS, _heads_of_outputs))
register("backward", backward, _backward_shapes, once("backward"),
         _vmap.folded("backward", _backward_shapes, (*_HEADS, 2, 1), _heads_of_gradients))
