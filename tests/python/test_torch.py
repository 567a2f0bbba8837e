"""headrace.torch against the recurrence: values and gradients in every type, checks of autograd, layouts, errors."""

import os
import signal
import threading
import warnings

import pytest
import torch
from conftest import BARS, OPERATORS, relative_error
from recurrence import recurrence

import headrace.torch as ht

RAGGED = [0, 0, 16, 17, 37]


def call(op, tensors, recurrent=False, **options):
    """The function of headrace.torch that computes `op`."""
    t = dict(tensors)
    q, k, v = t.pop("q"), t.pop("k"), t.pop("v")
    options.setdefault("output_final_state", True)
    form = "fused_recurrent" if recurrent else "chunk"
    if op in ("linear_attention", "retention", "simple_gla"):
        return getattr(ht, f"{form}_simple_gla")(q, k, v, **t, **options)
    if op == "gla" and recurrent:
        t["gk"] = t.pop("g")
    if op == "comba":
        p, g = t.pop("p"), t.pop("g")
        return (ht.fused_recurrent_comba(q, k, p, v, g, **t, **options) if recurrent
                else ht.chunk_comba(q, k, v, p, g, **t, **options))
    return getattr(ht, f"{form}_{op}")(q, k, v, **t, **options)


def with_gradients(tensors):
    return {n: x.detach().clone().requires_grad_() if x.is_floating_point() else x for n, x in tensors.items()}


def compare(op, tensors, dtype, call_options=None, oracle_options=None):
    """Outputs, final state and the gradient of every input, through o and through the final state."""
    mine = with_gradients(tensors)
    exact = with_gradients({n: x.double() if x.is_floating_point() else x for n, x in tensors.items()})
    o, state = call(op, mine, **(call_options or {}))
    expected_o, expected_state = recurrence(op, **exact, **(oracle_options or {}))
    bars = BARS[dtype]
    assert o.dtype == dtype and state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert relative_error(o, expected_o) < bars[0]
    assert relative_error(state, expected_state) < bars[0]
    d_o = torch.randn(o.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    d_state = torch.randn(state.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(state.dtype)
    torch.autograd.backward([o, state], [d_o, d_state])
    torch.autograd.backward([expected_o, expected_state], [d_o.double(), d_state.double()])
    for name, x in mine.items():
        if not x.is_floating_point():
            continue
        assert x.grad.dtype == x.dtype and x.grad.shape == x.shape
        bar = bars[1] if name in ("q", "k", "v", "p", "initial_state") else bars[2]
        assert relative_error(x.grad, exact[name].grad) < bar, name


@pytest.mark.parametrize("recurrent", [False, True], ids=["chunk", "recurrent"])
@pytest.mark.parametrize("cu_seqlens", [None, RAGGED], ids=["dense", "ragged"])
@pytest.mark.parametrize("dtype", list(BARS), ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("op", OPERATORS)
def test_values_and_gradients(problem, op, dtype, cu_seqlens, recurrent):
    sizes = {"K": 64, "V": 64} if dtype in (torch.bfloat16, torch.float16) else {}
    B = 1 if cu_seqlens else 2
    tensors = problem(op, B=B, dtype=dtype, cu_seqlens=cu_seqlens, state=True, H=2, HV=4, **sizes)
    compare(op, tensors, dtype, {"recurrent": recurrent})


@pytest.mark.parametrize("op, lower_bound", [("gated_delta_rule", None), ("comba", None), ("kda", None), ("kda", -5.0)])
def test_gates_beta_and_norms_inside(problem, op, lower_bound):
    tensors = problem(op, state=True)
    tensors["A_log"] = torch.randn(2, dtype=torch.float64)
    tensors["dt_bias"] = torch.randn(2 * 16 if op == "kda" else 2, dtype=torch.float64)
    tensors["g"] = torch.randn_like(tensors["g"])
    tensors["beta"] = torch.randn_like(tensors["beta"])
    tensors["k"] = tensors["k"] * 3
    options = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
               "allow_neg_eigval": True}
    if lower_bound is not None:
        options["lower_bound"] = lower_bound
    oracle = {"qk_l2norm": True, "beta_is": "two_sigmoid", "gate": "softplus" if lower_bound is None else "bounded",
              "lower_bound": lower_bound}
    compare(op, tensors, torch.float64, options, oracle)


@pytest.mark.parametrize("op", OPERATORS)
def test_gradcheck(problem, op):
    tensors = with_gradients(problem(op, B=1, T=5, H=1, K=4, V=3, state=True))
    names = list(tensors)
    assert torch.autograd.gradcheck(lambda *values: call(op, dict(zip(names, values))), tuple(tensors.values()))


@pytest.mark.parametrize("op", ["simple_gla", "kda"])
def test_opcheck(problem, op):
    t = with_gradients(problem(op, B=1, T=9, H=2, K=16, V=16, state=True, dtype=torch.float32))
    inputs = [t.get(name) for name in ("q", "k", "v", "p", "g", "gv", "g_gamma", "beta", "A_log", "dt_bias",
                                       "initial_state", "cu_seqlens")]
    rest = (None, False, False, "log_decay", -5.0, "value", 0, False)
    torch.library.opcheck(torch.ops.headrace.forward.default, (op, *inputs, True, *rest))
    d_o = torch.randn_like(t["v"])
    inputs = [x if x is None else x.detach() for x in inputs]
    torch.library.opcheck(torch.ops.headrace.backward.default, (op, *inputs, d_o, None, [0, 2], *rest))


@pytest.mark.parametrize("op", ["simple_gla", "kda"])
def test_compile_fullgraph(problem, op):
    def loss(tensors):
        o, state = call(op, tensors)
        return o.square().sum() + state.sum()

    eager, compiled = (with_gradients(problem(op, dtype=torch.float32, state=True)) for _ in range(2))
    loss(eager).backward()
    torch.compile(loss, fullgraph=True, backend="aot_eager")(compiled).backward()
    for name in eager:
        torch.testing.assert_close(compiled[name].grad, eager[name].grad, rtol=0, atol=0)


def test_strided_inputs_are_read_in_place(problem):
    tensors = problem("kda", dtype=torch.float32)
    B, T, H, K = tensors["q"].shape
    packed = torch.cat([tensors[n].transpose(1, 2) for n in ("q", "k", "v")], -1)  # [B, H, T, 2 K + V]
    views = [x.transpose(1, 2) for x in packed.split([K, K, 24], -1)]
    assert not any(x.is_contiguous() for x in views)
    expected, _ = ht.chunk_kda(tensors["q"], tensors["k"], tensors["v"], tensors["g"], tensors["beta"])
    actual, _ = ht.chunk_kda(*views, tensors["g"], tensors["beta"])
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("op", ["gla", "gated_delta_rule"])
def test_state_v_first(problem, op):
    tensors = with_gradients(problem(op, state=True))
    turned = with_gradients(tensors)
    turned["initial_state"] = tensors["initial_state"].detach().transpose(-1, -2).contiguous().requires_grad_()
    o, state = call(op, tensors)
    o_turned, state_turned = call(op, turned, state_v_first=True)
    assert torch.equal(o, o_turned) and torch.equal(state, state_turned.transpose(-1, -2))
    assert state_turned.is_contiguous()
    (o.sum() + state.sum()).backward()
    (o_turned.sum() + state_turned.sum()).backward()
    assert torch.equal(tensors["initial_state"].grad, turned["initial_state"].grad.transpose(-1, -2))
    with pytest.warns(DeprecationWarning):
        assert torch.equal(call(op, turned, transpose_state_layout=True)[0], o)
    with pytest.raises(ValueError, match="transpose_state_layout"):
        call(op, turned, transpose_state_layout=True, state_v_first=True)


def test_truncated_backpropagation_uses_a_state_twice(problem):
    tensors = with_gradients(problem("gated_delta_rule", T=24))
    halves = [{n: x[:, :12] for n, x in tensors.items()}, {n: x[:, 12:] for n, x in tensors.items()}]
    first, state = call("gated_delta_rule", halves[0])
    second, last = call("gated_delta_rule", {**halves[1], "initial_state": state})
    again, _ = call("gated_delta_rule", {**halves[1], "initial_state": state})
    o, final = call("gated_delta_rule", tensors)
    torch.testing.assert_close(torch.cat([first, second], 1), o)
    torch.testing.assert_close(last, final)
    split = torch.autograd.grad(first.sum() + (second + again).sum() / 2, tensors["v"], retain_graph=True)[0]
    torch.testing.assert_close(split, torch.autograd.grad(o.sum(), tensors["v"])[0])


def test_autocast(problem):
    tensors = problem("kda", dtype=torch.float32)
    tensors["q"] = tensors["q"].bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        o, state = call("kda", tensors)
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32


@pytest.mark.parametrize("name, change, error, message", [
    ("q", lambda x: x.long(), TypeError, "q: expected a floating dtype"),
    ("k", lambda x: x.long(), TypeError, "k: expected a floating dtype"),
    ("k", lambda x: x[..., :8], ValueError, "k: "),
    ("v", lambda x: x[:, :, :1], ValueError, "v: "),
    ("g", lambda x: x[:, :5], ValueError, "g: "),
    ("beta", lambda x: x[..., :1], ValueError, "beta: "),
    ("q", lambda x: x[0], ValueError, "q: expected 4 dimensions"),
    ("g", lambda x: x * float("nan"), ValueError, "g: "),
    ("g", lambda x: -x + 1, ValueError, "g: "),
    ("initial_state", lambda x: torch.zeros(3, 2, 16, 24), ValueError, "initial_state: "),
    ("cu_seqlens", lambda x: torch.tensor([0, 37]), ValueError, "q: expected batch 1 with cu_seqlens, got 2"),
    ("q", lambda x: x.to("meta"), (ValueError, TypeError), "k: expected device meta"),
])
def test_errors_name_the_argument(problem, name, change, error, message):
    tensors = problem("gated_delta_rule", dtype=torch.float32)
    tensors[name] = change(tensors.get(name))
    with pytest.raises(error, match=message):
        call("gated_delta_rule", tensors)


@pytest.mark.parametrize("offsets", [[1, 37], [0, 20, 10, 37], [0, 36]])
def test_wrong_offsets(problem, offsets):
    tensors = problem("kda", B=1, dtype=torch.float32)
    with pytest.raises(ValueError, match="cu_seqlens"):
        call("kda", {**tensors, "cu_seqlens": torch.tensor(offsets)})


@pytest.mark.parametrize("options, message", [
    ({"allow_neg_eigval": True}, "allow_neg_eigval: expected together with use_beta_sigmoid_in_kernel"),
    ({"chunk_size": 48}, "chunk"),
    ({"use_gate_in_kernel": True}, "A_log: expected a tensor"),
    ({"use_gate_in_kernel": True, "A_log": torch.zeros(2), "lower_bound": -7.0}, "lower_bound"),
    ({"return_intermediate_states": True}, "return_intermediate_states"),
    ({"cp_context": object()}, "cp_context"),
    ({"cu_seqlens_cpu": torch.tensor([0, 37])}, "cu_seqlens_cpu"),
])
def test_wrong_options(problem, options, message):
    with pytest.raises(ValueError, match=message):
        call("kda", problem("kda", dtype=torch.float32), **options)


def test_no_tokens_pass_the_state_through(problem):
    tensors = problem("kda", T=0, dtype=torch.float32, state=True)
    o, state = call("kda", tensors)
    assert o.shape == (2, 0, 2, 24) and torch.equal(state, tensors["initial_state"])


def test_head_gates_of_named_models(problem):
    t = problem("linear_attention", H=4)
    del_heads = torch.arange(4, dtype=torch.float64)
    o, _ = ht.chunk_retention(t["q"], t["k"], t["v"])
    expected, _ = recurrence("retention", **t, g_gamma=torch.log1p(-(2.0 ** (-5 - del_heads))))
    assert relative_error(o, expected) < 1e-11
    o, _ = ht.chunk_lightning_attn(t["q"], t["k"], t["v"], layer_idx=3, num_layers=20)
    expected, _ = recurrence("retention", **t, g_gamma=-8 / 4 * (1 - 3 / 20) * del_heads)
    assert relative_error(o, expected) < 1e-11


def test_value_gates_and_element_wise_beta(problem):
    t = problem("gated_delta_rule", state=True)
    t["gv"] = -torch.rand_like(t["v"])
    t["beta"] = torch.rand_like(t["v"])
    compare("gated_delta_rule", t, torch.float64, {"recurrent": True})


def test_other_threads_run_during_a_call(problem):
    t = problem("kda", B=1, T=4096, H=8, K=64, V=64, dtype=torch.float32)
    counted, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            counted[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    start = counted[0]
    call("kda", t)
    seen = counted[0] - start
    stop.set()
    thread.join()
    assert seen > 1000  # a held interpreter lock would leave the counter where it was


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_an_interrupt_waits_for_the_call(problem, backward):
    t = with_gradients(problem("kda", B=1, T=8192, H=8, K=64, V=64, dtype=torch.float32))
    o, _ = call("kda", t)
    d_o = torch.ones_like(o)

    def run():
        return torch.autograd.grad(o, list(t.values()), d_o, retain_graph=True) if backward else call("kda", t)[:1]

    expected = run()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    timer = threading.Timer(0.02, lambda: os.kill(os.getpid(), signal.SIGINT))
    try:
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            for _ in range(100):
                run()
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    assert all(map(torch.equal, run(), expected))


def test_same_results_without_warnings(problem):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        t = problem("kda", dtype=torch.float32)
        assert torch.equal(call("kda", t)[0], call("kda", t)[0])
