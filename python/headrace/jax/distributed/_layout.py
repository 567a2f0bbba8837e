"""Who has which tokens, and where sequences are cut: what every rank knows without asking."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, Iterable, List, Optional, Tuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


@dataclasses.dataclass(frozen=True)
class Layout:
    """The tokens of all ranks: `ranges[rank]` are those of a rank, (begin, end), in the order in which it has them.

    What is behind them, up to `tokens`, is padding. A slot is a range that is not empty; slots count along the tokens.
    """

    ranges: Tuple[Tuple[Tuple[int, int], ...], ...]
    tokens: int  # of the arrays of every rank
    slots: Tuple[Tuple[int, int, int, int], ...]  # rank, number among its ranges, begin, end

    @property
    def total(self) -> int:
        """Tokens of all ranks together."""
        return self.slots[-1][3]

    @property
    def width(self) -> int:
        """Ranges of the rank that has most of them."""
        return max(1, max(map(len, self.ranges)))

    @property
    def begins(self) -> np.ndarray:
        return np.array([slot[2] for slot in self.slots], np.int32)

    @property
    def ends(self) -> np.ndarray:
        return np.array([slot[3] for slot in self.slots], np.int32)

    @property
    def is_padded(self) -> bool:
        return any(sum(end - begin for begin, end in row) < self.tokens for row in self.ranges)

    @property
    def is_plain(self) -> bool:
        """Whether every rank has one range and no padding."""
        return self.width == 1 and not self.is_padded

    def table(self, values: Iterable[Any], missing: int) -> np.ndarray:
        """[ranks, width] of one value for each slot, `missing` where a rank has fewer ranges."""
        result = np.full((len(self.ranges), self.width), missing, np.int32)
        for (rank, i, _, _), value in zip(self.slots, values):
            result[rank, i] = value
        return result

    def positions(self) -> np.ndarray:
        """[total]: the place of each token among those of all ranks, one rank after the other, padding included."""
        places = np.empty(self.total, np.int32)
        for rank, ranges in enumerate(self.ranges):
            place = rank * self.tokens
            for begin, end in ranges:
                places[begin:end] = np.arange(place, place + end - begin)
                place += end - begin
        return places


def make_layout(token_ranges: Any, ranks: int, tokens: int) -> Layout:
    """The layout of `token_ranges`, a list of (begin, end) for each rank; None: equal parts in the order of ranks."""
    if token_ranges is None:
        token_ranges = [[(rank * tokens, (rank + 1) * tokens)] for rank in range(ranks)]
    try:
        ranges = tuple(tuple((operator.index(x), operator.index(y)) for x, y in row) for row in token_ranges)
    except TypeError as error:
        expected = "token_ranges: expected a list of (begin, end) for each rank"
        raise TypeError(f"{expected}, got {token_ranges!r}") from error
    if len(ranges) != ranks:
        raise ValueError(f"token_ranges: expected a list for each of {ranks} ranks, got {len(ranges)}")
    for rank, row in enumerate(ranges):
        if any(end < begin for begin, end in row):
            raise ValueError(f"token_ranges: expected begin <= end, got {row} of rank {rank}")
        if sum(end - begin for begin, end in row) > tokens:
            raise ValueError(f"token_ranges: expected at most the {tokens} tokens of arrays, got {row} of rank {rank}")
    filled = tuple(tuple(x for x in row if x[0] < x[1]) for row in ranges)
    slots = sorted(((rank, i, *x) for rank, row in enumerate(filled) for i, x in enumerate(row)), key=lambda x: x[2:])
    ends = [0, *(slot[3] for slot in slots)]
    for (rank, _, begin, _), end in zip(slots, ends):
        if begin != end:
            raise ValueError(f"token_ranges: expected every token once, got {begin} of rank {rank} after {end}")
    if not slots:
        raise ValueError("token_ranges: expected at least one token, got none")
    return Layout(filled, tokens, tuple(slots))


@dataclasses.dataclass
class Cuts:
    """What becomes of sequences at the cuts, seen along the direction in which they run; [slots] or [width] each."""

    enters: Any  # a state enters the slot from outside
    leaves: Any
    first: Any  # the number of the sequence at whose state enters, or would
    last: Any  # the number of the sequence whose state leaves, or would

    @property
    def through(self) -> Any:
        """One sequence fills the slot and goes on at both ends."""
        return self.enters & self.leaves & (self.first == self.last)


def cuts_of(layout: Layout, cu_seqlens: Optional[Array], reverse: bool) -> Tuple[Cuts, Any, Any]:
    """The cuts of all slots; and (begin, end) of the tokens behind which a state enters, and before which one leaves.

    The latter are the pieces of sequences at the two ends of a slot, [slots, 2] each, in the order of the tokens.
    """
    begins, ends = layout.begins, layout.ends
    if cu_seqlens is None:
        low: Any = np.zeros(len(begins), np.int32)
        sides: Any = (low, begins > 0, np.stack([begins, ends], -1)), (low, ends < layout.total,
                                                                       np.stack([begins, ends], -1))
    else:
        low, high = (jnp.searchsorted(cu_seqlens, x, side="right") - 1 for x in (begins, ends - 1))
        sides = ((low, cu_seqlens[low] < begins, jnp.stack([begins, jnp.minimum(ends, cu_seqlens[low + 1])], -1)),
                 (high, cu_seqlens[high + 1] > ends, jnp.stack([jnp.maximum(begins, cu_seqlens[high]), ends], -1)))
    (first, enters, entered), (last, leaves, left) = sides[::-1] if reverse else sides
    return Cuts(enters, leaves, first, last), entered, left


def offsets_of(given: Any, cu_seqlens: Array, total: int) -> Array:
    """Global offsets as i32 [N + 1]; of wrong ones a ValueError, or if traced -1, which the library refuses.

    given: what the caller gave, of which cu_seqlens is the array.
    """
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1 or not jnp.issubdtype(cu_seqlens.dtype, jnp.integer):
        raise ValueError("cu_seqlens: expected integers [N + 1] of at least 1 entry, got "
                         f"{cu_seqlens.dtype} of shape {list(cu_seqlens.shape)}")
    is_known = not isinstance(given, jax.core.Tracer)
    offsets: Any = np.asarray(given) if is_known else cu_seqlens
    is_right = (offsets[0] == 0) & (offsets[-1] == total) & (offsets[1:] >= offsets[:-1]).all()
    if is_known and not is_right:
        raise ValueError(f"cu_seqlens: expected offsets that rise from 0 to the {total} tokens of all ranks, got "
                         f"{offsets.tolist()}")
    return jnp.where(is_right, offsets, -1).astype(jnp.int32)


@dataclasses.dataclass
class Pieces:
    """The pieces of sequences that this rank has: [width, sequences] each, sequences one if rows are."""

    starts: Any  # whether the sequence starts in this piece (along the direction in which it runs)
    stops: Any
    offsets: Any  # where the piece begins among the rank's tokens


def pieces_of(layout: Layout, cu_seqlens: Optional[Array], reverse: bool, rank: Any) -> Pieces:
    """Every sequence has a piece in every range, most of them empty; empty sequences start and stop in one of them."""
    begins = jnp.asarray(layout.table(layout.begins, layout.total + 1))[rank][:, None]
    ends = jnp.asarray(layout.table(layout.ends, layout.total + 1))[rank][:, None]
    lengths = ends - begins
    places = jnp.cumsum(lengths, 0) - lengths
    if cu_seqlens is None:
        starts, stops = (begins == 0), (ends == layout.total)
        return Pieces(*((stops, starts) if reverse else (starts, stops)), places)
    low, high = cu_seqlens[None, :-1], cu_seqlens[None, 1:]
    at_end = (low == layout.total) & (ends == layout.total)
    begin = ((begins <= low) & (low < ends)) | at_end
    end = jnp.where(low == high, begin, (begins < high) & (high <= ends))
    offsets = places + jnp.clip(low - begins, 0, lengths)
    return Pieces(*((end, begin) if reverse else (begin, end)), offsets)


def own(layout: Layout, values: Any, rank: Any, missing: Any = 0) -> Any:
    """[width, ...] of this rank, from one value for each slot; `missing` where it has fewer ranges."""
    numbers = jnp.asarray(layout.table(range(len(layout.slots)), -1))[rank]
    values = jnp.asarray(values)[numbers]
    return jnp.where((numbers >= 0).reshape(-1, *[1] * (values.ndim - 1)), values, missing)


def filled(layout: Layout, rank: Any) -> Any:
    """How many tokens of this rank are no padding."""
    return jnp.asarray([sum(end - begin for begin, end in row) for row in layout.ranges], jnp.int32)[rank]


def neighbours(layout: Layout, step: int) -> List[Tuple[int, int, List[Tuple[int, int]]]]:
    """(i, j, pairs of ranks): range i of the first rank of a pair is `step` slots before range j of the second."""
    found: dict = {}
    for number, (rank, j, _, _) in enumerate(layout.slots):
        if 0 <= number - step < len(layout.slots):
            source, i = layout.slots[number - step][:2]
            found.setdefault((i, j), []).append((source, rank))
    return [(i, j, pairs) for (i, j), pairs in sorted(found.items())]
