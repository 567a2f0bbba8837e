"""Tensor parallelism: each rank holds some heads of a layer and computes them; outputs are summed over the ranks."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from headrace.torch.nn import LightningAttention, RMSNormGated, ShortConvolution
from headrace.torch.nn._layer import Layer

# Parameters whose first dimension runs over heads, or channels head by head. Every part of a layer has its own.
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "g_proj", "a_proj", "b_proj", "gk_proj", "f_proj.1", "g_proj.1",
                "gk_proj.1")
_CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")
_BY_HEADS = {"A_log", "dt_bias", "decay", "D",
             *(f"{module}.{name}" for module in _PROJECTIONS + _CONVOLUTIONS for name in ("weight", "bias"))}
# Those that all heads share: the narrow inside of projections of low rank, norms over a head's channels.
_SHARED = {f"{name}.weight" for name in ("f_proj.0", "g_proj.0", "gk_proj.0", "q_norm", "k_norm", "o_norm", "g_norm",
                                         "g_norm_swish_gate")}
_HEAD_COUNTS = ("num_heads", "num_v_heads", "num_kv_heads")


def tensor_parallel_plan(layer: nn.Module, *, input_layouts: Placement = Replicate(),
                         output_layouts: Placement = Replicate(), use_local_output: bool = True) -> ParallelStyle:
    """How a layer of headrace.torch.nn is cut by heads: a style for torch.distributed.tensor.parallel.

        parallelize_module(layer, mesh["tp"], tensor_parallel_plan(layer))
        parallelize_module(block, mesh["tp"], {"attention": tensor_parallel_plan(block.attention), ...})

    Every rank gets the rows of the projections, convolutions, gates and decays that belong to its heads, and the
    columns of o_proj; the parameters become DTensors. Its heads run as a plain layer of fewer heads would, from a Cache
    of its own. One all-reduce of the outputs in the forward, one of the input's gradient in the backward, and small
    ones for the gradients of parameters that heads share.

    input_layouts, output_layouts: of hidden_states and o [B, T, hidden_size] on the mesh, Replicate() or Shard(1)
    (parts of the tokens, as between layers of sequence parallelism: an all-gather and a reduce-scatter). hidden_states
    may be a DTensor; o is one with use_local_output=False. fully_shard comes afterwards, on the layer or on what
    contains it.

    Raises TypeError for another module; applying it raises ValueError where the ranks do not divide the heads (of
    queries, of values, or num_kv_heads), or the groups of a norm over all of them.
    """
    if not isinstance(layer, Layer):
        raise TypeError(f"layer: expected a layer of headrace.torch.nn, got a {type(layer).__name__}")
    for name, layout in (("input_layouts", input_layouts), ("output_layouts", output_layouts)):
        if layout not in (Replicate(), Shard(1)):
            raise ValueError(f"{name}: expected Replicate() or Shard(1), got {layout!r}")
    return _ByHeads(input_layouts, output_layouts, use_local_output)


class _ByHeads(ParallelStyle):
    """The style: it cuts a layer's parameters, and has its forward run on this rank's parts of them."""

    def __init__(self, input_layout: Placement, output_layout: Placement, use_local_output: bool) -> None:
        self.input_layout, self.output_layout, self.use_local_output = input_layout, output_layout, use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, Layer):
            raise TypeError(f"layer: expected a layer of headrace.torch.nn, got a {type(module).__name__}")
        _check(module, device_mesh)
        for name, parameter in list(module.named_parameters()):
            placement = _placement(module, name)
            cut = distribute_tensor(parameter.detach(), device_mesh, [placement], src_data_rank=self.src_data_rank)
            owner, _, last = name.rpartition(".")
            cut_parameter = nn.Parameter(cut, parameter.requires_grad)
            cut_parameter.__dict__.update(parameter.__dict__)  # marks such as _no_weight_decay
            module.get_submodule(owner).register_parameter(last, cut_parameter)
        for part in module.modules():
            if isinstance(part, ShortConvolution):
                part.hidden_size //= device_mesh.size()
        if isinstance(module, LightningAttention):
            _cut_lightning(module, device_mesh)
        region = _Region(device_mesh, self.input_layout, self.output_layout, self.use_local_output)
        module.register_forward_pre_hook(region.enter, with_kwargs=True)
        module.register_forward_hook(region.leave, always_call=True)
        return module


def _check(layer: Layer, mesh: DeviceMesh) -> None:
    if mesh.ndim != 1:
        raise ValueError(f"device_mesh: expected 1 dimension, got {mesh.ndim}: {mesh}")
    ranks = mesh.size()
    for name in _HEAD_COUNTS:
        count = getattr(layer, name, 0)
        if count % ranks:
            raise ValueError(f"{name}: expected a multiple of the {ranks} ranks of tensor parallelism, got {count}")
    for name, parameter in layer.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(f"{name}: expected a parameter that is not distributed yet, got a DTensor")
        _placement(layer, name)
    if isinstance(layer, LightningAttention) and layer.g_norm.groups != 1 and layer.g_norm.groups % ranks:
        raise ValueError(f"norm_groups: expected 1 or a multiple of the {ranks} ranks of tensor parallelism, got "
                         f"{layer.g_norm.groups}")


def _placement(layer: Layer, name: str) -> Placement:
    """That of a layer's parameter."""
    if name == "o_proj.weight":
        return Shard(1)
    if name in _BY_HEADS or (name == "g_norm.weight" and isinstance(layer, LightningAttention)):
        return Shard(0)
    if name in _SHARED:
        return Replicate()
    raise ValueError(f"{name}: expected the parameters of {type(layer).__name__} alone, got one that is not known to "
                     "belong to heads or to all of them")


def _cut_lightning(layer: LightningAttention, mesh: DeviceMesh) -> None:
    """The decays of this rank's heads, and a norm over the channels of all heads."""
    count = layer.num_heads // mesh.size()
    layer.own_heads = slice(mesh.get_local_rank() * count, (mesh.get_local_rank() + 1) * count)
    layer.g_gamma = distribute_tensor(layer.g_gamma, mesh, [Shard(0)], src_data_rank=None)  # the same on every rank
    if layer.g_norm.groups == 1:
        layer.g_norm = _NormOverRanks(layer.g_norm, mesh)  # type: ignore[assignment]


class _Region:
    """The hooks around a layer's forward, inside which it sees its own part of every parameter."""

    def __init__(self, mesh: DeviceMesh, input_layout: Placement, output_layout: Placement,
                 use_local_output: bool) -> None:
        self.mesh, self.use_local_output = mesh, use_local_output
        self.input_layout, self.output_layout = input_layout, output_layout
        self.whole: List[Tuple[Dict[str, Any], str, Any]] = []

    def enter(self, layer: nn.Module, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Tuple[tuple, dict]:
        """Puts the parts in the places of parameters and buffers; hidden_states becomes plain, and whole."""
        holders: List[Dict[str, Any]] = [tensors for module in layer.modules()
                                         for tensors in (module._parameters, module._buffers)]
        whole = [(tensors, name, x) for tensors in holders for name, x in tensors.items() if x is not None]
        parts = [self._part(name, x) for _, name, x in whole]
        if args:
            args = (self._input(args[0]), *args[1:])
        elif "hidden_states" in kwargs:
            kwargs = kwargs | {"hidden_states": self._input(kwargs["hidden_states"])}
        for (tensors, name, _), part in zip(whole, parts):
            tensors[name] = part
        self.whole = whole
        return args, kwargs

    def leave(self, layer: nn.Module, args: Tuple[Any, ...], output: Optional[tuple]) -> Optional[tuple]:
        """Puts the parameters back, also after an error, and adds up the outputs of all ranks."""
        for tensors, name, x in self.whole:
            tensors[name] = x
        self.whole = []
        return None if output is None else (self._output(output[0]), *output[1:])

    def _part(self, name: str, x: Any) -> Tensor:
        """This rank's part. Of what all heads share each rank's heads have a part of the gradient."""
        if not isinstance(x, DTensor) or x.device_mesh != self.mesh:
            raise ValueError(f"{name}: expected a DTensor on the mesh of tensor parallelism, got "
                             f"{getattr(x, 'device_mesh', 'a plain tensor')} (fully_shard the whole layer, "
                             "or what contains it)")
        if x.placements[0] != Replicate():
            return x.to_local()
        return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def _input(self, x: Tensor) -> Tensor:
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, self.mesh, [self.input_layout], run_check=False)
        elif x.device_mesh != self.mesh:
            raise ValueError(f"hidden_states: expected a DTensor on {self.mesh}, got {x.device_mesh}")
        return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def _output(self, o: Tensor) -> Tensor:
        if self.output_layout != Replicate() and o.shape[1] % self.mesh.size():
            raise ValueError(f"hidden_states: expected a number of tokens that the {self.mesh.size()} ranks divide, "
                             f"got {o.shape[1]}")
        summed = DTensor.from_local(o, self.mesh, [Partial()], run_check=False).redistribute(
            placements=[self.output_layout])
        return summed.to_local() if self.use_local_output else summed


class _NormOverRanks(nn.Module):
    """An RMSNormGated of which every rank has a part of the channels: the sums of squares are added up."""

    def __init__(self, norm: RMSNormGated, mesh: DeviceMesh) -> None:
        super().__init__()
        assert norm.weight is not None
        self.weight, self.hidden_size, self.groups = norm.weight, norm.hidden_size, norm.groups
        self.eps, self.activation, self.mesh = norm.eps, norm.activation, mesh

    def forward(self, x: Tensor, g: Tensor) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight * activation(g), as rms_norm_gated."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = DTensor.from_local(wide.square().sum(-1, keepdim=True), self.mesh, [Partial()], run_check=False)
        mean = squares.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]) / self.hidden_size
        gate = g.to(wide.dtype)
        gate = torch.sigmoid(gate) if self.activation == "sigmoid" else F.silu(gate)
        return (wide * torch.rsqrt(mean + self.eps) * self.weight * gate).to(x.dtype)
