"""Contexts that flash-linear-attention has built. They know their own rank only: the ranks tell each other the rest."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from headrace.torch.distributed._context import CPContext, build_cp_context, process_group
from headrace.torch.distributed._exchange import Conversation, ranks_of

_NAMES = ("group", "cu_seqlens", "cu_seqlens_cpu", "conv1d_kernel_size", "pre_num_conv_tokens")


def converted(context: Any) -> CPContext:
    """The context of the same batch; made once for each object, with all ranks."""
    if not all(hasattr(context, name) for name in _NAMES) or context.group is None:
        raise ValueError(f"cp_context: expected a context of build_cp_context, got {type(context).__name__}")
    found = getattr(context, "_of_headrace", None)
    if found is None:
        found = context._of_headrace = _convert(context)
    return found


def _convert(context: Any) -> CPContext:
    ranks = ranks_of(process_group(context.group))
    layout = getattr(context, "layout", "contiguous")
    with Conversation(ranks, "the context of flash-linear-attention") as talk:
        talk.agree({"layout": layout, "conv1d_kernel_size": context.conv1d_kernel_size})
        given = context.cu_seqlens if context.cu_seqlens_cpu is None else context.cu_seqlens_cpu
        local = given.detach().cpu().numpy().astype(np.int64)
        if layout == "zigzag":
            starts, front = context.pre_num_conv_tokens_by_part, context.front_num_seqs
            parts = [local[: front + 1], local[front:] - local[front]]
        else:
            starts, parts = (context.pre_num_conv_tokens,), [local]
        tokens = int(local[-1])
        places = [ranks.rank] if layout != "zigzag" else [ranks.rank, 2 * ranks.size - 1 - ranks.rank]
        borders = set()
        for place, part, before in zip(places, parts, starts):
            begin = place * (tokens // len(places))
            borders |= {begin - before} | set((begin + part[1:-1]).tolist())
        mine = torch.tensor([tokens, len(borders)])
        sizes = [torch.empty_like(mine) for _ in range(ranks.size)]
        for rank in range(ranks.size):
            talk.send(rank, (0,), mine)
            talk.send(rank, (1,), torch.tensor(sorted(borders), dtype=torch.int64))
        for rank in range(ranks.size):
            talk.receive(rank, (0,), sizes[rank])
            if int(sizes[rank][0]) != tokens:
                raise ValueError(f"cp_context: expected {tokens} tokens on every rank, got {int(sizes[rank][0])} on "
                                 f"rank {rank}")
            others = torch.empty(int(sizes[rank][1]), dtype=torch.int64)
            talk.receive(rank, (1,), others)
            borders |= set(others.tolist())
    offsets = torch.tensor(sorted(borders | {0, tokens * ranks.size}))
    return build_cp_context(offsets, context.group, context.conv1d_kernel_size, layout=layout)
