"""Calls that are kept to be made again on the same memory: what headrace.numpy.bind and headrace.torch.bind share."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, Callable, Dict, Iterator, Tuple

from headrace import _core


class BoundCall:
    """A call of an operator on arrays that stay where they are.

    Calling it computes anew, from what the arrays hold then, into the arrays of `result`, and returns them. It checks
    what an ordinary call checks. Its arrays live as long as it does; two threads may not make one such call at a time.
    """

    __slots__ = ("_call", "result")

    def __init__(self, call: Tuple[Any, ...], result: Any) -> None:
        self._call = call
        self.result = result

    def __call__(self) -> Any:
        _core.run(*self._call)
        return self.result

    def __repr__(self) -> str:
        direction, op = self._call[:2]
        return f"<bound {direction} of {op}>"


def arguments_by_name(function: Callable, arguments: tuple, options: Dict[str, Any]) -> Dict[str, Any]:
    """What a call of `function` would be given, by the names of its parameters; a TypeError where it would refuse."""
    signature = inspect.signature(function)
    given = dict(signature.bind(*arguments, **options).arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= given.pop(parameter.name, {})
    return given


def record(function: Callable, arguments: tuple, options: Dict[str, Any],
           address_of: Callable[[Any], int | None]) -> Tuple[tuple, Any]:
    """The one call at the binding that `function` makes, not run, and what `function` returns.

    address_of: of an array that has elements; None of anything else. Every array given must be read or written where it
    lies, and every array returned be written there: a copy would stay as it is when the array changes.
    """
    result, calls = _core.recorded(partial(function, *arguments, **options))
    (call,) = calls
    _, _, *lists, _ = call
    used = {address_of(x) for arrays in lists for x in arrays}
    for name, x in arguments_by_name(function, arguments, options).items():
        if address_of(x) not in used | {None}:
            raise ValueError(f"{name}: expected an array that a call uses where it lies, got one that it copies, "
                             "combines with others or does not use")
    if not {address_of(x) for x in _arrays(result)} <= used | {None}:
        raise ValueError(f"{function.__name__}: expected results that a call leaves where the library writes them, got "
                         "one of another type, which is a copy")
    return call, result


def _arrays(result: Any) -> Iterator[Any]:
    """The arrays among the results of an operator's function: one, some with None, or some by name."""
    yield from result if isinstance(result, tuple) else result.values() if isinstance(result, dict) else (result,)
