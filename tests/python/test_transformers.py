"""headrace.integrations.transformers: small random models give what their own plain functions give."""

import collections
import copy
import functools
import importlib
import re

import pytest
import torch
import transformers.models.kimi_linear.modeling_kimi_linear as kimi
import transformers.models.qwen3_next.modeling_qwen3_next as qwen
import transformers_runs
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DataCollatorWithFlattening
from transformers_runs import LINEAR_LAYERS, gradients_of, in_pieces, logits_and_gradients, module_of, random_tokens

from headrace.integrations.transformers import MODELS, disable, enable, main, measure


@pytest.fixture(autouse=True)
def undone():
    disable()
    yield
    disable()


net_of = functools.lru_cache(maxsize=None)(transformers_runs.net_of)


@pytest.fixture(params=MODELS)
def model(request):
    return request.param, net_of(request.param)


def assert_same(actual, expected):
    (logits, gradients), (expected_logits, expected_gradients) = actual, expected
    torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-4)
    assert gradients.keys() == expected_gradients.keys()
    for parameter, gradient in gradients.items():
        scale = expected_gradients[parameter].norm()
        error = (gradient - expected_gradients[parameter]).norm()
        assert error <= 1e-4 * scale + 1e-7, parameter  # 1e-7: those of gates are small sums of far larger terms


class Calls(TorchDispatchMode):
    """Counts calls of headrace's custom operators, by name."""

    def __init__(self):
        super().__init__()
        self.count = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "headrace":
            self.count[function._opname] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("length", [1, 64, 150])
def test_logits_and_gradients(model, length):
    name, net = model
    tokens = random_tokens(2, length)
    expected = logits_and_gradients(net, tokens)
    assert enable([name]) == [name]
    with Calls() as calls:
        actual = logits_and_gradients(net, tokens)
    assert calls.count == dict.fromkeys(
        ("forward", "backward", "short_convolution", "short_convolution_backward"), LINEAR_LAYERS)
    assert_same(actual, expected)


def test_padded_batches(model):
    name, net = model
    tokens = random_tokens(2, 40)
    mask = torch.ones_like(tokens)
    mask[0, :11] = 0
    expected = logits_and_gradients(net, tokens, attention_mask=mask)
    enable([name])
    assert_same(logits_and_gradients(net, tokens, attention_mask=mask), expected)


def test_generation(model):
    name, net = model
    tokens = random_tokens(2, 20)
    settings = dict(max_new_tokens=12, do_sample=False, output_logits=True, return_dict_in_generate=True,
                    pad_token_id=0)
    expected = net.generate(tokens, **settings)
    enable([name])
    with Calls() as calls:
        actual = net.generate(tokens, **settings)
    assert calls.count == {"forward": LINEAR_LAYERS * 12, "short_convolution": LINEAR_LAYERS,
                           "short_convolution_step": LINEAR_LAYERS * 11}  # prefill, eleven tokens
    assert torch.equal(actual.sequences, expected.sequences)
    for a, b in zip(actual.logits, expected.logits):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ends", [(17, 40), (17, 18, 19, 25, 26), (1, 2, 3)], ids=["pieces", "tokens", "from one"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_calls_on_a_cache(model, ends, padded):
    """Logits and states, which stay where they are in memory, as in_pieces looks; with autograd too."""
    name, net = model
    mask = torch.ones(2, ends[-1], dtype=torch.long)
    mask[0, : ends[0] // 2] = not padded
    for grad in (False, True):
        expected = in_pieces(net, random_tokens(2, ends[-1]), ends, mask, grad)
        enable([name])
        actual = in_pieces(net, random_tokens(2, ends[-1]), ends, mask, grad)
        disable()
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "glm5_next"])  # its full attention mixes them
def test_packed_sequences_stay_apart(name):
    net, parts = net_of(name), random_tokens(1, 50).split([5, 33, 12], dim=1)
    weights = torch.randn(1, 50, 256, generator=torch.Generator().manual_seed(2))

    def run(call):
        net.zero_grad()
        logits = call()
        (logits * weights).mean().backward()
        return logits.detach(), gradients_of(net)

    expected = run(lambda: torch.cat([net(input_ids=part).logits for part in parts], dim=1))
    enable([name])
    pack = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True, return_tensors="pt")
    packed = pack([{"input_ids": part[0].tolist()} for part in parts])
    del packed["labels"]  # its loss is not the sum of the parts'
    assert_same(run(lambda: net(**packed, use_cache=False).logits), expected)


def test_bfloat16(model):
    name, net = model
    half = copy.deepcopy(net).bfloat16()
    tokens = random_tokens(2, 100)
    with torch.no_grad():
        exact = copy.deepcopy(half).float()(input_ids=tokens).logits
        plain = half(input_ids=tokens).logits
        enable([name])
        ours = half(input_ids=tokens).logits
    assert ours.dtype == torch.bfloat16
    assert (ours - exact).norm() <= 1.5 * (plain - exact).norm()  # two roundings of the same size, not one bound


def operands(device="cpu", K=16):
    q, k, v = torch.randn(3, 1, 9, 2, K, device=device)
    return q, k, v, -torch.rand(1, 9, 2, device=device), torch.rand(1, 9, 2, device=device)


def test_arguments_of_the_functions():
    q, k, v, g, beta = operands()
    plain, _ = qwen.torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, chunk_size=32, num_items_in_batch=3)
    x, weight = torch.randn(2, 6, 11), torch.randn(6, 4)
    convolved = {name: qwen.causal_conv1d_fn(x, weight, activation=name) for name in (None, "silu", "gelu")}
    enable()
    ours, _ = qwen.torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, chunk_size=32, num_items_in_batch=3)
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
    twice, _ = qwen.torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, scale=2 * q.shape[-1] ** -0.5)
    torch.testing.assert_close(twice, 2 * ours)
    for name, expected in convolved.items():
        torch.testing.assert_close(qwen.causal_conv1d_fn(x, weight, activation=name), expected, rtol=1e-4, atol=1e-4)
    for call in (lambda **apart: kimi.causal_conv1d_fn(x, weight, **apart),
                 lambda **apart: qwen.torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, **apart)):
        with pytest.raises(ValueError, match="cu_seq_lens_q: expected beside seq_idx, to keep .* apart, got None"):
            call(seq_idx=torch.zeros(2, 11, dtype=torch.int32))


@pytest.mark.parametrize("activation", [None, "silu", "swish", "gelu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("kept", [3, 4, 7])  # inputs in the state: a convolution over four needs three
def test_convolution_on_a_state(kept, tokens, dtype, activation):
    """causal_conv1d_update, also of states of a cache that records and of slices of them; gradients too."""
    weight, bias = torch.randn(6, 4, requires_grad=True), torch.randn(6, requires_grad=True)
    buffer, x = torch.randn(2, 6, kept + 2), torch.randn(2, tokens, 6).transpose(1, 2).to(dtype)

    def run():
        for grad in (False, True):
            state = buffer.clone().to(dtype)[..., 1 : kept + 1]
            held = state.data_ptr()
            inputs = x.clone().requires_grad_(grad)
            with torch.set_grad_enabled(grad):
                y = qwen.causal_conv1d_update(inputs, state, weight.to(dtype), bias.to(dtype), activation)
            assert y.dtype == dtype and state.data_ptr() == held
            yield y.detach(), state.detach()
            if grad:
                yield torch.autograd.grad(y.float().square().sum(), (inputs, weight, bias))

    expected = list(run())
    enable(["qwen3_next"])
    bar = 1e-5 if dtype == torch.float32 else 5e-2  # of bfloat16 the plain function rounds every intermediate
    for actual, plain in zip(run(), expected, strict=True):
        for a, b in zip(actual, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=bar, atol=bar)


def test_misuse_of_the_convolution_on_a_state():
    enable(["qwen3_next"])
    with pytest.raises(ValueError, match="conv_state: expected at least 3 inputs, got 2"):
        qwen.causal_conv1d_update(torch.randn(2, 6, 1), torch.randn(2, 6, 2), torch.randn(6, 4))
    with pytest.raises(TypeError, match="conv_state_indices"):
        qwen.causal_conv1d_update(torch.randn(2, 6, 1), torch.randn(2, 6, 4), torch.randn(6, 4), conv_state_indices=0)


def test_other_devices_keep_the_models_functions():
    enable()
    with Calls() as calls:
        o, _ = qwen.torch_recurrent_gated_delta_rule(*operands("meta"))
        x, state, weight = (torch.empty(*sizes, device="meta") for sizes in ((2, 6, 11), (2, 6, 4), (6, 4)))
        y, step = qwen.causal_conv1d_fn(x, weight), qwen.causal_conv1d_update(x[..., :1], state, weight)
    assert (o.shape, y.shape, step.shape, calls.count) == ((1, 9, 2, 16), (2, 6, 11), (2, 6, 1), {})


def test_disable_puts_everything_back():
    modules = [module_of(name) for name in MODELS]
    before = [dict(vars(module)) for module in modules]
    assert enable() == list(MODELS)
    enabled = [dict(vars(module)) for module in modules]
    for old, new in zip(before, enabled):
        assert len([name for name in old if old[name] is not new[name]]) == 4
    enable()  # twice is as good as once
    assert [dict(vars(module)) for module in modules] == enabled
    disable()
    for module, old in zip(modules, before):
        assert vars(module).keys() == old.keys() and all(vars(module)[name] is old[name] for name in old)


def test_versions_whose_models_keep_their_functions_are_refused(monkeypatch):
    monkeypatch.setattr(importlib.import_module("transformers"), "__version__", "5.14.1")
    with pytest.raises(ImportError, match="headrace.integrations.transformers: expected transformers 5.15 or newer, "
                                          "got 5.14.1"):
        enable()


@pytest.mark.alone
@pytest.mark.parametrize("name, tokens, factor", [("qwen3_next", 512, 1.2), ("kimi_linear", 256, 3.0)])
def test_training_is_faster(name, tokens, factor):
    """Far below what a quiet machine gives; again where another process took the time of one of the two."""
    for _ in range(3):
        plain, ours = measure(name, tokens, rounds=3)
        if plain >= factor * ours:
            return
    pytest.fail(f"a training step of {name}: expected {factor} x as fast, got {plain:.3f} s and {ours:.3f} s")


def test_what_the_measurement_prints(capsys):
    before = qwen.torch_chunk_gated_delta_rule
    main(["--tokens", "64", "--rounds", "1", "--memory", "fresh", "--model", "qwen3_5", "bailing_hybrid"])
    printed = capsys.readouterr().out
    assert "4 layers, 64 tokens, float32" in printed and "memory fresh in every call" in printed
    for name in ("qwen3_5", "bailing_hybrid"):
        times = re.search(rf"{name} +own functions +(\d+) ms +headrace +(\d+) ms +(\d+\.\d) x as fast", printed)
        assert times and abs(float(times[3]) - int(times[1]) / int(times[2])) < 0.2 * float(times[3])
    assert qwen.torch_chunk_gated_delta_rule is before  # everything is put back


def test_types_without_such_functions_are_refused():
    for name in ("llama", "mamba"):  # mamba has the convolution alone
        with pytest.raises(ValueError, match="models: expected types with plain functions of these operators, got "
                                             f"'{name}'"):
            enable([name])
    with pytest.raises(ModuleNotFoundError):
        enable(["no_such_model"])
