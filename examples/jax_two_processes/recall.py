"""A sequence over several JAX processes: a layer learns to recall what stood in the half that another process has.

usage, at the same time for every RANK from 0 to RANKS - 1, on one machine or several:
    python examples/jax_two_processes/recall.py RANK RANKS HOST:PORT     (HOST: the machine of rank 0; any free PORT)

The first half of a sequence are pairs of a key and a value, the second half asks for values by their keys. With two
processes the answers are in the other one: what crosses is a state for each head, and three inputs of a convolution.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.example_libraries.optimizers import adam
from jax.sharding import NamedSharding, PartitionSpec

from headrace.jax import rms_norm_gated
from headrace.jax.distributed import cp_attention, cp_short_convolution

BATCH, TOKENS, KEYS, VALUES = 8, 256, 32, 16
HEADS, K, V, WIDTH, STEPS = 2, 32, 32, 64, 41
LENGTH = PartitionSpec(None, "length")  # tokens are divided, [B, T, ...]


def sequences(seed):
    """keys, values, is_question [B, T]: what is written in the first half is asked for in the second."""
    draw = np.random.default_rng(seed)
    memory = draw.integers(VALUES, size=(BATCH, KEYS))
    keys = np.concatenate([draw.permuted(np.tile(np.arange(KEYS), (BATCH, TOKENS // 2 // KEYS)), axis=1)
                           for _ in range(2)], axis=1)
    is_question = np.broadcast_to(np.arange(TOKENS) >= TOKENS // 2, keys.shape)
    return keys, np.take_along_axis(memory, keys, 1), is_question


def initial_parameters():
    draw = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(draw.standard_normal(shape) / np.sqrt(shape[0]), jnp.float32)  # noqa: E731
    return {"key": normal(KEYS, WIDTH), "value": normal(VALUES, WIDTH), "qk": normal(WIDTH, HEADS * K),
            "v": normal(WIDTH, HEADS * V), "beta": jnp.zeros(HEADS), "A_log": jnp.zeros(HEADS) - 4,
            "convolution": 0.1 * normal(WIDTH, 4), "out": normal(HEADS * V, VALUES)}


def answers(parameters, keys, values, is_question):
    """Logits [B, T, VALUES] of this process's tokens."""
    p = parameters
    split = lambda x: x.reshape(*x.shape[:2], HEADS, -1)  # noqa: E731
    x = p["key"][keys]
    x = x + cp_short_convolution(x, p["convolution"], activation="silu", axis_name="length")[0]
    written = jnp.where(is_question, 0.0, 1.0)[..., None]
    qk, v = split(x @ p["qk"]), split((p["value"][values] * written) @ p["v"])
    beta = jax.nn.sigmoid(p["beta"]) * written  # a question writes nothing
    o, _ = cp_attention("gated_delta_rule", qk, qk, v, g=jnp.zeros_like(beta), A_log=p["A_log"], gate_form="softplus",
                        beta=beta, qk_l2norm=True, axis_name="length")
    o = rms_norm_gated(o, eps=1e-5)
    return o.reshape(*o.shape[:2], -1) @ p["out"]


def loss(parameters, keys, values, is_question):
    """(mean cross entropy, share of right answers) over the questions of all processes."""
    logits = answers(parameters, keys, values, is_question)
    entropy = -jnp.take_along_axis(jax.nn.log_softmax(logits), values[..., None], -1)[..., 0]
    sums = [jnp.sum(jnp.where(is_question, x, 0)) for x in (entropy, logits.argmax(-1) == values, 1.0)]
    total, right, count = jax.lax.psum(jnp.stack(sums), "length")
    return total / count, right / count


def main(rank, ranks, address):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, ranks, rank)
    mesh = jax.make_mesh((ranks,), ("length",))
    global_loss = jax.shard_map(loss, mesh=mesh, in_specs=(PartitionSpec(), LENGTH, LENGTH, LENGTH),
                                out_specs=PartitionSpec())
    initialise, update, parameters_of = adam(0.005)

    @partial(jax.jit, donate_argnums=1)
    def train(step, state, batch):
        (value, right), gradients = jax.value_and_grad(global_loss, has_aux=True)(parameters_of(state), *batch)
        return value, right, update(step, gradients, state)

    def divided(x):
        return jax.make_array_from_callback(x.shape, NamedSharding(mesh, LENGTH), lambda index: x[index])

    state = initialise(initial_parameters())
    for step in range(STEPS):
        value, right, state = train(step, state, [divided(x) for x in sequences(step)])
        if rank == 0 and (step % 10 == 0):
            print(f"step {step:3}   loss {value:.3f}   {100 * right:3.0f} % recalled from the other half", flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
