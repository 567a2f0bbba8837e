"""Messages between the ranks of one call, each behind a status word, so that what fails on one rank fails on all.

Messages travel through the memory of hosts, also between GPUs: what waits for a message has to wait for the device
that makes it anyway. Every rank ends a call with a closing word to every other one. A rank that fails sends an error word instead, which the
others find wherever they wait for it; all of them then read on to the last word of the call, and raise the same error.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any, Dict, List, NamedTuple, NoReturn, Optional, Sequence, Tuple, Type

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from headrace.torch.distributed._lost import culprit

Label = Tuple[int, ...]  # what a message is, up to three small numbers

_TAG = 0x68726370  # of all our messages: others of the same group keep their own
_MESSAGE, _CLOSING, _ERROR, _LOST = range(4)
_ERRORS: Sequence[Type[Exception]] = (RuntimeError, ValueError, TypeError, NotImplementedError, MemoryError)
_FIELDS = 9
_WORD = np.dtype([("call", "<i8"), ("kind", "<i4"), ("origin", "<i4"), ("label", "<i4", (3,)), ("form", "<i4"),
                  ("bytes", "<i8"), ("error", "<i8"), ("fields", "<u8", (_FIELDS,)), ("text", "S400")])
STATUS_BYTES = _WORD.itemsize


class Traffic(NamedTuple):
    """What this process has sent to other ranks: messages, the bytes in them, and those of the status words."""

    messages: int = 0
    payload_bytes: int = 0
    status_bytes: int = 0


_sent = [0, 0, 0]


def traffic() -> Traffic:
    """What this process has sent to other ranks in calls with a context since it started."""
    return Traffic(*_sent)


class Ranks:
    """A process group, and how many calls its ranks have made together."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.calls = 0
        self.lost: Optional[str] = None
        self.unfinished: List[Any] = []  # sends to ranks that may not be there any more, and their memory


_known: Dict[str, Ranks] = {}


def ranks_of(group: dist.ProcessGroup) -> Ranks:
    found = _known.get(group.group_name)
    if found is None or found.group is not group:
        found = _known[group.group_name] = Ranks(group)
    return found


class _Relayed(Exception):
    """The error word of another rank has come."""


class Lost(Exception):
    """A rank does not answer. waited: the seconds until a timeout, if it was one."""

    def __init__(self, rank: int, place: str, waited: Optional[float] = None) -> None:
        self.rank, self.place, self.waited = rank, place, waited


def _padded(label: Label) -> Label:
    return (*label, 0, 0, 0)[:3]


def _is_aligned(part: Tensor, like: Tensor) -> bool:
    """Whether bytes of a message may be seen as values of a type."""
    return part.storage_offset() % like.element_size() == 0


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of the tensors one behind the other, on the CPU; of a single one there without gaps its own memory."""
    tensors = [x.cpu() for x in tensors]
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return tensors[0].view(-1).view(torch.uint8)
    sizes = [x.numel() * x.element_size() for x in tensors]
    data = torch.empty(sum(sizes), dtype=torch.uint8)
    for x, part in zip(tensors, data.split(sizes)):
        if _is_aligned(part, x):
            part.view(x.dtype).view(x.shape).copy_(x)
        else:
            part.copy_(x.contiguous().view(-1).view(torch.uint8))
    return data


def digest(value: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little")


class Conversation:
    """One call on all ranks: with Conversation(ranks, "kda forward") as talk: talk.send(...); talk.receive(...).

    fields: what has to be the same on every rank, by name. An exception inside is raised on all ranks.
    """

    def __init__(self, ranks: Ranks, name: str, fields: Optional[Dict[str, Any]] = None) -> None:
        if ranks.lost is not None:
            raise RuntimeError(f"{name}: expected a group with all of its ranks, got one of which {ranks.lost}")
        self.ranks, self.name, self.group = ranks, name, ranks.group
        self.call, ranks.calls = ranks.calls, ranks.calls + 1
        self.others = [r for r in range(ranks.size) if r != ranks.rank]
        self.final: Dict[int, np.ndarray] = {}  # the last words of other ranks
        # Messages that came before they were asked for, and those to this rank itself.
        self._waiting: Dict[Tuple[int, Label], List[Tuple[Tensor, int]]] = {}
        self._sends: List[Tuple[int, Any, Tensor]] = []
        self.names: List[str] = []
        self.digests = np.zeros(_FIELDS, "<u8")
        if fields is not None:
            self.agree(fields)

    def agree(self, fields: Dict[str, Any]) -> None:
        """Says what has to be the same on every rank; the next word of another rank shows whether it is."""
        self.names = ["call", *fields]
        self.digests[: len(self.names)] = [digest(value) for value in (self.name, *fields.values())]

    # ---- messages ----

    def send(self, rank: int, label: Label, *tensors: Tensor, form: int = 0) -> None:
        """Sends the tensors' values; they may change only after the call. form: a number that comes along."""
        data, label = _joined([x for x in tensors if x.numel()]), _padded(label)
        if rank == self.ranks.rank:
            self._waiting.setdefault((rank, label), []).append((data, form))
            return
        self._post(rank, self._word(_MESSAGE, label=label, form=form, size=data.numel()))
        if data.numel():
            self._start(rank, data)
        _sent[0] += 1
        _sent[1] += data.numel()

    def receive(self, rank: int, label: Label, *results: Tensor) -> None:
        """Waits for the message of this label and writes its values into the tensors."""
        data, _ = self.take(rank, label)
        self.place(rank, data, results)

    @staticmethod
    def place(rank: int, data: Tensor, results: Sequence[Tensor]) -> None:
        """Writes the bytes of a message from the rank into the tensors."""
        targets = [x for x in results if x.numel()]
        sizes = [x.numel() * x.element_size() for x in targets]
        if sum(sizes) != data.numel():
            raise ValueError(f"expected a message of {sum(sizes)} bytes from rank {rank}, got {data.numel()}")
        for target, part in zip(targets, data.split(sizes)):
            if not _is_aligned(part, target):
                part = part.clone()
            target.copy_(part.view(target.dtype).view(target.shape))

    def take(self, rank: int, label: Label) -> Tuple[Tensor, int]:
        """(the bytes of the message of this label, its form)."""
        label = _padded(label)
        while True:
            early = self._waiting.get((rank, label))
            if early:
                return early.pop(0)
            word = self._next(rank, f"message {label}")
            data = self._payload(rank, word) if word["kind"] == _MESSAGE else None
            self._compare(rank, word)
            if data is None:
                raise RuntimeError(f"expected message {label} from rank {rank}, got the end of its call")
            self._waiting.setdefault((rank, tuple(word["label"].tolist())), []).append((data, int(word["form"])))

    def numbers(self, label: Label, number: int) -> List[int]:
        """The small numbers of all ranks, this one's the last."""
        for rank in self.others:
            self.send(rank, label, form=number)
        return [*(self.take(rank, label)[1] for rank in self.others), number]

    def _payload(self, rank: int, word: np.ndarray) -> Tensor:
        data = torch.empty(int(word["bytes"]), dtype=torch.uint8)
        if data.numel():
            self._wait(rank, data, f"message {tuple(word['label'].tolist())}")
        return data

    # ---- words ----

    def _word(self, kind: int, label: Label = (), form: int = 0, size: int = 0, origin: int = -1, error: int = 0,
              text: bytes = b"") -> np.ndarray:
        word = np.zeros(1, _WORD)
        row = word[0]
        row["call"], row["kind"], row["origin"], row["bytes"], row["error"] = self.call, kind, origin, size, error
        row["label"], row["form"] = _padded(label), form
        row["fields"], row["text"] = self.digests, text
        return word

    def _post(self, rank: int, word: np.ndarray) -> None:
        self._start(rank, torch.from_numpy(word.view(np.uint8)))
        _sent[2] += STATUS_BYTES

    def _start(self, rank: int, data: Tensor) -> None:
        try:
            self._sends.append((rank, self.group.send([data], rank, _TAG), data))
        except RuntimeError as error:
            raise Lost(rank, "a send") from error

    def _wait(self, rank: int, data: Tensor, place: str) -> None:
        start = time.monotonic()
        try:
            self.group.recv([data], rank, _TAG).wait()
        except RuntimeError as error:
            raise Lost(rank, place, time.monotonic() - start if "imed out" in str(error) else None) from error

    def _next(self, rank: int, place: str) -> np.ndarray:
        """The next word of the rank; an error if it is one, or if the rank is not in this call."""
        if rank in self.final:
            raise RuntimeError(f"expected {place} from rank {rank}, got the end of its call")
        word = np.zeros(1, _WORD)
        self._wait(rank, torch.from_numpy(word.view(np.uint8)), place)
        row = word[0]
        if row["call"] != self.call:
            raise RuntimeError(f"expected call {self.call} of the group on every rank, got call {row['call']} on rank "
                               f"{rank}")
        if row["kind"] != _MESSAGE:
            self.final[rank] = row
        if row["kind"] in (_ERROR, _LOST):
            raise _Relayed
        return row

    def _compare(self, rank: int, word: np.ndarray) -> None:
        different = np.flatnonzero(word["fields"] != self.digests)
        if len(different) and self.names:
            name = self.names[different[0]] if different[0] < len(self.names) else "call"
            a, b = sorted((rank, self.ranks.rank))
            raise ValueError(f"{name}: expected the same on every rank, got different ones on ranks {a} and {b}")

    # ---- the end ----

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, kind: Any, error: Optional[BaseException], trace: Any) -> None:
        if isinstance(error, Lost):
            self._leave(error)
        own = None if isinstance(error, _Relayed) else error
        if own is not None and not isinstance(own, Exception):  # interrupted: it does not wait for the others
            return self._abandon(own)
        try:
            self._close(own)
        except Lost as lost:
            self._leave(lost)

    def _close(self, own: Optional[BaseException]) -> None:
        relayed = next((word for word in self.final.values() if word["kind"] in (_ERROR, _LOST)), None)
        if relayed is not None and relayed["kind"] == _LOST:
            self._give_up(relayed)
        last = self._error_word(own) if own is not None else relayed
        word = self._word(_CLOSING) if last is None else np.array([last])
        for rank in self.others:
            self._post(rank, word)
        for rank in self.others:
            while rank not in self.final:
                self._skip(rank)
            if self.final[rank]["kind"] == _LOST:
                self._give_up(self.final[rank])
        failed = [word for word in (*self.final.values(), *word) if word["kind"] in (_ERROR, _LOST)]
        mismatch = None
        if not failed:
            mismatch = self._mismatch()
        for rank, work, _ in self._sends:
            try:
                work.wait()
            except RuntimeError as error:
                raise Lost(rank, "a send") from error
        if mismatch is not None:
            raise ValueError(mismatch)
        if failed:
            self._raise(min(failed, key=lambda word: int(word["origin"])), own)

    def _abandon(self, own: BaseException) -> None:
        self.ranks.lost = f"rank {self.ranks.rank} was interrupted"
        for rank in self.others:
            try:
                self._post(rank, np.array([self._error_word(own)]))
            except Lost:
                pass
        self.ranks.unfinished += self._sends

    def _skip(self, rank: int) -> None:
        """Reads one word, and what stands behind it."""
        try:
            word = self._next(rank, "the closing word")
        except _Relayed:
            return
        if word["kind"] == _MESSAGE:
            self._payload(rank, word)

    def _mismatch(self) -> Optional[str]:
        """What differs, the same sentence on all ranks: they all know all closing words."""
        rows = {**self.final, self.ranks.rank: self._word(_CLOSING)[0]}
        for rank in range(1, self.ranks.size):
            different = np.flatnonzero(rows[rank]["fields"] != rows[0]["fields"])
            if len(different):
                name = self.names[different[0]] if different[0] < len(self.names) else "call"
                return f"{name}: expected the same on every rank, got another one on rank {rank} than on rank 0"
        return None

    def _error_word(self, error: BaseException) -> np.ndarray:
        number = next((i for i, cls in reversed(list(enumerate(_ERRORS))) if isinstance(error, cls)), 0)
        text = str(error) if isinstance(error, _ERRORS[number]) else f"{type(error).__name__}: {error}"
        return self._word(_ERROR, origin=self.ranks.rank, error=number, text=text.encode()[:400])[0]

    def _raise(self, word: np.ndarray, own: Optional[BaseException]) -> None:
        text = bytes(word["text"]).decode(errors="replace")
        cause = own if int(word["origin"]) == self.ranks.rank else None
        raise _ERRORS[int(word["error"])](f"rank {word['origin']}: {text}") from cause

    def _leave(self, lost: Lost) -> None:
        """Finds out which rank is lost, where this one waited for one that may have waited, too."""
        found = culprit(self.group, self.call, self.ranks.rank, lost.rank, lost.waited)
        text = (f"{self.name}: rank {found} was lost; rank {self.ranks.rank} waited for {lost.place} from rank "
                f"{lost.rank}")
        self._give_up(self._word(_LOST, origin=found, text=text.encode()[:400])[0], lost.__cause__, lost.rank)

    def _give_up(self, word: np.ndarray, cause: Optional[BaseException] = None, missed: int = -1) -> NoReturn:
        """Tells the others of a lost rank, as far as that is possible, and raises."""
        for rank in self.others:
            if rank not in (word["origin"], missed):
                try:
                    self._post(rank, np.array([word]))
                except Lost:
                    pass
        self.ranks.lost = f"rank {word['origin']} was lost"
        self.ranks.unfinished += self._sends
        time.sleep(0.01)  # words leave before a caller that gives up closes its connections
        raise RuntimeError(bytes(word["text"]).decode(errors="replace")) from cause
