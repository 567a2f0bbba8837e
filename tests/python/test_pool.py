"""The serving form of headrace.torch: what a call on a pool of states returns, writes, leaves alone and refuses."""

import gc
import weakref

import pytest
import torch
from conftest import BARS, OPERATORS, relative_error
from recurrence import recurrence
from test_torch import call

import headrace.torch as ht

H, HV, K, V = 2, 4, 16, 24
LENGTHS = [3, 0, 1, 2]  # of the ragged batch: the last sequence is padding
SLOTS = [[5, 1, 8], [2, 9, 0], [7, 7, 3], [-1, -1, -1]]  # [N, S]
ACCEPTED = [2, 1, 3, 1]  # the sequences start from rows 1, 2 and 3


def serve(op, tensors, pool, rows, **options):
    """o of a call that starts from the pool and leaves its states there."""
    o, returned = call(op, {**tensors, "initial_state": pool}, recurrent=True, output_final_state=False,
                       ssm_state_indices=rows, **options)
    assert returned is pool
    return o


def random_pool(dtype, rows=11):
    draw = torch.Generator().manual_seed(3)
    return torch.randn(rows, HV, K, V, generator=draw, dtype=torch.float64).to(dtype)


def state_dtype(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def tokens_of(tensors, b, t):
    """Token t of row b, in float64."""
    return {name: (x if x.dim() == 1 else x[b : b + 1, t : t + 1]).double() for name, x in tensors.items()}


def one_by_one(op, tensors, spans, starts):
    """From the states `starts`: [o] and [state] of every token of each of the spans (b, start, end)."""
    results = []
    for (b, start, end), state in zip(spans, starts):
        outputs, states = [], []
        for t in range(start, end):
            o, final_states = recurrence(op, **tokens_of(tensors, b, t), initial_state=state.double()[None])
            state = final_states[0]
            outputs.append(o[0, 0])
            states.append(state)
        results.append((outputs, states))
    return results


@pytest.mark.parametrize("dtype", list(BARS), ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("op", OPERATORS)
def test_every_token_leaves_its_state(problem, op, dtype):
    """A ragged batch with slots, sequences without tokens and padding."""
    t = problem(op, B=1, T=sum(LENGTHS), H=H, HV=HV, dtype=dtype)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    pool, out = random_pool(state_dtype(dtype)), torch.full_like(t["v"], float("nan"))
    before = pool.clone()
    o = serve(op, {**t, "cu_seqlens": ends}, pool, torch.tensor(SLOTS), num_accepted_tokens=torch.tensor(ACCEPTED),
              out=out)
    assert o is out and o.dtype == dtype
    spans = [(0, *pair) for pair in zip(ends[:3].tolist(), ends[1:4].tolist())]
    expected = one_by_one(op, t, spans, before[[1, 2, 3]])
    written = []
    for (_, start, _), rows, (outputs, states) in zip(spans, SLOTS, expected):
        for token, (expected_o, state) in enumerate(zip(outputs, states)):
            assert relative_error(o[0, start + token], expected_o) < BARS[dtype][0]
            assert relative_error(pool[rows[token]], state) < BARS[dtype][0]
            written.append(rows[token])
    assert written == [5, 1, 8, 7]
    assert not o[0, -2:].any()
    untouched = [row for row in range(len(pool)) if row not in written]
    assert torch.equal(pool[untouched], before[untouched])


@pytest.mark.parametrize("rows", [[6, -1, 0], [[6, 4, 1], [-1, -1, -1], [0, 9, 2]]], ids=["last", "each"])
@pytest.mark.parametrize("op", OPERATORS)
def test_dense_batches_of_several_tokens(problem, op, rows):
    """[N]: the row of a sequence takes its last state; [N, S] without num_accepted_tokens: it starts from the first."""
    t = problem(op, B=3, T=3, H=H, HV=HV, dtype=torch.float32)
    pool = random_pool(torch.float32)
    before, rows = pool.clone(), torch.tensor(rows, dtype=torch.int32)
    o = serve(op, t, pool, rows)
    written = set()
    for n, (outputs, states) in zip((0, 2), one_by_one(op, t, [(0, 0, 3), (2, 0, 3)], before[[6, 0]])):
        assert relative_error(o[n], torch.stack(outputs)) < 3e-6
        for row, state in zip(rows[n].reshape(-1).tolist()[::-1], states[::-1]):
            assert relative_error(pool[row], state) < 3e-6
            written.add(row)
    untouched = [row for row in range(len(pool)) if row not in written]
    assert written == {row for row in rows.flatten().tolist() if row >= 0} and not o[1].any()
    assert torch.equal(pool[untouched], before[untouched])


def test_ragged_batches_with_one_row_for_each_sequence(problem):
    t = problem("kda", B=1, T=6, H=H, HV=HV, dtype=torch.float32) | {"cu_seqlens": torch.tensor([0, 4, 4, 6])}
    pool, rows = random_pool(torch.float32), torch.tensor([6, 4, 0])
    before = pool.clone()
    o = serve("kda", t, pool, rows)
    expected, states = call("kda", {**t, "initial_state": before[rows]})
    assert relative_error(o, expected) < 3e-6 and relative_error(pool[rows], states) < 3e-6
    untouched = [row for row in range(len(pool)) if row not in (6, 0)]  # row 4 belongs to no token
    assert torch.equal(pool[untouched], before[untouched])


def test_without_rows_sequence_n_has_row_n(problem):
    t = problem("kda", B=2, T=1, H=H, HV=HV, dtype=torch.float32)
    pools = [random_pool(torch.float32) for _ in range(2)]
    o, returned = call("kda", {**t, "initial_state": pools[0]}, recurrent=True, inplace_final_state=True)
    assert returned is pools[0]
    assert torch.equal(o, serve("kda", t, pools[1], torch.tensor([0, 1]))) and torch.equal(*pools)


def test_a_new_state_instead_of_one_in_place(problem):
    """Without a pool inplace_final_state=False is the ordinary call."""
    t = problem("kda", H=H, HV=HV, state=True)
    kept = t["initial_state"].clone()
    for actual, expected in zip(call("kda", t, recurrent=True, inplace_final_state=False), call("kda", t)):
        assert torch.equal(actual, expected)
    assert torch.equal(t["initial_state"], kept)


@pytest.mark.parametrize("op", ["gla", "gated_delta_rule", "kda"])
def test_pools_of_other_layouts(problem, op):
    """V first, and a part of a larger buffer: the same bits as of a pool of its own, and nothing beside it changes."""
    t = problem(op, B=2, T=2, H=H, HV=HV, dtype=torch.float32)
    rows = torch.tensor([[6, 4], [-1, -1]])
    pool, turned = random_pool(torch.float32), random_pool(torch.float32).mT.contiguous()
    pages = torch.full((2 * len(pool), 3, HV, K, V + 8), 7.0)
    pages[::2, 1, :, :, :V] = pool
    expected = serve(op, t, pool, rows)
    assert torch.equal(serve(op, t, turned, rows, state_v_first=True), expected) and torch.equal(turned.mT, pool)
    view = pages[::2, 1, :, :, :V]
    assert torch.equal(serve(op, t, view, rows), expected) and torch.equal(view, pool)
    view.fill_(7.0)
    assert (pages == 7).all()


@pytest.mark.parametrize("pool_dtype", [torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
def test_pools_of_16_bits_round_what_they_take(problem, pool_dtype):
    t = problem("kda", B=2, T=2, H=H, HV=HV, dtype=torch.bfloat16)
    narrow, rows = random_pool(pool_dtype), torch.tensor([[6, 4], [0, 3]])
    wide = narrow.float()
    assert torch.equal(serve("kda", t, narrow, rows), serve("kda", t, wide, rows))
    assert torch.equal(narrow, wide.to(pool_dtype))


# ---- autograd ----


def test_no_gradients(problem):
    t = problem("kda", B=2, T=1, H=H, HV=HV, dtype=torch.float32)
    rows, message = torch.tensor([6, 4]), "^ssm_state_indices: expected no gradients with a pool"
    pool = random_pool(torch.float32)
    before = pool.clone()
    for name in t:
        needed = {**t, name: t[name].clone().requires_grad_()}
        with pytest.raises(ValueError, match=message):
            serve("kda", needed, pool, rows)
    with pytest.raises(ValueError, match=message):
        serve("kda", t, pool.clone().requires_grad_(), rows)
    assert torch.equal(pool, before)
    with torch.no_grad():
        assert not serve("kda", needed, pool, rows).requires_grad


def test_a_refused_call_keeps_no_tensors(problem):
    t = problem("kda", B=2, T=1, H=H, HV=HV, dtype=torch.float32)
    t["v"].requires_grad_()
    with pytest.raises(ValueError, match="no gradients"):
        serve("kda", t, random_pool(torch.float32), torch.tensor([6, 4]))
    kept = weakref.ref(t.pop("v"))
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("saved", ["pool", "out"])
def test_a_step_is_seen_by_autograd(problem, saved):
    t = problem("kda", B=2, T=1, H=H, HV=HV, dtype=torch.float32)
    changed = {"pool": random_pool(torch.float32), "out": torch.ones_like(t["v"])}
    factor = torch.ones_like(changed[saved], requires_grad=True)
    product = (changed[saved] * factor).sum()  # its backward needs the tensor as it is now
    serve("kda", t, changed["pool"], torch.tensor([6, 4]), out=changed["out"])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_tensors_of_inference_mode(problem):
    t = problem("kda", B=2, T=1, H=H, HV=HV, dtype=torch.float32)
    pool, rows = random_pool(torch.float32), torch.tensor([6, 4])
    with torch.inference_mode():
        inside, out = random_pool(torch.float32), torch.empty_like(t["v"])
        again = inside.clone()
        serve("kda", t, inside, rows, out=out)
    assert torch.equal(serve("kda", t, again, rows), out)
    assert torch.equal(serve("kda", t, pool, rows), out) and torch.equal(pool, inside) and torch.equal(pool, again)


# ---- what is refused ----


def arguments(**change):
    """Right arguments: two sequences of 2 tokens, with 3 slots each."""
    t = {"q": torch.ones(2, 2, H, K), "k": torch.ones(2, 2, H, K), "v": torch.ones(2, 2, HV, V),
         "g": -torch.ones(2, 2, HV), "beta": torch.ones(2, 2, HV), "initial_state": torch.ones(9, HV, K, V),
         "ssm_state_indices": torch.tensor([[0, 1, 2], [3, 4, 5]]), "num_accepted_tokens": torch.tensor([1, 3]),
         "out": torch.ones(2, 2, HV, V)}
    return {**t, **change}


def test_right_arguments_change_the_pool():
    """Without this the tests below could pass for another reason than the one argument that they change."""
    given = arguments()
    ht.fused_recurrent_gated_delta_rule(**given)
    changed = (given["initial_state"] != 1).flatten(1).any(1)
    assert changed.nonzero().flatten().tolist() == [0, 1, 3, 4] and (given["out"] != 1).all()


ROWS = "ssm_state_indices: expected "
ACCEPT = "num_accepted_tokens: expected "
STATES = "initial_state: expected "


@pytest.mark.parametrize("change, message", [
    ({"num_accepted_tokens": torch.tensor([0, 1])}, rf"{ACCEPT}1 to 3, got 0 at \[0\]"),
    ({"num_accepted_tokens": torch.tensor([1, 4])}, rf"{ACCEPT}1 to 3, got 4 at \[1\]"),
    ({"num_accepted_tokens": torch.tensor([1, -1])}, rf"{ACCEPT}1 to 3, got -1 at \[1\]"),
    ({"num_accepted_tokens": torch.tensor([1.0, 1.0])}, f"{ACCEPT}dtype i32 or i64, got f32"),
    ({"num_accepted_tokens": torch.tensor([1])}, f"{ACCEPT}sequences 2 as in q, got 1"),
    ({"num_accepted_tokens": torch.tensor([[1, 1]])}, f"{ACCEPT}1 dimension"),
    ({"num_accepted_tokens": torch.tensor(1)}, f"{ACCEPT}1 to 4 dimensions, got 0"),
    ({"ssm_state_indices": torch.tensor([0, 3])}, f"{ACCEPT}none, it needs indices"),
    ({"ssm_state_indices": torch.tensor([[0, 1, 2], [3, 9, 5]])},
     rf"{ROWS}-1 or a row below 9 of initial_state, got 9 at \[1, 1\]"),
    ({"ssm_state_indices": torch.tensor([[0, 1, 2], [-2, 4, 5]])}, f"{ROWS}-1 or a row below 9 of initial_state, got"),
    ({"ssm_state_indices": torch.tensor([[0, 1, 2], [3, 1, 5]])},
     rf"{ROWS}different rows, got 1 at \[0, 1\] and \[1, 1\]"),
    ({"ssm_state_indices": torch.tensor([[0, 0, 2], [3, 4, 5]])}, f"{ROWS}different rows, got 0"),
    ({"ssm_state_indices": torch.tensor([[0, 1, 2], [3, 4, 1]])}, f"{ROWS}different rows, got 1, from which sequence"),
    ({"ssm_state_indices": torch.tensor([[0, 1, 2], [3, -1, 5]])}, rf"{ROWS}a row as at \[1, 0\], got -1"),
    ({"ssm_state_indices": torch.tensor([[0, 1, 2], [3, 4, -1]])}, f"{ROWS}a row to start from, got -1"),
    ({"ssm_state_indices": torch.tensor([[0], [3]])}, f"{ROWS}an index for each of the 2 tokens of sequence 0, got 1"),
    ({"ssm_state_indices": torch.tensor([[0, 1, 2]])}, f"{ROWS}sequences 2 as in q, got 1"),
    ({"ssm_state_indices": torch.zeros(2, 3, 1, dtype=torch.long)}, f"{ROWS}1 dimension"),
    ({"ssm_state_indices": torch.zeros(2, 3)}, f"{ROWS}dtype i32 or i64, got f32"),
    ({"initial_state": None}, f"{STATES}the pool of states"),
    ({"initial_state": torch.zeros(9, 2, K, V)}, f"{STATES}value_heads 4 as in v, got 2"),
    ({"initial_state": torch.zeros(9, HV, V, K)}, f"{STATES}key_dim 16 as in q, got 24"),
    ({"initial_state": torch.zeros(HV, K, V)}, f"{STATES}4 dimensions"),
    ({"initial_state": torch.zeros(9, HV, K, V, dtype=torch.double)}, f"{STATES}dtype f32, bf16 or f16"),
    ({"initial_state": torch.zeros(9, HV, K, V, dtype=torch.long)}, f"{STATES}a floating-point dtype, got i64"),
    ({"initial_state": torch.zeros(1, HV, K, V).expand(9, HV, K, V)}, f"{STATES}elements that do not overlap"),
    ({"out": torch.zeros(2, 2, HV, V, dtype=torch.double)}, "out: expected dtype f32 as in q, got f64"),
    ({"out": torch.zeros(2, 2, HV, K)}, "out: expected value_dim 24 as in v, got 16"),
    ({"out": torch.zeros(2, 1, HV, V)}, "out: expected tokens 2 as in q, got 1"),
    ({"inplace_final_state": False}, "inplace_final_state: expected True with ssm_state_indices, got False"),
])
def test_wrong_arguments_change_nothing(change, message):
    given = arguments(**change)
    before = {name: given[name].clone() for name in ("initial_state", "out") if given[name] is not None}
    with pytest.raises(ValueError, match=f"^{message}"):
        ht.fused_recurrent_gated_delta_rule(**given)
    assert all(torch.equal(given[name], x) for name, x in before.items())


def test_memory_of_its_own():
    given = arguments()
    for name, other in (("out", "v"), ("initial_state", "v"), ("out", "initial_state")):
        shared = torch.zeros(9 * HV * K * V)
        views = {n: shared[: given[n].numel()].view(given[n].shape) for n in (name, other)}
        with pytest.raises(ValueError, match=f"^({name}|{other}): .* overlaps ({name}|{other})"):
            ht.fused_recurrent_gated_delta_rule(**arguments(**views))


@pytest.mark.parametrize("name", ["out", "num_accepted_tokens"])
def test_what_only_a_pool_takes(name):
    given = arguments(ssm_state_indices=None, **{n: None for n in ("out", "num_accepted_tokens") if n != name})
    for in_place in (None, False):
        with pytest.raises(ValueError, match=f"^{name}: expected together with ssm_state_indices"):
            ht.fused_recurrent_gated_delta_rule(**given, inplace_final_state=in_place)
