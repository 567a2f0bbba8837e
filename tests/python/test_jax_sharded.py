"""headrace.jax on sharded arrays under plain jit: the numbers of one device, and no gather where heads or rows are cut.

The cases run in processes with four devices; there is one device here.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from on_devices import on_devices

import headrace.jax as hj

HEADS = {"q": 2, "k": 2, "p": 2, "v": 2, "g": 2, "beta": 2, "g_gamma": 0, "A_log": 0, "dt_bias": 0, "initial_state": 1}
OF_HEADS = ("g_gamma", "A_log", "dt_bias")
GATHERS = ("all-gather", "all-to-all", "collective-permute")


def mesh_of(*sizes, turned=False):
    devices = np.array(jax.devices()[:int(np.prod(sizes))]).reshape(sizes)
    return Mesh(devices[::-1].T if turned else devices, ("x", "y")[:len(sizes)])


def count(compiled, names):
    return sum(len(re.findall(rf" {name}(?:-start)?\(", compiled.as_text())) for name in names)


def problem(op="gated_delta_rule", B=4, T=12, H=4, HV=8, K=8, V=12, dtype=jnp.float64, N=None, gate=False):
    draw = np.random.default_rng(0)
    wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
    arrays = {name: draw.standard_normal((B, T, H, K)) / 2 for name in ("q", "k")}
    arrays |= {"v": draw.standard_normal((B, T, HV, V)), "g": -draw.random((B, T, HV) + (K,) * (op == "kda")),
               "beta": draw.random((B, T, HV)), "initial_state": draw.standard_normal((N or B, HV, K, V))}
    if op == "comba":
        arrays["p"] = arrays["k"] / 2
    if op != "kda":
        arrays["g_gamma"] = -draw.random(HV)
    if gate:
        arrays |= {"A_log": draw.standard_normal(HV), "dt_bias": draw.standard_normal(arrays["g"][0, 0].size)}
    return {name: jnp.asarray(x, dtype if name in "qkvp" else wide) for name, x in arrays.items()}


def by_heads(axis="x", only=tuple(HEADS)):
    return lambda name: P(*[None] * HEADS[name], axis) if name in only else P()


def by_rows(name):
    return P() if name in OF_HEADS else P("x")


def by_both(name):
    return P("y") if name in OF_HEADS else P("x", *[None] * (HEADS[name] - 1), "y")


def by_tokens(name):
    return P(None, "x") if HEADS[name] == 2 else P()


def relative_error(actual, expected):
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def compare(function, arrays, mesh, spec, bar=1e-12):
    """(gathers, sums) of the forward and of the gradients by all arrays, whose values are those of whole arrays."""
    outputs = jax.jit(function)(arrays)
    draw = np.random.default_rng(1)
    weights = [jnp.asarray(draw.standard_normal(x.shape), x.dtype) for x in outputs]

    def loss(arrays):
        return sum(jnp.sum((x * weight).astype(weights[-1].dtype)) for x, weight in zip(function(arrays), weights))

    sharded = {name: jax.device_put(x, NamedSharding(mesh, spec(name))) for name, x in arrays.items()}
    counts = []
    for f in (function, jax.grad(loss)):
        compiled = jax.jit(f).lower(sharded).compile()
        for actual, expected in zip(jax.tree.leaves(compiled(sharded)), jax.tree.leaves(jax.jit(f)(arrays))):
            assert actual.dtype == expected.dtype and relative_error(actual, expected) < bar
        counts.append((count(compiled, GATHERS), count(compiled, ["all-reduce"])))
    return counts


def attention(op="gated_delta_rule", **options):
    return lambda arrays: hj.attention(op, **arrays, output_final_state=True, **options)


def no_gathers():
    """Heads, rows or both: the only exchange is the sum of a gradient that the parts share."""
    jax.config.update("jax_enable_x64", True)
    four, grid = mesh_of(4), mesh_of(2, 2)
    for op in ("simple_gla", "gla", "delta_rule", "comba", "kda", "gated_delta_rule"):
        names = {"simple_gla": ("g", "g_gamma"), "gla": ("g",), "delta_rule": ("beta",)}.get(op, tuple(HEADS))
        arrays = problem("kda" if op == "gla" else op)
        arrays = {name: x for name, x in arrays.items() if name in ("q", "k", "v", "initial_state", "p", *names)}
        assert compare(attention(op), arrays, four, by_heads()) == [(0, 0), (0, 0)], op
    whole = [(0, 0), (0, 0)]
    with_sums = [(0, 0), (0, 1)]
    assert compare(attention(), problem(HV=4), four, by_heads()) == whole
    assert compare(attention(), problem(H=1), four, by_heads(only=set(HEADS) - {"q", "k"})) == with_sums
    assert compare(attention(), problem(), grid, by_heads(("y", "x"))) == whole
    assert compare(attention(cu_seqlens=jnp.array([0, 3, 3, 12])), problem(B=1, N=3), four, by_heads()) == whole
    assert compare(attention(), problem(), four, by_rows) == with_sums  # of d g_gamma
    assert compare(attention(), problem(), grid, by_both) == with_sums
    assert compare(attention(), problem(), mesh_of(2, 2, turned=True), by_both) == with_sums
    for given in ("v", "q"):  # what is whole is cut where it lies
        assert compare(attention(), problem(), four, by_heads(only=(given,)))[0] == (0, 0)
    for gate in ("softplus", "bounded"):
        arrays = problem("kda", gate=True)
        assert compare(attention("kda", gate_form=gate), arrays, grid, by_both) == with_sums
        assert compare(attention("kda", gate_form=gate, reverse=True), arrays, four, by_heads()) == whole
    turned = {name: x.swapaxes(2, 3) if name == "initial_state" else x for name, x in problem().items()}
    assert compare(attention(state_v_first=True), turned, grid, by_both) == with_sums
    # The sum over rows is made in float32: as exact as that of one device.
    assert compare(attention(), problem(dtype=jnp.bfloat16), four, by_rows, 1e-6) == with_sums
    assert compare(attention(), problem(H=1, dtype=jnp.bfloat16), four, by_heads(only=("v",)), 1e-6)[1][1] == 1


def layers():
    """Short convolutions by channels, rows or both; norms by anything but what they normalise."""
    jax.config.update("jax_enable_x64", True)
    four, grid = mesh_of(4), mesh_of(2, 2)
    draw = np.random.default_rng(0)
    arrays = {"x": (4, 12, 8), "weight": (8, 4), "bias": (8,), "initial_state": (4, 8, 4)}
    arrays = {name: jnp.asarray(draw.standard_normal(shape)) for name, shape in arrays.items()}
    channels = {"x": 2, "weight": 0, "bias": 0, "initial_state": 1}

    def convolution(offsets=None):
        return lambda arrays: hj.short_convolution(**arrays, output_final_state=True, activation="silu",
                                                   cu_seqlens=offsets)

    by_channels = lambda name: P(*[None] * channels[name], "x")  # noqa: E731
    rows = lambda name: P("x") if channels[name] else P()  # noqa: E731
    both = lambda name: P("x", *[None] * (channels[name] - 1), "y") if channels[name] else P("y")  # noqa: E731
    assert compare(convolution(), arrays, four, by_channels) == [(0, 0), (0, 0)]
    assert compare(convolution(), arrays, four, rows) == [(0, 0), (0, 1)]
    assert compare(convolution(), arrays, grid, both) == [(0, 0), (0, 1)]
    packed = arrays | {"x": arrays["x"][:1], "initial_state": arrays["initial_state"][:2]}
    assert compare(convolution(jnp.array([0, 5, 12])), packed, four, by_channels) == [(0, 0), (0, 0)]
    assert compare(convolution(), arrays, four, lambda name: P(None, "x") if name == "x" else P())[0] == (1, 0)

    norm = lambda arrays: [hj.rms_norm_gated(**arrays)]  # noqa: E731
    arrays = {"x": (4, 8, 4, 6), "g": (4, 8, 4, 6), "weight": (6,)}
    arrays = {name: jnp.asarray(draw.standard_normal(shape)) for name, shape in arrays.items()}
    for axes in (("x",), (None, "x"), (None, None, "x"), ("y", None, "x")):
        spec = lambda name: P() if name == "weight" else P(*axes)  # noqa: E731, B023
        assert compare(norm, arrays, grid if "y" in axes else four, spec) == [(0, 0), (0, 1)]


def gathers():
    """What a call must see whole is gathered, and heads that do not divide are: the numbers stay right."""
    jax.config.update("jax_enable_x64", True)
    four = mesh_of(4)
    assert compare(attention(), problem(), four, by_tokens)[0] == (5, 0)
    for only, axis in (("qk", 3), ("v", 3)):
        spec = lambda name: P(*[None] * axis, "x") if name in only else P()  # noqa: E731, B023
        assert compare(attention(), problem(V=16), four, spec)[0][0] > 0
    for H, HV in ((2, 8), (6, 24)):  # 2 and 6 key heads over 4 devices
        compare(attention(), problem(H=H, HV=HV), four, by_heads(only=set(HEADS) - {"q", "k"}))
    compare(attention(), problem(), four, lambda name: P())
    arrays = problem(T=0)
    sharded = {name: jax.device_put(x, NamedSharding(four, by_heads()(name))) for name, x in arrays.items()}
    assert jnp.array_equal(jax.jit(attention())(sharded)[1], arrays["initial_state"])


def transformations():
    """vmap over cut examples, heads or both; scan and checkpoint; shard_map over the other axis; a step in place."""
    jax.config.update("jax_enable_x64", True)
    four, grid = mesh_of(4), mesh_of(2, 2)
    arrays = {name: x for name, x in problem().items() if name not in OF_HEADS}
    single = {name: x[:, None] for name, x in arrays.items()}

    def mapped(arrays):
        return jax.vmap(attention())(arrays)

    def spec(*axes):
        return lambda name: P(axes[0], *[None] * HEADS[name], *axes[1:])

    for mesh, axes in ((four, ("x",)), (four, (None, "x")), (grid, ("x", "y"))):
        assert compare(mapped, single, mesh, spec(*axes)) == [(0, 0), (0, 0)], axes

    def repeated(arrays):
        def body(state, _):
            o, state = attention()({**arrays, "initial_state": state})
            return state, o
        state, o = jax.lax.scan(jax.checkpoint(body), arrays["initial_state"], length=3)
        return o, state

    assert compare(repeated, arrays, four, by_heads()) == [(0, 0), (0, 0)]
    everything = problem()
    for check in (True, False):
        part = jax.shard_map(attention(), mesh=grid, in_specs=({name: by_rows(name) for name in everything},),
                             out_specs=P("x"), axis_names={"x"}, check_vma=check)
        assert compare(part, everything, grid, by_both)[0] == (0, 0)
    tokens = {name: x if name in OF_HEADS else x[:, :1] for name, x in everything.items() if name != "initial_state"}

    def step(tokens, states):
        return hj.step("gated_delta_rule", **tokens, states=states)

    expected = step(tokens, everything["initial_state"])
    tokens = {name: jax.device_put(x, NamedSharding(four, by_heads()(name))) for name, x in tokens.items()}
    states = jax.device_put(everything["initial_state"], NamedSharding(four, by_heads()("initial_state")))
    compiled = jax.jit(step, donate_argnums=1).lower(tokens, states).compile()
    places = [x.data.unsafe_buffer_pointer() for x in states.addressable_shards]
    o, states = compiled(tokens, states)
    assert count(compiled, GATHERS) == 0 and relative_error(o, expected[0]) < 1e-12
    assert relative_error(states, expected[1]) < 1e-12
    assert places == [x.data.unsafe_buffer_pointer() for x in states.addressable_shards]


@pytest.mark.parametrize("cases", [no_gathers, layers, gathers, transformations])
def test_on_four_devices(cases):
    on_devices(cases)
