"""This rank's part of the sequences: its pieces, the states that enter and leave them, and the call that runs them."""

from __future__ import annotations

from typing import Any, Collection, Dict, Optional

import jax
import jax.numpy as jnp
from jax import Array

from headrace.jax._calls import vary_alike
from headrace.jax.distributed._layout import Layout, cuts_of, filled, own, pieces_of

Tensors = Dict[str, Array]


class Place:
    """What a rank computes from its number. [width] is one value for each of its ranges, along the tokens.

    Every sequence has a piece in every range, most of them empty; states of pieces are [rows, width, sequences, ...],
    where either rows or sequences are one. offsets: those of all ranks' tokens, of one row; None: a row is a sequence.
    """

    def __init__(self, layout: Layout, axis: Any, offsets: Optional[Array], rows: int, reverse: bool = False) -> None:
        self.layout, self.axis, self.offsets, self.rows, self.reverse = layout, axis, offsets, rows, reverse
        rank = self.rank = jax.lax.axis_index(axis)
        cuts, entered, left = cuts_of(layout, offsets, reverse)
        self.onwards = cuts.through  # [slots]: a sequence fills the slot, so that its transition counts
        self.enters, self.leaves, self.first, self.last, self.passes = (
            own(layout, x, rank) for x in (cuts.enters, cuts.leaves, cuts.first, cuts.last, cuts.through))
        self.pieces = pieces_of(layout, offsets, reverse, rank)
        self.begins, self.lengths = (own(layout, x, rank) for x in (layout.begins, layout.ends - layout.begins))
        self.places = jnp.cumsum(self.lengths) - self.lengths  # where the ranges begin among the rank's tokens
        # The tokens, among the rank's, of the sequences at whose states something enters or leaves, [width, 2].
        self.entered, self.left = (
            jnp.clip(own(layout, x, rank) + (self.places - self.begins)[:, None], 0, layout.tokens)
            for x in (entered, left))

    def row_of(self, states: Array, number: Any) -> Array:
        """Of the caller's states [N, ...] those of a sequence by its number, or of all rows."""
        return states if self.offsets is None else jax.lax.dynamic_slice_in_dim(states, number, 1)

    def in_pieces(self, edge: Array, is_edge: Array, number: Array, others: Optional[Array], where: Array) -> Array:
        """States of pieces: `edge` [width, rows, ...] of the one at a cut, others [N, ...] where they count, else 0."""
        count = self.pieces.offsets.shape[1]
        is_edge = is_edge[:, None] & (jnp.arange(count) == number[:, None])
        edge = jnp.moveaxis(edge, 0, 1)[:, :, None]
        rest = jnp.zeros_like(edge)
        if others is not None:
            others = (others[:, None, None] if self.offsets is None else others[None, None]).astype(edge.dtype)
            rest = jnp.where(_spread(where, others), others, 0)
        return jnp.where(_spread(is_edge, edge), edge, rest)

    def of_sequences(self, states: Array, where: Array) -> Array:
        """[N, ...]: of the states of each sequence's pieces the one for which `where` is true; 0 if none is here."""
        states = jnp.where(_spread(where, states), states, 0).sum(1)
        return states.reshape(-1, *states.shape[2:])

    def local(self, tensors: Tensors, tokens: Collection[str], states: Tensors) -> Tensors:
        """The tensors of this rank's own call, in which every piece is a sequence.

        tokens: the names of those that have tokens, [B, T, ...]; states: of pieces.
        """
        others = {name: x for name, x in tensors.items() if name not in ("cu_seqlens", *states)}
        if self.layout.is_plain and self.offsets is None:
            return vary_alike({**others, **{name: x[:, 0, 0] for name, x in states.items()}})
        joined = {name: x.reshape(1, -1, *x.shape[2:]) if name in tokens else x for name, x in others.items()}
        starts = self.pieces.offsets.reshape(-1)
        flat = {name: x.reshape(self.rows, -1, *x.shape[3:]) for name, x in states.items()}
        if self.layout.is_padded:  # a piece of its own in every row
            starts = jnp.append(starts, filled(self.layout, self.rank))
            flat = {name: jnp.append(x, jnp.zeros_like(x[:, :1]), 1) for name, x in flat.items()}
        starts = jnp.arange(self.rows, dtype=jnp.int32)[:, None] * self.layout.tokens + starts
        starts = jnp.append(starts.reshape(-1), self.rows * self.layout.tokens).astype(jnp.int32)
        if self.offsets is not None:
            starts = jnp.where(self.offsets[0] < 0, -1, starts)  # wrong offsets stay wrong
        flat = {name: x.reshape(-1, *x.shape[2:]) for name, x in flat.items()}
        return vary_alike({**joined, **flat, "cu_seqlens": starts})

    def states_of(self, x: Array) -> Array:
        """The local call's states as those of pieces."""
        x = x.reshape(self.rows, -1, *x.shape[1:])
        return x[:, :self.pieces.offsets.size].reshape(self.rows, *self.pieces.offsets.shape, *x.shape[2:])

    def unpadded(self, x: Array) -> Array:
        """x [B, T, ...], 0 at the padding."""
        if not self.layout.is_padded:
            return x
        is_token = jnp.arange(self.layout.tokens) < filled(self.layout, self.rank)
        return jnp.where(is_token.reshape(1, -1, *[1] * (x.ndim - 2)), x, 0)


def _spread(condition: Array, states: Array) -> Array:
    """[width, sequences] beside states [rows, width, sequences, ...]."""
    return condition.reshape(1, *condition.shape, *[1] * (states.ndim - 3))
