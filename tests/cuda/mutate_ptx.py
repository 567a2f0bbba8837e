#!/usr/bin/env python3
"""Mutates executed statements of the kernels' PTX, one at a time, and counts how many of the mutants a check notices.

    mutate_ptx.py --headrace build/ptx/tools/headrace/headrace --runtime build/ptx/tests/ptx/runtime --mutants 200

The problems are those of mutation_problems.txt; a mutant is checked with those that execute its statement, the quick
ones first, until one misses, faults or does not end. Of the survivors those are called explained that a rule knows
(explanations.py). With a build of CMAKE_CUDA_FLAGS=-lineinfo each mutant has its place in the sources, and --by-line
draws of all copies that inlining and unrolling made of a line's statement one. Exit code 1: less than --bar of the
others was noticed.
"""

import argparse
import collections
import concurrent.futures
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import time

import coverage
import explanations
import ptx_mutations

HERE = pathlib.Path(__file__).resolve().parent
NEARBY = 12  # lines in which a register is looked for that takes the place of another
# Moves without effect on what the machine keeps: a mutant of them is none.
LEFT_ALONE = ("cvta", "bra.uni", "ret")


class Checks:
    """Runs of `headrace check`, and of test programs, on the interpreter."""

    def __init__(self, headrace, runtime, scratch, capability):
        self.headrace, self.scratch = headrace, scratch
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        self.environment = {**kept, "LD_LIBRARY_PATH": str(runtime), "HEADRACE_PTX_MEMORY": str(1 << 30),
                            "HEADRACE_PTX_CAPABILITY": capability}

    def run(self, problems, limit, **settings):
        """What is wrong, or '': over the problems, lines in one process, and paths of programs."""
        programs = [problem for problem in problems if isinstance(problem, pathlib.Path)]
        lines = [problem for problem in problems if not isinstance(problem, pathlib.Path)]
        wrong = ""
        for its, together in coverage.by_shared_memory(lines):
            with tempfile.NamedTemporaryFile("w", dir=self.scratch, suffix=".txt", encoding="utf-8") as file:
                file.write("\n".join(together) + "\n")
                file.flush()
                check = [str(self.headrace), "check", "--file", file.name]
                wrong = wrong or self.run_program(check, limit, {**settings, **its})
        for program in programs:
            wrong = wrong or self.run_program([str(program)], limit, settings)
        return wrong

    def errors(self, lines, **settings):
        """What `check -v` prints of each line: the errors of its tensors."""
        said = ""
        for its, together in coverage.by_shared_memory(lines):
            with tempfile.NamedTemporaryFile("w", dir=self.scratch, suffix=".txt", encoding="utf-8") as file:
                file.write("\n".join(together) + "\n")
                file.flush()
                done = subprocess.run([str(self.headrace), "check", "-v", "--file", file.name],
                                      env=self.environment_of({**settings, **its}), capture_output=True, text=True,
                                      errors="replace", check=False)
            said += done.stdout
        return [line for line in said.splitlines() if line.startswith("ok")]

    def environment_of(self, settings, refuses=True):
        """`refuses`: a call says what values it refused, which test programs see to themselves."""
        return {**self.environment, **({"HEADRACE_DEBUG_NAN": "1"} if refuses else {}),
                **{f"HEADRACE_PTX_{name}": str(value) for name, value in settings.items()}}

    def run_program(self, command, limit, settings):
        environment = self.environment_of(settings, refuses=command[0] == str(self.headrace))
        try:
            result = subprocess.run(command, env=environment, timeout=limit, stdout=subprocess.PIPE,
                                    stderr=subprocess.STDOUT, text=True, errors="replace", check=False)
        except subprocess.TimeoutExpired:
            return "does not end"
        return f"exit code {result.returncode}: {result.stdout.strip()[:300]}" if result.returncode != 0 else ""


def nearby_of(statements, i):
    around = statements[max(0, i - NEARBY):i] + statements[i + 1:i + 1 + NEARBY]
    return [name for other in around for name in ptx_mutations.REGISTER.findall(other.text)]


def where_changed(original, changed):
    """The numbers of the words that differ."""
    words = [re.findall(r"[^\s,;{}]+", text) for text in (original, changed)]
    return [i for i, (one, other) in enumerate(zip(*words)) if one != other] + [len(words[1]) - len(words[0])]


class Problem:
    """A line or a program, its time and the statements that it executes: {kernel: {line of the text}}."""

    def __init__(self, text, checks):
        self.text = text
        counts = pathlib.Path(tempfile.mkdtemp(dir=checks.scratch)) / "counts"
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

    def written(self, path, changed=None):
        lines = list(self.text.lines)
        lines[self.line - 1] = self.changed if changed is None else changed
        path.write_text("\n".join(lines), encoding="utf-8")

    def reaching(self, problems):
        """Those that execute it, or would without its guard: what a guard keeps from all lanes is not counted."""
        before = [statement.line for statement in self.text.kernels[self.kernel] if statement.line < self.line][-1:]
        lines = {self.line, *(before if self.original.startswith("@") else [])}
        return [problem for problem in problems if not lines.isdisjoint(problem.executed.get(self.kernel, ()))]

    def noticed(self, problems, checks):
        """What noticed it, or ''."""
        path = pathlib.Path(tempfile.mkdtemp(dir=checks.scratch)) / "mutant.ptx"
        self.written(path)
        reaching = self.reaching(problems)
        for batch in (reaching[:1], reaching[1:4], reaching[4:]):
            limit = 5 + 20 * sum(problem.seconds for problem in batch)
            wrong = checks.run([problem.text for problem in batch], limit, TEXT=path) if batch else ""
            if wrong:
                return wrong
        return ""

    def copies(self):
        """The like mutations of the other copies that inlining and unrolling made of the source line's statement: of none
        where that is not known."""
        statements, opcode = self.text.kernels[self.kernel], self.original.split()[0]
        for i, other in enumerate(statements if self.place else ()):
            place = " < ".join(place for place in (other.place, other.caller) if place)
            if place != self.place or other.line == self.line or other.text.split()[0] != opcode:
                continue
            for title, changed in ptx_mutations.mutations_of(other.text, nearby_of(statements, i), random.Random(i)):
                like = title.split("%")[0] == self.title.split("%")[0]
                if like and where_changed(other.text, changed) == where_changed(self.original, self.changed):
                    yield Mutant(self.text, self.kernel, other, title, changed)

    def tried_by_none(self, problems):
        """Whether it takes away the guard of a branch that no problem went past: of the problems, not of the kernel."""
        statements = self.text.kernels[self.kernel]
        following = [statement.line for statement in statements if statement.line > self.line][:1]
        executed = any(line in problem.executed.get(self.kernel, ()) for problem in problems for line in following)
        return self.title == "no guard" and "bra" in self.original and not executed

    def __str__(self):
        place = f" ({self.place})" if self.place else ""
        return f"{self.title}: {self.original}{place}"


def problems_and_texts(checks, arguments):
    path, programs, jobs = arguments.problems, arguments.programs, arguments.jobs
    lines = coverage.read_problems(path, beyond=not arguments.first)[::arguments.every]
    texts = checks.scratch / "texts"
    texts.mkdir()
    wrong = checks.run(lines[:1], 120, DUMP=texts)
    if wrong:
        raise SystemExit(wrong)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        problems = sorted(pool.map(lambda what: Problem(what, checks), lines + [path.resolve() for path in programs]),
                          key=lambda problem: problem.seconds)
    return problems, [coverage.Text(path) for path in sorted(texts.glob("*.ptx"))]


def places_by_line(places, rng):
    """Of a source line's statements with the same opcode one, in any kernel."""
    copies = collections.defaultdict(list)
    for text, kernel, i in places:
        statement = text.kernels[kernel][i]
        copies[statement.place, re.sub(r"^@!?%\w+\s+", "", statement.text).split()[0]].append((text, kernel, i))
    return [rng.choice(of_line) for of_line in copies.values()]


def draw_mutants(texts, problems, arguments):
    """Statements with equal chances, or source lines, then one of a statement's mutations with equal chances."""
    count, seed = arguments.mutants, arguments.seed
    rng = random.Random(seed)
    executed = collections.defaultdict(set)
    for problem in problems:
        for kernel, lines in problem.executed.items():
            executed[kernel] |= lines
    names = coverage.readable(sorted(executed))
    places = [(text, kernel, i) for text in texts for kernel, statements in text.kernels.items()
              for i, statement in enumerate(statements)
              if statement.line in executed[kernel] and re.search(arguments.kernels, names[kernel])]
    print(f"{len(places)} executed statements of {sum(len(its) for text in texts for its in text.kernels.values())}")
    if arguments.by_line:
        places = places_by_line([place for place in places if place[0].kernels[place[1]][place[2]].place], rng)
        print(f"{len(places)} of other source lines or with another opcode")
    mutants = []
    for text, kernel, i in rng.sample(places, len(places)):
        if len(mutants) == count:
            break
        statements = text.kernels[kernel]
        if statements[i].text.startswith(LEFT_ALONE):
            continue
        found = ptx_mutations.mutations_of(statements[i].text, nearby_of(statements, i), rng)
        if found:
            mutants.append(Mutant(text, kernel, statements[i], *rng.choice(found)))
    return mutants


NOTICED = ("does not end", "fault", "miss", "death")


def kind_of(wrong):
    if wrong == "does not end":
        return wrong
    return "fault" if wrong.startswith("exit code 86") else "miss" if wrong.startswith("exit code 1:") else "death"


def report(states, bar):
    """A table of what became of the mutants; integer constants by themselves, which often pad or bound from above."""
    killed = sum(state in NOTICED for state, _ in states)
    survived = [mutant for state, mutant in states if state == "SURVIVED"]
    constants = sum(mutant.title == "a constant more by 1" for mutant in survived)
    for state, count in collections.Counter(state for state, _ in states).most_common():
        print(f"{count:6} {state}")
    score, without = (killed / max(1, killed + left) for left in (len(survived), len(survived) - constants))
    explained = len(states) - killed - len(survived)
    print(f"{len(states)} mutants: {killed} noticed, {explained} explained, {len(survived)} survived, of them "
          f"{constants} integer constants: {score:.1%}, without these {without:.1%}")
    return 0 if score >= bar and killed else 1


def judged(mutant, problems, checks):
    wrong = mutant.noticed(problems, checks)
    if wrong:
        return kind_of(wrong)
    why = explanations.reason_of(mutant, problems, checks)
    return f"explained: {why}" if why else "SURVIVED"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--headrace", type=pathlib.Path, required=True, help="the command, with the kernels as PTX")
    parser.add_argument("--runtime", type=pathlib.Path, required=True, help="folder of the stand-in for CUDA")
    parser.add_argument("--programs", type=pathlib.Path, nargs="*", default=[], help="tests to run beside the problems")
    parser.add_argument("--problems", type=pathlib.Path, default=HERE / "mutation_problems.txt")
    parser.add_argument("--every", type=int, default=1, help="take one problem of so many: quicker, notices less")
    parser.add_argument("--capability", default="8.0", help="of the GPU that the interpreter is; 9.0 has code of its own")
    parser.add_argument("--kernels", default="", help="a regular expression: mutate those with such a name")
    parser.add_argument("--mutants", type=int, default=30)
    parser.add_argument("--by-line", action="store_true", help="draw source lines, of a build with -lineinfo")
    parser.add_argument("--first", action="store_true", help="of the problems those alone that coverage_test.py runs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bar", type=float, default=0.6, help="least share that has to be noticed")
    parser.add_argument("--jobs", type=int, default=1, help="mutants that are checked side by side")
    parser.add_argument("--verbose", action="store_true", help="print the noticed ones too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        checks = Checks(arguments.headrace.resolve(), arguments.runtime.resolve(), pathlib.Path(scratch),
                        arguments.capability)
        problems, texts = problems_and_texts(checks, arguments)
        mutants, states = draw_mutants(texts, problems, arguments), []
        names = coverage.readable(sorted({mutant.kernel for mutant in mutants}))
        with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
            for mutant, state in zip(mutants, pool.map(lambda mutant: judged(mutant, problems, checks), mutants)):
                states.append((state, mutant))
                if arguments.verbose or state not in NOTICED:
                    print(f"{state}: {names[mutant.kernel]} line {mutant.line}: {mutant}\n      now {mutant.changed}",
                          flush=True)
    return report(states, arguments.bar)


if __name__ == "__main__":
    sys.exit(main())
