"""What is wrong on one rank is an error on all, in the same call; lost ranks are named; nothing hangs."""

import re
import signal

import cp_fault_jobs as jobs
import pytest
from ranks import Failed, Group, close_all, group

STRATEGIES = ["ring", "heads", "summary"]


@pytest.fixture(scope="module", autouse=True)
def groups():
    yield
    close_all()


def refused(kind, message, function, *arguments):
    for error in group(4).refused(function, *arguments):
        assert error.kind == kind and re.search(message, error.text), error


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_errors_of_one_rank(strategy):
    """The group serves the next call."""
    for name, (_, kind, message) in jobs.WRONG.items():
        refused(kind, message, jobs.wrong, strategy, name)
        group(4).run(jobs.right, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_errors_inside_of_kernels(strategy):
    for direction in ("forward", "backward"):
        refused("MemoryError", "^rank 1: no memory for a test$", jobs.fails_inside, strategy, direction)
        group(4).run(jobs.right, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_calls_that_differ(strategy):
    refused("ValueError", "call: expected the same on every rank", jobs.other_operator, strategy)
    refused("ValueError", "cp_context: expected the same on every rank", jobs.other_batch, strategy)
    refused("ValueError", "gradients: expected the same on every rank", jobs.no_gradients, strategy)
    group(4).run(jobs.right, strategy)


def test_errors_around_operators():
    for change, kind, message in (("x", "ValueError", "^rank 1: x: expected the 75 tokens"),
                                  ("weight", "ValueError", "^rank 1: weight: expected .D, 4. as conv1d_kernel_size"),
                                  ("type", "TypeError", "^rank 1: x: expected a floating dtype"),
                                  ("device", "ValueError", "^rank 1: weight: expected device cpu as x, got cuda:0"),
                                  ("channels", "ValueError", "shapes|weight")):
        refused(kind, message, jobs.convolution, change)
    refused("ValueError", "^rank 1: x: expected 75 tokens of the rank", jobs.whole, "tokens")
    refused("ValueError", "^rank 1: x: expected 1 pieces of the rank", jobs.whole, "states")


@pytest.mark.parametrize("name, kind, message", [
    ("offsets", "ValueError", "^cu_seqlens: expected the same on every rank, got another one on rank 1 than on rank 0"),
    ("divided", "ValueError", "^cu_seqlens: expected the same on every rank, got another one on rank 1"),
    ("falling", "ValueError", "^rank 1: cu_seqlens: expected offsets that do not decrease, got 64 behind 65"),
    ("start", "ValueError", "^rank 1: cu_seqlens: expected offsets that start at 0, got 1"),
    ("type", "ValueError", "^rank 1: cu_seqlens: expected int32 or int64"),
    ("list", "TypeError", "^rank 1: cu_seqlens: expected a torch.Tensor, got list"),
    ("ranges", "ValueError", "^token_ranges: expected the same on every rank, got another one on rank 1"),
    ("gap", "ValueError", r"^rank 1: token_ranges: expected ranges that cover .* got \(225, 300\) behind token 224"),
    ("overlap", "ValueError", r"^rank 1: token_ranges: expected ranges that cover .* got \(75, 150\) behind token 76"),
    ("groups", "ValueError", "^rank 1: token_ranges: expected a list of ranges for each of the 4 ranks .* got 2"),
    ("pairs", "TypeError", "^rank 1: token_ranges: expected for each rank a list of pairs"),
    ("width", "ValueError", "^conv1d_kernel_size: expected the same on every rank, got another one on rank 1"),
    ("too wide", "ValueError", "^rank 1: conv1d_kernel_size: expected 1 to 64, got 65"),
    ("layout", "ValueError", "^(token_ranges|layout): expected the same on every rank, got another one on rank 1"),
    ("no layout", "ValueError", "^rank 1: layout: expected one of 'contiguous', 'zigzag', got 'diagonal'"),
    ("strategy", "ValueError", "^strategy: expected the same on every rank, got another one on rank 1"),
    ("exchange", "ValueError", "^exchange: expected the same on every rank, got another one on rank 1"),
    ("link", "ValueError", "^link_gbits: expected the same on every rank, got another one on rank 1"),
    ("no link", "ValueError", "^rank 1: link_gbits: expected a positive number, got 0"),
])
def test_contexts(name, kind, message):
    refused(kind, message, jobs.wrong_context, name)


@pytest.fixture
def own_group():
    made = []

    def make(*arguments, **options):
        made.append(Group(*arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("place", ["before", "inside", "backward"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_dies(own_group, strategy, place):
    """Every other rank names it within a second."""
    ranks = own_group(4)
    ranks.start(jobs.lost, strategy, signal.SIGKILL, place)
    direction = "backward" if place == "backward" else "forward"
    for rank, result in enumerate(ranks.results(60, lost=(1,))):
        if rank != 1:
            assert not isinstance(result, Failed), result
            seconds, message, cause = result
            assert seconds < 1 and message.startswith(f"gated_delta_rule {direction}: rank 1 was lost; "), result
            assert "waited for" in message


@pytest.mark.parametrize("strategy, place", [("ring", "inside"), ("summary", "backward"), ("heads", "before")])
def test_a_rank_falls_silent(own_group, strategy, place):
    """At the timeout of the group, also on ranks that wait for one that waits for the silent one."""
    ranks = own_group(4, timeout=2)
    ranks.start(jobs.lost, strategy, signal.SIGSTOP, place)
    causes = []
    for rank, result in enumerate(ranks.results(60, lost=(1,))):
        if rank != 1:
            assert not isinstance(result, Failed), result
            seconds, message, cause = result
            assert 1.5 < seconds < 6 and "rank 1 was lost" in message, result
            causes.append(cause)
    assert any("Timed out" in cause for cause in causes)


def test_the_host_of_the_store_dies(own_group):
    ranks = own_group(4, hosts=True)
    ranks.start(jobs.killed, 0)
    for rank, result in enumerate(ranks.results(60, lost=(0,))):
        if rank:
            assert not isinstance(result, Failed), result
            seconds, message, again = result
            assert seconds < 5 and "was lost" in message and "of which rank" in again, result
