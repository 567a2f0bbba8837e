"""Forward, backward and step of the operators as XLA custom calls."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from headrace._arguments import DIFFERENTIABLE, INPUTS, count_sequences
from headrace.jax._calls import Kind, attributes_of, custom_call, differentiable, gradients, mappable, vary_alike
from headrace.jax._partition import Labels


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is fixed when a call is traced: the attributes of the custom calls."""

    op: str
    final_state: bool
    scale: float
    reverse: bool
    qk_l2norm: bool
    gate_form: str
    lower_bound: float
    beta_form: str
    chunk: int
    state_v_first: bool
    parts: int = 1  # into which the heads were divided: implementations and types are chosen as for all of them
    in_words: bool = False  # a forward leaves the message of an error among its results, as "words", and goes on

    def attributes(self) -> dict:
        return attributes_of(self, without=("final_state", "in_words"))


_STATES = ("initial_state", "final_state", "d_final_state", "states", "state", "d_initial_state")
_WORDS = 32  # of an error's message, 4 bytes each


def _labels(tensors: dict) -> dict[str, Labels]:
    """What the dimensions of tensors and results count, by name: a call is divided along heads and rows."""
    H, HV = tensors["k"].shape[2], tensors["v"].shape[2]
    rows = None if "cu_seqlens" in tensors else "rows"  # of states
    key_head = None if H == 1 < HV else "heads"  # the one key head is whole beside any value heads
    head = "heads" if H in (1, HV) else ("heads", "group")
    channels = ("heads", "channels") if isinstance(head, str) else (*head, "channels")
    labels: dict = dict.fromkeys(("q", "k", "p"), ("rows", None, key_head, None))
    labels |= dict.fromkeys(("v", "gv", "o", "d_o"), ("rows", None, head, None))
    labels |= dict.fromkeys(("g", "beta"), ("rows", None, head, None))  # the last two have it or not
    labels |= dict.fromkeys(_STATES, (rows, head, None, None))
    labels |= {"transition": (rows, head, None, None), "g_gamma": (head,), "A_log": (head,)}
    labels |= {"cu_seqlens": (None,), "span": (None,), "words": ("rows", head, None)}
    if "dt_bias" in tensors:
        labels["dt_bias"] = (head if tensors["dt_bias"].size == HV else channels,)
    return labels


_OF_HEADS = ("g_gamma", "A_log", "dt_bias")
_HEAD_AXIS = {name: 2 for name in ("q", "k", "v", "p", "g", "gv", "beta", "o", "d_o")}
_HEAD_AXIS |= {name: 1 for name in (*_STATES, "transition", "words")}
_HEAD_AXIS |= {name: 0 for name in _OF_HEADS}
KIND = Kind(INPUTS + ("d_o", "d_final_state", "states", "span"), DIFFERENTIABLE, _labels, _OF_HEADS, _HEAD_AXIS)


def state_shape(settings: Settings, q: jax.Array, v: jax.Array, cu_seqlens: jax.Array | None) -> tuple:
    N = count_sequences(q.shape[0], cu_seqlens)
    K, V = q.shape[-1], v.shape[-1]
    return (N, v.shape[2], V, K) if settings.state_v_first else (N, v.shape[2], K, V)


def state_dtype(q):
    return jnp.float64 if q.dtype == jnp.float64 else jnp.float32


def _forward(settings, tensors, wide):
    """{"o", "final_state"} of the tensors given by name."""
    q, v = tensors["q"], tensors["v"]
    results = [("o", v.shape, q.dtype)]
    if settings.final_state:
        results.append(("final_state", state_shape(settings, q, v, tensors.get("cu_seqlens")), state_dtype(q)))
    if settings.in_words:
        results.append(_words(v))
    return custom_call(KIND, "forward", settings.attributes(), tensors, results, ("o", "final_state", "words"))


def _words(v):
    """The message of an error, repeated for every row and head, so that the call may be divided along them."""
    return "words", (v.shape[0], v.shape[2], _WORDS), jnp.int32


def _backward(settings, wanted, tensors, wide):
    """The gradients by the inputs `wanted`; `tensors` hold d_o or d_final_state or both."""
    return gradients(KIND, "backward", settings.attributes(), wanted, tensors, wide)


def _step(settings, tensors, wide):
    """{"o", "states"} of the tensors given by name, with the states before the step among them."""
    v, states = tensors["v"], tensors["states"]
    results = [("o", v.shape, tensors["q"].dtype), ("states", states.shape, states.dtype)]
    return custom_call(KIND, "step", settings.attributes(), tensors, results, ("o", "states"), in_place=("states",))


operator = differentiable(KIND, ("forward", "backward"), _forward, _backward)


@partial(jax.jit, static_argnums=0)
def step(settings, tensors):
    """_step, which vmap maps; it has no gradient."""
    return mappable(KIND, "step", partial(_step, settings))(tensors)


# ---- pieces of sequences: no gradients of their own, and states K-first ----

def forward(settings, tensors):
    return mappable(KIND, "forward", partial(_forward, settings))(tensors)


def backward(settings, wanted, tensors):
    """The gradients by the inputs `wanted`; tensors hold d_o or d_final_state or both."""
    return mappable(KIND, "backward", partial(_backward, settings, wanted), wanted)(tensors)


def _summarize(settings, shape, tensors, wide):
    k, v = tensors["k"], tensors["v"]
    B, HV, K, V = k.shape[0], v.shape[2], k.shape[3], v.shape[3]
    sizes = {"K K": (K, K), "K": (K,), "1": ()}
    results = [] if shape is None else [("transition", (B, HV, *sizes[shape]), state_dtype(k))]
    results += [("state", (B, HV, K, V), state_dtype(k)), _words(v)]
    return custom_call(KIND, "summarize", settings.attributes(), tensors, results, ("transition", "state", "words"))


def summarize(settings, shape, tensors):
    """{"transition", "state", "words"} of the tokens in `span`, without q.

    shape: what a transition is, "K K", "K" or "1" number; None: it is not wanted. words: the message of an error.
    """
    return mappable(KIND, "summarize", partial(_summarize, settings, shape))(tensors)


def _summarize_backward(settings, tensors, wide):
    k, v = tensors["k"], tensors["v"]
    results = [("d_initial_state", (k.shape[0], v.shape[2], k.shape[3], v.shape[3]), state_dtype(k))]
    return custom_call(KIND, "summarize_backward", settings.attributes(), tensors, results, ("d_initial_state",))


def summarize_backward(settings, tensors):
    """The gradient of the state that enters the tokens in `span`; tensors hold d_o or d_final_state or both."""
    function = partial(_summarize_backward, settings)
    return mappable(KIND, "summarize_backward", function)(tensors)["d_initial_state"]


def _agreement(head_axis: int) -> Kind:
    labels: dict = {"x": tuple({0: "rows", head_axis: "heads"}.get(i) for i in range(4)), "words": (None, None)}
    return Kind(("x", "words"), (), lambda tensors: labels, ("words",), {"x": head_axis, "words": 0})


_AGREEMENTS = {axis: _agreement(axis) for axis in (1, 2)}


def agreed(x, head_axis, words):
    """x of four dimensions, if the words [ranks, words] of no rank say something; else an error that says the first."""
    kind = _AGREEMENTS[head_axis]

    def agree(tensors, wide):
        x = tensors["x"]
        return custom_call(kind, "agree", {"ranks": np.int64(words.shape[0])}, tensors, [("x", x.shape, x.dtype)],
                           ("x",), in_place=("x",))

    return mappable(kind, "agree", agree)(vary_alike({"x": x, "words": words}))["x"]
