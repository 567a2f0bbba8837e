"""headrace.torch on tensors of CUDA devices, without one: fake tensors say where results lie, and what would wait."""

from functools import partial

import calls
import layers
import pytest
import torch
from device_tensors import SYNCHRONISING, gradients, know_devices, moved, without_memory
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import headrace.torch as ht
from headrace import _core
from headrace.integrations import transformers
from headrace.torch import nn as hnn
from headrace.torch import rms_norm_gated, short_convolution, short_convolution_step

aten = torch.ops.aten
FUNCTIONS = [f for f in calls.FUNCTIONS if calls.front(f) == "torch"]
DEVICE = "cuda:1"  # which is not the current one
B, T, D, W = 2, 5, 12, 4


class NothingWaits(TorchDispatchMode):
    """No operator reads a value of a device's tensor, takes it to the host, or brings one from there."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        assert function not in SYNCHRONISING, f"{function} makes the host wait"
        result = function(*arguments, **(options or {}))
        here, there = ({x.device.type for x in tree_leaves(given) if isinstance(x, torch.Tensor)}
                       for given in ((arguments, options), result))
        assert "cuda" not in here or "cpu" not in there, f"{function} copies to the host"
        if function in (aten._to_copy.default, aten.copy_.default):
            assert len(here | there) == 1, f"{function} copies from the host"
        return result


@pytest.fixture(autouse=True)
def fakes():
    know_devices()
    with FakeTensorMode(), NothingWaits():
        yield


def on(device, x):
    """A tensor like x there."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


def single(x):
    return x.float() if x.is_floating_point() else x


def cases(function):
    (op,) = calls.operators(function)
    for name in calls.parameters(function):
        if name in calls.CHANGES and calls.is_taken(function, op, name):
            call = calls.changed_call(function, op, name)
            yield {n: single(x) for n, x in call.tensors.items()}, call.options


def check_like(found, expected):
    assert found.device == torch.device(DEVICE)
    assert (found.dtype, found.shape, found.stride()) == (expected.dtype, expected.shape, expected.stride())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("function", FUNCTIONS, ids=calls.identifier)
def test_results_and_gradients_lie_where_the_arguments_do(function):
    for tensors, options in cases(function):
        there = {n: x if n == "cu_seqlens_cpu" else on(DEVICE, x) for n, x in tensors.items()}
        wanted = [n for n, x in tensors.items() if x.is_floating_point()]
        results = {}
        for place, given in (("here", tensors), ("there", there)):
            given = {n: x.requires_grad_(n in wanted) for n, x in given.items()}
            o, state = function(**given, **options)
            ds = gradients([o, state], [torch.empty_like(o), torch.empty_like(state)], [given[n] for n in wanted])
            results[place] = [o, state, *ds]
        for found, expected in zip(results["there"], results["here"], strict=True):
            assert (found is None) == (expected is None)
            if found is not None:
                check_like(found, expected)


@pytest.mark.parametrize("function", FUNCTIONS, ids=calls.identifier)
def test_a_tensor_elsewhere_is_named(function):
    tensors, options = next(cases(function))
    for name in tensors:
        for other in ("cpu", "cuda:1"):
            mixed = {n: on(other if n == name else "cuda:0", x) for n, x in tensors.items()}
            named, device, got = ("k", other, "cuda:0") if name == "q" else (name, "cuda:0", other)
            named = "g" if named == "gk" else named
            with pytest.raises(ValueError, match=f"^{named}: expected device {device} as q, got {got}$"):
                function(**mixed, **options)


@pytest.mark.parametrize("place", ["cpu", "cuda:0"])
def test_offsets_lie_there_or_on_the_host(place):
    tensors = {n: on("cuda:0", single(x))
               for n, x in calls.changed_call(ht.chunk_kda, "kda", "cu_seqlens").tensors.items()}
    tensors["cu_seqlens"] = on(place, torch.tensor(calls.RAGGED))
    o, state = ht.chunk_kda(**tensors, output_final_state=True)
    assert o.device == state.device == torch.device("cuda:0") and state.shape[0] == len(calls.RAGGED) - 1
    with pytest.raises(ValueError, match="^cu_seqlens_cpu: expected device cpu, got cuda:0$"):
        ht.chunk_kda(**tensors, cu_seqlens_cpu=on("cuda:0", torch.tensor(calls.RAGGED)))
    with pytest.raises(ValueError, match="^cu_seqlens: expected device cuda:0 as q, got cuda:1$"):
        ht.chunk_kda(**tensors | {"cu_seqlens": on("cuda:1", torch.tensor(calls.RAGGED))})


# ---- the functions around the operators, layers ----


def layer_calls():
    """(function, its tensors, whether it has gradients)"""
    x, weight, bias = torch.randn(B, T, D), torch.randn(D, W), torch.randn(D)
    offsets = torch.tensor([0, 3, 3, T])
    yield short_convolution, dict(x=x, weight=weight, bias=bias, initial_state=torch.randn(B, D, W)), True
    yield short_convolution, dict(x=x[:1], weight=weight, cu_seqlens=offsets), True
    yield rms_norm_gated, dict(x=x, g=torch.randn(B, T, D), weight=bias, residual=torch.randn(B, T, D)), True
    yield rms_norm_gated, dict(x=x.bfloat16()), True
    yield short_convolution_step, dict(x=x[:, 0], state=torch.randn(4, D, W), weight=weight, bias=bias,
                                       indices=torch.tensor([3, 1])), False


@pytest.mark.parametrize("case", range(5))
def test_layer_functions(case):
    function, tensors, differentiable = list(layer_calls())[case]
    results = {}
    for place, given in (("here", tensors), ("there", {n: on(DEVICE, x) for n, x in tensors.items()})):
        wanted = [x.requires_grad_() for x in given.values() if differentiable and x.is_floating_point()]
        made = function(**given)
        made = [x for x in (made if isinstance(made, tuple) else (made,)) if x is not None]
        ds = gradients(made, [torch.empty_like(x) for x in made], wanted) if differentiable else []
        results[place] = [*made, *ds]
    for found, expected in zip(results["there"], results["here"], strict=True):
        check_like(found, expected)
    for name in [*tensors][1:]:
        elsewhere = {n: on("cuda:0" if n == name else DEVICE, x) for n, x in tensors.items()}
        with pytest.raises(ValueError, match=f"^{name}: expected device {DEVICE} as x, got cuda:0$"):
            function(**elsewhere)


@pytest.mark.parametrize("name", layers.LAYERS)
def test_layers_train_and_decode_without_waiting(name):
    layer = moved(layers.make(name), partial(on, DEVICE))
    x, offsets = on(DEVICE, torch.empty(1, T, layers.HIDDEN)), on(DEVICE, torch.tensor([0, 3, T]))
    o, _, _ = layer(x)
    for parameter, d in zip(layer.parameters(), gradients([o], [torch.empty_like(o)], [*layer.parameters()])):
        assert d.device == parameter.device == torch.device(DEVICE) and d.shape == parameter.shape
    cache, packed = hnn.Cache(), hnn.Cache()
    with torch.no_grad():
        for tokens in (x[:, :-1], x[:, -1:], x[:, -1:]):
            o, _, _ = layer(tokens, past_key_values=cache, use_cache=True)
            assert o.device == torch.device(DEVICE) and cache[0]["recurrent_state"].device == o.device
        for tokens, ends in ((x, offsets), (x[:, :2], torch.arange(3, device=DEVICE))):
            o, _, _ = layer(tokens, past_key_values=packed, use_cache=True, cu_seqlens=ends)
            assert o.shape == tokens.shape and packed[0]["recurrent_state"].shape[0] == 2


def test_a_step_of_packed_tokens_looks_at_the_size_of_the_offsets():
    with torch.device(DEVICE):
        convolution, cache = hnn.ShortConvolution(D, W), torch.randn(3, D, W)
        x, right, wrong = torch.randn(1, 3, D), torch.arange(4), torch.arange(3)
    with torch.no_grad():
        y, state = convolution.step(x, None, cache, True, right)
        assert y.shape == x.shape and state is cache
        with pytest.raises(ValueError, match=r"^cu_seqlens: .* offsets \[3\]$"):
            convolution.step(x, None, cache, True, wrong)


# ---- steps, autocast, transforms, traces ----

STEP = ht.fused_recurrent_gated_delta_rule


def step_tensors(device):
    tensors = {n: on(device, single(x)[:, :1].contiguous()) for n, x in
               calls.plain_call(STEP, "gated_delta_rule").tensors.items() if n != "initial_state"}
    return tensors | {"initial_state": torch.empty(6, calls.HV, calls.K, calls.V, device=device),
                      "ssm_state_indices": torch.empty(1, dtype=torch.int32, device=device)}


def test_a_step_leaves_the_pool_where_it_is():
    tensors = step_tensors(DEVICE)
    with torch.no_grad():
        o, pool = STEP(**tensors)
        assert pool is tensors["initial_state"] and o.device == torch.device(DEVICE) and o.dtype == tensors["v"].dtype
        for name in ("initial_state", "ssm_state_indices"):
            with pytest.raises(ValueError, match=f"^{name}: expected device {DEVICE} as q, got cpu$"):
                STEP(**tensors | {name: on("cpu", tensors[name])})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_of_the_device(dtype):
    for function in (ht.chunk_kda, ht.chunk_lightning_attn):
        tensors, options = next(cases(function))
        tensors = {n: on(DEVICE, x) for n, x in tensors.items()}
        torch.set_autocast_dtype("cuda", dtype)  # torch.autocast does nothing where there is no device
        torch.set_autocast_enabled("cuda", True)
        try:
            o, state = function(**tensors, **options)
        finally:
            torch.set_autocast_enabled("cuda", False)
        assert (o.dtype, state.dtype) == (dtype, torch.float32)
        with torch.autocast("cpu", dtype):  # of another device
            assert function(**tensors, **options)[0].dtype == torch.float32


def test_vmap_and_grad():
    tensors = {n: on(DEVICE, x) for n, x in next(cases(ht.chunk_kda))[0].items()}
    vs = torch.empty(3, *tensors["v"].shape, device=DEVICE)
    o = torch.func.vmap(lambda v: ht.chunk_kda(**tensors | {"v": v})[0])(vs)
    assert o.shape == vs.shape and o.device == torch.device(DEVICE)


def test_a_compiled_call_is_one_operator():
    for function in (ht.chunk_kda, ht.chunk_lightning_attn, ht.fused_recurrent_gla):
        graphs = []

        def kept(graph, inputs):
            graphs.append(graph)
            return graph

        with _disable_current_modes(), FakeTensorMode():
            tensors, options = next(cases(function))
            tensors = {n: on(DEVICE, x) for n, x in tensors.items()}
            compiled = torch.compile(lambda **given: function(**given, **options), backend=kept, fullgraph=True)
            o, state = compiled(**tensors)
        assert o.device == state.device == torch.device(DEVICE)
        (graph,) = graphs
        assert [str(n.target) for n in graph.graph.nodes].count("headrace.forward") == 1


# ---- a library without CUDA ----


def test_tensors_of_a_device_that_is_not_there_are_refused():
    tensors, options = next(cases(ht.chunk_kda))
    tensors = {n: tuple(x.shape) for n, x in tensors.items()}
    with _disable_current_modes():
        for function, sizes in ((partial(ht.chunk_kda, **options), tensors),
                                (short_convolution, {"x": (B, T, D), "weight": (D, W)}),
                                (rms_norm_gated, {"x": (B, T, D)})):
            words = "compiled in|^[qx]: expected memory of a CUDA device|^CUDA: [qx]: "  # without CUDA, GPU or driver
            with pytest.raises(ValueError, match=words):
                function(**{n: without_memory(torch.empty(size)) for n, size in sizes.items()})


def test_models_of_transformers_on_a_device_are_served_where_the_library_serves_it():
    tensors = {n: on(DEVICE, x) for n, x in next(cases(ht.chunk_kda))[0].items()}
    replaced = transformers._operator(ht.chunk_kda, lambda *arguments, **options: "its own")
    options = dict(g=tensors["g"], beta=tensors["beta"])
    found = replaced(*map(tensors.get, "qkv"), **options)
    if any(name.startswith("cuda.") for name in _core.implementations()):
        assert found[0].device == torch.device(DEVICE)
    else:
        assert found == "its own"
