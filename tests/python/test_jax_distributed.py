"""headrace.jax.distributed on four devices and in two processes, against one: outputs, states and every gradient."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cp_cases import (OPERATORS, PACKED, SCATTERED, UNEVEN, ZIGZAG, attention_tensors, compare_attention,
                      compare_convolution)
from on_devices import on_devices

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
    """What travels is what docs/distributed.md says, in float32: R, M where a rank is passed and data makes it; Dx."""
    HV, K, V = 4, 8, 12
    state = 4 * HV * K * V
    for op, transition in (("delta_rule", [4 * HV * K * K]), ("gla", [4 * HV * K]), ("simple_gla", [4 * HV]),
                           ("retention", [])):
        compiled = compare_attention(op, B=1, dtype=jnp.bfloat16, bars=HALF[jnp.bfloat16])
        assert gathered(compiled) == [*transition, state, state], op


@pytest.mark.parametrize("cases", [operators, layouts, gates, types, by_heads, convolutions, messages])
def test_on_four_devices(cases):
    on_devices(cases)
