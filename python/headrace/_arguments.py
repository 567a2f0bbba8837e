"""What every front shares: the order of tensors at the binding, and options, checked, from what users pass."""

from __future__ import annotations

import inspect
import operator
from typing import Any, Callable, Iterable

from headrace import _core

INPUTS = ("q", "k", "v", "p", "g", "gv", "g_gamma", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")
DIFFERENTIABLE = INPUTS[:-1]

OPERATORS = ("linear_attention", "retention", "simple_gla", "gla", "delta_rule", "gated_delta_rule", "comba", "kda")


# The options of a call at the binding, and what each takes.
OPTIONS = {"scale": "a number", "reverse": "True or False", "qk_l2norm": "True or False", "gate_form": "a name",
           "lower_bound": "a number", "beta_form": "a name", "allow_positive_gates": "True or False",
           "chunk": "an integer", "num_steps": "an integer", "threads": "an integer"}


def number(name: str, value: Any) -> float:
    """`value`, or what it holds where it is a scalar of some framework."""
    if isinstance(value, (int, float)):
        return value
    try:
        if hasattr(value, "__float__"):
            return float(value)
    except (TypeError, ValueError, RuntimeError):  # an array of several numbers, in one framework or another
        pass
    raise TypeError(f"{name}: expected a number, got {value!r}")


def flag(name: str, value: Any) -> bool:
    """Whether `value` is true."""
    try:
        return bool(value)
    except (TypeError, ValueError, RuntimeError):  # as in number()
        raise TypeError(f"{name}: expected True or False, got {value!r}") from None


def chunk_hint(chunk_size: Any) -> int:
    """chunk_size as the library takes it, which sees to the powers of two: 0, its own choice, for None alone."""
    if chunk_size is None:
        return 0
    try:
        chunk = operator.index(chunk_size)
    except TypeError:
        raise TypeError(f"chunk_size: expected an integer, got {chunk_size!r}") from None
    if not 0 < chunk < 2**31:
        raise ValueError(f"chunk_size: expected a power of two from 16 to 256, got {chunk}")
    return chunk


def depth(layer_idx: Any, num_layers: Any) -> float:
    """The share of a model's layers that stand before this one."""
    layers = number("num_layers", num_layers)
    if layers <= 0:
        raise ValueError(f"num_layers: expected a positive number, got {num_layers}")
    return number("layer_idx", layer_idx) / layers


def check_sum(gk: Any, g: Any) -> None:
    """What must hold for the log decays of channels gk [B, T, HV, K] and of heads g [B, T, HV] to be added."""
    if gk.shape[:-1] != g.shape:
        raise ValueError(f"g: expected shape {list(gk.shape[:-1])} as in gk, got {list(g.shape)}")


def count_sequences(B: int, cu_seqlens: Any) -> int:
    """N, of which the states have one each: from the shape of cu_seqlens [N + 1], or B."""
    if cu_seqlens is None:
        return B
    shape = cu_seqlens.shape
    if len(shape) != 1 or (isinstance(shape[0], int) and shape[0] < 1):  # no int: a size that torch.compile cannot know
        raise ValueError(f"cu_seqlens: expected 1 dimension [N + 1] of at least 1 entry, got shape {list(shape)}")
    return shape[0] - 1


def gate_form(use_gate_in_kernel: bool, lower_bound: float | None) -> str:
    """The form in which g is given: a log decay, or a pre-activation of one of two kinds (docs/math.md, 2)."""
    if not flag("use_gate_in_kernel", use_gate_in_kernel):
        return "log_decay"
    if lower_bound is None:
        return "softplus"
    if not -5 <= number("lower_bound", lower_bound) < 0:
        raise ValueError(f"lower_bound: expected a value in [-5, 0), got {lower_bound}")
    return "bounded"


def beta_form(use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool) -> str:
    """The form in which beta is given: itself, or a logit."""
    is_logit = flag("use_beta_sigmoid_in_kernel", use_beta_sigmoid_in_kernel)
    is_doubled = flag("allow_neg_eigval", allow_neg_eigval)
    if is_doubled and not is_logit:
        raise ValueError("allow_neg_eigval: expected together with use_beta_sigmoid_in_kernel, got it alone")
    if not is_logit:
        return "value"
    return "two_sigmoid" if is_doubled else "sigmoid"


def options(scale: float | None, reverse: bool, qk_l2norm: bool, gate: str, lower_bound: float, beta: str,
            chunk: int) -> _core.Options:
    return options_named(scale=scale, reverse=reverse, qk_l2norm=qk_l2norm, gate_form=gate, lower_bound=lower_bound,
                         beta_form=beta, chunk=chunk)


def options_named(**given: Any) -> _core.Options:
    """The options `given`, of the names in OPTIONS; a TypeError names the one of the wrong type."""
    try:
        return _core.Options(**given)
    except TypeError:
        for name, value in given.items():
            try:
                _core.Options(**{name: value})
            except TypeError:
                raise TypeError(f"{name}: expected {OPTIONS[name]}, got {value!r}") from None
        raise


def document(functions: Iterable[Callable], module: str | None) -> None:
    """Adds to the functions' docstrings what that of their module says, from "Shapes:" on, about all of them."""
    if module is None:
        return  # python -OO
    common = module[module.index("Shapes:") :]
    for function in functions:
        function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\n{common}"
