"""Custom calls of XLA on arrays by name: how they are made, mapped by vmap and differentiated."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero
from jax.sharding import NamedSharding, PartitionSpec

from headrace import _core
from headrace.jax._partition import partitioned

for _device, _platform in (("cpu", "cpu"), ("cuda", "CUDA")):
    for _name, _handler in _core.xla_handlers(_device).items():
        jax.ffi.register_ffi_target(f"headrace_{_name}", _handler, platform=_platform, api_version=1)


@dataclasses.dataclass(frozen=True)
class Kind:
    """What the calls of operators, or of one layer function, have in common."""

    arguments: Sequence[str]  # the tensors of a custom call in their order; bit i of its attribute `given` is number i
    differentiable: Sequence[str]  # of these, the inputs that have gradients: results of the backward, in this order
    labels: Callable  # tensors by name -> what their dimensions count, and the results' (_partition.Label)
    rowless: Sequence[str]  # the arrays that have no rows in front, which those of a batch share
    folds: Mapping[str, int]  # of each array an axis along which nothing knows of its neighbours; or empty


_PLACES = ("cu_seqlens", "span")  # what counts tokens, and is the same for all rows and heads


def attributes_of(settings: Any, without: Sequence[str] = ()) -> dict:
    """The fields of a dataclass as attributes of custom calls."""
    kinds: dict = {str: str, float: np.float64, bool: np.int64, int: np.int64}
    values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    return {name: kinds[type(value)](value) for name, value in values.items() if name not in without}


def _bits(names: Iterable[str], places: Sequence[str]) -> np.int64:
    return np.int64(sum(1 << places.index(name) for name in names))


def _names(bits: int, places: Sequence[str]) -> list:
    return [name for i, name in enumerate(places) if bits >> i & 1]


def vary_alike(tensors: dict) -> dict:
    """Under shard_map: every tensor varies over the mesh axes that any varies over; a gradient then sums over them."""
    varying = {name: jax.typeof(x).mat.varying for name, x in tensors.items()}
    axes = frozenset().union(*varying.values())
    return {name: jax.lax.pcast(x, tuple(axes - varying[name]), to="varying") for name, x in tensors.items()}


def _result(shape: tuple, dtype: Any, like: Any) -> jax.ShapeDtypeStruct:
    """The type of a result that varies over the mesh axes over which `like`, the type of a tensor of the call, does."""
    if not like.mat.varying:
        return jax.ShapeDtypeStruct(shape, dtype)
    sharding = NamedSharding(like.sharding.mesh, PartitionSpec(*[None] * len(shape)))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, manual_axis_type=like.mat)


def custom_call(kind, target, attributes, tensors, results, places, in_place=()):
    """Runs the custom call; `tensors`: the given ones by name; `results`: (name, shape, dtype) by `places`.

    in_place: names of results that are left in the memory of the arguments of these names, of which XLA makes copies
    where they are needed later.
    """
    given = [name for name in kind.arguments if name in tensors]
    aliases = {given.index(name): places.index(name) for name in in_place}
    like = jax.typeof(tensors[given[0]])
    structs = [_result(shape, dtype, like) for _, shape, dtype in results]
    call = jax.ffi.ffi_call(f"headrace_{target}", structs, input_output_aliases=aliases)
    values = call(*(tensors[name] for name in given), given=_bits(given, kind.arguments),
                  wanted=_bits([name for name, _, _ in results], places), **attributes)
    return {name: value for (name, _, _), value in zip(results, values)}


def accumulated(dtype):
    """The type in which partial sums of gradients of this type are added."""
    return dtype if dtype.itemsize == 8 else np.dtype(np.float32)


def gradients(kind, target, attributes, wanted, tensors, wide):
    """The gradients by the inputs `wanted`, by the names of the inputs, where those in `wide` are to be added up."""
    types = {name: accumulated(tensors[name].dtype) if name in wide else tensors[name].dtype for name in wanted}
    results = [(name, tensors[name].shape, types[name]) for name in wanted]
    return custom_call(kind, target, attributes, tensors, results, kind.differentiable)


def _fold(x, axis, is_mapped, size):
    """x [size, ...], or [...] for every index where it is not mapped -> [..., size * the axis, ...]."""
    x = jnp.moveaxis(x, 0, axis) if is_mapped else jnp.repeat(jnp.expand_dims(x, axis), size, axis)
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])


def _unfold(x, axis, size):
    x = x.reshape(*x.shape[:axis], size, x.shape[axis] // size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def mappable(kind, name, function, sums=()):
    """function(tensors, wide), which makes the custom call `name`, as XLA may divide it and vmap may map it.

    vmap makes one call of it with more rows; with more heads or channels, beside offsets, which take one row, and where
    what has no rows is mapped; or a loop, where offsets or spans differ, and where there are no elements: results then
    have their shapes though nothing runs. sums: the results that are sums over rows.
    """
    mapped_function = custom_vmap(partitioned(name, function, kind.labels))

    @mapped_function.def_vmap
    def rule(size, mapped, tensors):
        mapped = mapped[0]
        in_rows = "cu_seqlens" not in tensors and not any(mapped.get(n) or n in sums for n in kind.rowless)
        if any(mapped.get(n) for n in _PLACES) or size == 0 or not (in_rows or kind.folds):
            rows = {n: x for n, x in tensors.items() if mapped[n]}
            values = jax.lax.map(lambda row: mapped_function({**tensors, **row}), rows)
        else:
            alike = (*kind.rowless, *_PLACES) if in_rows else _PLACES
            axis = (lambda n: 0) if in_rows else kind.folds.get
            folded = {n: x if n in alike else _fold(x, axis(n), mapped[n], size) for n, x in tensors.items()}
            values = {n: _unfold(x, axis(n), size) for n, x in mapped_function(folded).items()}
        return values, {n: True for n in values}

    return mapped_function


def with_gradients(names, forward, backward):
    """operator(settings, tensors) -> outputs by name, differentiable by the tensors that are `names`.

    forward(settings, tensors) -> (outputs, what the backward needs besides the tensors);
    backward(settings, wanted, tensors, kept, d_outputs) -> the gradients by the `wanted` tensors, by their names, from
    those by outputs that matter, d_NAME.
    """
    @partial(jax.custom_vjp, nondiff_argnums=(0,))
    def both(settings, tensors):
        return forward(settings, tensors)

    def both_forward(settings, tensors):
        values = {name: x.value for name, x in tensors.items()}
        perturbed = [name for name in names if name in tensors and tensors[name].perturbed]
        outputs, kept = both(settings, values)
        # Which gradients are wanted travels to the backward as the shape of an array without elements. JAX keeps the
        # shapes of residuals with each trace of this function, but of their tree (None, static nodes, which are inputs)
        # only that of the last trace: a tree that depends on `perturbed` would give one gradient's names to another.
        return (outputs, kept), (values, kept, np.empty((0, _bits(perturbed, names)), bool))

    def both_backward(settings, residuals, d_both):
        tensors, kept, wanted = residuals
        wanted = _names(wanted.shape[1], names)
        d_outputs = {f"d_{name}": x for name, x in d_both[0].items()
                     if not isinstance(x, SymbolicZero) and x.dtype != jax.dtypes.float0}
        found = backward(settings, wanted, tensors, kept, d_outputs) if wanted and d_outputs else {}
        return ({name: found.get(name) for name in tensors},)

    both.defvjp(both_forward, both_backward, symbolic_zeros=True)

    @partial(jax.jit, static_argnums=0)
    def operator(settings, tensors):
        return both(settings, tensors)[0]

    return operator


def differentiable(kind, names, forward, backward):
    """operator(settings, tensors) -> results by name, whose gradients are calls of their own.

    forward(settings, tensors, wide), backward(settings, wanted, tensors, wide), where the tensors hold the results'
    gradients, d_NAME; names: of their custom calls.
    """
    def call(settings, tensors):
        return mappable(kind, names[0], partial(forward, settings))(tensors), ()

    def call_backward(settings, wanted, tensors, kept, d_outputs):
        return mappable(kind, names[1], partial(backward, settings, wanted), wanted)({**tensors, **d_outputs})

    return with_gradients(kind.differentiable, call, call_backward)
