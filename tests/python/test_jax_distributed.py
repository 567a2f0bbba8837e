"""headrace.jax.distributed on four devices and in two processes, against one: outputs, states and every gradient."""

import itertools
import os
import re
import signal
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cp_cases import (BITS, OPERATORS, PACKED, SCATTERED, TOKENS, UNEVEN, ZIGZAG, attention_tensors, compare_attention,
                      compare_convolution)
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from on_devices import free_port, in_processes, launch, on_devices, outputs

import headrace.jax as hj
from headrace.jax.distributed import cp_attention, cp_short_convolution

HALF = {np.float32: (3e-6, 1e-5, 1e-5), jnp.bfloat16: (4e-3, 6e-3, 1.5e-2)}  # the bars of docs/numerics.md


def operators():
    jax.config.update("jax_enable_x64", True)
    for i, op in enumerate(OPERATORS):
        compare_attention(op, exchange=("all_gather", "doubling")[i % 2], check=i % 4 < 2)


def layouts():
    """Packed sequences, ranges of any order and size, both directions and both exchanges."""
    jax.config.update("jax_enable_x64", True)
    reverse = {"reverse": True}
    for op, ranges, offsets, options, exchange in (
            ("gated_delta_rule", None, PACKED, None, "all_gather"), ("kda", None, PACKED, reverse, "doubling"),
            ("gla", ZIGZAG, None, reverse, "all_gather"), ("gated_delta_rule", ZIGZAG, PACKED, None, "doubling"),
            ("comba", UNEVEN, None, None, "doubling"), ("retention", UNEVEN, PACKED, reverse, "all_gather"),
            ("retention", SCATTERED, None, None, "doubling"), ("simple_gla", SCATTERED, PACKED, reverse, "all_gather")):
        compare_attention(op, ranges, offsets, options=options, exchange=exchange, check=offsets is None)
    for ranks in (1, 2, 3):
        compare_attention("delta_rule", ranks=ranks)
    compare_attention("gated_delta_rule", offsets=[0, 12, 24, 36, 48])  # nothing is cut


def gates():
    """Raw gates, logits and norms; a gate of -inf at a cut; a single key head."""
    jax.config.update("jax_enable_x64", True)
    inside = {"qk_l2norm": True, "beta_form": "two_sigmoid", "scale": 0.5}
    compare_attention("kda", options={"gate_form": "softplus", **inside}, H=1)
    compare_attention("gated_delta_rule", offsets=PACKED, options={"gate_form": "softplus", "reverse": True})
    compare_attention("kda", UNEVEN, options={"gate_form": "bounded", "lower_bound": -4.0})

    def forget(tensors):
        tensors["g"][:, 24] = -np.inf  # the first token of the third rank
        tensors["g"][0, 35] = -np.inf  # its last

    for op in ("simple_gla", "gated_delta_rule", "kda"):
        compare_attention(op, change=forget)


def types():
    """float32 and bfloat16 are as exact as on one device, in chunks too."""
    jax.config.update("jax_enable_x64", True)
    for dtype, bars in HALF.items():
        for op in ("gated_delta_rule", "gla"):
            compare_attention(op, dtype=dtype, bars=bars, tokens=1024, K=64, V=64, B=1)


def by_heads():
    """Whole sequences of some heads on every rank: what maps of states cannot say works too."""
    jax.config.update("jax_enable_x64", True)
    sizes = {"strategy": "heads", "H": 4}
    compare_attention("gated_delta_rule", **sizes)
    compare_attention("kda", ZIGZAG, PACKED, options={"gate_form": "softplus", "reverse": True}, check=False, **sizes)

    def of_values(tensors):
        tensors["gv"] = -np.abs(tensors["v"]) / 8
        tensors["beta"] = np.abs(np.sin(tensors["v"]))

    compare_attention("gated_delta_rule", UNEVEN, change=of_values, **sizes)
    for dtype, op in itertools.product((np.float32, jnp.bfloat16), ("gla", "kda")):  # few heads, a rank's fewer
        compare_attention(op, dtype=dtype, bars=BITS, tokens=256, K=64, V=64, B=1, HV=8, **sizes)


def convolutions():
    """The inputs before a cut come over several ranks where these have few tokens."""
    jax.config.update("jax_enable_x64", True)
    few = [[(0, 1)], [(1, 2)], [(2, 4)], [(4, 8)]]
    compare_convolution(4)
    compare_convolution(4, few, tokens=8)
    compare_convolution(7, few, [0, 1, 5, 8], tokens=8, check=False)
    compare_convolution(20, SCATTERED, PACKED)
    compare_convolution(4, ZIGZAG, PACKED, state=False)
    compare_convolution(64, tokens=8)
    compare_convolution(1, UNEVEN)


def gathered(compiled):
    """The bytes that a rank gives to each all-gather, in rising order."""
    sizes = {"f64": 8, "f32": 4, "s32": 4, "bf16": 2}
    found = re.findall(r"= (\w+)\[4,([\d,]*)\]\S* all-gather\(", compiled.as_text())
    return sorted(sizes[kind] * int(np.prod([int(x) for x in shape.split(",")])) for kind, shape in found)


def messages():
    """R, M where a rank is passed and the data decides it, back Dx, in float32; and 32 words about errors."""
    HV, K, V = 4, 8, 12
    state, words = 4 * HV * K * V, 4 * 32
    for op, transition in (("delta_rule", [4 * HV * K * K]), ("gla", [4 * HV * K]), ("simple_gla", [4 * HV]),
                           ("retention", [])):
        compiled = compare_attention(op, B=1, dtype=jnp.bfloat16, bars=HALF[jnp.bfloat16])
        assert gathered(compiled) == sorted([words, *transition, state, state]), op


def mapped(function, mesh, **options):
    """`function` of a rank's tensors, whose result has tokens, as one of all tensors."""
    return lambda tensors: jax.shard_map(
        function, mesh=mesh, in_specs=({n: P(None, "t") if n in TOKENS else P() for n in tensors},),
        out_specs=P(None, "t"), **options)(tensors)


def of_rank(**options):
    return lambda tensors: cp_attention("gated_delta_rule", **tensors, axis_name="t", **options)[0]


def whole(tensors):
    return hj.attention("gated_delta_rule", **tensors)[0]


def loss_of(function):
    return lambda tensors: jnp.sum(jnp.sin(function(tensors)))


def same(actual, expected):
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12)


def transformations():
    """vmap of a call and of what a rank does, scan, checkpoint; heads that are left to XLA beside tokens."""
    jax.config.update("jax_enable_x64", True)
    tensors = attention_tensors("gated_delta_rule")
    mesh = Mesh(np.array(jax.devices()), ("t",))
    scales = jnp.asarray(1 + np.random.default_rng(3).random(3))

    def scaled(function):
        return lambda t: jax.vmap(lambda s: function({**t, "q": t["q"] * s, "v": t["v"] * s}))(scales).sum(0)

    def repeated(function):
        body = jax.checkpoint(lambda t, _: ({**t, "v": jnp.tanh(function(t))}, None))
        return lambda t: jax.lax.scan(body, t, length=2)[0]["v"]

    for cp, one in ((scaled(mapped(of_rank(), mesh)), scaled(whole)), (mapped(scaled(of_rank()), mesh), scaled(whole)),
                    (repeated(mapped(of_rank(), mesh)), repeated(whole))):
        same(*(jax.jit(jax.value_and_grad(loss_of(f)))(tensors) for f in (cp, one)))

    grid = Mesh(np.array(jax.devices()).reshape(2, 2), ("t", "heads"))
    axes = {"q": 2, "k": 2, "v": 2, "g": 2, "beta": 2, "initial_state": 1}
    given = {}
    for name, x in tensors.items():
        spec = ["t" if name in TOKENS and i == 1 else "heads" if i == axes[name] else None for i in range(x.ndim)]
        given[name] = jax.device_put(x, NamedSharding(grid, P(*spec)))
    compiled = jax.jit(jax.grad(loss_of(mapped(of_rank(), grid, axis_names={"t"})))).lower(given).compile()
    same(compiled(given), jax.grad(loss_of(whole))(tensors))
    # XLA gathers the heads of states for the messages, but nothing that has tokens.
    assert not re.findall(r"= \S*\[2,(?:24|48),\S* all-gather\(", compiled.as_text())


def errors():
    """What one rank finds, all ranks say at once, in gradients too."""
    mesh = Mesh(np.array(jax.devices()), ("t",))
    tensors = attention_tensors("gated_delta_rule", dtype=np.float32, H=4)
    for strategy in ("summary", "heads"):
        function = mapped(of_rank(strategy=strategy), mesh)
        for run in (jax.jit(function), jax.jit(jax.grad(lambda t, f=function: f(t).sum()))):
            jax.block_until_ready(run(tensors))
            for token, value, rank in ((30, np.nan, 2), (47, 1.0, 3), (0, np.nan, 0)):
                g = tensors["g"].copy()
                g[1, token, 1] = value
                found = rank if strategy == "summary" else 1  # which has the head
                begin = time.monotonic()
                with pytest.raises(jax.errors.JaxRuntimeError, match=f"rank {found}: g: expected values <= 0"):
                    jax.block_until_ready(run({**tensors, "g": g}))
                assert time.monotonic() - begin < 5
    packed = attention_tensors("gated_delta_rule", dtype=np.float32, B=1, N=3)
    traced = jax.jit(lambda t, offsets: mapped(of_rank(cu_seqlens=offsets), mesh)(t))
    for wrong in ([0, 30, 20, 48], [0, 30, 40, 47], [1, 30, 40, 48]):
        with pytest.raises(jax.errors.JaxRuntimeError, match="cu_seqlens"):
            jax.block_until_ready(traced(packed, jnp.asarray(wrong)))
        with pytest.raises(ValueError, match="cu_seqlens: expected offsets that rise from 0 to the 48 tokens"):
            mapped(of_rank(cu_seqlens=np.asarray(wrong)), mesh)(packed)


def wrong_arguments():
    mesh = Mesh(np.array(jax.devices()), ("t",))
    tensors = attention_tensors("gated_delta_rule", dtype=np.float32)
    for change, options, message in (
            ({}, {"token_ranges": [[(0, 12)]] * 3}, "token_ranges: expected a list for each of 4 ranks, got 3"),
            ({}, {"token_ranges": [[(0, 12)]] * 4}, "token_ranges: expected every token once"),
            ({}, {"token_ranges": [[(0, 13)], [(13, 24)], [(24, 36)], [(36, 48)]]}, "at most the 12 tokens"),
            ({}, {"token_ranges": [[(12, 0)]] * 4}, "token_ranges: expected begin <= end"),
            ({}, {"token_ranges": [[]] * 4}, "token_ranges: expected at least one token"),
            ({}, {"strategy": "ring"}, "strategy: expected one of"),
            ({}, {"strategy": "heads"}, "q: expected heads in a multiple of 4 ranks"),
            ({}, {"exchange": "ring"}, "exchange: expected one of"),
            ({"gv": -abs(tensors["v"])}, {}, "gv: expected none for each element of v"),
            ({"beta": abs(tensors["v"])}, {}, "beta: expected none for each element of v"),
            ({"initial_state": tensors["initial_state"][:1]}, {}, "initial_state: ")):
        with pytest.raises(ValueError, match=message):
            mapped(of_rank(**options), mesh)(tensors | change)
    with pytest.raises(TypeError, match="token_ranges: expected a list of"):
        mapped(of_rank(token_ranges=[(0, 12)] * 4), mesh)(tensors)
    everywhere = {"mesh": mesh, "in_specs": P(), "out_specs": P(None, "t")}
    with pytest.raises(ValueError, match="q: expected the tokens of this rank, got the same on all ranks along 't'"):
        jax.shard_map(of_rank(), **everywhere)(tensors)
    x = {"x": np.ones((2, 8, 5), np.float32), "weight": np.ones((4, 4), np.float32)}
    with pytest.raises(ValueError, match="weight: expected shape"):
        mapped(lambda t: cp_short_convolution(**t, axis_name="t")[0], mesh)(x)


def two_processes():
    """Two devices in each of two processes, gloo between them."""
    jax.config.update("jax_enable_x64", True)
    assert jax.process_count() == 2 and len(jax.devices()) == 4
    compare_attention("gated_delta_rule", offsets=PACKED, exchange="all_gather")
    compare_attention("gla", ZIGZAG, exchange="doubling")
    compare_attention("delta_rule", strategy="heads", H=4)
    compare_convolution(4)


@pytest.mark.parametrize("cases", [operators, layouts, gates, types, by_heads, convolutions, messages,
                                   transformations, errors, wrong_arguments])
def test_on_four_devices(cases):
    on_devices(cases)


def a_rank_dies():
    """The other one hears of it at once, from JAX."""
    tensors = attention_tensors("gated_delta_rule", dtype=np.float32)
    mesh = Mesh(np.array(jax.devices()), ("t",))
    given = {}
    for name, x in tensors.items():
        sharding = NamedSharding(mesh, P(None, "t") if name in TOKENS else P())
        given[name] = jax.make_array_from_callback(x.shape, sharding, lambda index, x=x: x[index])
    run = jax.jit(mapped(of_rank(), mesh))
    jax.block_until_ready(run(given))
    if jax.process_index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(jax.errors.JaxRuntimeError, match="AllGather failed"):
        jax.block_until_ready(run(given))
    assert time.monotonic() - begin < 1
    os._exit(0)  # JAX would wait for the dead rank


def test_in_two_processes():
    outputs(in_processes(two_processes, devices=2), 150)


def test_a_rank_dies():
    survivor, dead = in_processes(a_rank_dies)
    try:
        outputs([survivor], 150)
    finally:
        dead.kill()
        dead.communicate()


def test_example():
    """Two processes learn what only what crosses the cut can tell: answers to questions in the other half."""
    program = Path(__file__).parents[2] / "examples" / "jax_two_processes" / "recall.py"
    address = f"localhost:{free_port()}"
    lines = re.findall(r"step +(\d+) +loss ([\d.]+) +(\d+) %",
                       outputs([launch([program, rank, 2, address]) for rank in range(2)], 120)[0])
    losses, recalled = [float(x[1]) for x in lines], [int(x[2]) for x in lines]
    assert [x[0] for x in lines] == ["0", "10", "20", "30", "40"]
    assert losses[0] > 2 and losses[-1] < 0.2 and recalled[0] < 20 and recalled[-1] > 95
