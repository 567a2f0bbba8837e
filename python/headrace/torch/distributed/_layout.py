"""Where the tokens of packed sequences lie on ranks: slots, pieces of sequences in them, and what depends on what."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Dict, List, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor

Range = Tuple[int, int]
Ranges = List[List[Range]]  # of each rank, in the order in which it holds them

BLOCK = 64  # chunks begin at multiples of it: cuts there change no bit of an output


def _cuts(tokens: int, count: int) -> List[Range]:
    """`count` equal parts of the tokens; where that leaves a remainder, whole blocks as long as there are enough."""
    blocks = -(-tokens // BLOCK)
    unit, units = (BLOCK, blocks) if tokens % count and blocks >= count else (1, tokens)
    sizes = [units // count + (i < units % count) for i in range(count)]
    ends = [min(end * unit, tokens) for end in np.cumsum(sizes).tolist()]
    return list(zip([0, *ends], ends))


def default_ranges(tokens: int, ranks: int, layout: str) -> Ranges:
    """contiguous: one part for each rank; zigzag: parts r and 2 ranks - 1 - r of twice as many."""
    if layout == "contiguous":
        return [[part] for part in _cuts(tokens, ranks)]
    parts = _cuts(tokens, 2 * ranks)
    return [[parts[r], parts[-1 - r]] for r in range(ranks)]


def check_ranges(ranges: Sequence[Sequence[Sequence[int]]], tokens: int, ranks: int) -> Ranges:
    """The ranges as lists of pairs, if they tile the tokens."""
    if len(ranges) != ranks:
        raise ValueError(f"token_ranges: expected a list of ranges for each of the {ranks} ranks of the group, got "
                         f"{len(ranges)}")
    result = [[(int(begin), int(end)) for begin, end in mine] for mine in ranges]
    reached = 0
    for begin, end in sorted(part for mine in result for part in mine if part[0] != part[1]):
        if begin != reached or end < begin:
            raise ValueError(f"token_ranges: expected ranges that cover each of the {tokens} tokens once, got "
                             f"({begin}, {end}) behind token {reached}")
        reached = end
    if reached != tokens:
        raise ValueError(f"token_ranges: expected ranges that cover each of the {tokens} tokens once, got an end at "
                         f"{reached}")
    return result


@dataclass(frozen=True)
class Slot:
    """Tokens begin to end of the batch, one of the ranges of a rank, and the sequences that have pieces there."""

    rank: int
    begin: int
    end: int
    offset: int  # of its first token on the rank
    first: int  # sequences first to last - 1, the first and the last perhaps cut
    last: int
    piece: int  # the number of its first piece on the rank
    is_entered: bool  # its first sequence begins in an earlier slot
    is_left: bool  # its last sequence ends in a later slot

    @property
    def is_through(self) -> bool:
        return self.is_entered and self.is_left and self.last == self.first + 1

    @property
    def pieces(self) -> int:
        return self.last - self.first

    def enters(self, reverse: bool) -> bool:
        """Whether a state comes from the slot before, in the order of the recurrence."""
        return self.is_left if reverse else self.is_entered

    def leaves(self, reverse: bool) -> bool:
        return self.is_entered if reverse else self.is_left


@dataclass(frozen=True)
class Part:
    """Tokens begin to end of a rank and their pieces first to last - 1: what one call of the library computes.

    A piece that a state enters or leaves is alone in its part.
    """

    slot: int
    begin: int
    end: int
    first: int
    last: int
    cu_seqlens: Tensor
    enters: bool
    leaves: bool


class Layout:
    """Slots of all ranks in the order of tokens, and the pieces of one rank in the order in which it holds them."""

    def __init__(self, offsets: np.ndarray, ranges: Ranges, rank: int) -> None:
        self.offsets, self.ranges, self.rank = offsets, ranges, rank
        self.tokens, self.sequences = int(offsets[-1]), len(offsets) - 1
        self.longest = int(np.diff(offsets).max(initial=0))
        self.slots = self._slots()
        self.numbers = {slot: number for number, slot in enumerate(self.slots)}
        self.of_rank: List[List[Slot]] = [[] for _ in ranges]
        for slot in sorted(self.slots, key=lambda slot: slot.offset):
            self.of_rank[slot.rank].append(slot)
        self.own = self.of_rank[rank]
        self.lengths = [sum(slot.end - slot.begin for slot in mine) for mine in self.of_rank]
        bounds = [np.clip(offsets[s.first + 1 : s.last + 1], s.begin, s.end) + (s.offset - s.begin) for s in self.own]
        self.cu_seqlens = np.concatenate([np.zeros(1, np.int64), *bounds])

    def _slots(self) -> List[Slot]:
        runs: List[Tuple[int, int, int, int]] = []  # rank, begin, end, offset
        for rank, ranges in enumerate(self.ranges):
            offset = 0
            for begin, end in ranges:
                if begin == end:
                    continue
                runs.append((rank, begin, end, offset))
                offset += end - begin
        if not runs and self.sequences:
            runs = [(0, 0, 0, 0)]  # sequences without tokens: their states are on the first rank
        starts, pieces, result = self.offsets[:-1], [0] * len(self.ranges), []
        order = sorted(range(len(runs)), key=lambda i: runs[i][1])
        found: Dict[int, Tuple[int, int, bool, bool]] = {}
        for i in order:
            _, begin, end, _ = runs[i]
            first, last = (int(np.searchsorted(starts, at)) for at in (begin, end))
            last = self.sequences if i == order[-1] else last
            entered = first > 0 and self.offsets[first] > begin
            found[i] = first - entered, last, bool(entered), bool(self.offsets[last] > end)
        for i, (rank, begin, end, offset) in enumerate(runs):
            first, last, entered, left = found[i]
            result.append(Slot(rank, begin, end, offset, first, last, pieces[rank], entered, left))
            pieces[rank] += last - first
        return [result[i] for i in order]

    @cached_property
    def pieces(self) -> int:
        return len(self.cu_seqlens) - 1

    def flags(self, at_begin: bool) -> np.ndarray:
        """Of each piece of the rank, whether its sequence begins (ends) with it."""
        result = np.ones(self.pieces, bool)
        for slot in self.own:
            if slot.is_entered if at_begin else slot.is_left:
                result[slot.piece if at_begin else slot.piece + slot.pieces - 1] = False
        return result

    def sequences_of(self, rank: int, at_begin: bool) -> Tuple[np.ndarray, np.ndarray]:
        """(pieces of the rank with which a sequence begins (ends), these sequences)."""
        rows, names = [], []
        for slot in self.of_rank[rank]:
            skipped = slot.is_entered if at_begin else slot.is_left
            low, high = (int(skipped), slot.pieces) if at_begin else (0, slot.pieces - skipped)
            rows.append(np.arange(slot.piece + low, slot.piece + high))
            names.append(np.arange(slot.first + low, slot.first + high))
        empty = [np.zeros(0, np.int64)]
        return np.concatenate(rows or empty), np.concatenate(names or empty)

    def places(self, rank: int) -> np.ndarray:
        """The places in the batch of a rank's tokens."""
        return np.concatenate([np.zeros(0, np.int64), *(np.arange(*part) for part in self.ranges[rank])])

    def before(self, number: int, reverse: bool) -> int:
        return number + 1 if reverse else number - 1

    def after(self, number: int, reverse: bool) -> int:
        return number - 1 if reverse else number + 1

    def sources(self, number: int, reverse: bool) -> List[int]:
        """The slots whose summaries make the state that enters slot `number`, the nearest first."""
        result: List[int] = []
        while self.slots[number].enters(reverse):
            number = self.before(number, reverse)
            result.append(number)
            if not self.slots[number].is_through:
                break
        return result

    def entered(self, reverse: bool) -> List[int]:
        """The rank's slots that a state enters, in the order of the recurrence."""
        own = [self.numbers[slot] for slot in self.own if slot.enters(reverse)]
        return sorted(own, reverse=reverse)

    def left(self, reverse: bool) -> List[int]:
        own = [self.numbers[slot] for slot in self.own if slot.leaves(reverse)]
        return sorted(own, reverse=reverse)

    def entered_piece(self, number: int, reverse: bool) -> int:
        """The rank's piece that the state entering slot `number` belongs to."""
        slot = self.slots[number]
        return slot.piece + slot.pieces - 1 if reverse else slot.piece

    def left_piece(self, number: int, reverse: bool) -> int:
        return self.entered_piece(number, not reverse)

    def piece_tokens(self, piece: int) -> Range:
        return int(self.cu_seqlens[piece]), int(self.cu_seqlens[piece + 1])

    def parts(self, reverse: bool) -> List[Part]:
        """What the rank computes, in order: what others wait for, what nobody does, what waits for a state."""
        if reverse not in self._parts:
            self._parts[reverse] = self._make_parts(reverse)
        return self._parts[reverse]

    @cached_property
    def _parts(self) -> Dict[bool, List[Part]]:
        return {}

    def _make_parts(self, reverse: bool) -> List[Part]:
        leaving: List[Part] = []
        free: List[Part] = []
        entered: List[Part] = []
        for slot in sorted(self.own, key=lambda slot: slot.begin, reverse=reverse):
            number, first, last = self.numbers[slot], slot.piece, slot.piece + slot.pieces
            cut = {}  # pieces that a state enters or leaves: (enters, leaves)
            if slot.leaves(reverse):
                cut[self.left_piece(number, reverse)] = False, True
            if slot.enters(reverse):
                cut[self.entered_piece(number, reverse)] = True, slot.is_through
            for piece, (enters, leaves) in cut.items():
                (entered if enters else leaving).append(self._part(number, piece, piece + 1, enters, leaves))
            first, last = first + (first in cut), last - (last - 1 in cut and last - 1 > first)
            if slot.pieces > len(cut):
                free.append(self._part(number, first, last, False, False))
        return leaving + free + entered

    def _part(self, slot: int, first: int, last: int, enters: bool, leaves: bool) -> Part:
        bounds = self.cu_seqlens[first : last + 1]
        return Part(slot, int(bounds[0]), int(bounds[-1]), first, last, torch.from_numpy(bounds - bounds[0]), enters,
                    leaves)
