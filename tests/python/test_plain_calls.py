"""Plain calls of headrace.torch, made in one go, beside the long way: the same bits, versions and words."""

import itertools
from functools import partial

import calls
import pytest
import torch

import headrace.torch as ht
from headrace.torch import _library

FUNCTIONS = [f for f in calls.FUNCTIONS if calls.front(f) == "torch"]
STEP = ht.fused_recurrent_gated_delta_rule


@pytest.fixture
def plain(monkeypatch):
    """made(function, is_plain, tensors, options): the result, or the exception; `plain.taken`: calls made in one go."""
    run_plain = _library.run_plain

    class Made:
        taken = 0

        def __call__(self, function, is_plain, tensors, options):
            def counted(*arguments):
                result = run_plain(*arguments)
                self.taken += result is not None
                return result

            with monkeypatch.context() as patch:
                patch.setattr(_library, "run_plain", counted if is_plain else lambda *arguments: None)
                try:
                    return function(**tensors, **options)
                except Exception as error:  # whatever it is, the other way must say the same
                    return type(error), str(error)

    return Made()


def check_alike(plain, function, tensors, options, name=None, change=None):
    """Both ways: results, the types of results, the tensors given, of which `change` makes one, and their versions."""
    mine, theirs = ({n: change(x.clone()) if n == name else x.clone() for n, x in tensors.items()} for _ in range(2))
    found, expected = plain(function, True, mine, options), plain(function, False, theirs, options)
    assert type(found) is type(expected) and len(found) == len(expected) == 2
    for x, y in [*zip(found, expected), *zip(mine.values(), theirs.values())]:
        if isinstance(x, torch.Tensor) and x.device.type == "cpu" and not x.is_sparse:
            assert (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride())
            assert x.is_inference() == y.is_inference() and (x.is_inference() or x._version == y._version)
            assert torch.equal(x.nan_to_num(), y.nan_to_num())
        elif not isinstance(x, torch.Tensor):
            assert x == y
    return found


def given(function, op, name=None):
    call = calls.plain_call(function, op) if name is None else calls.changed_call(function, op, name)
    return {n: x.float() if x.is_floating_point() else x for n, x in call.tensors.items()}, call.options


def cases():
    for function in FUNCTIONS:
        for op in calls.operators(function):
            for name in calls.parameters(function):
                if calls.SAME.get(name, name) in calls.CHANGES and calls.is_taken(function, op, name):
                    yield pytest.param(function, op, name, id=f"{function.__name__}-{name}")


# Of these a call goes the long way: a copy is made, gates or decays are computed, names are old.
LONG = {"cu_seqlens_cpu", "chunk_size", "transpose_state_layout"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("function, op, name", list(cases()))
def test_every_argument(plain, function, op, name, mode):
    with mode():
        tensors, options = given(function, op, name)
        found = check_alike(plain, function, tensors, options)
    assert isinstance(found[0], torch.Tensor), found
    has_decays = "retention" in function.__name__ or "lightning" in function.__name__
    is_usual = not has_decays and not LONG & {*tensors, *(n for n, x in options.items() if x is not None)}
    if is_usual and ("A_log" not in tensors or options.get("use_gate_in_kernel")):
        made_a_log = options.get("lower_bound") is not None and "A_log" not in tensors
        assert plain.taken == (0 if made_a_log and options.get("use_gate_in_kernel") else 1)


def step_tensors():
    function, op = STEP, "gated_delta_rule"
    tensors, _ = given(function, op)
    tensors = {n: x[:, :1].contiguous() for n, x in tensors.items() if n in ("q", "k", "v", "g", "beta")}
    pool = torch.randn(3, calls.HV, calls.K, calls.V)
    return tensors | {"initial_state": pool, "ssm_state_indices": torch.tensor([2])}


def negated(x):
    """The numbers of x, which memory holds with the other sign."""
    return torch.complex(torch.zeros_like(x), -x).conj().imag


class Derived(torch.Tensor):
    pass


CHANGES = {
    "a list": lambda x: x.tolist(),
    "None": lambda x: None,
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "float64": lambda x: x.double(),
    "bfloat16": lambda x: x.bfloat16(),
    "integers": lambda x: x.int(),
    "complex": lambda x: x.to(torch.complex64),
    "booleans": lambda x: x.bool(),
    "one dimension less": lambda x: x[..., 0],
    "one dimension more": lambda x: x.unsqueeze(-1),
    "longer": lambda x: torch.cat([x, x], dim=-1),
    "strided": lambda x: torch.stack([x, x], dim=-1)[..., 0],
    "expanded": lambda x: x[:, :1].expand(x.shape) if x.dim() > 1 else x[:1].expand(x.shape),
    "transposed": lambda x: x.mT.contiguous().mT if x.dim() > 1 else x,
    "negated": lambda x: negated(x) if x.dtype == torch.float32 else x,
    "not finite": lambda x: torch.full_like(x, float("nan")) if x.is_floating_point() else x - 7,
    "a parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "a derived class": lambda x: x.as_subclass(Derived),
    "requiring a gradient": lambda x: x.detach().requires_grad_() if x.is_floating_point() else x,
}


@pytest.mark.filterwarnings("ignore:.*sparse.*")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("function", [STEP, ht.chunk_comba, ht.fused_recurrent_kda, ht.chunk_simple_gla],
                         ids=lambda f: f.__name__)
def test_unusual_tensors(plain, function, change):
    if function is STEP:
        tensors, options = step_tensors() | {"out": torch.empty(1, 1, calls.HV, calls.V)}, {}
    else:
        tensors, options = given(function, *calls.operators(function))
        options = options | {"output_final_state": True}
    if function is ht.fused_recurrent_kda:
        tensors |= {"A_log": torch.randn(calls.HV), "dt_bias": torch.randn(calls.HV * calls.K),
                    "cu_seqlens": torch.tensor(calls.RAGGED)}
        options |= {"use_gate_in_kernel": True}
    for name in tensors:
        check_alike(plain, function, tensors, options, name, CHANGES[change])


@pytest.mark.parametrize("option, values", [
    ("scale", [None, 2, 0.5, float("inf"), "a", torch.tensor(0.5), True]),
    ("output_final_state", [True, False, 1, None, torch.tensor(True)]),
    ("state_v_first", [True, False, 0, None]),
    ("use_qk_l2norm_in_kernel", [True, False, "yes", None]),
    ("lower_bound", [None, -5, -2.5, -6.0, 0, "a"]),
])
def test_unusual_options(plain, option, values):
    tensors, _ = given(STEP, "gated_delta_rule")
    tensors["A_log"] = torch.randn(calls.HV)
    for value, kernel_gate in itertools.product(values, (False, True)):
        check_alike(plain, STEP, tensors, {option: value, "use_gate_in_kernel": kernel_gate})
    for value in values:
        check_alike(plain, STEP, step_tensors(), {option: value})


def test_wrong_rows_and_gates_are_named_as_ever(plain):
    for name, value, words in (("ssm_state_indices", torch.tensor([3]),
                                "ssm_state_indices: expected -1 or a row below 3"),
                               ("g", torch.ones(1, 1, calls.HV), "g: expected values <= 0, got 1"),
                               ("out", torch.empty(1, 2, calls.HV, calls.V), "out: expected")):
        error, message = check_alike(plain, STEP, step_tensors() | {name: value}, {})
        assert error is ValueError and message.startswith(words)


def test_modes_and_transforms_go_the_long_way(plain):
    tensors, _ = given(STEP, "gated_delta_rule")
    call = partial(plain, STEP, True, tensors, {})
    expected = call()[0]
    assert plain.taken == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert call()[0].dtype == torch.bfloat16
    with torch.profiler.profile(), torch.autograd.forward_ad.dual_level():
        assert torch.equal(call()[0], expected)
    o = torch.func.vmap(lambda v: plain(STEP, True, tensors | {"v": v}, {})[0])(torch.stack([tensors["v"]] * 2))
    assert torch.equal(o[1], expected)
    assert plain.taken == 1


def test_results_are_new(plain):
    tensors, _ = given(STEP, "gated_delta_rule")
    first = plain(STEP, True, tensors, {"output_final_state": True})
    second = plain(STEP, True, tensors, {"output_final_state": True})
    assert plain.taken == 2 and all(x.data_ptr() != y.data_ptr() for x, y in zip(first, second))
