"""Contexts, also flash-linear-attention's; compiled graphs, checkpoints, transforms; bytes on the wire; overheads."""

import cp_call_jobs as jobs
import pytest
from ranks import close_all, group

from headrace.torch.distributed._exchange import STATUS_BYTES


@pytest.fixture(scope="module", autouse=True)
def groups():
    yield
    close_all()


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_fields_are_those_of_fla(layout):
    for lengths in ([96], [40, 56], [48, 48], [3] * 32, [1, 94, 1], [12, 12, 24, 30, 18]):
        for different in group(4).run(jobs.fields_of_fla, lengths, layout):
            assert different == [], lengths


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_contexts_of_fla_are_taken(layout):
    for lengths in ([96], [40, 56], [48, 48], [3] * 32, [1, 94, 1]):
        assert max(group(4).run(jobs.taken_from_fla, lengths, layout)) < 1e-12


def test_what_contexts_say():
    ranges = [[(0, 50)], [(50, 100)], [(100, 150)], [(150, 200)]]
    results = group(4).run(jobs.contexts, {"strategy": "ring"})
    assert all(result[0] == ranges and result[-1] == "ring" for result in results)
    assert [result[1:5] for result in results] == [
        ([0, 50], [True], [True], [0]), ([0, 0, 50], [True, True], [True, False], [1, 2]),
        ([0, 30, 50], [False, True], [True, False], [2, 3]), ([0, 50], [False], [True], [3])]
    results = group(4).run(jobs.contexts, {"layout": "zigzag"})
    assert results[1][0] == [[(0, 25), (175, 200)], [(25, 50), (150, 175)], [(50, 75), (125, 150)],
                             [(75, 100), (100, 125)]]
    assert results[3][1:5] == ([0, 25, 50], [False, False], [False, False], [2, 2])
    own = [[(199, 200)], [], [(0, 60), (100, 199)], [(60, 100)]]
    results = group(4).run(jobs.contexts, {"token_ranges": own})
    assert results[1][1:5] == ([0], [], [], [])
    assert results[2][1:5] == ([0, 50, 50, 60, 90, 159], [True, True, True, False, True],
                               [True, True, False, True, False], [0, 1, 2, 2, 3])


def test_meshes():
    assert all("expected a DeviceMesh of 1 dimension, got one of 2" in message for message in group(2).run(jobs.mesh))


def test_groups_without_the_cpu():
    for message in group(2).run(jobs.backends):
        assert message.startswith("group: expected one with a backend for CPU tensors"), message


@pytest.mark.alone
def test_times_of_contexts():
    """1 ms for 1000 sequences, on one rank."""
    assert group(1).run(jobs.times_of_contexts)[0] < 1e-3


@pytest.mark.alone
def test_overhead_of_one_rank():
    offsets, context = group(1).run(jobs.overhead)[0]
    assert context - offsets < 50


@pytest.mark.parametrize("strategy, backend", [("ring", "aot_eager"), ("heads", "aot_eager"), ("summary", "inductor")])
def test_compiled_steps(strategy, backend):
    """One graph serves contexts of several batches; a second one, with sizes that are not fixed, other cuts."""
    for worst, graphs in group(2).run(jobs.compiled, strategy, backend):
        assert worst < 1e-4 and graphs <= 3


@pytest.mark.parametrize("strategy", ["ring", "heads", "summary"])
def test_training(strategy):
    assert all(group(2).run(jobs.training, strategy))


def test_transforms():
    for vmap, forward_mode, second in group(2).run(jobs.transforms):
        assert "cp_context: expected no vmap" in vmap
        assert "headrace::cp_forward: forward-mode derivatives are not computed" in forward_mode
        assert "headrace::cp_backward: second derivatives are not computed" in second


# ---- bytes on the wire ----

K, V, RANKS = 32, 16, 4
STATE = 4 * K * V * RANKS  # one state in float32 of all heads, of which there are as many as ranks


def sent(op, strategy, exchange="all_gather"):
    """Forward and backward: (messages, payload) of each rank. Each message has a status word, each rank a last one."""
    results = group(RANKS).run(jobs.bytes_sent, op, strategy, exchange, K, V)
    for directions in results:
        for messages, _, status in directions:
            assert status == (messages + RANKS - 1) * STATUS_BYTES
    return [[directions[i][:2] for directions in results] for i in range(2)]


@pytest.mark.parametrize("op, M", [("linear_attention", 0), ("retention", 0), ("simple_gla", 4), ("gla", 4 * K),
                                   ("gated_delta_rule", 4 * K * K), ("comba", 4 * K * K), ("kda", 4 * K * K)])
def test_bytes_of_summaries(op, M):
    """R, of pieces that a sequence passes through M as well; back, Dx alone."""
    through = STATE + M * RANKS
    forward, backward = sent(op, "summary")
    assert forward == [(3, 3 * STATE), (2, 2 * through), (1, through), (0, 0)]
    assert backward == [(0, 0), (1, STATE), (2, 2 * STATE), (3, 3 * STATE)]
    forward, backward = sent(op, "summary", "doubling")  # a shift, then one and two slots further
    assert sum(messages for messages, _ in forward) == sum(messages for messages, _ in backward) == 6
    assert max(messages for messages, _ in forward) <= 2 + 1
    assert sum(payload for _, payload in backward) == 6 * STATE
    assert sum(payload for _, payload in forward) == 6 * STATE + 3 * M * RANKS


@pytest.mark.parametrize("op", ["simple_gla", "gated_delta_rule", "kda"])
def test_bytes_of_rings(op):
    """One state for each cut, by groups of heads; a few numbers about its roundings; the same back."""
    roundings = 4 * (K + 16) * RANKS
    forward, backward = sent(op, "ring")
    assert forward == [(RANKS, STATE + roundings)] * 3 + [(0, 0)]
    asked = RANKS - 1  # whether a backward recomputes the forward's states; where it does not, they are sent before
    expected = [(asked, 0)] + [(asked + RANKS, STATE + roundings)] * 3
    again = [(asked + RANKS, STATE + roundings)] + [(asked + 2 * RANKS, 2 * (STATE + roundings))] * 2 + [expected[3]]
    assert backward in (expected, again)


def test_bytes_of_heads():
    """Every rank keeps a fourth of its tokens' heads and sends the others, in the types that they have."""
    forward, backward = sent("simple_gla", "heads")
    inputs = 64 * (RANKS - 1) * (2 * (K + K + V) + 4)
    o = 64 * (RANKS - 1) * 2 * V
    assert forward == [(2 * (RANKS - 1), inputs + o)] * RANKS
    assert backward == [(2 * (RANKS - 1), 2 * inputs + o)] * RANKS


def test_bytes_of_convolutions():
    """W - 1 inputs and as many gradients."""
    results = group(RANKS).run(jobs.bytes_of_convolution, 8, 4)
    assert [forward[:2] for forward, _ in results] == [(1, 3 * 8 * 4)] * 3 + [(0, 0)]
    assert [backward[:2] for _, backward in results] == [(0, 0)] + [(1, 3 * 8 * 4)] * 3


def test_halves_cross_as_they_are():
    forward, _ = sent("linear_attention", "summary")
    assert forward[0] == (3, 3 * STATE)  # fp32 states of bf16 tensors


