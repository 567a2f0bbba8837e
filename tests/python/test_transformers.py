"""headrace.integrations.transformers: small random models give what their own plain functions give."""

import collections
import copy
import functools
import re

import pytest
import torch
import transformers.models.kimi_linear.modeling_kimi_linear as kimi
import transformers.models.qwen3_next.modeling_qwen3_next as qwen
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DataCollatorWithFlattening

from headrace.integrations.transformers import MODELS, disable, enable, main, measure, tiny_model

LINEAR_LAYERS = 2


@pytest.fixture(autouse=True)
def undone():
    disable()
    yield
    disable()


@functools.lru_cache(maxsize=None)
def net_of(name):
    torch.manual_seed(0)
    return tiny_model(name, layers=LINEAR_LAYERS + 1).eval()


@pytest.fixture(params=MODELS)
def model(request):
    return request.param, net_of(request.param)


def random_tokens(*shape):
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(1))


def gradients_of(net):
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def logits_and_gradients(net, tokens, **arguments):
    net.zero_grad()
    output = net(input_ids=tokens, labels=tokens, **arguments)
    output.loss.backward()
    return output.logits.detach(), gradients_of(net)


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
    assert calls.count == {"forward": LINEAR_LAYERS * 12, "short_convolution": LINEAR_LAYERS}  # prefill, eleven tokens
    assert torch.equal(actual.sequences, expected.sequences)
    for a, b in zip(actual.logits, expected.logits):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_prefill_in_pieces(model):
    name, net = model
    tokens = random_tokens(2, 40)

    @torch.no_grad()
    def run():
        first = net(input_ids=tokens[:, :17], use_cache=True)
        second = net(input_ids=tokens[:, 17:], past_key_values=first.past_key_values, use_cache=True)
        return torch.cat((first.logits, second.logits), dim=1)

    expected = run()
    enable([name])
    torch.testing.assert_close(run(), expected, rtol=1e-4, atol=1e-4)


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
    with pytest.raises(ValueError, match="causal_conv1d_fn"):  # the model's own refusal: there are no offsets
        kimi.causal_conv1d_fn(x, weight, seq_idx=torch.zeros(2, 11, dtype=torch.int32))


def test_other_devices_keep_the_models_functions():
    enable()
    with Calls() as calls:
        o, _ = qwen.torch_recurrent_gated_delta_rule(*operands("meta"))
        y = qwen.causal_conv1d_fn(torch.empty(2, 6, 11, device="meta"), torch.empty(6, 4, device="meta"))
    assert (o.shape, y.shape, calls.count) == ((1, 9, 2, 16), (2, 6, 11), {})


def test_disable_puts_everything_back():
    before = qwen.torch_chunk_gated_delta_rule, qwen.causal_conv1d_fn
    assert enable() == list(MODELS)
    assert qwen.torch_chunk_gated_delta_rule is not before[0] and qwen.causal_conv1d_fn is not before[1]
    enable()  # twice is as good as once
    disable()
    assert (qwen.torch_chunk_gated_delta_rule, qwen.causal_conv1d_fn) == before


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
