"""Which rank is lost, where one waits for another that waits for a third: ranks leave a note in the group's store."""

from __future__ import annotations

import threading
import time
from typing import Any, List, Optional

import torch.distributed as dist

# Seconds for a rank that lives to leave its note. Where a rank dies, others hear of it at one time; where one is
# silent, they give up one after the other, as they have begun to wait.
_PATIENCE, _LONGEST, _SHARE = 0.25, 10.0, 0.25


def _store(group: dist.ProcessGroup) -> Optional[dist.Store]:
    entry = dist.distributed_c10d._world.pg_map.get(group)
    return None if entry is None else entry[1]


def _search(store: dist.Store, call: int, rank: int, missed: int, found: List[int], patience: float) -> None:
    def note(of: int) -> str:
        return f"headrace/{call}/{of}"

    store.set(note(rank), str(missed))
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if store.check([note(missed)]):
            behind = int(store.get(note(missed)))
            if behind == rank or behind in found:
                break
            missed = behind
            found.append(missed)
        else:
            time.sleep(0.01)


def culprit(group: dist.ProcessGroup, call: int, rank: int, missed: int, waited: Optional[float]) -> int:
    """The rank at the end of the notes: `rank` has missed `missed`, which may itself have missed another one.

    waited: the seconds until a timeout, if it was one. A store that does not answer (its host may be the lost rank)
    leaves the rank that was missed.
    """
    found, store = [missed], _store(group)
    patience = _PATIENCE if waited is None else max(_PATIENCE, min(_LONGEST, _SHARE * waited))
    if store is not None:
        search = threading.Thread(target=_quietly, args=(store, call, rank, missed, found, patience), daemon=True)
        search.start()
        search.join(patience + 0.2)
    return found[-1]


def _quietly(*arguments: Any) -> None:
    try:
        _search(*arguments)
    except RuntimeError:
        pass
