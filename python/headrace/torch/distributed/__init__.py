"""Sequences cut over the ranks of a torch.distributed group (context parallelism)."""

from headrace.torch.distributed import _operators  # noqa: F401
from headrace.torch.distributed._context import CPContext, build_cp_context
from headrace.torch.distributed._exchange import Traffic, traffic

__all__ = ["CPContext", "Traffic", "build_cp_context", "traffic"]
