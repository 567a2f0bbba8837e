"""Mistakes that users of other libraries met where sequences and layers were cut over ranks, each by its name."""

import copy

import pytest
import torch
import torch.distributed as dist
from conftest import relative_error
from cp_jobs import local_tokens, problem, run, squares
from layers import HIDDEN, make
from ranks import close_all, group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import headrace.torch as ht
import headrace.torch.nn as hn
from headrace.torch.distributed import _layout, build_cp_context, shard, tensor_parallel_plan, unshard

T, SIZES = 96, (2, 4, 8, 8)  # H, HV, K, V
EXACT = 1e-12


@pytest.fixture(scope="module", autouse=True)
def groups():
    yield
    close_all()


def the_gate_of_another_head_in_backward_summaries(ranks):
    """Forwards were exact, gradients wrong by 10 %, but on the last rank."""
    tensors = problem("gated_delta_rule", T, *SIZES, 1, torch.float64)
    tensors["g"] *= torch.tensor([0, 1, 10, 100])
    errors = beside_one_process(ranks, tensors, "summary")
    assert max(max(of_rank.values()) for of_rank in errors) < EXACT


def the_state_that_entered_is_not_there_in_the_backward(ranks):
    """3 to 5 % in gradients that read it."""
    tensors = problem("kda", T, *SIZES, 1, torch.float64)
    tensors["initial_state"] *= 100
    tensors["g"] /= 100
    for strategy in ("summary", "ring"):
        errors = beside_one_process(ranks, tensors, strategy)
        assert max(max(of_rank.values()) for of_rank in errors) < EXACT


def beside_one_process(ranks, tensors, strategy):
    """Of each rank by itself the errors of its gradients of tokens, by name."""
    op, rank = "kda" if tensors["g"].dim() == 4 else "gated_delta_rule", dist.get_rank(ranks)
    context = build_cp_context(torch.tensor([0, T]), ranks, strategy=strategy)
    weights = torch.randn(1, T, *SIZES[1::2], dtype=torch.float64)
    _, whole = run(op, tensors, {}, weights, None)
    state = tensors["initial_state"]
    tokens = {name: x for name, x in tensors.items() if name != "initial_state"}
    local = {name: local_tokens(x, context, rank) for name, x in tokens.items()}
    local["initial_state"] = state if rank == 0 else torch.full_like(state, torch.nan)
    results, found = run(op, local, {"cp_context": context}, local_tokens(weights, context, rank), None)
    assert torch.isfinite(results["o"]).all()
    errors = {}
    for name in tokens:
        expected = local_tokens(whole[f"d_{name}"], context, rank)
        errors[name] = ((found[f"d_{name}"] - expected).norm() / expected.norm()).item()
    everyone = [None] * dist.get_world_size(ranks)
    dist.all_gather_object(everyone, errors, group=ranks)
    return everyone


def a_convolutions_gradient_leaks_into_another_sequence(ranks):
    """The second sequence begins with a rank, whose predecessor has the end of the first."""
    W = 4
    ranges = [[(begin, begin + 32)] for begin in (0, 32, 64)]
    context = build_cp_context(torch.tensor([0, T // 3, T]), ranks, W, token_ranges=ranges)
    x = torch.randn(1, T, 6, dtype=torch.float64)
    mine = shard(x, context).requires_grad_()
    y, _ = ht.short_convolution(mine, torch.randn(6, W, dtype=torch.float64), cp_context=context)
    is_first = dist.get_rank(ranks) == 0
    (y * (0 if is_first else 1)).sum().backward()
    assert mine.grad.abs().max() == 0 if is_first else mine.grad.abs().min() > 0


def offsets_are_divided_by_the_ranks(ranks):
    """They are those of the whole batch; others do not fit the tokens of a rank."""
    offsets = torch.tensor([0, 30, T])
    context = build_cp_context(offsets, ranks)
    assert [end for row in context.token_ranges for _, end in row] == [32, 64, 96]
    assert context.cu_seqlens.tolist() == ([0, 30, 32], [0, 32], [0, 32])[dist.get_rank(ranks)]
    divided = build_cp_context(offsets // dist.get_world_size(ranks), ranks)
    x = torch.randn(1, T // 3, 2, 8)
    with pytest.raises(ValueError, match="expected the 1[01] tokens of this rank"):
        ht.chunk_simple_gla(x, x, x, cp_context=divided)


def contiguous_by_sequences_and_contiguous_by_tokens(ranks):
    """It means the packed tokens: a rank has 32 in a row, not a third of each sequence."""
    context = build_cp_context(torch.tensor([0, 48, T]), ranks)
    rank = dist.get_rank(ranks)
    x = torch.arange(T).reshape(1, T, 1)
    assert shard(x, context).flatten().tolist() == list(range(32 * rank, 32 * rank + 32))
    assert context.sequences.tolist() == ([0], [0, 1], [1])[rank]


def borders_of_packed_sequences_are_lost_in_layers(ranks):
    """Convolutions and operators of a layer: no output, no gradient crosses a border, and those of cuts are exact."""
    offsets = torch.tensor([0, 40, 41, T])
    context = build_cp_context(offsets, ranks)
    layer = make("gated_deltanet").double()
    x = torch.randn(1, T, HIDDEN, dtype=torch.float64)
    other = x.clone()
    other[:, 40:41] = torch.randn(1, 1, HIDDEN)
    outputs = [unshard(layer(shard(each, context), cp_context=context)[0], context) for each in (x, other)]
    assert torch.equal(*(o[:, :40] for o in outputs)) and torch.equal(*(o[:, 41:] for o in outputs))
    assert not torch.equal(*(o[:, 40] for o in outputs))
    expected = layer(x, cu_seqlens=offsets)[0]
    assert squares(outputs[0], expected, ranks) < EXACT
    weights = torch.randn(1, T, HIDDEN, dtype=torch.float64)
    for begin, end in ((0, 40), (40, 41), (41, T), (0, T)):  # the loss of one sequence, and of all
        of_these = torch.zeros_like(weights)
        of_these[:, begin:end] = weights[:, begin:end]
        mine, whole = x.clone().requires_grad_(), x.clone().requires_grad_()
        (layer(shard(mine, context), cp_context=context)[0] * shard(of_these, context)).sum().backward()
        dist.all_reduce(mine.grad, group=ranks)
        (layer(whole, cu_seqlens=offsets)[0] * of_these).sum().backward()
        assert mine.grad[:, :begin].count_nonzero() == mine.grad[:, end:].count_nonzero() == 0
        assert squares(mine.grad, whole.grad, ranks) < EXACT


def metadata_is_made_in_every_layer(ranks):
    """A context is laid out once, when it is built."""
    context = build_cp_context(torch.tensor([0, 40, T]), ranks)
    layer = make("gated_deltanet")
    made, build = [], _layout.Layout.__init__
    _layout.Layout.__init__ = lambda self, *arguments: made.append(arguments)
    try:
        x = shard(torch.randn(1, T, HIDDEN), context)
        for _ in range(2):
            x = layer(x, cp_context=context)[0]
        x.sum().backward()
    finally:
        _layout.Layout.__init__ = build
    assert not made


def projections_are_cut_across_q_k_and_v(ranks):
    """A rank has its heads of each of them, not a third of the rows of all."""
    layer = hn.GatedDeltaNet(HIDDEN, 1, 16, 3, 6).double()
    parallel, rank = copy.deepcopy(layer), dist.get_rank(ranks)
    parallelize_module(parallel, init_device_mesh("cpu", (3,)), tensor_parallel_plan(parallel))
    for name in (f"{x}_{part}.weight" for x in "qkv" for part in ("proj", "conv1d")):
        assert torch.equal(parallel.get_parameter(name).to_local(), layer.get_parameter(name).chunk(3)[rank]), name
    x = torch.randn(1, T, HIDDEN, dtype=torch.float64)
    assert relative_error(parallel(x)[0], layer(x)[0]) < EXACT


@pytest.mark.parametrize("bug", [
    the_gate_of_another_head_in_backward_summaries, the_state_that_entered_is_not_there_in_the_backward,
    a_convolutions_gradient_leaks_into_another_sequence, offsets_are_divided_by_the_ranks,
    contiguous_by_sequences_and_contiguous_by_tokens, borders_of_packed_sequences_are_lost_in_layers,
    metadata_is_made_in_every_layer, projections_are_cut_across_q_k_and_v], ids=lambda bug: bug.__name__)
def test_three_ranks(bug):
    group(3).run(bug)
