"""DTensors cut by heads and by sequences: values and gradients are those of plain tensors, without communication.

The cases run on four ranks, a mesh of 2 x 2.
"""

from functools import cache

import pytest
import torch
from conftest import OPERATORS, make_problem, relative_error
from ranks import group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import headrace.torch as ht
from headrace.torch.distributed import build_cp_context

R, P, S0, S1, S2 = Replicate(), Partial(), Shard(0), Shard(1), Shard(2)
FUNCTIONS = {"linear_attention": ht.chunk_simple_gla, "retention": ht.chunk_simple_gla,
             "simple_gla": ht.fused_recurrent_simple_gla, "gla": ht.chunk_gla,
             "delta_rule": ht.chunk_delta_rule, "gated_delta_rule": ht.chunk_gated_delta_rule, "comba": ht.chunk_comba,
             "kda": ht.chunk_kda}
# A placement of q on one dimension of the mesh: those of tensors by token, of parameters of heads and their gradients,
# of states.
ALONG = {R: (R, R, R, R), S0: (S0, R, P, S0), S2: (S2, S0, S0, S1)}
PARAMETERS = ("g_gamma", "A_log", "dt_bias")


def raises(error, text, function, *arguments, **options):
    with pytest.raises(error) as caught:
        function(*arguments, **options)
    assert text in str(caught.value), caught.value


def compare(function, tensors, placements, gradients, results, **options):
    """Plain tensors on each rank, then DTensors: placements, and gradients' placements, by name; those of results."""
    plain = {name: x.clone().requires_grad_(x.is_floating_point()) for name, x in tensors.items()}
    expected = [y for y in function(**plain, **options) if y is not None]
    adjoints = [torch.randn(y.shape, dtype=y.dtype) for y in expected]
    torch.autograd.backward(expected, adjoints)
    cut = {name: distribute_tensor(x, mesh(), placements[name]).requires_grad_(x.is_floating_point())
           for name, x in tensors.items()}
    cut_adjoints = [distribute_tensor(x, mesh(), p) for x, p in zip(adjoints, results)]
    with CommDebugMode() as communication:
        outputs = [y for y in function(**cut, **options) if y is not None]
        torch.autograd.backward(outputs, cut_adjoints)
    assert communication.get_total_counts() == 0, communication.get_comm_counts()
    assert len(outputs) == len(expected)
    for y, want, where in zip(outputs, expected, results):
        assert y.placements == tuple(where) and y.dtype == want.dtype and y.shape == want.shape
        assert relative_error(y.full_tensor(), want) < 1e-12
    for name, x in plain.items():
        if x.requires_grad:
            assert cut[name].grad.placements == tuple(gradients[name]), (name, cut[name].grad.placements)
            assert relative_error(cut[name].grad.full_tensor(), x.grad) < 1e-12, name


@cache
def mesh():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def placed(names, q):
    """(placements, those of gradients) by name, and those of the results, where q has these."""
    by_token, parameters, sums, states = ([ALONG[p][i] for p in q] for i in range(4))
    where = {name: parameters if name in PARAMETERS else states if name == "initial_state" else
             [R, R] if name == "cu_seqlens" else by_token for name in names}
    return where, where | {name: sums for name in PARAMETERS}, (by_token, states)


def operators(ranks):
    for op in OPERATORS:
        for q, HV in (([S0, S2], 8), ([S2, S2], 4), ([S2, R], 4), ([R, S0], 2))[: 4 if op == "simple_gla" else 2]:
            tensors = make_problem(op, B=4, T=9, H=HV if HV == 2 else 4, HV=HV, K=8, V=8, state=True)
            compare(FUNCTIONS[op], tensors, *placed(tensors, q), output_final_state=True)


def gates_in_the_kernel(ranks):
    """A_log and dt_bias in every shape; ragged sequences; constant decays; sums of two gates; beta of channels."""
    draw = torch.Generator().manual_seed(1)
    for dt_bias, A_log, q in (((4, 8), (4,), [S0, S2]), ((32,), (1, 1, 4, 1), [S0, S2]), ((4,), (4,), [S2, R])):
        tensors = make_problem("kda", B=4, T=9, H=4, K=8, V=8)
        tensors |= {"A_log": torch.randn(A_log, generator=draw, dtype=torch.float64),
                    "dt_bias": torch.randn(dt_bias, generator=draw, dtype=torch.float64)}
        where, gradients, results = placed(tensors, q)
        for w in (where, gradients):
            w["A_log"] = [Shard(len(A_log) // 2) if p is S0 and len(A_log) > 1 else p for p in w["A_log"]]
        compare(ht.chunk_kda, tensors, where, gradients, results, use_gate_in_kernel=True)
    tensors = make_problem("gated_delta_rule", B=1, T=11, H=2, HV=4, K=8, V=8, cu_seqlens=[0, 3, 3, 11], state=True)
    compare(ht.chunk_gated_delta_rule, tensors, *placed(tensors, [R, S2]), output_final_state=True)
    tensors["cu_seqlens"] = torch.tensor([0, 3, 3, 11])
    expected = ht.chunk_gated_delta_rule(**tensors)[0]
    where = placed(tensors, [R, S2])[0]
    cut = {name: x if name == "cu_seqlens" else distribute_tensor(x, mesh(), where[name])
           for name, x in tensors.items()}
    assert relative_error(ht.chunk_gated_delta_rule(**cut)[0].full_tensor(), expected) < 1e-12  # plain offsets
    tensors = make_problem("gated_delta_rule", B=4, T=9, H=4, K=8, V=8)
    tensors |= {"gk": -torch.rand(4, 9, 4, 8, dtype=torch.float64), "gv": -torch.rand(4, 9, 4, 8, dtype=torch.float64)}
    tensors["beta"] = torch.rand(4, 9, 4, 8, dtype=torch.float64)
    compare(ht.fused_recurrent_gated_delta_rule, tensors, *placed(tensors, [S0, S2]), scale=0.5)
    q, k, v = (make_problem("linear_attention", B=4, T=9, H=4, K=8)[name] for name in "qkv")
    for decayed in (ht.chunk_retention, lambda **t: ht.chunk_lightning_attn(**t, layer_idx=1, num_layers=3)):
        compare(decayed, {"q": q, "k": k, "v": v}, *placed("qkv", [S0, S2]))


def replicas_are_cut(ranks):
    """Parameters and states that are replicas beside heads or sequences that are cut; their gradients are whole."""
    tensors = make_problem("retention", B=4, T=9, H=4, K=8, V=8, state=True)
    expected = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    ht.chunk_simple_gla(**expected)[0].sum().backward()
    cut = {name: distribute_tensor(x, mesh(), [S0, S2] if name in "qkv" else [R, R]).requires_grad_()
           for name, x in tensors.items()}
    o, _ = ht.chunk_simple_gla(**cut)
    o.sum().backward()
    for name in tensors:
        assert relative_error(cut[name].grad.full_tensor(), expected[name].grad) < 1e-12, name


def layer_functions(ranks):
    draw = torch.Generator().manual_seed(2)

    def normal(*shape):
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    tensors = {"x": normal(4, 7, 8), "weight": normal(8, 4), "bias": normal(8), "initial_state": normal(4, 8, 4)}
    for q in ([S0, S2], [S2, R], [S2, S2]):
        by_token, parameters, sums, states = ([ALONG[p][i] for p in q] for i in range(4))
        where = {"x": by_token, "weight": parameters, "bias": parameters, "initial_state": states}
        compare(ht.short_convolution, tensors, where, where | {"weight": sums, "bias": sums}, (by_token, states),
                activation="silu", output_final_state=True)
    tensors = {"x": normal(4, 6, 2, 8), "g": normal(4, 6, 2, 8), "weight": normal(8)}
    for q in ([S0, S2], [S1, S2], [R, S2]):
        sums = [R if p is R else P for p in q]
        compare(lambda **t: (ht.rms_norm_gated(**t),), tensors, {"x": q, "g": q, "weight": [R, R]},
                {"x": q, "g": q, "weight": sums}, (q,))
    raises(ValueError, "x: expected placement Replicate() or Shard(dim=0) on each dimension of the mesh, got "
           "Shard(dim=1)", ht.rms_norm_gated, distribute_tensor(normal(4, 8), mesh(), [S0, S1]))


@torch.no_grad()
def decoding(ranks):
    """States in place: the DTensor that is given holds the new states."""
    steps = make_problem("gated_delta_rule", B=4, T=1, H=4, K=8, V=8)
    pool, rows = torch.randn(6, 4, 8, 8, dtype=torch.float64), torch.tensor([5, 0, 2, 3])
    for q, given in (([R, S2], {"ssm_state_indices": rows}), ([S0, S2], {"inplace_final_state": True})):
        states = pool if "ssm_state_indices" in given else pool[:4].clone()
        where = placed(steps, q)[0]
        cut_states = distribute_tensor(states, mesh(), [ALONG[p][3] for p in q])
        cut = {name: distribute_tensor(x, mesh(), where[name]) for name, x in steps.items()}
        out = torch.empty_like(cut["v"])
        o, after = ht.fused_recurrent_gated_delta_rule(**cut, initial_state=cut_states, **given, out=out)
        expected = states.clone()
        expected_o, _ = ht.fused_recurrent_gated_delta_rule(**steps, initial_state=expected, **given)
        assert o is out and after is cut_states and relative_error(o.full_tensor(), expected_o) < 1e-12
        assert relative_error(cut_states.full_tensor(), expected) < 1e-12
    x, weight, state = torch.randn(4, 1, 8), torch.randn(8, 3), torch.randn(4, 8, 3)
    cut_state, cut_weight = distribute_tensor(state, mesh(), [S0, S1]), distribute_tensor(weight, mesh(), [R, S0])
    y = ht.short_convolution_step(distribute_tensor(x, mesh(), [S0, S2]), cut_state, cut_weight)
    assert y.placements == (S0, S2)
    assert torch.equal(y.full_tensor(), ht.short_convolution_step(x, state, weight))
    assert torch.equal(cut_state.full_tensor(), state)
    raises(ValueError, "state: expected placement Shard(dim=1) on dimension 1 of the mesh, as that of x asks for",
           ht.short_convolution_step, distribute_tensor(x, mesh(), [R, S2]),
           distribute_tensor(state, mesh(), [R, R]), cut_weight)
    raises(ValueError, "q: expected placement Replicate() or Shard(dim=2) on each", ht.fused_recurrent_gated_delta_rule,
           **cut, initial_state=cut_states, ssm_state_indices=rows)


def errors(ranks):
    tensors = make_problem("simple_gla", B=4, T=8, H=4, K=8, V=8)

    def run(q, given=tensors, **other):
        """A call where q has the placements `q`, the rest what belongs to them or is in `other`; None: plain."""
        where = placed(given, q)[0] | other
        return ht.chunk_simple_gla(**{name: x if where[name] is None else distribute_tensor(x, mesh(), where[name])
                                      for name, x in given.items()})

    for dim, hint in ((1, ": tokens of a sequence lie on several ranks with a context"), (3, "")):
        cut = {name: distribute_tensor(x, mesh(), [R, Shard(dim)]) for name, x in tensors.items() if name in "qkv"}
        raises(ValueError, "q: expected placement Replicate() or Shard(dim=2) or Shard(dim=0) on each dimension of the "
               f"mesh, got Shard(dim={dim}){hint}", ht.chunk_simple_gla, **cut)
    x, weight = (distribute_tensor(torch.randn(shape), mesh(), [R, S1]) for shape in ((4, 8, 8), (8, 4)))
    raises(ValueError, "Shard(dim=1): tokens of a sequence", ht.short_convolution, x, weight)
    raises(ValueError, "v: expected placement Shard(dim=2) on dimension 1 of the mesh, as that of q asks for, got "
           "Shard(dim=0)", run, [R, S2], v=[R, S0])
    raises(ValueError, "v: expected placement Replicate() on dimension 1 of the mesh", run, [R, R], v=[R, S2])
    for name, example in (("q", "k"), ("v", "q"), ("g", "q"), ("g_gamma", "q")):
        mixed = {other: x if other == name else distribute_tensor(x, mesh(), [R, R]) for other, x in tensors.items()}
        raises(TypeError, f"{name}: expected a DTensor as {example}, got a Tensor", ht.chunk_simple_gla, **mixed)
    flat = tensors | {"g": tensors["g"].flatten()}
    raises(ValueError, "g: expected at least 3 dimensions, got shape [128]", run, [R, S2], flat, g=[R, R])
    offsets = distribute_tensor(torch.tensor([0, 8]), mesh(), [R, R])
    raises(TypeError, "q: expected a DTensor as cu_seqlens, got a Tensor", ht.chunk_simple_gla,
           **{name: x[:1] for name, x in tensors.items() if name != "g_gamma"}, cu_seqlens=offsets)
    odd = make_problem("simple_gla", B=3, T=8, H=3, HV=6, K=8, V=8)
    raises(ValueError, "q: expected dimension 2, of size 3, to be a multiple of the 2 ranks", run, [R, S2], odd)
    raises(ValueError, "q: expected dimension 0, of size 3, to be a multiple of the 4 ranks", run, [S0, S0], odd)
    q, k, v = (distribute_tensor(tensors[name], mesh(), [R, S2]) for name in "qkv")
    other = distribute_tensor(tensors["k"], init_device_mesh("cpu", (4,)), [S2])
    raises(ValueError, "k: expected the mesh of q", ht.chunk_simple_gla, q, other, v)
    raises(TypeError, "v: expected a torch.Tensor, got NoneType", ht.chunk_retention, q, k, None)
    raises(ValueError, "got Partial(sum)", ht.chunk_simple_gla, DTensor.from_local(q.to_local(), mesh(), [R, P]), k, v)
    raises(ValueError, "to bind", ht.bind, ht.chunk_simple_gla, q, k, v)


def tokens_with_a_context(ranks):
    """Shard(1) on the ranks of a context, heads on the others; a convolution; contexts that say something else."""
    cp, offsets = mesh()["dp"], torch.tensor([0, 50, 200, 256])
    context = build_cp_context(offsets, cp, 4)
    tensors = make_problem("gated_delta_rule", B=1, T=256, H=2, HV=4, K=8, V=8) | {"g_gamma": -torch.rand(4) / 4}
    tensors["g_gamma"] = tensors["g_gamma"].double()
    where = {name: [S1, S2] for name in tensors} | {"g_gamma": [R, S0]}
    cut = {name: distribute_tensor(x, mesh(), where[name]).requires_grad_() for name, x in tensors.items()}
    plain = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    o, _ = ht.chunk_gated_delta_rule(**cut, cp_context=context)
    expected, _ = ht.chunk_gated_delta_rule(**plain, cu_seqlens=offsets)
    adjoint = torch.randn(expected.shape, dtype=torch.float64)
    o.backward(distribute_tensor(adjoint, mesh(), [S1, S2]))
    expected.backward(adjoint)
    assert o.placements == (S1, S2) and relative_error(o.full_tensor(), expected) < 1e-11
    for name, x in cut.items():
        assert x.grad.placements == ((P, S0) if name == "g_gamma" else (S1, S2)), name
        assert relative_error(x.grad.full_tensor(), plain[name].grad) < 1e-11, name
    x, weight = torch.randn(1, 256, 8, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    y, _ = ht.short_convolution(distribute_tensor(x, mesh(), [S1, S2]), distribute_tensor(weight, mesh(), [R, S0]),
                                cp_context=context)
    assert relative_error(y.full_tensor(), ht.short_convolution(x, weight, cu_seqlens=offsets)[0]) < 1e-12
    uneven = build_cp_context(offsets, cp, 4, token_ranges=[[(0, 100)], [(100, 256)]])
    raises(ValueError, "cp_context: expected the token_ranges of a DTensor, [[(0, 128)], [(128, 256)]], got [[(0, 100)",
           ht.chunk_gated_delta_rule, **cut, cp_context=uneven)
    other = build_cp_context(offsets, mesh()["tp"], 4)
    raises(ValueError, "cp_context: expected one of the ranks over which DTensors cut their tokens, got one of",
           ht.chunk_gated_delta_rule, **cut, cp_context=other)
    raises(ValueError, "initial_state, output_final_state: expected None and False with DTensors",
           ht.chunk_gated_delta_rule, **cut, cp_context=context, output_final_state=True)


@pytest.mark.parametrize("case", [operators, gates_in_the_kernel, replicas_are_cut, layer_functions, decoding, errors,
                                  tokens_with_a_context], ids=lambda case: case.__name__)
def test_dtensors(case):
    group(4).run(case)
