"""The operators on NumPy arrays: forward, backward and step.

    import numpy as np, headrace.numpy as hn
    o, final_state = hn.forward("kda", q, k, v, g=g, beta=beta, final_state=True)
    grads = hn.backward("kda", q, k, v, g=g, beta=beta, d_o=d_o)      # grads["d_q"], grads["d_g"], ...
    o = hn.step("kda", q, k, v, g=g, beta=beta, pool=states)          # states change in place
    again = hn.bind(hn.step, "kda", q, k, v, g=g, beta=beta, pool=states)
    o = again()                                                       # the same, from what the arrays hold by then

Shapes: q, k, p [B, T, H, K]; v, o [B, T, HV, V]; g [B, T, HV] or [B, T, HV, K]; gv [B, T, HV, V]; g_gamma, A_log [HV];
dt_bias [HV] or [HV, K], as A_log also in other shapes of as many values; beta [B, T, HV]; states [N, HV, K, V]. Types:
float64, float32, float16, and bfloat16 of ml_dtypes. Where q, k, v and p have several, the call computes in the least
that holds them all; o has the type of q, a gradient that of its input. Arrays of any strides >= 0 are read where they
are, those of the other byte order in a copy; masked arrays are refused, and so are arrays on a device, which headrace.torch
and headrace.jax take. Options are those of headrace::Options: scale,
reverse, qk_l2norm, gate_form ("log_decay", "softplus", "bounded"), lower_bound, beta_form ("value", "sigmoid",
"two_sigmoid"), allow_positive_gates, chunk, num_steps, threads; A_log may be left out of a bounded gate and is 0.
Errors are ValueError or TypeError naming the argument. Formulas: docs/math.md of the project, recurrences in its
section 2, gradients in 3.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, Optional, Sequence, Tuple

import ml_dtypes
import numpy as np

from headrace import _core
from headrace._arguments import (DIFFERENTIABLE, INPUTS, OPERATORS, OPTIONS, check_gate_parameter,  # noqa: F401
                                 count_sequences, document, flag, options_named, text)
from headrace._binding import BoundCall, record

_FLOATS = (np.dtype(np.float64), np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
_TYPES = frozenset((*_FLOATS, np.dtype(np.int32), np.dtype(np.int64)))  # in this machine's byte order


_INPUTS, _A_LOG, _CU_SEQLENS = frozenset(INPUTS), INPUTS.index("A_log"), INPUTS.index("cu_seqlens")
_NO_OPTIONS = options_named()


def _native(name: str, array: np.ndarray) -> np.ndarray:
    """`array` in the byte order of this machine."""
    if type(array) is np.ndarray and array.dtype.isnative:
        return array
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name}: expected an array without a mask, got a masked array (its filled() has none)")
    array = np.asarray(array)  # of no derived class, of which some never lose a dimension
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


_HOSTS = (1, 3, 11)  # of DLPack: memory of the host, and of those, memory that GPUs were told of


def _on_device(value: Any) -> bool:
    """Whether an array of some framework says that it lies elsewhere than in the host's memory."""
    device = getattr(value, "__dlpack_device__", None)
    if device is None:
        return hasattr(value, "__cuda_array_interface__")
    try:
        return device()[0] not in _HOSTS
    except (TypeError, ValueError, RuntimeError, BufferError):  # one that is traced, sparse, ...
        return False


def _checked_array(name, value):
    if not isinstance(value, np.ndarray):
        where = ""
        if _on_device(value):
            where = " on a device, which headrace.torch and headrace.jax take"
        raise TypeError(f"{name}: expected a numpy array, got {type(value).__name__}{where}")
    array = _native(name, value)
    if array.ndim > 4 and name not in ("A_log", "dt_bias"):
        raise ValueError(f"{name}: expected 1 to 4 dimensions, got {array.ndim}")
    if array.dtype not in _TYPES:
        raise TypeError(f"{name}: expected float64, float32, bfloat16, float16, int32 or int64, got {array.dtype}")
    return array


def _checked_arrays(values, required=()):
    """Those of `values` that are not None, as arrays that the binding reads."""
    return {name: _checked_array(name, value) for name, value in values.items()
            if value is not None or name in required}


def _call_type(dtypes):
    """The least floating type that holds all `dtypes`; float32 that of bfloat16 and float16."""
    if dtypes.count(dtypes[0]) == len(dtypes):
        return dtypes[0]
    return next((dtype for dtype in _FLOATS[:2] if dtype in dtypes), _FLOATS[1])


def _options(arguments):
    """The options among `arguments`, taken out; what is left are inputs."""
    options = {name: arguments.pop(name) for name in OPTIONS if name in arguments}
    unknown = set(arguments) - _INPUTS
    if unknown:
        raise TypeError(f"{min(unknown)}: expected one of {', '.join(INPUTS)}, or an option")
    return options


def _made_usual(inputs):
    """The inputs of a call, by INPUTS, as the library takes them: q, k, v, p of one type, a gate's parameters flat."""
    arrays = _checked_arrays(dict(zip(INPUTS, inputs)), ("q", "k", "v"))
    for name in ("q", "k", "v"):
        if arrays[name].ndim != 4:
            raise ValueError(f"{name}: expected 4 dimensions, got shape {list(arrays[name].shape)}")
    alike = [name for name in ("q", "k", "v", "p") if name in arrays]
    for name in alike:
        if arrays[name].dtype not in _FLOATS:
            raise TypeError(f"{name}: expected float64, float32, bfloat16 or float16, got {arrays[name].dtype}")
    dtype = _call_type([arrays[name].dtype for name in alike])
    arrays.update({name: arrays[name].astype(dtype, copy=False) for name in alike})
    HV, channels = arrays["v"].shape[2], arrays["q"].shape[3] if "g" in arrays and arrays["g"].ndim == 4 else 0
    for name in {"A_log", "dt_bias"} & arrays.keys():
        check_gate_parameter(name, arrays[name].shape, HV, channels if name == "dt_bias" else 0)
        arrays[name] = arrays[name].reshape(-1)
    return [*map(arrays.get, INPUTS)]


def _split(q, k, v, arguments):
    """(arrays in the order of INPUTS, options) of a call."""
    options = {} if arguments.keys() <= _INPUTS else _options(arguments)
    inputs = [q, k, v, *map(arguments.get, INPUTS[3:])]
    if not _core.usual(inputs):
        inputs = _made_usual(inputs)
    if not options:
        return inputs, _NO_OPTIONS
    if options.get("gate_form") == "bounded" and inputs[_A_LOG] is None:
        inputs[_A_LOG] = np.zeros(inputs[2].shape[2], np.float32)
    return inputs, options_named(**options)


def _state_type(dtype):
    return np.float64 if dtype == np.float64 else np.float32


def _dtype_like(given):
    """The type of results that take after the array given: its own, in this machine's byte order."""
    return given.dtype.newbyteorder("=")


def _as(given, result):
    return result if result.dtype is given.dtype else result.astype(_dtype_like(given), copy=False)


def _checked_names(wanted, given):
    names = [wanted] if isinstance(wanted, str) or not isinstance(wanted, Iterable) else list(wanted)
    for name in names:
        if name not in given:
            raise ValueError(f"wanted: expected names of inputs that are given, got {name!r}")
    return names


def forward(op: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, *, final_state: bool = False,
            **arguments: Any) -> Tuple[np.ndarray, Optional[np.ndarray]]:
    """(o, final state or None) of operator `op`, one of OPERATORS."""
    inputs, options = _split(q, k, v, arguments)
    N = count_sequences(q.shape[0], inputs[_CU_SEQLENS])
    dtype = inputs[0].dtype
    o = np.empty(v.shape, dtype)
    state = None
    if flag("final_state", final_state):
        state = np.empty((N, v.shape[2], q.shape[3], v.shape[3]), _state_type(dtype))
    _core.run("forward", text("op", op), inputs, [o, state], [], options)
    return _as(q, o), state


def backward(op: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, *, d_o: Optional[np.ndarray] = None,
             d_final_state: Optional[np.ndarray] = None, wanted: Optional[Sequence[str]] = None,
             **arguments: Any) -> Dict[str, np.ndarray]:
    """The gradients of sum(o d_o) + sum(final_state d_final_state) by name: "d_q", "d_k", ...

    wanted: the names of the inputs to differentiate by; default all that are given.
    """
    given = {"q": q, "k": k, "v": v, **arguments}
    inputs, options = _split(q, k, v, arguments)
    arrays = dict(zip(INPUTS, inputs))
    outside = _checked_arrays({"d_o": d_o, "d_final_state": d_final_state})
    if "d_o" in outside:
        if outside["d_o"].dtype != _dtype_like(q):
            raise ValueError(f"d_o: expected dtype {_dtype_like(q)} as in q, got {outside['d_o'].dtype}")
        outside["d_o"] = outside["d_o"].astype(arrays["q"].dtype, copy=False)
    names = [name for name in DIFFERENTIABLE if given.get(name) is not None]
    if wanted is not None:
        names = _checked_names(wanted, names)
    gradients = {name: np.empty(arrays[name].shape, arrays[name].dtype) for name in names}
    _core.run("backward", text("op", op), inputs, [outside.get("d_o"), outside.get("d_final_state")],
              [gradients.get(name) for name in DIFFERENTIABLE], options)
    return {f"d_{name}": _as(given[name], x.reshape(given[name].shape)) for name, x in gradients.items()}


def step(op: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, *, pool: np.ndarray,
         indices: Optional[np.ndarray] = None, num_accepted_tokens: Optional[np.ndarray] = None,
         **arguments: Any) -> np.ndarray:
    """o; the states in `pool` [rows, HV, K, V] change in place.

    indices [N] names the row of each sequence, or [N, S] the row that takes the state after each token; -1 is padding.
    num_accepted_tokens [N]: with 2-D indices, sequence n starts from row indices[n, num_accepted_tokens[n] - 1].
    """
    inputs, options = _split(q, k, v, arguments)
    states = _checked_arrays({"pool": pool, "indices": indices, "num_accepted_tokens": num_accepted_tokens}, ("pool",))
    if not pool.flags.writeable:
        raise ValueError("pool: expected a writable numpy array, got one that is read-only")
    if not pool.dtype.isnative:
        raise ValueError(f"pool: expected the byte order of this machine, got {pool.dtype.str}")
    o = np.empty(v.shape, inputs[0].dtype)
    _core.run("step", text("op", op), inputs, [o, None],
              [states.get(name) for name in ("pool", "indices", "num_accepted_tokens")], options)
    return _as(q, o)


def _address(x: Any) -> Optional[int]:
    return x.__array_interface__["data"][0] if isinstance(x, np.ndarray) and x.size > 0 else None


def bind(function: Callable, *arguments: Any, **options: Any) -> BoundCall:
    """The call of forward, backward or step with these arguments, kept to be made again; it is not made yet.

    call = bind(step, "kda", q, k, v, g=g, beta=beta, pool=states); then call() computes from what the arrays hold by
    then and returns what the function would, always in the same memory. Without looking at arguments and without new
    results it takes a fraction of the time beside the library's own. Every array must be one that is used where it
    lies: a ValueError names one that would be copied.
    """
    if function not in (forward, backward, step):
        raise TypeError(f"function: expected forward, backward or step of headrace.numpy, got {function!r}")
    return BoundCall(*record(function, arguments, options, _address))


document((forward, backward, step), __doc__)
