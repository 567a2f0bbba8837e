"""The context of a batch whose sequences are cut over ranks: who holds which tokens, and how states are exchanged."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union, cast
from weakref import WeakValueDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from headrace import _core
from headrace._arguments import integer, number
from headrace.torch.distributed import _summary
from headrace.torch.distributed._exchange import Conversation, Ranks, digest, ranks_of
from headrace.torch.distributed._layout import Layout, Range, Ranges, check_ranges, default_ranges

LAYOUTS = ("contiguous", "zigzag")
STRATEGIES = ("auto", "summary", "ring", "heads")
EXCHANGES = ("auto", "all_gather", "doubling")

_numbers = itertools.count()
_living: WeakValueDictionary[int, CPContext] = WeakValueDictionary()


class CPContext:
    """Where the tokens of a batch of packed sequences lie on the ranks of a group: what build_cp_context returns.

    A piece is what of one sequence lies in one of the rank's ranges of tokens; pieces stand in the order of the rank's
    tokens. Tensors are on the CPU, wherever those of the calls are.

    group: of the ranks; cu_seqlens, cu_seqlens_cpu [pieces + 1]: where the rank's pieces begin and end, in its own
    tokens; token_ranges: of every rank, (begin, end) in the batch; begins, ends [pieces]: whether the sequence begins
    (ends) with the piece; sequences [pieces]: which one it belongs to, so that states[sequences] are initial states of
    the rank; num_seqs: pieces; layout, strategy, exchange, conv1d_kernel_size, link_gbits: as given; threads: PyTorch's
    when it was built, on the rank with the fewest. Of a rank with one range (None elsewhere): is_first_rank,
    is_last_rank: no earlier (later) rank has tokens of its first (last) sequence; pre_num_ranks, post_num_ranks: how
    many have; pre_num_conv_tokens: the tokens of its first sequence on earlier ranks. part_len, front_num_seqs and the
    names in _by_part: the same of the two ranges of a zigzag layout.
    """

    def __init__(self, ranks: Ranks, offsets: np.ndarray, ranges: Ranges, conv1d_kernel_size: Optional[int],
                 layout: str, strategy: str, exchange: str, threads: int, link_gbits: Optional[float]) -> None:
        self._ranks, self.group = ranks, ranks.group
        self.token_ranges, self.layout, self.strategy, self.exchange = ranges, layout, strategy, exchange
        self.conv1d_kernel_size, self.threads, self.link_gbits = conv1d_kernel_size, threads, link_gbits
        self._layout = Layout(offsets, ranges, ranks.rank)
        self.cu_seqlens = self.cu_seqlens_cpu = torch.from_numpy(self._layout.cu_seqlens)
        self.begins, self.ends = (torch.from_numpy(self._layout.flags(at_begin)) for at_begin in (True, False))
        self.sequences = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *(
            np.arange(slot.first, slot.last) for slot in self._layout.own)]))
        self._places: Dict[torch.device, Tensor] = {}
        self._tokens = self._layout.lengths[ranks.rank]
        self._size = ranks.size
        # States that enter, in the order of tokens and against it.
        self._entered = tuple(len(self._layout.entered(reverse)) for reverse in (False, True))
        self._kept = {name: tuple(_summary.kept_count(self._layout, name, reverse) for reverse in (False, True))
                      for name in EXCHANGES[1:]}
        self._longest = max(self._layout.lengths)
        chains = (len(self._layout.sources(slot, False)) for slot in range(len(self._layout.slots)))
        self._chain = max(chains, default=0)
        # The same on every rank, of every context of the same batch.
        self._digest = digest((offsets.tobytes(), ranges, conv1d_kernel_size, layout, strategy, exchange, threads,
                               link_gbits))
        self._number = next(_numbers)
        self._handle = torch.from_numpy(self._encoded())
        _living[self._number] = self
        self._name_parts()

    def _name_parts(self) -> None:
        """What flash-linear-attention calls the first and the last piece of a range."""
        described = []
        for slot in self._layout.own:
            number = self._layout.numbers[slot]
            before = self._layout.sources(number, False)
            behind = self._layout.sources(number, True)
            begin = int(self._layout.offsets[slot.first]) if slot.pieces else slot.begin
            described.append((len(before), len(behind), slot.begin - begin))
        one: Tuple[Optional[int], ...] = (None, None, None)
        if len(described) < 2:
            one = described[0] if described else (0, 0, 0)
        self.pre_num_ranks, self.post_num_ranks, self.pre_num_conv_tokens = one
        self.is_first_rank = None if one[0] is None else one[0] == 0
        self.is_last_rank = None if one[1] is None else one[1] == 0
        self.part_len = self.front_num_seqs = None
        by_part: Tuple[Optional[tuple], ...] = (None, None, None)
        if self.layout == "zigzag" and len(described) == 2:
            by_part = tuple(zip(*described))
            front = self._layout.own[0]
            self.part_len, self.front_num_seqs = front.end - front.begin, front.pieces
        self.pre_num_ranks_by_part, self.post_num_ranks_by_part, self.pre_num_conv_tokens_by_part = by_part
        self.is_first_by_part, self.is_last_by_part = (
            None if counts is None else tuple(count == 0 for count in counts) for counts in by_part[:2])

    @property
    def num_seqs(self) -> int:
        return self._layout.pieces

    @property
    def is_cp_enabled(self) -> bool:
        return True

    def _places_on(self, device: torch.device) -> Tensor:
        """Where in the batch the rank's tokens stand, on the device; copied there once."""
        found = self._places.get(device)
        if found is None:
            found = self._places[device] = torch.from_numpy(self._layout.places(self._ranks.rank)).to(device)
        return found

    def copy_for_backward(self) -> CPContext:
        """A copy. A call's backward does not need one: it knows the context of its forward."""
        return CPContext(self._ranks, self._layout.offsets.copy(), [list(r) for r in self.token_ranges],
                         self.conv1d_kernel_size, self.layout, self.strategy, self.exchange, self.threads,
                         self.link_gbits)

    def __repr__(self) -> str:
        return (f"CPContext(rank {self._ranks.rank} of {self._size}, {self._layout.tokens} tokens, "
                f"{self._layout.sequences} sequences, layout={self.layout!r}, strategy={self.strategy!r})")

    # ---- contexts as tensors: what operators take ----

    def _encoded(self) -> np.ndarray:
        """The context as integers, behind its number: an operator whose context is gone makes it anew."""
        name = self.group.group_name.encode()
        ranges = [[len(mine), *(end for pair in mine for end in pair)] for mine in self.token_ranges]
        head = [self._number, self.conv1d_kernel_size or 0, LAYOUTS.index(self.layout),
                STRATEGIES.index(self.strategy), EXCHANGES.index(self.exchange), self.threads,
                int(np.float64(self.link_gbits or 0).view(np.int64)), len(name), *name, self._layout.sequences]
        return np.concatenate([np.array(head, np.int64), self._layout.offsets, np.array(sum(ranges, []), np.int64)])


def _decoded(numbers: List[int]) -> CPContext:
    rest = iter(numbers[1:])

    def take(count: int) -> List[int]:
        return list(itertools.islice(rest, count))

    width, layout, strategy, exchange, threads, speed, length = take(7)
    ranks = ranks_of(_resolve_process_group(cast(Any, bytes(take(length)).decode())))
    (sequences,) = take(1)
    offsets = np.array(take(sequences + 1), np.int64)
    ranges: Ranges = []
    for _ in range(ranks.size):
        (count,) = take(1)
        ends = take(2 * count)
        ranges.append(list(zip(ends[::2], ends[1::2])))
    return CPContext(ranks, offsets, ranges, width or None, LAYOUTS[layout], STRATEGIES[strategy], EXCHANGES[exchange],
                     threads, float(np.int64(speed).view(np.float64)) or None)


def context_of(handle: Tensor) -> CPContext:
    """The context whose handle a call got."""
    found = _living.get(int(handle[0]))
    return _decoded(handle.tolist()) if found is None else found


# ---- building ----


def process_group(group: Any) -> dist.ProcessGroup:
    if hasattr(group, "get_group") and hasattr(group, "ndim"):  # a DeviceMesh
        if group.ndim != 1:
            raise ValueError(f"group: expected a DeviceMesh of 1 dimension, got one of {group.ndim}")
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: expected a ProcessGroup or a DeviceMesh of 1 dimension, got {type(group).__name__}")
    if dist.get_rank(group) < 0:
        raise ValueError("group: expected one that this process belongs to, got another one")
    if torch.device("cpu") not in group._device_types:
        raise ValueError("group: expected one with a backend for CPU tensors, as of init_process_group('gloo') or "
                         f"('cpu:gloo,cuda:nccl'), got {dist.get_backend(group)}")
    return group


def _offsets(cu_seqlens: Any, cu_seqlens_cpu: Optional[Tensor]) -> np.ndarray:
    for name, x in (("cu_seqlens", cu_seqlens), ("cu_seqlens_cpu", cu_seqlens_cpu)):
        if x is None and name == "cu_seqlens_cpu":
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
        if x.dim() != 1 or len(x) == 0 or x.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name}: expected int32 or int64 offsets [N + 1], got {x.dtype} {list(x.shape)}")
    offsets = (cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu).detach().cpu().numpy().astype(np.int64)
    if cu_seqlens_cpu is not None and cu_seqlens_cpu.shape != cu_seqlens.shape:
        raise ValueError(f"cu_seqlens_cpu: expected a copy of cu_seqlens {list(cu_seqlens.shape)}, got "
                         f"{list(cu_seqlens_cpu.shape)}")
    if offsets[0] != 0:
        raise ValueError(f"cu_seqlens: expected offsets that start at 0, got {offsets[0]}")
    if len(falls := np.flatnonzero(np.diff(offsets) < 0)):
        raise ValueError(f"cu_seqlens: expected offsets that do not decrease, got {offsets[falls[0] + 1]} behind "
                         f"{offsets[falls[0]]}")
    return offsets


def _one_of(name: str, value: Any, names: Sequence[str]) -> str:
    if value not in tuple(names):
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, names))}, got {value!r}")
    return value


def _width(conv1d_kernel_size: Optional[int]) -> Optional[int]:
    if conv1d_kernel_size is None:
        return None
    if not 1 <= (width := integer("conv1d_kernel_size", conv1d_kernel_size)) <= 64:
        raise ValueError(f"conv1d_kernel_size: expected 1 to 64, got {width}")
    return width


def _speed(link_gbits: Optional[float]) -> Optional[float]:
    if link_gbits is not None and (speed := number("link_gbits", link_gbits)) <= 0:
        raise ValueError(f"link_gbits: expected a positive number, got {speed}")
    return None if link_gbits is None else float(speed)


def build_cp_context(
    cu_seqlens: Tensor, group: Union[dist.ProcessGroup, Any], conv1d_kernel_size: Optional[int] = None,
    cu_seqlens_cpu: Optional[Tensor] = None, *, layout: str = "contiguous",
    token_ranges: Optional[Sequence[Sequence[Range]]] = None, strategy: str = "auto", exchange: str = "auto",
    link_gbits: Optional[float] = None,
) -> CPContext:
    """The context of a batch of packed sequences that is cut over the ranks of `group`: build one for each batch.

    cu_seqlens [N + 1], int32 or int64: where the sequences begin and end in the whole batch, as if one process held it
    (cu_seqlens_cpu: a host copy). group: a ProcessGroup that can send tensors of the CPU (gloo), or a DeviceMesh of one
    dimension. conv1d_kernel_size: W of short convolutions, which is then checked.

    layout: "contiguous", rank r holds the r-th of as many equal parts as there are ranks, or "zigzag", parts r and
    2 ranks - 1 - r of twice as many, in this order. Tokens that do not divide are cut at multiples of 64, as long as
    there are enough. token_ranges: instead, for every rank its (begin, end) in the batch, in the order in which it
    holds them; of any lengths, also none.

    strategy: how states get from rank to rank. "summary": all ranks summarise their pieces, exchange the summaries and
    compute; "ring": each waits for the state of the one before, by groups of heads; "heads": every rank computes whole
    sequences of some heads (the number of heads has to be a multiple of the ranks); "auto": what a model of the times
    finds fastest, from tokens, heads, ranks, the threads that PyTorch has on the rank with the fewest, and link_gbits:
    what a rank sends in a second, in Gbit [8]. exchange, of summaries: "all_gather", "doubling" (fewer messages, more
    products), or "auto".

    The ranks compare what they were given: a difference is a ValueError on all of them, as wrong arguments of one are.
    Every rank has to make the same calls with the context, forward and backward, in the same order.
    """
    ranks = ranks_of(process_group(group))
    with Conversation(ranks, "build_cp_context") as talk:
        threads = min(talk.numbers((0,), torch.get_num_threads()))
        offsets = _offsets(cu_seqlens, cu_seqlens_cpu)
        context = CPContext(
            ranks, offsets, _ranges(token_ranges, int(offsets[-1]), ranks.size, _one_of("layout", layout, LAYOUTS)),
            _width(conv1d_kernel_size), layout, _one_of("strategy", strategy, STRATEGIES),
            _one_of("exchange", exchange, EXCHANGES), threads, _speed(link_gbits))
        talk.agree({"cu_seqlens": offsets.tobytes(), "token_ranges": context.token_ranges,
                    "conv1d_kernel_size": context.conv1d_kernel_size, "layout": layout, "strategy": strategy,
                    "exchange": exchange, "link_gbits": context.link_gbits, "version of headrace": _core.version()})
    return context


def _ranges(token_ranges: Optional[Sequence[Sequence[Range]]], tokens: int, ranks: int, layout: str) -> Ranges:
    if token_ranges is None:
        return default_ranges(tokens, ranks, layout)
    try:
        return check_ranges(token_ranges, tokens, ranks)
    except TypeError:
        raise TypeError("token_ranges: expected for each rank a list of pairs (begin, end), got "
                        f"{token_ranges!r}") from None
