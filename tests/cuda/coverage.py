#!/usr/bin/env python3
"""Which statements of the kernels were executed: per kernel the share, that of a warp's lanes which take part, on the
mean of all executions, and the longest stretches that nothing reached.

    HEADRACE_PTX_COVERAGE=counts HEADRACE_PTX_DUMP=texts cuda_conformance_test
    coverage.py counts --texts texts --bar 0.95

Several files, of shards say, are added up. The texts of a build with CMAKE_CUDA_FLAGS=-lineinfo know the source line of
a statement, and then a second share is that of the statements whose line was reached in any kernel: inlining copies a
switch over types to a hundred places, of which no problem needs most. Exit code 1: a kernel lies below its bar, with
the second share where there is one.
"""

import argparse
import collections
import pathlib
import re
import subprocess
import sys
import typing

ENTRY = re.compile(r"\.entry (\w+)")
# A line of a body with an instruction: no label, directive, comment or brace alone.
STATEMENT = re.compile(r"^\s*\{?\s*(@!?%\w+\s+)?[a-z][\w.]*(::\w+)?(\s[^:]*)?;")
FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"')
WARP_LANES = 32
LOCATION = re.compile(r"\.loc\s+(\d+)\s+(\d+)(?:.*inlined_at\s+(\d+)\s+(\d+))?")


class Statement(typing.NamedTuple):
    """Of a PTX text: its line, its source line and that of the call which was inlined; '' where it is not known."""
    line: int
    text: str
    place: str
    caller: str


def read_problems(path, beyond=True):
    """The lines of a file but comments, up to that which says "Beyond these" or all; some begin with the KiB of shared
    memory that a block may take: SHARED=99."""
    text = pathlib.Path(path).read_text(encoding="utf-8")
    lines = (text if beyond else text.split("\n# Beyond these")[0]).splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def by_shared_memory(lines):
    """{what a line begins with: [lines without it]} as settings of the interpreter."""
    groups = collections.defaultdict(list)
    for line in lines:
        setting, problem = re.fullmatch(r"(?:SHARED=(\d+) )?(.*)", line).groups()
        groups[setting].append(problem)
    return [({"SHARED": setting} if setting else {}, problems) for setting, problems in groups.items()]


def read_counts(paths):
    """({kernel: number of statements}, {kernel: {line of the text: executions by warps}}, the same by lanes)"""
    statements, counts, lanes = {}, *(collections.defaultdict(collections.Counter) for _ in range(2))
    for path in paths:
        with open(path, encoding="utf-8") as file:
            for line in file:
                kernel, what, number, *of_lanes = line.rstrip("\n").split("\t")
                if what == "statements":
                    if statements.setdefault(kernel, int(number)) != int(number):
                        raise SystemExit(f"{path}: {kernel} is of another build than in the files before")
                else:
                    counts[kernel][int(what)] += int(number)
                    lanes[kernel][int(what)] += int(of_lanes[0])
    return statements, counts, lanes


class Text:
    """One PTX text: its lines, and its kernels' statements."""

    def __init__(self, path):
        self.path = path
        self.lines = path.read_text(encoding="utf-8").split("\n")
        self.kernels = collections.defaultdict(list)
        files = {number: pathlib.Path(name).name for number, name in FILE.findall("\n".join(self.lines))}
        kernel, depth, places = None, 0, ("", "")
        for number, line in enumerate(self.lines, 1):
            entry, location = ENTRY.search(line), LOCATION.search(line)
            if entry:
                kernel, places = entry.group(1), ("", "")
            elif location:
                numbers = location.groups()
                places = tuple(f"{files.get(file, '?')}:{line}" if file else ""
                               for file, line in (numbers[:2], numbers[2:]))
            elif kernel and depth > 0 and STATEMENT.match(line):
                self.kernels[kernel].append(Statement(number, line.strip(), *places))
            if not location:
                depth += line.count("{") - line.count("}")


def read_texts(folder):
    kernels = {}
    for path in sorted(pathlib.Path(folder).glob("*.ptx")):
        kernels.update(Text(path).kernels)
    return kernels


def readable(kernels):
    """The names as one writes them, without namespaces and parameters."""
    names = subprocess.run(["c++filt"], input="\n".join(kernels), capture_output=True, text=True, check=True).stdout
    plain = [re.sub(r"\(anonymous namespace\)::|headrace::cuda::|\(.*\)$|^void ", "", re.sub(r"\([\w:]+\)(?=[\dtf])", "", name))
             for name in names.splitlines()]
    return dict(zip(kernels, plain))


def stretches_of(statements, counts):
    """The runs of neighbouring statements without a count, longest first."""
    runs, current = [], []
    for statement in statements:
        if counts[statement.line] == 0:
            current.append(statement)
        elif current:
            runs.append(current)
            current = []
    return sorted(runs + ([current] if current else []), key=len, reverse=True)


def places_of(stretch):
    """The source lines that most of the stretch is of."""
    found = collections.Counter(statement.place for statement in stretch if statement.place)
    return ", ".join(f"{place} ({count})" for place, count in found.most_common(4))


def print_stretches(statements, counts, most):
    for stretch in stretches_of(statements, counts)[:most]:
        print(f"      {len(stretch):5} from line {stretch[0].line}: {stretch[0].text[:60]}")
        if places_of(stretch):
            print(f"            {places_of(stretch)}")


def having(statements, instruction):
    """Those with an instruction that matches the regular expression."""
    return [each for each in statements if re.match(rf"\{{?\s*(@!?%\w+\s+)?({instruction})", each.text)]


def reached_places(texts, counts):
    """The source lines of which some statement was executed, in any kernel."""
    return {statement.place for kernel, statements in texts.items() for statement in statements
            if statement.place and counts[kernel][statement.line]}


def shares_of(kernel, number, texts, counts, places):
    """Of the statements, those that were executed, and those whose source line was reached in any kernel."""
    executed = len(counts[kernel]) / number
    if not places:
        return executed, executed
    reached = sum(counts[kernel][statement.line] > 0 or statement.place in places for statement in texts[kernel])
    return executed, reached / number


def issued_by(statements, counts):
    """How many instructions warps executed, but moves and loads of parameters, which ptxas mostly does without, and the
    predicates of groups' products, which are constants."""
    left_out = re.compile(r"\{?\s*(@!?%\w+\s+)?(mov|ld\.param|cvta)\b|setp\.ne\.b32 p,")
    return sum(counts[statement.line] for statement in statements if not left_out.match(statement.text))


def lanes_together(counts, lanes):
    """The share of a warp's lanes that execute a statement, on the mean of all executions by warps."""
    return lanes.total() / (WARP_LANES * max(1, counts.total()))


def print_places(texts, counts, places):
    missed = collections.Counter(statement.place for statements in texts.values() for statement in statements
                                 if statement.place not in places)
    print(f"source lines with statements that no kernel reached: {len(missed)}")
    for place, count in missed.most_common():
        print(f"   {count:5} {place}")


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("counts", nargs="+", help="files that HEADRACE_PTX_COVERAGE wrote")
    parser.add_argument("--texts", help="folder that HEADRACE_PTX_DUMP wrote")
    parser.add_argument("--bar", type=float, default=0.95, help="least share of each kernel's statements")
    parser.add_argument("--without", default="(?!)", help="a regular expression: kernels that the bar is not for")
    parser.add_argument("--each", help="a regular expression: the table is of kernels with such instructions alone, of"
                                       " which each must have been executed")
    parser.add_argument("--stretches", type=int, default=3, help="how many stretches of each kernel to print")
    arguments = parser.parse_args(words)
    statements, counts, lanes = read_counts(arguments.counts)
    texts = read_texts(arguments.texts) if arguments.texts else {}
    # A kernel that never ran is in the texts alone.
    for kernel, its in texts.items():
        if statements.setdefault(kernel, len(its)) != len(its):
            raise SystemExit(f"{kernel}: {len(its)} statements in the texts, {statements[kernel]} in the counts")
    if arguments.each:
        texts = {kernel: its for kernel, its in texts.items() if having(its, arguments.each)}
        statements = {kernel: len(its) for kernel, its in texts.items()}
    # One that has code for other GPUs alone.
    statements = {kernel: number for kernel, number in statements.items() if number > 1}
    names, below, places = readable(sorted(statements)), 0, reached_places(texts, counts)
    for kernel in sorted(statements):
        executed, share = shares_of(kernel, statements[kernel], texts, counts, places)
        is_below = share < arguments.bar and not re.search(arguments.without, names[kernel])
        wanted = having(texts[kernel], arguments.each) if arguments.each else []
        left = [each for each in wanted if not counts[kernel][each.line]]
        below += is_below or bool(left)
        by_place = f" ({share:.1%} by source lines)" if places else ""
        together = lanes_together(counts[kernel], lanes[kernel])
        note = "  BELOW THE BAR" if is_below else ""
        print(f"{executed:7.1%}{by_place} of {statements[kernel]:6}, {together:4.0%} of lanes  {names[kernel]}{note}")
        for each in left:
            print(f"      NOT EXECUTED: line {each.line}: {each.text}")
        if kernel in texts:
            print_stretches(texts[kernel], counts[kernel], arguments.stretches)
    if places:
        print_places(texts, counts, places)
    total = sum(len(counts[kernel]) for kernel in statements) / max(1, sum(statements.values()))
    print(f"{total:7.1%} in all, {len(statements)} kernels, {below} below the bar, {arguments.bar}")
    return 1 if below or not statements else 0


if __name__ == "__main__":
    sys.exit(main())
