"""Calls of headrace.jax.distributed beside the same call on one device, which tests run in processes of their own."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import headrace.jax as hj
from headrace.jax.distributed import cp_attention, cp_short_convolution

OPERATORS = {"linear_attention": (), "retention": ("g_gamma",), "simple_gla": ("g", "g_gamma"), "gla": ("gk",),
             "delta_rule": ("beta",), "gated_delta_rule": ("g", "beta"), "comba": ("p", "g", "beta"),
             "kda": ("gk", "beta")}
TOKENS = ("q", "k", "v", "p", "g", "gv", "beta", "x")
BARS, BITS = (1e-13, 1e-13, 1e-13), (0, 0, 0)
T = 48
# Of 48 tokens: head and tail of the sequence on each rank; uneven and an empty rank; any, of several ranges.
ZIGZAG = [[(6 * r, 6 * r + 6), (42 - 6 * r, 48 - 6 * r)] for r in range(4)]
UNEVEN = [[(0, 5)], [(5, 21)], [], [(21, 48)]]
SCATTERED = [[(30, 48)], [(0, 13)], [(13, 20), (25, 30)], [(20, 25)]]
PACKED = [0, 0, 5, 5, 30, 44, 48, 48]  # empty sequences too; one fills a rank


def attention_tensors(op, B=2, N=None, H=2, HV=4, K=8, V=12, dtype=np.float64, gate=False, tokens=T):
    draw = np.random.default_rng(0)
    shapes = {name: (B, tokens, H, K) for name in "qkp"} | {"v": (B, tokens, HV, V)}
    drawn = {name: draw.standard_normal(shape) for name, shape in shapes.items()}
    for name in "kp":
        drawn[name] /= np.linalg.norm(drawn[name], axis=-1, keepdims=True)
    drawn |= {"g": -draw.random((B, tokens, HV)) / 4, "gk": -draw.random((B, tokens, HV, K)) / 4,
              "g_gamma": -draw.random(HV) / 8, "beta": draw.random((B, tokens, HV))}
    names = ("q", "k", "v", *OPERATORS[op])
    tensors = {"g" if name == "gk" else name: drawn[name] for name in names}
    tensors["initial_state"] = draw.standard_normal((N or B, HV, K, V))
    if gate:
        tensors |= {"A_log": draw.standard_normal(HV) / 2, "dt_bias": draw.standard_normal(tensors["g"][0, 0].size) / 2}
    return {name: np.array(jnp.asarray(x, dtype if name in "qkvp" or dtype == np.float64 else np.float32))
            for name, x in tensors.items()}


class Division:
    """The order in which ranks have the tokens, and which places are padding."""

    def __init__(self, ranges, ranks, tokens):
        if ranges is None:
            ranges = [[(r * tokens // ranks, (r + 1) * tokens // ranks)] for r in range(ranks)]
        size = max(sum(end - begin for begin, end in row) for row in ranges)
        self.places = np.full((ranks, size), -1)
        for row, own in zip(self.places, ranges):
            tokens = [t for begin, end in own for t in range(begin, end)]
            row[:len(tokens)] = tokens
        self.places = self.places.reshape(-1)

    def laid(self, name, x, padding=0.0):
        """x [B, T, ...] as the ranks have it."""
        if name not in TOKENS:
            return x
        is_token = (self.places >= 0).reshape(1, -1, *[1] * (x.ndim - 2))
        return np.where(is_token, x[:, np.maximum(self.places, 0)], np.asarray(padding, x.dtype))


def distance(actual, expected):
    """Of the parts that this process has: the norm of what differs over that of the whole."""
    expected = np.asarray(expected, np.float64)
    parts = [np.asarray(shard.data, np.float64) - expected[shard.index] for shard in actual.addressable_shards]
    return max(np.linalg.norm(x) for x in parts) / max(np.linalg.norm(expected), 1e-300)


def compare(cp, one, tensors, ranges=None, offsets=None, check=True, ranks=4, bars=BARS, exact=None):
    """Outputs and all gradients of `cp`, a function of a rank's tensors and offsets, beside those of `one`, of all.

    exact: the tensors for `one`, if others than `tensors`. Returns the compiled program.
    """
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("t",))
    spec = {name: P(None, "t") if name in TOKENS else P() for name in tensors}
    division = Division(ranges, ranks, tensors[next(n for n in tensors if n in TOKENS)].shape[1])
    exact = {name: jnp.asarray(x) for name, x in (exact or tensors).items()}
    offsets = np.asarray([0], np.int32) if offsets is None else np.asarray(offsets, np.int32)
    expected, pull = jax.vjp(lambda t: one(t, None if offsets.size == 1 else jnp.asarray(offsets)), exact)
    draw = np.random.default_rng(7)
    weights = [draw.standard_normal(x.shape).astype(np.float32) for x in expected]
    gradients = pull(tuple(jnp.asarray(w, x.dtype) for w, x in zip(weights, expected)))[0]
    weights[0] = division.laid("q", weights[0], padding=3.0)  # what comes to padding does not matter

    def both(tensors, offsets, weights):
        def of_rank(tensors, offsets):
            o, state = cp(tensors, None if offsets.shape[0] == 1 else offsets)
            return o, state[None]
        mapped = jax.shard_map(of_rank, mesh=mesh, in_specs=(spec, P()), out_specs=(P(None, "t"), P("t")),
                               check_vma=check)
        (o, states), pull = jax.vjp(lambda t: mapped(t, offsets), tensors)
        everywhere = jnp.broadcast_to(weights[1], states.shape)
        return (o, states.sum(0)), pull((weights[0].astype(o.dtype), everywhere.astype(states.dtype)))[0]

    def on_mesh(x, spec):
        return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])

    laid = {name: on_mesh(division.laid(name, x), spec[name]) for name, x in tensors.items()}
    given = laid, on_mesh(offsets, P()), [on_mesh(weights[0], P(None, "t")), on_mesh(weights[1], P())]
    shardings = {name: NamedSharding(mesh, x) for name, x in spec.items()}
    results = (NamedSharding(mesh, P(None, "t")), NamedSharding(mesh, P())), shardings
    compiled = jax.jit(both, out_shardings=results).lower(*given).compile()
    outputs, found = compiled(*given)
    for actual, x in zip(outputs, (division.laid("q", np.asarray(expected[0])), expected[1])):
        assert distance(actual, x) <= bars[0]
    for name, x in found.items():
        assert x.dtype == tensors[name].dtype
        bar = bars[1] if name in ("q", "k", "v", "p", "x", "initial_state") else bars[2]
        assert distance(x, division.laid(name, np.asarray(gradients[name]))) <= bar, name
    return compiled


def compare_attention(op, ranges=None, offsets=None, check=True, ranks=4, bars=BARS, exchange="auto",
                      strategy="summary", change=lambda tensors: None, options=None, dtype=np.float64, **sizes):
    options = options or {}
    gate = options.get("gate_form", "log_decay") != "log_decay"
    if offsets is not None:
        sizes |= {"B": 1, "N": len(offsets) - 1}
    tensors = attention_tensors(op, dtype=dtype, gate=gate, **sizes)
    change(tensors)

    def cp(tensors, offsets):
        return cp_attention(op, **tensors, axis_name="t", token_ranges=ranges, cu_seqlens=offsets, exchange=exchange,
                            strategy=strategy, output_final_state=True, **options)

    def one(tensors, offsets):
        return hj.attention(op, **tensors, cu_seqlens=offsets, output_final_state=True, **options)

    exact = None if bars == BITS else {name: x.astype(np.float64) for name, x in tensors.items()}
    return compare(cp, one, tensors, ranges, offsets, check, ranks, bars, exact)


def compare_convolution(W, ranges=None, offsets=None, check=True, ranks=4, tokens=T, B=2, D=5, state=True):
    draw = np.random.default_rng(0)
    B, N = (B, B) if offsets is None else (1, len(offsets) - 1)
    tensors = {"x": draw.standard_normal((B, tokens, D)), "weight": draw.standard_normal((D, W)),
               "bias": draw.standard_normal(D)}
    if state:
        tensors["initial_state"] = draw.standard_normal((N, D, W))

    def cp(tensors, offsets):
        return cp_short_convolution(**tensors, axis_name="t", token_ranges=ranges, cu_seqlens=offsets,
                                    activation="silu", output_final_state=True)

    def one(tensors, offsets):
        return hj.short_convolution(**tensors, cu_seqlens=offsets, activation="silu", output_final_state=True)

    return compare(cp, one, tensors, ranges, offsets, check, ranks)
