"""Many processes of torch.distributed: sequences cut over ranks (context parallelism), heads cut over them (tensor
parallelism)."""

from headrace.torch.distributed import _operators  # noqa: F401
from headrace.torch.distributed._context import CPContext, build_cp_context
from headrace.torch.distributed._exchange import Traffic, traffic
from headrace.torch.distributed._gather import gather_final_states, shard, unshard
from headrace.torch.distributed._tensor_parallel import tensor_parallel_plan

__all__ = ["CPContext", "Traffic", "build_cp_context", "gather_final_states", "shard", "tensor_parallel_plan",
           "traffic", "unshard"]
