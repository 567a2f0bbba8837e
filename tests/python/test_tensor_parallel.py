"""Layers cut by heads over ranks equal the layer of one rank: outputs, every gradient, decoding."""

import copy
from functools import cache

import pytest
import torch
from conftest import make_problem, relative_error
from layers import HIDDEN, LAYERS, make
from ranks import group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import headrace.torch.nn as hn
from headrace.torch import chunk_gated_delta_rule
from headrace.torch.distributed import tensor_parallel_plan

BAR = 1e-11  # float64; sums over ranks have another order


@cache
def mesh():
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def cut(layer, **layouts):
    layer = copy.deepcopy(layer)
    return parallelize_module(layer, mesh(), tensor_parallel_plan(layer, **layouts))


def same_gradients(parallel, layer):
    names = [name for name, _ in layer.named_parameters()]
    assert names == [name for name, _ in parallel.named_parameters()]
    for name, parameter in parallel.named_parameters():
        gradient, expected = parameter.grad, layer.get_parameter(name).grad
        assert gradient.placements == parameter.placements, name
        assert relative_error(gradient.full_tensor(), expected) < BAR, name


def every_layer(ranks):
    for name in (*LAYERS, "lightning_norm_groups"):
        if name == "lightning_grouped":
            continue  # its three groups: see errors()
        if name == "lightning_norm_groups":
            layer = hn.LightningAttention(HIDDEN, 6, 16, 2, num_layers=3, layer_idx=1, activation="silu", qk_norm=True,
                                          norm_groups=2).double()
        else:
            layer = make(name).double()
        parallel = cut(layer)
        x, d_o = torch.randn(2, 2, 15, HIDDEN, dtype=torch.float64)
        mask = torch.ones(2, 15)
        mask[0, :4] = 0
        for given in ({}, {"attention_mask": mask}, {"cu_seqlens": torch.tensor([0, 4, 15])}):
            x, d_o = (x[:1], d_o[:1]) if "cu_seqlens" in given else (x, d_o)
            layer.zero_grad()
            parallel.zero_grad()
            mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
            o, expected = parallel(mine, **given)[0], layer(theirs, **given)[0]
            assert type(o) is torch.Tensor and relative_error(o, expected) < BAR, name
            o.backward(d_o)
            expected.backward(d_o)
            assert relative_error(mine.grad, theirs.grad) < BAR, name
            same_gradients(parallel, layer)


def what_is_sent(ranks):
    """One all-reduce of the outputs, one of the input's gradient, one of each small gradient that heads share."""
    parallel = make("gated_deltanet_grouped")
    assert parallelize_module(parallel, mesh(), {"": tensor_parallel_plan(parallel)}) is parallel
    with CommDebugMode() as forward:
        o = parallel(torch.randn(2, 15, HIDDEN, requires_grad=True))[0]
    with CommDebugMode() as backward:
        o.sum().backward()
    assert forward.get_total_counts() == 1 and backward.get_total_counts() == 2  # x and o_norm.weight
    held = {name: tuple(p.to_local().shape) for name, p in parallel.named_parameters()}
    assert held["q_proj.weight"] == (16, HIDDEN) and held["v_proj.weight"] == (32, HIDDEN)
    assert held["o_proj.weight"] == (HIDDEN, 32) and held["A_log"] == held["dt_bias"] == (2,)
    assert held["v_conv1d.weight"] == (32, 1, 4) and held["v_conv1d.bias"] == (32,) and held["o_norm.weight"] == (16,)
    assert parallel.A_log._no_weight_decay and parallel.dt_bias._no_weight_decay


def layouts(ranks):
    """Tokens that arrive and leave in parts, DTensors in and out, by name."""
    layer = make("kda").double()
    x, d_o = torch.randn(2, 2, 16, HIDDEN, dtype=torch.float64)
    expected_x = x.clone().requires_grad_()
    expected = layer(expected_x)[0]
    expected.backward(d_o)
    parallel = cut(layer, input_layouts=Shard(1), output_layouts=Shard(1))
    part = distribute_tensor(x, mesh(), [Shard(1)]).to_local().requires_grad_()
    o = parallel(part)[0]
    o.backward(distribute_tensor(d_o, mesh(), [Shard(1)]).to_local())
    for mine, theirs in ((o, expected), (part.grad, expected_x.grad)):
        assert relative_error(mine, distribute_tensor(theirs.detach(), mesh(), [Shard(1)]).to_local()) < BAR
    same_gradients(parallel, layer)
    with pytest.raises(ValueError, match="expected a number of tokens that the 2 ranks divide, got 15"):
        cut(layer, output_layouts=Shard(1))(x[:, :15])
    parallel = cut(layer, use_local_output=False)
    cut_x = distribute_tensor(x, mesh(), [Shard(0)]).requires_grad_()
    o = parallel(hidden_states=cut_x)[0]
    assert o.placements == (Replicate(),)
    o.backward(distribute_tensor(d_o, mesh(), [Replicate()]))
    assert relative_error(o.full_tensor(), expected) < BAR
    assert relative_error(cut_x.grad.full_tensor(), expected_x.grad) < BAR
    same_gradients(parallel, layer)


def training(ranks):
    """Steps of an optimizer, of gradients that are accumulated, clipped and recomputed (activation checkpoints)."""
    layer = make("comba").double()
    layers, x = (layer, cut(layer)), torch.randn(2, 15, HIDDEN, dtype=torch.float64)
    for trained in layers:
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2, fused=True)
        for _ in range(3):
            optimizer.zero_grad()
            trained(x)[0].square().sum().backward()
            checkpoint(lambda x: trained(x)[0], x, use_reentrant=False).sum().backward()
            nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
            optimizer.step()
    for (name, mine), theirs in zip(layers[1].named_parameters(), layer.parameters(), strict=True):
        assert relative_error(mine.full_tensor(), theirs) < BAR, name


@torch.inference_mode()
def decoding(ranks):
    for name in ("gated_deltanet", "kda_bounded", "gla_grouped", "comba", "lightning"):
        layer = make(name).double()
        parallel, x = cut(layer), torch.randn(2, 9, HIDDEN, dtype=torch.float64)
        expected, caches = layer(x)[0], [hn.Cache(), hn.Cache()]
        for part in (x[:, :6], *x[:, 6:].split(1, 1)):
            o, other = (run(part, past_key_values=c, use_cache=True)[0] for run, c in zip((parallel, layer), caches))
            assert relative_error(o, other) < BAR, name
        mine, whole_state = (c[0]["recurrent_state"] for c in caches)
        assert mine.shape[1] * 2 == whole_state.shape[1] and relative_error(o, expected[:, -1:]) < 1e-9


def parameters_return(ranks):
    """After the forward the parameters are whole again, also after an error; conversions keep the decays."""
    parallel = cut(make("lightning"))
    before = dict(parallel.named_parameters())
    with pytest.raises(ValueError, match="attention_mask"):
        parallel(torch.randn(2, 5, HIDDEN), attention_mask=torch.ones(7, 5))
    parallel(torch.randn(2, 5, HIDDEN))
    assert all(p is before[name] and isinstance(p, DTensor) for name, p in parallel.named_parameters())
    gates = parallel.g_gamma.to_local()
    assert torch.equal(parallel.double().g_gamma.to_local().float(), gates)
    parallel(torch.randn(2, 5, HIDDEN).double())
    rank = mesh().get_local_rank()
    assert torch.equal(gates, make("lightning").g_gamma[2 * rank : 2 * rank + 2])
    state = {name: x.full_tensor() for name, x in parallel.state_dict().items()}
    make("lightning").double().load_state_dict(state, strict=True)
    with torch.device("meta"):
        empty = hn.LightningAttention(HIDDEN, 4, num_layers=3, layer_idx=0)
    assert torch.equal(cut(empty).to_empty(device="cpu").g_gamma.full_tensor(), make("lightning").g_gamma)


def compiled(ranks):
    """Without a break of the graph: a layer, and a function of DTensors."""
    layer = make("gated_deltanet").double()
    parallel, x = cut(layer), torch.randn(2, 15, HIDDEN, dtype=torch.float64)
    o = torch.compile(parallel, backend="aot_eager", fullgraph=True)(x)[0]
    o.sum().backward()
    expected = layer(x)[0]
    expected.sum().backward()
    assert relative_error(o, expected) < BAR
    same_gradients(parallel, layer)
    tensors = make_problem("gated_delta_rule", H=4, K=8, V=8)
    parts = {name: distribute_tensor(x, mesh(), [Shard(2)]).requires_grad_() for name, x in tensors.items()}
    function = torch.compile(lambda **t: chunk_gated_delta_rule(**t)[0] * 2, backend="aot_eager", fullgraph=True)
    (o := function(**parts)).sum().backward()
    plain = {name: x.requires_grad_() for name, x in tensors.items()}
    (expected := chunk_gated_delta_rule(**plain)[0] * 2).sum().backward()
    assert o.placements == (Shard(2),) and relative_error(o.full_tensor(), expected) < BAR
    for name, x in plain.items():
        assert relative_error(parts[name].grad.full_tensor(), x.grad) < BAR, name


def errors(ranks):
    def refused(text, layer, error=ValueError):
        with pytest.raises(error, match=text):
            parallelize_module(layer, mesh(), tensor_parallel_plan(layer))

    refused("num_heads: expected a multiple of the 2 ranks of tensor parallelism, got 3",
            hn.GatedDeltaNet(HIDDEN, 1, 16, 3, 6))
    refused("num_kv_heads: expected a multiple of the 2 ranks .* got 1",
            hn.GatedLinearAttention(hidden_size=HIDDEN, num_heads=4, num_kv_heads=1))
    refused("norm_groups: expected 1 or a multiple of the 2 ranks .* got 3", make("lightning_grouped"))
    refused("q_proj.weight: expected a parameter that is not distributed yet", cut(make("gla")))
    more = make("gla")
    more.adapter = nn.Linear(4, 4)
    refused("adapter.weight: expected the parameters of GatedLinearAttention alone", more)
    refused("layer: expected a layer of headrace.torch.nn, got a Linear", nn.Linear(4, 4), TypeError)
    with pytest.raises(ValueError, match="input_layouts: expected Replicate.. or Shard.1., got Shard.dim=2."):
        tensor_parallel_plan(make("gla"), input_layouts=Shard(2))
    late = cut(make("gla"))
    late.adapter = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="weight: expected a DTensor on the mesh of .*, got a plain tensor"):
        late(torch.randn(2, 5, HIDDEN))
    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    part = make("gla")
    parallelize_module(part, both["tp"], tensor_parallel_plan(part))
    fully_shard(part.q_proj, mesh=both["dp"])  # whose parameters are not there yet when the layer's forward begins
    with pytest.raises(ValueError, match="weight: expected a DTensor on the mesh .* .fully_shard the whole layer"):
        part(torch.randn(2, 5, HIDDEN))
    with pytest.raises(ValueError, match="hidden_states: expected a DTensor on"):
        other = init_device_mesh("cpu", (1, 2))
        cut(make("gla"))(distribute_tensor(torch.randn(2, 5, HIDDEN), other, [Replicate(), Replicate()]))
    with pytest.raises(ValueError, match="device_mesh: expected 1 dimension, got 2"):
        parallelize_module(make("gla"), other, tensor_parallel_plan(make("gla")))


@pytest.mark.parametrize("case", [every_layer, what_is_sent, layouts, training, decoding, parameters_return, compiled,
                                  errors], ids=lambda case: case.__name__)
def test_two_ranks(case):
    group(2).run(case)
