"""bind: an operator's call on tensors that stay where they are, for loops that decode with buffers of their own."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from headrace import _core
from headrace._binding import BoundCall, arguments_by_name, record
from headrace.torch import _functions
from headrace.torch._library import refuse_tangents, route
from headrace.torch._pool import renamed


class _BoundCall(BoundCall):
    """It tells autograd that its results change: saved for another backward, they are not what they were."""

    __slots__ = ("_name", "_given", "_written")

    def __init__(self, name: str, given: Sequence[Tensor], call: tuple, result: Any) -> None:
        super().__init__(call, result)
        self._name, self._given = name, given
        self._written: List[Tensor] = [x for x in result if x is not None and not x.is_inference()]

    def __call__(self) -> Any:
        _refuse_derivatives(self._name, self._given)  # a copy_ into a tensor makes it part of a graph
        try:
            _core.run(*self._call)
        except ValueError as error:
            raise (renamed(error) if self._call[0] == "step" else error) from None
        if self._written:
            torch._C._increment_version(self._written)
        return self.result


def _refuse_derivatives(name: str, tensors: Sequence[Tensor]) -> None:
    if torch.is_grad_enabled() and any([x.requires_grad for x in tensors]):
        raise ValueError(f"{name}: expected no gradients of a bound call (use torch.no_grad), got tensors that require "
                         "them")
    if forward_ad._current_level >= 0:
        refuse_tangents(name, tensors)


def _address(x: Any) -> Optional[int]:
    return x.data_ptr() if isinstance(x, Tensor) and x.numel() > 0 else None


def bind(function: Callable, *arguments: Any, **options: Any) -> BoundCall:
    """The call of a chunk_* or fused_* function with these arguments, kept to be made again; it is not made yet.

    call = bind(fused_recurrent_kda, q, k, v, g, beta, initial_state=pool, ssm_state_indices=rows); then call() computes
    from what the tensors hold by then and returns what the function would, always in the same tensors. Without looking
    at arguments, without new results and without the dispatcher it takes a fraction of the time beside the library's
    own. There are no gradients. Every tensor must be one that is used where it lies: a ValueError names one that would
    be copied (of another type than q, say).
    """
    name = getattr(function, "__name__", "")
    if not name.startswith(("chunk_", "fused_")) or getattr(_functions, name, None) is not function:
        raise TypeError(f"function: expected a chunk_* or fused_* function of headrace.torch, got {function!r}")
    given = arguments_by_name(function, arguments, options)
    tensors = tuple(x for x in given.values() if isinstance(x, Tensor))
    _refuse_derivatives(name, tensors)
    with torch.no_grad():
        if route(tensors, 0) is not False:
            raise ValueError(f"{name}: expected a call on plain dense tensors on one device, outside of tracing, modes "
                             "and transforms, to bind")
        return _BoundCall(name, tensors, *record(function, arguments, options, _address))
