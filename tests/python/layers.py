"""The layers of the tests: their arguments, and every layer once more as a plain composition of torch operations."""

import torch
import torch.nn.functional as F
from recurrence import recurrence

import headrace.torch.nn as hn

# name: (class, arguments)
LAYERS = {
    "gla": (hn.GatedLinearAttention, dict(num_heads=4)),
    "gla_grouped": (hn.GatedLinearAttention, dict(num_heads=4, num_kv_heads=2, use_short_conv=True, conv_bias=True,
                                                  gate_fn="sigmoid", feature_map="gelu", clamp_min=-0.05)),
    "gla_ungated": (hn.GatedLinearAttention, dict(num_heads=4, use_output_gate=False, elementwise_affine=False)),
    "simple_gla": (hn.SimpleGatedLinearAttention, dict(num_heads=4)),
    "simple_gla_grouped": (hn.SimpleGatedLinearAttention, dict(num_heads=4, num_kv_heads=2, fuse_norm=False,
                                                               use_short_conv=False)),
    "lightning": (hn.LightningAttention, dict(num_heads=4, num_layers=3)),
    "lightning_grouped": (hn.LightningAttention, dict(num_heads=6, num_kv_heads=2, head_dim=16, num_layers=3, scale=1.0,
                                                      gate_convention="minimax", activation="silu", qk_norm=True,
                                                      norm_groups=3)),
    "gated_deltanet": (hn.GatedDeltaNet, dict(num_heads=2, head_dim=16)),
    "gated_deltanet_grouped": (hn.GatedDeltaNet, dict(num_heads=2, num_v_heads=4, head_dim=16, expand_v=1,
                                                      conv_bias=True, allow_neg_eigval=True,
                                                      output_gate_activation="sigmoid")),
    "gated_deltanet_ungated": (hn.GatedDeltaNet, dict(num_heads=2, head_dim=16, use_gate=False, use_short_conv=False)),
    "comba": (hn.Comba, dict(num_heads=2, num_v_heads=4, head_dim=16)),
    "comba_plain": (hn.Comba, dict(num_heads=2, head_dim=16, use_output_correction=False, use_inner_decay=False,
                                   use_output_gate=False)),
    "kda": (hn.KimiDeltaAttention, dict(num_heads=2, num_v_heads=4, head_dim=16)),
    "kda_bounded": (hn.KimiDeltaAttention, dict(num_heads=2, head_dim=16, expand_v=2, conv_bias=True, safe_gate=True,
                                                lower_bound=-5.0)),
}
HIDDEN = 64
EPS = 1e-2  # of the norms: large, or they would magnify the rounding of outputs near 0 (q k of a first token)


def make(name, layer_idx=0, seed=0):
    """The layer, all parameters away from their special starting values (ones, zeros)."""
    cls, arguments = LAYERS[name]
    torch.manual_seed(seed)
    layer = cls(hidden_size=HIDDEN, layer_idx=layer_idx, norm_eps=EPS, **arguments)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return layer


def _norm(x, weight=None):
    y = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    return y if weight is None else y * weight


def _linear(p, name, x):
    return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))


def _convolved(p, name, x, activation):
    """Projection, then convolution and SiLU; without a convolution the activation."""
    x = _linear(p, f"{name}_proj", x)
    weight = p.get(f"{name}_conv1d.weight")
    if weight is None:
        return activation(x)
    padded = F.pad(x.transpose(1, 2), (weight.shape[-1] - 1, 0))
    return F.silu(F.conv1d(padded, weight, p.get(f"{name}_conv1d.bias"), groups=x.shape[-1])).transpose(1, 2)


def _two(p, name, x):
    return _linear(p, f"{name}.1", _linear(p, f"{name}.0", x))


def _same(x):
    return x


def _split(x, heads):
    return x.unflatten(-1, (heads, -1))


def _additive(name, p, c, x):
    H = c["num_heads"]
    kv = c.get("num_kv_heads", H)
    q, k, v = (_split(_convolved(p, n, x, _same), h) for n, h in (("q", H), ("k", kv), ("v", kv)))
    k, v = k.repeat_interleave(H // kv, 2), v.repeat_interleave(H // kv, 2)
    if c.get("feature_map") == "gelu":
        q, k = F.gelu(q, approximate="tanh"), F.gelu(k, approximate="tanh")
    if name.startswith("gla"):
        g = _split(F.logsigmoid(_two(p, "gk_proj", x)) / 16, kv).repeat_interleave(H // kv, 2)
        o = recurrence("gla", q, k, v, g=g.clamp_min(c.get("clamp_min", -1e9)))[0]
    else:
        o = recurrence("simple_gla", q, k, v, g=F.logsigmoid(_linear(p, "gk_proj", x)) / 16)[0]
    o = _norm(o, p.get("g_norm.weight", p.get("g_norm_swish_gate.weight"))).flatten(2)
    if "g_proj.weight" in p:
        o = o * (torch.sigmoid if c.get("gate_fn") == "sigmoid" else F.silu)(_linear(p, "g_proj", x))
    return o


def _lightning(name, p, c, x, g_gamma):
    H = c["num_heads"]
    kv = c.get("num_kv_heads", H)
    activation = F.silu if c.get("activation") else _same
    q, k, v = (_split(activation(_linear(p, f"{n}_proj", x)), h) for n, h in (("q", H), ("k", kv), ("v", kv)))
    if c.get("qk_norm"):
        q, k = _norm(q, p["q_norm.weight"]), _norm(k, p["k_norm.weight"])
    k, v = k.repeat_interleave(H // kv, 2), v.repeat_interleave(H // kv, 2)
    o = recurrence("simple_gla", q, k, v, g_gamma=g_gamma, scale=c.get("scale"))[0]
    o = _norm(o.flatten(2).unflatten(-1, (c.get("norm_groups", 1), -1))).flatten(2) * p["g_norm.weight"]
    return o * torch.sigmoid(_linear(p, "g_proj", x))


def _delta(name, p, c, x):
    H = c["num_heads"]
    HV = c.get("num_v_heads", H)
    q, k, v = (_split(_convolved(p, n, x, F.silu), h) for n, h in (("q", H), ("k", H), ("v", HV)))
    rest = {"beta": torch.sigmoid(_linear(p, "b_proj", x)) * (2 if c.get("allow_neg_eigval") else 1), "qk_l2norm": True}
    if name.startswith("kda"):
        logits = _split(_two(p, "f_proj", x) + p["dt_bias"], HV)
        rate = p["A_log"].exp().unsqueeze(-1)
        g = -5 * torch.sigmoid(rate * logits) if c.get("lower_bound") else -rate * F.softplus(logits)
        o = recurrence("kda", q, k, v, g=g, **rest)[0]
    else:
        g = -p["A_log"].exp() * F.softplus(_linear(p, "a_proj", x) + p["dt_bias"])
        if name.startswith("comba"):
            erase = k * torch.sigmoid(p["decay"])[:, None] if "decay" in p else k
            q = q - p["D"][:, None] * erase if "D" in p else q
            o = recurrence("comba", q, k, v, p=erase, g=g, **rest)[0]
        else:
            o = recurrence("gated_delta_rule", q, k, v, g=g, **rest)[0]
    o = _norm(o, p["o_norm.weight"]).flatten(2)
    if "g_proj.weight" not in p and "g_proj.0.weight" not in p:
        return o
    gate = _two(p, "g_proj", x) if name.startswith("kda") else _linear(p, "g_proj", x)
    silu = name.startswith("gated_deltanet") and "output_gate_activation" not in c
    return o * (F.silu if silu else torch.sigmoid)(gate)


def plain(name, parameters, x, g_gamma=None):
    """The layer's output [B, T, hidden] from its parameters by name; g_gamma: the lightning layers' buffer."""
    arguments = LAYERS[name][1]
    if name.startswith("lightning"):
        o = _lightning(name, parameters, arguments, x, g_gamma)
    else:
        o = (_additive if "gla" in name else _delta)(name, parameters, arguments, x)
    return _linear(parameters, "o_proj", o)
