"""DTensors as arguments: every rank calls the same function with the heads or the sequences that it holds."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

# Arguments that every rank reads as a whole; they may be plain tensors beside DTensors.
_WHOLE = ("cu_seqlens", "cu_seqlens_cpu", "ssm_state_indices", "num_accepted_tokens", "indices")


class Cut(NamedTuple):
    """What goes with a cut of the first argument along one of its dimensions.

    dims: by name, along which dimension other arguments are cut; those that are not named are needed whole, and their
    gradients are partial sums. results: along which dimension each result is cut.
    """

    dims: Dict[str, int]
    results: Tuple[int, ...]


_BY_TOKEN = ("q", "k", "v", "p", "g", "gv", "beta", "out")


def operator_cuts(A_log: Any, dt_bias: Any, rows_by_index: bool, has_context: bool) -> Dict[int, Cut]:
    """The cuts of an operator's q: by heads, by sequences unless indices name the rows of the states, by tokens."""
    heads = {**dict.fromkeys(_BY_TOKEN, 2), "g_gamma": 0, "initial_state": 1}
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):  # [HV], [HV, K], [HV * K], [1, 1, HV, 1]
        if x is not None:
            heads[name] = next((dim for dim, size in enumerate(x.shape) if size != 1), 0)
    cuts = {2: Cut(heads, (2, 1))}
    if not rows_by_index:
        cuts[0] = Cut({**dict.fromkeys(_BY_TOKEN, 0), "initial_state": 0}, (0, 0))
    if has_context:
        cuts[1] = Cut(dict.fromkeys(_BY_TOKEN, 1), (1, 1))
    return cuts


def channel_cuts(rank: int, rows_by_index: bool, has_context: bool = False) -> Dict[int, Cut]:
    """The cuts of a convolution's x [..., D] of this rank: by channels, by sequences, by tokens."""
    channels = rank - 1
    cuts = {channels: Cut({"weight": 0, "bias": 0, "initial_state": 1, "state": 1}, (channels, 1))}
    if not rows_by_index:
        cuts[0] = Cut({"initial_state": 0, "state": 0}, (0, 0))
    if has_context:
        cuts[1] = Cut({}, (1, 1))
    return cuts


def row_cuts(rank: int) -> Dict[int, Cut]:
    """The cuts of x [..., D] of this rank in a norm over its last dimension: by any other."""
    return {dim: Cut({"g": dim}, (dim,)) for dim in range(rank - 1)}


def among(tensors: Sequence[Any]) -> bool:
    """Whether one of them is a DTensor. Its class is not asked for: importing it takes half a second."""
    return any([type(x).__name__ == "DTensor" for x in tensors])


def replicated_beside(tensors: Sequence[Any], values: Tensor) -> Tensor:
    """`values`, the same on every rank, as a DTensor on the mesh of these."""
    from torch.distributed.tensor import DTensor, Replicate

    x = next(x for x in tensors if among((x,)))
    return DTensor.from_local(values, x.device_mesh, [Replicate()] * x.device_mesh.ndim, run_check=False)


def check_context(x: Any, cp_context: Any, has_states: bool) -> None:
    """What must hold of a context where the tokens of x [B, T, ...] are cut over ranks: it says so in the same way."""
    from torch.distributed import get_process_group_ranks
    from torch.distributed.tensor import Shard

    from headrace.torch.distributed._calls import accepted_any

    axes = [axis for axis, placement in enumerate(getattr(x, "placements", ())) if placement == Shard(1)]
    if not axes:
        return
    context = accepted_any(cp_context)
    ranks = get_process_group_ranks(context.group)
    if [get_process_group_ranks(x.device_mesh.get_group(axis)) for axis in axes] != [ranks]:
        raise ValueError("cp_context: expected one of the ranks over which DTensors cut their tokens, got one of "
                         f"{ranks}")
    part = x.shape[1] // len(ranks)
    expected = [[(rank * part, (rank + 1) * part)] for rank in range(len(ranks))]
    found = [[tuple(pair) for pair in own] for own in context.token_ranges]
    if found != expected:
        raise ValueError(f"cp_context: expected the token_ranges of a DTensor, {expected}, got {found}")
    if has_states:
        raise ValueError("initial_state, output_final_state: expected None and False with DTensors whose tokens are "
                         "cut over ranks, each of which has states of its own")


def part_of(x: Any, part: Tensor) -> Tensor:
    """`part` in the place of x: where x is a DTensor, one of which this rank holds `part`."""
    if not among((x,)):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(part, x.device_mesh, x.placements, run_check=False)


def on_ranks(function: Callable, names: Sequence[str], tensors: Sequence[Any], cuts: Dict[int, Cut],
             results: Sequence[bool], written: Sequence[str] = ()) -> Any:
    """function(*tensors) of DTensors, each rank with its part, without communication; its results are DTensors.

    cuts: by the dimension of the first argument. results: of each result, whether there is one. Arguments that are
    replicas are cut where others are, but for those that are `written`. Raises ValueError or TypeError.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import local_map

    _check_class(names, tensors)
    first = tensors[0]
    along = [_cut_of(names[0], placement, cuts, 1 if first.dim() > 2 else None) for placement in first.placements]
    parts: List[Any] = []
    placements: List[Any] = []
    gradients: List[Any] = []
    for name, x in zip(names, tensors):
        if not among((x,)):  # none, or a plain one that every rank reads as a whole
            parts.append(x)
            placements.append(None)
            gradients.append(None)
            continue
        dims = [None if cut is None else placement.dim if x is first else cut.dims.get(name)
                for cut, placement in zip(along, first.placements)]
        wanted = [Replicate() if dim is None else Shard(dim) for dim in dims]
        parts.append(_placed(name, x, first.device_mesh, wanted, names[0], name in written))
        placements.append(wanted)
        gradients.append([Partial() if dim is None and cut is not None else placement
                          for dim, cut, placement in zip(dims, along, wanted)])
    outputs = [[Replicate() if cut is None else Shard(cut.results[i]) for cut in along] if given else None
               for i, given in enumerate(results)]
    return local_map(function, tuple(outputs), tuple(placements), tuple(gradients), first.device_mesh)(*parts)


def _check_class(names: Sequence[str], tensors: Sequence[Any]) -> None:
    """Every tensor is a DTensor, but for those that every rank reads as a whole."""
    example = next(name for name, x in zip(names, tensors) if among((x,)))
    for name, x in zip(names, tensors):
        if x is not None and name not in _WHOLE and not among((x,)):
            raise TypeError(f"{name}: expected a DTensor as {example}, got a {type(x).__name__} (DTensor.from_local "
                            "and distribute_tensor make one)")


def _cut_of(name: str, placement: Any, cuts: Dict[int, Cut], tokens: Optional[int]) -> Optional[Cut]:
    """What goes with the placement of the first argument on one dimension of the mesh; None with replicas.

    tokens: their dimension, if there is one.
    """
    from torch.distributed.tensor import Replicate, Shard

    if isinstance(placement, Replicate):
        return None
    if type(placement) is Shard and placement.dim in cuts:
        return cuts[placement.dim]
    places = " or ".join(["Replicate()", *(f"Shard(dim={dim})" for dim in cuts)])
    hint = (": tokens of a sequence lie on several ranks with a context of headrace.torch.distributed only"
            if isinstance(placement, Shard) and placement.dim == tokens else "")
    raise ValueError(f"{name}: expected placement {places} on each dimension of the mesh, got {placement!r}{hint}")


def _placed(name: str, x: Any, mesh: Any, wanted: Sequence[Any], first: str, is_written: bool) -> Any:
    """x with these placements, which it has, or can be cut to from replicas."""
    from torch.distributed.tensor import Replicate

    if x.device_mesh != mesh:
        raise ValueError(f"{name}: expected the mesh of {first}, {mesh}, got {x.device_mesh}")
    missing = [place.dim for place in wanted if not isinstance(place, Replicate) and place.dim >= x.dim()]
    if missing:
        raise ValueError(f"{name}: expected at least {max(missing) + 1} dimensions, got shape {list(x.shape)}")
    ranks = [1] * x.dim()
    for axis, (placement, want) in enumerate(zip(x.placements, wanted)):
        if placement != want and (is_written or not isinstance(placement, Replicate)):
            raise ValueError(f"{name}: expected placement {want!r} on dimension {axis} of the mesh, as that of {first} "
                             f"asks for, got {placement!r}")
        if not isinstance(want, Replicate):
            ranks[want.dim] *= mesh.size(axis)
    for dim, (size, count) in enumerate(zip(x.shape, ranks)):
        if size % count:
            raise ValueError(f"{name}: expected dimension {dim}, of size {size}, to be a multiple of the {count} ranks "
                             "over which it is cut")
    return x if tuple(x.placements) == tuple(wanted) else x.redistribute(placements=wanted)

