"""How maps of states travel between ranks: S behind a slot is M S + R, and 0 S + R where a sequence begins in it.

M: [..., K, K], [..., K] or [...] beside states [..., K, V]; docs/math.md, 9.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Dict, Optional, Tuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from headrace.jax import _primitive
from headrace.jax.distributed._layout import Layout, neighbours, own

Maybe = Optional[Array]


def moved(M: Array, states: Array) -> Array:
    """M states."""
    if M.ndim == states.ndim:
        return jnp.einsum("...kl,...lv->...kv", M, states, precision=jax.lax.Precision.HIGHEST)
    return M.reshape(*M.shape, *[1] * (states.ndim - M.ndim)) * states


def composed(second: Array, first: Array, is_matrix: bool) -> Array:
    """The transition of `first` and then `second`."""
    return jnp.einsum("...kl,...lm->...km", second, first, precision=jax.lax.Precision.HIGHEST) if is_matrix else (
        second * first)


def shifted(layout: Layout, axis: Any, x: Array, step: int) -> Array:
    """x [width, ...] of the slots `step` before those of this rank, 0 where there are none."""
    result = [jnp.zeros_like(x[0])] * layout.width
    for i, j, pairs in neighbours(layout, step):
        result[j] = result[j] + jax.lax.ppermute(x[i], axis, pairs)
    return jnp.stack(result)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _agreed(x: Array, head_axis: int, words: Array) -> Array:
    return _primitive.agreed(x, head_axis, words)


_agreed.defvjp(lambda x, head_axis, words: (_agreed(x, head_axis, words), words),
               lambda head_axis, words, d_x: (_agreed(d_x, head_axis, words), np.zeros(words.shape, jax.dtypes.float0)))


def agreed(words: Array, arrays: Dict[str, Array]) -> Dict[str, Array]:
    """o, final_state and their gradients, if no rank has an error, words [ranks, words]; else every rank raises it.

    A rank that raised alone would leave the others waiting in the next exchange.
    """
    return {name: _agreed(x, 2 if name in ("o", "d_o") else 1, words) for name, x in arrays.items()}


def all_slots(layout: Layout, axis: Any, x: Array) -> Array:
    """[slots, ...] from x [width, ...] of every rank."""
    ranks, numbers = np.array([slot[:2] for slot in layout.slots]).T
    return jax.lax.all_gather(x, axis)[ranks, numbers]


def folded(layout: Layout, rank: Any, M: Maybe, R: Array, onwards: Any, reverse: bool) -> Array:
    """[width, ...]: the state before each slot of this rank, from M and R [slots, ...] of all slots.

    onwards [slots]: whether M counts, else it is 0. M None: it is 1. reverse: from the last slot to the first.
    """
    count = len(layout.slots)
    numbers = own(layout, np.arange(count), rank, -1)
    onwards = jnp.asarray(onwards)

    def follow(i: Any, carry: Tuple[Array, Array]) -> Tuple[Array, Array]:
        state, found = carry
        slot = count - 1 - i if reverse else i
        found = jnp.where((numbers == slot).reshape(-1, *[1] * state.ndim), state, found)
        through = state if M is None else moved(M[slot], state)
        return jnp.where(onwards[slot], through, 0) + R[slot], found

    last = count - 1 - jnp.min(jnp.where(numbers < 0, count, numbers)) if reverse else jnp.max(numbers)
    zero = R[0] * 0
    found = jnp.broadcast_to(zero, (layout.width, *zero.shape))
    return jax.lax.fori_loop(0, last + 1, follow, (zero, found))[1]


def doubled(layout: Layout, axis: Any, M: Maybe, R: Array, onwards: Array, reverse: bool) -> Array:
    """As folded, from M and R [width, ...] of this rank's slots alone, in log2 rounds of messages between two ranks."""
    sign = -1 if reverse else 1
    is_matrix = M is not None and M.ndim == R.ndim
    mask = onwards.astype(R.dtype)
    M = mask.reshape(-1, *[1] * (R.ndim - 3)) * jnp.ones(R.shape[:3], R.dtype) if M is None else (
        mask.reshape(-1, *[1] * (M.ndim - 1)) * M)
    M, R = shifted(layout, axis, M, sign), shifted(layout, axis, R, sign)
    step = 1
    while step < len(layout.slots) - 1:  # R spans `step` slots
        R = R + moved(M, shifted(layout, axis, R, sign * step))
        if 2 * step < len(layout.slots) - 1:
            M = composed(M, shifted(layout, axis, M, sign * step), is_matrix)
        step *= 2
    return R
