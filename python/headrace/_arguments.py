"""What every front shares: the order of tensors at the binding, and options from the arguments that users know."""

from __future__ import annotations

import inspect
from typing import Callable, Iterable

from headrace import _core

INPUTS = ("q", "k", "v", "p", "g", "gv", "g_gamma", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")
DIFFERENTIABLE = INPUTS[:-1]

OPERATORS = ("linear_attention", "retention", "simple_gla", "gla", "delta_rule", "gated_delta_rule", "comba", "kda")


def gate_form(use_gate_in_kernel: bool, lower_bound: float | None) -> str:
    """The form in which g is given: a log decay, or a pre-activation of one of two kinds (docs/math.md, 2)."""
    if not use_gate_in_kernel:
        return "log_decay"
    if lower_bound is None:
        return "softplus"
    if not -5 <= lower_bound < 0:
        raise ValueError(f"lower_bound: expected a value in [-5, 0), got {lower_bound}")
    return "bounded"


def beta_form(use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool) -> str:
    """The form in which beta is given: itself, or a logit."""
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval: expected together with use_beta_sigmoid_in_kernel, got it alone")
    if not use_beta_sigmoid_in_kernel:
        return "value"
    return "two_sigmoid" if allow_neg_eigval else "sigmoid"


def options(scale: float | None, reverse: bool, qk_l2norm: bool, gate: str, lower_bound: float, beta: str,
            chunk: int) -> _core.Options:
    return _core.Options(scale=scale, reverse=reverse, qk_l2norm=qk_l2norm, gate_form=gate, lower_bound=lower_bound,
                         beta_form=beta, chunk=chunk)


def document(functions: Iterable[Callable], module: str | None) -> None:
    """Adds to the functions' docstrings what that of their module says, from "Shapes:" on, about all of them."""
    if module is None:
        return  # python -OO
    common = module[module.index("Shapes:") :]
    for function in functions:
        function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\n{common}"
