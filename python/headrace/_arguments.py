"""What every front shares: the order of tensors at the binding, and options, checked, from what users pass."""

from __future__ import annotations

import functools
import inspect
import math
import operator
import sys
from typing import Any, Callable, Dict, Iterable, Sequence, TypeVar, cast

from headrace import _core

INPUTS = ("q", "k", "v", "p", "g", "gv", "g_gamma", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")
DIFFERENTIABLE = INPUTS[:-1]

OPERATORS = ("linear_attention", "retention", "simple_gla", "gla", "delta_rule", "gated_delta_rule", "comba", "kda")


_LARGEST = sys.float_info.max


def number(name: str, value: Any) -> float:
    """`value`, or what it holds where it is a scalar of some framework: a finite number."""
    found = value if isinstance(value, (int, float)) and not isinstance(value, bool) else _scalar(name, value)
    if not -_LARGEST <= found <= _LARGEST:
        raise ValueError(f"{name}: expected a finite number, got {value}")
    return found


def _scalar(name: str, value: Any) -> float:
    try:
        if hasattr(value, "__float__") and value is not True and value is not False and _kind(value)[:4] not in (
                "bool", "comp"):
            return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # an array of several numbers, one that is traced, ...
        pass
    raise TypeError(f"{name}: expected a number, got {value!r}")


def _kind(value: Any) -> str:
    """The name of the type of an array or a scalar of some framework."""
    return str(getattr(value, "dtype", "")).removeprefix("torch.")


def flag(name: str, value: Any) -> bool:
    """`value`, True or False, or what it holds where it is a boolean scalar of some framework."""
    if value is True or value is False:
        return value
    try:
        if _kind(value) == "bool" and len(value.shape) == 0:
            return bool(value)
    except (TypeError, RuntimeError):  # one that is traced, or has no data
        pass
    raise TypeError(f"{name}: expected True or False, got {value!r}")


def integer(name: str, value: Any) -> int:
    """`value`, or what it holds where it is an integer scalar of some framework: an int of 32 bits."""
    try:
        found = operator.index(value)
    except (TypeError, RuntimeError):
        found = None
    if found is None or value is True or value is False:
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    if not -(2**31) <= found < 2**31:
        raise ValueError(f"{name}: expected an integer of 32 bits, got {value}")
    return found


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected a name, got {value!r}")
    return value


# What the library calls the activations of the short convolution, and those of the norm's gate, by their names.
ACTIVATIONS: Dict[Any, str] = {None: "none", "silu": "silu", "swish": "silu"}
GATES: Dict[Any, str] = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}


def named(name: str, value: Any, names: Dict[Any, str]) -> str:
    if value not in tuple(names):  # not in the dictionary itself, which refuses a list in its own words
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, names))}, got {value!r}")
    return names[value]


def chunk_hint(chunk_size: Any, name: str = "chunk_size") -> int:
    """chunk_size as the library takes it: 0, its own choice, for None alone."""
    if chunk_size is None:
        return 0
    chunk = integer(name, chunk_size)
    if chunk not in (16, 32, 64, 128, 256):
        raise ValueError(f"{name}: expected a power of two from 16 to 256, got {chunk}")
    return chunk


def depth(layer_idx: Any, num_layers: Any) -> float:
    """The share of a model's layers that stand before this one."""
    layers, layer = number("num_layers", num_layers), number("layer_idx", layer_idx)
    if layers <= 0:
        raise ValueError(f"num_layers: expected a positive number, got {num_layers}")
    if not 0 <= layer < layers:
        raise ValueError(f"layer_idx: expected 0 to num_layers - 1 = {layers - 1}, got {layer_idx}")
    return layer / layers


def check_gate_parameter(name: str, shape: Sequence[int], heads: int, channels: int = 0) -> None:
    """What must hold for a gate's A_log or dt_bias to be read, flat, as one value for each value head.

    With `channels` also as one for each channel of each head, unless `shape` puts something else behind the heads.
    """
    sizes = [size for size in shape if size != 1]
    behind = [1]  # the values behind each dimension
    for size in reversed(sizes):
        behind.append(behind[-1] * size)
    count = behind[-1]
    if count == heads or (channels and count == heads * channels and (len(sizes) == 1 or channels in behind)):
        return
    other = f" or [{heads}, {channels}]" if channels else ""
    raise ValueError(f"{name}: expected the values of shape [{heads}]{other}, got shape {list(shape)}")


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
    if lower_bound is not None:
        bound(lower_bound)
    if not flag("use_gate_in_kernel", use_gate_in_kernel):
        return "log_decay"
    return "softplus" if lower_bound is None else "bounded"


def bound(lower_bound: Any) -> float:
    """lower_bound, which is checked where the form of the gate does not need it, too."""
    if not -5 <= number("lower_bound", lower_bound) < 0:
        raise ValueError(f"lower_bound: expected a value in [-5, 0), got {lower_bound}")
    return number("lower_bound", lower_bound)


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
    """The options of a call, which have been checked."""
    return _core.Options(scale, reverse, qk_l2norm, gate, lower_bound, beta, False, chunk)


# The options of a call at the binding by their names there, and what sees to their values.
OPTIONS: Dict[str, Callable[[str, Any], Any]] = {
    "scale": lambda name, value: None if value is None else number(name, value),
    "lower_bound": lambda name, value: bound(value),
    **dict.fromkeys(("reverse", "qk_l2norm", "allow_positive_gates"), flag),
    **dict.fromkeys(("gate_form", "beta_form"), text),
    **dict.fromkeys(("chunk", "num_steps", "threads"), integer),
}


def options_named(**given: Any) -> _core.Options:
    """The options `given`, of the names in OPTIONS; a TypeError or a ValueError names the one that is wrong."""
    return _core.Options(**{name: OPTIONS[name](name, value) for name, value in given.items()})


_KINDS: Dict[str, Callable[[str, Any], Any]] = {"bool": flag, "float": number, "int": integer}

Function = TypeVar("Function", bound=Callable[..., Any])


def checked(function: Function) -> Function:
    """`function`, which refuses arguments that are no bool, float or int where it is annotated with one of these.

    For constructors: looking through a signature takes longer than a short call of an operator.
    """
    signature = inspect.signature(function)
    kinds = {}
    for name, parameter in signature.parameters.items():
        annotation = str(parameter.annotation)  # a text in modules that have annotations from __future__
        kind = annotation.removeprefix("Optional[").removesuffix("]")
        if kind in _KINDS:
            kinds[name] = _KINDS[kind], kind != annotation

    @functools.wraps(function)
    def wrapper(*args: Any, **options: Any) -> Any:
        for name, value in signature.bind(*args, **options).arguments.items():
            if name in kinds:
                check, is_optional = kinds[name]
                if value is not None or not is_optional:
                    check(name, value)
        return function(*args, **options)

    return cast(Function, wrapper)


def document(functions: Iterable[Callable], module: str | None) -> None:
    """Adds to the functions' docstrings what that of their module says, from "Shapes:" on, about all of them."""
    if module is None:
        return  # python -OO
    common = module[module.index("Shapes:") :]
    for function in functions:
        function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\n{common}"
