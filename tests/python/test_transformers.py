"""headrace.integrations.transformers: small random models give what their own plain functions give."""

import re

import pytest
import torch
import transformers.models.qwen3_next.modeling_qwen3_next as qwen

from headrace.integrations.transformers import MODELS, disable, enable, main, tiny_model


@pytest.fixture(autouse=True)
def undone():
    disable()
    yield
    disable()


@pytest.fixture(params=["qwen3_next", "kimi_linear"])
def model(request):
    torch.manual_seed(0)
    return request.param, tiny_model(request.param, layers=3).eval()


def logits_and_gradients(net, tokens, mask=None):
    net.zero_grad()
    output = net(input_ids=tokens, labels=tokens, attention_mask=mask)
    output.loss.backward()
    return output.logits.detach(), {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}


def calls_of(monkeypatch):
    """Counts calls of the custom operator."""
    import headrace.torch._library as library

    count = [0]
    run = library._core.run

    class Counting:
        Options = library._core.Options

        @staticmethod
        def run(*arguments):
            count[0] += 1
            return run(*arguments)

    monkeypatch.setattr(library, "_core", Counting)
    return count


@pytest.mark.parametrize("length", [1, 7, 64, 150])
def test_logits_and_gradients(model, length, monkeypatch):
    name, net = model
    tokens = torch.randint(256, (2, length), generator=torch.Generator().manual_seed(1))
    expected, expected_gradients = logits_and_gradients(net, tokens)
    assert enable([name]) == [name]
    count = calls_of(monkeypatch)
    actual, gradients = logits_and_gradients(net, tokens)
    assert count[0] == 4  # forward and backward of two layers
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert gradients.keys() == expected_gradients.keys()
    for parameter, gradient in gradients.items():
        scale = expected_gradients[parameter].norm()
        assert (gradient - expected_gradients[parameter]).norm() <= 1e-4 * scale + 1e-7, parameter


def test_padded_batches(model):
    name, net = model
    tokens = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[0, :11] = 0
    expected, _ = logits_and_gradients(net, tokens, mask)
    enable([name])
    actual, _ = logits_and_gradients(net, tokens, mask)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_generation(model, monkeypatch):
    name, net = model
    tokens = torch.randint(256, (2, 20), generator=torch.Generator().manual_seed(1))
    settings = dict(max_new_tokens=12, do_sample=False, output_logits=True, return_dict_in_generate=True,
                    pad_token_id=0)
    expected = net.generate(tokens, **settings)
    enable([name])
    count = calls_of(monkeypatch)
    actual = net.generate(tokens, **settings)
    assert count[0] == 2 * 12  # the prefill and eleven tokens of two layers
    assert torch.equal(actual.sequences, expected.sequences)
    for a, b in zip(actual.logits, expected.logits):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_disable_puts_everything_back():
    before = qwen.torch_chunk_gated_delta_rule
    assert enable() == list(MODELS)
    assert qwen.torch_chunk_gated_delta_rule is not before
    enable()  # twice is as good as once
    disable()
    assert qwen.torch_chunk_gated_delta_rule is before


def test_what_the_measurement_prints(capsys):
    before = qwen.torch_chunk_gated_delta_rule
    main(["--tokens", "64", "--rounds", "1", "--memory", "fresh"])
    printed = capsys.readouterr().out
    assert "4 layers, 64 tokens, float32" in printed and "memory fresh in every call" in printed
    for name in ("qwen3_next", "kimi_linear"):
        times = re.search(rf"{name} +own functions +(\d+) ms +headrace +(\d+) ms +(\d+\.\d) x as fast", printed)
        assert times and abs(float(times[3]) - int(times[1]) / int(times[2])) < 0.2 * float(times[3])
    assert qwen.torch_chunk_gated_delta_rule is before  # everything is put back


def test_types_without_such_functions_are_refused():
    with pytest.raises(ValueError, match="models: expected types with plain functions of these operators, got 'llama'"):
        enable(["llama"])
    with pytest.raises(ModuleNotFoundError):
        enable(["no_such_model"])
