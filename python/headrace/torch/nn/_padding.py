"""Padded batches as ragged ones: the operators never see padding."""

from __future__ import annotations

from typing import Optional, Tuple

import torch.nn.functional as F
from torch import Tensor

Maybe = Optional[Tensor]


def unpad(x: Tensor, attention_mask: Maybe, cu_seqlens: Maybe) -> Tuple[Tensor, Maybe, Maybe]:
    """(x, cu_seqlens, places): the tokens [1, total, D] of x [B, T, D] that the mask [B, S >= T] keeps (not 0), N = B.

    The mask's last T columns belong to x, the others to earlier calls. places [total] are the tokens' places in B*T,
    None where x comes back as it is: without padding, or with cu_seqlens, which go before the mask. The number of
    tokens is read from the mask: the host waits for one on a GPU.
    """
    if attention_mask is None or cu_seqlens is not None:
        return x, cu_seqlens, None
    B, T = x.shape[:2]
    if attention_mask.dim() != 2 or attention_mask.shape[0] != B or attention_mask.shape[1] < T:
        raise ValueError(f"attention_mask: expected shape [{B}, at least {T}], 0 for padding, got "
                         f"{list(attention_mask.shape)}")
    kept = attention_mask[:, attention_mask.shape[1] - T :] != 0
    if kept.all():
        return x, None, None
    places = kept.flatten().nonzero().squeeze(1)
    return take(x, places), F.pad(kept.sum(1).cumsum(0), (1, 0)), places


def take(x: Tensor, places: Maybe) -> Tensor:
    """The tokens at `places`, [1, total, D]."""
    return x if places is None else x.flatten(0, 1).index_select(0, places).unsqueeze(0)


def repad(o: Tensor, places: Maybe, B: int, T: int) -> Tensor:
    """Tokens [1, total, D] back at their places in [B, T, D], zeros elsewhere."""
    return o if places is None else o.new_zeros(B * T, o.shape[-1]).index_copy(0, places, o[0]).view(B, T, -1)
