"""headrace's C interface as a contender, by ctypes: what a program in C or C++ gets, and about a microsecond of Python.

The structs are those of headrace/headrace.h, field by field.
"""

from __future__ import annotations

import ctypes
from typing import Dict, Optional

import torch
from torch import Tensor

import headrace
from headrace.bench._cases import Case
from headrace.bench._contenders import Contender, Maker, Tensors


class _Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_int32), ("device", ctypes.c_int32),
                ("rank", ctypes.c_int32), ("shape", ctypes.c_int64 * 4), ("strides", ctypes.c_int64 * 4)]


def _tensors(*names: str) -> type:
    return type("Tensors", (ctypes.Structure,), {"_fields_": [(name, _Tensor) for name in names]})


_Inputs = _tensors("q", "k", "v", "p", "g", "gv", "g_gamma", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")
_Outputs = _tensors("o", "final_state")
_StatePool = _tensors("states", "indices", "num_accepted_tokens")


class _Options(ctypes.Structure):
    _fields_ = [("has_scale", ctypes.c_int32), ("scale", ctypes.c_double), ("reverse", ctypes.c_int32),
                ("qk_l2norm", ctypes.c_int32), ("gate_form", ctypes.c_int32), ("lower_bound", ctypes.c_double),
                ("beta_form", ctypes.c_int32), ("allow_positive_gates", ctypes.c_int32), ("chunk", ctypes.c_int32),
                ("num_steps", ctypes.c_int32), ("has_state_dtype", ctypes.c_int32), ("state_dtype", ctypes.c_int32),
                ("threads", ctypes.c_int32), ("force", ctypes.c_char_p), ("piece", ctypes.c_void_p),
                ("stream", ctypes.c_void_p)]


_DTYPES = {torch.float32: 1, torch.bfloat16: 2}
_SOFTPLUS, _SIGMOID = 1, 1


def _view(x: Tensor) -> _Tensor:
    sizes = ctypes.c_int64 * 4
    return _Tensor(x.data_ptr(), _DTYPES[x.dtype], 0, x.dim(), sizes(*x.shape), sizes(*x.stride()))


def opened(path: str) -> Maker:
    """A maker of contenders from the shared library at `path`; OSError or ValueError where it is none of ours."""
    library = ctypes.CDLL(path)
    try:
        library.headrace_version.restype = library.headrace_operator_name.restype = ctypes.c_char_p
        library.headrace_options_default.restype = _Options
        found = library.headrace_version().decode()
    except AttributeError as error:
        raise ValueError(str(error)) from None
    if found != headrace.__version__:
        raise ValueError(f"expected version {headrace.__version__} as that of the package, got {found}")
    operators: Dict[str, int] = {}
    while (name := library.headrace_operator_name(len(operators))) is not None:
        operators[name.decode()] = len(operators)

    def make(case: Case, t: Tensors) -> Optional[Contender]:
        o, states = torch.empty_like(t["v"]), t["state"]
        inputs, outputs, pool, options = _Inputs(), _Outputs(), _StatePool(), library.headrace_options_default()
        for name, x in t.items():
            if name != "state":
                setattr(inputs, name, _view(x))
        outputs.o, options.threads, options.qk_l2norm = _view(o), case.threads, int(case.is_bf16)
        if case.is_raw:
            options.gate_form, options.beta_form = _SOFTPLUS, _SIGMOID
        if case.is_step:
            pool.states, between = _view(states), [ctypes.byref(pool)]
        else:
            if case.is_bf16:
                inputs.initial_state = _view(states)
                states = torch.empty_like(states)
            outputs.final_state, between = _view(states), []
        message = ctypes.create_string_buffer(400)
        function = library.headrace_step if case.is_step else library.headrace_forward
        arguments = (operators[case.operator], ctypes.byref(inputs), ctypes.byref(outputs), *between,
                     ctypes.byref(options), None, message, ctypes.c_size_t(len(message)))

        def call(_memory: object = t) -> None:  # which the views do not hold
            if function(*arguments) != 0:
                raise ValueError(message.value.decode())

        return Contender(call, lambda: (o, states))

    return make
