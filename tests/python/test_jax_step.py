"""headrace.jax.step: a token at a time, in lax.scan, in place of a donated state, mapped, in every layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from conftest import OPERATORS, relative_error
from test_jax import arrays_of, float64, pair, to_torch  # noqa: F401

import headrace.jax as hj


@pytest.mark.parametrize("op", OPERATORS)
def test_steps_in_a_scan_are_the_forward(problem, op):
    """The state starts as given, goes from token to token by lax.scan, and ends as the final state."""
    arrays = arrays_of(problem(op, T=9, HV=4, state=True))
    constant = {"g_gamma": arrays["g_gamma"]} if "g_gamma" in arrays else {}
    tokens = {n: jnp.moveaxis(x, 1, 0)[:, :, None] for n, x in arrays.items() if n not in ("g_gamma", "initial_state")}

    @jax.jit
    def decode(state):
        return jax.lax.scan(lambda state, token: hj.step(op, **token, **constant, states=state)[::-1], state, tokens)

    state, o = decode(arrays["initial_state"])
    expected, final_state = pair(op)(arrays)
    np.testing.assert_allclose(jnp.moveaxis(o[:, :, 0], 0, 1), expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(state, final_state, rtol=0, atol=1e-12)
    o, state = hj.step(op, states=arrays.pop("initial_state"), **arrays)  # all tokens in one step
    np.testing.assert_allclose(o, expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(state, final_state, rtol=0, atol=1e-12)


def one_token(problem, **sizes):
    arrays = arrays_of(problem("kda", T=1, dtype=torch.float32, state=True, **sizes))
    return {n: x for n, x in arrays.items() if n != "initial_state"}, arrays["initial_state"]


def test_a_step_updates_a_donated_state_in_place(problem):
    tokens, state = one_token(problem)
    function = lambda tokens, state: hj.step("kda", **tokens, states=state)  # noqa: E731
    kept = np.array(state)
    expected_o, expected = jax.jit(function)(tokens, state)
    np.testing.assert_array_equal(state, kept)  # not donated: stays as it was
    place = state.unsafe_buffer_pointer()
    o, new = jax.jit(function, donate_argnums=1)(tokens, state)
    assert state.is_deleted() and new.unsafe_buffer_pointer() == place
    np.testing.assert_array_equal(new, expected)
    np.testing.assert_array_equal(o, expected_o)


def test_step_maps_turns_and_rounds(problem):
    tokens, state = one_token(problem)
    o, new = hj.step("kda", **tokens, states=state)
    turned = hj.step("kda", **tokens, states=state.swapaxes(-1, -2), state_v_first=True)
    np.testing.assert_array_equal(turned[0], o)
    np.testing.assert_array_equal(turned[1].swapaxes(-1, -2), new)
    states = jnp.stack([state, 2 * state, -state])
    each = jax.vmap(lambda state: hj.step("kda", **tokens, states=state))(states)
    for i, single in enumerate(states):
        for mapped, expected in zip(each, hj.step("kda", **tokens, states=single)):
            np.testing.assert_allclose(mapped[i], expected, rtol=0, atol=1e-6)
    rounded = hj.step("kda", **tokens, states=state.astype(jnp.bfloat16))[1]
    assert rounded.dtype == jnp.bfloat16
    assert relative_error(to_torch(rounded.astype(jnp.float32)), to_torch(new)) < 2**-7  # two roundings of 2^-9


def test_errors_of_a_step(problem):
    tokens, state = one_token(problem)
    for wrong, error, message in ((state[:1], ValueError, "states: "), (state[0], ValueError, "states: "),
                                  (state.astype(int), TypeError, "states: expected a floating dtype"),
                                  (state.astype(jnp.float64), ValueError, "states: ")):
        with pytest.raises(error, match=message):
            jax.jit(lambda state: hj.step("kda", **tokens, states=state))(wrong)
    with pytest.raises(Exception, match="cannot be differentiated"):
        jax.grad(lambda state: hj.step("kda", **tokens, states=state)[0].sum())(state)
