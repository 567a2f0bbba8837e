"""Wrong arguments of the Python functions: each is refused by a ValueError or a TypeError that names it."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import headrace.jax as hj
import headrace.numpy as hn
import headrace.torch as ht

# What each of the functions below is called with, rightly; B, T, H, HV, K, V = 1, 6, 2, 4, 16, 8.
SIZES = {"q": (1, 6, 2, 16), "k": (1, 6, 2, 16), "v": (1, 6, 4, 8), "p": (1, 6, 2, 16), "g": (1, 6, 4),
         "beta": (1, 6, 4), "A_log": (4,), "dt_bias": (4,), "g_gamma": (4,), "initial_state": (2, 4, 16, 8)}
NAMES = {
    ht.chunk_comba: ("q", "k", "v", "p", "g", "beta", "A_log", "dt_bias", "initial_state"),
    ht.chunk_gated_delta_rule: ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"),
    ht.chunk_simple_gla: ("q", "k", "v", "g", "g_gamma", "initial_state"),
}


def arguments(function, **change):
    """Right arguments of `function`, two sequences of its 6 tokens, with the change."""
    tensors = {name: torch.zeros(SIZES[name]) for name in NAMES[function]}
    inside = {"use_gate_in_kernel": True} if "A_log" in tensors else {}
    return {**tensors, "cu_seqlens": torch.tensor([0, 2, 6]), "output_final_state": True, **inside, **change}


def step_arguments(**change):
    """Right arguments of a recurrent function on a pool of 5 states."""
    tensors = {name: torch.zeros(SIZES[name])[:, :1] for name in ("q", "k", "v", "g", "beta")}
    return {**tensors, "initial_state": torch.zeros(5, 4, 16, 8), "ssm_state_indices": torch.tensor([[3, 1]]),
            "num_accepted_tokens": torch.tensor([1]), "out": torch.zeros(1, 1, 4, 8), **change}


CONVOLUTION = {"x": torch.zeros(1, 6, 8), "weight": torch.zeros(8, 4), "bias": torch.zeros(8),
               "initial_state": torch.zeros(2, 8, 4), "cu_seqlens": torch.tensor([0, 2, 6]), "output_final_state": True}
CONVOLUTION_STEP = {"x": torch.zeros(2, 8), "state": torch.zeros(5, 8, 4), "weight": torch.zeros(8, 4),
                    "bias": torch.zeros(8), "indices": torch.tensor([3, 1])}
NORM = {"x": torch.zeros(3, 8), "g": torch.zeros(3, 8), "residual": torch.zeros(3, 8), "weight": torch.zeros(8)}
CALLS = {"step": (ht.fused_recurrent_gated_delta_rule, {**step_arguments(), "ssm_state_indices": torch.tensor([[3]])}),
         "convolution": (ht.short_convolution, CONVOLUTION),
         "convolution step": (ht.short_convolution_step, CONVOLUTION_STEP), "norm": (ht.rms_norm_gated, NORM)}
CALLS |= {function.__name__: (function, arguments(function)) for function in NAMES}
TENSORS = [(call, name) for call, (_, given) in CALLS.items() for name in given if torch.is_tensor(given[name])]


@pytest.mark.parametrize("call", CALLS)
def test_right_arguments_are_served(call):
    """Without this the tests below could pass for another reason than the one argument that they change."""
    function, given = CALLS[call]
    function(**given)


@pytest.mark.parametrize("call, name", TENSORS)
def test_every_tensor_is_one_and_dense_and_where_the_first_is(call, name):
    function, given = CALLS[call]
    first = next(iter(given))
    if name != first:
        with pytest.raises(ValueError, match=f"^{name}: expected device cpu as {first}, got meta$"):
            function(**{**given, name: given[name].to("meta")})
    with pytest.raises(TypeError, match=f"^{name}: expected a dense tensor, got one of layout torch.sparse_coo$"):
        function(**{**given, name: given[name].to_sparse()})
    for other in (given[name].numpy(), given[name].tolist(), "text", 1.0):
        with pytest.raises(TypeError, match=f"^{name}: expected a torch.Tensor, got {type(other).__name__}$"):
            function(**{**given, name: other})


@pytest.mark.parametrize("call", CALLS)
def test_required_tensors_are_not_none(call):
    function, given = CALLS[call]
    required = {"convolution": ("x", "weight"), "convolution step": ("x", "state", "weight"), "norm": ("x",)}
    for name in required.get(call, ("q", "k", "v")):
        with pytest.raises(TypeError, match=f"^{name}: expected a torch.Tensor, got NoneType$"):
            function(**{**given, name: None})


@pytest.mark.parametrize("call", CALLS)
def test_tensors_without_data_give_shapes(call):
    """All tensors on `meta` are as right as all on the CPU."""
    function, given = CALLS[call]
    result = function(**{name: x.to("meta") if torch.is_tensor(x) else x for name, x in given.items()})
    for x, expected in zip(torch.utils._pytree.tree_leaves(result), torch.utils._pytree.tree_leaves(function(**given))):
        assert x.device.type == "meta" and x.shape == expected.shape and x.dtype == expected.dtype


def test_functions_with_gates_of_their_own():
    t = {name: torch.zeros(SIZES[name]) for name in "qkv"}
    for function, more in ((ht.chunk_retention, {}), (ht.fused_recurrent_retention, {}),
                           (ht.chunk_lightning_attn, {"layer_idx": 0, "num_layers": 4})):
        with pytest.raises(TypeError, match="^v: expected a torch.Tensor, got NoneType$"):
            function(**{**t, "v": None}, **more)
        with pytest.raises(ValueError, match=r"^v: expected 4 dimensions \[B, T, H, V\], got shape \[6, 4, 8\]$"):
            function(**{**t, "v": t["v"][0]}, **more)
    for lightning, arrays in ((ht.chunk_lightning_attn, t), (hj.chunk_lightning_attn, jax_arrays("q", "k", "v"))):
        with pytest.raises(ValueError, match="^num_layers: expected a positive number, got 0$"):
            lightning(**arrays, layer_idx=0, num_layers=0)
        with pytest.raises(TypeError, match="^layer_idx: expected a number, got 'first'$"):
            lightning(**arrays, layer_idx="first", num_layers=4)


def test_gates_of_heads_and_channels_fit():
    t = {name: torch.zeros(SIZES[name]) for name in ("q", "k", "v", "beta")}
    gk = torch.zeros(1, 6, 4, 16)
    with pytest.raises(ValueError, match=r"^g: expected shape \[1, 6, 4\] as in gk, got \[1, 6, 1\]$"):
        ht.fused_recurrent_gated_delta_rule(**t, g=torch.zeros(1, 6, 1), gk=gk)
    with pytest.raises(ValueError, match="^g: expected device cpu as gk, got meta$"):
        ht.fused_recurrent_gated_delta_rule(**t, g=torch.zeros(1, 6, 4, device="meta"), gk=gk)
    with pytest.raises(ValueError, match=r"^g: expected shape \[1, 6, 4\] as in gk, got \[1, 6, 1\]$"):
        hj.fused_recurrent_gated_delta_rule(**{n: x.numpy() for n, x in t.items()}, g=jnp.zeros((1, 6, 1)),
                                            gk=gk.numpy())


# ---- shapes ----


@pytest.mark.parametrize("function, name, sizes", [
    (ht.chunk_comba, "p", (1, 6, 2, 15)),
    (ht.chunk_comba, "p", (1, 6, 4, 16)),
    (ht.chunk_comba, "p", (6, 2, 16)),
    (ht.chunk_gated_delta_rule, "A_log", (3,)),
    (ht.chunk_gated_delta_rule, "A_log", (4, 2)),
    (ht.chunk_gated_delta_rule, "A_log", ()),
    (ht.chunk_gated_delta_rule, "dt_bias", (2,)),
    (ht.chunk_gated_delta_rule, "dt_bias", ()),
    (ht.chunk_gated_delta_rule, "beta", (1, 6, 2)),
    (ht.chunk_gated_delta_rule, "beta", (1, 5, 4)),
    (ht.chunk_gated_delta_rule, "beta", ()),
    (ht.chunk_gated_delta_rule, "g", (1, 6, 4, 1, 1)),
    (ht.chunk_gated_delta_rule, "initial_state", (1, 4, 16, 8)),
    (ht.chunk_gated_delta_rule, "initial_state", (2, 4, 8, 16)),
    (ht.chunk_gated_delta_rule, "initial_state", (4, 16, 8)),
    (ht.chunk_simple_gla, "g_gamma", (2,)),
    (ht.chunk_simple_gla, "g_gamma", (1, 4)),
    (ht.chunk_simple_gla, "g_gamma", ()),
])
def test_wrong_shapes(function, name, sizes):
    with pytest.raises(ValueError, match=f"^{name}: expected "):
        function(**arguments(function, **{name: torch.zeros(sizes)}))
    op = function.__name__.removeprefix("chunk_")
    given = arguments(function, **{name: torch.zeros(sizes)})
    arrays = {n: x.numpy() for n, x in given.items() if isinstance(x, torch.Tensor)}
    with pytest.raises(ValueError, match=f"^{name}: expected "):
        hn.forward(op, **arrays, final_state=True, gate_form="softplus" if "A_log" in arrays else "log_decay")


# ---- offsets ----


@pytest.mark.parametrize("offsets, error, message", [
    (torch.tensor(6), ValueError, r"expected 1 dimension \[N \+ 1\] of at least 1 entry, got shape \[\]"),
    (torch.zeros(0, dtype=torch.int64), ValueError, r"expected 1 dimension \[N \+ 1\] of at least 1 entry, got shape"),
    (torch.tensor([[0, 2, 6]]), ValueError, "expected 1 dimension"),
    (torch.tensor([0.0, 2.0, 6.0]), ValueError, "expected dtype i32 or i64, got f32"),
    (torch.tensor([0, 2, 6], dtype=torch.int16), TypeError, "expected .* int32 or int64"),
    (torch.tensor([0, 2, 7]), ValueError, "expected tokens 6 as in"),
    (torch.tensor([0, 4, 2, 6]), ValueError, "expected at least 4 at"),
])
@pytest.mark.parametrize("final_state", [False, True])
def test_wrong_offsets(offsets, error, message, final_state):
    t = {name: torch.zeros(SIZES[name]) for name in "qkvg"}
    with pytest.raises(error, match=f"^cu_seqlens: {message}"):
        ht.chunk_simple_gla(**t, cu_seqlens=offsets, output_final_state=final_state)
    with pytest.raises(error, match=f"^cu_seqlens: {message}"):
        ht.short_convolution(torch.zeros(1, 6, 8), torch.zeros(8, 4), cu_seqlens=offsets,
                             output_final_state=final_state)
    arrays = {name: x.numpy() for name, x in t.items()}
    with pytest.raises(error, match=f"^cu_seqlens: {message}"):
        hn.forward("simple_gla", **arrays, cu_seqlens=offsets.numpy(), final_state=final_state)
    with pytest.raises((ValueError, TypeError), match="^cu_seqlens: expected "):
        hj.attention("simple_gla", **jax_arrays("q", "k", "v", "g"), cu_seqlens=jnp.asarray(offsets.numpy()),
                     output_final_state=final_state)


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_right_offsets_of_a_number_that_is_not_known_when_compiled():
    t = {name: torch.randn(SIZES[name], generator=torch.Generator().manual_seed(0)) for name in "qkv"}
    starts = torch.tensor([1, 0, 1, 0, 0, 0, 1])

    def states(starts):
        return ht.chunk_simple_gla(**t, cu_seqlens=starts.nonzero().flatten(), output_final_state=True)[1]

    compiled = torch.compile(states, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(starts), states(starts)) and states(starts).shape == (2, 4, 16, 8)


# ---- numbers and names ----


def jax_arrays(*names):
    return {name: jnp.zeros(SIZES[name], jnp.float32) for name in names}


@pytest.mark.parametrize("chunk_gla, arrays", [
    (ht.chunk_simple_gla, {name: torch.zeros(SIZES[name]) for name in "qkvg"}),
    (hj.chunk_simple_gla, jax_arrays("q", "k", "v", "g")),
], ids=["torch", "jax"])
@pytest.mark.parametrize("options, error, message", [
    ({"scale": "0.5"}, TypeError, "^scale: expected a number, got '0.5'$"),
    ({"scale": [0.5]}, TypeError, "^scale: expected a number, got "),
    ({"scale": 2j}, TypeError, "^scale: expected a number, got 2j$"),
    ({"scale": torch.ones(2)}, TypeError, "^scale: expected a number, got "),
    ({"scale": float("nan")}, ValueError, "^scale: expected a finite number, got nan$"),
    ({"output_final_state": np.zeros(2)}, TypeError, "^output_final_state: expected True or False, got "),
    ({"chunk_size": 0}, ValueError, "^chunk_size: expected a power of two from 16 to 256, got 0$"),
    ({"chunk_size": -64}, ValueError, "^chunk_size: expected a power of two from 16 to 256, got -64$"),
    ({"chunk_size": 2**40}, ValueError, "^chunk_size: expected an integer of 32 bits, got 1099511627776$"),
    ({"chunk_size": 48}, ValueError, "^chunk_size: expected a power of two from 16 to 256, got 48$"),
    ({"chunk_size": 32.5}, TypeError, "^chunk_size: expected an integer, got 32.5$"),
    ({"chunk_size": "32"}, TypeError, "^chunk_size: expected an integer, got '32'$"),
])
def test_wrong_numbers(chunk_gla, arrays, options, error, message):
    with pytest.raises(error, match=message):
        chunk_gla(**arrays, **options)


def test_numbers_of_other_kinds_are_taken():
    t = {name: torch.randn(SIZES[name], generator=torch.Generator().manual_seed(0)) for name in "qkv"}
    expected, _ = ht.chunk_simple_gla(**t, scale=0.5, chunk_size=16)
    for scale in (np.float32(0.5), torch.tensor(0.5), np.array(0.5)):
        assert torch.equal(ht.chunk_simple_gla(**t, scale=scale, chunk_size=np.int64(16))[0], expected)
    with pytest.raises(TypeError, match="^lower_bound: expected a number, got 'low'$"):
        ht.chunk_kda(**t, g=torch.zeros(1, 6, 4, 16), beta=torch.zeros(1, 6, 4), use_gate_in_kernel=True,
                     A_log=torch.zeros(4), lower_bound="low")
    with pytest.raises(TypeError, match="^eps: expected a number, got 'small'$"):
        ht.rms_norm_gated(**NORM, eps="small")


@pytest.mark.parametrize("options, error, message", [
    ({"gate_form": "softpluss"}, ValueError,
     "^gate_form: expected log_decay, softplus or bounded, got 'softpluss'$"),
    ({"beta_form": "sigmoids"}, ValueError, "^beta_form: expected value, sigmoid or two_sigmoid, got 'sigmoids'$"),
    ({"gate_form": None}, TypeError, "^gate_form: expected a name, got None$"),
    ({"scale": "0.5"}, TypeError, "^scale: expected a number, got '0.5'$"),
    ({"chunk": 32.5}, TypeError, "^chunk: expected an integer, got 32.5$"),
    ({"chunk": -64}, ValueError, "^chunk: expected 0 or a power of two from 16 to 256, got -64$"),
    ({"reverse": "yes"}, TypeError, "^reverse: expected True or False, got 'yes'$"),
    ({"threads": "all"}, TypeError, "^threads: expected an integer, got 'all'$"),
])
def test_wrong_options_of_numpy(options, error, message):
    arrays = {name: np.zeros(SIZES[name], np.float32) for name in "qkvg"}
    with pytest.raises(error, match=message):
        hn.forward("simple_gla", **arrays, **options)


def test_forms_of_jax_are_names():
    for options, message in (({"gate_form": "softpluss"}, "^gate_form: expected log_decay, softplus or bounded, got"),
                             ({"beta_form": "sigmoids"}, "^beta_form: expected value, sigmoid or two_sigmoid, got")):
        with pytest.raises(ValueError, match=message):
            hj.attention("simple_gla", **jax_arrays("q", "k", "v", "g"), **options)


# ---- arrays ----


@pytest.mark.parametrize("other", [None, [[1.0]], "text", torch.zeros(1, 6, 2, 16)], ids=lambda x: type(x).__name__)
def test_numpy_takes_arrays(other):
    arrays = {name: np.zeros(SIZES[name], np.float32) for name in "qkvg"}
    pool = np.zeros((5, 4, 16, 8), np.float32)
    message = f": expected a numpy array, got {type(other).__name__}$"
    for name in "qkvg":
        if other is not None or name != "g":
            with pytest.raises(TypeError, match=f"^{name}{message}"):
                hn.forward("simple_gla", **{**arrays, name: other})
    with pytest.raises(TypeError, match=f"^pool{message}"):
        hn.step("simple_gla", **arrays, pool=other)
    if other is not None:
        with pytest.raises(TypeError, match=f"^d_o{message}"):
            hn.backward("simple_gla", **arrays, d_o=other)
        with pytest.raises(TypeError, match=f"^indices{message}"):
            hn.step("simple_gla", **arrays, pool=pool, indices=other)


@pytest.mark.parametrize("other", [None, "text", object(), 2**70], ids=lambda x: type(x).__name__)
def test_jax_takes_arrays(other):
    arrays = jax_arrays("q", "k", "v", "g")
    for name in "qkvg":
        if other is not None or name != "g":
            with pytest.raises(TypeError, match=f"^{name}: expected an array, got {type(other).__name__}$"):
                hj.attention("simple_gla", **{**arrays, name: other})
    with pytest.raises(TypeError, match=f"^states: expected an array, got {type(other).__name__}$"):
        hj.step("simple_gla", **arrays, states=other)
    with pytest.raises(TypeError, match=f"^v: expected an array, got {type(other).__name__}$"):
        hj.chunk_retention(arrays["q"], arrays["k"], other)
