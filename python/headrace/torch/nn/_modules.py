"""The short convolution and the gated norm as modules, with the parameter names of flash-linear-attention."""

from __future__ import annotations

from typing import Optional, Tuple, Union

import torch
from torch import Tensor, nn

from headrace._arguments import checked, flag
from headrace.torch._layer_functions import rms_norm_gated, short_convolution, short_convolution_step

Device = Union[None, str, torch.device]


def _single(x: Tensor, cu_seqlens: Optional[Tensor]) -> bool:
    """Whether every sequence of x [B, T, D] is one token; of offsets on a GPU, whether it can be."""
    if cu_seqlens is None:
        return x.shape[1] == 1
    if cu_seqlens.device.type != "cpu":
        return cu_seqlens.shape == (x.shape[1] + 1,)
    return torch.equal(cu_seqlens, torch.arange(x.shape[1] + 1, dtype=cu_seqlens.dtype, device=cu_seqlens.device))


def _check_like_x(name: str, tensor: Optional[Tensor], shape: torch.Size) -> None:
    if tensor is not None and tensor.shape != shape:
        raise ValueError(f"{name}: expected shape {list(shape)} as x, got {list(tensor.shape)}")


def _plus(y: Tensor, residual: Optional[Tensor]) -> Tensor:
    return y if residual is None else (y + residual).to(y.dtype)


class ShortConvolution(nn.Conv1d):
    """Causal depth-wise convolution along the tokens, and an activation. weight [D, 1, W], bias [D] or None.

    hidden_size: D. kernel_size: W. activation: None, "silu" or its other name "swish". backend changes nothing.
    """

    @checked
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
        chunk_indices: object = None, *, cu_seqlens_cpu: Optional[Tensor] = None, cp_context: object = None,
    ) -> Tuple[Tensor, Optional[Tensor]]:
        """y [B, T, D] = activation(convolution of x) + residual, and the last W inputs [N, D, W], oldest first.

        x, residual: [B, T, D]. mask [B, T]: inputs where it is 0 count as zeros. cache [N, D, W]: the inputs before x;
        where every sequence has one token and autograd is off it is updated in place (in a ragged batch not inside
        torch.compile, and not where cu_seqlens lie on a GPU, whose values are not looked at), and is itself the second
        result, which is None without output_final_state.
        cu_seqlens [N + 1]: a ragged batch, B = 1. chunk_indices and cu_seqlens_cpu are not needed. cp_context: of a
        batch that is cut over ranks (headrace.torch.distributed); the cache has a row for each piece on the rank.
        """
        if cu_seqlens is None and cu_seqlens_cpu is not None:
            raise ValueError("cu_seqlens_cpu: expected together with cu_seqlens, got it alone")
        _check_like_x("residual", residual, x.shape)
        if mask is not None:
            if cu_seqlens is not None or cp_context is not None:
                raise ValueError("mask: expected None in a ragged batch (cu_seqlens, cp_context), got a tensor")
            _check_like_x("mask", mask, x.shape[:2])
            x = x.masked_fill(mask.unsqueeze(-1) == 0, 0)
        output_final_state = flag("output_final_state", output_final_state)
        if cache is not None and cp_context is None:
            self._check_cache(cache, len(x) if cu_seqlens is None else len(cu_seqlens) - 1)
            # Which function is called may not depend on the offsets.
            fixed = cu_seqlens is not None and (torch.compiler.is_compiling() or cu_seqlens.device.type != "cpu")
            if not (fixed or torch.is_grad_enabled() or cache.requires_grad) and _single(x, cu_seqlens):
                return self.step(x, residual, cache, output_final_state, cu_seqlens)
        y, final_state = short_convolution(x, self.weight.squeeze(1), self.bias, cache, output_final_state,
                                           self.activation, cu_seqlens, cp_context=cp_context)
        return _plus(y, residual), final_state

    def step(
        self, x: Tensor, residual: Optional[Tensor], cache: Optional[Tensor], output_final_state: bool = False,
        cu_seqlens: Optional[Tensor] = None, *, indices: Optional[Tensor] = None,
    ) -> Tuple[Tensor, Optional[Tensor]]:
        """(y, cache) of one token of each of N sequences, without autograd; (y, None) without output_final_state.

        x, residual, y: [N, 1, D], [N, D], or with cu_seqlens [1, N, D]. cache [rows, D, W], zeros if None, is updated
        in place either way. indices [N]: the row of each sequence; -1 is padding, whose convolution is zero. Not given:
        row n. Of cu_seqlens on a GPU the size is checked, not the values.
        """
        output_final_state = flag("output_final_state", output_final_state)
        _check_like_x("residual", residual, x.shape)
        tokens = x if cu_seqlens is None else x.transpose(0, 1)
        if cu_seqlens is not None and not (x.dim() == 3 and x.shape[0] == 1 and _single(x, cu_seqlens)):
            offsets = cu_seqlens.tolist() if cu_seqlens.device.type == "cpu" else list(cu_seqlens.shape)
            raise ValueError(f"cu_seqlens: expected one token in each sequence of x [1, N, D], got x {list(x.shape)}, "
                             f"offsets {offsets}")
        if cache is None:
            cache = x.new_zeros(len(tokens), self.hidden_size, self.kernel_size[0])
        self._check_cache(cache, len(tokens) if indices is None else len(cache))
        y = short_convolution_step(tokens, cache, self.weight.squeeze(1), self.bias, self.activation, indices)
        y = _plus(y if cu_seqlens is None else y.transpose(0, 1), residual)
        return y, cache if output_final_state else None

    def _check_cache(self, cache: Tensor, rows: int) -> None:
        """What the functions check too, but under another name."""
        sizes = [rows, self.hidden_size, self.kernel_size[0]]
        if list(cache.shape) != sizes:
            raise ValueError(f"cache: expected shape {sizes}, got {list(cache.shape)}")

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

    @checked
    def __init__(self, hidden_size: int, elementwise_affine: bool = True, eps: float = 1e-5, activation: str = "swish",
                 device: Device = None, dtype: Optional[torch.dtype] = None, groups: int = 1) -> None:
        super().__init__()
        if activation not in ("silu", "swish", "sigmoid"):
            raise ValueError(f"activation: expected 'silu', 'swish' or 'sigmoid', got {activation!r}")
        if hidden_size % groups:
            raise ValueError(f"groups: expected a divisor of hidden_size {hidden_size}, got {groups}")
        self.hidden_size, self.eps, self.activation, self.groups = hidden_size, eps, activation, groups
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype)) if elementwise_affine else None

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def forward(
        self, x: Tensor, g: Optional[Tensor] = None, residual: Optional[Tensor] = None, prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Union[Tensor, Tuple[Tensor, Tensor]]:
        """y of s = x + residual, with prenorm (y, s), as rms_norm_gated. x, g, residual: [..., hidden_size]."""
        if self.groups == 1:
            return rms_norm_gated(x, g, self.weight, None, self.activation, residual, prenorm, residual_in_fp32,
                                  self.eps)
        sizes = -1, self.hidden_size // self.groups
        g, residual = (t if t is None else t.unflatten(-1, sizes) for t in (g, residual))
        y, s = rms_norm_gated(x.unflatten(-1, sizes), g, None, None, self.activation, residual, True, residual_in_fp32,
                              self.eps)
        y, s = y.flatten(-2), s.flatten(-2)
        y = y if self.weight is None else y * self.weight.to(y.dtype)
        return (y, s) if flag("prenorm", prenorm) else y

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, activation={self.activation}, groups={self.groups}"


FusedRMSNormGated = RMSNormGated
