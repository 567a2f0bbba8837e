"""torch.func.vmap of the custom operators: one call with the mapped dimension folded into another, or a loop."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any, Callable, Optional, Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

# A dimension of every argument, or of a result: where what stands there knows nothing of its neighbours (heads,
# channels, rows), and the mapped dimension can be folded in, in front of what is there. None: there is no such one.
Axes = Sequence[Optional[int]]


def _fold(x: Any, dim: Optional[int], axis: Optional[int], size: int) -> Any:
    if not isinstance(x, Tensor) or axis is None:
        return x
    if dim is None:
        axis %= x.dim()
        return x.repeat([size if d == axis else 1 for d in range(x.dim())])
    axis %= x.dim() - 1
    return x.movedim(dim, axis).flatten(axis, axis + 1)


def _unfold(y: Tensor, axis: int, size: int) -> Tensor:
    axis %= y.dim()
    return y.unflatten(axis, (size, -1)).movedim(axis, 0).contiguous()


def _fits(x: Any, dim: Optional[int], axis: Optional[int]) -> bool:
    if not isinstance(x, Tensor):
        return True
    rank = x.dim() - (dim is not None)
    return dim is None if axis is None else -rank <= axis < rank


def folded(name: str, shapes: Callable, axes: Axes, results: Callable) -> Callable:
    """The vmap of headrace::<name>, whose outputs without data are shapes(...).

    axes: those of the first arguments, among them all tensors. results(*arguments): those of the results, in their
    structure, or None. Where a mapped argument or the results have none, one call follows the other.
    """

    def rule(info, in_dims, *arguments):
        operator, size = getattr(torch.ops.headrace, name), info.batch_size
        dims = [dim if isinstance(x, Tensor) else None for x, dim in zip(arguments, in_dims)]
        if size == 0:  # results without elements, which hang at an argument for autograd's sake
            like = next(x for x, dim in zip(arguments, dims) if dim is not None)
            one = shapes(*(x if dim is None else x.sum(dim) for x, dim in zip(arguments, dims)))
            return tree_map(lambda y: like.reshape(0, *y.shape).to(y.dtype), one), 0
        places, out_axes = list(zip_longest(arguments, dims, axes)), results(*arguments)
        if out_axes is not None and all(_fits(*place) for place in places):
            values = operator(*(_fold(*place, size) for place in places))
            return tree_map(lambda y, axis: _unfold(y, axis, size), values, out_axes), 0
        rows = [operator(*(x if dim is None else x.select(dim, i) for x, dim in zip(arguments, dims)))
                for i in range(size)]
        return tree_map(lambda *row: torch.stack(row), *rows), 0

    return rule


def refused(message: str) -> Callable:
    """The vmap of an operator that has none."""

    def rule(info, in_dims, *arguments):
        raise NotImplementedError(message)

    return rule
