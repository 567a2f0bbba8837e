"""headrace.torch.nn in use: prefill and steps, padding, ragged batches, the cache, compilation, autocast, training."""

import copy

import pytest
import torch
from conftest import relative_error
from layers import HIDDEN, LAYERS, make
from torch import nn
from torch.utils.checkpoint import checkpoint

import headrace.torch.nn as hn


class Model(nn.Module):
    """A small stack: embedding, normalised layers with residuals, logits."""

    def __init__(self, name, layers=3):
        super().__init__()
        self.layers = nn.ModuleList(make(name, layer_idx=i, seed=i) for i in range(layers))
        self.norms = nn.ModuleList(hn.RMSNormGated(HIDDEN) for _ in range(layers))
        self.embedding, self.head = nn.Embedding(50, HIDDEN), nn.Linear(HIDDEN, 50)

    def forward(self, tokens, **options):
        x = self.embedding(tokens)
        for norm, layer in zip(self.norms, self.layers):
            x = x + layer(norm(x), **options)[0]
        return self.head(x)


def inputs(B, T, seed=1):
    return torch.randn(B, T, HIDDEN, generator=torch.Generator().manual_seed(seed))


def tokens_of(B, T):
    return torch.randint(50, (B, T), generator=torch.Generator().manual_seed(1))


def in_parts(model, x, ends, **options):
    """Outputs of calls that end at `ends`, each from the states of the one before."""
    cache, parts, begin = hn.Cache(), [], 0
    mask = options.pop("attention_mask", None)
    for end in ends:
        if mask is not None:
            options["attention_mask"] = mask[:, :end]
        o = model(x[:, begin:end], past_key_values=cache, use_cache=True, **options)
        parts.append(o[0] if isinstance(o, tuple) else o)
        begin = end
    return torch.cat(parts, 1), cache


# fp32: sums in another order; bf16: a few roundings of 2^-9 in each of three layers fall differently.
@pytest.mark.parametrize("dtype, bar", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", LAYERS)
def test_prefill_and_steps_give_the_same_logits(name, dtype, bar):
    model, tokens = Model(name).to(dtype), tokens_of(3, 40)
    with torch.no_grad():
        expected = model(tokens)
        for ends in ([29, 30, 31, 36, 37, 40], [1, 2, 3, 40]):
            actual, cache = in_parts(model, tokens, ends)
            assert relative_error(actual, expected) < bar
            assert len(cache) == 3 and all(cache.get_seq_length(i) == 40 for i in range(3))


@pytest.mark.parametrize("name", LAYERS)
def test_ragged_batches(name):
    """A ragged batch is its sequences one by one, in values and gradients; their last states continue them."""
    offsets = [0, 9, 9, 10, 24]
    layer, x, d_o = make(name).double(), inputs(1, 24).double(), inputs(1, 24, seed=2).double()
    apart = []
    for begin, end in zip(offsets, offsets[1:]):
        if end > begin:
            o = layer(x[:, begin:end])[0]
            o.backward(d_o[:, begin:end])
            apart.append(o)
    expected = {n: p.grad.clone() for n, p in layer.named_parameters()}
    layer.zero_grad()
    cache = hn.Cache()
    o = layer(x, cu_seqlens=torch.tensor(offsets), past_key_values=cache, use_cache=True)[0]
    o.backward(d_o)
    torch.testing.assert_close(o, torch.cat(apart, 1))
    for n, p in layer.named_parameters():
        torch.testing.assert_close(p.grad, expected[n], msg=n)
    more = inputs(4, 1, seed=3).double()
    with torch.no_grad():
        step = layer(more, past_key_values=cache, use_cache=True)[0]
        for n, (begin, end) in enumerate(zip(offsets, offsets[1:])):
            whole = layer(torch.cat([x[:, begin:end], more[n : n + 1]], 1))[0]
            torch.testing.assert_close(step[n], whole[0, -1:])


@pytest.mark.parametrize("name", ["gla_grouped", "simple_gla", "lightning", "gated_deltanet", "comba", "kda"])
def test_padded_batches(name):
    """Padding on the left, on the right, in between and everywhere: as if the tokens stood alone."""
    layer, x = make(name).double(), inputs(5, 12).double().requires_grad_()
    mask = torch.ones(5, 12, dtype=torch.long)
    mask[1, :5] = mask[2, 7:] = mask[3, 3:6] = mask[4] = 0
    o = layer(x, attention_mask=mask)[0]
    for n in range(4):
        torch.testing.assert_close(o[n][mask[n] == 1], layer(x[n][mask[n] == 1].unsqueeze(0))[0][0])
    assert not o[mask == 0].any()
    o.sum().backward()
    assert not x.grad[mask == 0].any() and x.grad[mask == 1].all(-1).all()
    assert torch.equal(layer(x, attention_mask=torch.ones(5, 12))[0], layer(x)[0])

    steps = torch.cat([mask, torch.ones(5, 3, dtype=torch.long)], 1)
    steps[2, 13] = 0
    longer = torch.cat([x.detach(), inputs(5, 3, seed=2).double()], 1)
    with torch.no_grad():
        expected = layer(longer, attention_mask=steps)[0]
        for ends in ([12, 13, 14, 15], [12, 15], [6, 15]):
            torch.testing.assert_close(in_parts(layer, longer, ends, attention_mask=steps)[0], expected)


@pytest.mark.parametrize("name", ["gla_grouped", "lightning", "gated_deltanet", "comba", "kda"])
def test_no_tokens(name):
    layer, x = make(name), inputs(2, 5)
    with torch.no_grad():
        expected = layer(x)[0]
        actual, _ = in_parts(layer, x, [0, 3, 3, 5])
        torch.testing.assert_close(actual, expected)
        assert layer(x[:, :0], attention_mask=torch.ones(2, 7))[0].shape == (2, 0, HIDDEN)
        assert not layer(x, attention_mask=torch.zeros(2, 5))[0].any()


def test_wrong_masks():
    layer, x = make("gated_deltanet"), inputs(2, 4)
    for mask in (torch.ones(2, 3), torch.ones(1, 4), torch.ones(2, 1, 4, 4)):
        with pytest.raises(ValueError, match=r"attention_mask: expected shape \[2, at least 4\], 0 for padding, got"):
            layer(x, attention_mask=mask)


# ---- the cache ----

def test_steps_update_states_in_place_only_where_nothing_needs_them():
    layer, x = make("gated_deltanet"), inputs(2, 6)
    with torch.no_grad():
        _, cache = in_parts(layer, x, [4])
        tensors = [cache[0]["recurrent_state"], *cache[0]["conv_state"]]
        before = [t.clone() for t in tensors]
        look = layer(x[:, 4:5], past_key_values=cache)[0]
        assert all(torch.equal(t, b) for t, b in zip(tensors, before)) and cache.get_seq_length() == 4
        step = layer(x[:, 4:5], past_key_values=cache, use_cache=True)[0]
        torch.testing.assert_close(step, look)
        assert all(a is b for a, b in zip([cache[0]["recurrent_state"], *cache[0]["conv_state"]], tensors))
        assert not any(torch.equal(t, b) for t, b in zip(tensors, before))
    before = [t.clone() for t in tensors]
    layer(x[:, 5:], past_key_values=cache, use_cache=True)
    assert all(torch.equal(t, b) for t, b in zip(tensors, before))
    assert cache[0]["recurrent_state"] is not tensors[0] and cache.get_seq_length() == 6


@pytest.mark.parametrize("name", ["gla_grouped", "lightning", "gated_deltanet", "comba", "kda"])
def test_gradients_flow_through_the_cache(name):
    """Two calls with autograd are one, also if a token is decoded from the same states before the backward."""
    layer, x, d_o = make(name).double(), inputs(2, 10).double(), inputs(2, 10, seed=2).double()
    layer(x)[0].backward(d_o)
    expected = {n: p.grad.clone() for n, p in layer.named_parameters()}
    layer.zero_grad()
    first, cache = in_parts(layer, x, [7])
    second = layer(x[:, 7:], past_key_values=cache)[0]
    with torch.no_grad():
        layer(inputs(2, 1).double(), past_key_values=cache, use_cache=True)
    torch.cat([first, second], 1).backward(d_o)
    for n, p in layer.named_parameters():
        torch.testing.assert_close(p.grad, expected[n], msg=n)


def test_states_that_a_step_has_changed_cannot_be_used_by_a_backward():
    layer, x = make("lightning"), inputs(2, 5)
    with torch.no_grad():
        _, cache = in_parts(layer, x, [4])
    o = layer(x[:, 4:], past_key_values=cache)[0]
    with torch.no_grad():
        layer(x[:, 4:], past_key_values=cache, use_cache=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_inference_mode():
    layer, x = make("gated_deltanet"), inputs(2, 6)
    with torch.inference_mode():
        actual, _ = in_parts(layer, x, [4, 5, 6])
        torch.testing.assert_close(actual, layer(x)[0])


def test_cache():
    model, tokens = Model("comba"), tokens_of(3, 8)
    with torch.no_grad():
        _, cache = in_parts(model, tokens[:, :7], [7])
        state = cache[1]
        assert state["recurrent_state"].shape == (3, 4, 16, 32) and state["recurrent_state"].dtype == torch.float32
        assert [tuple(s.shape) for s in state["conv_state"]] == [(3, 32, 4), (3, 32, 4), (3, 128, 4)]
        fork = copy.deepcopy(cache)
        fork.select(torch.tensor([2, 0, 2, 1]))
        expected = model(tokens[:, 7:], past_key_values=cache, use_cache=True)
        actual = model(tokens[[2, 0, 2, 1], 7:], past_key_values=fork, use_cache=True)
        torch.testing.assert_close(actual, expected[[2, 0, 2, 1]])
        assert [state["recurrent_state"].shape[0] for state in fork] == [4, 4, 4]
        cache.reset()
        assert len(cache) == 0 and cache.get_seq_length() == 0
        torch.testing.assert_close(model(tokens, past_key_values=cache, use_cache=True)[:, -1:], expected)


def test_detached_cache():
    """Truncated backpropagation: the second call's gradients are those of states that are constants."""
    layer, x, d_o = make("gated_deltanet").double(), inputs(2, 10).double(), inputs(2, 4, seed=2).double()
    gradients = []
    for history in (torch.no_grad(), torch.enable_grad()):
        layer.zero_grad()
        with history:
            _, cache = in_parts(layer, x, [6])
        cache.detach()
        layer(x[:, 6:], past_key_values=cache)[0].backward(d_o)
        gradients.append([p.grad.clone() for p in layer.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


def test_cache_of_a_hybrid_model():
    """Layers of other kinds keep nothing here; update() works as in flash-linear-attention."""
    cache = hn.Cache()
    state = cache.update(recurrent_state=torch.zeros(1), layer_idx=2, offset=5)
    assert len(cache) == 3 and cache[0] is None and cache[2] is state and cache.get_seq_length(2) == 5
    assert cache.get_seq_length(0) == 0 and cache.get_seq_length(7) == 0
    conv = (torch.ones(1),) * 3
    cache.update(conv_state=conv, layer_idx=2)
    assert cache[2]["conv_state"] is conv and cache[2]["recurrent_state"] is not None and cache.get_seq_length(2) == 6
    layer = make("gated_deltanet", layer_idx=None)
    with pytest.raises(ValueError,
                       match="layer_idx: expected the layer's place in the cache with past_key_values, got"):
        layer(inputs(1, 2), past_key_values=cache)


# ---- training ----

@pytest.mark.parametrize("name", LAYERS)
def test_compiled(name):
    layer, x, d_o = make(name), inputs(2, 20), inputs(2, 20, seed=2)
    o = layer(x)[0]
    o.backward(d_o)
    expected = {n: p.grad.clone() for n, p in layer.named_parameters()}
    layer.zero_grad()
    torch.compiler.reset()  # the layers share one forward, which is compiled for few classes at a time
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)[0]
    compiled.backward(d_o)
    torch.testing.assert_close(compiled, o)
    for n, p in layer.named_parameters():
        torch.testing.assert_close(p.grad, expected[n], msg=n)


@pytest.mark.parametrize("name", ["lightning", "gated_deltanet", "kda"])
def test_compiled_decoding(name):
    layer, x = make(name), inputs(2, 8)
    torch._dynamo.reset()
    with torch.no_grad():
        actual, _ = in_parts(torch.compile(layer, backend="aot_eager", fullgraph=True), x, [6, 7, 8])
        torch.testing.assert_close(actual, layer(x)[0])


@pytest.mark.parametrize("name", LAYERS)
def test_autocast(name):
    """Parameters stay float32, activations are bf16: a few roundings of 2^-9."""
    layer, x, d_o = make(name), inputs(2, 20), inputs(2, 20, seed=2)
    layer(x)[0].backward(d_o)
    expected_o = layer(x)[0].detach()
    expected = torch.cat([p.grad.flatten() for p in layer.parameters()])
    layer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        o = layer(x)[0]
        decoded, _ = in_parts(layer, x, [18, 19, 20])
    o.backward(d_o.bfloat16())
    assert o.dtype == torch.bfloat16 and all(p.grad.dtype == torch.float32 for p in layer.parameters())
    assert relative_error(o, expected_o) < 1.5e-2 and relative_error(decoded, expected_o) < 1.5e-2
    assert relative_error(torch.cat([p.grad.flatten() for p in layer.parameters()]), expected) < 4e-2


@pytest.mark.parametrize("name", ["gla_grouped", "lightning", "gated_deltanet", "comba", "kda"])
def test_gradient_checkpointing(name):
    layer, d_o = make(name), inputs(2, 20, seed=2)
    gradients = []
    for run in (lambda x: layer(x)[0], lambda x: checkpoint(layer, x, use_reentrant=False)[0]):
        layer.zero_grad()
        x = inputs(2, 20).requires_grad_()
        run(x).backward(d_o)
        gradients.append([x.grad, *(p.grad.clone() for p in layer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*gradients))
