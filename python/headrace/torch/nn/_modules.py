"""The short convolution and the gated norm as modules, with the parameter names of flash-linear-attention."""

from __future__ import annotations

from typing import Any, Optional, Tuple, Union

import torch
from torch import Tensor, nn

from headrace.torch._layer_functions import gated_norm, short_convolution, short_convolution_step


Device = Union[None, str, torch.device]


def steps_in_place(x: Tensor, state: Tensor, keep: bool, cu_seqlens: Optional[Tensor]) -> bool:
    """Whether x [B, T, ...] is one token after a state that may be overwritten, because no gradient needs it."""
    return (keep and x.shape[1] == 1 and cu_seqlens is None and not torch.is_grad_enabled()
            and not state.requires_grad)


class ShortConvolution(nn.Conv1d):
    """Causal depth-wise convolution along the tokens, and an activation. weight [D, 1, W], bias [D] or None.

    hidden_size: D. kernel_size: W. activation: None, "silu" or its other name "swish". backend changes nothing.
    """

    def __init__(self, hidden_size: int, kernel_size: int, bias: bool = False, activation: Optional[str] = "silu",
                 backend: Optional[str] = "triton", device: Device = None,
                 dtype: Optional[torch.dtype] = None) -> None:
        if activation not in (None, "silu", "swish"):
            raise ValueError(f"activation: expected None, 'silu' or 'swish', got {activation!r}")
        super().__init__(hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=bias,
                         device=device, dtype=dtype)
        self.hidden_size = hidden_size
        self.activation = activation

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Optional[Tensor] = None, mask: Optional[Tensor] = None,
        cache: Optional[Tensor] = None, output_final_state: bool = False, cu_seqlens: Optional[Tensor] = None,
        **kwargs: Any,
    ) -> Tuple[Tensor, Optional[Tensor]]:
        """y [B, T, D] = activation(convolution of x) + residual, and the last W inputs [N, D, W], oldest first.

        x, residual: [B, T, D]. mask [B, T]: inputs where it is 0 count as zeros. cache [N, D, W]: the inputs before x.
        The second result is None without output_final_state; it is `cache` itself, updated in place, where x is one
        token and autograd is off. cu_seqlens [N + 1]: a ragged batch, B = 1.
        """
        if mask is not None:
            if cu_seqlens is not None:
                raise ValueError("mask: expected None in a ragged batch (cu_seqlens), got a tensor")
            x = x.masked_fill(mask.unsqueeze(-1) == 0, 0)
        if cache is not None and steps_in_place(x, cache, output_final_state, cu_seqlens):
            y = self.step(x, cache)
            final_state: Optional[Tensor] = cache
        else:
            y, final_state = short_convolution(x, self.weight.squeeze(1), self.bias, cache, output_final_state,
                                               self.activation, cu_seqlens)
        return (y if residual is None else y + residual), final_state

    def step(self, x: Tensor, cache: Tensor, indices: Optional[Tensor] = None) -> Tensor:
        """y of one token, x [N, D] or [N, 1, D]. cache [rows, D, W] is updated in place, without autograd.

        indices [N]: the row of each sequence; -1 is padding, whose y is zero. Not given: row n.
        """
        return short_convolution_step(x, cache, self.weight.squeeze(1), self.bias, self.activation, indices)

    @property
    def state_size(self) -> int:
        return self.hidden_size * self.kernel_size[0]

    def extra_repr(self) -> str:
        return (f"{self.hidden_size}, kernel_size={self.kernel_size[0]}, bias={self.bias is not None}, "
                f"activation={self.activation}")


class RMSNormGated(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight * activation(g), over the last dimension. weight [hidden_size] or None.

    activation: "silu" (also "swish") or "sigmoid". groups: the mean is taken over each of so many equal parts of x.
    """

    def __init__(self, hidden_size: int, elementwise_affine: bool = True, eps: float = 1e-5, activation: str = "swish",
                 device: Device = None, dtype: Optional[torch.dtype] = None, groups: int = 1) -> None:
        super().__init__()
        if activation not in ("silu", "swish", "sigmoid"):
            raise ValueError(f"activation: expected 'silu', 'swish' or 'sigmoid', got {activation!r}")
        if hidden_size % groups:
            raise ValueError(f"groups: expected a divisor of hidden_size {hidden_size}, got {groups}")
        self.hidden_size, self.eps, self.activation, self.groups = hidden_size, eps, activation, groups
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype)) if elementwise_affine else None

    def forward(self, x: Tensor, g: Optional[Tensor] = None) -> Tensor:
        """x, g: [..., hidden_size]; without g a plain RMS norm."""
        if self.groups == 1:
            return gated_norm(x, g, self.weight, self.activation, self.eps)
        sizes = self.groups, self.hidden_size // self.groups
        gate = None if g is None else g.unflatten(-1, sizes)
        y = gated_norm(x.unflatten(-1, sizes), gate, None, self.activation, self.eps).flatten(-2)
        return y if self.weight is None else y * self.weight.to(y.dtype)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, activation={self.activation}, groups={self.groups}"


FusedRMSNormGated = RMSNormGated
