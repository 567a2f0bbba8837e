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


def checked(problem, case):
    """Operator, tensors in the order of the arguments, options."""
    op, cu_seqlens, changed = CHECKED[case]
    t = with_gradients(problem(op, B=1, HV=4, dtype=torch.float32, state=True, cu_seqlens=cu_seqlens))
    if "gate_form" in changed:
        t["A_log"], t["dt_bias"] = torch.zeros(4, requires_grad=True), torch.zeros(4, requires_grad=True)
    if "state_v_first" in changed:
        t["initial_state"] = t["initial_state"].detach().mT.contiguous().requires_grad_()
    names = ("q", "k", "v", "p", "g", "gv", "g_gamma", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")
    options = {"scale": None, "reverse": False, "qk_l2norm": False, "gate_form": "log_decay", "lower_bound": -5.0,
               "beta_form": "value", "chunk": 0, "state_v_first": False, **changed}
    return op, [t.get(name) for name in names], options


def detached(tensors):
    return [x if x is None else x.detach() for x in tensors]


@pytest.mark.parametrize("case", CHECKED)
def test_opcheck(problem, case):
    op, inputs, options = checked(problem, case)
    torch.library.opcheck(torch.ops.headrace.forward.default, (op, *inputs, True), options)
    inputs = detached(inputs)
    wanted = [i for i, x in enumerate(inputs[:-1]) if x is not None]
    gradients = torch.randn_like(inputs[2]), torch.randn_like(inputs[-2])
    torch.library.opcheck(torch.ops.headrace.backward.default, (op, *inputs, *gradients, wanted), options)


# ---- a step on a pool of states ----


def decode(op, tensors, pool, rows, outputs=None):
    """o of every token, one call for each; with `outputs`, tensors that are there already, in them."""
    results = []
    for token in range(3):
        now = {name: x if x.dim() == 1 else x[:, token : token + 1] for name, x in tensors.items()}
        out = None if outputs is None else outputs[token]
        o, returned = call(op, {**now, "initial_state": pool}, recurrent=True, ssm_state_indices=rows, out=out)
        assert returned is pool and (out is None or o is out)
        results.append(o)
    return torch.cat(results, 1)


@pytest.mark.parametrize("op, backend", [("retention", "aot_eager"), ("gla", "aot_eager"), ("comba", "aot_eager"),
                                         ("kda", "inductor")])
def test_decoding_on_a_pool(problem, op, backend):
    """The same bits as without compilation: in o, in the pool, a part of a larger buffer here, and in `out`."""
    tensors = problem(op, B=2, T=3, HV=4, dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(decode, fullgraph=True, backend=backend)
    rows, pages = torch.tensor([5, -1]), torch.randn(7, 2, 4, 16, 24)
    for given in (False, True):
        results = []
        for function in (decode, compiled):
            buffer = pages.clone()
            outputs = [torch.ones(2, 1, 4, 24) for _ in range(3)] if given else None
            results.append([function(op, tensors, buffer[:, 1], rows, outputs), buffer, *(outputs or ())])
        assert all(map(torch.equal, *results))
        assert not torch.equal(buffer[5, 1], pages[5, 1])


@pytest.mark.parametrize("case", CHECKED)
def test_opcheck_of_a_step(problem, case):
    op, inputs, options = checked(problem, case)
    *inputs, states, cu_seqlens = detached(inputs)
    N, S = len(states), 37
    pool = torch.randn(N * S, *states.shape[1:])
    rows, accepted = torch.arange(N * S).view(N, S), torch.full((N,), 2)
    torch.library.opcheck(torch.ops.headrace.step.default,
                          (op, *inputs, pool, cu_seqlens, rows, accepted, torch.empty_like(inputs[2])), options)
    torch.library.opcheck(torch.ops.headrace.step.default,
                          (op, *inputs, pool, cu_seqlens, rows[:, 0], None, torch.empty_like(inputs[2])), options)
