#!/usr/bin/env python3
"""The first problems of mutation_problems.txt and tensor_problems.txt and test programs execute 95 % of the statements
of each kernel: one table.

    coverage_test.py --headrace build/ptx/tools/headrace/headrace --without _loop PROGRAM...

on the interpreter. What nobody executes is printed with its place in the kernel's text; with a build of
CMAKE_CUDA_FLAGS=-lineinfo, coverage.py on the same files also says where in the sources.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

import coverage

HERE = pathlib.Path(__file__).resolve().parent
PROBLEMS = [HERE / "mutation_problems.txt", HERE / "tensor_problems.txt"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--headrace", required=True, help="the command, with the kernels as PTX")
    parser.add_argument("--without", default="(?!)", help="a regular expression: kernels that the bar is not for")
    parser.add_argument("--bar", default="0.95", help="least share of each kernel's statements")
    parser.add_argument("--all", action="store_true", help="run all problems of the files, for minutes more")
    parser.add_argument("--keep", help="a folder for counts and texts, to be looked at")
    parser.add_argument("programs", nargs="*", help="tests to run beside the problems")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(arguments.keep or scratch)
        texts, counts = folder / "texts", folder / "counts"
        texts.mkdir(parents=True)
        environment = {**os.environ, "HEADRACE_PTX_COVERAGE": str(counts), "HEADRACE_PTX_DUMP": str(texts)}
        commands = [({}, [program]) for program in arguments.programs]
        lines = [line for path in PROBLEMS for line in coverage.read_problems(path, arguments.all)]
        for number, (settings, problems) in enumerate(coverage.by_shared_memory(lines)):
            file = pathlib.Path(scratch) / f"problems_{number}.txt"
            file.write_text("\n".join(problems) + "\n", encoding="utf-8")
            commands.append((settings, [arguments.headrace, "check", "--file", file]))
        for settings, command in commands:
            its = {**environment, **{f"HEADRACE_PTX_{name}": value for name, value in settings.items()}}
            done = subprocess.run(command, env=its, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                  errors="replace", check=False)
            print(done.stdout.strip().rsplit("\n", 1)[-1])
            if done.returncode != 0:
                sys.exit(f"{command}: exit code {done.returncode}\n{done.stdout}")
        sys.exit(coverage.main([str(counts), "--texts", str(texts), "--bar", arguments.bar, "--without",
                                arguments.without]))


if __name__ == "__main__":
    main()
