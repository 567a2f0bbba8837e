"""headrace.numpy against the recurrence, in every type, with strides, pools and errors."""

import ml_dtypes
import numpy as np
import pytest
import torch
from conftest import BARS, OPERATORS, relative_error
from recurrence import recurrence
from torch._subclasses.fake_tensor import FakeTensorMode

import headrace.numpy as hn


def to_numpy(x):
    return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def to_torch(x):
    return torch.from_numpy(np.ascontiguousarray(x).astype(np.float64))


@pytest.mark.parametrize("cu_seqlens", [None, [0, 0, 16, 17, 37]], ids=["dense", "ragged"])
@pytest.mark.parametrize("dtype", list(BARS), ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("op", OPERATORS)
def test_values_and_gradients(problem, op, dtype, cu_seqlens):
    sizes = {"K": 64, "V": 64} if dtype in (torch.bfloat16, torch.float16) else {}
    tensors = problem(op, B=1 if cu_seqlens else 2, HV=4, dtype=dtype, cu_seqlens=cu_seqlens, state=True, **sizes)
    arrays = {name: to_numpy(x) for name, x in tensors.items()}
    exact = {n: x.double().requires_grad_() if x.is_floating_point() else x for n, x in tensors.items()}
    o, state = hn.forward(op, **arrays, final_state=True)
    expected_o, expected_state = recurrence(op, **exact)
    bars = BARS[dtype]
    assert o.dtype == arrays["q"].dtype
    assert relative_error(to_torch(o), expected_o.detach()) < bars[0]
    assert relative_error(to_torch(state), expected_state.detach()) < bars[0]
    d_o, d_state = torch.ones_like(expected_o), torch.ones_like(expected_state)
    torch.autograd.backward([expected_o, expected_state], [d_o, d_state])
    gradients = hn.backward(op, **arrays, d_o=to_numpy(d_o.to(dtype)), d_final_state=np.ones(state.shape, state.dtype))
    assert set(gradients) == {f"d_{name}" for name in exact if name != "cu_seqlens"}
    for name, gradient in gradients.items():
        source = name[2:]
        assert gradient.dtype == arrays[source].dtype
        bar = bars[1] if source in ("q", "k", "v", "p", "initial_state") else bars[2]
        assert relative_error(to_torch(gradient), exact[source].grad) < bar, name


def test_strides(problem):
    arrays = {name: to_numpy(x) for name, x in problem("kda", dtype=torch.float32).items()}
    turned = {name: np.asfortranarray(x) for name, x in arrays.items()}
    assert not turned["q"].flags.c_contiguous
    np.testing.assert_array_equal(hn.forward("kda", **turned)[0], hn.forward("kda", **arrays)[0])


def test_steps_are_the_forward(problem):
    arrays = {name: to_numpy(x) for name, x in problem("kda", T=9, dtype=torch.float32).items()}
    pool = np.zeros((5, 2, 16, 24), np.float32)
    rows = np.array([3, 1])
    tokens = [hn.step("kda", **{n: x[:, t : t + 1] for n, x in arrays.items()}, pool=pool, indices=rows)
              for t in range(9)]
    o, state = hn.forward("kda", **arrays, final_state=True)
    np.testing.assert_allclose(np.concatenate(tokens, 1), o, atol=1e-6)
    np.testing.assert_allclose(pool[rows], state, atol=1e-6)
    assert not pool[[0, 2, 4]].any()


def test_errors(problem):
    arrays = {name: to_numpy(x) for name, x in problem("kda", dtype=torch.float32).items()}
    with pytest.raises(ValueError, match="op: expected the name of an operator, got 'mamba'"):
        hn.forward("mamba", **arrays)
    with pytest.raises(TypeError, match="gate: expected one of"):
        hn.forward("kda", **arrays, gate=arrays["g"])
    with pytest.raises(TypeError, match="g: expected a numpy array, got list"):
        hn.forward("kda", **{**arrays, "g": [1.0]})
    with pytest.raises(ValueError, match="g: "):
        hn.forward("kda", **{**arrays, "g": -arrays["g"]})
    with pytest.raises(TypeError, match="q: expected float64"):
        hn.forward("kda", **{**arrays, "q": arrays["q"].astype(np.complex64)})
    with pytest.raises(ValueError, match="wanted: "):
        hn.backward("kda", **arrays, d_o=arrays["v"], wanted=["p"])
    with pytest.raises(ValueError, match="pool: expected a writable"):
        frozen = np.zeros((2, 2, 16, 24), np.float32)
        frozen.setflags(write=False)
        hn.step("kda", **arrays, pool=frozen)
    with pytest.raises(ValueError):
        hn.forward("kda", **{**arrays, "q": arrays["q"][::-1]})  # a negative stride


class OnDevice:
    """An array of a framework that is not NumPy, in memory that a device has."""

    def __init__(self, array, device=2):
        self.shape, self.dtype, self.ndim, self.device = array.shape, array.dtype, array.ndim, device

    def __dlpack_device__(self):
        return self.device, 0

    def __array__(self, *args, **kwargs):
        raise AssertionError("read")


class OfCuda(OnDevice):
    __dlpack_device__ = None
    __cuda_array_interface__ = {"version": 3}


def fake_cuda(array):
    with FakeTensorMode():
        return torch.empty(array.shape, device="cuda")


@pytest.mark.parametrize("moved", [OnDevice, OfCuda, fake_cuda])
def test_arrays_on_a_device_are_refused(problem, moved):
    arrays = {name: to_numpy(x) for name, x in problem("kda", dtype=torch.float32, state=True).items()}
    pool = np.zeros((2, 2, 16, 24), np.float32)
    states = arrays.pop("initial_state")
    calls = {
        **{name: lambda **changed: hn.forward("kda", **{**arrays, **changed}) for name in arrays},
        "initial_state": lambda **changed: hn.forward("kda", **arrays, **changed),
        "d_o": lambda **changed: hn.backward("kda", **arrays, **changed),
        "d_final_state": lambda **changed: hn.backward("kda", **arrays, **changed),
        "pool": lambda **changed: hn.step("kda", **arrays, **changed),
        "indices": lambda **changed: hn.step("kda", **arrays, pool=pool, **changed),
    }
    own = {**arrays, "initial_state": states, "d_o": arrays["v"], "d_final_state": states, "pool": pool,
           "indices": np.arange(2)}
    for name, call in calls.items():
        with pytest.raises(TypeError, match=f"^{name}: expected a numpy array, got .* on a device, which headrace.torch"):
            call(**{name: moved(own[name])})
    with pytest.raises(TypeError, match="^q: .* on a device"):
        hn.bind(hn.forward, "kda", **{**arrays, "q": moved(arrays["q"])})


@pytest.mark.parametrize("other", [torch.from_numpy, lambda x: OnDevice(x, 1), np.ndarray.tolist])
def test_others_on_the_host_are_no_device(problem, other):
    arrays = {name: to_numpy(x) for name, x in problem("kda", dtype=torch.float32).items()}
    with pytest.raises(TypeError, match="^k: expected a numpy array, got [A-Za-z]*$"):
        hn.forward("kda", **{**arrays, "k": other(arrays["k"])})


def test_options_reach_the_library(problem):
    tensors = problem("gla")
    arrays = {name: to_numpy(x) for name, x in tensors.items()}
    o, _ = hn.forward("gla", **arrays, scale=0.5, reverse=True, qk_l2norm=True, threads=1, chunk=16, num_steps=2)
    expected, _ = recurrence("gla", **tensors, scale=0.5, reverse=True, qk_l2norm=True)
    assert relative_error(to_torch(o), expected) < 1e-11


def test_gates_beyond_one_must_be_allowed(problem):
    arrays = {name: to_numpy(x) for name, x in problem("gla").items()}
    arrays["g"] = -arrays["g"] / 10
    hn.forward("gla", **arrays, allow_positive_gates=True)
