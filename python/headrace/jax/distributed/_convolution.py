"""Short convolutions of sequences whose tokens several ranks have: the last W - 1 inputs before a slot travel to it."""

from __future__ import annotations

from typing import Any, Optional

import jax.numpy as jnp
import numpy as np
from jax import Array

from headrace.jax.distributed._exchange import shifted
from headrace.jax.distributed._layout import Layout, own
from headrace.jax.distributed._place import Place


def _hops(layout: Layout, count: int) -> int:
    """Over how many slots the `count` tokens before a slot reach, at most."""
    lengths = layout.ends - layout.begins
    most = 0
    for slot in range(1, len(lengths)):
        behind = np.cumsum(lengths[:slot][::-1])
        most = max(most, min(slot, int(np.searchsorted(behind, count)) + 1))
    return most


def inputs_before(place: Place, x: Array, count: int) -> Array:
    """[width, B, count, D]: the tokens before each range of this rank, the newest last; what is before all is 0.

    By messages between two ranks, which autograd turns round.
    """
    layout = place.layout
    lengths = np.minimum(layout.ends - layout.begins, count)
    steps = jnp.arange(count)
    indices = (place.places + place.lengths)[:, None] - count + steps
    tails = jnp.moveaxis(x[:, jnp.clip(indices, 0, x.shape[1] - 1)], 1, 0)
    tails = jnp.where((indices >= place.places[:, None])[:, None, :, None], tails, 0)
    hops = _hops(layout, count)
    before = jnp.zeros_like(tails)
    for hop in range(hops, 0, -1):  # what lies farther away is pushed out by what lies nearer
        newer = shifted(layout, place.axis, tails, hop)
        size = own(layout, np.concatenate([np.zeros(hop, int), lengths[:-hop]]), place.rank)
        pushed = jnp.clip(steps + size[:, None], 0, count - 1)[:, None, :, None]
        older = jnp.take_along_axis(before, jnp.broadcast_to(pushed, before.shape), 2)
        before = jnp.where((steps >= count - size[:, None])[:, None, :, None], newer, older)
    return before


def states_before(place: Place, x: Array, width: int, initial_state: Optional[Array]) -> Array:
    """States of pieces [rows, width, sequences, D, W]: of the piece at a cut the W inputs before it, oldest first.

    Those before the sequence are of its initial state. The oldest is read by no sum, and is 0 if it would have to come
    from another rank.
    """
    rows, _, D = x.shape
    dtype = x.dtype if initial_state is None else jnp.promote_types(x.dtype, initial_state.dtype)
    before = inputs_before(place, x, width - 1) if width > 1 else jnp.zeros((place.layout.width, rows, 0, D), x.dtype)
    inputs = jnp.swapaxes(jnp.pad(before, ((0, 0), (0, 0), (1, 0), (0, 0))), 2, 3).astype(dtype)  # [.., D, W]
    offsets = place.offsets
    start = jnp.zeros_like(place.begins) if offsets is None else offsets[place.first]
    indices = (place.begins - start)[:, None] + jnp.arange(width)  # in the initial state, if they are below W
    given = jnp.zeros_like(inputs)
    if initial_state is not None:
        states = [place.row_of(initial_state, place.first[i]) for i in range(place.layout.width)]
        stacked = jnp.broadcast_to(jnp.stack(states), given.shape).astype(dtype)
        chosen = jnp.clip(indices, 0, width - 1)[:, None, None, :]
        given = jnp.take_along_axis(stacked, jnp.broadcast_to(chosen, given.shape), 3)
    edge = jnp.where((indices < width)[:, None, None, :], given, inputs)
    return place.in_pieces(edge, place.enters, place.first, initial_state, place.pieces.starts)

