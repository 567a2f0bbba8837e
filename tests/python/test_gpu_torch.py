"""headrace.torch on a GPU: every operator, layer and pool beside the CPU's numbers; streams, graphs, compiled calls.

For a machine with one: elsewhere torch_on_stand_in.py and test_torch_devices.py say what can be said. Needs PyTorch,
pytest and a headrace that is built with CUDA; nothing else of the tests' requirements.
"""

import time
from functools import partial

import cp_jobs
import pytest
import ranks
import torch
from conftest import BARS, OPERATORS, expect_within_bars, make_problem, relative_error

import headrace.torch as ht
from headrace import _core
from headrace.torch import nn as hnn
from headrace.torch import rms_norm_gated, short_convolution, short_convolution_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.cuda finds no GPU")
DEVICE = torch.device("cuda")
FUNCTIONS = {
    "linear_attention": ht.chunk_simple_gla, "retention": ht.chunk_simple_gla, "simple_gla": ht.chunk_simple_gla,
    "gla": ht.chunk_gla, "delta_rule": ht.chunk_delta_rule, "gated_delta_rule": ht.chunk_gated_delta_rule,
    "comba": ht.chunk_comba, "kda": ht.chunk_kda,
}
RAGGED = [0, 70, 70, 71, 150]


def there(tensors):
    return {name: x.detach().to(DEVICE, non_blocking=True) for name, x in tensors.items()}


def d_of(x):
    """Weights that every type represents."""
    return ((torch.arange(x.numel(), device=x.device) * 37 % 17 - 8) / 8).to(x.dtype).reshape(x.shape)


def with_gradients(function, tensors, **options):
    """(results, gradients by name) of the call, weighted by d_of."""
    tensors = {n: x.detach().clone().requires_grad_(x.is_floating_point()) for n, x in tensors.items()}
    results = [x for x in function(**tensors, **options) if x is not None]
    total = sum((x * d_of(x)).sum() for x in results)
    wanted = [n for n, x in tensors.items() if x.requires_grad]
    return [x.detach() for x in results], dict(zip(wanted, torch.autograd.grad(total, [tensors[n] for n in wanted])))


def check(function, tensors, dtype, **options):
    """Results and gradients on the GPU beside those of the same numbers on the CPU in float64."""
    exact = {n: x.double() if x.is_floating_point() else x for n, x in tensors.items()}
    expected, d_expected = with_gradients(function, exact, **options)
    found, d_found = with_gradients(function, there(tensors), **options)
    outputs, gradients, gates = BARS[dtype]
    for x, y in zip(found, expected, strict=True):
        assert x.device.type == DEVICE.type and relative_error(x.cpu(), y) < outputs
    for name, y in d_expected.items():
        bar = gradients if name in ("q", "k", "v", "p", "initial_state") else gates
        assert d_found[name].device.type == DEVICE.type and relative_error(d_found[name].cpu(), y) < bar, name


def single(op="kda", **sizes):
    sizes = {"B": 2, "T": 70, "H": 2, "HV": 4, "K": 32, "V": 48, "state": True} | sizes
    return make_problem(op, dtype=torch.float32, **sizes)


def test_the_library_has_cuda():
    assert any(name.startswith("cuda.") for name in _core.implementations())
    assert hasattr(torch._C, "_cuda_getCurrentRawStream")


# ---- numbers ----


@pytest.mark.parametrize("dtype", BARS)
@pytest.mark.parametrize("op", OPERATORS)
def test_operators(op, dtype):
    check(FUNCTIONS[op], make_problem(op, T=150, HV=4, K=64, V=48, dtype=dtype, state=True), dtype,
          output_final_state=True)


@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize("op", OPERATORS)
def test_ragged_batches(op, place):
    tensors = make_problem(op, B=1, T=150, HV=4, K=32, V=32, dtype=torch.float32, cu_seqlens=RAGGED, state=True)
    offsets = tensors.pop("cu_seqlens")
    exact = {n: x.double() for n, x in tensors.items()}
    expected, d_expected = with_gradients(FUNCTIONS[op], exact, cu_seqlens=offsets, output_final_state=True)
    found, d_found = with_gradients(FUNCTIONS[op], there(tensors), output_final_state=True,
                                    cu_seqlens=offsets if place == "host" else offsets.to(DEVICE))
    for x, y in zip(found, expected, strict=True):
        assert relative_error(x.cpu(), y) < 3e-6
    for name, y in d_expected.items():
        assert relative_error(d_found[name].cpu(), y) < 1e-5, name


def test_gates_and_beta_in_the_kernel():
    tensors = single()
    tensors["g"], tensors["beta"] = torch.randn(tensors["g"].shape), torch.randn(tensors["beta"].shape)
    tensors |= {"A_log": torch.rand(4), "dt_bias": torch.randn(4 * 32)}
    check(ht.chunk_kda, tensors, torch.float32, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
          allow_neg_eigval=True, use_qk_l2norm_in_kernel=True)


def test_strides_value_first_states_and_several_types():
    tensors = single()
    tensors["q"] = torch.stack([tensors["q"]] * 2, -1)[..., 0]
    tensors["v"] = tensors["v"].transpose(1, 2).contiguous().transpose(1, 2)
    tensors["initial_state"] = tensors["initial_state"].mT.contiguous()
    check(ht.fused_recurrent_kda, tensors, torch.float32, state_v_first=True, output_final_state=True)
    mixed = there(single() | {"v": single()["v"].bfloat16()})
    assert ht.chunk_kda(**mixed)[0].dtype == torch.float32 and ht.chunk_kda(**mixed)[0].device.type == DEVICE.type


def test_functions_with_decays_of_their_own():
    tensors = {n: x for n, x in single("linear_attention").items() if n in "qkv"}
    check(ht.chunk_retention, tensors, torch.float32)
    check(ht.fused_recurrent_lightning_attn, tensors, torch.float32, layer_idx=2, num_layers=5, reverse=True)


def test_functions_around_the_operators():
    x, weight = torch.randn(2, 37, 24), torch.randn(24, 4)
    tensors = dict(x=x, weight=weight, bias=torch.randn(24), initial_state=torch.randn(2, 24, 4))
    check(short_convolution, tensors, torch.float32, activation="silu", output_final_state=True)
    check(lambda **given: (rms_norm_gated(**given),), dict(x=x, g=torch.randn(x.shape), weight=torch.randn(24)),
          torch.float32)
    states, rows = torch.randn(5, 24, 4), torch.tensor([3, 1])
    mine = states.to(DEVICE, copy=True)
    y = short_convolution_step(x[:, 0].to(DEVICE), mine, weight.to(DEVICE), indices=rows.to(DEVICE))
    assert relative_error(y.cpu(), short_convolution_step(x[:, 0], states, weight, indices=rows)) < 3e-6
    assert torch.equal(mine.cpu(), states)


def test_same_bits_again():
    tensors = there(single("gated_delta_rule", T=300))
    first, second = (with_gradients(ht.chunk_gated_delta_rule, tensors, output_final_state=True) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first[0], second[0]))
    assert all(torch.equal(first[1][n], second[1][n]) for n in first[1])


# ---- pools ----


def token(seed):
    return make_problem("gated_delta_rule", B=3, T=1, HV=4, K=32, V=48, dtype=torch.float32, seed=seed)


def test_pools():
    step = ht.fused_recurrent_gated_delta_rule
    pool, rows = torch.randn(8, 4, 32, 48), torch.tensor([6, -1, 2])
    mine, states = pool.to(DEVICE, copy=True), pool.clone()
    out = torch.empty(3, 1, 4, 48, device=DEVICE)
    buffers = there(token(0))
    with torch.no_grad():
        bound = ht.bind(step, **buffers, initial_state=mine, ssm_state_indices=rows.to(DEVICE))
        for seed in range(4):
            expected = step(**token(seed), initial_state=states, ssm_state_indices=rows)[0]
            if seed % 2:
                o, _ = step(**there(token(seed)), initial_state=mine, ssm_state_indices=rows.to(DEVICE), out=out)
                assert o is out
            else:
                for name, x in there(token(seed)).items():
                    buffers[name].copy_(x)
                o, _ = bound()
            assert relative_error(o.cpu(), expected) < 3e-6
    assert relative_error(mine.cpu(), states) < 3e-6
    assert torch.equal(mine.cpu()[[0, 1, 3, 4, 5, 7]], pool[[0, 1, 3, 4, 5, 7]])


# ---- streams and graphs ----


@pytest.fixture
def nothing_waits():
    """An error where PyTorch would have the host wait."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_calls_are_queued_and_ordered_on_the_current_stream():
    here = single(T=200)
    right, stream = there(here), torch.cuda.Stream()
    blank = {n: torch.full_like(x, float("nan")) for n, x in right.items()}
    with torch.no_grad():
        expected = ht.chunk_kda(**right)[0].cpu()
        with torch.cuda.stream(stream):
            ht.chunk_kda(**right)  # the stream's first memory
            torch.cuda.synchronize()
            torch.cuda._sleep(500_000_000)  # cycles: some tenths of a second
            for name, x in right.items():
                blank[name].copy_(x, non_blocking=True)
            begin = time.perf_counter()
            o, _ = ht.chunk_kda(**blank)
            for x in blank.values():
                x.fill_(float("nan"))  # behind the call
            taken, is_busy = time.perf_counter() - begin, not stream.query()
        assert is_busy and taken < 0.1
        stream.synchronize()
    assert torch.equal(o.cpu(), expected)


def test_backward_runs_on_the_stream_of_its_forward():
    tensors, stream = there(single()), torch.cuda.Stream()
    expected = with_gradients(ht.chunk_kda, tensors)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        found = with_gradients(ht.chunk_kda, tensors)
    torch.cuda.synchronize()
    assert torch.equal(found[0][0], expected[0][0])
    assert all(torch.equal(found[1][n], expected[1][n]) for n in expected[1])


def test_nothing_waits(nothing_waits):
    tensors, offsets = there(single("gated_delta_rule", B=1)), torch.tensor([0, 30, 70]).cuda(non_blocking=True)
    states = torch.zeros(2, 4, 32, 48, device=DEVICE)
    with_gradients(ht.chunk_gated_delta_rule, tensors | {"initial_state": states, "cu_seqlens": offsets})
    with_gradients(ht.chunk_retention, {n: tensors[n] for n in "qkv"})
    layer = hnn.GatedDeltaNet(hidden_size=64, num_heads=2, head_dim=32, layer_idx=0).to(DEVICE, non_blocking=True)
    x, cache = torch.randn(1, 70, 64, device=DEVICE), hnn.Cache()
    layer(x)[0].sum().backward()
    with torch.no_grad():
        for tokens in (x[:, :2], x[:, :2], x):
            ends = torch.arange(3, device=DEVICE) if tokens.shape[1] == 2 else offsets
            layer(tokens, past_key_values=cache, use_cache=True, cu_seqlens=ends)


def captured(function):
    """(the results of function in a graph, what replays it)"""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return results, graph.replay


def test_graphs():
    tensors = there(single())
    offsets, places = torch.tensor([0, 30, 70]), torch.tensor([0, 30, 70], device=DEVICE)
    x, weight = torch.randn(2, 20, 24, device=DEVICE), torch.randn(24, 4, device=DEVICE)
    one = {n: x[:1] for n, x in tensors.items() if n != "initial_state"}

    def forward():
        with torch.no_grad():
            y = short_convolution(x, weight, activation="silu")[0]
            return (*ht.chunk_kda(**tensors, output_final_state=True), ht.chunk_kda(**one, cu_seqlens=offsets)[0],
                    ht.chunk_kda(**one, cu_seqlens=places)[0], ht.chunk_retention(*map(tensors.get, "qkv"))[0],
                    y, rms_norm_gated(y, x))

    results, replay = captured(forward)
    for seed in (1, 2):
        for name, values in there(single(seed=seed)).items():
            tensors[name].copy_(values)
        x.normal_()
        replay()
        found = [y.clone() for y in results]
        assert all(torch.equal(y, z) for y, z in zip(found, forward()))


def test_a_graph_of_a_training_step():
    tensors = {n: x.requires_grad_() for n, x in there(single("gated_delta_rule")).items()}

    def step():
        o, state = ht.chunk_gated_delta_rule(**tensors, output_final_state=True)
        return torch.autograd.grad((o * d_of_o).sum() + state.sum(), [*tensors.values()])

    d_of_o = torch.randn(2, 70, 4, 48, device=DEVICE)
    gradients, replay = captured(step)
    with torch.no_grad():
        for name, values in there(single("gated_delta_rule", seed=3)).items():
            tensors[name].copy_(values)
    replay()
    found = [x.clone() for x in gradients]
    assert all(torch.equal(x, y) for x, y in zip(found, step()))


def test_a_graph_of_a_decoding_step():
    step = ht.fused_recurrent_gated_delta_rule
    pool, rows = torch.randn(8, 4, 32, 48, device=DEVICE), torch.tensor([6, -1, 2], device=DEVICE)
    buffers = there(token(0))

    def decode():
        with torch.no_grad():
            return step(**buffers, initial_state=pool, ssm_state_indices=rows)[0]

    o, replay = captured(decode)
    states = pool.cpu()
    for seed in range(3):
        for name, x in there(token(seed)).items():
            buffers[name].copy_(x)
        replay()
        with torch.no_grad():
            expected = step(**token(seed), initial_state=states, ssm_state_indices=rows.cpu())[0]
        assert relative_error(o.cpu(), expected) < 3e-6
    assert relative_error(pool.cpu(), states) < 3e-6


# ---- PyTorch around it ----


def test_compiled():
    tensors = there(single())
    function = torch.compile(lambda **given: ht.chunk_kda(**given, output_final_state=True), backend="aot_eager",
                             fullgraph=True)
    expected, found = with_gradients(ht.chunk_kda, tensors, output_final_state=True), with_gradients(function, tensors)
    assert all(torch.equal(x, y) for x, y in zip(found[0], expected[0]))
    assert all(torch.equal(found[1][n], expected[1][n]) for n in expected[1])


def test_autocast_and_vmap():
    tensors = there(single())
    with torch.autocast(DEVICE.type, torch.bfloat16):
        o, state = ht.chunk_kda(**tensors, output_final_state=True)
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert relative_error(o, ht.chunk_kda(**tensors)[0]) < 2e-2
    vs = torch.stack([tensors["v"], -tensors["v"]])
    mapped = torch.func.vmap(lambda v: ht.chunk_kda(**tensors | {"v": v})[0])(vs)
    assert relative_error(mapped[1], ht.chunk_kda(**tensors | {"v": vs[1]})[0]) < 3e-6


def test_what_lies_elsewhere_is_named():
    here, mine = single(), there(single())
    for name in here:
        if name != "q":
            with pytest.raises(ValueError, match=f"^{name}: expected device cuda:0 as q, got cpu$"):
                ht.chunk_kda(**mine | {name: here[name]})
    with pytest.raises(ValueError, match="^k: expected device cpu as q, got cuda:0$"):
        ht.chunk_kda(**mine | {"q": here["q"]})


def test_wrong_values_do_not_stop_a_call():
    tensors = there(single())
    tensors["g"][0, 3, 1, 2] = 0.5
    o = ht.chunk_kda(**tensors)[0].cpu()
    assert torch.isnan(o[0, 3:, 1]).any() and torch.isfinite(o[:, :, [0, 2, 3]]).all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch.cuda finds one GPU")
def test_another_gpu_than_the_current_one():
    here = single()
    mine = {n: x.to("cuda:1") for n, x in here.items()}
    (o, state), gradients = with_gradients(ht.chunk_kda, mine, output_final_state=True)
    assert {x.device for x in (o, state, *gradients.values())} == {torch.device("cuda:1")}
    assert torch.cuda.current_device() == 0
    assert relative_error(o.cpu(), ht.chunk_kda(**here)[0]) < 3e-6
    with pytest.raises(ValueError, match="^k: expected device cuda:1 as q, got cuda:0$"):
        ht.chunk_kda(**mine | {"k": here["k"].to("cuda:0")})


LAYERS = {
    "GatedLinearAttention": {}, "SimpleGatedLinearAttention": {}, "GatedDeltaNet": {"head_dim": 32},
    "Comba": {"head_dim": 32}, "KimiDeltaAttention": {"head_dim": 32}, "LightningAttention": {"num_layers": 4},
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    """In float64, whose products PyTorch computes alike on both sides."""
    here = getattr(hnn, name)(hidden_size=64, num_heads=2, layer_idx=0, **LAYERS[name]).double()
    mine = getattr(hnn, name)(hidden_size=64, num_heads=2, layer_idx=0, **LAYERS[name]).double()
    mine.load_state_dict(here.state_dict())
    mine.to(DEVICE)
    x = torch.randn(2, 40, 64, dtype=torch.float64)
    for layer, tokens in ((here, x), (mine, x.to(DEVICE))):
        o = layer(tokens)[0]
        (o * d_of(o)).sum().backward()
    for (parameter, mine_parameter) in zip(here.parameters(), mine.parameters()):
        assert relative_error(mine_parameter.grad.cpu(), parameter.grad) < 1e-9
    mask = torch.ones(2, 40, dtype=torch.int64)
    mask[0, :7] = 0
    caches = hnn.Cache(), hnn.Cache()
    with torch.no_grad():
        sides = ((mine, x.to(DEVICE), mask.to(DEVICE), caches[0]), (here, x, mask, caches[1]))
        for part in (slice(0, 38), slice(38, 39), slice(39, 40)):
            o, expected = (layer(t[:, part], m[:, : part.stop], past_key_values=cache, use_cache=True)[0]
                           for layer, t, m, cache in sides)
            assert relative_error(o.cpu(), expected) < 1e-9


def test_sequences_cut_over_ranks():
    """Two processes that share the GPU, each with tokens of its own, beside one process on the CPU."""
    group = ranks.Group(2, alone=True)
    try:
        for strategy in ("summary", "ring", "heads"):
            for op in ("gated_delta_rule", "kda", "simple_gla"):
                job = partial(cp_jobs.compare, device=DEVICE)
                for errors in group.run(job, op, [150, 120], (2, 4, 64, 64), torch.bfloat16, {"strategy": strategy}):
                    expect_within_bars(errors, torch.bfloat16, op, strategy)
    finally:
        group.close()
