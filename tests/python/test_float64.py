"""Every function of every front with every one of its parameters in float64: 1e-11 against the recurrence.

What is made of a call's options inside (decays of heads, scales, bounds, eps) has to be float64 there, as tensors are.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from calls import (B, CHANGES, ELSEWHERE, FUNCTIONS, HV, POOL, REFUSED, SAME, K, T, V, changed_call, front, identifier,
                   is_taken, operators, options_by_name, parameters, plain_call)
from conftest import relative_error
from layers import HIDDEN, LAYERS, make, plain
from test_layer_functions import convolution, norm, normal

import headrace.jax as hj
import headrace.numpy as hn
import headrace.torch as ht

BAR = 1e-11
STEPS = {hj.step, hn.step}  # of states, without gradients


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def cases(functions):
    """(function, op, parameter) of all that are given to an ordinary call."""
    for function in functions:
        for op in operators(function):
            for parameter in parameters(function):
                name = SAME.get(parameter, parameter)
                if name in REFUSED or name in POOL or name in ELSEWHERE:
                    continue
                assert name in CHANGES, f"{identifier(function)}: calls.py says nothing about {parameter}"
                if is_taken(function, op, parameter):
                    yield pytest.param(function, op, parameter, id=f"{identifier(function)}-{op}-{parameter}")


def leaves(tensors):
    return {n: x.clone().requires_grad_() if x.is_floating_point() else x for n, x in tensors.items()}


def in_torch(function, call):
    mine = leaves(call.tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        o, state = function(**mine, **call.options)
    weights = [normal(*x.shape, seed=9) for x in (o, state)]
    torch.autograd.backward([o, state], weights)
    return o, state, {n: x.grad for n, x in mine.items() if x.is_floating_point()}


def to_torch(x):
    return torch.from_numpy(np.array(x))


def in_jax(function, call):
    arrays = {n: jnp.asarray(x.numpy()) for n, x in call.tensors.items()}
    fixed = {n: x for n, x in arrays.items() if not jnp.issubdtype(x.dtype, jnp.floating)}
    floating = {n: x for n, x in arrays.items() if n not in fixed}
    if function is hj.attention:
        options, place = options_by_name(call.options), (call.op,)
    else:
        options, place = call.options, ()
    (o, state), pull = jax.vjp(lambda x: function(*place, **x, **fixed, **options), floating)
    gradients, = pull(tuple(jnp.asarray(normal(*x.shape, seed=9).numpy()) for x in (o, state)))
    return to_torch(o), to_torch(state), {n: to_torch(x) for n, x in gradients.items()}


def in_numpy(function, call):
    arrays = {n: x.numpy() for n, x in call.tensors.items()}
    options = options_by_name(call.options)
    o, state = hn.forward(call.op, **arrays, **options, final_state=True)
    gradients = {}
    if function is hn.backward:
        d_o, d_state = (normal(*x.shape, seed=9).numpy() for x in (o, state))
        gradients = hn.backward(call.op, **arrays, **options, d_o=d_o, d_final_state=d_state)
    return to_torch(o), to_torch(state), {n[2:]: to_torch(x) for n, x in gradients.items()}


def in_steps(function, call):
    tensors = {n: x.numpy() for n, x in call.tensors.items()}
    states = tensors.pop("initial_state").copy()
    options = options_by_name({n: x for n, x in call.options.items() if n != "output_final_state"})
    if function is hn.step:
        o = hn.step(call.op, **tensors, **options, pool=states)
    else:
        o, states = hj.step(call.op, **tensors, **options, states=states)
    return to_torch(o), to_torch(states), {}


RUNS = {"torch": in_torch, "jax": in_jax, "numpy": in_numpy}


@pytest.mark.parametrize("function, op, parameter", list(cases(FUNCTIONS)))
def test_every_parameter(function, op, parameter):
    call = changed_call(function, op, parameter)
    o, state, gradients = (in_steps if function in STEPS else RUNS[front(function)])(function, call)
    assert o.dtype == state.dtype == torch.float64
    exact = leaves(call.tensors)
    expected = call.expected(exact)
    assert relative_error(o, expected[0]) < BAR and relative_error(state, expected[1]) < BAR
    torch.autograd.backward(expected, [normal(*x.shape, seed=9) for x in expected])
    for name, gradient in gradients.items():
        assert gradient.shape == exact[name].shape and relative_error(gradient, exact[name].grad) < BAR, name


@pytest.mark.parametrize("function, parameter", [
    pytest.param(f, n, id=f"{f.__name__}-{n}")
    for f in FUNCTIONS if front(f) == "torch" for n in parameters(f) if n in POOL])
def test_pools(function, parameter):
    op, = operators(function)
    call = plain_call(function, op)
    pool, rows = normal(2 * T, HV, K, V, seed=3), torch.tensor([3])
    out = torch.zeros(B, T, HV, V, dtype=torch.float64)
    del call.options["output_final_state"]
    each = torch.arange(3, 3 + T)[None]  # the rows that take the state after each token
    given, first, last = {
        "ssm_state_indices": ({"ssm_state_indices": rows}, 3, 3),
        "inplace_final_state": ({"inplace_final_state": True}, 0, 0),
        "out": ({"ssm_state_indices": rows, "out": out}, 3, 3),
        "num_accepted_tokens": ({"ssm_state_indices": each, "num_accepted_tokens": torch.tensor([2])}, 4, 2 + T),
    }[parameter]
    call.tensors["initial_state"] = pool[first : first + 1].clone()
    expected = call.expected(call.tensors)
    o, returned = function(**{**call.tensors, "initial_state": pool}, **call.options, **given)
    assert returned is pool and (parameter != "out" or o is out)
    assert relative_error(o, expected[0]) < BAR and relative_error(pool[last], expected[1][0]) < BAR


def test_refused_parameters():
    for function in FUNCTIONS:
        for name in REFUSED.keys() & set(parameters(function)):
            call = plain_call(function, operators(function)[0])
            with pytest.raises(ValueError, match=f"^{name}: "):
                function(**call.tensors, **call.options, **{name: REFUSED[name]})


def test_numbers_that_float32_does_not_hold_are_what_is_tested():
    for value in (0.3, -4.3):
        assert float(np.float32(value)) != value
    assert not any(torch.equal(x.float().double(), x) for x in plain_call(ht.chunk_comba, "comba").tensors.values())


# ---- what layers put around the operators ----

D, W = 6, 4
CONVOLUTION = {"x": (2, 9, D), "weight": (D, W), "bias": (D,), "initial_state": (2, D, W)}
NORM = {"x": (5, D), "g": (5, D), "weight": (D,), "residual": (5, D)}
AROUND = {
    ht.short_convolution: (CONVOLUTION, {"output_final_state": True, "activation": "silu",
                                         "cu_seqlens": torch.tensor([0, 4, 9]), "cp_context": None}),
    ht.rms_norm_gated: (NORM, {"bias": None, "activation": "sigmoid", "prenorm": True, "residual_in_fp32": False,
                               "eps": 0.1}),
    ht.short_convolution_step: ({"x": (2, D), "state": (2, D, W), "weight": (D, W), "bias": (D,)},
                                {"activation": "silu", "indices": torch.tensor([0, 1])}),
}


def test_functions_around_the_operators_are_known():
    public = {getattr(ht, name) for name in ht.__all__} - {ht.bind}
    assert public == set(AROUND) | {f for f in FUNCTIONS if front(f) == "torch"}
    for function, (tensors, options) in AROUND.items():
        assert parameters(function) and set(parameters(function)) == tensors.keys() | options.keys()


def around(function, tensors, options, oracle):
    mine, exact = leaves(tensors), leaves(tensors)
    actual, expected = function(**mine, **options), oracle(**exact)
    actual, expected = (x if isinstance(x, tuple) else (x,) for x in (actual, expected))
    for x, e in zip(actual, expected, strict=True):
        assert relative_error(x, e) < BAR
    for outputs in (actual, expected):
        torch.autograd.backward(outputs, [normal(*x.shape, seed=9) for x in outputs])
    for name, x in mine.items():
        assert relative_error(x.grad, exact[name].grad) < BAR, name


def drawn(sizes):
    return {name: normal(*size, seed=i) for i, (name, size) in enumerate(sizes.items())}


@pytest.mark.parametrize("cu_seqlens", [None, [0, 4, 9]])
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
def test_convolution(activation, cu_seqlens):
    tensors = drawn(CONVOLUTION)
    if cu_seqlens:
        tensors["x"] = tensors["x"][:1]
    around(ht.short_convolution, tensors, {"output_final_state": True, "activation": activation,
                                           "cu_seqlens": None if cu_seqlens is None else torch.tensor(cu_seqlens)},
           lambda **t: convolution(**t, activation=activation, cu_seqlens=cu_seqlens))
    t = {n: x[:, :1] if n == "x" else x for n, x in drawn(CONVOLUTION).items()}
    state = t.pop("initial_state")
    expected, after = convolution(**t, initial_state=state, activation=activation)
    y = ht.short_convolution_step(**t, state=state, activation=activation)
    assert relative_error(y, expected) < BAR and relative_error(state, after) < BAR


@pytest.mark.parametrize("eps", [0.1, 1e-6])
@pytest.mark.parametrize("activation", ["silu", "swish", "sigmoid"])
def test_norm(activation, eps):
    around(ht.rms_norm_gated, drawn(NORM), {"activation": activation, "eps": eps, "prenorm": True},
           lambda x, g, weight, residual: (norm(x + residual, g, weight, eps, activation), x + residual))


# ---- layers ----

def converted(name):
    return make(name).double()


def built(name):
    torch.set_default_dtype(torch.float64)
    try:
        return make(name)
    finally:
        torch.set_default_dtype(torch.float32)


def assigned(name):
    layer = make(name)
    layer.load_state_dict({n: x.double() for n, x in layer.state_dict().items()}, assign=True)
    return layer


@pytest.mark.parametrize("way", [converted, built, assigned], ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, way):
    layer = way(name)
    x = normal(2, 19, HIDDEN, seed=5)
    parameters = {n: p.detach().double() for n, p in layer.named_parameters()}
    g_gamma = layer._gates() if name.startswith("lightning") else None
    with torch.no_grad():
        o, expected = layer(x)[0], plain(name, parameters, x, g_gamma)
    assert o.dtype == torch.float64 and relative_error(o, expected) < BAR
