"""Sequences cut over ranks beside one process: operators, cuts, packings, layouts, strategies, and every gradient."""

import itertools

import pytest
import torch
from conftest import expect_within_bars
from cp_jobs import FUNCTIONS, all_bits, convolutions, gathered, gradients_by_differences, layers, many
from layers import LAYERS
from ranks import close_all, group

from headrace.torch.distributed import _cost
from headrace.torch.distributed._local import Call

# Lengths of the sequences of a batch, for groups of any size: short ones on several ranks, empty ones, one token alone.
PACKINGS = {"one": [200], "several": [50, 0, 3, 100, 47], "blocks": [64, 64, 72], "empty": [0, 1, 199, 0],
            "short": [3] * 40 + [0, 80]}
WAYS = [("ring", "auto"), ("heads", "auto"), ("summary", "all_gather"), ("summary", "doubling")]
GATED = ("gated_delta_rule", "comba", "kda")
REVERSIBLE = ("linear_attention", "retention", "simple_gla", "gla", "delta_rule")
# Of 4 ranks: uneven, empty, out of order.
RANDOM = [[(60, 61), (0, 60)], [], [(150, 200), (61, 140)], [(140, 150), (200, 200)]]


@pytest.fixture(scope="module", autouse=True)
def groups():
    yield
    close_all()


def check(cases, results, dtype=torch.float64):
    for case, errors in zip(cases, results):
        expect_within_bars(errors, dtype, case)


def sizes(ranks):
    """H, HV, K, V, for `heads` with that many ranks: HV > H, V no power of two."""
    return ranks, 2 * ranks, 8, 12


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("op", FUNCTIONS)
def test_operators(op, ranks):
    """All packings in both layouts, one strategy after the other; resets at cuts, raw gates and reverse among them."""
    cases = []
    ways = itertools.cycle(WAYS)
    for (packing, lengths), layout in itertools.product(PACKINGS.items(), ("contiguous", "zigzag")):
        for strategy, exchange in (next(ways), next(ways)):
            raw = op in GATED and packing in ("one", "several") and layout == "zigzag"
            reverse = op in REVERSIBLE and packing in ("several", "empty")
            cut = sum(lengths) // ranks
            cases.append((op, lengths, sizes(ranks), torch.float64,
                          {"strategy": strategy, "exchange": exchange, "layout": layout},
                          {"reverse": True} if reverse else {},
                          {"raw": raw, "resets": () if raw or packing == "blocks" else (cut - 1, cut),
                           "final": packing != "short"}))
    check(cases, group(ranks).run(many, cases)[0])


@pytest.mark.parametrize("op", FUNCTIONS)
def test_any_cuts(op):
    """Ranges of any lengths, out of order, on 4 ranks, of which one has none; auto decides between strategies."""
    cases = [(op, [30, 0, 31, 100, 39], sizes(4), torch.float64,
              {"strategy": strategy, "exchange": exchange, "token_ranges": RANDOM}, options, {})
             for strategy, exchange in [*WAYS, ("auto", "auto")]
             for options in ({}, {"reverse": True} if op in REVERSIBLE else {"use_qk_l2norm_in_kernel": True})]
    check(cases, group(4).run(many, cases)[0])


@pytest.mark.parametrize("heads, tokens, threads, link, expected", [
    (1, 1024, 1, 1, "summary"), (1, 1024, 16, 1, "ring"), (16, 4096, 1, 0.1, "ring"), (16, 4096, 1, None, "summary"),
    (16, 4096, 1, 400, "heads"), (16, 4096, 16, None, "ring")])
def test_auto_knows_threads_and_link(heads, tokens, threads, link, expected):
    x, g = (torch.empty(1, tokens, heads, *rest) for rest in ((128,), ()))
    call = Call.of("gated_delta_rule", [x.bfloat16()] * 3 + [None, g, None, None, g, None, None, None], [None] * 8)
    assert _cost.choose(call, 4, tokens, 3, threads, link) == expected


def test_eight_ranks():
    """Chains of eight and sixteen pieces: three and four rounds of doubling."""
    pairs = zip(("gla", "simple_gla", "retention", "kda", "comba"), ["contiguous", "zigzag"] * 3)
    cases = [(op, [100, 11], (8, 8, 4, 4), torch.float64,
              {"strategy": strategy, "exchange": exchange, "layout": layout}, {}, {})
             for op, layout in pairs for strategy, exchange in WAYS]
    check(cases, group(8).run(many, cases)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_types(dtype):
    """The bars of docs/numerics.md beside one process in float64 on the rounded inputs."""
    cases = [(op, [300, 0, 84], (3, 6, 32, 32), dtype,
              {"strategy": strategy, "exchange": exchange, "layout": layout}, {}, {"raw": op == "kda"})
             for op in FUNCTIONS for (strategy, exchange), layout in zip(WAYS, ("contiguous", "zigzag") * 2)]
    check(cases, group(3).run(many, cases)[0], dtype)


@pytest.mark.parametrize("strategy", ["ring", "heads"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_cuts_at_multiples_of_64_change_no_bit(dtype, strategy):
    ranks = 3
    cases = [(op, lengths, (ranks, heads * ranks, 32, 16), dtype, {"strategy": strategy, "layout": layout},
              {"raw": op in ("kda", "gated_delta_rule") and layout == "zigzag", "final": final,
               "options": {"reverse": True} if op in REVERSIBLE and lengths == [384] else {}})
             for op in FUNCTIONS
             for lengths, layout, heads, final in (([384], "contiguous", 2, True), ([768], "zigzag", 1, False),
                                                   ([192, 256, 128], "contiguous", 1, True))]
    for results in group(ranks).run(all_bits, cases):
        assert [(case, names) for case, names in zip(cases, results) if names] == []


def test_forwards_that_go_on_in_double_change_no_bit():
    """Reflections add up to 512 behind the first of two cuts; and states of chunks, which no backward computes anew."""
    cases = [(op, [lengths], (3, 3, K, K), torch.float32, {"strategy": "ring"}, {"reflects": reflects})
             for op, K, lengths, reflects in (("delta_rule", 128, 1152, True), ("kda", 128, 384, False),
                                              ("simple_gla", 128, 384, False))]
    for results in group(3).run(all_bits, cases):
        assert [(case, names) for case, names in zip(cases, results) if names] == []


def test_other_cuts_change_bits():
    """Without this the test above could compare something with itself."""
    case = ("gated_delta_rule", [384], (3, 3, 32, 16), torch.float32,
            {"strategy": "ring", "token_ranges": [[(0, 100)], [(100, 250)], [(250, 384)]]}, {})
    assert any(results[0] for results in group(3).run(all_bits, [case]))


@pytest.mark.parametrize("strategy", ["ring", "heads", "summary"])
def test_gradients_are_differences(strategy):
    """gradcheck in float64 through three ranks, two of which one sequence passes, by the states at both ends."""
    group(3).run(gradients_by_differences, strategy)


def test_convolutions():
    """Halos over several ranks, over the begin of a sequence, into initial states; gradients of padding go nowhere."""
    cases = [(lengths, 3, width, torch.float64, {"layout": layout}, options)
             for lengths in ([40], [3, 0, 2, 1, 1, 20, 0, 5], [1] * 9, [10, 2])
             for layout in ("contiguous", "zigzag") for width in (1, 2, 4, 7)
             for options in ({}, {"initial": False}, {"final": False, "activation": None})]
    for ranks in (2, 4):
        check(cases, group(ranks).run(convolutions, cases)[0])
    ranges = [[(7, 9), (0, 1)], [], [(1, 2), (9, 20)], [(2, 7)]]
    cases = [(lengths, 3, 5, torch.float64, {"token_ranges": ranges}, {}) for lengths in ([20], [1, 1, 0, 18], [8, 12])]
    check(cases, group(4).run(convolutions, cases)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_types_of_convolutions(dtype):
    for state in (None, torch.float32, torch.bfloat16):
        cases = [([70, 3, 50], 8, 4, dtype, {}, {"state_dtype": state})]
        check(cases, group(3).run(convolutions, cases)[0], torch.bfloat16 if state == torch.bfloat16 else dtype)


def test_layers():
    cases = [(name, [30, 0, 5, 40], {"strategy": strategy}) for name in LAYERS for strategy in ("ring", "summary")]
    check(cases, group(2).run(layers, cases)[0])
    cases = [(name, [75], {"layout": "zigzag"}) for name in LAYERS]
    check(cases, group(4).run(layers, cases)[0])


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_whole_tensors(layout):
    for ranks, lengths in ((2, [40]), (4, [3, 0, 2, 1, 1, 20, 0, 5]), (4, [2])):
        group(ranks).run(gathered, lengths, {"layout": layout})
