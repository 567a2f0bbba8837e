"""What ranks do in the tests of contexts, compiled graphs, checkpoints, types, counts and times."""

import ast
import importlib.util
import time
import types
from pathlib import Path

import torch
import torch.distributed as dist
from cp_jobs import TOKENS, local_tokens, problem
from torch.utils.checkpoint import checkpoint

import headrace.torch as ht
from headrace.torch.distributed import build_cp_context, gather_final_states, shard, traffic, unshard
from headrace.torch.distributed._context import _living

FIELDS = ("cu_seqlens", "cu_seqlens_cpu", "is_first_rank", "is_last_rank", "pre_num_ranks", "post_num_ranks",
          "conv1d_kernel_size", "pre_num_conv_tokens", "layout", "part_len", "front_num_seqs", "pre_num_ranks_by_part",
          "post_num_ranks_by_part", "is_first_by_part", "is_last_by_part", "pre_num_conv_tokens_by_part", "num_seqs",
          "is_cp_enabled")


def fla_context(offsets, group, layout):
    """A context that flash-linear-attention itself has built; importing the package needs triton."""
    path = Path(importlib.util.find_spec("fla").submodule_search_locations[0]) / "ops/cp/context.py"
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if not (isinstance(node, ast.ImportFrom) and node.module == "fla.utils")]
    module = types.ModuleType("fla_context")
    module.tensor_cache, module.__dict__["__name__"] = lambda function: function, __name__
    exec(compile(tree, str(path), "exec"), module.__dict__)
    return module.build_cp_context(offsets, group, conv1d_kernel_size=4, layout=layout)


def fields_of_fla(group, lengths, layout):
    """The names of fields that differ from flash-linear-attention's, which knows no empty sequences."""
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    theirs, mine = fla_context(offsets, group, layout), build_cp_context(offsets, group, 4, layout=layout)
    different = [name for name in FIELDS if str(plain(getattr(mine, name))) != str(plain(getattr(theirs, name)))]
    copy = mine.copy_for_backward()
    assert hasattr(theirs, "copy_for_backward")
    return different + [name for name in FIELDS if str(plain(getattr(copy, name))) != str(plain(getattr(mine, name)))]


def plain(value):
    return value.tolist() if isinstance(value, torch.Tensor) else value


def taken_from_fla(group, lengths, layout):
    """Calls with a context of flash-linear-attention, beside those with our own."""
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    tensors = problem("gated_delta_rule", int(offsets[-1]), 2, 2, 8, 8, 1, torch.float64, state=False)
    contexts = fla_context(offsets, group, layout), build_cp_context(offsets, group, 4, layout=layout)
    results = []
    for context in contexts:
        given = {name: shard(x, context) for name, x in tensors.items()}
        o, state = ht.chunk_gated_delta_rule(**given, cp_context=context, output_final_state=True)
        y, _ = ht.short_convolution(o.flatten(2), torch.ones(16, 4, dtype=torch.float64), cp_context=context)
        results.append([o, unshard(y, context), gather_final_states(state, context)])
    assert all(torch.equal(*pair) for pair in zip(*results))
    assert "_of_headrace" in vars(contexts[0])
    expected, _ = ht.chunk_gated_delta_rule(**tensors, cu_seqlens=offsets)
    return (unshard(results[0][0], contexts[0]) - expected).abs().max().item()


def mesh(group):
    """A DeviceMesh in the place of its group; one of two dimensions is refused."""
    from torch.distributed.device_mesh import init_device_mesh
    one = build_cp_context(torch.tensor([0, 100]), init_device_mesh("cpu", (dist.get_world_size(group),)))
    assert one.token_ranges == build_cp_context(torch.tensor([0, 100]), group).token_ranges
    try:
        build_cp_context(torch.tensor([0, 100]), init_device_mesh("cpu", (1, dist.get_world_size(group))))
    except ValueError as error:
        return str(error)


def backends(group):
    """A group that cannot send tensors of the CPU, as of nccl alone, is refused before anything is sent."""
    try:
        build_cp_context(torch.tensor([0, 100]), dist.new_group(backend="cuda:gloo"))
    except ValueError as error:
        return str(error)


def contexts(group, options):
    """What a context says on four ranks."""
    offsets = torch.tensor([0, 50, 50, 130, 200])
    context = build_cp_context(offsets, group, **options)
    return (context.token_ranges, context.cu_seqlens.tolist(), context.begins.tolist(), context.ends.tolist(),
            context.sequences.tolist(), context.strategy)


def times_of_contexts(group):
    """Seconds of the fastest of 20 contexts of 1000 sequences."""
    offsets, found = torch.arange(1001) * 17, []
    for _ in range(20):
        start = time.perf_counter()
        build_cp_context(offsets, group)
        found.append(time.perf_counter() - start)
    return min(found)


def compiled(group, strategy, backend):
    """(largest difference, graphs) of a compiled step with contexts of several batches."""
    from torch._dynamo.testing import CompileCounterWithBackend
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 4, generator=draw)

    def step(tensors, context):
        o, state = ht.chunk_gated_delta_rule(**tensors, cp_context=context, output_final_state=True)
        y, _ = ht.short_convolution(o.flatten(2), weight, cp_context=context)
        return y.square().sum() + state.sum()

    fast, worst = torch.compile(step, fullgraph=True, backend=counter), 0
    tensors = problem("gated_delta_rule", 128, 2, 2, 4, 3, 1, torch.float32, state=False)
    for cuts in ([[(0, 64)], [(64, 128)]], [[(64, 128)], [(0, 64)]], [[(0, 40)], [(40, 128)]]):
        context, results = build_cp_context(torch.tensor([0, 128]), group, token_ranges=cuts, strategy=strategy), []
        for function in (step, fast):
            rank = dist.get_rank(group)
            given = {name: local_tokens(x, context, rank).requires_grad_() for name, x in tensors.items()}
            loss = function(given, context)
            results.append([loss, *torch.autograd.grad(loss, list(given.values()))])
        worst = max(worst, *((a - b).abs().max().item() for a, b in zip(*results)))
    return worst, counter.frame_count


def training(group, strategy):
    """Checkpoints of both kinds give the bits of none; autocast; a backward after the context is gone."""
    context = build_cp_context(torch.tensor([0, 128]), group, strategy=strategy)
    tensors = problem("gated_delta_rule", 128, 2, 2, 8, 8, 1, torch.float32, state=False)
    tensors = {name: shard(x, context) for name, x in tensors.items()}

    def function(*inputs):
        return ht.chunk_gated_delta_rule(*inputs, cp_context=context)[0].square().sum()

    gradients = []
    for how in (None, True, False):
        inputs = [x.clone().requires_grad_() for x in tensors.values()]
        loss = function(*inputs) if how is None else checkpoint(function, *inputs, use_reentrant=how)
        gradients.append(torch.autograd.grad(loss, inputs) if how is not True else
                         (loss.backward(), [x.grad for x in inputs])[1])
    for found in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found, gradients[0]))
    with torch.autocast("cpu", torch.bfloat16):
        o, state = ht.chunk_gated_delta_rule(*tensors.values(), cp_context=context, output_final_state=True)
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
    inputs = [x.clone().requires_grad_() for x in tensors.values()]
    loss, number = function(*inputs), context._number
    del context, function
    assert number not in _living
    loss.backward()
    assert all(torch.equal(x.grad, d) for x, d in zip(inputs, gradients[0]))
    return True


def transforms(group):
    """torch.func.grad is served; vmap, second derivatives and forward mode are refused by name."""
    context = build_cp_context(torch.tensor([0, 40]), group, strategy="ring")
    tensors = problem("gated_delta_rule", 40, 2, 2, 4, 4, 1, torch.float64, state=False)
    tensors = {name: shard(x, context) for name, x in tensors.items()}

    def loss(v):
        return ht.chunk_gated_delta_rule(**{**tensors, "v": v}, cp_context=context)[0].square().sum()

    v = tensors["v"].clone().requires_grad_()
    (d,) = torch.autograd.grad(loss(v), v)
    assert torch.equal(torch.func.grad(loss)(tensors["v"]), d)
    messages = []
    for function in (lambda: torch.func.vmap(loss)(tensors["v"].unsqueeze(0)),
                     lambda: torch.func.jvp(loss, (tensors["v"],), (tensors["v"],)),
                     lambda: torch.autograd.grad(torch.autograd.grad(loss(v), v, create_graph=True)[0].sum(), v)):
        try:
            function()
        except NotImplementedError as error:
            messages.append(str(error))
    return messages


def bytes_sent(group, op, strategy, exchange, K, V, state=True):
    """(forward, backward) of this rank: messages, payload and status bytes of one call on one sequence."""
    size, HV = dist.get_world_size(group), dist.get_world_size(group)
    T = 64 * size
    context = build_cp_context(torch.tensor([0, T]), group, strategy=strategy, exchange=exchange)
    tensors = problem(op, T, HV, HV, K, V, 1, torch.bfloat16, state=False)
    given = {name: shard(x, context).requires_grad_() if name in TOKENS else x for name, x in tensors.items()}
    from cp_jobs import FUNCTIONS
    if op == "gla":
        given["gk"] = given.pop("g")
    before = traffic()
    o, _ = FUNCTIONS[op](**given, cp_context=context)
    between = traffic()
    o.float().sum().backward()
    return [tuple(b - a for a, b in zip(*pair)) for pair in ((before, between), (between, traffic()))]


def bytes_of_convolution(group, D, W):
    T = 64 * dist.get_world_size(group)
    context = build_cp_context(torch.tensor([0, T]), group, W)
    x, weight = shard(torch.ones(1, T, D), context).requires_grad_(), torch.ones(D, W)
    before = traffic()
    y, _ = ht.short_convolution(x, weight, cp_context=context)
    between = traffic()
    y.sum().backward()
    return [tuple(b - a for a, b in zip(*pair)) for pair in ((before, between), (between, traffic()))]


def overhead(group):
    """Median microseconds of a small call with offsets, and with a context of one rank."""
    offsets = torch.tensor([0, 16])
    context = build_cp_context(offsets, group)
    tensors = problem("gated_delta_rule", 16, 2, 2, 8, 8, 1, torch.float32, state=False)
    results = []
    for options in ({"cu_seqlens": offsets}, {"cp_context": context}):
        found = []
        for _ in range(500):
            start = time.perf_counter()
            o, _ = ht.chunk_gated_delta_rule(**tensors, **options)
            found.append(time.perf_counter() - start)
        results.append((sorted(found)[250] * 1e6, o))
    assert torch.equal(results[0][1], results[1][1])
    return results[0][0], results[1][0]
