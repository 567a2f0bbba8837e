"""The functions of headrace.jax.distributed: user arguments in, checked; this rank's results out."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Optional, Tuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from headrace._arguments import flag
from headrace.jax._calls import vary_alike
from headrace.jax._functions import Maybe, Result, _array, _check, _checked_arrays, _floating, _in_type, _settings
from headrace.jax._layer_functions import check_convolution, convolution_tensors, short_convolution
from headrace.jax.distributed._attention import Plan, summarised
from headrace.jax.distributed._convolution import states_before
from headrace.jax.distributed._heads import by_heads
from headrace.jax.distributed._layout import Layout, make_layout, offsets_of
from headrace.jax.distributed._place import Place

_STRATEGIES = ("summary", "heads")
_EXCHANGES = ("auto", "all_gather", "doubling")


def _one_of(name: str, value: Any, names: Tuple[str, ...]) -> str:
    if value not in names:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, names))}, got {value!r}")
    return value


def _layout(axis_name: Any, token_ranges: Any, name: str, x: Array) -> Layout:
    """Of the ranks along the axis, each of which has its own x [B, T, ...]."""
    if jax.typeof(jax.lax.axis_index(axis_name)).mat.varying - jax.typeof(x).mat.varying:  # which check_vma tells
        raise ValueError(f"{name}: expected the tokens of this rank, got the same on all ranks along {axis_name!r}")
    return make_layout(token_ranges, jax.lax.axis_size(axis_name), x.shape[1])


def _stand_in(offsets: Array, tokens: int) -> np.ndarray:
    """Offsets of as many sequences that are right for this rank's tokens alone."""
    standing = np.zeros(offsets.shape, np.int32)
    standing[-1] = tokens
    return standing


def _varying(tensors: Dict[str, Array], axis_name: Any) -> Dict[str, Array]:
    """All tensors as values that differ from rank to rank, so that gradients of those that do not are summed."""
    rank = {"rank": jax.lax.axis_index(axis_name)}
    return {name: x for name, x in vary_alike({**tensors, **rank}).items() if name != "rank"}


def cp_attention(
    op: str, q: ArrayLike, k: ArrayLike, v: ArrayLike, *, axis_name: Any, token_ranges: Any = None,
    strategy: str = "summary", exchange: str = "auto", p: Maybe = None, g: Maybe = None, gv: Maybe = None,
    g_gamma: Maybe = None, beta: Maybe = None, A_log: Maybe = None, dt_bias: Maybe = None, initial_state: Maybe = None,
    cu_seqlens: Maybe = None, scale: Optional[float] = None, reverse: bool = False, qk_l2norm: bool = False,
    gate_form: str = "log_decay", lower_bound: Optional[float] = None, beta_form: str = "value",
    chunk: Optional[int] = None, state_v_first: bool = False, output_final_state: bool = False,
) -> Result:
    """headrace.jax.attention inside jax.shard_map, of sequences whose tokens the ranks along `axis_name` have.

    q, k, v, p, g, beta: this rank's tokens, [B, T, ...] with the same T on every rank; the other arguments and shapes
    are those of attention(). token_ranges, cu_seqlens and states as the module says.

    strategy "summary": every rank summarises its pieces, summaries travel, then every rank runs its pieces. Of each
    value head and cut they take K V numbers (float32, float64 for float64), for delta rules K K more where a sequence
    fills a rank, and back K V numbers. exchange "all_gather": to all ranks, in one message; "doubling": in log2 rounds
    between two ranks each, which takes the memory of one; "auto": the former up to 8 ranges of tokens. strategy
    "heads": every rank gets whole sequences of some of the heads, which the ranks must divide; these are the bits of
    one process, gv and a beta for each element of v work, and T (2 K + 2 V) numbers travel for each head.

    Returns (o [B, T, HV, V], 0 at padding; final_state [N, HV, K, V] or None). Raises ValueError or TypeError while
    tracing, jax.errors.JaxRuntimeError for wrong values, as attention() does. Formulas: docs/math.md of the project, 9.
    """
    q = _floating("q", q)
    tensors = _checked_arrays({"q": q, "k": k, "v": v, "p": p, "g": g, "gv": gv, "g_gamma": g_gamma, "beta": beta,
                               "A_log": A_log, "dt_bias": dt_bias, "initial_state": initial_state,
                               "cu_seqlens": cu_seqlens}, gate_form)
    settings = _settings(op, tensors["q"], scale, reverse, qk_l2norm, gate_form, lower_bound, beta_form, chunk,
                         state_v_first, output_final_state)
    _one_of("strategy", strategy, _STRATEGIES)
    _one_of("exchange", exchange, _EXCHANGES)
    layout = _layout(axis_name, token_ranges, "q", tensors["q"])
    if "cu_seqlens" in tensors:
        tensors["cu_seqlens"] = offsets_of(cu_seqlens, tensors["cu_seqlens"], layout.total)
        _check(settings, {**tensors, "cu_seqlens": _stand_in(tensors["cu_seqlens"], layout.tokens)})
    else:
        _check(settings, tensors)
    if state_v_first and "initial_state" in tensors:
        tensors["initial_state"] = jnp.swapaxes(tensors["initial_state"], 2, 3)
    settings = dataclasses.replace(settings, state_v_first=False, in_words=True)
    tensors = _varying(tensors, axis_name)
    if strategy == "heads":
        outputs = by_heads(settings, layout, axis_name, tensors)
    else:
        if gv is not None or tensors.get("beta", tensors["v"][..., 0]).ndim == 4:
            raise ValueError(f"{'beta' if gv is None else 'gv'}: expected none for each element of v with strategy "
                             "'summary', whose maps of states it would change: strategy 'heads' takes it")
        if exchange == "auto":
            exchange = "all_gather" if len(layout.slots) <= 8 else "doubling"
        outputs = summarised(Plan(settings, layout, axis_name, exchange), tensors)
    state = outputs.get("final_state")
    if state is not None and state_v_first:
        state = jnp.swapaxes(state, 2, 3)
    return _in_type(outputs["o"], q.dtype), state


def cp_short_convolution(
    x: ArrayLike, weight: ArrayLike, bias: Maybe = None, initial_state: Maybe = None, output_final_state: bool = False,
    activation: Optional[str] = None, cu_seqlens: Maybe = None, *, axis_name: Any, token_ranges: Any = None,
) -> Tuple[Array, Optional[Array]]:
    """headrace.jax.short_convolution inside jax.shard_map, of sequences whose tokens the ranks along `axis_name` have.

    x: this rank's tokens, [B, T, D] with the same T on every rank; the other arguments and shapes are those of
    short_convolution(). token_ranges, cu_seqlens and states as the module says. The last W - 1 inputs before a range
    travel to it, from as many ranks as have them, in messages between two ranks; as many gradients travel back.

    Returns (y [B, T, D], 0 at padding; final_state [N, D, W] or None). Raises as short_convolution() does.
    """
    tensors = convolution_tensors(x, weight, bias, initial_state)
    check_convolution(tensors, cu_seqlens if cu_seqlens is None else _array("cu_seqlens", cu_seqlens))
    layout = _layout(axis_name, token_ranges, "x", tensors["x"])
    if cu_seqlens is not None:
        tensors["cu_seqlens"] = offsets_of(cu_seqlens, _array("cu_seqlens", cu_seqlens), layout.total)
    tensors = _varying(tensors, axis_name)
    x, W = tensors["x"], tensors["weight"].shape[1]
    place = Place(layout, axis_name, tensors.get("cu_seqlens"), x.shape[0])
    states = states_before(place, x, W, tensors.get("initial_state"))
    local = place.local(tensors, ("x",), {"initial_state": states})
    y, state = short_convolution(**local, activation=activation,
                                 output_final_state=flag("output_final_state", output_final_state))
    y = place.unpadded(y.reshape(x.shape))
    if state is None:
        return y, None
    state = place.of_sequences(place.states_of(state), place.pieces.stops)
    return y, _in_type(state, tensors.get("initial_state", x).dtype)
