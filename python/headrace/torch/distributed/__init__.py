"""Sequences cut over the ranks of a torch.distributed group (context parallelism)."""

from headrace.torch.distributed import _operators  # noqa: F401
from headrace.torch.distributed._context import CPContext, build_cp_context
from headrace.torch.distributed._exchange import Traffic, traffic
from headrace.torch.distributed._gather import gather_final_states, shard, unshard

__all__ = ["CPContext", "Traffic", "build_cp_context", "gather_final_states", "shard", "traffic", "unshard"]
