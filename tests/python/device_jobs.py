"""What ranks do in the tests of headrace.torch.distributed on devices: a rank's tensors lie on one (device_tensors)."""

import cp_jobs
import device_tensors
import torch
import torch.distributed as dist
from cp_jobs import TOKENS, local_rows, local_tokens, problem, squares
from device_tensors import Runtime, download, gradients, know_devices, upload

import headrace.torch as ht
from headrace import _core
from headrace.torch.distributed import build_cp_context, gather_final_states, shard, unshard

_runtime = []


def runtime():
    """This process's, with which PyTorch's stream is the stand-in's."""
    if not _runtime:
        know_devices()
        _runtime.append(Runtime())
        _core.set_current_stream(_runtime[0].current_stream)
        device_tensors.may_wait[0] = True
    return _runtime[0]


def compare(group, op, lengths, sizes, dtype, context_options):
    """The relative errors of results and gradients of a call on devices, beside one process in float64 on the CPU."""
    H, HV, K, V = sizes
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    T, N, rank = int(offsets[-1]), len(lengths), dist.get_rank(group)
    context = build_cp_context(offsets, group, **context_options)
    tensors = problem(op, T, H, HV, K, V, N, dtype)
    draw = torch.Generator().manual_seed(9)
    weights = torch.randn(1, T, HV, V, generator=draw, dtype=torch.float64)
    final_weights = torch.randn(N, HV, K, V, generator=draw, dtype=torch.float64)
    whole = {name: x.double() for name, x in tensors.items()}
    expected, expected_d = cp_jobs.run(op, whole, {"cu_seqlens": offsets}, weights, final_weights)
    local = {name: local_tokens(x, context, rank) if name in TOKENS else x for name, x in tensors.items()}
    local["initial_state"] = torch.nan_to_num(local_rows(tensors["initial_state"], context, True))
    there = {name: upload(x, runtime()).requires_grad_() for name, x in local.items()}
    given = dict(there)
    if op == "gla":
        given["gk"] = given.pop("g")
    o, state = cp_jobs.FUNCTIONS[op](**given, output_final_state=True, cp_context=context)
    d_o = upload(local_tokens(weights, context, rank).to(o.dtype), runtime())
    d_state = upload(torch.nan_to_num(local_rows(final_weights, context, False)).to(state.dtype), runtime())
    d = dict(zip(there, gradients([o, state], [d_o, d_state], list(there.values()))))
    ends = torch.nan_to_num(local_rows(expected["final_state"], context, False))
    errors = {"o": squares(download(o), local_tokens(expected["o"], context, rank), group),
              "final_state": squares(download(state), ends, group)}
    for name, full in ((name, expected_d[f"d_{name}"]) for name in there):
        mine = download(d[name])
        if name in TOKENS:
            errors[f"d_{name}"] = squares(mine, local_tokens(full, context, rank), group)
        elif name == "initial_state":
            errors[f"d_{name}"] = squares(mine, torch.nan_to_num(local_rows(full, context, True)), group)
        else:
            total = mine.double()
            dist.all_reduce(total, group=group)
            errors[f"d_{name}"] = squares(total, full, group)
    return errors


def convolution(group, lengths, D, W):
    """The relative errors of a short convolution on devices, beside one process in float64 on the CPU."""
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    T, N, rank = int(offsets[-1]), len(lengths), dist.get_rank(group)
    context = build_cp_context(offsets, group, W)
    draw = torch.Generator().manual_seed(1)
    sizes = {"x": (1, T, D), "weight": (D, W), "bias": (D,), "initial_state": (N, D, W)}
    tensors = {name: torch.randn(size, generator=draw) for name, size in sizes.items()}
    weights, final_weights = torch.randn(1, T, D, generator=draw), torch.randn(N, D, W, generator=draw)
    inputs = {name: x.double().requires_grad_() for name, x in tensors.items()}
    y, state = ht.short_convolution(**inputs, output_final_state=True, cu_seqlens=offsets)
    ((y * weights).sum() + (state * final_weights).sum()).backward()
    local = {**tensors, "x": local_tokens(tensors["x"], context, rank),
             "initial_state": torch.nan_to_num(local_rows(tensors["initial_state"], context, True))}
    there = {name: upload(x, runtime()).requires_grad_() for name, x in local.items()}
    mine, last = ht.short_convolution(**there, output_final_state=True, cp_context=context)
    d_last = torch.nan_to_num(local_rows(final_weights, context, False))
    given = [upload(local_tokens(weights, context, rank), runtime()), upload(d_last, runtime())]
    d = {name: download(x) for name, x in zip(there, gradients([mine, last], given, list(there.values())))}
    errors = {"y": squares(download(mine), local_tokens(y.detach(), context, rank), group),
              "final_state": squares(download(last), torch.nan_to_num(local_rows(state.detach(), context, False)), group),
              "d_x": squares(d["x"], local_tokens(inputs["x"].grad, context, rank), group),
              "d_initial_state": squares(
                  d["initial_state"], torch.nan_to_num(local_rows(inputs["initial_state"].grad, context, True)), group)}
    for name in ("weight", "bias"):
        total = d[name].double()
        dist.all_reduce(total, group=group)
        errors[f"d_{name}"] = squares(total, inputs[name].grad, group)
    return errors


def shards(group, lengths):
    """shard and unshard give back what they got, and final states come from the ranks where sequences end."""
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    context = build_cp_context(offsets, group)
    x = torch.randn(1, int(offsets[-1]), 3, generator=torch.Generator().manual_seed(2))
    # what a PyTorch with CUDA copies there
    context._places[torch.device("cuda", 0)] = upload(context._places_on(torch.device("cpu")), runtime())
    mine = shard(upload(x, runtime()), context)
    assert torch.equal(download(mine), local_tokens(x, context, dist.get_rank(group)))
    assert torch.equal(download(unshard(mine, context)), x)
    states = torch.randn(len(lengths), 2, 3, generator=torch.Generator().manual_seed(3))
    last = upload(torch.nan_to_num(local_rows(states, context, False)), runtime())
    assert torch.equal(download(gather_final_states(last, context)), states)
