"""Cases of an inference beside the peers that are installed: measured in turns, as a table, and where a peer wins."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence

import torch

from headrace._measuring import in_turns, progress, turn_of
from headrace.bench._cases import CASES, Case, tensors_of
from headrace.bench._contenders import FACES, Maker, admitted, is_peer, like

TURN = 0.01  # seconds

HEADER = [f"{'':56}{'time over that of headrace':>27}",
          f"{'':36}{'least us':>10}{'median us':>10}" + "".join(f"{face:>9}" for face in FACES.values())]


class Measured(NamedTuple):
    """The seconds of every call of every turn, by contender; why others are left out."""

    turns: Dict[str, List[List[float]]]
    left_out: Dict[str, str]

    def least(self, name: str) -> float:
        return min(min(turn) for turn in self.turns[name])

    def median(self, name: str) -> float:
        return statistics.median(time for turn in self.turns[name] for time in turn)

    def ratio(self, name: str, beside: Optional[str] = None) -> float:
        """The median over the rounds of the quotient of the turns' medians: above 1 where `beside` is faster.

        Without `beside`: where headrace is, called in the same way.
        """
        pairs = zip(self.turns[name], self.turns[beside or like(name)])
        return statistics.median(statistics.median(x) / statistics.median(y) for x, y in pairs)

    def of_least(self, name: str, beside: Optional[str] = None) -> float:
        """The same of the least times, which other programs on the machine cannot change."""
        return self.least(name) / self.least(beside or like(name))

    def peers(self) -> List[str]:
        return [name for name in self.turns if is_peer(name)]


Results = Dict[str, Measured]  # by problem lines


class Effort(NamedTuple):
    """Seconds per contender and rounds, both at least; the seconds that a call may take."""

    seconds: float
    rounds: int
    limit: float


def measure(case: Case, makers: Dict[str, Maker], effort: Effort, title: str, later: float) -> Measured:
    """One case, with as many threads for everyone."""
    before = torch.get_num_threads()
    torch.set_num_threads(case.threads)
    try:
        progress(f"{title}: first calls")
        found, reasons = admitted(case, tensors_of(case), makers, effort.limit)
        calls: Dict[str, Callable[[], List[float]]] = {
            name: partial(turn_of, contender.call, TURN) for name, contender in found.items()}
        return Measured(in_turns(calls, effort.seconds, effort.rounds, title, later), reasons)
    finally:
        torch.set_num_threads(before)


def rows(line: str, measured: Measured) -> List[str]:
    """Lines of text of one case."""
    lines = [line]
    for name in measured.turns:
        text = f"  {name:34}{1e6 * measured.least(name):10.1f}{1e6 * measured.median(name):10.1f}"
        ratios = [f"{measured.ratio(name, beside):9.2f}" if beside in measured.turns and name != beside else 9 * " "
                  for beside in FACES]
        lines.append((text + "".join(ratios)).rstrip())
    return lines + [f"  {name:34}left out: {reason}" for name, reason in measured.left_out.items()]


def summary(results: Results) -> List[str]:
    """In how many cases a peer is faster, and in which: by least times, then by the median of the rounds."""
    lines = []
    faces: Dict[Optional[str], str] = {None: "called alike from Python"}
    faces.update({name: f"from {face}" for name, face in FACES.items()})
    for by, quotient in (("least times", Measured.of_least), ("medians", Measured.ratio)):
        for beside, face in faces.items():
            with_it = {line: measured for line, measured in results.items()
                       if beside is None or beside in measured.turns}
            ratios = [(quotient(measured, name, beside), name, line) for line, measured in with_it.items()
                      for name in measured.peers()]
            lost = sorted(entry for entry in ratios if entry[0] < 1)
            if with_it:
                cases = len({line for _, _, line in lost})
                lines.append(f"{face}, by {by}: a peer is faster in {cases} of {len(with_it)} cases")
            lines += [f"  {ratio:5.2f}  {name:32}{line}" for ratio, name, line in lost]
    return lines


def compare(groups: Sequence[str], makers: Dict[str, Maker], effort: Effort, results: Results) -> None:
    """Prints a table of each case as soon as it is measured, and keeps it in `results`."""
    cases = [case for group in groups for case in CASES[group]]
    print("\n".join(HEADER), flush=True)
    for i, case in enumerate(cases):
        later = effort.seconds * len(makers) * (len(cases) - i - 1)
        results[case.line] = measure(case, makers, effort, f"case {i + 1} of {len(cases)}", later)
        print("\n".join(rows(case.line, results[case.line])), flush=True)
