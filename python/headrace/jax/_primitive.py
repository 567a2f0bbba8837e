"""Forward, backward and step as XLA custom calls, their gradients and their batching."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero
from jax.sharding import NamedSharding, PartitionSpec

from headrace import _core
from headrace._arguments import DIFFERENTIABLE, INPUTS, count_sequences
from headrace.jax._partition import Labels, accumulated, partitioned

for _name, _handler in _core.xla_handlers().items():
    jax.ffi.register_ffi_target(f"headrace_{_name}", _handler, platform="cpu", api_version=1)

# The places of tensors in the custom calls; bit i of `given` and `wanted` stands for name i.
_ARGUMENTS = INPUTS + ("d_o", "d_final_state", "states")
_OUTPUTS = ("o", "final_state")
_STEP_OUTPUTS = ("o", "states")
# Where heads stand: what is mapped by vmap is folded in there, since heads do not know of each other; or, without
# copies, among the rows of the batch, unless these are one (offsets) or what is mapped is of the heads alone.
_HEAD_AXIS = {name: 2 for name in ("q", "k", "v", "p", "g", "gv", "beta", "o", "d_o")}
_HEAD_AXIS |= {name: 1 for name in ("initial_state", "final_state", "d_final_state", "states")}
_OF_HEADS = ("g_gamma", "A_log", "dt_bias")
_HEAD_AXIS |= {name: 0 for name in _OF_HEADS}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is fixed when a call is traced: the attributes of the custom calls."""

    op: str
    final_state: bool
    scale: float
    reverse: bool
    qk_l2norm: bool
    gate_form: str
    lower_bound: float
    beta_form: str
    chunk: int
    state_v_first: bool

    def attributes(self) -> dict:
        kinds: dict = {str: str, float: np.float64, bool: np.int64, int: np.int64}
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del values["final_state"]
        return {name: kinds[type(value)](value) for name, value in values.items()}


def _bits(names: Iterable[str], places: Sequence[str]) -> np.int64:
    return np.int64(sum(1 << places.index(name) for name in names))


def _names(bits: int, places: Sequence[str]) -> list:
    return [name for i, name in enumerate(places) if bits >> i & 1]


def state_shape(settings: Settings, q: jax.Array, v: jax.Array, cu_seqlens: jax.Array | None) -> tuple:
    N = count_sequences(q.shape[0], cu_seqlens)
    K, V = q.shape[-1], v.shape[-1]
    return (N, v.shape[2], V, K) if settings.state_v_first else (N, v.shape[2], K, V)


def state_dtype(q):
    return jnp.float64 if q.dtype == jnp.float64 else jnp.float32


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


def _custom_call(target, settings, tensors, results, places, in_place=()):
    """Runs the custom call; `tensors`: the given ones by name; `results`: (name, shape, dtype) by `places`.

    in_place: names of results that are left in the memory of the arguments of these names, of which XLA makes copies
    where they are needed later.
    """
    given = [name for name in _ARGUMENTS if name in tensors]
    aliases = {given.index(name): places.index(name) for name in in_place}
    structs = [_result(shape, dtype, jax.typeof(tensors["q"])) for _, shape, dtype in results]
    call = jax.ffi.ffi_call(f"headrace_{target}", structs, input_output_aliases=aliases)
    values = call(*(tensors[name] for name in given), given=_bits(given, _ARGUMENTS),
                  wanted=_bits([name for name, _, _ in results], places), **settings.attributes())
    return {name: value for (name, _, _), value in zip(results, values)}


def _labels(tensors: dict) -> dict[str, Labels]:
    """What the dimensions of all tensors and results count, by name: a call is divided along heads and rows."""
    H, HV = tensors["q"].shape[2], tensors["v"].shape[2]
    rows = None if "cu_seqlens" in tensors else "rows"  # of states
    key_head = None if H == 1 < HV else "heads"  # the one key head is whole beside any value heads
    head = "heads" if H in (1, HV) else ("heads", "group")
    channels = ("heads", "channels") if isinstance(head, str) else (*head, "channels")
    labels: dict = dict.fromkeys(("q", "k", "p"), ("rows", None, key_head, None))
    labels |= dict.fromkeys(("v", "gv", "o", "d_o"), ("rows", None, head, None))
    labels |= {name: ("rows", None, head, None)[:tensors[name].ndim] for name in ("g", "beta") if name in tensors}
    labels |= dict.fromkeys(("initial_state", "final_state", "d_final_state", "states"), (rows, head, None, None))
    labels |= {"g_gamma": (head,), "A_log": (head,), "cu_seqlens": (None,)}
    if "dt_bias" in tensors:
        labels["dt_bias"] = (head if tensors["dt_bias"].size == HV else channels,)
    return labels


def _forward(settings, tensors, wide):
    """{"o", "final_state"} of the tensors given by name."""
    q, v = tensors["q"], tensors["v"]
    results = [("o", v.shape, q.dtype)]
    if settings.final_state:
        results.append(("final_state", state_shape(settings, q, v, tensors.get("cu_seqlens")), state_dtype(q)))
    return _custom_call("forward", settings, tensors, results, _OUTPUTS)


def _backward(settings, wanted, tensors, wide):
    """The gradients by the inputs `wanted`, by the names of the inputs; `tensors` hold d_o or d_final_state or both."""
    types = {name: tensors[name].dtype for name in wanted}
    types |= {name: accumulated(types[name]) for name in wide}
    results = [(name, tensors[name].shape, types[name]) for name in wanted]
    return _custom_call("backward", settings, tensors, results, DIFFERENTIABLE)


def _step(settings, tensors, wide):
    """{"o", "states"} of the tensors given by name, with the states before the step among them."""
    v, states = tensors["v"], tensors["states"]
    results = [("o", v.shape, tensors["q"].dtype), ("states", states.shape, states.dtype)]
    return _custom_call("step", settings, tensors, results, _STEP_OUTPUTS, in_place=("states",))


def _fold(x, axis, is_mapped, size):
    """x [size, ...], or [...] for every index where it is not mapped -> [..., size * the axis, ...]."""
    x = jnp.moveaxis(x, 0, axis) if is_mapped else jnp.repeat(jnp.expand_dims(x, axis), size, axis)
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])


def _unfold(x, axis, size):
    x = x.reshape(*x.shape[:axis], size, x.shape[axis] // size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def _mappable(name, function, sums=()):
    """`function` of tensors by name, which makes the custom call `name`, as XLA may divide it and vmap may map it.

    vmap makes one call of it with more rows or heads, or a loop where the offsets differ, and where there are no
    elements: results then have their shapes though nothing runs. sums: the results that are sums over rows.
    """
    mappable = custom_vmap(partitioned(name, function, _labels))

    @mappable.def_vmap
    def rule(size, mapped, tensors):
        mapped = mapped[0]
        if mapped.get("cu_seqlens") or size == 0:
            rows = {name: x for name, x in tensors.items() if mapped[name]}
            values = jax.lax.map(lambda row: mappable({**tensors, **row}), rows)
        else:
            in_heads = "cu_seqlens" in tensors or any(mapped.get(name) or name in sums for name in _OF_HEADS)
            axes = _HEAD_AXIS if in_heads else {n: 0 for n in _HEAD_AXIS if n not in _OF_HEADS}
            folded = {n: _fold(x, axes[n], mapped[n], size) if n in axes else x for n, x in tensors.items()}
            values = {name: _unfold(x, axes[name], size) for name, x in mappable(folded).items()}
        return values, {name: True for name in values}

    return mappable


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _operator(settings, tensors):
    return _mappable("forward", partial(_forward, settings))(tensors)


def _operator_forward(settings, tensors):
    values = {name: x.value for name, x in tensors.items()}
    wanted = _bits([name for name in DIFFERENTIABLE if name in tensors and tensors[name].perturbed], DIFFERENTIABLE)
    # Which gradients are wanted travels to the backward as the shape of an array without elements. JAX keeps the shapes
    # of residuals with each trace of this function, but of their tree (None, static nodes, which are inputs) only that
    # of the last trace: a tree that depends on `perturbed` would give one gradient's names to another.
    return _operator(settings, values), (values, np.empty((0, wanted), bool))


def _operator_backward(settings, residuals, d_outputs):
    tensors, wanted = residuals
    wanted = _names(wanted.shape[1], DIFFERENTIABLE)
    gradients = {}
    d_outputs = {f"d_{name}": x for name, x in d_outputs.items() if not isinstance(x, SymbolicZero)}
    if wanted and d_outputs:
        gradients = _mappable("backward", partial(_backward, settings, wanted), wanted)({**tensors, **d_outputs})
    return ({name: gradients.get(name) for name in tensors},)


_operator.defvjp(_operator_forward, _operator_backward, symbolic_zeros=True)
operator = jax.jit(_operator, static_argnums=0)


@partial(jax.jit, static_argnums=0)
def step(settings, tensors):
    """_step, which vmap maps; it has no gradient."""
    return _mappable("step", partial(_step, settings))(tensors)
