"""Context parallelism in JAX: operators on sequences whose tokens are divided over devices, inside jax.shard_map.

    from jax import shard_map
    from headrace.jax.distributed import cp_attention, cp_short_convolution

    def layer(q, k, v, g, beta):                       # this device's tokens
        return cp_attention("gated_delta_rule", q, k, v, g=g, beta=beta, axis_name="sequence")[0]

    tokens = PartitionSpec(None, "sequence")
    o = jax.jit(shard_map(layer, mesh=mesh, in_specs=tokens, out_specs=tokens))(q, k, v, g, beta)

Every rank, one of the devices along the mesh axis `axis_name`, has some of the tokens of every sequence: a part of
equal length, in the order of the ranks, or those of `token_ranges`, a list of (begin, end) for each rank in which every
token stands once; what arrays have beyond a rank's ranges is padding. cu_seqlens [N + 1] are global: those of all
ranks' tokens together, the same on every rank. initial_state [N, ...] is read where a sequence starts; the final state
[N, ...] is true on the rank where a sequence stops and 0 on the others, so that their sum is that of all. Gradients go
through both, and to g_gamma, A_log, dt_bias and convolution weights as sums over this rank's tokens, which shard_map
adds where the array is not divided. All ranks must make the same calls.
"""

from headrace.jax.distributed._functions import cp_attention, cp_short_convolution  # noqa: F401

__all__ = ["cp_attention", "cp_short_convolution"]
