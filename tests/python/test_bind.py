"""Bound calls: the bits of ordinary ones, from what the arrays hold when they are made, or refused when bound."""

import gc
import threading
import weakref

import calls
import ml_dtypes
import numpy as np
import pytest
import torch

import headrace.numpy as hn
import headrace.torch as ht

BY_TORCH = [f for f in calls.FUNCTIONS if calls.front(f) == "torch"]
B, T, H, D = 2, 5, 2, 8


def cases():
    for function in calls.FUNCTIONS:
        if calls.front(function) == "jax":
            continue
        for op in calls.operators(function):
            for name in calls.parameters(function):
                if calls.SAME.get(name, name) in calls.CHANGES and calls.is_taken(function, op, name):
                    yield pytest.param(function, op, name, id=f"{calls.identifier(function)}-{op}-{name}")


def given(function, op, name):
    """(tensors, options) of float32 calls with the parameter `name`; step and backward with what they need beside."""
    call = calls.changed_call(function, op, name)
    tensors = {n: x.float() if x.is_floating_point() else x for n, x in call.tensors.items()}
    if function is hn.step:
        tensors["pool"] = tensors.pop("initial_state")
    if function is hn.backward:
        tensors["d_o"] = torch.randn_like(tensors["v"])
    return tensors, call.options


def made(function, op, tensors, options, bound):
    """What the function returns, or a bound call of it."""
    if calls.front(function) == "torch":
        return ht.bind(function, **tensors, **options) if bound else function(**tensors, **options)
    arrays, options = {n: x.numpy() for n, x in tensors.items()}, calls.options_by_name(options)
    return hn.bind(function, op, **arrays, **options) if bound else function(op, **arrays, **options)


def arrays_of(result):
    found = result if isinstance(result, tuple) else result.values() if isinstance(result, dict) else (result,)
    return [np.array(x) for x in found if x is not None]


def change(tensors):
    """Other values in place, of which all are allowed: halves."""
    for x in tensors.values():
        if x.is_floating_point():
            x *= 0.5


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("function, op, name", list(cases()))
def test_every_argument(function, op, name):
    tensors, options = given(function, op, name)
    copied = {"g"} if {"g", "gk"} <= tensors.keys() else {"cu_seqlens_cpu", "chunk_indices"} & {*tensors, *options}
    if copied:
        with pytest.raises(ValueError, match=f"^{copied.pop()}: expected an array that a call uses where it lies"):
            made(function, op, tensors, options, True)
        return
    before = {n: x.clone() for n, x in tensors.items()}
    call = made(function, op, tensors, options, True)
    for n, x in tensors.items():
        assert torch.equal(x, before[n]), f"{n} changed while the call was bound"
    for _ in range(2):
        alike = {n: x.clone() for n, x in tensors.items()}
        expected, found = arrays_of(made(function, op, alike, options, False)), arrays_of(call())
        assert len(expected) == len(found)
        for x, y in zip([*expected, *alike.values()], [*found, *tensors.values()]):
            assert np.array_equal(x, y)
        change(tensors)


def step_tensors():
    draw = lambda *sizes: torch.randn(*sizes)
    return {"q": draw(B, 1, H, D), "k": torch.nn.functional.normalize(draw(B, 1, H, D), dim=-1), "v": draw(B, 1, H, D),
            "g": -torch.rand(B, 1, H), "beta": torch.rand(B, 1, H), "initial_state": draw(4, H, D, D),
            "ssm_state_indices": torch.tensor([3, 1])}


STEP = ht.fused_recurrent_gated_delta_rule


@pytest.mark.parametrize("more", [{}, {"out": torch.empty(B, 1, H, D)},
                                  {"num_accepted_tokens": torch.ones(B, dtype=int)}])
def test_steps_on_a_pool_go_on(more):
    """Three tokens, and rows that change between them."""
    mine = step_tensors() | more
    theirs = {n: x.clone() for n, x in mine.items()}
    if "num_accepted_tokens" in more:
        mine["ssm_state_indices"], theirs["ssm_state_indices"] = torch.tensor([[3], [1]]), torch.tensor([[3], [1]])
    call = ht.bind(STEP, **mine)
    for rows in ([3, 1], [0, 3], [-1, 2]):
        for t in (mine, theirs):
            t["ssm_state_indices"].copy_(torch.tensor(rows).view_as(t["ssm_state_indices"]))
            t["v"].add_(1)
        o, pool = call()
        expected, _ = STEP(**theirs)
        assert torch.equal(o, expected) and torch.equal(pool, theirs["initial_state"])
        assert o is call.result[0] and pool is mine["initial_state"]
        assert "out" not in more or o is mine["out"]


def test_what_is_checked_in_a_call():
    t = step_tensors()
    call = ht.bind(STEP, **t)
    t["g"][1, 0, 1] = 0.5
    with pytest.raises(ValueError, match=r"^g: expected values <= 0, got 0.5 at \[1, 0, 1\]"):
        call()
    t["g"].fill_(-1)
    t["ssm_state_indices"][1] = 4
    before = t["initial_state"].clone()
    with pytest.raises(ValueError, match="^ssm_state_indices: expected -1 or a row below 4 of initial_state, got 4"):
        call()
    assert torch.equal(before, t["initial_state"])
    t["ssm_state_indices"][1] = 0
    call()
    assert not torch.equal(before, t["initial_state"])


def test_what_is_checked_when_a_call_is_bound():
    t = step_tensors()
    with pytest.raises(ValueError, match=r"^beta: expected tokens 1"):
        ht.bind(STEP, **t | {"beta": torch.rand(B, 2, H)})
    with pytest.raises(ValueError, match="^out: expected memory of its own"):
        ht.bind(STEP, **t, out=t["v"])
    with pytest.raises(TypeError, match="unexpected keyword argument 'beto'"):
        ht.bind(STEP, **t, beto=None)
    with pytest.raises(TypeError, match="^beto: expected one of"):
        hn.bind(hn.step, "kda", *(t[n].numpy() for n in "qkv"), pool=t["initial_state"].numpy(), beto=None)
    before = t["initial_state"].clone()
    STEP(**t)  # what was refused leaves nothing behind: this call runs
    assert not torch.equal(before, t["initial_state"])


@pytest.mark.parametrize("name, function, changed", [
    ("k", ht.chunk_kda, lambda x: x.double()), ("q", ht.chunk_kda, lambda x: x.half()),
    ("v", STEP, lambda x: x.bfloat16()), ("A_log", ht.chunk_kda, None),
])
def test_tensors_that_would_be_copied(name, function, changed):
    (op,) = calls.operators(function)
    tensors = {n: x.float() for n, x in calls.plain_call(function, op).tensors.items()}
    if changed is None:  # given, and not read without use_gate_in_kernel
        tensors[name] = torch.zeros(calls.HV)
    else:
        tensors[name] = changed(tensors[name])
    refusals = ": expected an array that a call uses where it lies|results that a call leaves"
    with pytest.raises(ValueError, match=refusals):
        ht.bind(function, **tensors)


def test_arrays_that_would_be_copied():
    t = {n: x.numpy() for n, x in step_tensors().items() if n in ("q", "k", "v", "g", "beta")}
    pool = np.zeros((B, H, D, D), np.float32)
    for name, x in (("q", t["q"].astype(">f4")), ("v", t["v"].astype(np.float16)),
                    ("k", t["k"].astype(ml_dtypes.bfloat16)), ("g", t["g"].astype(">f4"))):
        with pytest.raises(ValueError, match=": expected an array that a call uses where it lies"):
            hn.bind(hn.step, "gated_delta_rule", **(t | {name: x}), pool=pool)
    with pytest.raises(TypeError, match="^q: expected an array without a mask"):
        hn.bind(hn.step, "gated_delta_rule", **(t | {"q": np.ma.masked_array(t["q"])}), pool=pool)
    assert not pool.any()


def test_autocast_and_transforms_are_refused():
    t = step_tensors()
    inputs = {n: t[n] for n in ("q", "k", "v", "g", "beta")}
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="expected an array that a call uses"):
        ht.bind(ht.chunk_gated_delta_rule, **inputs)
    with pytest.raises(ValueError, match="outside of tracing, modes and transforms"):
        torch.func.vmap(lambda v: ht.bind(ht.chunk_gated_delta_rule, **inputs | {"v": v})())(torch.stack([t["v"]] * 3))
    inputs["q"].requires_grad_()
    with pytest.raises(ValueError, match="expected no gradients of a bound call"):
        ht.bind(ht.chunk_gated_delta_rule, **inputs)
    with torch.no_grad():
        o, _ = ht.bind(ht.chunk_gated_delta_rule, **inputs)()
    assert not o.requires_grad


def test_derivatives_that_come_after_the_binding_are_refused():
    """A copy_ of what has a gradient or a tangent makes a bound tensor part of it."""
    t = step_tensors()
    call = ht.bind(STEP, **t)
    before = t["initial_state"].clone()
    t["v"].copy_(torch.ones_like(t["v"], requires_grad=True))
    with pytest.raises(ValueError, match="expected no gradients of a bound call"):
        call()
    assert torch.equal(before, t["initial_state"])
    with torch.no_grad():
        call()
    t = step_tensors()
    call = ht.bind(STEP, **t)
    with torch.autograd.forward_ad.dual_level():
        call()
        t["v"].copy_(torch.autograd.forward_ad.make_dual(t["v"].clone(), torch.ones_like(t["v"])))
        with pytest.raises(NotImplementedError, match="forward-mode derivatives are not computed"):
            call()


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_transforms_do_not_reach_a_bound_call(transform):
    """The tensors of a transform are not those of the call: PyTorch refuses to write them there."""
    t = step_tensors()
    call = ht.bind(STEP, **t)

    def loss(v):
        t["v"].copy_(v)
        return call()[0].sum()

    with pytest.raises(RuntimeError):
        transform(loss)(torch.stack([t["v"]] * 3) if transform is torch.func.vmap else t["v"].clone())
    total = torch.func.grad(lambda w: (w * call()[0]).sum())(torch.ones(B, 1, H, D))
    assert torch.equal(total, call.result[0])


def test_other_functions_are_refused():
    for function in (ht.rms_norm_gated, hn.step, lambda q: STEP(q, q, q), None):
        with pytest.raises(TypeError, match=r"^function: expected a chunk_\* or fused_\* function of headrace.torch"):
            ht.bind(function, torch.ones(1, 1, 1, 1))
    for function in (hn.bind, STEP, lambda: None):
        with pytest.raises(TypeError, match="^function: expected forward, backward or step of headrace.numpy"):
            hn.bind(function)


def test_autograd_knows_that_results_change():
    call = ht.bind(STEP, **step_tensors())
    o, _ = call()
    weight = torch.ones_like(o, requires_grad=True)
    total = (weight * o).sum()
    call()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_tensors_that_get_other_memory():
    """resize_ and set_ after a call was bound: it reads what the tensor holds, not where it was."""
    t = step_tensors()
    call = ht.bind(STEP, **t)
    other = torch.randn(B, 1, H, D)
    t["v"].set_(other)
    theirs = {n: x.clone() for n, x in t.items()}
    assert torch.equal(call()[0], STEP(**theirs)[0])
    t["q"].resize_(B, 2, H, D)
    with pytest.raises(ValueError, match="^k: expected tokens 2 as in q, got 1"):
        call()


def test_arrays_live_as_long_as_the_call():
    t = step_tensors()
    theirs = {n: x.clone() for n, x in t.items()}
    references = [weakref.ref(x) for x in t.values()]
    call = ht.bind(STEP, **t)
    del t
    gc.collect()
    assert all(r() is not None for r in references)
    assert torch.equal(call()[0], STEP(**theirs)[0])
    del call
    gc.collect()
    assert all(r() is None for r in references)


def test_other_threads_run_while_one_binds():
    """A thread that binds records its own calls alone."""
    t = step_tensors()
    stop, failures = threading.Event(), []

    def compute():
        mine = {n: x.clone() for n, x in t.items()}
        while not stop.is_set():
            before = mine["initial_state"].clone()
            STEP(**mine)
            if torch.equal(before, mine["initial_state"]):
                failures.append("a call did not run")

    thread = threading.Thread(target=compute)
    thread.start()
    for _ in range(200):
        ht.bind(STEP, **t)
    stop.set()
    thread.join()
    assert not failures


def test_inference_tensors():
    with torch.inference_mode():
        t = step_tensors()
        call = ht.bind(STEP, **t)
        o, _ = call()
    assert o.is_inference() and call()[0] is o
