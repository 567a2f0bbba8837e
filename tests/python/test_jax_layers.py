"""The layer functions of headrace.jax against plain PyTorch in float64: values, gradients, vmap, jit and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from conftest import BARS, relative_error
from test_jax import arrays_of, float64, to_torch  # noqa: F401
from test_layer_functions import RAGGED, convolution, convolution_tensors, norm, normal

import headrace.jax as hj


def compare(function, oracle, tensors, dtype):
    """Outputs and the gradient of every input, through every output."""
    arrays = arrays_of(tensors)
    exact = {name: x.double().clone().requires_grad_() for name, x in tensors.items()}
    outputs, expected = jax.jit(function)(arrays), oracle(**exact)
    weights = [normal(*x.shape, seed=9 + i).to(torch.float32).double() for i, x in enumerate(expected)]
    for output, x in zip(outputs, expected, strict=True):
        assert relative_error(to_torch(output), x.detach()) < BARS[dtype][0]

    def loss(arrays):
        return sum(jnp.sum(x.astype(jnp.float64) * w.numpy()) for x, w in zip(function(arrays), weights))

    torch.autograd.backward(expected, [w.to(dtype).double() for w in weights])
    for name, gradient in jax.jit(jax.grad(loss))(arrays).items():
        assert gradient.dtype == arrays[name].dtype
        assert relative_error(to_torch(gradient), exact[name].grad) < BARS[dtype][1], name


@pytest.mark.parametrize("cu_seqlens", [None, RAGGED], ids=["dense", "ragged"])
@pytest.mark.parametrize("dtype", list(BARS), ids=lambda d: str(d)[6:])
def test_convolution(dtype, cu_seqlens):
    offsets = None if cu_seqlens is None else jnp.array(cu_seqlens)
    for W, activation in ((1, None), (4, "silu"), (7, "swish")):
        compare(lambda t: hj.short_convolution(**t, output_final_state=True, activation=activation,  # noqa: B023
                                               cu_seqlens=offsets),
                lambda **t: convolution(**t, activation=activation, cu_seqlens=cu_seqlens),  # noqa: B023
                convolution_tensors(dtype, cu_seqlens=cu_seqlens, W=W), dtype)


@pytest.mark.parametrize("dtype", list(BARS), ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 5, 3, 8), (2, 2, 5, 3, 8)], ids=len)
def test_norm(dtype, shape):
    tensors = {name: normal(*shape, seed=i, dtype=dtype) for i, name in enumerate(("x", "g"))}
    tensors["weight"] = normal(8, seed=3, dtype=dtype)
    for names, activation in ((("x", "g", "weight"), "sigmoid"), (("x", "g"), "swish"), (("x", "weight"), "silu")):
        compare(lambda t: [hj.rms_norm_gated(**t, activation=activation, eps=1e-2)],  # noqa: B023
                lambda **t: [norm(**t, activation=activation, eps=1e-2)],  # noqa: B023
                {name: tensors[name] for name in names}, dtype)


def test_residuals():
    x, residual, g = (jnp.asarray(normal(3, 8, seed=i).numpy()) for i in range(3))
    y, s = hj.rms_norm_gated(x, g, residual=residual, prenorm=True)
    np.testing.assert_array_equal(s, x + residual)
    np.testing.assert_array_equal(y, hj.rms_norm_gated(x + residual, g))
    assert hj.rms_norm_gated(x.astype(jnp.bfloat16), prenorm=True, residual_in_fp32=True)[1].dtype == jnp.float32
    assert hj.rms_norm_gated(x.astype(jnp.bfloat16), residual=residual).dtype == jnp.bfloat16


@pytest.mark.parametrize("mapped", ["x", "x weight", "x weight bias initial_state", "weight"])
@pytest.mark.parametrize("cu_seqlens", [None, RAGGED], ids=["dense", "ragged"])
def test_vmap(mapped, cu_seqlens):
    """One call or a loop: outputs and gradients are those of single calls."""
    size = 3
    rows = [arrays_of({n: x * (i + 1) for n, x in convolution_tensors(cu_seqlens=cu_seqlens, T=37).items()})
            for i in range(size)]
    stacked = {n: jnp.stack([row[n] for row in rows]) if n in mapped.split() else rows[0][n] for n in rows[0]}
    axes = {n: 0 if n in mapped.split() else None for n in rows[0]}
    offsets = None if cu_seqlens is None else jnp.array(cu_seqlens)

    def both(arrays):
        y, state = hj.short_convolution(**arrays, output_final_state=True, activation="silu", cu_seqlens=offsets)
        return hj.rms_norm_gated(y, jnp.tanh(y), arrays["bias"]), state

    def loss(arrays):
        return sum(jnp.sum(jnp.sin(x)) for x in both(arrays))

    for function in (both, jax.grad(loss)):
        each = jax.vmap(function, (axes,))(stacked)
        expected = [function({n: x[i] if n in mapped.split() else x for n, x in stacked.items()}) for i in range(size)]
        for actual, *single in zip(*map(jax.tree.leaves, (each, *expected)), strict=True):
            np.testing.assert_allclose(actual, jnp.stack(single), rtol=0, atol=1e-12)
    total = jax.grad(lambda x: jnp.sum(jax.vmap(loss, (axes,))(x)))(stacked)
    for name, gradient in jax.vmap(jax.grad(loss), (axes,))(stacked).items():
        expected = gradient if name in mapped.split() else gradient.sum(0)
        np.testing.assert_allclose(total[name], expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("change, message", [
    (lambda t: t | {"x": t["x"][0]}, "x: expected 3 dimensions"),
    (lambda t: t | {"weight": t["weight"][0]}, "weight: expected 2 dimensions"),
    (lambda t: t | {"weight": t["weight"][1:]}, r"weight: expected shape \[24, 4\]"),
    (lambda t: t | {"bias": t["bias"][1:]}, "bias: expected shape"),
    (lambda t: t | {"initial_state": t["initial_state"][1:]}, "initial_state: expected shape"),
    (lambda t: t | {"cu_seqlens": jnp.array([0, 37])}, "x: expected batch 1"),
    (lambda t: t | {"activation": "tanh"}, "activation: expected one of"),
])
def test_errors(change, message):
    arrays = change(arrays_of(convolution_tensors()))
    with pytest.raises(ValueError, match=message):
        hj.short_convolution(**arrays)


def test_errors_of_the_norm():
    x = jnp.ones((3, 8))
    for arguments, message in (({"g": x[1:]}, "g: expected shape"), ({"weight": x}, "weight: expected shape"),
                               ({"residual": x[0]}, "residual: "), ({"bias": x[0]}, "bias: expected None"),
                               ({"activation": None}, "activation: expected")):
        with pytest.raises(ValueError, match=message):
            hj.rms_norm_gated(x, **arguments)
    with pytest.raises(TypeError, match="x: expected a floating dtype"):
        hj.rms_norm_gated(x.astype(int))
    for function in (hj.rms_norm_gated, lambda x: hj.short_convolution(x[None], x[:, :1].T.repeat(8, 0))[0]):
        with pytest.raises(ValueError, match="cannot be differentiated"):
            jax.grad(lambda x: jax.grad(lambda x: jnp.sum(jnp.sin(function(x))))(x).sum())(x)  # noqa: B023
