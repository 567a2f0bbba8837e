"""headrace.torch in the place of flash-linear-attention: that library's own plain functions are the reference."""

import sys
import types

import pytest
import torch
from conftest import OPERATORS

import headrace.torch as ht
from headrace.bench._training import plain_module

LENGTHS = [63, 75, 500, 1000, 1024, 1500, 2048]
SIZES = [60, 64, 100, 128, 256]
OFFSETS = [[0, 15], [0, 0, 16], [0, 256, 500, 1000], [0, 15, 100, 300, 1200, 2000]]
OPS = [op for op in OPERATORS if op not in ("linear_attention", "retention")]

# Root-mean-square error over root-mean-square value: of o and states, of the gradients of q, k, v (and p), of the rest.
RATIOS = {torch.float32: (5e-5, 8e-5, 2e-4), torch.bfloat16: (5e-3, 8e-3, 2e-2), torch.float16: (5e-3, 8e-3, 2e-2)}


def padded(function, length, **tensors):
    """Runs a function that wants whole chunks of 64: padding has k = 0, g = 0 and beta = 0 and changes no state."""
    state = tensors.pop("initial_state")
    missing = -length % 64
    longer = {n: torch.cat([x, x.new_zeros(x.shape[0], missing, *x.shape[2:])], 1) for n, x in tensors.items()}
    o, final = function(**longer, initial_state=state, output_final_state=True)
    return o[:, :length], final


def plain(op, tensors):
    """(o, final state) of one dense batch."""
    t = dict(tensors)
    if op == "simple_gla":
        return padded(plain_module(op).naive_chunk_simple_gla, t["q"].shape[1], **t)
    if op == "gla":
        t["gk"] = t.pop("g")
        return plain_module(op).naive_recurrent_gla(**t, output_final_state=True)
    if op == "delta_rule":
        state = t.pop("initial_state")
        heads_first = {n: x.transpose(1, 2) for n, x in t.items()}
        heads_first["beta"] = heads_first["beta"].unsqueeze(-1)
        o, final = plain_module(op).delta_rule_recurrence(**heads_first, initial_state=state)
        return o.transpose(1, 2), final
    function = {"gated_delta_rule": "naive_chunk_gated_delta_rule", "comba": "naive_chunk_comba",
                "kda": "naive_chunk_kda"}[op]
    return padded(getattr(plain_module(op), function), t["q"].shape[1], **t)


def plain_ragged(op, tensors, offsets):
    outputs, states = [], []
    initial = tensors["initial_state"]
    for n, (begin, end) in enumerate(zip(offsets, offsets[1:])):
        if begin == end:
            states.append(initial[n : n + 1])
            continue
        part = {name: x[:, begin:end] for name, x in tensors.items() if name != "initial_state"}
        o, state = plain(op, {**part, "initial_state": initial[n : n + 1]})
        outputs.append(o)
        states.append(state)
    return torch.cat(outputs, 1), torch.cat(states)


def ours(op, tensors, cu_seqlens, form="chunk"):
    t = dict(tensors)
    if op == "gla" and form == "fused_recurrent":
        t["gk"] = t.pop("g")
    return getattr(ht, f"{form}_{op}")(**t, output_final_state=True, cu_seqlens=cu_seqlens)


def ratio(actual, expected):
    error = (actual.float() - expected).square().mean().sqrt()
    return (error / expected.square().mean().sqrt().clamp_min(1e-12)).item()


def compare(op, problem, T, D, offsets=None, H=1, form="chunk", chunks_served=None):
    """One reference in float32, from values that all types represent; every type against it."""
    values = problem(op, B=1, T=T, H=H, K=D, V=D, state=True, cu_seqlens=offsets, seed=T + D)
    for name in ("cu_seqlens", "g_gamma"):  # the plain functions have neither
        values.pop(name, None)
    exact = {n: x.bfloat16().half().float() if n in "qkvp" else x.float() for n, x in values.items()}
    reference = {n: x.clone().requires_grad_() for n, x in exact.items()}
    expected = plain(op, reference) if offsets is None else plain_ragged(op, reference, offsets)
    d_o, d_state = (torch.randn_like(x).bfloat16().float() for x in expected)
    torch.autograd.backward(expected, [d_o, d_state])
    for dtype, bars in RATIOS.items():
        mine = {n: x.to(dtype if n in "qkvp" else torch.float32, copy=True).requires_grad_() for n, x in exact.items()}
        o, state = ours(op, mine, None if offsets is None else torch.tensor(offsets), form)
        torch.autograd.backward([o, state], [d_o.to(dtype), d_state])
        assert ratio(o, expected[0]) <= bars[0], dtype
        assert ratio(state, expected[1]) <= bars[0], dtype
        for name, x in mine.items():
            bar = bars[1] if name in ("q", "k", "v", "p", "initial_state") else bars[2]
            if name == "g" and H * T < 256:  # few sums, which may cancel: nothing inside is rounded
                bar = RATIOS[torch.float32][2]
            assert ratio(x.grad, reference[name].grad) <= bar, (dtype, name)
        assert chunks_served is None or chunks_served(dtype)


@pytest.mark.parametrize("D", SIZES)
@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("op", OPS)
def test_dense(problem, op, T, D):
    compare(op, problem, T, D)


@pytest.mark.parametrize("T, D", [(75, 72), (83, 100)])
@pytest.mark.parametrize("op", OPS)
def test_bf16_gradients_of_gates(problem, op, T, D, chunks_served):
    """From 256 tokens times heads on these, too, come from bf16 products. Sizes that chunks serve in any type."""
    compare(op, problem, T, D, H=8, chunks_served=chunks_served)


@pytest.mark.parametrize("offsets, D", [(offsets, 64) for offsets in OFFSETS] +
                         [(offsets, D) for offsets in OFFSETS[:2] for D in (60, 100, 128, 256)], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_ragged(problem, op, offsets, D):
    compare(op, problem, offsets[-1], D, offsets)


@pytest.mark.parametrize("offsets", [None, [0, 0, 16, 75]], ids=["dense", "ragged"])
@pytest.mark.parametrize("op", OPS)
def test_recurrent_functions(problem, op, offsets):
    compare(op, problem, 75, 64, offsets, H=2, form="fused_recurrent")


@pytest.mark.parametrize("dtype", RATIOS, ids=lambda d: str(d)[6:])
def test_constant_gates_of_heads(problem, dtype):
    """g_gamma [H] is a g that is the same for every token; the plain function has only the latter."""
    t = {n: x.to(dtype).float() for n, x in problem("retention", B=1, T=300, H=8, K=64, V=64).items()}
    t["g_gamma"] = t["g_gamma"] - 0.01
    reference, mine = ({n: x.clone().requires_grad_() for n, x in t.items()} for _ in range(2))
    q, k, v, g_gamma = reference.values()
    expected, _ = plain_module("simple_gla").naive_chunk_simple_gla(q, k, v, g_gamma.expand(1, 300, 8))
    q, k, v = (mine[n].to(dtype) for n in "qkv")
    o, _ = ht.chunk_simple_gla(q, k, v, g_gamma=mine["g_gamma"])
    d_o = torch.randn_like(expected).to(dtype)
    expected.backward(d_o.float())
    o.backward(d_o)
    bars = RATIOS[dtype]
    assert ratio(o, expected) <= bars[0]
    for name, x in mine.items():
        assert ratio(x.grad, reference[name].grad) <= (bars[2] if name == "g_gamma" else bars[1]), name


def test_retention_has_the_gates_of_its_paper(problem):
    t = {n: x.float() for n, x in problem("linear_attention", B=1, T=300, H=4, K=64, V=64).items()}
    expected = plain_module("retention").naive_retention(*(t[n].transpose(1, 2) for n in "qkv")).transpose(1, 2)
    assert ratio(ht.chunk_retention(t["q"], t["k"], t["v"])[0], expected) < 5e-5


def test_arguments_by_position(problem):
    """Names, argument order and defaults of the interface, called by position as users do."""
    t = {n: x.float() for n, x in problem("comba", T=70, state=True).items()}
    q, k, v, p, g, beta, state = (t[n] for n in ("q", "k", "v", "p", "g", "beta", "initial_state"))
    channel = g.unsqueeze(-1).expand(*g.shape, q.shape[-1])
    for o, final in (
        ht.chunk_gla(q, k, v, channel, 0.5, state, True),
        ht.chunk_simple_gla(q, k, v, g, None, 0.5, state, True),
        ht.fused_chunk_simple_gla(q, k, v, g, None, 0.5, state, True),
        ht.chunk_gated_delta_rule(q, k, v, g, beta, 0.5, state, True),
        ht.chunk_gdn(q, k, v, g, beta, 0.5, state, True),
        ht.chunk_comba(q, k, v, p, g, beta, 0.5, state, True),
        ht.fused_recurrent_comba(q, k, p, v, g, beta, 0.5, state, True),
        ht.chunk_kda(q, k, v, channel, beta, 0.5, state, True),
        ht.fused_recurrent_kda(q, k, v, channel, beta, None, None, 0.5, state, True),
        ht.fused_recurrent_gla(q, k, v, channel, None, 0.5, state, True),
        ht.fused_recurrent_simple_gla(q, k, v, g, None, 0.5, state, True),
        ht.fused_recurrent_gated_delta_rule(q, k, v, g, None, None, beta, 0.5, state, True),
        ht.chunk_delta_rule(q, k, v, beta, 0.5, state, True),
    ):
        assert o.shape == v.shape and final.shape == state.shape
    torch.testing.assert_close(ht.chunk_comba(q, k, v, p, g, beta)[0], ht.fused_recurrent_comba(q, k, p, v, g, beta)[0])
    assert ht.chunk_gated_delta_rule(q, k, v, g, beta)[1] is None


THEIRS = "from fla.ops.gla.naive import naive_recurrent_gla as gla"
SCRIPT = f"""
import torch
{THEIRS}

torch.manual_seed(0)
H, K, T = 2, 32, 32
embedding, head = torch.nn.Embedding(16, 48), torch.nn.Linear(H * K, 16)
projections = torch.nn.ModuleList(torch.nn.Linear(48, H * K) for _ in "qkvg")
optimizer = torch.optim.AdamW([*embedding.parameters(), *head.parameters(), *projections.parameters()], lr=2e-2)
tokens = torch.randint(16, (2, 8)).repeat(1, T // 8 + 1)[:, : T + 1]
losses = []
for _ in range(10):
    x = embedding(tokens[:, :-1])
    q, k, v, g = (projection(x).unflatten(-1, (H, K)) for projection in projections)
    o, _ = gla(q, k, v, torch.nn.functional.logsigmoid(g) / 16)
    loss = torch.nn.functional.cross_entropy(head(o.flatten(-2)).flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""


def test_a_training_script_runs_with_one_import_replaced(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla.ops.gla.naive", plain_module("gla"))
    for name in ("fla", "fla.ops", "fla.ops.gla"):  # the packages around it want a GPU
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    theirs, mine = {}, {}
    exec(SCRIPT, theirs)
    exec(SCRIPT.replace(THEIRS, "from headrace.torch import chunk_gla as gla"), mine)
    assert theirs["gla"] is not mine["gla"] is ht.chunk_gla
    assert theirs["losses"][-1] < 0.5 * theirs["losses"][0]
    torch.testing.assert_close(mine["losses"], theirs["losses"], rtol=1e-4, atol=0)
