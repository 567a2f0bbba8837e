"""Options of a call, each front against the recurrence: gates and beta computed inside, reverse, named head gates."""

import pytest
import torch
from conftest import BARS, relative_error
from recurrence import recurrence
from test_numpy import to_numpy, to_torch
from test_torch import call, compare, with_gradients

import headrace.numpy as hn
import headrace.torch as ht

RAGGED = [0, 0, 16, 17, 37]
TYPES = [torch.float32, torch.bfloat16]


def gated_inside(problem, op, **sizes):
    """A problem whose g and beta are pre-activations, with A_log and dt_bias."""
    t = problem(op, HV=4, state=True, **sizes)
    rest = t["g"].dtype
    t["g"], t["beta"] = torch.linspace(-3, 1, t["g"].numel(), dtype=rest).reshape(t["g"].shape), t["beta"] * 4 - 2
    t["A_log"], t["dt_bias"] = torch.linspace(-1, 1, 4, dtype=rest), torch.linspace(-1, 0, 4, dtype=rest)
    return t


@pytest.mark.parametrize("cu_seqlens", [None, RAGGED], ids=["dense", "ragged"])
@pytest.mark.parametrize("dtype", TYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("op", ["gated_delta_rule", "comba", "kda"])
def test_parameters_of_gates(problem, op, dtype, cu_seqlens):
    t = gated_inside(problem, op, B=1 if cu_seqlens else 2, K=64, V=64, dtype=dtype, cu_seqlens=cu_seqlens)
    compare(op, t, dtype, {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True},
            {"gate": "softplus", "beta_is": "sigmoid"})


@pytest.mark.parametrize("op", ["gated_delta_rule", "comba", "kda"])
def test_gradcheck(problem, op):
    """Parameters of gates, norms inside, offsets and grouped heads together."""
    t = problem(op, B=1, T=5, H=1, HV=2, K=4, V=3, state=True, cu_seqlens=[0, 0, 2, 5])
    t["A_log"], t["dt_bias"] = torch.tensor([0.5, -0.5]).double(), torch.tensor([-1.0, 0.2]).double()
    tensors = with_gradients(t)
    options = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True}
    names = list(tensors)
    assert torch.autograd.gradcheck(lambda *values: call(op, dict(zip(names, values)), **options),
                                    tuple(tensors.values()))


@pytest.mark.parametrize("gate_form", ["softplus", "bounded"])
@pytest.mark.parametrize("beta_form", ["sigmoid", "two_sigmoid"])
def test_numpy_with_gates_and_beta_inside(problem, gate_form, beta_form):
    t = gated_inside(problem, "kda")
    t["gv"] = -t["v"].abs() / 4
    arrays, exact = {n: to_numpy(x) for n, x in t.items()}, with_gradients(t)
    options = {"gate_form": gate_form, "lower_bound": -4.0, "beta_form": beta_form}
    o, state = hn.forward("kda", **arrays, **options, final_state=True)
    expected = recurrence("kda", **exact, gate=gate_form, lower_bound=-4.0, beta_is=beta_form)
    for actual, value in zip((o, state), expected):
        assert relative_error(to_torch(actual), value.detach()) < BARS[torch.float64][0]
    d_o, d_state = (torch.linspace(-1, 1, x.numel(), dtype=x.dtype).reshape(x.shape) for x in expected)
    torch.autograd.backward(expected, [d_o, d_state])
    gradients = hn.backward("kda", **arrays, **options, d_o=to_numpy(d_o), d_final_state=to_numpy(d_state))
    assert gradients.keys() == {f"d_{name}" for name in exact}
    for name, x in exact.items():
        assert relative_error(to_torch(gradients[f"d_{name}"]), x.grad) < BARS[torch.float64][2], name


@pytest.mark.parametrize("dtype", TYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("op", ["gla", "simple_gla", "delta_rule"])
def test_reverse(problem, op, dtype):
    t = problem(op, B=1, HV=4, K=64, V=64, dtype=dtype, state=True, cu_seqlens=RAGGED)
    compare(op, t, dtype, {"recurrent": True, "reverse": True}, {"reverse": True})


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", TYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("name", ["retention", "lightning_attn"])
def test_head_gates_of_named_models(problem, name, dtype, reverse):
    t = problem("linear_attention", H=4, K=64, V=64, dtype=dtype, state=True)
    heads = torch.arange(4, dtype=torch.float64)
    gates, layer = torch.log1p(-(2.0 ** (-5 - heads))), ()
    if name == "lightning_attn":
        gates, layer = -8 / 4 * (1 - 3 / 20) * heads, (3, 20)
    q, k, v, initial_state = with_gradients(t).values()
    exact = with_gradients({n: x.double() for n, x in t.items()})
    expected_o, expected_state = recurrence("retention", **exact, g_gamma=gates, reverse=reverse)
    function = getattr(ht, f"{'fused_recurrent' if reverse else 'chunk'}_{name}")
    o, state = function(q, k, v, *layer, initial_state=initial_state, output_final_state=True,
                        **({"reverse": True} if reverse else {}))
    assert relative_error(o, expected_o) < BARS[dtype][0] and relative_error(state, expected_state) < BARS[dtype][0]
    d_o = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    torch.autograd.backward([o, state], [d_o, torch.ones_like(state)])
    torch.autograd.backward([expected_o, expected_state], [d_o.double(), torch.ones_like(expected_state)])
    for mine, x in zip((q, k, v, initial_state), exact.values()):
        assert relative_error(mine.grad, x.grad) < BARS[dtype][1]
