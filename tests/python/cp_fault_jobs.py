"""What ranks do in the tests of faults: wrong calls of one rank, and ranks that die or fall silent."""

import os
import signal
import time

import torch
import torch.distributed as dist
from device_tensors import without_memory

import headrace.torch as ht
from headrace.torch.distributed import _local, build_cp_context, gather_final_states, shard, unshard

T, H, K, V = 300, 4, 16, 8


def call(context, change=None, backward=False):
    """chunk_gated_delta_rule on the rank's tokens, after change(tensors, options)."""
    draw = torch.Generator().manual_seed(0)
    sizes = {"q": (1, T, H, K), "k": (1, T, H, K), "v": (1, T, H, V), "g": (1, T, H), "beta": (1, T, H)}
    tensors = {name: shard(torch.rand(size, generator=draw), context) for name, size in sizes.items()}
    tensors["g"] = -tensors["g"]
    tensors["k"] = torch.nn.functional.normalize(tensors["k"], dim=-1)
    options = {"cp_context": context}
    if change is not None:
        change(tensors, options)
    if backward:
        tensors = {name: x.requires_grad_() for name, x in tensors.items()}
    return ht.chunk_gated_delta_rule(**tensors, **options)[0]


def _nan(tensors, options):
    tensors["g"][0, 5, 1] = torch.nan


def _option(name, value):
    def change(tensors, options):
        options[name] = value
    return change


def _tensor(name, change):
    def apply(tensors, options):
        tensors[name] = change(tensors[name])
    return apply


def _all(change):
    def apply(tensors, options):
        tensors.update({name: change(x) for name, x in tensors.items()})
    return apply


# What rank 1 alone does otherwise, and what the error on all ranks says.
WRONG = {
    "nan": (_nan, "ValueError", r"^rank 1: g: expected values <= 0, got nan at "),
    "value heads": (_tensor("v", lambda x: x[:, :, :3]), "ValueError", r"^rank 1: v: expected a multiple of the 4"),
    "tokens": (_all(lambda x: x[:, :7]), "ValueError", r"^rank 1: q: expected the 75 tokens of this rank"),
    "gates": (_tensor("g", lambda x: x[:, 1:]), "ValueError", r"^rank 1: g: expected the 75 tokens"),
    "integers": (_tensor("v", lambda x: x.int()), "TypeError", r"^rank 1: v: expected a floating dtype"),
    "types": (_all(lambda x: x.double()), "ValueError", r"dtypes: expected the same on every rank.*rank.* 1"),
    "heads": (_all(lambda x: x[:, :, :2]), "ValueError", r"^rank 1: (shapes|strategy): expected"),
    "options": (_option("scale", 0.5), "ValueError", r"options: expected the same on every rank.*rank.* 1"),
    "state": (_option("output_final_state", True), "ValueError", r"gradients: expected the same on every rank.* 1"),
    "kind": (_option("chunk_size", 48), "ValueError", r"^rank 1: chunk_size: expected a power of two"),
    "cu_seqlens": (_option("cu_seqlens", torch.tensor([0, 75])), "ValueError", r"^rank 1: cu_seqlens: expected None"),
    "initial_state": (_option("initial_state", torch.zeros(2, H, K, V)), "ValueError", r"^rank 1: initial_state: exp"),
    "device": (_tensor("v", without_memory), "ValueError", r"^rank 1: v: expected device cpu as q, got cuda:0"),
    "missing": (_tensor("g", lambda x: None), "ValueError", r"tensors: expected the same on every rank.*rank.* 1"),
}


def wrong(group, strategy, name):
    """The call, which is WRONG[name] on rank 1."""
    context = build_cp_context(torch.tensor([0, T]), group, strategy=strategy)
    call(context, WRONG[name][0] if dist.get_rank(group) == 1 else None)


def right(group, strategy):
    context = build_cp_context(torch.tensor([0, T]), group, strategy=strategy)
    return call(context, backward=True).sum().backward()


def fails_inside(group, strategy, direction):
    """Memory runs out on rank 1, in the kernels' own call."""
    context = build_cp_context(torch.tensor([0, T]), group, strategy=strategy)
    real, rank = _local.Call.run, dist.get_rank(group)

    def run(self, found, *arguments):
        if rank == 1 and found == direction:
            raise MemoryError("no memory for a test")
        return real(self, found, *arguments)

    _local.Call.run = run
    try:
        o = call(context, backward=True)
        o.sum().backward()
    finally:
        _local.Call.run = real


def other_operator(group, strategy):
    context = build_cp_context(torch.tensor([0, T]), group, strategy=strategy)
    if dist.get_rank(group) == 1:
        return unshard(torch.zeros(1, 75, 2), context)
    return call(context)


def other_batch(group, strategy):
    """Rank 1 calls with the context of another batch of as many tokens."""
    contexts = [build_cp_context(torch.tensor(offsets), group, strategy=strategy) for offsets in ([0, T], [0, 100, T])]
    return call(contexts[dist.get_rank(group) == 1])


def no_gradients(group, strategy):
    """Rank 1 records no gradients, where the others do: their backward would wait for it."""
    context = build_cp_context(torch.tensor([0, T]), group, strategy=strategy)
    return call(context, backward=dist.get_rank(group) != 1)


def convolution(group, change):
    context = build_cp_context(torch.tensor([0, T]), group, 4)
    x, weight = torch.zeros(1, 75, 3), torch.zeros(3, 4)
    if dist.get_rank(group) == 1:
        x, weight = {"x": (x[:, 1:], weight), "weight": (x, weight[:, :3]), "type": (x.int(), weight),
                     "channels": (x, weight[:2]), "device": (x, without_memory(weight))}[change]
    return ht.short_convolution(x, weight, cp_context=context)


def whole(group, kind):
    context = build_cp_context(torch.tensor([0, T]), group)
    sizes = (1, 74, 2) if dist.get_rank(group) == 1 else (1, 75, 2)
    if kind == "states":
        return gather_final_states(torch.zeros(2 if dist.get_rank(group) == 1 else 1, 3), context)
    return unshard(torch.zeros(sizes), context)


def lost(group, strategy, number, place):
    """(seconds, message, cause) of what a call raises when rank 1 gets a signal: before it, in it, in its backward."""
    context = build_cp_context(torch.tensor([0, T]), group, strategy=strategy)
    o = call(context, backward=True)
    dist.barrier()
    real = _local.Call.run

    def run(self, *arguments):
        hit()
        return real(self, *arguments)

    def hit():
        if dist.get_rank(group) == 1:
            os.kill(os.getpid(), number)

    if place == "before":
        hit()
    if place == "inside":
        _local.Call.run = run
    start = time.monotonic()
    try:
        if place == "backward":
            hit()
            o.sum().backward()
        else:
            call(context)
    except RuntimeError as error:
        return time.monotonic() - start, str(error), repr(error.__cause__)


def killed(group, rank):
    """The host of the group's store dies in a ring: nobody can ask who waited for whom."""
    context = build_cp_context(torch.tensor([0, T]), group, strategy="ring")
    call(context)
    dist.barrier()
    if dist.get_rank(group) == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        call(context)
    except RuntimeError as error:
        again = None
        try:
            call(context)
        except RuntimeError as second:
            again = str(second)
        return time.monotonic() - start, str(error), again


def wrong_context(group, name):
    """build_cp_context with a wrong argument on rank 1 alone."""
    offsets, options = torch.tensor([0, 64, T]), {}
    if dist.get_rank(group) == 1:
        offsets, options = {
            "offsets": (torch.tensor([0, 65, T]), {}),
            "divided": (torch.tensor([0, 16, T // 4]), {}),
            "falling": (torch.tensor([0, 65, 64]), {}),
            "start": (torch.tensor([1, 64, T]), {}),
            "type": (torch.tensor([0.0, T]), {}),
            "list": ([0, T], {}),
            "ranges": (offsets, {"token_ranges": [[(0, 75)], [(75, 150)], [(150, 224)], [(224, T)]]}),
            "gap": (offsets, {"token_ranges": [[(0, 75)], [(75, 150)], [(150, 224)], [(225, T)]]}),
            "overlap": (offsets, {"token_ranges": [[(0, 76)], [(75, 150)], [(150, 225)], [(225, T)]]}),
            "groups": (offsets, {"token_ranges": [[(0, 150)], [(150, T)]]}),
            "pairs": (offsets, {"token_ranges": [0, 75, 150, 225]}),
            "width": (offsets, {"conv1d_kernel_size": 4}),
            "too wide": (offsets, {"conv1d_kernel_size": 65}),
            "layout": (offsets, {"layout": "zigzag"}),
            "no layout": (offsets, {"layout": "diagonal"}),
            "strategy": (offsets, {"strategy": "ring"}),
            "exchange": (offsets, {"exchange": "doubling"}),
            "link": (offsets, {"link_gbits": 10}),
            "no link": (offsets, {"link_gbits": 0}),
        }[name]
    build_cp_context(offsets, group, **options)
