"""Nonsense in every argument of every function of every front: refused by name, and nothing written."""

import inspect
import typing

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from calls import (FUNCTIONS, HV, POOL, SAME, K, T, V, changed_call, front, identifier, operators, options_by_name,
                   parameters, plain_call)

import headrace.jax as hj
import headrace.numpy as hn
import headrace.torch as ht
import headrace.torch.nn as nn
from headrace._arguments import OPTIONS
from headrace.torch.nn._layer import Layer

NAN, INFINITY = float("nan"), float("inf")
BOOLEANS = ["no", "", "True", 0, 1, 2, 0.0, 1.0, NAN, None, [], [True], np.array([True, False]), torch.tensor([True]),
            np.int64(1), torch.tensor(1), object()]
NUMBERS = ["0.5", "", NAN, INFINITY, -INFINITY, True, np.True_, [0.5], 2j, np.complex64(1), np.float32("nan"),
           np.array([0.5, 0.5]), torch.tensor([0.5, 0.5]), torch.tensor(NAN), torch.tensor(True), object(),
           np.ma.masked]
BOUNDS = [0.0, 0.1, -5.1, -0.0]
INTEGERS = ["16", 16.0, NAN, True, [16], 2**40, -(2**70), object()]
NAMES = [None, 1, b"softplus", "softpluss", ["softplus"]]

# parameter: values that are none of its own
NONSENSE = {
    **dict.fromkeys(("output_final_state", "reverse", "use_qk_l2norm_in_kernel", "use_gate_in_kernel",
                     "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "state_v_first", "safe_gate",
                     "disable_recompute", "return_intermediate_states", "use_graph", "allow_positive_gates",
                     "final_state", "prenorm", "residual_in_fp32", "use_cache", "output_attentions"), BOOLEANS),
    **dict.fromkeys(("transpose_state_layout", "inplace_final_state"), [x for x in BOOLEANS if x is not None]),
    "scale": NUMBERS, "eps": [*NUMBERS, None, -1.0], "lower_bound": NUMBERS + BOUNDS,
    "layer_idx": [*NUMBERS, None, -1, 20, 21], "num_layers": [*NUMBERS, None, 0, -1],
    "chunk_size": [*INTEGERS, 0, -64, 48, 512], "max_num_seqs": INTEGERS,
    "num_steps": [*INTEGERS, None, -1], "threads": [*INTEGERS, None, -1],
    "gate_form": NAMES, "beta_form": NAMES, "op": [None, 1, b"kda", "mamba"],
    "cp_context": [object(), 0, False], "wanted": [5, "p", ["q", "cu_seqlens"], [None]],
}
UNREAD = {"chunk_indices"}  # any value: a hint, computed from the offsets


def nonsense(function, parameter):
    by_name = {"qk_l2norm": "use_qk_l2norm_in_kernel", "chunk": "chunk_size", "gate_form": "gate_form",
               "beta_form": "beta_form"}
    values = NONSENSE[by_name.get(parameter, parameter)]
    if parameter == "chunk" and front(function) == "numpy":
        values = [x for x in values if not (isinstance(x, int) and x == 0 and x is not False)]  # the library's choice
    return values


TENSORS = {"q", "k", "v", "p", "g", "gk", "gv", "g_gamma", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens",
           "cu_seqlens_cpu", "states", "pool", "indices", "ssm_state_indices", "num_accepted_tokens", "out", "d_o",
           "d_final_state"}


def run(function, op, tensors, options):
    """The call, by what the function calls its arguments."""
    if function.__module__.startswith("headrace.torch"):
        return function(**tensors, **options)
    tensors = {n: x.numpy() if torch.is_tensor(x) else x for n, x in tensors.items()}
    if function is hj.attention or function is hj.step or front(function) == "numpy":
        options = options_by_name(options)
        op = options.pop("op", op)
        if function in (hj.step, hn.step):
            tensors[{"jax": "states", "numpy": "pool"}[front(function)]] = tensors.pop("initial_state")
            options.pop("output_final_state", None)
        if function is hn.backward:
            tensors.setdefault("d_o", np.ones_like(tensors["v"]))
        return function(op, **tensors, **options)
    return function(**tensors, **options)


def right(function, op=None):
    call = plain_call(function, op or operators(function)[0])
    call.tensors = {n: x.float() if x.is_floating_point() else x for n, x in call.tensors.items()}
    return call


def cases():
    for function in FUNCTIONS:
        for parameter in parameters(function):
            if parameter not in TENSORS | UNREAD:
                yield pytest.param(function, parameter, id=f"{identifier(function)}-{parameter}")


@pytest.mark.parametrize("function", FUNCTIONS, ids=identifier)
def test_right_calls_are_served(function):
    """Without this the tests below could pass for another reason than the one value that they change."""
    call = right(function)
    run(function, call.op, call.tensors, call.options)
    for flag in (np.True_, torch.tensor(True), np.array(True)):
        for name in parameters(function):
            if SAME.get(name, name) in ("reverse", "use_qk_l2norm_in_kernel"):
                run(function, call.op, call.tensors, {**call.options, name: flag})


def refusals(call, name, values, error=(ValueError, TypeError)):
    """Which of the values are not refused in the name of the parameter."""
    missed = []
    for value in values:
        try:
            with np.errstate(all="ignore"):
                call(value)
        except error as refusal:
            if not str(refusal).startswith(f"{name}: expected "):
                missed.append((value, str(refusal)))
        else:
            missed.append((value, "accepted"))
    return missed


@pytest.mark.filterwarnings("ignore:Warning. converting a masked element to nan", "ignore::DeprecationWarning")
@pytest.mark.parametrize("function, parameter", list(cases()))
def test_options(function, parameter):
    call = right(function)
    before = {n: x.clone() for n, x in call.tensors.items()}
    assert not refusals(lambda value: run(function, call.op, call.tensors, {**call.options, parameter: value}),
                        parameter, nonsense(function, parameter))
    assert all(torch.equal(x, before[n]) for n, x in call.tensors.items())


# ---- tensors ----

WRONG_TENSORS = ["text", 1.0, object(), [[1.0]], b"", {}]


@pytest.mark.parametrize("function", [f for f in FUNCTIONS if front(f) == "torch"], ids=identifier)
def test_tensors_of_torch(function):
    for parameter in sorted(TENSORS & set(parameters(function))):
        call = right(function)
        if parameter in POOL and parameter != "ssm_state_indices":
            call.options["ssm_state_indices"] = torch.tensor([0])
        if parameter == "cu_seqlens_cpu":
            call.tensors["cu_seqlens"] = torch.tensor([0, T])
        x = call.tensors.get(parameter)
        values = [*WRONG_TENSORS, np.zeros(4, np.float32), torch.zeros(3, 3, 3, 3, 3)]
        values += [] if x is None else [x.to(torch.complex64), x.long(), x.bool(), x.to_sparse(), x[..., :0]]
        values += [torch.zeros(HV + 1)] if parameter != "cu_seqlens" else [torch.tensor([0, T + 1])]
        tensors = {n: x for n, x in call.tensors.items() if n != parameter}
        missed = refusals(lambda value: function(**tensors, **call.options, **{parameter: value}), parameter, values)
        # as channel gates, gk goes by the name of g
        assert not [m for m in missed if not (parameter == "gk" and m[1].startswith("g: expected "))], parameter


def arrays_of(call):
    return {n: x.numpy() for n, x in call.tensors.items()}


@pytest.mark.parametrize("function", [f for f in FUNCTIONS if front(f) != "torch"], ids=identifier)
def test_arrays(function):
    """Masked, structured, textual, complex, of objects, of wrong sizes."""
    pooled = {"initial_state"} if function is hn.step else set()  # refused: the states are in the pool
    for parameter in sorted(TENSORS & set(parameters(function)) - pooled):
        call = right(function)
        arrays = arrays_of(call)
        x = {"states": arrays["initial_state"], "pool": arrays["initial_state"], "d_o": arrays["v"],
             "d_final_state": arrays["initial_state"]}.get(parameter, arrays.get(parameter, np.ones(HV, np.float32)))
        if parameter in ("cu_seqlens", "indices", "num_accepted_tokens"):
            x = np.array([0, T]) if parameter == "cu_seqlens" else np.array([0])
        masked = np.ma.masked_array(x, np.zeros(x.shape, bool))
        values = [masked, np.ma.masked_less(x, 0), x.astype(object), x.astype(str), x.astype(complex), x.astype(bool),
                  np.zeros(x.shape, [("a", "f4")]), x.astype("datetime64[s]"), object(), "text", {}]
        values += [np.zeros((2, 2, 2, 2, 2), x.dtype)]
        if front(function) == "numpy":
            values += [1.0, [[1.0]], x.astype(np.longdouble), x.astype(ml_dtypes.float8_e4m3fn)]

        def served(value):
            given = {**call.tensors, parameter: value}
            if parameter in ("states", "pool"):
                given = {**{n: y for n, y in given.items() if n != parameter}, "initial_state": value}
            return run(function, call.op, given, call.options)

        before = {n: y.clone() for n, y in call.tensors.items()}
        missed = refusals(served, parameter, values)
        other = {"indices": "pool.indices: ", "pool": "pool.states: ", "gk": "g: "}.get(parameter, "-")
        assert not [m for m in missed if not m[1].startswith(other)], parameter
        assert all(torch.equal(y, before[n]) for n, y in call.tensors.items())


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("function", [f for f in FUNCTIONS if "A_log" in parameters(f)], ids=identifier)
def test_sizes_of_gate_parameters(function, inside):
    """Checked where the gate is computed outside, too, and A_log and dt_bias are not read."""
    for op in operators(function):
        call = changed_call(function, op, "dt_bias") if inside else right(function, op)
        if inside and "dt_bias" not in call.tensors:
            continue
        call.tensors = {n: x.float() for n, x in call.tensors.items()}
        is_channels = any(call.tensors.get(n) is not None and call.tensors[n].dim() == 4 for n in ("g", "gk"))
        wrong = [(0,), (HV + 1,), (2 * HV,), (1,), (), (HV, 2), (HV, HV), (K, HV) if is_channels else (HV, K)]
        for name in ("A_log", "dt_bias"):
            values = [torch.zeros(size) for size in wrong] + [torch.zeros(HV).long()]
            values += [torch.zeros(HV, K)] if name == "A_log" else [torch.zeros(2, HV // 2, 3), torch.zeros(HV, K + 1)]
            missed = refusals(lambda value: run(function, op, {**call.tensors, name: value}, call.options), name,
                              values)
            assert not missed, (op, name)


# ---- what layers put around the operators ----

X = torch.ones(2, 5, 8)
AROUND = {
    ht.short_convolution: {"x": X, "weight": torch.ones(8, 4), "bias": torch.ones(8), "cu_seqlens": None,
                           "initial_state": torch.ones(2, 8, 4), "output_final_state": True, "activation": "silu",
                           "cp_context": None},
    ht.short_convolution_step: {"x": X[:, 0], "state": torch.ones(3, 8, 4), "weight": torch.ones(8, 4),
                                "bias": torch.ones(8), "activation": None, "indices": torch.tensor([2, 0])},
    ht.rms_norm_gated: {"x": X, "g": X, "weight": torch.ones(8), "bias": None, "activation": "silu", "residual": X,
                        "prenorm": True, "residual_in_fp32": False, "eps": 1e-6},
}


@pytest.mark.filterwarnings("ignore:Warning. converting a masked element to nan")
@pytest.mark.parametrize("function", AROUND, ids=lambda f: f.__name__)
def test_functions_around_the_operators(function):
    given = AROUND[function]
    assert set(parameters(function)) == set(given)
    function(**given)
    before = {n: x.clone() for n, x in given.items() if torch.is_tensor(x)}
    for parameter, x in given.items():
        if parameter == "activation":
            values = [1, "relu", "", [], torch.ones(1)]
        elif parameter == "bias" and x is None:
            values = [0, False, torch.ones(8)]
        elif torch.is_tensor(x) or parameter == "cu_seqlens":
            y = torch.tensor([0, 10]) if x is None else x
            values = [*WRONG_TENSORS, y.to(torch.complex64), y.bool(), y.to_sparse(), np.ones(8)]
            values += [] if parameter in ("x", "bias", "cu_seqlens") else [y[:0], y.flatten()[:1]]
        else:
            values = NONSENSE[parameter]
        missed = refusals(lambda value: function(**{**given, parameter: value}), parameter, values)
        assert not [m for m in missed if not m[1].startswith(("pool.indices: ", "pool.states: "))], parameter
    assert all(torch.equal(given[n], x) for n, x in before.items())


# ---- layers ----

LAYERS = [c for _, c in inspect.getmembers(nn, inspect.isclass)
          if issubclass(c, (Layer, nn.ShortConvolution, nn.RMSNormGated))]
SMALL = {"hidden_size": 64, "num_heads": 4, "head_dim": 16, "num_layers": 3, "layer_idx": 0, "kernel_size": 4}
KINDS = {bool: BOOLEANS, float: NUMBERS, int: INTEGERS}


@pytest.mark.filterwarnings("ignore:Warning. converting a masked element to nan")
@pytest.mark.parametrize("layer", LAYERS, ids=lambda c: c.__name__)
def test_constructors_of_layers(layer):
    hints = typing.get_type_hints(layer.__init__)
    taken = inspect.signature(layer).parameters
    small = {n: x for n, x in SMALL.items() if n in taken}
    layer(**small)
    for parameter in taken:
        hint = hints.get(parameter)
        options = typing.get_args(hint) or (hint,)
        for kind, values in KINDS.items():
            if kind in options:
                values = [x for x in values if x is not None or type(None) not in options]
                assert not refusals(lambda value: layer(**{**small, parameter: value}), parameter, values), parameter


@pytest.mark.parametrize("layer", [c for c in LAYERS if issubclass(c, Layer)], ids=lambda c: c.__name__)
def test_calls_of_layers(layer):
    made = layer(**{n: x for n, x in SMALL.items() if n in inspect.signature(layer).parameters})
    for parameter in ("use_cache", "output_attentions"):
        values = [x for x in BOOLEANS if x is not None]
        cache = nn.Cache()
        assert not refusals(lambda value: made(torch.zeros(1, 3, 64), past_key_values=cache, **{parameter: value}),
                            parameter, values)
        assert len(cache) == 0
    convolution = nn.ShortConvolution(8, 4)
    assert not refusals(lambda value: convolution(X, output_final_state=value), "output_final_state", BOOLEANS)


def test_every_option_of_the_binding_is_seen_to():
    assert set(OPTIONS) <= set(parameters(hn.forward))
    assert all(name in NONSENSE or name in ("qk_l2norm", "chunk") for name in OPTIONS)
