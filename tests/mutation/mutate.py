#!/usr/bin/env python3
"""Proves that a 1 % error in any primitive of the kernels makes a check fail.

In a scratch copy of the sources every place that mutations.txt names receives a factor that is 1, or 1.01 while the
mutation of that number is switched on; the kernels are compiled once, linked in place of the library's own, and
runner.cpp switches the mutations on one after the other over the lines of problems.txt, those of the layer functions'
kernels over calls of these. A mutation that nothing notices is a failure; so is a place that the sources no longer
contain.

usage: mutate.py --source DIR --scratch DIR --compiler "c++ ..." --libraries LIB...  [--only TEXT]
"""

import argparse
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
FACTOR = "headrace_factor({number})"
OF_BF16 = "bf16: "
PRELUDE = """#pragma once
extern "C" int headrace_active_mutation;
static inline float headrace_factor(int number) { return headrace_active_mutation == number ? 1.01f : 1.0f; }
// While it is switched off the value keeps its bits: pairs of bf16 pass through fp32 registers, where a product with 1
// would flush those that are a subnormal number there.
template <class V>
static inline V headrace_scaled(V value, int number) {
    return headrace_active_mutation == number ? static_cast<V>(value * headrace_factor(number)) : value;
}
static inline float headrace_scaled(int value, int number) { return value * headrace_factor(number); }
"""
# What is compiled with the mutations in it: the ISA that every machine has, and the one with arithmetic of its own.
AVX512 = "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c -mavx512bf16 -DHEADRACE_HAS_BF16_DOT"
KERNELS = [("generic", name, "") for name in ("chunk_f32", "summary_f32", "recurrent", "layers")]
X86_KERNELS = [("avx512_bf16", "chunk_bf16", AVX512)]
# As cmake/isa.cmake, but for the level of optimisation: time goes to compiling, not to running.
FLAGS = "-std=c++20 -O1 -fPIC -ffp-contract=fast -fno-math-errno -w"
# What only calls of the layer functions reach.
LAYERS = {f"cpu/layers/{name}.hpp" for name in ("activation", "interleave", "convolution_kernel", "rms_norm_kernel")}


class Mutation:
    def __init__(self, file, line, number):
        self.file, self.line, self.number = file, line, number
        self.of_bf16 = line.startswith(OF_BF16)  # whether only the bf16 dot product's kernels compute with it
        anchor, _, rest = line.removeprefix(OF_BF16).partition(" | ")
        text, _, new = rest.partition(" => ")
        if not rest or (not new and text.count("«") != 1):
            sys.exit(f"mutations.txt: {line}: expected ANCHOR | TEXT with one «...», or ANCHOR | TEXT => NEW")
        self.anchor, self.text = anchor, text.replace("«", "").replace("»", "")
        factor = FACTOR.format(number=number)
        self.new = new.replace("$", factor) if new else re.sub("«(.*)»", rf"headrace_scaled(\1, {number})", text)

    def place(self, source):
        """Where the text begins in the unchanged source."""
        if source.count(self.anchor) != 1:
            times = source.count(self.anchor)
            raise ValueError(f"{self.file}: the anchor occurs {times} times, not once: {self.anchor}")
        at = source.find(self.text, source.index(self.anchor))
        if at < 0:
            raise ValueError(f"{self.file}: not found after its anchor: {self.line}")
        return at


def read_mutations():
    mutations, file = [], None
    for line in (HERE / "mutations.txt").read_text().splitlines():
        if line.startswith("== "):
            file = line[3:]
        elif line and not line.startswith("#"):
            mutations.append(Mutation(file, line, len(mutations) + 1))
    return mutations


def mutate(tree, mutations):
    """Puts all mutations into the copy of src/; returns what could not be placed."""
    errors = []
    for file in sorted({m.file for m in mutations}):
        path = tree / file
        source = path.read_text()
        placed = []
        for mutation in (m for m in mutations if m.file == file):
            try:
                placed.append((mutation.place(source), mutation))
            except ValueError as error:
                errors.append(str(error))
        placed.sort(key=lambda item: item[0])
        for (at, first), (next_at, second) in zip(placed, placed[1:]):
            if at + len(first.text) > next_at:
                errors.append(f"{file}: two mutations overlap: {first.line} and {second.line}")
        for at, mutation in reversed(placed):
            source = source[:at] + mutation.new + source[at + len(mutation.text):]
        path.write_text(source)
    return errors


def build(arguments, tree, kernels):
    compiler = arguments.compiler.split()
    prelude = tree / "prelude.hpp"
    prelude.write_text(PRELUDE)
    includes = [f"-I{arguments.source}/include", f"-I{tree}", f"-I{arguments.source}", f"-I{HERE.parent}"]
    commands, objects = [], []
    for isa, kernel, flags in kernels:
        objects.append(str(tree / f"{isa}_{kernel}.o"))
        commands.append(compiler + FLAGS.split() + flags.split() + [f"-DHEADRACE_ISA={isa}", "-include", str(prelude)] +
                        includes + ["-c", str(tree / f"cpu/kernels/{kernel}.cpp"), "-o", objects[-1]])
    objects.append(str(tree / "runner.o"))
    commands.append(compiler + FLAGS.split() + includes + ["-c", str(HERE / "runner.cpp"), "-o", objects[-1]])
    running = [subprocess.Popen(command) for command in commands]
    if any([process.wait() for process in running]):
        sys.exit("the mutated kernels do not compile")
    runner = tree / "mutation_runner"
    # The kernels come before the library: the linker takes nothing from it that they define.
    subprocess.run(compiler + ["-fopenmp"] + objects + arguments.libraries + ["-o", str(runner)], check=True)
    return runner


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", required=True, help="the root of the sources")
    parser.add_argument("--scratch", required=True, help="a folder to be emptied and used")
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--libraries", required=True, nargs="+")
    parser.add_argument("--only", default="", help="mutations whose file or line contains this")
    arguments = parser.parse_args()

    mutations = read_mutations()
    tree = pathlib.Path(arguments.scratch) / "src"
    shutil.rmtree(tree, ignore_errors=True)
    shutil.copytree(pathlib.Path(arguments.source) / "src", tree)
    errors = mutate(tree, mutations)
    if errors:
        sys.exit("\n".join(errors + [f"{len(errors)} places not found; see the head of mutations.txt"]))
    x86 = platform.machine() in ("x86_64", "AMD64")
    runner = build(arguments, tree, KERNELS + (X86_KERNELS if x86 else []))

    operators = sum(m.file not in LAYERS for m in mutations)
    if any(m.file in LAYERS for m in mutations[:operators]):
        sys.exit("mutations.txt: the files of the layers come last")
    command = [str(runner), str(operators), str(len(mutations) - operators), str(HERE / "problems.txt")]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True,
                            env={**os.environ, "OMP_NUM_THREADS": "1"})
    outcome = {}
    for line in result.stdout.splitlines():
        number, _, what = line.partition(" ")
        if number.isdigit():
            outcome[int(number)] = what
        else:
            print(line)
    if len(outcome) != len(mutations):
        sys.exit(f"the runner stopped with {result.returncode}")
    has_bf16 = "not run here" not in result.stdout
    unnoticed = left_out = 0
    for mutation in mutations:
        if arguments.only not in mutation.file + mutation.line:
            continue
        what = outcome[mutation.number]
        if what == "UNNOTICED" and not has_bf16 and mutation.of_bf16:
            left_out += 1
            print(f"not run here: {mutation.file}: {mutation.line}")
        elif what == "UNNOTICED":
            unnoticed += 1
            print(f"UNNOTICED {mutation.file}: {mutation.line}")
        elif arguments.only:
            print(f"{mutation.file}: {mutation.line}\n    noticed by {what}")
    print(f"{len(mutations) - left_out} mutations, {unnoticed} unnoticed, {left_out} not run")
    sys.exit(1 if unnoticed else 0)


main()
