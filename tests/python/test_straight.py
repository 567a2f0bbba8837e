"""Calls that go straight to their kernels: as those by PyTorch's dispatcher, which takes part where it has one."""

import subprocess
import sys
from contextlib import nullcontext

import calls
import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import headrace.numpy as hn
import headrace.torch as ht
from headrace.torch import _functions, _library

FUNCTIONS = [f for f in calls.FUNCTIONS if calls.front(f) == "torch"]
B, T, H, D = 2, 5, 2, 8


@pytest.fixture
def ways(monkeypatch):
    """The ways of the calls of a test, in turn: "plain" of those made in one go, else what route() says."""
    found = []
    route, run_plain = _library.route, _library.run_plain

    def noted(*arguments):
        found.append(route(*arguments))
        return found[-1]

    def made_in_one_go(*arguments):
        result = run_plain(*arguments)
        found.extend(["plain"] if result is not None else [])
        return result

    monkeypatch.setattr(_library, "run_plain", made_in_one_go)
    for module in ("_library", "_layer_library", "_layer_functions"):
        monkeypatch.setattr(f"headrace.torch.{module}.route", noted)
    return found


class Dispatched(TorchDispatchMode):
    """All operators go through here."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def outcome(function, tensors, options, wanted=()):
    """All results of a call, and the gradients by `wanted` of their sums."""
    tensors = {n: x.clone().requires_grad_(n in wanted) for n, x in tensors.items()}
    results = function(**tensors, **options)
    results = [x for x in (results if isinstance(results, tuple) else (results,)) if x is not None]
    changed = [x for n, x in tensors.items() if not x.requires_grad]
    if not wanted:
        return [*results, *changed]
    total = sum((x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).reshape(x.shape)).sum() for x in results)
    gradients = torch.autograd.grad(total, [tensors[n] for n in wanted], allow_unused=True)
    return [*results, *(x for x in gradients if x is not None)]


def compare_ways(ways, function, tensors, options, wanted=()):
    straight = outcome(function, tensors, options, wanted)
    assert ways and None not in ways, f"{function.__name__} {options}: by the dispatcher"
    ways.clear()
    with Dispatched():
        other = outcome(function, tensors, options, wanted)
    assert set(ways) == {None}
    ways.clear()
    assert len(straight) == len(other)
    for x, y in zip(straight, other):
        assert x.dtype == y.dtype and x.stride() == y.stride() and x.requires_grad == y.requires_grad
        assert torch.equal(x, y), (function.__name__, options)


def single(x):
    return x.float() if x.is_floating_point() else x


@pytest.mark.parametrize("function", FUNCTIONS, ids=calls.identifier)
def test_both_ways_of_every_argument(function, ways):
    (op,) = calls.operators(function)
    for name in calls.parameters(function):
        if name not in calls.CHANGES or not calls.is_taken(function, op, name):
            continue
        call = calls.changed_call(function, op, name)
        tensors = {n: single(x) for n, x in call.tensors.items()}
        compare_ways(ways, function, tensors, call.options)
        compare_ways(ways, function, tensors, call.options, [n for n, x in tensors.items() if x.is_floating_point()])


class DerivedArray(np.ndarray):
    pass


@pytest.mark.parametrize("op", ["simple_gla", "comba", "kda"])
def test_numpy_arrays_as_they_are_and_of_a_derived_class(op):
    """The former are read by NumPy's own interface, the latter made usual before."""
    for name in calls.parameters(hn.forward):
        if calls.SAME.get(name, name) not in calls.CHANGES or not calls.is_taken(hn.forward, op, name):
            continue
        call = calls.changed_call(hn.forward, op, name)
        options = calls.options_by_name(call.options)
        arrays = {n: single(x).numpy() for n, x in call.tensors.items()}
        others = {n: x.view(DerivedArray) for n, x in arrays.items()}
        for x, y in zip(*(hn.forward(op, **given, **options, final_state=True) for given in (arrays, others))):
            assert np.array_equal(x, y) and type(x) is type(y) is np.ndarray, name


def test_both_ways_of_steps_on_a_pool(ways):
    t = tensors()
    for more in ({}, {"ssm_state_indices": torch.tensor([3, 1])}, {"out": torch.empty(B, T, H, D)}):
        compare_ways(ways, ht.fused_recurrent_gated_delta_rule, {**t, "initial_state": torch.randn(4, H, D, D), **more},
                     {"inplace_final_state": True})


def test_both_ways_of_layer_functions(ways):
    x, weight, bias, state = torch.randn(B, T, D), torch.randn(D, 4), torch.randn(D), torch.randn(B, D, 4)
    t = {"x": x, "weight": weight, "bias": bias, "initial_state": state}
    for options in ({}, {"output_final_state": True, "activation": "silu"}):
        compare_ways(ways, ht.short_convolution, t, options)
        compare_ways(ways, ht.short_convolution, t, options, list(t))
    compare_ways(ways, ht.short_convolution_step, {"x": x[:, 0], "state": state, "weight": weight}, {})
    norm = {"x": x, "g": x + 1, "weight": bias}
    compare_ways(ways, ht.rms_norm_gated, norm, {})
    compare_ways(ways, ht.rms_norm_gated, norm, {}, list(norm))


def test_parameters_go_straight(ways):
    A_log = torch.nn.Parameter(torch.randn(H))
    o, _ = ht.chunk_gated_delta_rule(**tensors(), A_log=A_log, use_gate_in_kernel=True)
    assert ways == [True] and o.requires_grad
    (gradient,) = torch.autograd.grad(o.sum(), A_log)
    assert gradient.shape == (H,) and type(gradient) is torch.Tensor and ways == [True, False]
    with torch.no_grad():
        o, _ = ht.chunk_gated_delta_rule(**tensors(), A_log=A_log, use_gate_in_kernel=True)
    assert ways[2:] == ["plain"] and not o.requires_grad


def tensors():
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, T, H, D, generator=draw) for _ in range(3))
    return {"q": q, "k": k / 3, "v": v, "g": -torch.rand(B, T, H, generator=draw),
            "beta": torch.rand(B, T, H, generator=draw)}


def run(t):
    return ht.chunk_gated_delta_rule(**t)[0]


class Derived(torch.Tensor):
    pass


# The same numbers in a tensor that its memory does not tell, or not alone.
ODD = {
    "negated": lambda x: torch._neg_view(-x),
    "derived": lambda x: x.clone().as_subclass(Derived),
    "parameter of a derived class": lambda x: torch.nn.Parameter(x.clone().as_subclass(Derived), requires_grad=False),
}


@pytest.mark.parametrize("name", tensors())
@pytest.mark.parametrize("odd", ODD.values(), ids=list(ODD))
def test_odd_tensors(odd, name, ways):
    t = tensors()
    expected = run(t)
    t[name] = odd(t[name])
    assert torch.equal(torch.Tensor(run(t)), expected) and ways == ["plain", None]


def test_zeros_without_memory(ways):
    t = tensors()
    t["v"] = torch._efficientzerotensor(t["v"].shape)
    assert torch.equal(run(t), torch.zeros(B, T, H, D)) and ways == [None]


@pytest.mark.parametrize("layout", [lambda x: x.to_sparse(), lambda x: x.to_mkldnn(), lambda x: x.to("meta"),
                                    lambda x: torch._to_functional_tensor(x),
                                    lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)])
def test_what_has_no_memory_of_its_own_is_not_plain(layout):
    x = torch.randn(1, 1, 1, 8)
    assert _library.route((x, x), 2) is False and _library.route((x, layout(x)), 2) is None


def test_required_tensors():
    x = torch.randn(3)
    assert _library.route((x, None), 1) is False and _library.route((x, None), 2) is None
    assert _library.route((x, 3.0), 1) is None


def test_a_mode_sees_the_operators(ways):
    t = {n: x.requires_grad_() for n, x in tensors().items()}
    with Dispatched() as seen:
        run(t).sum().backward()
    assert {"headrace.forward.default", "headrace.backward.default"} <= set(seen.names) and set(ways) == {None}


@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_a_tracer_of_real_tensors_sees_the_operator(pre_dispatch, ways):
    t = tensors()
    graph = make_fx(lambda *x: run(dict(zip(t, x))), pre_dispatch=pre_dispatch)(*t.values())
    assert any(node.target is torch.ops.headrace.forward.default for node in graph.graph.nodes) and ways == [None]


@pytest.mark.filterwarnings("ignore")
def test_torch_jit_trace_sees_the_operator(ways):
    t = tensors()
    graph = torch.jit.trace(lambda *x: run(dict(zip(t, x))), tuple(t.values()), check_trace=False).graph
    assert "headrace::forward" in str(graph) and ways == [None]


@pytest.mark.parametrize("profile", [torch.autograd.profiler.profile, torch.profiler.profile])
def test_the_profiler_sees_the_operator(profile, ways):
    with profile() as found:
        run(tensors())
    assert "headrace::forward" in {event.key for event in found.key_averages()} and ways == [None]


def test_a_function_mode_sees_the_operator(ways):
    names = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    with Mode():
        run(tensors())
    assert "headrace.forward" in names and ways == [None]


def test_autograd_left_out(ways):
    """As in the kernel of another library's operator."""
    t = {n: x.requires_grad_() for n, x in tensors().items()}
    with torch._C._AutoDispatchBelowAutograd():
        o = run(t)
    assert not o.requires_grad and ways == [None]


def test_imported_within_a_mode():
    """What is usual is not what holds at the time of the import."""
    code = '''
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode() as mode:
    import headrace.torch as ht
    q, g = torch.randn(1, 3, 2, 8), -torch.rand(1, 3, 2)
    o, state = ht.chunk_simple_gla(q, q, q, g, output_final_state=True)
    assert isinstance(o, type(q)) and type(q) is not torch.Tensor and state.shape == (1, 2, 8, 8)
'''
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu"), nullcontext])
def test_modes_that_go_straight(mode, ways):
    t = tensors()
    with mode():
        o = run(t)
        is_autocast = torch.is_autocast_enabled("cpu")
        assert ways == [False if is_autocast else "plain"] and o.is_inference() == torch.is_inference_mode_enabled()
        assert o.dtype == (torch.bfloat16 if is_autocast else torch.float32)


def test_decays_that_are_kept_serve_in_and_out_of_inference_mode():
    _functions._kept_decays_of.cache_clear()
    q, k, v = (x for n, x in tensors().items() if n in ("q", "k", "v"))
    with torch.inference_mode():
        inside = ht.chunk_retention(q, k, v)[0]
    q.requires_grad_()
    o = ht.chunk_retention(q, k, v)[0]
    assert torch.equal(o.detach(), inside) and torch.autograd.grad(o.sum(), q)[0].abs().sum() > 0
    layers = [ht.chunk_lightning_attn(q, k, v, layer_idx=i, num_layers=2)[0] for i in range(2)]
    assert not torch.equal(*layers)


@pytest.mark.parametrize("mode", [nullcontext, Dispatched])
def test_a_step_invalidates_what_autograd_saved(mode):
    pool, out = torch.randn(B, H, D, D), torch.empty(B, T, H, D)
    x = torch.randn(D, requires_grad=True)
    products = [(x * pool).sum(), (x * out).sum()]
    with mode():
        ht.fused_recurrent_gated_delta_rule(**tensors(), initial_state=pool, inplace_final_state=True, out=out)
    for product in products:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
