"""headrace.jax against the recurrence: values and gradients in every type, jit, vmap, shard_map and errors."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from conftest import BARS, OPERATORS, relative_error
from recurrence import recurrence

import headrace.jax as hj

RAGGED = [0, 0, 16, 17, 37]
SHORT = [0, 0, 16, 17, 21]  # the oracle takes most of the time of the largest test


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def to_jax(x):
    return jnp.asarray(x.float().numpy()).astype(jnp.bfloat16) if x.dtype == torch.bfloat16 else jnp.asarray(x.numpy())


def to_torch(x):
    return torch.from_numpy(np.array(x).astype(np.float64))


def arrays_of(tensors):
    return {name: to_jax(x) for name, x in tensors.items()}


def pair(op, options=None):
    """(o, final state) as a function of tensors by name."""
    return lambda tensors: hj.attention(op, **tensors, output_final_state=True, **(options or {}))


def floats(tensors):
    return {name: x for name, x in tensors.items() if name != "cu_seqlens"}


def gradients_of(function, arrays, weights, jit=True):
    """Gradients of sum(o d_o) + sum(final_state d_final_state) by all floating inputs."""
    def loss(floating):
        outputs = function({**arrays, **floating})
        return sum(jnp.sum(x.astype(weight.dtype) * weight) for x, weight in zip(outputs, weights))

    gradient = jax.grad(loss)
    return (jax.jit(gradient) if jit else gradient)(floats(arrays))


def weights_of(outputs):
    generator = np.random.default_rng(1)
    return [jnp.asarray(generator.standard_normal(x.shape), x.dtype).astype(jnp.float64) for x in outputs]


def compare(op, tensors, dtype, options=None, oracle_options=None):
    arrays = arrays_of(tensors)
    function = pair(op, options)
    o, state = jax.jit(function)(arrays)
    assert o.dtype == arrays["q"].dtype and state.dtype == (jnp.float64 if dtype == torch.float64 else jnp.float32)
    exact = {n: x.double().requires_grad_() if x.is_floating_point() else x for n, x in tensors.items()}
    expected = recurrence(op, **exact, **(oracle_options or {}))
    bars = BARS[dtype]
    assert relative_error(to_torch(o), expected[0].detach()) < bars[0]
    assert relative_error(to_torch(state), expected[1].detach()) < bars[0]
    weights = weights_of((o, state))
    torch.autograd.backward(expected, [to_torch(x) for x in weights])
    for name, gradient in gradients_of(function, arrays, weights).items():
        assert gradient.dtype == arrays[name].dtype and gradient.shape == arrays[name].shape
        bar = bars[1] if name in ("q", "k", "v", "p", "initial_state") else bars[2]
        assert relative_error(to_torch(gradient), exact[name].grad) < bar, name


@pytest.mark.parametrize("cu_seqlens", [None, SHORT], ids=["dense", "ragged"])
@pytest.mark.parametrize("dtype", list(BARS), ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("op", OPERATORS)
def test_values_and_gradients(problem, op, dtype, cu_seqlens):
    sizes = {"K": 64, "V": 64} if dtype in (torch.bfloat16, torch.float16) else {}
    tensors = problem(op, B=1 if cu_seqlens else 2, T=21, HV=4, dtype=dtype, cu_seqlens=cu_seqlens, state=True, **sizes)
    compare(op, tensors, dtype)


@pytest.mark.parametrize("op, lower_bound", [("gated_delta_rule", None), ("kda", None), ("kda", -5.0)])
def test_gates_beta_and_norms_inside(problem, op, lower_bound):
    tensors = problem(op, state=True)
    tensors["A_log"] = torch.randn(2, dtype=torch.float64)
    tensors["dt_bias"] = torch.randn(2 * 16 if op == "kda" else 2, dtype=torch.float64)
    tensors["g"] = torch.randn_like(tensors["g"])
    tensors["beta"] = torch.randn_like(tensors["beta"])
    form = {"lower_bound": lower_bound, "qk_l2norm": True, "scale": 0.5, "reverse": True}
    gate = "softplus" if lower_bound is None else "bounded"
    compare(op, tensors, torch.float64, {**form, "gate_form": gate, "beta_form": "two_sigmoid"},
            {**form, "gate": gate, "beta_is": "two_sigmoid"})


def test_value_gates_and_element_wise_beta(problem):
    tensors = problem("kda", state=True)
    tensors["gv"] = -torch.rand_like(tensors["v"])
    tensors["beta"] = torch.rand_like(tensors["v"])
    compare("kda", tensors, torch.float64)


def test_named_functions(problem):
    for op in ("gla", "simple_gla", "delta_rule", "gated_delta_rule", "comba", "kda"):
        arrays = arrays_of(problem(op))
        o, state = getattr(hj, f"chunk_{op}")(**arrays)
        assert state is None and jnp.array_equal(o, hj.attention(op, **arrays)[0])
    t = problem("linear_attention", H=4)
    heads = torch.arange(4, dtype=torch.float64)
    o, _ = hj.chunk_retention(**arrays_of(t))
    assert relative_error(to_torch(o),
                          recurrence("retention", **t, g_gamma=torch.log1p(-(2.0 ** (-5 - heads))))[0]) < 1e-11
    o, _ = hj.chunk_lightning_attn(**arrays_of(t), layer_idx=3, num_layers=20)
    assert relative_error(to_torch(o), recurrence("retention", **t, g_gamma=-8 / 4 * (1 - 3 / 20) * heads)[0]) < 1e-11


def test_recurrent_functions(problem):
    """The recurrent names compute what the chunk names do, and what only they take arrives."""
    same = np.testing.assert_array_equal
    for op in ("simple_gla", "delta_rule", "gated_delta_rule", "comba", "kda"):
        arrays = arrays_of(problem(op, state=True))
        for mine, theirs in zip(getattr(hj, f"fused_recurrent_{op}")(**arrays, output_final_state=True),
                                pair(op)(arrays)):
            same(mine, theirs)
    assert hj.fused_recurrent_gdn is hj.fused_recurrent_gated_delta_rule
    t = arrays_of(problem("kda"))
    q, k, v, g, beta = (t[name] for name in ("q", "k", "v", "g", "beta"))
    gv, heads = -jnp.abs(v), -jnp.abs(beta)
    same(hj.fused_recurrent_gla(q, k, v, g, gv, reverse=True)[0],
         hj.attention("gla", q, k, v, g=g, gv=gv, reverse=True)[0])
    same(hj.fused_recurrent_gated_delta_rule(q, k, v, heads, g, gv, beta)[0],
         hj.attention("kda", q, k, v, g=g + heads[..., None], gv=gv, beta=beta)[0])
    same(hj.fused_recurrent_retention(q, k, v)[0], hj.chunk_retention(q, k, v)[0])
    same(hj.fused_recurrent_lightning_attn(q, k, v, 3, 20)[0], hj.chunk_lightning_attn(q, k, v, 3, 20)[0])
    p = -k
    same(hj.fused_recurrent_comba(q, k, p, v, heads, beta)[0], hj.chunk_comba(q, k, v, p, heads, beta)[0])
    given = {"A_log": jnp.zeros(2), "dt_bias": jnp.ones(32), "use_gate_in_kernel": True, "lower_bound": -4.0}
    same(hj.fused_recurrent_kda(q, k, v, g, beta, **given)[0], hj.chunk_kda(q, k, v, g, beta, **given)[0])
    with pytest.raises(ValueError, match="gk: expected without g"):
        hj.fused_recurrent_gated_delta_rule(q, k, v, heads, g, use_gate_in_kernel=True, A_log=jnp.zeros(2))


def test_gate_in_kernel_of_the_named_functions(problem):
    arrays = arrays_of(problem("kda"))
    given = {**arrays, "A_log": jnp.zeros(2), "dt_bias": jnp.ones(2)}
    o, _ = hj.chunk_kda(**given, use_gate_in_kernel=True, lower_bound=-4.0)
    expected, _ = hj.attention("kda", **given, gate_form="bounded", lower_bound=-4.0)
    assert jnp.array_equal(o, expected)
    assert jnp.array_equal(hj.chunk_kda(**given)[0], hj.chunk_kda(**arrays)[0])  # A_log of a gate computed outside
    given = {**arrays_of(problem("comba")), "A_log": jnp.zeros(2), "dt_bias": jnp.ones(2)}
    expected, _ = hj.attention("comba", **given, gate_form="softplus", beta_form="two_sigmoid")
    for function in (hj.chunk_comba, hj.fused_recurrent_comba):
        o, _ = function(**given, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)
        assert jnp.array_equal(o, expected)


def test_state_v_first(problem):
    arrays = arrays_of(problem("gated_delta_rule", state=True))
    turned = {**arrays, "initial_state": arrays["initial_state"].swapaxes(-1, -2)}
    o, state = pair("gated_delta_rule")(arrays)
    o_turned, state_turned = pair("gated_delta_rule", {"state_v_first": True})(turned)
    assert jnp.array_equal(o, o_turned) and jnp.array_equal(state, state_turned.swapaxes(-1, -2))
    weights = weights_of((o, state))
    expected = gradients_of(pair("gated_delta_rule"), arrays, weights)
    actual = gradients_of(pair("gated_delta_rule", {"state_v_first": True}), turned,
                          [weights[0], weights[1].swapaxes(-1, -2)])
    actual["initial_state"] = actual["initial_state"].swapaxes(-1, -2)
    for name in expected:
        assert jnp.array_equal(actual[name], expected[name]), name


def test_one_output_and_one_input_at_a_time(problem):
    arrays = arrays_of(problem("kda", state=True))
    weights = weights_of(pair("kda")(arrays))
    whole = gradients_of(pair("kda"), arrays, weights, jit=False)
    parts = [jax.grad(lambda v: jnp.sum(pair("kda")({**arrays, "v": v})[i] * weights[i]))(arrays["v"]) for i in (0, 1)]
    np.testing.assert_allclose(parts[0] + parts[1], whole["v"], atol=1e-12)
    gradient = jax.jit(jax.grad(lambda v: hj.attention("kda", **{**arrays, "v": v})[0].sum()))
    assert "wanted = 4 : i64" in gradient.lower(arrays["v"]).as_text()  # bit 2: nothing is computed but d_v


@pytest.mark.parametrize("mapped",
                         [("q", "v"), ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"), ("A_log",)],
                         ids=lambda names: "+".join(names))
@pytest.mark.parametrize("cu_seqlens", [None, RAGGED], ids=["dense", "ragged"])
def test_vmap(problem, mapped, cu_seqlens):
    """Mapped by vmap or by a loop: the same outputs, per-example gradients and summed gradients."""
    size, op, options = 3, "kda", {"gate_form": "softplus"}
    problems = []
    for seed in range(size):
        tensors = problem(op, B=1 if cu_seqlens else 2, T=37, HV=4, state=True, seed=seed, cu_seqlens=cu_seqlens)
        tensors["A_log"] = torch.linspace(-1, seed, 4, dtype=torch.float64)
        tensors["dt_bias"] = torch.linspace(-seed, 1, 4 * 16, dtype=torch.float64)
        problems.append(arrays_of(tensors))
    common = problems[0]
    stacked = {name: jnp.stack([x[name] for x in problems]) if name in mapped else common[name] for name in common}
    axes = {name: 0 if name in mapped else None for name in common}
    rows = [{name: x[name] if name in mapped else common[name] for name in common} for x in problems]
    function = pair(op, options)
    outputs = jax.jit(jax.vmap(function, (axes,)))(stacked)
    expected = [function(row) for row in rows]
    for i in range(2):
        np.testing.assert_allclose(outputs[i], jnp.stack([x[i] for x in expected]), rtol=0, atol=1e-12)
    weights = weights_of(expected[0])
    expected = [gradients_of(function, row, weights) for row in rows]
    each = jax.vmap(lambda row: gradients_of(function, row, weights), (axes,))(stacked)
    both = gradients_of(lambda x: jax.vmap(function, (axes,))(x), stacked, [jnp.stack([w] * size) for w in weights])
    for name in floats(common):
        gradients = jnp.stack([x[name] for x in expected])
        np.testing.assert_allclose(each[name], gradients, rtol=0, atol=1e-11, err_msg=name)
        np.testing.assert_allclose(both[name], gradients if name in mapped else gradients.sum(0), rtol=0, atol=1e-11,
                                   err_msg=name)


def test_vmap_over_offsets_and_twice(problem):
    arrays = arrays_of(problem("gated_delta_rule", B=1, cu_seqlens=RAGGED, state=True))
    function = pair("gated_delta_rule")
    offsets = jnp.array([RAGGED, [0, 5, 5, 30, 37]])
    o, state = jax.vmap(lambda cu_seqlens: function({**arrays, "cu_seqlens": cu_seqlens}))(offsets)
    for i in range(2):
        expected = function({**arrays, "cu_seqlens": offsets[i]})
        assert jnp.array_equal(o[i], expected[0]) and jnp.array_equal(state[i], expected[1])
    values = jnp.stack([arrays["v"] * i for i in range(6)]).reshape(2, 3, *arrays["v"].shape)
    o, _ = jax.vmap(jax.vmap(lambda v: function({**arrays, "v": v})))(values)
    for i in range(6):
        np.testing.assert_allclose(o[i // 3, i % 3], function({**arrays, "v": arrays["v"] * i})[0], rtol=0, atol=1e-12)


SHARDED = """
import sys
import jax, numpy as np
from jax import numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P
import headrace.jax as hj
assert len(jax.devices()) == 2
mesh = Mesh(jax.devices(), ("devices",))
draw = np.random.default_rng(0)
over_heads = sys.argv[1] == "heads"
B, T, H, HV, K, V = 1 if over_heads else 2, 37, 2, 4, 16, 24
arrays = {"q": draw.standard_normal((B, T, H, K)), "k": draw.standard_normal((B, T, H, K)) / 4,
          "v": draw.standard_normal((B, T, HV, V)), "g": -draw.random((B, T, HV)), "g_gamma": -draw.random(HV),
          "beta": draw.random((B, T, HV)), "initial_state": draw.standard_normal((2, HV, K, V))}
arrays = {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}
tokens, states, gammas = P("devices"), P("devices"), P()
if over_heads:
    tokens, states, gammas = P(None, None, "devices"), P(None, "devices"), P("devices")
specs = {name: tokens for name in ("q", "k", "v", "g", "beta")} | {"g_gamma": gammas, "initial_state": states}
offsets = jnp.array([0, 20, 37]) if over_heads else None

def whole(arrays, offsets):
    return hj.attention("gated_delta_rule", **arrays, cu_seqlens=offsets, output_final_state=True)

sharded = jax.shard_map(whole, mesh=mesh, in_specs=(specs, P()), out_specs=(tokens, states))

def gradients(function):
    def loss(arrays):
        o, state = function(arrays, offsets)
        return jnp.sum(o * o) + jnp.sum(state)
    return jax.jit(jax.grad(loss))(arrays)

for actual, expected in zip(jax.jit(sharded)(arrays, offsets), whole(arrays, offsets)):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)
expected = gradients(whole)
for name, actual in gradients(sharded).items():
    np.testing.assert_allclose(actual, expected[name], rtol=1e-5, atol=1e-5, err_msg=name)
"""


@pytest.mark.parametrize("axis", ["heads", "batch"])
def test_shard_map(axis):
    """Two devices with half of the heads each (ragged), or half of the batch each and the same g_gamma."""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    result = subprocess.run([sys.executable, "-c", SHARDED, axis], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name, change, error, message", [
    ("q", lambda x: x.astype(int), TypeError, "q: expected a floating dtype"),
    ("k", lambda x: x.astype(int), TypeError, "k: expected a floating dtype"),
    ("k", lambda x: x[..., :8], ValueError, "k: "),
    ("v", lambda x: x[:, :, :1], ValueError, "v: "),
    ("g", lambda x: x[:, :5], ValueError, "g: "),
    ("beta", lambda x: x[..., :1], ValueError, "beta: "),
    ("beta", lambda x: x[0, 0, 0], ValueError, "beta: expected at least one dimension"),
    ("q", lambda x: x[0], ValueError, "q: expected 4 dimensions"),
    ("initial_state", lambda x: jnp.zeros((3, 2, 16, 24)), ValueError, "initial_state: "),
    ("cu_seqlens", lambda x: jnp.array([0, 37]), ValueError, "q: expected batch 1 with cu_seqlens, got 2"),
    ("op", lambda x: "mamba", ValueError, "op: expected the name of an operator, got 'mamba'"),
    ("chunk", lambda x: 48, ValueError, "chunk"),
    ("gate_form", lambda x: "exp", ValueError, "gate_form: expected"),
    ("gate_form", lambda x: "softplus", ValueError, "A_log: "),
])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_errors_while_tracing(problem, name, change, error, message, jit):
    arguments = {"op": "gated_delta_rule", **arrays_of(problem("gated_delta_rule", dtype=torch.float32))}
    arguments[name] = change(arguments.get(name))
    fixed = {n: arguments.pop(n) for n in ("op", "chunk", "gate_form") if n in arguments}
    function = lambda arrays: hj.attention(**fixed, **arrays)  # noqa: E731
    with pytest.raises(error, match=message):
        (jax.jit(function) if jit else function)(arguments)


def test_errors_in_values(problem):
    arrays = arrays_of(problem("kda", B=1, dtype=torch.float32))
    function = jax.jit(lambda arrays: hj.attention("kda", **arrays)[0])
    for gates in (arrays["g"] * jnp.nan, 1 - arrays["g"]):
        with pytest.raises((ValueError, RuntimeError), match="g: "):
            function({**arrays, "g": gates.astype(jnp.float32)}).block_until_ready()
    offsets = jnp.array([0, 20, 10, 37])
    with pytest.raises(ValueError, match="cu_seqlens"):
        hj.attention("kda", **arrays, cu_seqlens=offsets)
    with pytest.raises((ValueError, RuntimeError), match="cu_seqlens"):
        function({**arrays, "cu_seqlens": offsets}).block_until_ready()


def test_second_derivatives_are_refused(problem):
    arrays = arrays_of(problem("kda"))
    loss = lambda v: jnp.sum(hj.attention("kda", **{**arrays, "v": v})[0] ** 2)  # noqa: E731
    with pytest.raises(Exception, match="cannot be differentiated"):
        jax.grad(lambda v: jax.grad(loss)(v).sum())(arrays["v"])


def test_scan_and_checkpoint(problem):
    """Three spans of a sequence, the state carried from one to the next: the whole sequence."""
    arrays = arrays_of(problem("kda", T=36, state=True))
    spans = {n: jnp.stack(jnp.split(x, 3, axis=1)) for n, x in arrays.items() if n != "initial_state"}

    @jax.checkpoint
    def span(state, tensors):
        return pair("kda")({**tensors, "initial_state": state})[::-1]

    def loss(state):
        last, o = jax.lax.scan(span, state, spans)
        return jnp.sum(o ** 2) + jnp.sum(last)

    def whole(state):
        o, last = pair("kda")({**arrays, "initial_state": state})
        return jnp.sum(o ** 2) + jnp.sum(last)

    actual, expected = (jax.jit(jax.grad(f))(arrays["initial_state"]) for f in (loss, whole))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-10)


def test_no_tokens_pass_the_state_through(problem):
    arrays = arrays_of(problem("kda", T=0, dtype=torch.float32, state=True))
    o, state = pair("kda")(arrays)
    assert o.shape == (2, 0, 2, 24) and jnp.array_equal(state, arrays["initial_state"])
    gradients = gradients_of(pair("kda"), arrays, [jnp.ones(o.shape), jnp.ones(state.shape)])
    assert jnp.array_equal(gradients["initial_state"], jnp.ones(state.shape))
