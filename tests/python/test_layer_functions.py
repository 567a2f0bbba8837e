"""The layer functions of headrace.torch against plain PyTorch: values, gradients, steps, errors, autograd's checks."""

import pytest
import torch
from conftest import BARS, relative_error

import headrace.torch as ht

RAGGED = [0, 0, 2, 3, 20, 37]


def normal(*sizes, seed=0, dtype=torch.float64):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def convolution_tensors(dtype=torch.float64, others=None, cu_seqlens=None, B=2, T=37, D=24, W=4):
    others = others or dtype
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    return {"x": normal(B if cu_seqlens is None else 1, T, D, seed=1, dtype=dtype),
            "weight": normal(D, W, seed=2, dtype=others), "bias": normal(D, seed=3, dtype=others),
            "initial_state": normal(N, D, W, seed=4, dtype=others)}


def convolution(x, weight, bias=None, initial_state=None, activation=None, cu_seqlens=None):
    """(y, final state): a sum over windows of each sequence behind its state."""
    D, W = weight.shape
    if cu_seqlens is None:
        pieces = [x[b].T for b in range(x.shape[0])]
    else:
        pieces = [x[0, begin:end].T for begin, end in zip(cu_seqlens, cu_seqlens[1:])]
    states = x.new_zeros(len(pieces), D, W) if initial_state is None else initial_state
    whole = [torch.cat([state, piece], -1) for state, piece in zip(states, pieces)]
    bias = 0 if bias is None else bias
    rows = [torch.einsum("dtw,dw->td", w[:, 1:].unfold(1, W, 1), weight) + bias if w.shape[1] > W else w.new_zeros(0, D)
            for w in whole]
    y = torch.stack(rows) if cu_seqlens is None else torch.cat(rows)[None]
    return torch.nn.functional.silu(y) if activation else y, torch.stack([w[:, -W:] for w in whole])


def norm(x, g=None, weight=None, eps=1e-6, activation="silu"):
    y = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = y if weight is None else y * weight
    act = torch.sigmoid if activation == "sigmoid" else torch.nn.functional.silu
    return y if g is None else y * act(g)


def with_gradients(tensors):
    return {n: None if t is None else t.detach().clone().requires_grad_() for n, t in tensors.items()}


def compare(function, oracle, tensors, dtype):
    """Outputs and the gradient of every input, through every output."""
    mine, exact = with_gradients(tensors), with_gradients({n: t.double() for n, t in tensors.items()})
    outputs, expected = function(**mine), oracle(**exact)
    bars = BARS[dtype]
    weights = [normal(*e.shape, seed=9 + i) for i, e in enumerate(expected)]
    for output, e in zip(outputs, expected, strict=True):
        assert relative_error(output, e) < bars[0]
    d_outputs = [w.to(o.dtype) for w, o in zip(weights, outputs)]
    torch.autograd.backward(outputs, d_outputs)
    torch.autograd.backward(expected, [d.double() for d in d_outputs])
    for name, t in mine.items():
        assert t.grad.dtype == t.dtype and t.grad.shape == t.shape
        assert relative_error(t.grad, exact[name].grad) < bars[1], name


@pytest.mark.parametrize("cu_seqlens", [None, RAGGED], ids=["dense", "ragged"])
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("dtype", list(BARS), ids=lambda d: str(d)[6:])
def test_convolution(dtype, activation, cu_seqlens):
    offsets = None if cu_seqlens is None else torch.tensor(cu_seqlens)
    for W in (1, 4, 7):
        compare(lambda **t: ht.short_convolution(**t, output_final_state=True, activation=activation,
                                                 cu_seqlens=offsets),
                lambda **t: convolution(**t, activation=activation, cu_seqlens=cu_seqlens),
                convolution_tensors(dtype, cu_seqlens=cu_seqlens, W=W), dtype)


def test_convolution_of_mixed_types():
    tensors = convolution_tensors(torch.bfloat16, torch.float32)
    compare(lambda **t: ht.short_convolution(**t, output_final_state=True), convolution, tensors, torch.bfloat16)
    y, state = ht.short_convolution(**tensors, output_final_state=True)
    assert y.dtype == torch.bfloat16 and state.dtype == torch.float32
    del tensors["initial_state"], tensors["bias"]
    y, state = ht.short_convolution(**tensors, output_final_state=True)
    assert state.dtype == torch.bfloat16
    assert ht.short_convolution(**tensors)[1] is None


@pytest.mark.parametrize("activation", ["silu", "swish", "sigmoid"])
@pytest.mark.parametrize("dtype", list(BARS), ids=lambda d: str(d)[6:])
def test_norm(dtype, activation):
    for shape in ((5, 40), (2, 7, 3, 16), (2, 1, 3, 2, 1, 33)):
        tensors = {"x": normal(*shape, seed=1, dtype=dtype), "g": normal(*shape, seed=2, dtype=dtype),
                   "weight": normal(shape[-1], seed=3, dtype=dtype)}
        compare(lambda **t: [ht.rms_norm_gated(**t, activation=activation)],
                lambda **t: [norm(**t, activation=activation)], tensors, dtype)
        compare(lambda x: [ht.rms_norm_gated(x, eps=0.1)], lambda x: [norm(x, eps=0.1)], {"x": tensors["x"]}, dtype)


@pytest.mark.parametrize("dtype", list(BARS), ids=lambda d: str(d)[6:])
def test_norm_of_a_sum(dtype):
    tensors = {name: normal(2, 7, 16, seed=i, dtype=dtype) for i, name in enumerate(("x", "g", "residual"))}
    compare(lambda **t: ht.rms_norm_gated(**t, prenorm=True),
            lambda x, g, residual: (norm(x + residual, g), x + residual), tensors, dtype)
    y, kept = ht.rms_norm_gated(**{**tensors, "residual": tensors["residual"].double()}, prenorm=True)
    assert y.dtype == dtype and kept.dtype == torch.float64
    x = tensors["x"]
    assert ht.rms_norm_gated(x, prenorm=True)[1] is x
    assert ht.rms_norm_gated(x, prenorm=True, residual_in_fp32=True)[1].dtype == torch.float32


@pytest.mark.parametrize("size", [100.0, 1e4, 1e30])
def test_norm_stands_strong_gates(size):
    tensors = {"x": normal(4, 16, dtype=torch.float32), "g": normal(4, 16, seed=1, dtype=torch.float32) * size}
    for activation in ("silu", "sigmoid"):
        compare(lambda **t: [ht.rms_norm_gated(**t, activation=activation)],
                lambda **t: [norm(**t, activation=activation)], tensors, torch.float32)


@pytest.mark.parametrize("cu_seqlens", [None, [0, 1, 1, 4]], ids=["dense", "ragged"])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_gradcheck_of_convolution(activation, cu_seqlens):
    tensors = with_gradients(convolution_tensors(T=4, D=2, W=3, cu_seqlens=cu_seqlens))
    offsets = None if cu_seqlens is None else torch.tensor(cu_seqlens)
    assert torch.autograd.gradcheck(lambda *t: ht.short_convolution(*t, True, activation, offsets),
                                    tuple(tensors.values()))


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_gradcheck_of_norm(activation):
    tensors = [normal(3, 5, seed=1), normal(3, 5, seed=2), normal(5, seed=3)]
    assert torch.autograd.gradcheck(lambda *t: ht.rms_norm_gated(*t, activation=activation),
                                    [t.requires_grad_() for t in tensors])


def test_opcheck():
    ops = torch.ops.headrace
    t = convolution_tensors(torch.float32, T=9, D=8)
    inputs = [*with_gradients(t).values(), None]
    torch.library.opcheck(ops.short_convolution.default, (*inputs, True, "silu"))
    torch.library.opcheck(ops.short_convolution.default, (inputs[0], inputs[1], None, None, None, False, "none"))
    torch.library.opcheck(ops.short_convolution_backward.default, (*t.values(), None, t["x"], None, [0, 3], "silu"))
    torch.library.opcheck(ops.short_convolution_step.default,
                          (t["x"][:, 0], t["initial_state"], t["weight"], t["bias"], torch.tensor([1, -1]), "silu"))
    x, gate, weight = (normal(3, 8, seed=1, dtype=torch.float32), normal(3, 8, seed=2, dtype=torch.float32),
                       normal(8, seed=3, dtype=torch.float32))
    torch.library.opcheck(ops.rms_norm_gated.default,
                          (x.clone().requires_grad_(), gate.clone().requires_grad_(), weight, 1e-5, "silu"))
    torch.library.opcheck(ops.rms_norm_gated_backward.default, (x, gate, weight, x, [0, 1, 2], 1e-5, "sigmoid"))


def test_compile_fullgraph():
    def loss(tensors, pool):
        y, state = ht.short_convolution(**tensors, output_final_state=True, activation="silu")
        y = ht.rms_norm_gated(y, tensors["x"], tensors["bias"])
        with torch.no_grad():
            stepped = ht.short_convolution_step(tensors["x"][:, 0], pool, tensors["weight"])
        return y.square().sum() + state.sum() + stepped.sum() + pool.sum()

    eager, compiled = (with_gradients(convolution_tensors(torch.float32)) for _ in range(2))
    pools = [eager["initial_state"].detach().clone() for _ in range(2)]
    loss(eager, pools[0]).backward()
    torch.compile(loss, fullgraph=True, backend="aot_eager")(compiled, pools[1]).backward()
    assert torch.equal(*pools)
    for name in eager:
        torch.testing.assert_close(compiled[name].grad, eager[name].grad, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", list(BARS), ids=lambda d: str(d)[6:])
def test_steps_are_the_forward_convolution(dtype):
    t = convolution_tensors(dtype, B=3, T=11)
    y, state = ht.short_convolution(**t, output_final_state=True, activation="silu")
    pool = normal(5, *t["initial_state"].shape[1:], seed=7, dtype=dtype)
    pool[[4, 0, 2]] = t["initial_state"]
    before, indices = pool.clone(), torch.tensor([4, -1, 0, 2])
    for token in range(11):
        x = t["x"][[0, 0, 1, 2], token]
        x = x[:, None] if token % 2 else x
        stepped = ht.short_convolution_step(x, pool, t["weight"], t["bias"], "silu", indices)
        assert stepped.shape == x.shape and stepped.dtype == dtype
        assert torch.equal(stepped.flatten(1)[[0, 2, 3]], y[:, token])
        assert not stepped[1].any()
    assert torch.equal(pool[[4, 0, 2]], state) and torch.equal(pool[[1, 3]], before[[1, 3]])
    assert torch.equal(ht.short_convolution_step(t["x"][:, 0], t["initial_state"], t["weight"], t["bias"], "silu"),
                       y[:, 0])


def test_a_step_is_seen_by_autograd():
    state = normal(2, 3, 4)
    factor = torch.ones(2, 3, 4, dtype=torch.float64, requires_grad=True)
    product = (state * factor).sum()  # its backward needs the state as it is now
    ht.short_convolution_step(normal(2, 3), state, normal(3, 4))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_steps_on_states_of_inference_mode():
    t = convolution_tensors(torch.float32, T=1)
    y, state = ht.short_convolution(**t, output_final_state=True)
    with torch.inference_mode():
        inside = t["initial_state"].clone()
        assert torch.equal(ht.short_convolution_step(t["x"][:, 0], inside, t["weight"], t["bias"]), y[:, 0])
        inside = t["initial_state"].clone()
    assert torch.equal(ht.short_convolution_step(t["x"][:, 0], inside, t["weight"], t["bias"]), y[:, 0])
    assert torch.equal(inside, state)


def test_no_tokens_pass_the_state_through():
    t = convolution_tensors(torch.float32, T=0)
    y, state = ht.short_convolution(**t, output_final_state=True)
    assert y.shape == (2, 0, 24) and torch.equal(state, t["initial_state"])


def test_strided_inputs_are_read_in_place():
    t = convolution_tensors(torch.float32)
    turned = {n: x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.dim() > 1 else x for n, x in t.items()}
    assert not turned["x"].is_contiguous()
    for expected, actual in zip(ht.short_convolution(**t, output_final_state=True),
                                ht.short_convolution(**turned, output_final_state=True)):
        assert torch.equal(expected, actual)
    packed = normal(2, 5, 3 * 24, dtype=torch.float32)
    x, gate, _ = packed.split(24, -1)
    assert torch.equal(ht.rms_norm_gated(x, gate), ht.rms_norm_gated(x.contiguous(), gate.contiguous()))


@pytest.mark.parametrize("change, error, message", [
    ({"x": torch.zeros(37, 24)}, ValueError, r"x: expected 3 dimensions \[B, T, D\], got shape \[37, 24\]"),
    ({"x": torch.zeros(2, 37, 24, dtype=torch.long)}, TypeError, "x: expected a floating dtype, got torch.int64"),
    ({"weight": torch.zeros(24, 1, 4)}, ValueError, "weight: expected 2 dimensions"),
    ({"weight": torch.zeros(23, 4)}, ValueError, "weight: expected channels 24 as in x, got 23"),
    ({"weight": torch.zeros(24, 65)}, ValueError, "weight: expected a width of 1 to 64, got 65"),
    ({"weight": torch.zeros(24, 4, device="meta")}, ValueError, "weight: expected device cpu as x, got meta"),
    ({"bias": torch.zeros(2)}, ValueError, "bias: expected channels 24 as in x, got 2"),
    ({"initial_state": torch.zeros(2, 24, 3)}, ValueError, "initial_state: expected width 4 as in weight, got 3"),
    ({"activation": "relu"}, ValueError, "activation: expected one of None, 'silu', 'swish', got 'relu'"),
    ({"cu_seqlens": torch.tensor([0, 37])}, ValueError, "initial_state|x: expected batch 1 with cu_seqlens, got 2"),
    ({"cu_seqlens": torch.tensor(37)}, ValueError, "cu_seqlens: expected 1 dimension"),
])
def test_errors_of_the_convolution_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        ht.short_convolution(**{**convolution_tensors(torch.float32), **change})


@pytest.mark.parametrize("offsets", [[1, 37], [0, 20, 10, 37], [0, 36]])
def test_wrong_offsets(offsets):
    with pytest.raises(ValueError, match="cu_seqlens"):
        ht.short_convolution(torch.zeros(1, 37, 8), torch.zeros(8, 4), cu_seqlens=torch.tensor(offsets))


@pytest.mark.parametrize("change, error, message", [
    ({"x": torch.zeros(3, 2, 24)}, ValueError, r"x: expected 2 dimensions \[N, D\], got shape \[3, 2, 24\]"),
    ({"state": torch.zeros(2, 24, 4)}, ValueError, "pool.states: expected at least 3 rows"),
    ({"indices": torch.tensor([0, 1, 1])}, ValueError,
     r"pool.indices: expected different rows, got 1 at \[1\] and \[2\]"),
    ({"indices": torch.tensor([0, 5, 1])}, ValueError, "pool.indices: expected -1 or a row below 5"),
    ({"indices": torch.tensor([0.0, 2.0, 1.0])}, ValueError, "pool.indices: expected dtype i32 or i64, got f32"),
    ({"weight": torch.zeros(24, 4, requires_grad=True)}, ValueError, "state: expected no gradients"),
])
def test_errors_of_a_step_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        ht.short_convolution_step(**{"x": torch.zeros(3, 24), "state": torch.zeros(5, 24, 4),
                                     "weight": torch.zeros(24, 4), **change})


@pytest.mark.parametrize("change, error, message", [
    ({"g": torch.zeros(3, 7)}, ValueError, r"^g: expected shape \[3, 8\] as x, got \[3, 7\]"),
    ({"residual": torch.zeros(8)}, ValueError, r"^residual: expected shape \[3, 8\] as x, got \[8\]"),
    ({"bias": torch.zeros(8)}, ValueError, "^bias: expected None"),
    ({"weight": torch.zeros(7)}, ValueError, "weight: expected channels 8 as in x, got 7"),
    ({"weight": torch.zeros(8, dtype=torch.int32)}, TypeError, "weight: expected a floating dtype"),
    ({"eps": -1.0}, ValueError, "eps: expected a finite number >= 0, got -1"),
    ({"activation": None}, ValueError, "activation: expected one of 'silu', 'swish', 'sigmoid', got None"),
    ({"x": torch.tensor(1.0)}, ValueError, "x: expected at least 1 dimension"),
])
def test_errors_of_the_norm_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        ht.rms_norm_gated(**{"x": torch.zeros(3, 8), **change})


def test_second_derivatives_are_refused():
    t = with_gradients(convolution_tensors(T=4, D=2))
    for y in (ht.short_convolution(**t)[0], ht.rms_norm_gated(t["x"])):
        (d_x,) = torch.autograd.grad(y.sum(), t["x"], create_graph=True)
        with pytest.raises(NotImplementedError, match="second derivatives"):
            d_x.sum().backward()
