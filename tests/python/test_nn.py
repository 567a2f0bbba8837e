"""headrace.torch.nn: parameters as in flash-linear-attention, values and gradients against plain compositions."""

import copy

import pytest
import torch
import torch.nn.functional as F
from conftest import relative_error
from layers import HIDDEN, LAYERS, make, plain

import headrace.torch.nn as hn

# Names and shapes of the parameters of the layers of flash-linear-attention 0.6, read from instances of them.
CONVOLUTIONS = "q_conv1d.weight 32,1,4; k_conv1d.weight 32,1,4; v_conv1d.weight 64,1,4; "
CONVOLUTION_BIASES = "q_conv1d.bias 32; k_conv1d.bias 32; v_conv1d.bias 64; "
STEP_GATE = "A_log 2; dt_bias 2; a_proj.weight 2,64; b_proj.weight 2,64; "
QKV = "q_proj.weight 32,64; k_proj.weight 32,64; v_proj.weight 64,64; "
OUT = "o_proj.weight 64,64; "
GATED = "g_proj.weight 64,64; "
PARAMETERS = {
    "gla": QKV + OUT + GATED + "gk_proj.0.weight 16,64; gk_proj.1.weight 32,16; gk_proj.1.bias 32; "
           "g_norm_swish_gate.weight 16",
    "gla_grouped": OUT + GATED + "q_proj.weight 32,64; k_proj.weight 16,64; v_proj.weight 32,64; "
                   "q_conv1d.weight 32,1,4; k_conv1d.weight 16,1,4; v_conv1d.weight 32,1,4; q_conv1d.bias 32; "
                   "k_conv1d.bias 16; v_conv1d.bias 32; gk_proj.0.weight 16,64; gk_proj.1.weight 16,16; "
                   "gk_proj.1.bias 16; g_norm.weight 16",
    "gla_ungated": QKV + OUT + "gk_proj.0.weight 16,64; gk_proj.1.weight 32,16; gk_proj.1.bias 32",
    "simple_gla": OUT + GATED + "q_proj.weight 64,64; k_proj.weight 64,64; v_proj.weight 64,64; "
                  "q_conv1d.weight 64,1,4; k_conv1d.weight 64,1,4; v_conv1d.weight 64,1,4; gk_proj.weight 4,64; "
                  "gk_proj.bias 4; g_norm_swish_gate.weight 16",
    "simple_gla_grouped": OUT + GATED + "q_proj.weight 64,64; k_proj.weight 32,64; v_proj.weight 32,64; "
                          "gk_proj.weight 4,64; gk_proj.bias 4; g_norm.weight 16",
    "gated_deltanet": QKV + STEP_GATE + CONVOLUTIONS + OUT + GATED + "o_norm.weight 32",
    "gated_deltanet_grouped": QKV + CONVOLUTIONS + CONVOLUTION_BIASES + OUT + GATED + "A_log 4; dt_bias 4; "
                              "a_proj.weight 4,64; b_proj.weight 4,64; o_norm.weight 16",
    "gated_deltanet_ungated": QKV + STEP_GATE + OUT + "o_norm.weight 32",
    "comba": "q_proj.weight 32,64; k_proj.weight 32,64; v_proj.weight 128,64; decay 2; D 2; A_log 4; dt_bias 4; "
             "a_proj.weight 4,64; b_proj.weight 4,64; q_conv1d.weight 32,1,4; k_conv1d.weight 32,1,4; "
             "v_conv1d.weight 128,1,4; g_proj.weight 128,64; o_norm.weight 32; o_proj.weight 64,128",
    "comba_plain": QKV + STEP_GATE + CONVOLUTIONS + OUT + "o_norm.weight 32",
    "kda": QKV + CONVOLUTIONS + OUT + "A_log 4; dt_bias 64; f_proj.0.weight 16,64; f_proj.1.weight 64,16; "
           "b_proj.weight 4,64; g_proj.0.weight 16,64; g_proj.1.weight 64,16; g_proj.1.bias 64; o_norm.weight 16",
    "kda_bounded": QKV + CONVOLUTIONS + CONVOLUTION_BIASES + OUT + "A_log 2; dt_bias 32; f_proj.0.weight 32,64; "
                   "f_proj.1.weight 32,32; b_proj.weight 2,64; g_proj.0.weight 32,64; g_proj.1.weight 64,32; "
                   "g_proj.1.bias 64; o_norm.weight 32",
}


def shapes_of(name):
    entries = (entry.split() for entry in PARAMETERS[name].strip("; ").split(";"))
    return {parameter: tuple(map(int, sizes.split(","))) for parameter, sizes in entries}


# Bars for o and for gradients: rounding to the type between the stages of a layer, a few of them; bf16 has eps 2^-8.
BARS = {torch.float64: (1e-12, 1e-11), torch.float32: (2e-6, 1e-5), torch.bfloat16: (1e-2, 2e-2)}


def together(gradients):
    """One vector: in bf16 the gradient of a rate, or at the edge of a clamp, is what rounding leaves of large terms."""
    return {"all": torch.cat([gradient.flatten() for gradient in gradients.values()])}


@pytest.mark.parametrize("name", PARAMETERS)
def test_checkpoints_of_flash_linear_attention_load(name):
    layer, shapes = make(name), shapes_of(name)
    assert {n: tuple(p.shape) for n, p in layer.named_parameters()} == shapes
    checkpoint = {n: torch.randn(shape) for n, shape in shapes.items()}
    layer.load_state_dict(checkpoint, strict=True)
    for n, p in layer.named_parameters():
        assert torch.equal(p, checkpoint[n]) and p.dtype == torch.float32


def test_starting_values():
    """The ranges of flash-linear-attention: rates, time steps between 0.001 and 0.1, all out of weight decay."""
    for layer, low in ((hn.GatedDeltaNet(hidden_size=8, head_dim=2, num_heads=2000), 0),
                       (hn.Comba(hidden_size=8, head_dim=2, num_heads=2000, correction_factor=0.02), 0),
                       (hn.KimiDeltaAttention(hidden_size=8, head_dim=2, num_heads=2000), 1)):
        rate, step = layer.A_log.detach().exp(), F.softplus(layer.dt_bias.detach())
        assert low <= rate.min() < low + 0.1 and 15.9 < rate.max() <= 16.001 and abs(rate.mean() - (16 + low) / 2) < 0.5
        assert 0.00099 < step.min() < 0.0011 and 0.095 < step.max() < 0.1001
        assert abs(step.log().mean() - torch.tensor(0.01).log()) < 0.15
        assert layer.A_log._no_weight_decay and layer.dt_bias._no_weight_decay
    comba = hn.Comba(hidden_size=8, head_dim=2, num_heads=3, correction_factor=0.02)
    assert torch.equal(comba.D, torch.full((3,), 0.02)) and torch.equal(comba.decay, torch.ones(3))
    assert comba.D._no_weight_decay
    assert not hn.KimiDeltaAttention(hidden_size=8, head_dim=2, num_heads=3, safe_gate=True).A_log.any()


@pytest.mark.parametrize("name", LAYERS)
def test_values_and_gradients(name):
    """Outputs and the gradients of the input and of every parameter, from values that all types represent."""
    layer = make(name).bfloat16().double()
    draw = torch.Generator().manual_seed(1)
    x, d_o = (torch.randn(2, 15, HIDDEN, generator=draw).bfloat16() for _ in range(2))
    exact = {n: p.detach().clone().requires_grad_() for n, p in layer.named_parameters()}
    exact_x = x.double().requires_grad_()
    expected = plain(name, exact, exact_x, getattr(layer, "g_gamma", None))
    expected.backward(d_o.double())
    for dtype, (bar, gradient_bar) in BARS.items():
        layer.to(dtype).zero_grad()
        my_x = x.to(dtype).requires_grad_()
        o, weights, cache = layer(my_x)
        o.backward(d_o.to(dtype))
        assert o.dtype == dtype and weights is None and cache is None
        assert relative_error(o, expected) < bar, dtype
        assert relative_error(my_x.grad, exact_x.grad) < gradient_bar, dtype
        gradients = {n: p.grad for n, p in layer.named_parameters()}
        expected_gradients = {n: p.grad for n, p in exact.items()}
        if dtype == torch.bfloat16:
            gradients, expected_gradients = together(gradients), together(expected_gradients)
        for n, gradient in gradients.items():
            assert relative_error(gradient, expected_gradients[n]) < gradient_bar, (dtype, n)


# ---- lightning attention ----

@pytest.mark.parametrize("name", LAYERS)
def test_a_context_of_several_processes_is_refused(name):
    with pytest.raises(ValueError, match="cp_context: expected a context"):
        make(name)(torch.randn(1, 5, HIDDEN), cp_context=object())


def test_lightning_gates():
    """The largest log decays of published models, and the layers at both ends of each convention."""
    for num_heads, num_layers, largest in ((16, 20, 0.744), (32, 32, 0.868), (64, 80, 0.929)):
        gates = hn.lightning_gates(num_heads, 0, num_layers, "bailing")
        assert abs(-gates.min().item() - largest) < 5e-4 and gates.shape == (num_heads,) and (gates < 0).all()
    slopes = torch.tensor([2.0 ** -(h + 1) for h in range(8)], dtype=torch.float64)
    for convention, first, last in (("bailing", 1 + 1 / 3, 1 / 3), ("maxtext", 1, 0), ("minimax", 1, 1e-5 / 3)):
        torch.testing.assert_close(hn.lightning_gates(8, 0, 4, convention), -slopes * (first + 1e-5))
        torch.testing.assert_close(hn.lightning_gates(8, 3, 4, convention), -slopes * (last + 1e-5), rtol=1e-5, atol=0)
    six = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3], dtype=torch.float64)
    torch.testing.assert_close(hn.lightning_gates(6, 1, 3, "bailing"), -six * (1 + 1e-5))


def test_lightning_gates_keep_their_digits():
    layer = make("lightning").bfloat16()
    gates = hn.lightning_gates(4, 0, 3)
    assert layer.g_gamma.dtype == torch.float32 and relative_error(layer.g_gamma, gates) < 1e-7
    assert torch.equal(layer.double().g_gamma, gates) and "g_gamma" not in layer.state_dict()
    with torch.device("meta"):
        layer = make("lightning")
    assert layer.g_gamma.is_meta and relative_error(layer.to_empty(device="cpu").g_gamma, gates) < 1e-7


def test_lightning_rotation():
    """Positions as transformers gives them: the first channels turn, by halves, alike in all sequences."""
    layer = make("lightning").double()
    x = torch.randn(2, 9, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    angles = torch.arange(9, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64)
    double = torch.cat([angles, angles], -1)[None]
    o = layer(x, position_embeddings=(double.cos(), double.sin()))[0]

    turn = torch.polar(torch.ones_like(angles), angles)[None, :, None]

    def rotated(y):
        y = y.unflatten(-1, (4, 16))
        pairs = torch.complex(y[..., :4], y[..., 4:8]) * turn
        return torch.cat([pairs.real, pairs.imag, y[..., 8:]], -1).flatten(2)

    q, k, v = rotated(layer.q_proj(x)), rotated(layer.k_proj(x)), layer.v_proj(x)
    q, k, v = (y.unflatten(-1, (4, 16)) for y in (q, k, v))
    decay = layer.g_gamma[:, None, None] * (torch.arange(9)[:, None] - torch.arange(9))
    scores = torch.einsum("bihk,bjhk->bhij", q, k) / 4 * torch.where(decay <= 0, decay.exp(), 0).tril()
    y = torch.einsum("bhij,bjhv->bihv", scores, v).flatten(2)
    expected = layer.o_proj(layer.g_norm(y, layer.g_proj(x)))
    torch.testing.assert_close(o, expected, rtol=1e-10, atol=1e-12)

    mask = torch.ones(2, 9)
    mask[0, 5:] = 0
    padded = layer(x, attention_mask=mask, position_embeddings=(double.cos(), double.sin()))[0]
    torch.testing.assert_close(padded[0, :5], o[0, :5])
    torch.testing.assert_close(padded[1], o[1])


def test_lightning_is_the_layer_of_minimax():
    """The lightning layer of transformers' MiniMax: prefill over several blocks, then tokens from its cache."""
    import transformers
    from transformers.models.minimax import modeling_minimax as minimax

    config = transformers.MiniMaxConfig(hidden_size=HIDDEN, num_attention_heads=4, head_dim=16, block_size=8,
                                        num_hidden_layers=5)
    theirs = minimax.MiniMaxLightningAttention(config, layer_idx=2)
    ours = hn.LightningAttention(HIDDEN, 4, num_layers=5, layer_idx=2, gate_convention="minimax", activation="silu",
                                 scale=1.0, norm_eps=1e-6)
    q, k, v = theirs.qkv_proj.weight.detach().view(4, 3, 16, HIDDEN).unbind(1)
    ours.load_state_dict({
        "q_proj.weight": q.flatten(0, 1), "k_proj.weight": k.flatten(0, 1), "v_proj.weight": v.flatten(0, 1),
        "g_proj.weight": theirs.output_gate.weight, "g_norm.weight": theirs.norm.weight,
        "o_proj.weight": theirs.out_proj.weight})
    x = torch.randn(2, 23, HIDDEN, generator=torch.Generator().manual_seed(1))
    their_cache, cache = minimax.MiniMaxCache(), hn.Cache()
    with torch.no_grad():
        for begin, end in ((0, 20), (20, 21), (21, 23)):
            part = x[:, begin:end]
            expected = theirs(part, None, None, past_key_values=their_cache)[0]
            actual = ours(part, past_key_values=cache, use_cache=True)[0]
            assert relative_error(actual, expected) < 5e-6
    gates = -theirs.slope_rate.flatten()
    torch.testing.assert_close(ours.g_gamma, gates, rtol=1e-6, atol=0)


# ---- modules ----

def test_short_convolution():
    module = hn.ShortConvolution(6, 4, bias=True)
    assert {n: tuple(p.shape) for n, p in module.named_parameters()} == {"weight": (6, 1, 4), "bias": (6,)}
    x, residual = torch.randn(2, 10, 6), torch.randn(2, 10, 6)
    mask = torch.ones(2, 10)
    mask[1, :3] = 0
    padded = F.pad((x * mask[..., None]).transpose(1, 2), (3, 0))
    expected = F.silu(F.conv1d(padded, module.weight, module.bias, groups=6)).transpose(1, 2) + residual
    y, state = module(x, residual, mask)
    torch.testing.assert_close(y, expected)
    assert state is None

    y, state = module(x[:, :6], output_final_state=True)
    torch.testing.assert_close(state, x[:, 2:6].transpose(1, 2))
    rest, state = module(x[:, 6:], cache=state, output_final_state=True)
    torch.testing.assert_close(torch.cat([y, rest], 1), module(x)[0])
    torch.testing.assert_close(state, x[:, 6:].transpose(1, 2))
    with pytest.raises(ValueError, match="mask: expected None in a ragged batch"):
        module(x[:1], mask=mask[:1], cu_seqlens=torch.tensor([0, 10]))
    with pytest.raises(ValueError, match="activation: expected None, 'silu' or 'swish', got 'relu'"):
        hn.ShortConvolution(6, 4, activation="relu")


def test_short_convolution_by_tokens():
    module = hn.ShortConvolution(6, 3)
    x = torch.randn(2, 5, 6)
    expected = module(x)[0]
    state = x.new_zeros(4, 6, 3)
    with torch.no_grad():
        cache, packed = state[:2].clone(), state[:2].clone()
        for t in range(5):
            y, same = module(x[:, t : t + 1], cache=cache, output_final_state=True)
            assert same is cache
            torch.testing.assert_close(y[:, 0], expected[:, t])
            y, none = module(x[:, t].unsqueeze(0), cache=packed, cu_seqlens=torch.arange(3))
            assert none is None  # and yet the cache moves on
            torch.testing.assert_close(y[0], expected[:, t])
            y, same = module.step(x[:, t], None, state, True, indices=torch.tensor([3, 1]))
            assert same is state
            torch.testing.assert_close(y, expected[:, t])
        cu_seqlens = torch.tensor([0, 2, 2])  # as many tokens as sequences, but not one in each
        before = packed.clone()
        _, last = module(x[:1, :2], cache=packed, output_final_state=True, cu_seqlens=cu_seqlens)
        assert torch.equal(packed, before) and torch.equal(last[1], before[1]) and not torch.equal(last[0], before[0])
    torch.testing.assert_close(cache, x[:, 2:].transpose(1, 2))
    torch.testing.assert_close(packed, cache)
    assert not state[[0, 2]].any()


@pytest.mark.parametrize("kept", [False, True], ids=["unkept", "kept"])
@pytest.mark.parametrize("cached", [False, True], ids=["first", "cached"])
@pytest.mark.parametrize("added", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("form", ["[N, 1, D]", "[N, D]", "[1, N, D]"])
def test_steps_of_a_short_convolution_as_in_flash_linear_attention(form, added, cached, kept):
    """ShortConvolution.step(x, residual, cache, output_final_state, cu_seqlens) -> (y, cache), by position."""
    module = hn.ShortConvolution(6, 4, bias=True)
    history, token, residual = torch.randn(3, 6, 4) * cached, torch.randn(3, 6), torch.randn(3, 6)
    joined = torch.cat([history, token.unsqueeze(-1)], -1)[..., 1:]
    expected = F.silu((joined * module.weight.squeeze(1)).sum(-1) + module.bias) + (residual if added else 0)
    shape = {"[N, 1, D]": (3, 1, 6), "[N, D]": (3, 6), "[1, N, D]": (1, 3, 6)}[form]
    cache = history.clone() if cached else None
    with torch.no_grad():
        y, after = module.step(token.view(shape), residual.view(shape) if added else None, cache, kept,
                               torch.arange(4) if form == "[1, N, D]" else None)
    torch.testing.assert_close(y, expected.view(shape))
    for state in ([after] if kept else []) + ([cache] if cached else []):
        torch.testing.assert_close(state, joined)
    assert after is cache if kept and cached else (after is not None) == kept


def test_misuse_of_a_short_convolution():
    """Every message names the argument as the module calls it, and the cache is as before."""
    module, x, cache = hn.ShortConvolution(6, 4), torch.randn(3, 1, 6), torch.randn(3, 6, 4)
    before, row = cache.clone(), x.transpose(0, 1)
    offsets, uneven = torch.arange(4), torch.tensor([0, 0, 1, 3])
    with torch.no_grad():
        for call, message in {
            lambda: module.step(x, cache, None): r"residual: expected shape \[3, 1, 6\] as x, got \[3, 6, 4\]",
            lambda: module.step(x, None, cache[:2]): r"cache: expected shape \[3, 6, 4\], got \[2, 6, 4\]",
            lambda: module.step(x, None, cache[..., 1:]): r"cache: expected shape \[3, 6, 4\], got \[3, 6, 3\]",
            lambda: module.step(x, None, cache, torch.ones(2)): "output_final_state: expected True or False",
            lambda: module.step(row, None, cache, True, uneven): "cu_seqlens: expected one token in each sequence",
            lambda: module.step(row, None, cache, True, offsets + 1): "cu_seqlens: expected one token in each sequence",
            lambda: module.step(x, None, cache, True, offsets): "cu_seqlens: expected one token in each sequence",
            lambda: module(x, torch.randn(6)): r"residual: expected shape \[3, 1, 6\] as x, got \[6\]",
            lambda: module(x, mask=torch.ones(3, 2)): r"mask: expected shape \[3, 1\] as x, got \[3, 2\]",
            lambda: module(x, cache=cache[:2]): r"cache: expected shape \[3, 6, 4\], got \[2, 6, 4\]",
            lambda: module(x, cp_context=object()): "cp_context: expected a context of build_cp_context, got object",
            lambda: module(x, cu_seqlens_cpu=offsets): "cu_seqlens_cpu: expected together with cu_seqlens",
        }.items():
            with pytest.raises((ValueError, TypeError), match=message):
                call()
            assert torch.equal(cache, before)
    with pytest.raises(ValueError, match="expected no gradients in a step"):
        module.step(x, None, cache)


def test_residuals_of_a_short_convolution_keep_the_type_of_x():
    module, x = hn.ShortConvolution(6, 4).bfloat16(), torch.randn(2, 5, 6).bfloat16()
    y = module(x, torch.ones(2, 5, 6))[0]
    assert y.dtype == torch.bfloat16 and torch.equal(y, module(x)[0] + torch.ones((), dtype=torch.bfloat16))


@pytest.mark.parametrize("activation", ["swish", "silu", "sigmoid"])
def test_rms_norm_gated(activation):
    module = hn.RMSNormGated(12, eps=1e-3, activation=activation, groups=3)
    with torch.no_grad():
        module.weight.add_(torch.randn(12))
    x, g = torch.randn(2, 5, 12), torch.randn(2, 5, 12)
    gate = torch.sigmoid(g) if activation == "sigmoid" else F.silu(g)
    parts = torch.cat([F.rms_norm(part, (4,), None, 1e-3) for part in x.split(4, -1)], -1)
    torch.testing.assert_close(module(x, g), parts * module.weight * gate)
    module.groups = 1
    torch.testing.assert_close(module(x), F.rms_norm(x, (12,), module.weight, 1e-3))
    assert hn.FusedRMSNormGated is hn.RMSNormGated
    module.reset_parameters()
    assert torch.equal(module.weight, torch.ones(12))


@pytest.mark.parametrize("groups", [1, 3])
def test_residuals_of_the_gated_norm(groups):
    module = hn.RMSNormGated(12, groups=groups)
    with torch.no_grad():
        module.weight.add_(torch.randn(12))
    x, g, residual = torch.randn(3, 2, 5, 12)
    y, s = module(x, g, residual, True)  # by position, as in flash-linear-attention
    assert torch.equal(s, x + residual)
    torch.testing.assert_close(y, module(s, g))
    torch.testing.assert_close(module(x, g, residual), y)
    half = copy.deepcopy(module).bfloat16()
    for wide, dtype in ((False, torch.bfloat16), (True, torch.float32)):
        y, s = half(x.bfloat16(), g.bfloat16(), prenorm=True, residual_in_fp32=wide)
        assert (y.dtype, s.dtype) == (torch.bfloat16, dtype) and torch.equal(s, x.bfloat16().to(dtype))
    with pytest.raises((ValueError, RuntimeError)):
        module(x, g, residual[..., :6])


# ---- errors ----

@pytest.mark.parametrize("name, arguments, message", [
    ("GatedDeltaNet", dict(num_heads=4, num_v_heads=6), "num_v_heads: expected a multiple of num_heads 4, got 6"),
    ("GatedDeltaNet", dict(head_dim=10, expand_v=1.25), "expand_v: expected head_dim 10 times it to be a whole number"),
    ("GatedDeltaNet", dict(output_gate_activation="relu"), "activation: expected 'silu', .* or 'sigmoid', got 'relu'"),
    ("GatedLinearAttention", dict(num_kv_heads=3), "num_kv_heads: expected a divisor of num_heads 4, got 3"),
    ("GatedLinearAttention", dict(hidden_size=64, expand_k=0.3), "expand_k: expected hidden_size 64 times it"),
    ("GatedLinearAttention", dict(feature_map="cosine"), "feature_map: expected one of relu, .*, got 'cosine'"),
    ("LightningAttention", dict(num_layers=4, layer_idx=4), "layer_idx: expected 0 to num_layers - 1 = 3, got 4"),
    ("LightningAttention", dict(num_layers=4, layer_idx=0, gate_convention="x"), "gate_convention: expected one of b"),
    ("LightningAttention", dict(num_layers=4, layer_idx=0, activation="relu"), "activation: expected None or 'silu'"),
    ("RMSNormGated", dict(hidden_size=10, groups=3), "groups: expected a divisor of hidden_size 10, got 3"),
])
def test_wrong_arguments(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        getattr(hn, name)(**arguments)
