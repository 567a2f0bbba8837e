"""headrace.jax on a GPU, for machines that have one: every operator and layer function against float64 on the CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from conftest import BARS, OPERATORS
from jax.sharding import AxisType, PartitionSpec

import headrace.jax as hj
from headrace.jax.distributed import cp_attention

try:
    GPU = jax.devices("cuda")[0]
except RuntimeError as reason:
    pytest.skip(f"needs JAX with a CUDA device: {reason}", allow_module_level=True)
CPU = jax.devices("cpu")[0]

RAGGED = [0, 0, 16, 17, 90]
DTYPES = {torch.float64: jnp.float64, torch.float32: jnp.float32, torch.bfloat16: jnp.bfloat16,
          torch.float16: jnp.float16}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def on_gpu(tensors):
    return {name: jax.device_put(jnp.asarray(x.double().numpy()).astype(DTYPES[x.dtype]) if x.is_floating_point()
                                 else jnp.asarray(x.numpy()), GPU) for name, x in tensors.items()}


def exactly(arrays):
    """The same numbers on the CPU in float64."""
    return {name: jax.device_put(np.asarray(x).astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating)
                                 else np.asarray(x), CPU) for name, x in arrays.items()}


def error(actual, expected):
    assert actual.devices() == {GPU} and expected.devices() == {CPU}
    actual, expected = np.asarray(actual).astype(np.float64), np.asarray(expected)
    assert np.isfinite(actual).all()
    return np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-300)


def bar_of(name, bars):
    return bars[1] if name in ("q", "k", "v", "p", "initial_state", "x", "weight", "bias") else bars[2]


def split(arrays):
    """(floating, others) by name."""
    floating = {name: x for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    return floating, {name: x for name, x in arrays.items() if name not in floating}


def compare(function, arrays, bars, jit=True):
    """Outputs and the gradients of their sum, weighted, by all floating arrays, as on the CPU within the bars."""
    def both(arrays):
        floating, others = split(arrays)

        def loss(floating):
            outputs = [x for x in function({**floating, **others}) if x is not None]
            weights = [np.random.default_rng(1).standard_normal(x.shape) for x in outputs]
            return sum(jnp.sum(x * w.astype(x.dtype)) for x, w in zip(outputs, weights)), outputs

        return jax.grad(loss, has_aux=True)(floating)

    both = jax.jit(both) if jit else both
    gradients, outputs = both(arrays)
    expected_gradients, expected = both(exactly(arrays))
    for actual, x in zip(outputs, expected, strict=True):
        assert error(actual, x) < bars[0]
    for name, x in expected_gradients.items():
        assert gradients[name].dtype == arrays[name].dtype
        assert error(gradients[name], x) < bar_of(name, bars), name


def pair(op, **options):
    return lambda arrays: hj.attention(op, **arrays, output_final_state=True, **options)


@pytest.mark.parametrize("cu_seqlens", [None, RAGGED], ids=["dense", "ragged"])
@pytest.mark.parametrize("dtype", list(BARS), ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("op", OPERATORS)
def test_values_and_gradients(problem, op, dtype, cu_seqlens):
    tensors = problem(op, B=1 if cu_seqlens else 2, T=90, HV=4, K=64, V=64, dtype=dtype, cu_seqlens=cu_seqlens,
                      state=True)
    compare(pair(op), on_gpu(tensors), BARS[dtype])


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_gates_beta_and_norms_inside(problem, lower_bound):
    tensors = problem("kda", dtype=torch.float32, state=True)
    tensors |= {"A_log": torch.randn(2), "dt_bias": torch.randn(2 * 16), "g": torch.randn(tensors["g"].shape),
                "beta": torch.randn(tensors["beta"].shape)}
    gate = "softplus" if lower_bound is None else "bounded"
    compare(pair("kda", gate_form=gate, lower_bound=lower_bound, beta_form="two_sigmoid", qk_l2norm=True, reverse=True,
                 scale=0.5), on_gpu(tensors), BARS[torch.float32])


@pytest.mark.parametrize("op", OPERATORS)
def test_without_jit(problem, op):
    compare(pair(op, state_v_first=True), on_gpu(problem(op, dtype=torch.float32)), BARS[torch.float32], jit=False)


def test_offsets_on_the_host(problem):
    tensors = problem("kda", B=1, T=90, dtype=torch.float32, cu_seqlens=RAGGED)
    arrays = on_gpu(tensors)
    o, state = pair("kda")({**arrays, "cu_seqlens": np.array(RAGGED)})
    expected = pair("kda")(arrays)
    assert jnp.array_equal(o, expected[0]) and jnp.array_equal(state, expected[1])


@pytest.mark.parametrize("mapped", [("v",), ("q", "k", "v", "g", "beta", "initial_state"), ("cu_seqlens", "v")])
def test_vmap(problem, mapped):
    offsets = {"B": 1, "cu_seqlens": [0, 5, 37]} if "cu_seqlens" in mapped else {}
    rows = [on_gpu(problem("kda", dtype=torch.float32, state=True, seed=seed, **offsets)) for seed in range(3)]
    stacked = {name: jnp.stack([x[name] for x in rows]) if name in mapped else x for name, x in rows[0].items()}
    axes = {name: 0 if name in mapped else None for name in stacked}
    compare(jax.vmap(pair("kda"), (axes,)), stacked, BARS[torch.float32])


@pytest.mark.parametrize("op", ["simple_gla", "gated_delta_rule", "kda"])
def test_steps_are_the_forward(problem, op):
    arrays = on_gpu(problem(op, T=9, dtype=torch.float32, state=True))
    states, rest = arrays["initial_state"], {name: x for name, x in arrays.items() if name != "initial_state"}
    tokens = {name: jnp.moveaxis(x, 1, 0)[:, :, None] for name, x in rest.items() if x.ndim > 1}
    alike = {name: x for name, x in rest.items() if x.ndim == 1}

    @jax.jit
    def decode(states, tokens):
        return jax.lax.scan(lambda s, x: hj.step(op, **x, **alike, states=s)[::-1], states, tokens)

    last, o = decode(states, tokens)
    expected_o, expected_state = pair(op)(exactly(arrays))
    assert error(jnp.moveaxis(o[:, :, 0], 0, 1), expected_o) < BARS[torch.float32][0]
    assert error(last, expected_state) < BARS[torch.float32][0]


@pytest.mark.parametrize("dtype", list(BARS), ids=lambda d: str(d)[6:])
def test_layer_functions(dtype):
    draw = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)  # noqa: E731
    rows = {"x": normal(2, 70, 33), "weight": normal(33, 4), "bias": normal(33), "initial_state": normal(2, 33, 4)}
    packed = {"x": normal(1, 90, 33), "weight": normal(33, 4), "cu_seqlens": torch.tensor(RAGGED)}
    convolve = lambda x: hj.short_convolution(**x, output_final_state=True, activation="silu")  # noqa: E731
    for tensors in (rows, packed):
        compare(convolve, on_gpu(tensors), BARS[dtype])
    norm = lambda x: (hj.rms_norm_gated(x["x"], x["g"], x["weight"]),)  # noqa: E731
    compare(norm, on_gpu({"x": normal(2, 9, 3, 40), "g": normal(2, 9, 3, 40), "weight": normal(40)}), BARS[dtype])


def test_many_calls_share_xlas_memory(problem):
    """Layers one behind the other, whose scratch memory XLA hands on, twice: the CPU's numbers, and the same bits."""
    arrays = on_gpu(problem("gated_delta_rule", T=200, HV=2, K=64, V=64, dtype=torch.float32))

    def network(arrays):
        def layer(v, _):
            return v + hj.attention("gated_delta_rule", **{**arrays, "v": v})[0] / 8, None

        return (jax.lax.scan(layer, arrays["v"], length=8)[0],)

    compare(network, arrays, BARS[torch.float32])
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(network(x)[0] ** 2)))
    first, second = gradient(arrays), gradient(arrays)
    for name, x in first.items():
        assert jnp.array_equal(x, second[name]), name


def test_a_wrong_gate_makes_nan_of_its_head_alone(problem):
    arrays = on_gpu(problem("kda", dtype=torch.float32))
    expected, _ = pair("kda")(arrays)
    o, _ = pair("kda")({**arrays, "g": arrays["g"].at[0, 20, 1, 3].set(1.0)})
    assert jnp.isnan(o[0, 20:, 1]).all()
    for other in ((0, slice(None), 0), (1,)):
        assert jnp.array_equal(o[other], expected[other])


def test_pieces_are_refused(problem):
    mesh = jax.make_mesh((1,), ("ranks",), axis_types=(AxisType.Auto,), devices=[GPU])
    arrays = on_gpu(problem("kda", dtype=torch.float32))
    attend = jax.shard_map(lambda x: cp_attention("kda", **x, axis_name="ranks")[0], mesh=mesh,
                           in_specs=PartitionSpec(None, "ranks"), out_specs=PartitionSpec(None, "ranks"))
    with pytest.raises(Exception, match="computed on the CPU only"):
        jax.block_until_ready(jax.jit(attend)(arrays))
