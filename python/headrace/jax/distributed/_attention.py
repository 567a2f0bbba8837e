"""Operators on sequences whose tokens several ranks have: every rank runs its pieces from the states that enter them.

A piece is a map of the state, S_out = M S_in + R, and of its gradient, D_in = M^T D_out + Dx (docs/math.md, 9). Ranks
summarise their pieces, exchange summaries, and then run them. M is needed where a sequence fills a whole slot.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Optional, Tuple

import jax
import jax.numpy as jnp
from jax import Array

from headrace._arguments import DIFFERENTIABLE
from headrace.jax import _primitive
from headrace.jax._calls import vary_alike, with_gradients
from headrace.jax.distributed._exchange import agreed, all_slots, doubled, folded
from headrace.jax.distributed._layout import Layout, own
from headrace.jax.distributed._place import Place, Tensors

DELTA = ("delta_rule", "gated_delta_rule", "comba", "kda")
TOKENS = ("q", "k", "v", "p", "g", "gv", "beta", "d_o")  # what has tokens, [B, T, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is fixed when a call is traced. States are K-first here."""

    settings: _primitive.Settings
    layout: Layout
    axis: Any
    exchange: str  # "all_gather" or "doubling"

    def place(self, tensors: Tensors) -> Place:
        rows = tensors["k"].shape[0]
        return Place(self.layout, self.axis, tensors.get("cu_seqlens"), rows, self.settings.reverse)

    def transition(self, tensors: Tensors) -> Optional[str]:
        """The shape of a transition that the data decides; None where there is no such, or none is needed."""
        if len(self.layout.slots) <= 2:  # no slot has one before it and one behind
            return None
        if self.settings.op in DELTA:
            return "K K"
        return None if "g" not in tensors else "K" if tensors["g"].ndim == 4 else "1"

    def constant(self, tensors: Tensors) -> Optional[Array]:
        """M [slots, 1, HV] of slots, of a decay that the tokens do not change; None: 1."""
        if "g_gamma" not in tensors:
            return None
        lengths = jnp.asarray(self.layout.ends - self.layout.begins)
        return jnp.exp(lengths[:, None] * tensors["g_gamma"].astype(_primitive.state_dtype(tensors["k"])))[:, None]


def _or_zero(condition: Array, function: Callable, like: Array) -> Any:
    """function(), which varies over the mesh axes that `like` does, or zeros without running it."""
    axes = tuple(jax.typeof(like).mat.varying)

    def zeros() -> Any:
        return jax.tree.map(lambda x: jax.lax.pcast(jnp.zeros(x.shape, x.dtype), axes, to="varying"),
                            jax.eval_shape(function))

    return jax.lax.cond(condition, function, zeros)


def _without(tensors: Tensors, *names: str) -> Tensors:
    return {name: x for name, x in tensors.items() if name not in (*names, "cu_seqlens", "initial_state")}


def _summaries(plan: Plan, place: Place, tensors: Tensors) -> Tensors:
    """M ("transition") and R ("state") [width, rows, ...] of this rank's slots that a state leaves, else 0.

    M of those that it also entered, and if the data decides it. "words": the message of an error.
    """
    shape = plan.transition(tensors)

    def of_range(i: int) -> Tensors:
        inputs = vary_alike({**_without(tensors, "q"), "span": place.left[i]})

        def begun() -> Tensors:
            """The whole state: the sequence starts in this slot."""
            given = dict(inputs)
            if "initial_state" in tensors:
                given = vary_alike({**given, "initial_state": place.row_of(tensors["initial_state"], place.last[i])})
            return _primitive.summarize(plan.settings, None, given)

        def passed() -> Tensors:
            return _primitive.summarize(plan.settings, shape, inputs)

        whole = _or_zero(place.passes[i], passed, inputs["k"])
        begins = place.leaves[i] & ~place.passes[i]
        return whole | {name: whole[name] + x for name, x in _or_zero(begins, begun, inputs["k"]).items()}

    found = [of_range(i) for i in range(plan.layout.width)]
    return {name: jnp.stack([x[name] for x in found]) for name in found[0]}


def _adjoints(plan: Plan, place: Place, tensors: Tensors, d_outputs: Tensors) -> Array:
    """Dx [width, rows, ...] of this rank's slots that a state enters, else 0."""
    def of_range(i: int) -> Array:
        inputs = vary_alike({**_without(tensors), **_without(d_outputs, "d_final_state"), "span": place.entered[i]})

        def adjoint() -> Array:
            given = inputs
            if "d_final_state" in d_outputs:
                ending = place.row_of(d_outputs["d_final_state"], place.first[i])
                given = vary_alike({**given, "d_final_state": jnp.where(place.passes[i], 0, ending)})
            return _primitive.summarize_backward(plan.settings, given)

        return _or_zero(place.enters[i], adjoint, inputs["k"])

    return jnp.stack([of_range(i) for i in range(plan.layout.width)])


def _exchanged(plan: Plan, place: Place, tensors: Tensors, M: Optional[Array], R: Array, backwards: bool) -> Array:
    """[width, rows, ...]: what reaches each slot of this rank along the direction of travel.

    M: of all slots, or of this rank's in the doubling, where the data decides it.
    """
    layout, reverse = plan.layout, place.reverse != backwards
    if backwards and M is not None and M.ndim == R.ndim:
        M = jnp.swapaxes(M, -1, -2)
    if plan.exchange == "all_gather":
        M = plan.constant(tensors) if M is None else M
        return folded(layout, place.rank, M, all_slots(layout, plan.axis, R), place.onwards, reverse)
    if M is None and "g_gamma" in tensors:
        M = jnp.broadcast_to(own(layout, plan.constant(tensors), place.rank), R.shape[:3])
    return doubled(layout, plan.axis, M, R, place.passes, reverse)


def _forward(plan: Plan, tensors: Tensors) -> Tuple[Tensors, Tensors]:
    place = plan.place(tensors)
    summaries = _summaries(plan, place, tensors)
    M = summaries.get("transition")
    if M is not None and plan.exchange == "all_gather":
        M = all_slots(plan.layout, plan.axis, M)
    entering = _exchanged(plan, place, tensors, M, summaries["state"], backwards=False)
    states = place.in_pieces(entering, place.enters, place.first, tensors.get("initial_state"), place.pieces.starts)
    found = _primitive.forward(plan.settings, place.local(tensors, TOKENS, {"initial_state": states}))
    outputs = {"o": place.unpadded(found["o"].reshape(tensors["v"].shape))}
    if plan.settings.final_state:
        outputs["final_state"] = place.of_sequences(place.states_of(found["final_state"]), place.pieces.stops)
    words = jnp.where(jnp.any(found["words"] != 0), found["words"].max((0, 1)), summaries["words"].max((0, 1, 2)))
    words = jax.lax.all_gather(words, plan.axis)
    return agreed(words, outputs), {"states": states, "words": words} | ({} if M is None else {"M": M})


def _backward(plan: Plan, wanted: list, tensors: Tensors, kept: Tensors, d_outputs: Tensors) -> Tensors:
    place = plan.place(tensors)
    d_outputs = agreed(kept["words"], d_outputs)
    if "d_o" in d_outputs:
        d_outputs = {**d_outputs, "d_o": place.unpadded(d_outputs["d_o"])}
    Dx = _adjoints(plan, place, tensors, d_outputs)
    leaving = _exchanged(plan, place, tensors, kept.get("M"), Dx, backwards=True)
    d_states = place.in_pieces(leaving, place.leaves, place.last, d_outputs.get("d_final_state"), place.pieces.stops)
    local = place.local(tensors | d_outputs, TOKENS, {"initial_state": kept["states"], "d_final_state": d_states})
    found = _primitive.backward(plan.settings, wanted, local)
    gradients = {name: x.reshape(tensors[name].shape) for name, x in found.items() if name != "initial_state"}
    if "initial_state" in found:
        states = place.of_sequences(place.states_of(found["initial_state"]), place.pieces.starts)
        gradients["initial_state"] = states.astype(tensors["initial_state"].dtype)
    return gradients


summarised = with_gradients(DIFFERENTIABLE, _forward, _backward)
