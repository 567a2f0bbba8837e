"""Which rank is lost, where one waits for another that waits for a third: ranks leave a note in the group's store."""

from __future__ import annotations

import threading
import time
from typing import List, Optional

import torch.distributed as dist

_PATIENCE = 0.4  # seconds for a rank that lives to leave its note: connections break on all ranks at about one time


def _store(group: dist.ProcessGroup) -> Optional[dist.Store]:
    entry = dist.distributed_c10d._world.pg_map.get(group)
    return None if entry is None else entry[1]


def _search(store: dist.Store, call: int, rank: int, missed: int, found: List[int]) -> None:
    def note(of: int) -> str:
        return f"headrace/{call}/{of}"

    store.set(note(rank), str(missed))
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        if store.check([note(missed)]):
            behind = int(store.get(note(missed)))
            if behind == rank or behind in found:
                break
            missed = behind
            found.append(missed)
        else:
            time.sleep(0.01)


def culprit(group: dist.ProcessGroup, call: int, rank: int, missed: int) -> int:
    """The rank at the end of the notes: `rank` has missed `missed`, which may itself have missed another one.

    A store that does not answer (its host may be the lost rank) leaves the rank that was missed.
    """
    found = [missed]
    store = _store(group)
    if store is not None:
        search = threading.Thread(target=_quietly, args=(store, call, rank, missed, found), daemon=True)
        search.start()
        search.join(_PATIENCE + 0.2)
    return found[-1]


def _quietly(store: dist.Store, call: int, rank: int, missed: int, found: List[int]) -> None:
    try:
        _search(store, call, rank, missed, found)
    except RuntimeError:
        pass
