"""Exact summaries of pieces of a sequence in headrace._core, against the whole sequence token by token."""

import numpy as np
import pytest
import torch
from conftest import BARS, OPERATORS, relative_error
from recurrence import recurrence

from headrace import _core
from headrace._arguments import INPUTS

BY_TOKEN = ("q", "k", "v", "p", "g", "beta")
DELTA = ("delta_rule", "gated_delta_rule", "comba", "kda")


def in_order(tensors):
    """The arrays of `tensors` as _core takes them."""
    return [tensors.get(name) for name in INPUTS]


def part(tensors, begin, end):
    """The tokens from begin to end."""
    return {name: x[:, begin:end] if name in BY_TOKEN else x for name, x in tensors.items()}


def summary_of(op, tensors, options=None, states=1):
    """[transition, state] of the tokens."""
    (B, _, _, K), (HV, V) = tensors["k"].shape, tensors["v"].shape[2:]
    N = B * states
    kind = torch.float64 if tensors["k"].dtype == torch.float64 else torch.float32
    of_channels = (K, K) if op in DELTA else (K,) if op == "gla" else ()
    transition = None if op == "linear_attention" else torch.full((N, HV, *of_channels), torch.nan, dtype=kind)
    summary = [transition, torch.full((N, HV, K, V), torch.nan, dtype=kind)]
    _core.summarize(op, in_order({**tensors, "q": None}), summary, options or _core.Options())
    return summary


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", OPERATORS)
def test_pieces_give_the_states_of_the_whole(problem, op, dtype):
    """Three pieces summarised, composed and applied, against the recurrence over all tokens."""
    tensors = problem(op, B=1, T=100, H=1, HV=2, K=64, V=32, dtype=dtype, state=True)
    wide = {name: x.double() for name, x in tensors.items()}
    o, final = recurrence(op, **wide)
    cuts = [0, 33, 66, 100]
    before = tensors.pop("initial_state")
    first, second, third = (summary_of(op, part(tensors, a, b)) for a, b in zip(cuts, cuts[1:]))
    both, left, right = ([None if x is None else torch.empty_like(x) for x in first] for _ in range(3))
    _core.compose(second, first, both)
    _core.compose(third, both, left)
    _core.compose(third, second, both)
    _core.compose(both, first, right)
    after = torch.empty_like(first[1])
    for whole in (left, right):
        _core.apply(whole, before, False, after)
        assert relative_error(after, final) < BARS[dtype][0]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("op", OPERATORS)
def test_adjoints_of_pieces_give_that_of_the_whole(problem, op, reverse):
    """d_initial_state of two pieces, the second's handed on as M^T D + Dx."""
    tensors = problem(op, B=1, T=60, H=1, HV=2, K=32, V=16, state=True)
    before = tensors.pop("initial_state").requires_grad_()
    o, final = recurrence(op, **tensors, initial_state=before, reverse=reverse)
    d_o, d_final = torch.randn_like(o), torch.randn_like(final)
    (expected,) = torch.autograd.grad([o, final], before, [d_o, d_final])
    options = _core.Options(reverse=reverse)
    pieces = [(0, 41), (41, 60)]
    early, late = reversed(pieces) if reverse else pieces

    def adjoint(tokens, d_final_state):
        out = torch.full_like(expected, torch.nan)
        d_outputs = [d_o[:, slice(*tokens)], d_final_state]
        _core.summarize_backward(op, in_order(part(tensors, *tokens)), d_outputs, out, options)
        return out

    assert relative_error(adjoint(early, adjoint(late, d_final)), expected) < BARS[torch.float64][1]
    transition = summary_of(op, part(tensors, *early), options)[0]
    out = torch.full_like(expected, torch.nan)
    _core.apply([transition, adjoint(early, None)], adjoint(late, d_final), True, out)
    assert relative_error(out, expected) < BARS[torch.float64][1]


def test_arrays_of_numpy_and_what_is_wrong_with_them(problem):
    tensors = {name: x.numpy() for name, x in problem("kda").items()}
    B, T, HV, K = tensors["g"].shape
    transition, state = np.empty((B, HV, K, K)), np.empty((B, HV, K, 24))
    options = _core.Options()
    _core.summarize("kda", in_order(tensors), [transition, state], options)
    only = np.empty_like(transition)
    _core.summarize("kda", in_order(tensors), [only, None], options)
    assert (only == transition).all()
    with pytest.raises(ValueError, match=r"^transition: expected transition or state or both, got neither$"):
        _core.summarize("kda", in_order(tensors), [None, None], options)
    with pytest.raises(ValueError, match=r"^transition: expected 4 dimensions \[N, HV, K, K\], got 3: \[2, 2, 16\]$"):
        _core.summarize("kda", in_order(tensors), [transition[..., 0], state], options)
    with pytest.raises(ValueError, match=r"^transition: expected dtype f64 where k has f64, got f32$"):
        _core.summarize("kda", in_order(tensors), [transition.astype(np.float32), state], options)
    with pytest.raises(ValueError, match="gv: expected none, a summary's transition is one K x K matrix"):
        _core.summarize("kda", in_order({**tensors, "gv": -tensors["v"] ** 2}), [transition, state], options)
    with pytest.raises(ValueError, match="out: expected key_dim 16 as in summary.transition, got 15"):
        _core.apply([transition, None], state, False, np.empty((B, HV, 15, 24)))
    with pytest.raises(ValueError, match="out.state: expected memory of its own, got .* that overlaps second.state"):
        _core.compose([transition, state], [None, state], [None, state])
