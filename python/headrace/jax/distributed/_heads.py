"""The same by heads: every rank gets whole sequences of some heads, and the outputs travel back."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from headrace.jax import _primitive
from headrace.jax._calls import vary_alike
from headrace.jax.distributed._attention import TOKENS
from headrace.jax.distributed._exchange import agreed
from headrace.jax.distributed._layout import Layout, pieces_of
from headrace.jax.distributed._place import Tensors


def by_heads(settings: _primitive.Settings, layout: Layout, axis: Any, tensors: Tensors) -> Tensors:
    """{"o", "final_state"} of this rank's tokens and of the sequences that stop among them; states K-first."""
    ranks = len(layout.ranges)
    for name in ("q", "v"):
        if tensors[name].shape[2] % ranks:
            raise ValueError(f"{name}: expected heads in a multiple of {ranks} ranks with strategy 'heads', got "
                             f"{tensors[name].shape[2]}")
    rank = jax.lax.axis_index(axis)
    positions = layout.positions()
    is_in_order = np.array_equal(positions, np.arange(ranks * layout.tokens))

    def part(x: Array, dimension: int) -> Array:
        size = x.shape[dimension] // ranks
        return jax.lax.dynamic_slice_in_dim(x, rank * size, size, dimension)

    def gathered(x: Array) -> Array:
        x = jax.lax.all_to_all(x, axis, split_axis=2, concat_axis=1, tiled=True)
        return x if is_in_order else x[:, positions]

    whole = {name: gathered(x) for name, x in tensors.items() if name in TOKENS}
    whole |= {name: part(tensors[name], i) for name, i in
              (("g_gamma", 0), ("A_log", 0), ("dt_bias", 0), ("initial_state", 1)) if name in tensors}
    if "cu_seqlens" in tensors:
        whole["cu_seqlens"] = tensors["cu_seqlens"]
    found = dict(_primitive.operator(dataclasses.replace(settings, parts=ranks), vary_alike(whole)))
    words = found.pop("words").max((0, 1))
    outputs = agreed(jax.lax.all_gather(words, axis), found)
    o = outputs["o"]
    if not is_in_order:
        places = np.full(ranks * layout.tokens, -1)
        places[positions] = np.arange(layout.total)
        o = jnp.where((places >= 0)[:, None, None], o[:, np.maximum(places, 0)], 0)
    outputs["o"] = jax.lax.all_to_all(o, axis, split_axis=1, concat_axis=2, tiled=True)
    if settings.final_state:
        stops = pieces_of(layout, tensors.get("cu_seqlens"), settings.reverse, rank).stops.any(0)
        outputs["final_state"] = _where_it_stops(outputs["final_state"], stops, rank, ranks, axis)
    return outputs


def _where_it_stops(state: Array, stops: Array, rank: Any, ranks: int, axis: Any) -> Array:
    """All heads of the states of the sequences that stop here, from those of some heads of all sequences.

    By a sum: the transposed of gathering would be a scattered sum.
    """
    N, heads, K, V = state.shape
    is_own = (jnp.arange(ranks) == rank)[:, None, None, None]
    whole = jax.lax.psum(jnp.where(is_own, state[:, None], 0), axis).reshape(N, ranks * heads, K, V)
    return jnp.where(stops.reshape(-1, 1, 1, 1), whole, 0)
