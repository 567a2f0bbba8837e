"""q, k, v and p of several types, parameters of gates in other shapes, arrays of the other byte order: every front."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from calls import FUNCTIONS, HV, POOL, K, changed_call, front, identifier, operators, parameters, plain_call
from test_nonsense import run

import headrace.jax as hj
import headrace.numpy as hn
import headrace.torch as ht
from headrace.torch.nn import KimiDeltaAttention

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
# types of q, k, v and p, and the type of the call
MIXTURES = [((F32, F32, F16, F32), F32), ((BF16, F32, F32, BF16), F32), ((F32, F32, F32, BF16), F32),
            ((F16, F16, BF16, F16), F32), ((BF16, BF16, F16, F32), F32), ((F32, F32, F64, F16), F64),
            ((F64, BF16, F32, F64), F64)]
MIXTURE_IDS = ["-".join(str(t)[6:] for t in dtypes) for dtypes, _ in MIXTURES]
TORCH = [f for f in FUNCTIONS if front(f) == "torch"]
OTHERS = [f for f in FUNCTIONS if front(f) != "torch"]
# As in flash-linear-attention, where these allocate o like v, and the others end in o.to(q.dtype).
O_AS_V = {ht.chunk_gla, ht.fused_recurrent_gated_delta_rule, ht.fused_recurrent_kda}
NUMPY = {F64: np.float64, F32: np.float32, BF16: ml_dtypes.bfloat16, F16: np.float16}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def mixed(function, op, dtypes, dtype):
    """(tensors of the types, the same values all in the type of the call, options)"""
    call = plain_call(function, op)
    rest = F64 if dtype == F64 else F32
    tensors = {n: x.to(rest) if x.is_floating_point() else x for n, x in call.tensors.items()}
    tensors |= {n: x.to(t) for (n, x), t in zip(((n, call.tensors.get(n)) for n in "qkvp"), dtypes) if x is not None}
    return tensors, {n: x.to(dtype) if n in "qkvp" else x for n, x in tensors.items()}, call.options


@pytest.mark.parametrize("dtypes, dtype", MIXTURES, ids=MIXTURE_IDS)
@pytest.mark.parametrize("function", TORCH, ids=identifier)
def test_torch(function, dtypes, dtype):
    op, = operators(function)
    tensors, alike, options = mixed(function, op, dtypes, dtype)
    mine, others = ({n: x.clone().requires_grad_() for n, x in t.items()} for t in (tensors, alike))
    o, state = function(**mine, **options)
    expected, expected_state = function(**others, **options)
    assert o.dtype == dtypes[2 if function in O_AS_V else 0] and expected.dtype == dtype
    assert torch.equal(o, expected.to(o.dtype)) and torch.equal(state, expected_state)
    d_o, d_state = torch.randn_like(o), torch.randn_like(state)
    torch.autograd.backward([o, state], [d_o, d_state])
    torch.autograd.backward([expected, expected_state], [d_o.to(dtype), d_state])
    for name, x in mine.items():
        assert x.grad.dtype == x.dtype and torch.equal(x.grad, others[name].grad.to(x.dtype)), name


@pytest.mark.parametrize("out", [False, True])
@pytest.mark.parametrize("function", [f for f in TORCH if POOL & set(parameters(f))], ids=identifier)
def test_pools_of_torch(function, out):
    op, = operators(function)
    tensors, alike, _ = mixed(function, op, (BF16, F32, F16, F32), F32)
    pools = [torch.cat([tensors["initial_state"]] * 3) for _ in range(2)]
    rows = torch.tensor([2])
    dtype = F16 if function in O_AS_V else BF16
    given = {"out": torch.zeros_like(tensors["v"], dtype=dtype)} if out else {}
    o, _ = function(**{**tensors, "initial_state": pools[0]}, ssm_state_indices=rows, **given)
    expected, _ = function(**{**alike, "initial_state": pools[1]}, ssm_state_indices=rows)
    assert o.dtype == dtype and torch.equal(o, expected.to(dtype)) and torch.equal(*pools)
    assert not out or o is given["out"]
    for wrong in (torch.zeros_like(tensors["v"], dtype=F32), torch.zeros(1, dtype=dtype)):
        with pytest.raises(ValueError, match="^out: expected dtype"):
            function(**{**tensors, "initial_state": pools[0]}, ssm_state_indices=rows, out=wrong)
    assert torch.equal(*pools)


@pytest.mark.parametrize("dtypes", [(F32, BF16, F16, F32), (BF16, BF16, BF16, BF16), (F32, F32, F32, F32)])
@pytest.mark.parametrize("function", TORCH, ids=identifier)
def test_autocast(function, dtypes):
    op, = operators(function)
    tensors, _, options = mixed(function, op, dtypes, F32)
    with torch.autocast("cpu", BF16):
        o, state = function(**tensors, **options)
        with pytest.raises(TypeError, match="^v: expected a floating dtype"):
            function(**{**tensors, "v": tensors["v"].long()}, **options)
        for name in "qkv":  # float64 stays what it is, as in torch's own operators
            assert function(**{**tensors, name: tensors[name].double()}, **options)[1].dtype == F64
    expected = function(**{n: x.to(BF16) if n in "qkvp" else x for n, x in tensors.items()}, **options)
    assert o.dtype == BF16 and torch.equal(o, expected[0]) and torch.equal(state, expected[1])


def arrays_of(tensors):
    return {n: x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype == BF16 else x.numpy()
            for n, x in tensors.items()}


@pytest.mark.parametrize("dtypes, dtype", MIXTURES, ids=MIXTURE_IDS)
@pytest.mark.parametrize("function", OTHERS, ids=identifier)
def test_jax_and_numpy(function, dtypes, dtype):
    for op in operators(function):
        tensors, alike, options = mixed(function, op, dtypes, dtype)
        results = []
        for t in (arrays_of(tensors), arrays_of(alike)):
            if function in (hn.step, hj.step):
                t["initial_state"] = t["initial_state"].copy()
            if function is hn.backward:
                t["d_o"] = np.ones(t["v"].shape, t["q"].dtype)
            results.append(run(function, op, t, options))
        leaves = [jax.tree_util.tree_leaves(x) for x in results]
        for actual, expected in zip(*leaves, strict=True):
            assert np.array_equal(np.asarray(actual), np.asarray(expected).astype(actual.dtype))
        if function is not hn.backward:
            assert leaves[0][0].dtype == NUMPY[dtypes[0]]
            continue
        for name, gradient in results[0].items():
            assert gradient.dtype == arrays_of(tensors)[name[2:]].dtype


@pytest.mark.parametrize("function", [f for f in OTHERS if front(f) == "jax" and f is not hj.step], ids=identifier)
def test_gradients_of_jax(function):
    op = operators(function)[0]
    tensors, alike, options = mixed(function, op, (BF16, F32, F16, F32), F32)
    place = (op,) if function is hj.attention else ()

    def gradients(arrays):
        return jax.grad(lambda t: function(*place, **t, **options)[0].astype(jnp.float32).sum())(
            {n: jnp.asarray(x) for n, x in arrays.items()})

    expected = gradients(arrays_of(alike))
    for name, x in gradients(arrays_of(tensors)).items():
        assert x.dtype == arrays_of(tensors)[name].dtype
        if name not in "qkvp":  # through o, which is rounded to bfloat16, and of which the gradient is one in any type
            assert np.array_equal(x, expected[name]), name
        else:
            assert np.array_equal(x, expected[name].astype(x.dtype)), name


def test_other_types_are_refused():
    for name in "qkv":
        for dtype in (torch.float8_e4m3fn, torch.complex64, torch.int32):
            t = plain_call(ht.chunk_comba, "comba").tensors
            with pytest.raises(TypeError, match=f"^{name}: expected a floating dtype"):
                ht.chunk_comba(**{**t, name: t[name].float().to(dtype)})
        arrays = arrays_of(plain_call(hn.forward, "gla").tensors)
        with pytest.raises(TypeError, match=f"^{name}: expected "):
            hj.attention("gla", **{**arrays, name: arrays[name].astype(ml_dtypes.float8_e4m3fn)})


@pytest.mark.parametrize("op", ["simple_gla", "kda"])
def test_compile(op):
    function = getattr(ht, f"chunk_{op}")
    tensors, _, options = mixed(function, op, (F32, BF16, F16, F32), F32)
    options |= {"use_gate_in_kernel": True}
    tensors |= {"A_log": torch.randn(1, 1, HV, 1), "dt_bias": torch.randn(1, HV, *([K] if op == "kda" else []))}
    eager, compiled = ({n: x.clone().requires_grad_() for n, x in tensors.items()} for _ in range(2))
    for t, f in ((eager, function), (compiled, torch.compile(function, fullgraph=True, backend="aot_eager"))):
        o, state = f(**t, **options)
        (o.float().sum() + state.sum()).backward()
    for name, x in eager.items():
        assert torch.equal(x.grad, compiled[name].grad) and x.grad.shape == x.shape, name


# ---- parameters of gates ----

def shapes(name, is_channels):
    one = [(HV,), (1, 1, HV, 1), (HV, 1), (1, HV), (2, HV // 2), (1, 1, 1, 1, HV)]
    if name == "A_log" or not is_channels:
        return one
    return [(HV * K,), (HV, K), (1, 1, HV, K), (HV, 1, K), (1, HV * K), (2, HV // 2, K), (HV, 2, K // 2)]


@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
@pytest.mark.parametrize("function", [f for f in FUNCTIONS if "A_log" in parameters(f)], ids=identifier)
def test_shapes_of_gate_parameters(function, name):
    """The same bits, and gradients in the shape that was given."""
    for op in operators(function):
        call = changed_call(function, op, "dt_bias")
        gates = [n for n in ("g", "gk") if n in call.tensors]
        is_channels = call.tensors[gates[0]].dim() == 4
        results = []
        for shape in shapes(name, is_channels):
            tensors = {**call.tensors, name: call.tensors[name].reshape(shape)}
            if front(function) == "torch":
                tensors = {n: x.clone().requires_grad_() for n, x in tensors.items()}
                o, state = function(**tensors, **call.options)
                (o.sum() + state.sum()).backward()
                gradient = tensors[name].grad
            elif function is hn.backward:
                o = state = torch.zeros(1)
                gradient = torch.from_numpy(run(function, op, tensors, call.options)[f"d_{name}"])
            elif front(function) == "jax" and function is not hj.step:
                arrays = {n: jnp.asarray(x.numpy()) for n, x in tensors.items()}
                keyword = {"op": op} if function is hj.attention else {}
                options = call.options
                if keyword:
                    options = {"gate_form": "softplus", "output_final_state": True}
                (o, state), pull = jax.vjp(lambda x: function(**keyword, **{**arrays, name: x}, **options),
                                           arrays[name])
                gradient = torch.from_numpy(np.array(pull((jnp.ones_like(o), jnp.ones_like(state)))[0]))
                o, state = (torch.from_numpy(np.array(x)) for x in (o, state))
            else:
                tensors["initial_state"] = tensors["initial_state"].clone()
                outputs = jax.tree_util.tree_leaves(run(function, op, tensors, call.options))
                o, state = (torch.from_numpy(np.array(x)) for x in (outputs[0], outputs[-1]))
                gradient = tensors[name]
            assert gradient.shape == shape
            results.append((o, state, gradient.reshape(-1)))
        for other in results[1:]:
            assert all(torch.equal(x, y) for x, y in zip(results[0], other)), (op, name)


def test_checkpoints_with_rates_in_another_shape():
    layer, other = (KimiDeltaAttention(hidden_size=64, num_heads=4, head_dim=16) for _ in range(2))
    weights = layer.state_dict()
    given = {**weights, "A_log": weights["A_log"].reshape(1, 1, 4, 1)}
    other.load_state_dict(given)
    assert given["A_log"].shape == (1, 1, 4, 1) and torch.equal(other.A_log, layer.A_log)
    with pytest.raises(RuntimeError, match="size mismatch for A_log"):
        other.load_state_dict({**weights, "A_log": torch.zeros(1, 1, 5, 1)})


# ---- the other byte order ----

@pytest.mark.parametrize("function", OTHERS, ids=identifier)
def test_byte_order(function):
    for op in operators(function):
        call = changed_call(function, op, "cu_seqlens")
        results = []
        for order in "<>":
            t = {n: x.astype(x.dtype.newbyteorder(order)) for n, x in arrays_of(call.tensors).items()}
            assert all(x.dtype.isnative == (order == "<") for x in t.values())  # of a little-endian machine
            if function in (hn.step, hj.step):
                t["initial_state"] = arrays_of(call.tensors)["initial_state"].copy()
            if function is hn.backward:
                t |= {"d_o": np.ones(t["v"].shape, t["v"].dtype), "d_final_state": t["initial_state"]}
            results.append(jax.tree_util.tree_leaves(run(function, op, t, call.options)))
        for actual, expected in zip(*results, strict=True):
            assert actual.dtype.isnative and np.array_equal(actual, expected)


def test_a_pool_has_the_byte_order_of_the_machine():
    arrays = arrays_of(plain_call(hn.step, "gla").tensors)
    pool = arrays.pop("initial_state").astype(">f8")
    before = pool.copy()
    with pytest.raises(ValueError, match="^pool: expected the byte order of this machine, got >f8$"):
        hn.step("gla", **arrays, pool=pool)
    assert np.array_equal(pool, before)
    o = hn.step("gla", **arrays, pool=pool.astype(float), indices=np.array([0], ">i8"))
    assert np.array_equal(o, hn.step("gla", **arrays, pool=pool.astype(float)))


def test_arrays_of_derived_classes_are_arrays(tmp_path):
    arrays = arrays_of(plain_call(hn.forward, "retention").tensors)
    memory = np.memmap(tmp_path / "v", arrays["v"].dtype, "w+", shape=arrays["v"].shape)
    memory[...] = arrays["v"]
    gates, pool = -np.ones(HV), arrays.pop("initial_state")
    states = np.memmap(tmp_path / "states", pool.dtype, "w+", shape=pool.shape)
    expected, _ = hn.forward("retention", **arrays, g_gamma=gates)
    o, _ = hn.forward("retention", **{**arrays, "v": memory}, g_gamma=gates)
    assert type(o) is np.ndarray and np.array_equal(o, expected)
    states[...] = pool
    o, expected = (hn.step("retention", **arrays, g_gamma=gates, pool=x) for x in (states, pool))
    assert np.array_equal(o, expected) and np.array_equal(states, pool)
    gla = changed_call(hn.forward, "simple_gla", "A_log")
    t = arrays_of(gla.tensors)
    o, _ = hn.forward("simple_gla", **{**t, "A_log": np.asmatrix(t["A_log"])}, gate_form="softplus")
    assert np.array_equal(o, hn.forward("simple_gla", **t, gate_form="softplus")[0])
