"""The custom operators headrace::forward and headrace::backward: kernels, shapes without data, autograd and vmap.

Registered at the dispatcher's keys by hand: the autograd that torch.library generates takes longer per call (about 90
microseconds for an operator of 22 arguments) than a short sequence takes to compute. The transforms of torch.func
arrive at the same keys, one level after the other. A call that no key but the device's and autograd's has a part in
does without the dispatcher, which takes 15 microseconds and more for so many arguments.

A kernel is the same function on the CPU and on a CUDA device: the library asks every tensor where it lies. Nothing here
may read a tensor's values, for which the host would wait.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Iterable, List, Optional, Sequence, Tuple, cast

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from headrace import _core
from headrace._arguments import DIFFERENTIABLE, count_sequences, options
from headrace.torch import _vmap

Maybe = Optional[Tensor]


_CONTIGUOUS = torch.contiguous_format


def empty_like(x: Tensor) -> Tensor:
    """A contiguous tensor of this shape, type and device, in a third of the time of torch.empty."""
    return torch.empty_like(x) if x.is_contiguous() else torch.empty_like(x, memory_format=_CONTIGUOUS)


def like(tensors: List[Maybe], wanted: List[int]) -> List[Tensor]:
    """Tensors for the gradients of those at the places `wanted`."""
    return [empty_like(x) for x in (tensors[i] for i in wanted) if x is not None]


def placed(gradients: List[Tensor], wanted: List[int], count: int) -> List[Maybe]:
    """The gradients at the places of their inputs, None elsewhere."""
    places = dict(zip(wanted, gradients))
    return [places.get(i) for i in range(count)]


def _state_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def k_first(state: Maybe, state_v_first: bool) -> Maybe:
    """The view [N,HV,K,V] of a state, which is how the library counts its dimensions."""
    return state.transpose(-1, -2) if state is not None and state_v_first and state.dim() == 4 else state


def _empty_state(q: Tensor, v: Tensor, cu_seqlens: Maybe, final_state: bool, state_v_first: bool) -> Maybe:
    (B, _, _, K), (_, _, HV, V) = q.shape, v.shape
    N = count_sequences(B, cu_seqlens)
    if not final_state:
        return None
    return q.new_empty((N, HV, V, K) if state_v_first else (N, HV, K, V), dtype=_state_dtype(q))


def _tensor(state: Maybe, q: Tensor) -> Tensor:
    """`state`, or what stands for it where none is wanted: an operator's results are tensors."""
    return q.new_empty((0,), dtype=_state_dtype(q)) if state is None else state


def check_tensors(names: Sequence[str], tensors: Sequence[Any], required: int) -> None:
    """Every argument is a dense tensor on the device of the first, or None behind the `required` ones.

    The dispatcher chooses the kernel by all tensors: one on `meta` is enough for outputs that nothing has written.
    cu_seqlens may lie on the CPU beside tensors on a CUDA device.
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
        elif x.device != device and not (name == "cu_seqlens" and device.type == "cuda" and x.device.type == "cpu"):
            raise ValueError(f"{name}: expected device {device} as {names[0]}, got {x.device}")


_Key = torch._C.DispatchKey
_in_inference = torch._C.DispatchKeySet(_Key.BackendSelect)
# What the dispatcher adds to the keys of a call's tensors while no mode, tracer or transform is on.
_USUAL = frozenset((_in_inference.raw_repr(), _in_inference.add(_Key.ADInplaceOrView).raw_repr()))
_added, _left_out = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set
_core.set_parameter_type(torch.nn.Parameter)
if hasattr(torch._C, "_cuda_getCurrentRawStream"):  # a PyTorch with CUDA
    _core.set_current_stream(torch._C._cuda_getCurrentRawStream)


def is_watched() -> bool:
    """Whether something traces, counts or transforms operators."""
    return (torch.compiler.is_compiling() or torch._C._len_torch_function_stack() > 0
            or torch.autograd._profiler_enabled() or forward_ad._current_level >= 0
            or _added().raw_repr() not in _USUAL)


def route(tensors: tuple, required: int, watched: Optional[bool] = None) -> Optional[bool]:
    """The way of a call to its kernel: None is by the dispatcher. Else straight, and whether autograd records it.

    Straight where the dispatcher would find no kernel but autograd's and the device's: while nothing watches, and of
    tensors of PyTorch's own class, all on one device, that are what their memory says. watched: is_watched(), where
    that is known.
    """
    if is_watched() if watched is None else watched:
        return None
    way = _core.plain(tensors, required, torch.is_grad_enabled())
    if not way:
        return way
    return None if _left_out().has(_Key.AutogradOther) else True  # left out with all of autograd's keys: not recorded


def check_rank(name: str, x: Tensor) -> None:
    if x.dim() != 4:
        raise ValueError(f"{name}: expected 4 dimensions [B, T, H, {'V' if name == 'v' else 'K'}], got shape "
                         f"{list(x.shape)}")


def check_alike(q: Tensor, k: Tensor, v: Tensor) -> None:
    """What must hold before an output can be allocated; the library checks the rest and names the argument."""
    if q.dim() == k.dim() == v.dim() == 4 and q.dtype == k.dtype == v.dtype and q.dtype.is_floating_point:
        return
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_rank(name, x)
        if not x.dtype.is_floating_point:
            raise TypeError(f"{name}: expected a floating dtype, got {x.dtype}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: expected dtype {q.dtype} as in q, got {x.dtype}")


def compute(
    op: str, q: Tensor, k: Tensor, v: Tensor, p: Maybe, g: Maybe, gv: Maybe, g_gamma: Maybe, beta: Maybe, A_log: Maybe,
    dt_bias: Maybe, initial_state: Maybe, cu_seqlens: Maybe, final_state: bool, scale: Optional[float], reverse: bool,
    qk_l2norm: bool, gate_form: str, lower_bound: float, beta_form: str, chunk: int, state_v_first: bool,
) -> Tuple[Tensor, Maybe]:
    """(o, the final state or None) of plain tensors."""
    o = empty_like(v)
    state = before = after = None
    if final_state or cu_seqlens is not None:
        state = after = _empty_state(q, v, cu_seqlens, final_state, state_v_first)
    if initial_state is not None or state is not None:
        before, after = k_first(initial_state, state_v_first), k_first(state, state_v_first)
    _core.run("forward", op, [q, k, v, p, g, gv, g_gamma, beta, A_log, dt_bias, before, cu_seqlens], [o, after], [],
              options(scale, reverse, qk_l2norm, gate_form, lower_bound, beta_form, chunk))
    return o, state


def forward(
    op: str, q: Tensor, k: Tensor, v: Tensor, p: Maybe, g: Maybe, gv: Maybe, g_gamma: Maybe, beta: Maybe, A_log: Maybe,
    dt_bias: Maybe, initial_state: Maybe, cu_seqlens: Maybe, final_state: bool, scale: Optional[float], reverse: bool,
    qk_l2norm: bool, gate_form: str, lower_bound: float, beta_form: str, chunk: int, state_v_first: bool,
) -> Tuple[Tensor, Tensor]:
    o, state = compute(op, q, k, v, p, g, gv, g_gamma, beta, A_log, dt_bias, initial_state, cu_seqlens, final_state,
                       scale, reverse, qk_l2norm, gate_form, lower_bound, beta_form, chunk, state_v_first)
    return o, _tensor(state, q)


def _forward_shapes(op, q, k, v, p, g, gv, g_gamma, beta, A_log, dt_bias, initial_state, cu_seqlens, final_state, scale,
                    reverse, qk_l2norm, gate_form, lower_bound, beta_form, chunk, state_v_first):
    o = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    return o, _tensor(_empty_state(q, v, cu_seqlens, final_state, state_v_first), q)


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


_next_forward = partial(Function.run, "forward")


def run(way: Optional[bool], arguments: tuple) -> Tuple[Tensor, Maybe]:
    """The results of headrace::forward, the `way` that route() found for its tensors."""
    if way is None:
        return torch.ops.headrace.forward(*arguments)
    return _Forward.apply(compute, *arguments) if way else compute(*arguments)


class _Forward(Function):
    """Its first argument computes the results: `compute`, or the next step of the dispatcher."""

    @staticmethod
    def forward(ctx, run, op, *arguments):
        tensors, final_state, rest = arguments[:_TENSORS], arguments[_TENSORS], arguments[_TENSORS + 1 :]
        o, state = run(op, *arguments)
        ctx.op, ctx.final_state, ctx.rest = op, final_state, rest
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        if not final_state and state is not None:
            ctx.mark_non_differentiable(state)
        return o, state

    @staticmethod
    def backward(ctx, d_o, d_final_state):
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[2 : _TENSORS + 1]) if needed]
        arguments = _TENSORS + 1 + len(ctx.rest)
        if not ctx.final_state:
            d_final_state = None
        if not wanted or (d_o is None and d_final_state is None):
            return (None,) * (2 + arguments)
        tensors = (*ctx.saved_tensors, d_o, d_final_state)
        run: Callable = backward if route(tensors, 3) is False else torch.ops.headrace.backward
        return (None, None, *placed(run(ctx.op, *tensors, wanted, *ctx.rest), wanted, arguments))


def _forward_with_autograd(op, *arguments):
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arguments[:_TENSORS]):
        return _Forward.record(_next_forward, op, *arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.headrace.forward(op, *arguments)


_library = torch.library.Library("headrace", "DEF")


def refuse_tangents(name: str, arguments: Sequence[Any]) -> None:
    """No argument is a dual number, whose tangent an operator without forward mode would drop."""
    if any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in arguments):
        raise NotImplementedError(f"headrace::{name}: forward-mode derivatives are not computed; expected reverse mode "
                                  "(torch.func.grad, vjp, jacrev)")


def register(name: str, kernel: Callable, shapes: Callable, autograd: Callable, vmap: Callable,
             mutates: Sequence[str] = ()) -> None:
    """Defines headrace::<name>: its kernel, its outputs without data, its autograd, its vmap."""

    def derivatives(*arguments):
        if forward_ad._current_level >= 0:
            refuse_tangents(name, arguments)
        return autograd(*arguments)

    def batched(*arguments):
        raise NotImplementedError(f"headrace::{name}: vectorize and is_grads_batched of torch.autograd are not served; "
                                  "expected torch.func (jacrev, vmap)")

    schema = torch.library.infer_schema(kernel, mutates_args=mutates)
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in ("CPU", "CUDA"):
        _library.impl(name, kernel, device)
    _library.impl(name, derivatives, "Autograd")
    _library.impl(name, batched, "Batched")  # the key of torch.autograd's own vmap
    torch.library.register_fake(f"headrace::{name}", shapes, lib=_library)
    torch.library.register_vmap(f"headrace::{name}", vmap, lib=_library)


def mark_written(tensors: Iterable[Tensor]) -> None:
    """Tells autograd that these changed in place: saved for another call's backward, they are not what they were."""
    for x in tensors:
        if not x.is_inference():
            torch.autograd.graph.increment_version(x)


run_plain = cast(Callable[..., Optional[Tuple[Tensor, Maybe]]],
                 partial(_core.run_plain, (empty_like, _empty_state, torch._C._increment_version)))


def without_gradients(name: str, error: type, message: str, written: Sequence[int] = ()) -> Callable:
    """The autograd of an operator that has none: `error` with the message where one would be needed.

    The arguments at the places `written` change in place.
    """

    def kernel(*arguments):
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments):
            raise error(message)
        with torch._C._AutoDispatchBelowAutograd():
            result = getattr(torch.ops.headrace, name)(*arguments)
        mark_written(arguments[place] for place in written)
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
