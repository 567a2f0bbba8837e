"""The operators on NumPy arrays: forward, backward and step.

    import numpy as np, headrace.numpy as hn
    o, final_state = hn.forward("kda", q, k, v, g=g, beta=beta, final_state=True)
    grads = hn.backward("kda", q, k, v, g=g, beta=beta, d_o=d_o)      # grads["d_q"], grads["d_g"], ...
    o = hn.step("kda", q, k, v, g=g, beta=beta, pool=states)          # states change in place

Shapes: q, k, p [B, T, H, K]; v, o [B, T, HV, V]; g [B, T, HV] or [B, T, HV, K]; gv [B, T, HV, V]; g_gamma, A_log [HV];
dt_bias [HV] or [HV, K]; beta [B, T, HV]; states [N, HV, K, V]. Types: float64, float32, float16, and bfloat16 of
ml_dtypes. Arrays of any strides >= 0 are read where they are. Options are those of headrace::Options: scale, reverse,
qk_l2norm, gate_form ("log_decay", "softplus", "bounded"), lower_bound, beta_form ("value", "sigmoid", "two_sigmoid"),
allow_positive_gates, chunk, num_steps, threads; A_log may be left out of a bounded gate and is 0. Errors are ValueError
or TypeError naming the argument. Formulas: docs/math.md of the project, recurrences in its section 2, gradients in 3.
"""

from __future__ import annotations

from typing import Any, Dict, Optional, Sequence, Tuple

import ml_dtypes
import numpy as np

from headrace import _core
from headrace._arguments import (DIFFERENTIABLE, INPUTS, OPERATORS, OPTIONS, count_sequences, document,  # noqa: F401
                                 options_named)

_BF16 = np.dtype(ml_dtypes.bfloat16)


def _view(array):
    """What the binding reads: NumPy has no name for bfloat16, so its bits travel with the name beside them."""
    return (array.view(np.uint16), "bf16") if isinstance(array, np.ndarray) and array.dtype == _BF16 else array


def _check_arrays(values, required=()):
    for name, value in values.items():
        if not isinstance(value, np.ndarray) and (value is not None or name in required):
            raise TypeError(f"{name}: expected a numpy array, got {type(value).__name__}")


def _split(q, k, v, arguments):
    """(inputs in the order of the binding, options) of a call, the latter taken out of `arguments`."""
    options = {name: arguments.pop(name) for name in OPTIONS if name in arguments}
    unknown = set(arguments) - set(INPUTS)
    if unknown:
        raise TypeError(f"{sorted(unknown)[0]}: expected one of {', '.join(INPUTS)}, or an option")
    values = {"q": q, "k": k, "v": v, **arguments}
    _check_arrays(values, ("q", "k", "v"))
    for name in ("q", "k", "v"):
        if values[name].ndim != 4:
            raise ValueError(f"{name}: expected 4 dimensions, got shape {list(values[name].shape)}")
    if options.get("gate_form") == "bounded" and values.get("A_log") is None:
        values["A_log"] = np.zeros(v.shape[2], np.float32)
    return [values.get(name) for name in INPUTS], options_named(**options)


def _state_type(q):
    return np.float64 if q.dtype == np.float64 else np.float32


def _run(direction, op, inputs, first, second, options):
    _core.run(direction, op, [_view(x) for x in inputs], [_view(x) for x in first], [_view(x) for x in second], options)


def forward(op: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, *, final_state: bool = False,
            **arguments: Any) -> Tuple[np.ndarray, Optional[np.ndarray]]:
    """(o, final state or None) of operator `op`, one of OPERATORS."""
    inputs, options = _split(q, k, v, arguments)
    N = count_sequences(q.shape[0], arguments.get("cu_seqlens"))
    o = np.empty(v.shape, q.dtype)
    state = None
    if final_state:
        state = np.empty((N, v.shape[2], q.shape[3], v.shape[3]), _state_type(q))
    _run("forward", op, inputs, [o, state], [], options)
    return o, state


def backward(op: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, *, d_o: Optional[np.ndarray] = None,
             d_final_state: Optional[np.ndarray] = None, wanted: Optional[Sequence[str]] = None,
             **arguments: Any) -> Dict[str, np.ndarray]:
    """The gradients of sum(o d_o) + sum(final_state d_final_state) by name: "d_q", "d_k", ...

    wanted: the names of the inputs to differentiate by; default all that are given.
    """
    inputs, options = _split(q, k, v, arguments)
    _check_arrays({"d_o": d_o, "d_final_state": d_final_state})
    given = {"q": q, "k": k, "v": v, **arguments}
    names = [name for name in DIFFERENTIABLE if given.get(name) is not None] if wanted is None else list(wanted)
    for name in names:
        if given.get(name) is None or name not in DIFFERENTIABLE:
            raise ValueError(f"wanted: expected names of inputs that are given, got '{name}'")
    gradients = {name: np.empty(given[name].shape, given[name].dtype) for name in names}
    _run("backward", op, inputs, [d_o, d_final_state], [gradients.get(name) for name in DIFFERENTIABLE], options)
    return {f"d_{name}": gradient for name, gradient in gradients.items()}


def step(op: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, *, pool: np.ndarray,
         indices: Optional[np.ndarray] = None, num_accepted_tokens: Optional[np.ndarray] = None,
         **arguments: Any) -> np.ndarray:
    """o; the states in `pool` [rows, HV, K, V] change in place.

    indices [N] names the row of each sequence, or [N, S] the row that takes the state after each token; -1 is padding.
    num_accepted_tokens [N]: with 2-D indices, sequence n starts from row indices[n, num_accepted_tokens[n] - 1].
    """
    inputs, options = _split(q, k, v, arguments)
    _check_arrays({"pool": pool, "indices": indices, "num_accepted_tokens": num_accepted_tokens}, ("pool",))
    if not pool.flags.writeable:
        raise ValueError("pool: expected a writable numpy array, got one that is read-only")
    o = np.empty(v.shape, q.dtype)
    _run("step", op, inputs, [o, None], [pool, indices, num_accepted_tokens], options)
    return o


document((forward, backward, step), __doc__)
