#!/usr/bin/env python3
"""Mutates executed statements of the kernels' PTX, one at a time, and counts how many of the mutants a check notices.

    mutate_ptx.py --headrace build/ptx/tools/headrace/headrace --runtime build/ptx/tests/ptx/runtime --mutants 200

The problems are those of mutation_problems.txt; a mutant is checked with those that execute its statement, the quick
ones first, until one misses, faults or does not end. A survivor that a rule proves to be the same program is called
equivalent. With a build of CMAKE_CUDA_FLAGS=-lineinfo each mutant has its place in the sources. Exit code 1: less than
--bar of the others was noticed.
"""

import argparse
import collections
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import time

import coverage
import ptx_mutations

HERE = pathlib.Path(__file__).resolve().parent
NEARBY = 12  # lines in which a register is looked for that takes the place of another
# Moves without effect on what the machine keeps: a mutant of them is none.
LEFT_ALONE = ("cvta", "bra.uni", "ret")


class Checks:
    """Runs of `headrace check` on the interpreter."""

    def __init__(self, headrace, runtime, scratch):
        self.headrace, self.scratch = headrace, scratch
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        self.environment = {**kept, "LD_LIBRARY_PATH": str(runtime), "HEADRACE_PTX_MEMORY": str(1 << 30)}

    def run(self, problems, limit, **settings):
        """What is wrong, or '': over the problems, in one process."""
        environment = {**self.environment, **{f"HEADRACE_PTX_{name}": str(value) for name, value in settings.items()}}
        path = self.scratch / "problems.txt"
        path.write_text("\n".join(problems) + "\n", encoding="utf-8")
        try:
            result = subprocess.run([str(self.headrace), "check", "--file", str(path)], env=environment, timeout=limit,
                                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                                    check=False)
        except subprocess.TimeoutExpired:
            return "does not end"
        if result.returncode == 0:
            return ""
        return f"exit code {result.returncode}: {result.stdout.strip()[:300]}"


class Problem:
    """A line, its time and the statements that it executes: {kernel: {line of the text}}."""

    def __init__(self, text, checks):
        self.text = text
        counts = checks.scratch / "counts"
        counts.unlink(missing_ok=True)
        begin = time.monotonic()
        wrong = checks.run([text], 120, COVERAGE=counts)
        self.seconds = time.monotonic() - begin
        if wrong:
            raise SystemExit(f"without a mutation: {text}: {wrong}")
        self.executed = {kernel: set(lines) for kernel, lines in coverage.read_counts([counts])[1].items()}


class Mutant:
    """One statement of one text, changed."""

    def __init__(self, text, kernel, statement, title, changed):
        self.text, self.kernel, self.title, self.changed = text, kernel, title, changed
        self.line, self.original = statement.line, statement.text
        self.place = " < ".join(place for place in (statement.place, statement.caller) if place)

    def written(self, path):
        lines = list(self.text.lines)
        lines[self.line - 1] = self.changed
        path.write_text("\n".join(lines), encoding="utf-8")

    def same_program(self):
        """The rule that proves it equivalent, or ''."""
        index = self.line - 1
        if self.title == "no barrier" and self.between_barriers(index):
            return "no memory is touched between this barrier and the next or the last"
        target = re.match(r"\s*(?:@!?%\w+\s+)?[\w.]+\s+(%\w+)\s*,", self.original)
        if target and not self.original.startswith(("st", "atom", "red")):
            body = "\n".join(other.text for other in self.text.kernels[self.kernel] if other.line != self.line)
            if not re.search(re.escape(target.group(1)) + r"(?!\d)", body):
                return "nothing reads the result"
        return ""

    def tried_by_none(self, problems):
        """Whether it takes away the guard of a branch that no problem went past: of the problems, not of the kernel."""
        statements = self.text.kernels[self.kernel]
        following = [statement.line for statement in statements if statement.line > self.line][:1]
        executed = any(line in problem.executed.get(self.kernel, ()) for problem in problems for line in following)
        return self.title == "no guard" and "bra" in self.original and not executed

    def between_barriers(self, index):
        for step in (1, -1):
            at = index + step
            while 0 <= at < len(self.text.lines):
                line = self.text.lines[at]
                if re.match(r"\s*bar(rier)?\.", line):
                    return True
                if re.search(r"\b(ld|st|atom|red|cp|bra|ret)\b|^\$|^\}", line):
                    break
                at += step
        return False

    def __str__(self):
        place = f" ({self.place})" if self.place else ""
        return f"{self.title}: {self.original}{place}"


def problems_and_texts(checks, path):
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    texts = checks.scratch / "texts"
    texts.mkdir()
    wrong = checks.run(lines[:1], 120, DUMP=texts)
    if wrong:
        raise SystemExit(wrong)
    problems = sorted((Problem(line, checks) for line in lines), key=lambda problem: problem.seconds)
    return problems, [coverage.Text(path) for path in sorted(texts.glob("*.ptx"))]


def draw_mutants(texts, problems, count, seed):
    """Statements with equal chances, then one of a statement's mutations with equal chances."""
    rng = random.Random(seed)
    executed = collections.defaultdict(set)
    for problem in problems:
        for kernel, lines in problem.executed.items():
            executed[kernel] |= lines
    places = [(text, kernel, i) for text in texts for kernel, statements in text.kernels.items()
              for i, statement in enumerate(statements) if statement.line in executed[kernel]]
    print(f"{len(places)} executed statements of {sum(len(its) for text in texts for its in text.kernels.values())}")
    mutants = []
    for text, kernel, i in rng.sample(places, len(places)):
        if len(mutants) == count:
            break
        statements = text.kernels[kernel]
        if statements[i].text.startswith(LEFT_ALONE):
            continue
        around = statements[max(0, i - NEARBY):i] + statements[i + 1:i + 1 + NEARBY]
        nearby = [name for other in around for name in ptx_mutations.REGISTER.findall(other.text)]
        found = ptx_mutations.mutations_of(statements[i].text, nearby, rng)
        if found:
            mutants.append(Mutant(text, kernel, statements[i], *rng.choice(found)))
    return mutants


def verdict(mutant, problems, checks):
    """What noticed it, or ''."""
    path = checks.scratch / "mutant.ptx"
    mutant.written(path)
    reaching = [problem for problem in problems if mutant.line in problem.executed.get(mutant.kernel, ())]
    for batch in (reaching[:1], reaching[1:4], reaching[4:]):
        limit = 5 + 20 * sum(problem.seconds for problem in batch)
        wrong = checks.run([problem.text for problem in batch], limit, TEXT=path) if batch else ""
        if wrong:
            return wrong
    return ""


def kind_of(wrong):
    if wrong == "does not end":
        return wrong
    return "fault" if wrong.startswith("exit code 86") else "miss" if wrong.startswith("exit code 1:") else "death"


def report(found, equivalent, survivors, bar):
    killed = sum(found.values())
    score = killed / max(1, killed + len(survivors))
    print("noticed: " + ", ".join(f"{count} {kind}" for kind, count in found.most_common()))
    print(f"{killed} noticed, {len(survivors)} survived, {equivalent} equivalent: {score:.1%}")
    return 0 if score >= bar and killed else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--headrace", type=pathlib.Path, required=True, help="the command, with the kernels as PTX")
    parser.add_argument("--runtime", type=pathlib.Path, required=True, help="folder of the stand-in for CUDA")
    parser.add_argument("--problems", type=pathlib.Path, default=HERE / "mutation_problems.txt")
    parser.add_argument("--mutants", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bar", type=float, default=0.6, help="least share that has to be noticed")
    parser.add_argument("--verbose", action="store_true", help="print the noticed ones too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        checks = Checks(arguments.headrace.resolve(), arguments.runtime.resolve(), pathlib.Path(scratch))
        problems, texts = problems_and_texts(checks, arguments.problems)
        found, equivalent, survivors = collections.Counter(), 0, []
        for mutant in draw_mutants(texts, problems, arguments.mutants, arguments.seed):
            wrong, rule = verdict(mutant, problems, checks), ""
            if wrong:
                found[kind_of(wrong)] += 1
            else:
                rule = mutant.same_program()
                equivalent += rule != ""
                survivors += [] if rule else [mutant]
            if arguments.verbose or not wrong:
                name = coverage.readable([mutant.kernel])[mutant.kernel]
                weak = ", no problem goes past the branch" if mutant.tried_by_none(problems) else ""
                state = kind_of(wrong) if wrong else f"equivalent, {rule}" if rule else "SURVIVED" + weak
                print(f"{state}: {name} line {mutant.line}: {mutant}\n      now {mutant.changed}", flush=True)
    return report(found, equivalent, survivors, arguments.bar)


if __name__ == "__main__":
    sys.exit(main())
