"""headrace.jax on XLA's CUDA platform, as far as no GPU is needed: what is registered, what calls compile to, offsets."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import OPERATORS
from jax.sharding import AxisType, PartitionSpec

import headrace.jax as hj
from headrace.jax import _functions

CU_SEQLENS = np.array([0, 5, 12, 12], np.int32)
REGISTERED = """
import jaxlib.xla_client as xla
import headrace.jax
from headrace import _core

found = {}
xla.register_custom_call_handler("CUDA", lambda name, fn, platform, version, traits: found.update({name: (fn, version)}))
expected = {f"headrace_{name}" for name in _core.xla_handlers("cuda")}
assert {name for name in found if name.startswith("headrace")} == expected and len(expected) == 10, found
assert all(version == 1 for _, version in found.values())
"""


def test_targets_are_registered_when_a_cuda_plugin_asks():
    subprocess.run([sys.executable, "-c", REGISTERED], check=True)


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def tensors_of(op, state=False, ragged=False, dtype=jnp.bfloat16):
    """Shapes of what `op` takes: B 2 (ragged: 1), T 12, H 2, HV 4, K 16, V 8."""
    B = 1 if ragged else 2
    gates, beta, erase = OPERATORS[op]
    tensors = {"q": struct(B, 12, 2, 16, dtype=dtype), "k": struct(B, 12, 2, 16, dtype=dtype),
               "v": struct(B, 12, 4, 8, dtype=dtype)}
    if erase:
        tensors["p"] = tensors["k"]
    if "g" in gates:
        tensors["g"] = struct(B, 12, 4, *((16,) if op in ("gla", "kda") else ()))
    if "g_gamma" in gates:
        tensors["g_gamma"] = struct(4)
    if beta:
        tensors["beta"] = struct(B, 12, 4)
    if state:
        tensors["initial_state"] = struct(3 if ragged else B, 4, 16, 8)
    if ragged:
        tensors["cu_seqlens"] = struct(4, dtype=jnp.int32)
    return tensors


def custom_calls(function, *arguments):
    """The custom calls of headrace that a CUDA device would run, which are those of a CPU, names of values aside."""
    traced = jax.jit(function).trace(*arguments)
    texts = [traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cuda", "cpu")]
    calls = [re.findall(r"stablehlo\.custom_call @headrace_\w+.*", text) for text in texts]
    assert calls[0] == calls[1]
    return calls[0]


def expect_call(call, target, arguments, results):
    """`call` is one of this target with so many tensors, each row-major, and attributes."""
    assert re.match(rf"stablehlo\.custom_call @headrace_{target}\(", call)
    layouts = {side: re.findall(r"dense<\[?(.*?)\]?> : tensor", re.search(rf"{side}_layouts = \[(.*?>)\]", call)[1])
               for side in ("operand", "result")}
    assert (len(layouts["operand"]), len(layouts["result"])) == (arguments, results)
    for layout in layouts["operand"] + layouts["result"]:
        assert layout.split(", ") == [str(i) for i in reversed(range(layout.count(",") + 1))]
    given, wanted = (int(re.search(rf"{name} = (\d+) : i64", call)[1]) for name in ("given", "wanted"))
    assert (given.bit_count(), wanted.bit_count()) == (arguments, results)


def loss_of(function):
    return lambda *tensors: sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(function(*tensors)))


@pytest.mark.parametrize("ragged", [False, True], ids=["dense", "ragged"])
@pytest.mark.parametrize("op", OPERATORS)
def test_forward_and_backward(op, ragged):
    tensors = tensors_of(op, state=True, ragged=ragged)
    function = lambda x: hj.attention(op, **x, output_final_state=True)  # noqa: E731
    (forward,) = custom_calls(function, tensors)
    expect_call(forward, "forward", len(tensors), 2)
    assert f'op = "{op}"' in forward
    offsets = {name: x for name, x in tensors.items() if name == "cu_seqlens"}
    floating = {name: x for name, x in tensors.items() if name != "cu_seqlens"}
    gradient = jax.grad(lambda x, offsets: loss_of(function)({**x, **offsets}))
    backward = custom_calls(gradient, floating, offsets)[-1]
    expect_call(backward, "backward", len(tensors) + 2, len(floating))


def test_step_is_in_place():
    tensors = tensors_of("kda")
    (call,) = custom_calls(lambda states, x: hj.step("kda", **x, states=states), struct(2, 4, 16, 8), tensors)
    expect_call(call, "step", 6, 2)
    assert "output_tuple_indices = [1]" in call and "operand_index = 5" in call


def test_layer_functions():
    x, weight, state = struct(2, 12, 6), struct(6, 4), struct(2, 6, 4)
    convolve = lambda *tensors: hj.short_convolution(*tensors[:2], None, tensors[2], True, "silu")  # noqa: E731
    norm = lambda x, g: hj.rms_norm_gated(x, g)  # noqa: E731
    expect_call(custom_calls(convolve, x, weight, state)[0], "convolution_forward", 3, 2)
    expect_call(custom_calls(jax.grad(loss_of(convolve), (0, 1, 2)), x, weight, state)[-1], "convolution_backward", 5, 3)
    expect_call(custom_calls(norm, x, x)[0], "norm_forward", 2, 1)
    expect_call(custom_calls(jax.grad(loss_of(norm), (0, 1)), x, x)[-1], "norm_backward", 3, 2)


def test_vmap_is_one_call_of_more_rows():
    tensors = {name: struct(3, *x.shape, dtype=x.dtype) for name, x in tensors_of("kda").items()}
    (call,) = custom_calls(jax.vmap(lambda x: hj.attention("kda", **x)[0]), tensors)
    expect_call(call, "forward", 5, 1)
    assert "tensor<6x12x4x8xbf16>" in call


def test_shard_map():
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(lambda x: hj.attention("kda", **x)[0], mesh=mesh, in_specs=PartitionSpec("rows"),
                           out_specs=PartitionSpec("rows"))
    (call,) = custom_calls(mapped, tensors_of("kda"))
    expect_call(call, "forward", 5, 1)


class OnDevice:
    """Offsets on a GPU, which a call must not wait for."""

    shape, dtype = CU_SEQLENS.shape, CU_SEQLENS.dtype

    def devices(self):
        return {type("Device", (), {"platform": "gpu"})}

    def __array__(self, *args, **kwargs):
        raise AssertionError("read")


def test_offsets_on_a_device_are_not_read():
    stand_in = _functions._offsets_stand_in(OnDevice(), 12)
    np.testing.assert_array_equal(stand_in, [0, 0, 0, 12])
    np.testing.assert_array_equal(_functions._offsets_stand_in(jnp.asarray(CU_SEQLENS), 12), CU_SEQLENS)
