"""headrace.torch on tensors in a CUDA device's memory, with the kernels in the interpreter: the numbers of the CPU.

For a _core that is built in the preset ptx, with the stand-in's runtime library first: `scripts/test.sh python` runs it.
What stands in for PyTorch's tensors: device_tensors.py.
"""

import os

os.environ.setdefault("HEADRACE_PTX_DEVICES", "2")

import calls  # noqa: E402
import layers  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from conftest import BARS, relative_error  # noqa: E402
from device_tensors import Runtime, download, gradients, know_devices, moved, upload  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import headrace.torch as ht  # noqa: E402
from headrace import _core  # noqa: E402
from headrace.integrations import transformers  # noqa: E402
from headrace.torch import _functions, _library, rms_norm_gated, short_convolution, short_convolution_step  # noqa: E402
from headrace.torch.nn import Cache  # noqa: E402

FUNCTIONS = [f for f in calls.FUNCTIONS if calls.front(f) == "torch"]
STEP = ht.fused_recurrent_gated_delta_rule
B, T, D, W = 2, 5, 12, 4
OTHER = 1  # a device that is not the current one


@pytest.fixture(scope="module")
def runtime():
    know_devices()
    runtime = Runtime()
    _core.set_current_stream(runtime.current_stream)
    return runtime


@pytest.fixture(autouse=True)
def factories(monkeypatch, runtime):
    """torch.arange and torch.zeros of a device, which this PyTorch cannot allocate on."""
    for name in ("arange", "zeros"):
        def made(*sizes, make=getattr(torch, name), device=None, **options):
            device = torch.device("cpu" if device is None else device)
            result = make(*sizes, **options)
            return result if device.type == "cpu" else upload(result, runtime, device.index)
        monkeypatch.setattr(torch, name, made)


@pytest.fixture
def there(runtime):
    """Tensors by name on a device; cu_seqlens_cpu stays."""
    def on(tensors, device=0):
        return {n: x if n == "cu_seqlens_cpu" else upload(x, runtime, device) for n, x in tensors.items()}
    return on


def typed(x, dtype=torch.float32):
    return x.to(dtype) if x.is_floating_point() else x


def check_like(found, expected, bar):
    values = download(found)
    assert (values.dtype, values.shape) == (expected.dtype, expected.shape)
    assert relative_error(values, expected) <= bar


def d_of(x):
    return torch.linspace(-1, 1, x.numel()).reshape(x.shape).to(x.dtype)


def check_call(function, tensors, options, there, runtime, device=0, dtype=torch.float32):
    """Results and all gradients on the device, as on the CPU in float64."""
    exact = {n: typed(x, torch.float64) for n, x in tensors.items()}
    mine = there(tensors, device)
    wanted = [n for n, x in tensors.items() if x.is_floating_point()]
    outputs, _, gates = BARS[dtype]
    with torch.no_grad():
        first = function(**mine, **options)
    with_gradients = [n for n in wanted if mine[n].requires_grad_() is not None]
    for x in exact.values():
        x.requires_grad_(x.is_floating_point())
    made, expected = ([x for x in function(**given, **options) if x is not None] for given in (mine, exact))
    for x, y, again in zip(made, expected, (x for x in first if x is not None), strict=True):
        assert x.device == torch.device("cuda", device)
        check_like(x, y.detach().to(x.dtype), outputs)
        assert torch.equal(download(x), download(again))  # with autograd and without
    ds = gradients(made, [upload(d_of(x), runtime, device) for x in made], [mine[n] for n in wanted])
    total = sum((y * d_of(x).double()).sum() for x, y in zip(made, expected))
    for name, d, y in zip(with_gradients, ds, torch.autograd.grad(total, [exact[n] for n in wanted], allow_unused=True)):
        assert (d is None) == (y is None), name
        if d is not None:
            check_like(d, y.to(tensors[name].dtype), gates)


@pytest.fixture
def ways(monkeypatch):
    """The ways of the calls of a test: "plain" of those made in one go, else what route() says."""
    found = []
    run_plain, route = _library.run_plain, _library.route

    def in_one_go(*arguments):
        result = run_plain(*arguments)
        found.extend([] if result is None else ["plain"])
        return result

    def routed(*arguments):
        found.append(route(*arguments))
        return found[-1]

    monkeypatch.setattr(_library, "run_plain", in_one_go)
    monkeypatch.setattr(_library, "route", routed)
    return found


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("function", FUNCTIONS, ids=calls.identifier)
def test_functions(function, there, runtime):
    call = calls.plain_call(function, *calls.operators(function))
    check_call(function, {n: typed(x) for n, x in call.tensors.items()}, call.options, there, runtime)


def arguments():
    """Each argument once, of some function that has it."""
    seen = set()
    for function in (ht.fused_recurrent_gated_delta_rule, ht.fused_recurrent_kda, *FUNCTIONS):
        (op,) = calls.operators(function)
        for name in calls.parameters(function):
            if name in calls.CHANGES and calls.is_taken(function, op, name) and name not in seen:
                seen.add(name)
                yield pytest.param(function, op, name, id=name)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("function, op, name", list(arguments()))
def test_arguments(function, op, name, there, runtime):
    call = calls.changed_call(function, op, name)
    check_call(function, {n: typed(x) for n, x in call.tensors.items()}, call.options, there, runtime)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_types(dtype, there, runtime):
    call = calls.plain_call(ht.chunk_kda, "kda")
    rest = torch.promote_types(dtype, torch.float32)
    tensors = {n: typed(x, dtype if n in "qkv" else rest) for n, x in call.tensors.items()}
    check_call(ht.chunk_kda, tensors, call.options, there, runtime, dtype=dtype)


def test_every_way_leads_to_the_device(there, runtime, ways):
    call = calls.plain_call(ht.chunk_kda, "kda")
    tensors = {n: typed(x) for n, x in call.tensors.items()}
    with torch.no_grad():
        o = download(ht.chunk_kda(**there(tensors))[0])
        strided = download(ht.chunk_kda(**there(tensors), chunk_size=32)[0])
        with Watching():
            by_dispatcher = download(ht.chunk_kda(**there(tensors))[0])
    recorded = ht.chunk_kda(**{n: x.requires_grad_() for n, x in there(tensors).items()})[0]
    assert ways == ["plain", False, None, True] and recorded.grad_fn is not None
    assert torch.equal(o, by_dispatcher) and torch.equal(o, download(recorded)) and relative_error(strided, o) < 3e-6


# ---- streams and devices ----


def small_call(there, device=0, op="kda"):
    call = calls.plain_call(getattr(ht, f"chunk_{op}"), op)
    tensors = {n: typed(x) for n, x in call.tensors.items()}
    return tensors, there(tensors, device)


def left_busy(call, stream, runtime):
    """Whether a call ever returns before its work is done: when the stand-in does it is left to chance."""
    with torch.no_grad():
        kept = [(call(), runtime.is_busy(stream)) for _ in range(20)]
    return any(is_busy for _, is_busy in kept)


def test_calls_are_queued_on_the_current_stream_of_their_device(there, runtime):
    here, mine = small_call(there, OTHER)
    stream = runtime.new_stream(OTHER)
    runtime.wait()
    runtime.asked.clear()
    with torch.no_grad(), runtime.stream(stream, OTHER):
        o, _ = ht.chunk_kda(**mine)
        assert not runtime.is_busy(runtime.streams[0])
        y = short_convolution(mine["q"].flatten(2), upload(torch.ones(calls.H * calls.K, 4), runtime, OTHER))[0]
        z = rms_norm_gated(mine["q"])
    assert set(runtime.asked) == {OTHER} and len(runtime.asked) == 3
    assert runtime.current_device() == 0
    assert left_busy(lambda: ht.chunk_kda(**mine), runtime.streams[OTHER], runtime)
    assert {x.device for x in (o, y, z)} == {torch.device("cuda", OTHER)}
    check_like(o, ht.chunk_kda(**here)[0], 3e-6)


def test_tensors_of_two_devices_are_refused(there, runtime):
    here, mine = small_call(there)
    for name in here:
        if name != "q":
            for other in (upload(here[name], runtime, OTHER), here[name]):
                with pytest.raises(ValueError, match=f"^{name}: expected device cuda:0 as q, got {other.device}$"):
                    ht.chunk_kda(**mine | {name: other})
    with pytest.raises(ValueError, match="^k: expected a CUDA tensor as q, got a CPU one$"):  # at the binding itself
        _core.run("forward", "linear_attention", [mine["q"], here["k"], mine["v"], *[None] * 9], [mine["v"], None], [],
                  _core.Options())


def test_calls_are_captured_into_a_graph(there, runtime):
    here, mine = small_call(there)
    x, weight = torch.randn(1, 9, 24), torch.randn(24, 4)
    there_x, there_weight = upload(x, runtime), upload(weight, runtime)
    offsets = torch.tensor(calls.RAGGED)
    ragged = {n: x for n, x in mine.items() if n != "initial_state"}
    with torch.no_grad(), runtime.captured(runtime.streams[0]) as launch:
        o, state = ht.chunk_kda(**mine, output_final_state=True)
        packed, _ = ht.chunk_kda(**ragged, cu_seqlens=offsets)
        y, _ = short_convolution(there_x, there_weight, activation="silu")
        z = rms_norm_gated(y, there_x)
    offsets.fill_(-1)  # a graph keeps the numbers
    for seed in (1, 2):
        fresh = {n: typed(x) for n, x in calls.plain_call(ht.chunk_kda, "kda", seed).tensors.items()}
        for name, values in fresh.items():
            mine[name].copy_(upload(values, runtime))
        launch()
        expected = ht.chunk_kda(**fresh, output_final_state=True)
        check_like(o, expected[0], 3e-6)
        check_like(state, expected[1], 3e-6)
        fresh.pop("initial_state")
        check_like(packed, ht.chunk_kda(**fresh, cu_seqlens=torch.tensor(calls.RAGGED))[0], 3e-6)
    expected = short_convolution(x, weight, activation="silu")[0]
    check_like(y, expected, 3e-6)
    check_like(z, rms_norm_gated(expected, x), 3e-6)


def test_values_are_not_looked_at(there, runtime, monkeypatch):
    here, mine = small_call(there)
    bad = here["g"].clone()
    bad[0, 3, 1, 2] = 0.5
    o, _ = ht.chunk_kda(**mine | {"g": upload(bad, runtime)})
    found = download(o)
    assert torch.isnan(found[0, 3:, 1]).any() and torch.isfinite(found[:, :, [0, 2, 3]]).all()
    with pytest.raises(ValueError, match="^g: expected values <= 0"):
        ht.chunk_kda(**here | {"g": bad})
    monkeypatch.setenv("HEADRACE_DEBUG_NAN", "1")
    with pytest.raises(ValueError, match="^g: expected log decays <= 0"):
        ht.chunk_kda(**mine | {"g": upload(bad, runtime)})


def test_offsets_on_the_host_and_on_the_device(there, runtime, monkeypatch):
    call = calls.changed_call(ht.chunk_kda, "kda", "cu_seqlens")
    here = {n: typed(x) for n, x in call.tensors.items()}
    mine, offsets = there(here), here["cu_seqlens"]
    expected = ht.chunk_kda(**here)[0]
    for given in ({}, {"cu_seqlens": offsets}, {"cu_seqlens": offsets.int()}, {"cu_seqlens_cpu": offsets}):
        check_like(ht.chunk_kda(**mine | given)[0], expected, 3e-6)
    for given in ({"cu_seqlens": offsets.flip(0)}, {"cu_seqlens_cpu": offsets.flip(0)}):
        with pytest.raises(ValueError, match="^cu_seqlens: "):  # those of the host are checked
            ht.chunk_kda(**mine | given)
    wrong = {"cu_seqlens": upload(offsets.flip(0), runtime)}  # those of the device make NaN
    assert torch.isnan(download(ht.chunk_kda(**mine | wrong)[0])).all()
    monkeypatch.setenv("HEADRACE_DEBUG_NAN", "1")
    with pytest.raises(ValueError, match="^cu_seqlens: expected numbers that ascend from 0 to tokens"):
        ht.chunk_kda(**mine | wrong)


def test_decays_are_computed_anew(there, runtime):
    """Kept ones would be those of the stream, or of the captured graph, that made them."""
    kept = _functions._kept_decays_of.cache_info()
    here = {n: typed(x) for n, x in calls.plain_call(ht.chunk_retention, "retention").tensors.items()}
    o = ht.chunk_retention(**there(here))[0]
    assert _functions._kept_decays_of.cache_info() == kept
    check_like(o, ht.chunk_retention(**here)[0], 3e-6)


def test_models_of_transformers_are_served(there, runtime):
    def original(*arguments, **options):
        raise AssertionError("its own function")

    here, mine = small_call(there)
    for tensors in (here, mine):
        tensors["query"], tensors["key"], tensors["value"] = (tensors.pop(name) for name in "qkv")
    function = transformers._operator(ht.chunk_kda, original)
    check_like(function(**mine)[0], function(**here)[0], 3e-6)
    x, state, weight = torch.randn(B, D, 1), torch.randn(B, D, W), torch.randn(D, W)
    xs, states, weights = (upload(t, runtime) for t in (x, state, weight))
    update = transformers._convolution_of_a_token(original)
    with torch.no_grad():
        check_like(update(xs, states, weights, activation="silu"), update(x, state, weight, activation="silu"), 3e-6)
    check_like(states, state, 0)


# ---- pools, bound calls ----


def token(seed, N=2, tokens=1):
    draw = torch.Generator().manual_seed(seed)
    k = torch.nn.functional.normalize(torch.randn(N, tokens, calls.H, calls.K, generator=draw), dim=-1)
    v = torch.randn(N, tokens, calls.HV, calls.V, generator=draw)
    g, beta = -torch.rand(N, tokens, calls.HV, generator=draw), torch.rand(N, tokens, calls.HV, generator=draw)
    return {"q": torch.randn(k.shape, generator=draw), "k": k, "v": v, "g": g, "beta": beta}


@pytest.mark.parametrize("pool_type, v_first", [(torch.float32, False), (torch.bfloat16, True)])
def test_steps_change_the_rows_of_a_pool(there, runtime, pool_type, v_first):
    sizes = (calls.V, calls.K) if v_first else (calls.K, calls.V)
    pool = torch.randn(7, calls.HV, *sizes).to(pool_type)
    rows, speculative, accepted = torch.tensor([5, -1]), torch.tensor([[1, 2], [3, 0]]), torch.tensor([2, 1])
    mine, states = upload(pool, runtime), pool.clone()
    out = upload(torch.zeros(2, 1, calls.HV, calls.V), runtime)
    with torch.no_grad():
        for seed in range(2):
            x = token(seed)
            o, same = STEP(**there(x), initial_state=mine, ssm_state_indices=upload(rows, runtime), out=out,
                           state_v_first=v_first)
            expected, _ = STEP(**x, initial_state=states, ssm_state_indices=rows, state_v_first=v_first)
            assert o is out and same is mine
            check_like(o, expected, 3e-6)
        x = token(3, tokens=2)
        o, _ = STEP(**there(x), initial_state=mine, ssm_state_indices=upload(speculative, runtime),
                    num_accepted_tokens=upload(accepted, runtime), state_v_first=v_first)
        check_like(o, STEP(**x, initial_state=states, ssm_state_indices=speculative, num_accepted_tokens=accepted,
                           state_v_first=v_first)[0], 3e-6)
    check_like(mine, states, 3e-6 if pool_type == torch.float32 else 4e-3)
    untouched = [row for row in range(7) if row not in {5, *speculative.flatten().tolist()}]
    assert torch.equal(download(mine)[untouched], pool[untouched])
    with torch.no_grad(), pytest.raises(ValueError, match="^ssm_state_indices: expected device cuda:0 as q, got cpu$"):
        STEP(**there(token(0)), initial_state=mine, ssm_state_indices=rows)


def test_bound_calls_compute_on_the_stream_of_the_moment(there, runtime):
    pool, rows = torch.randn(4, calls.HV, calls.K, calls.V), torch.tensor([3, 0])
    mine, states = upload(pool, runtime), pool.clone()
    buffers, stream = there(token(0)), runtime.new_stream()
    with torch.no_grad():
        decode = ht.bind(STEP, **buffers, initial_state=mine, ssm_state_indices=upload(rows, runtime))
        for seed in range(2):
            x = token(seed)
            for name, values in there(x).items():
                buffers[name].copy_(values)
            runtime.wait()
            with runtime.stream(stream):
                o, _ = decode()
            check_like(o, STEP(**x, initial_state=states, ssm_state_indices=rows)[0], 3e-6)
    check_like(mine, states, 3e-6)
    with torch.no_grad(), runtime.stream(stream):
        assert left_busy(decode, stream, runtime)


# ---- the functions around the operators, layers ----


@pytest.mark.parametrize("ragged", [False, True])
def test_convolution(ragged, there, runtime):
    tensors = dict(x=torch.randn(1 if ragged else B, T, D), weight=torch.randn(D, W), bias=torch.randn(D))
    tensors["initial_state"] = torch.randn(3 if ragged else B, D, W)
    if ragged:
        tensors["cu_seqlens"] = torch.tensor([0, 2, 2, T])
    options = {"activation": "silu", "output_final_state": True}
    check_call(short_convolution, tensors, options, there, runtime, OTHER)


def test_norm(there, runtime):
    tensors = dict(x=torch.randn(B, T, D), g=torch.randn(B, T, D), weight=torch.randn(D), residual=torch.randn(B, T, D))
    check_call(rms_norm_gated, tensors, {"prenorm": True}, there, runtime)


def test_step_of_the_convolution(there, runtime):
    here = dict(x=torch.randn(B, D), state=torch.randn(4, D, W), weight=torch.randn(D, W), indices=torch.tensor([3, 1]))
    mine = there(here)
    check_like(short_convolution_step(**mine), short_convolution_step(**here), 3e-6)
    check_like(mine["state"], here["state"], 0)


# All but the one with clamp_min, whose gradient in PyTorch allocates where only a device's own PyTorch can.
@pytest.mark.parametrize("name", [name for name in layers.LAYERS if name != "gla_grouped"])
def test_layers(name, there, runtime):
    here, mine = layers.make(name), moved(layers.make(name), lambda x: upload(x, runtime))
    x = torch.randn(B, T, layers.HIDDEN)
    xs = upload(x, runtime)
    o, expected = mine(xs)[0], here(x)[0]
    check_like(o, expected.detach(), 1e-5)
    ds = gradients([o], [upload(d_of(o), runtime)], [*mine.parameters()])
    (expected * d_of(expected)).sum().backward()
    for (parameter_name, parameter), d in zip(here.named_parameters(), ds):
        error = relative_error(download(d), parameter.grad)
        assert error < 1e-4, (parameter_name, error)
    caches, offsets = (Cache(), Cache()), torch.tensor([0, 3, T])
    packed = (Cache(), Cache())
    with torch.no_grad():
        for part in (slice(0, 3), slice(3, 4), slice(4, 5)):
            o, expected = (layer(tokens[:, part], past_key_values=cache, use_cache=True)[0]
                           for layer, tokens, cache in zip((mine, here), (xs, x), caches))
            check_like(o, expected, 1e-5)
        two = slice(0, 2)
        for part, ends in ((slice(0, T), offsets), (two, torch.tensor([0, 1, 2])), (two, torch.tensor([0, 0, 2]))):
            o = mine(xs[:1, part], past_key_values=packed[0], use_cache=True, cu_seqlens=upload(ends, runtime))[0]
            check_like(o, here(x[:1, part], past_key_values=packed[1], use_cache=True, cu_seqlens=ends)[0], 1e-5)
