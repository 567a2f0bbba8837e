"""Arguments: those of flash-linear-attention at their places, and what every operator takes beyond them, by values."""

import ast
import importlib.util
import inspect
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import relative_error
from recurrence import recurrence
from test_torch import compare

import headrace.jax as hj
import headrace.numpy as hn
import headrace.torch as ht
from headrace.torch.nn import FusedRMSNormGated, ShortConvolution

NAMES = [name for name in ht.__all__ if name.startswith(("chunk_", "fused_"))]

# Positional parameters of flash-linear-attention that are not at their place here, and why.
ELSEWHERE = {
    ("chunk_kda", "use_graph"): "by keyword: A_log, dt_bias, chunk_size follow cp_context in the interface asked for",
    ("chunk_kda", "max_num_seqs"): "by keyword, for the same reason",
}
REFUSED = {"head_first"}  # read by flash-linear-attention to raise an error


def definitions():
    """What fla.ops and fla.modules define by name, classes by their __init__; importing the package needs a GPU.

    Methods of classes stand there as "Class.method".
    """
    package = Path(importlib.util.find_spec("fla").submodule_search_locations[0])
    found = {}
    for path in sorted([*package.glob("ops/*/*.py"), *package.glob("modules/*/*.py")]):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                found.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.ClassDef):
                makers = (part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__")
                found.setdefault(node.name, []).extend(makers)
                for part in node.body:
                    if isinstance(part, ast.FunctionDef):
                        found.setdefault(f"{node.name}.{part.name}", []).append(part)
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in found:
                found[node.targets[0].id] = found[node.value.id]
    return found


DEFINITIONS = definitions()


def theirs(name):
    (node,) = DEFINITIONS[name]
    return node


def positional(node):
    """(name, default) of every positional parameter; ... where there is no default."""
    assert not node.args.posonlyargs and not node.args.kwonlyargs
    names, defaults = [a.arg for a in node.args.args], [ast.literal_eval(d) for d in node.args.defaults]
    return list(zip(names, [...] * (len(names) - len(defaults)) + defaults))


def read_from_keywords(node):
    """What the body takes out of **kwargs: kwargs.pop("x"), kwargs.get("x"), "x" in kwargs."""
    names = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and ast.unparse(part.func) in ("kwargs.pop", "kwargs.get"):
            names.add(part.args[0].value)
        elif isinstance(part, ast.Compare) and ast.unparse(part.comparators[0]) == "kwargs":
            names.add(part.left.value)
    return names - REFUSED


@pytest.mark.parametrize("name", NAMES)
def test_parameters_stand_where_those_of_fla_stand(name):
    parameters = inspect.signature(getattr(ht, name)).parameters.values()
    places = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    mine = [(p.name, ... if p.default is p.empty else p.default) for p in places]
    expected = [pair for pair in positional(theirs(name)) if (name, pair[0]) not in ELSEWHERE]
    assert mine[: len(expected)] == expected
    assert {place for place, _ in mine[len(expected) :]} <= read_from_keywords(theirs(name))  # by keyword for them
    assert all(p.default is not p.empty for p in parameters if p not in places)


@pytest.mark.parametrize("name, mine", [("rms_norm_gated", ht.rms_norm_gated), ("ShortConvolution", ShortConvolution),
                                        ("FusedRMSNormGated", FusedRMSNormGated)])
def test_parameters_around_the_operators_stand_where_those_of_fla_stand(name, mine):
    parameters = inspect.signature(mine).parameters
    expected = [pair for pair in positional(theirs(name)) if pair[0] != "self"]
    assert list(parameters)[: len(expected)] == [place for place, _ in expected]
    assert all(parameters[place].default == default for place, default in expected if default is not ...)


@pytest.mark.parametrize("mine", [ShortConvolution, FusedRMSNormGated])
def test_methods_of_modules_are_those_of_fla(mine):
    """Each public one is there, its parameters by name and place; an option that is not is refused by its name."""
    name = "ShortConvolution" if mine is ShortConvolution else "FusedRMSNormGated"
    methods = [key.split(".")[1] for key in DEFINITIONS if key.startswith(f"{name}.")]
    assert "forward" in methods
    for method in (method for method in methods if not method.startswith("_")):
        found, (node,) = inspect.getattr_static(mine, method), DEFINITIONS[f"{name}.{method}"]
        if isinstance(found, property):
            continue
        parameters = inspect.signature(found).parameters
        expected = positional(node)
        assert list(parameters)[: len(expected)] == [place for place, _ in expected], method
        assert all(parameters[place].default == default for place, default in expected if default is not ...), method
        assert all(p.kind is not p.VAR_KEYWORD for p in parameters.values()), method


@pytest.mark.parametrize("name", NAMES)
def test_keywords_of_fla_are_taken(name):
    node = theirs(name)
    assert {place for place, _ in positional(node)} | read_from_keywords(node) <= \
        set(inspect.signature(getattr(ht, name)).parameters)


def test_the_source_of_fla_is_what_is_read():
    assert len(NAMES) == 19
    assert positional(theirs("fused_recurrent_delta_rule"))[7] == ("use_qk_l2norm_in_kernel", False)
    assert read_from_keywords(theirs("chunk_kda")) == {"A_log", "dt_bias", "chunk_size", "transpose_state_layout"}
    assert all(place in dict(positional(theirs(name))) for name, place in ELSEWHERE)


@pytest.mark.parametrize("name", NAMES)
def test_every_operator_takes_the_options_of_the_guide(name):
    taken = set(inspect.signature(getattr(ht, name)).parameters)
    rule = name.endswith("delta_rule") and "gated" not in name
    options = {"state_v_first"} | ({"chunk_size"} if name.startswith(("chunk_", "fused_chunk_")) else set())
    if not name.endswith(("retention", "lightning_attn")) and not rule:
        options |= {"g_gamma", "use_gate_in_kernel", "A_log", "dt_bias", "lower_bound"}
    assert options <= taken


# ---- values of what is served beyond flash-linear-attention ----

@pytest.mark.parametrize("recurrent", [False, True], ids=["chunk", "recurrent"])
@pytest.mark.parametrize("gate", ["log_decay", "softplus", "bounded"])
@pytest.mark.parametrize("op", ["simple_gla", "gla", "gated_delta_rule", "comba", "kda"])
def test_head_gates_beside_each_form_of_g(problem, op, gate, recurrent):
    tensors = problem(op, B=1, T=21, HV=4, state=True)
    tensors["g_gamma"] = -torch.rand(4, dtype=torch.float64)
    options = {"recurrent": recurrent}
    if gate != "log_decay":
        tensors["g"] = torch.randn_like(tensors["g"])
        tensors["A_log"] = torch.randn(4, dtype=torch.float64)
        tensors["dt_bias"] = torch.randn(4 * 16 if op in ("gla", "kda") else 4, dtype=torch.float64)
        options |= {"use_gate_in_kernel": True, "lower_bound": -4.0 if gate == "bounded" else None}
    compare(op, tensors, torch.float64, options, {"gate": gate, "lower_bound": -4.0})


def shared_arguments(name, t):
    """The tensors of `t` that the function takes, and what else it needs."""
    layers = {"layer_idx": 3, "num_layers": 20} if "lightning" in name else {}
    taken = inspect.signature(getattr(ht, name)).parameters
    return {n: x for n, x in t.items() if n in taken} | layers


@pytest.mark.parametrize("name", ["fused_chunk_simple_gla", "chunk_retention", "fused_recurrent_retention",
                                  "chunk_lightning_attn", "fused_recurrent_lightning_attn"])
def test_state_v_first_and_chunk_size_of_head_gates(problem, name):
    t = problem("simple_gla", HV=4, state=True)
    function = getattr(ht, name)
    options = shared_arguments(name, t)
    turned = options["initial_state"] = t["initial_state"].mT.contiguous().requires_grad_()
    if "chunk_size" in inspect.signature(function).parameters:
        with pytest.raises(ValueError, match="chunk"):
            function(**options, state_v_first=True, chunk_size=48)
        options["chunk_size"] = 16
    o, state = function(**options, state_v_first=True, output_final_state=True)
    heads = torch.arange(4, dtype=torch.float64)
    gates = {"g": t["g"], "g_gamma": t["g_gamma"]}
    if name != "fused_chunk_simple_gla":
        gates = {"g_gamma": torch.log1p(-(2.0 ** (-5 - heads))) if "retention" in name else -8 / 4 * 17 / 20 * heads}
    initial = t["initial_state"].requires_grad_()
    expected, expected_state = recurrence("simple_gla", t["q"], t["k"], t["v"], **gates, initial_state=initial)
    (o.sum() + state.sum()).backward()
    (expected.sum() + expected_state.sum()).backward()
    for actual, oracle in ((o, expected), (state.mT, expected_state), (turned.grad.mT, initial.grad)):
        assert relative_error(actual, oracle) < 1e-11


@pytest.mark.parametrize("lower_bound", [None, -4.0])
def test_gate_inside_of_the_fused_chunk_form(problem, lower_bound):
    t = problem("simple_gla", state=True)
    t |= {"g": torch.randn_like(t["g"]), "A_log": torch.randn(2, dtype=torch.float64), "dt_bias": torch.ones(2)}
    o, state = ht.fused_chunk_simple_gla(**t, output_final_state=True, use_gate_in_kernel=True, lower_bound=lower_bound)
    t["dt_bias"] = t["dt_bias"].double()
    expected = recurrence("simple_gla", **t, gate="bounded" if lower_bound else "softplus", lower_bound=lower_bound)
    assert relative_error(o, expected[0]) < 1e-11 and relative_error(state, expected[1]) < 1e-11


@pytest.mark.parametrize("name", ["chunk_kda", "fused_recurrent_kda"])
def test_a_bounded_gate_needs_no_rate(problem, name):
    t = problem("kda", state=True)
    t |= {"g": torch.randn_like(t["g"]), "dt_bias": torch.randn(2 * 16, dtype=torch.float64)}
    o, _ = getattr(ht, name)(**t, use_gate_in_kernel=True, lower_bound=-4.0)
    expected, state = recurrence("kda", **t, A_log=torch.zeros(2), gate="bounded", lower_bound=-4.0)
    assert relative_error(o, expected) < 1e-11
    single = {n: x.float().numpy() for n, x in t.items()}
    o, _ = getattr(hj, name)(**single, use_gate_in_kernel=True, lower_bound=-4.0)
    assert relative_error(torch.from_numpy(np.array(o)), expected) < 3e-6
    states = single.pop("initial_state")
    o, states = hj.step("kda", **single, states=states, gate_form="bounded", lower_bound=-4.0)
    assert relative_error(torch.from_numpy(np.array(o)), expected) < 3e-6
    assert relative_error(torch.from_numpy(np.array(states)), state) < 3e-6


def test_a_bounded_gate_of_numpy_needs_no_rate(problem):
    t = problem("kda", state=True)
    arrays = {n: x.numpy() for n, x in t.items()} | {"gate_form": "bounded", "lower_bound": -4.0}
    given = {**arrays, "A_log": np.zeros(2)}
    assert np.array_equal(hn.forward("kda", **arrays)[0], hn.forward("kda", **given)[0])
    d_o = np.ones_like(arrays["v"])
    mine, others = hn.backward("kda", **arrays, d_o=d_o), hn.backward("kda", **given, d_o=d_o)
    assert set(others) - set(mine) == {"d_A_log"} and all(np.array_equal(x, others[n]) for n, x in mine.items())
    states = [arrays.pop("initial_state"), given.pop("initial_state").copy()]
    outputs = [hn.step("kda", **x, pool=pool) for x, pool in zip((arrays, given), states)]
    assert np.array_equal(*outputs) and np.array_equal(*states)


def test_places_that_once_meant_something_else(problem):
    t = problem("delta_rule", state=True)
    q, k, v, beta, state = t["q"], t["k"] * 3, t["v"], t["beta"], t["initial_state"]
    expected, _ = recurrence("delta_rule", q, k, v, beta=beta, initial_state=state, scale=0.5, qk_l2norm=True)
    assert relative_error(ht.fused_recurrent_delta_rule(q, k, v, beta, 0.5, state, True, True)[0], expected) < 1e-11
    o, final = ht.fused_recurrent_retention(q, k, v, 0.5, state.mT, True, True, True)
    expected, expected_final = ht.fused_recurrent_retention(q, k, v, 0.5, state, True, True)
    assert torch.equal(o, expected) and torch.equal(final.mT, expected_final)


@pytest.mark.parametrize("name", [name for name in NAMES if "transpose_state_layout" in
                                  inspect.signature(getattr(ht, name)).parameters])
def test_the_old_name_of_state_v_first(problem, name):
    t = problem("gla" if name.endswith("_gla") and "simple" not in name else "simple_gla", state=True)
    t |= {"gk": t["g"], "beta": t["g"].exp()}
    if name.endswith("kda"):
        t["g"] = t["g"].unsqueeze(-1).expand(*t["g"].shape, 16)
    if name.endswith(("gdn", "rule")):
        t.pop("gk")
    options = {**shared_arguments(name, t), "output_final_state": True}
    options["initial_state"] = t["initial_state"].mT
    function = getattr(ht, name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = function(**options, state_v_first=True)
    with pytest.warns(DeprecationWarning, match="transpose_state_layout") as seen:
        actual = function(**options, transpose_state_layout=True)
    assert seen[0].filename == __file__
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])
    with pytest.raises(ValueError, match="transpose_state_layout"):
        function(**options, transpose_state_layout=True, state_v_first=True)


def test_hints_change_nothing(problem):
    offsets = [0, 12, 37]
    for op, hints in (("delta_rule", {"cu_seqlens_cpu": torch.tensor(offsets)}),
                      ("kda", {"use_graph": True, "max_num_seqs": 2})):
        t = problem(op, B=1, cu_seqlens=offsets)
        function = getattr(ht, f"chunk_{op}")
        assert torch.equal(function(**t, **hints)[0], function(**t)[0])


@pytest.mark.parametrize("name", NAMES)
def test_jax_takes_what_torch_takes(problem, name):
    """Every argument of the function in headrace.jax at once, beside the same call of headrace.torch."""
    t = {n: x.float() for n, x in problem("comba", HV=4, state=True).items()}
    channels = name.endswith(("kda", "_gla")) and "simple" not in name
    raw = torch.randn(*t["v"].shape[:3], 16) if channels else torch.randn(t["v"].shape[:3])
    t |= {"gk" if "recurrent_gla" in name else "g": raw, "gv": -torch.rand_like(t["v"]), "g_gamma": -torch.rand(4),
          "A_log": torch.randn(4), "dt_bias": torch.randn(4 * 16 if channels else 4),
          "initial_state": t["initial_state"].mT}
    options = {"state_v_first": True, "scale": 0.5, "use_gate_in_kernel": True, "lower_bound": -4.0, "chunk_size": 16,
               "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True,
               "reverse": True, "output_final_state": True}
    given = shared_arguments(name, t | options)
    given = {n: x for n, x in given.items() if n in inspect.signature(getattr(hj, name)).parameters}
    expected = getattr(ht, name)(**given)
    given = {n: x.numpy() if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    for actual, tensor in zip(getattr(hj, name)(**given), expected):
        assert relative_error(torch.from_numpy(np.array(actual)), tensor) < 3e-6
