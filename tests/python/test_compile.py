"""headrace.torch inside torch.compile: no graph breaks with any option, and the custom operators pass opcheck."""

import pytest
import torch
from conftest import OPERATORS
from test_torch import call, with_gradients

RAGGED = [0, 0, 16, 17, 37]
IN_KERNEL = ("gated_delta_rule", "comba", "kda")  # gates, beta and norms may be computed inside


def given(problem, op, cu_seqlens=None):
    """Tensors and options of a call: with an initial state, and with gates and beta inside where `op` accepts them."""
    tensors = problem(op, B=1 if cu_seqlens else 2, HV=4, dtype=torch.float32, state=True, cu_seqlens=cu_seqlens)
    options = {}
    if op in IN_KERNEL:
        options = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True,
                   "use_qk_l2norm_in_kernel": True}
        tensors["A_log"], tensors["dt_bias"] = torch.linspace(-1, 1, 4), torch.linspace(-1, 0, 4)
    return tensors, options


def compare(tensors, function, backend):
    """Values and gradients of the compiled function, through o and the final state, are those of the eager one."""

    def loss(tensors):
        o, state = function(tensors)
        return o.square().sum() + state.sum()

    eager, compiled = with_gradients(tensors), with_gradients(tensors)
    torch._dynamo.reset()
    expected, actual = loss(eager), torch.compile(loss, fullgraph=True, backend=backend)(compiled)
    torch.testing.assert_close(actual, expected)
    expected.backward()
    actual.backward()
    for name, x in eager.items():
        if x.is_floating_point():
            torch.testing.assert_close(compiled[name].grad, x.grad, msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("cu_seqlens", [None, RAGGED], ids=["dense", "ragged"])
@pytest.mark.parametrize("op", OPERATORS)
def test_fullgraph(problem, op, cu_seqlens):
    tensors, options = given(problem, op, cu_seqlens)
    compare(tensors, lambda tensors: call(op, tensors, **options), "aot_eager")


@pytest.mark.parametrize("op", ["gla", "simple_gla"])
def test_fullgraph_with_the_state_turned(problem, op):
    tensors = problem(op, dtype=torch.float32, state=True)
    tensors["initial_state"] = tensors["initial_state"].mT.contiguous()
    compare(tensors, lambda tensors: call(op, tensors, state_v_first=True), "aot_eager")


def test_inductor(problem):
    """The default backend, with generated code around the operator."""
    tensors, options = given(problem, "kda", RAGGED)

    def function(tensors):
        o, state = call("kda", {**tensors, "v": torch.tanh(tensors["v"])}, **options)
        return torch.sigmoid(o), state

    compare(tensors, function, "inductor")


# p; offsets and parameters of gates; a turned state with logits of beta
CHECKED = {
    "comba": ("comba", None, {}),
    "ragged": ("kda", RAGGED, {"gate_form": "bounded", "qk_l2norm": True}),
    "turned": ("gated_delta_rule", None, {"gate_form": "softplus", "beta_form": "two_sigmoid", "state_v_first": True}),
}


@pytest.mark.parametrize("case", CHECKED)
def test_opcheck(problem, case):
    op, cu_seqlens, changed = CHECKED[case]
    t = with_gradients(problem(op, B=1, HV=4, dtype=torch.float32, state=True, cu_seqlens=cu_seqlens))
    if "gate_form" in changed:
        t["A_log"], t["dt_bias"] = torch.zeros(4, requires_grad=True), torch.zeros(4, requires_grad=True)
    if "state_v_first" in changed:
        t["initial_state"] = t["initial_state"].detach().mT.contiguous().requires_grad_()
    names = ("q", "k", "v", "p", "g", "gv", "g_gamma", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")
    inputs = [t.get(name) for name in names]
    options = {"scale": None, "reverse": False, "qk_l2norm": False, "gate_form": "log_decay", "lower_bound": -5.0,
               "beta_form": "value", "chunk": 0, "state_v_first": False, **changed}
    torch.library.opcheck(torch.ops.headrace.forward.default, (op, *inputs, True), options)
    inputs = [x if x is None else x.detach() for x in inputs]
    wanted = [i for i, x in enumerate(inputs[:-1]) if x is not None]
    gradients = torch.randn_like(t["v"]), torch.randn_like(t["initial_state"])
    torch.library.opcheck(torch.ops.headrace.backward.default, (op, *inputs, *gradients, wanted), options)
