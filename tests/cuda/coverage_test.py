#!/usr/bin/env python3
"""The problems of mutation_problems.txt and tensor_problems.txt and test programs execute 95 % of the statements of each
kernel, of some a share that stands in LOWER: one table.

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

# Kernels of which no problem reaches 95 %, with their bars. In double an additive rule takes tensors of less than f64
# where they have 7 tokens at most (blocking.hpp: few sums), and so never to a second chunk or segment of 16: the loads
# of these types on the way to one are not executed. Forwards in fp32 meet no f32 tensor; of the tiles of sweeps in
# double under gates per channel two always fit into shared memory. The recurrent form's forward has the exponential and
# log1p in double once for each of a lane's rows: of what is inside of them gates in a problem line's range leave some
# to no row.
LOWER = [(r"split_sweeps<.*<double>, false,", "0.90"), (r"recurrent_backward<double, false>", "0.92"),
         (r"(split_gradients|walk_backward)<.*<double>, false,|walk_forward<.*<float>, false,", "0.94"),
         (r"split_sweeps<.*ChannelGate<double>, true,", "0.94"),
         (r"recurrent_forward<double,", "0.92"),
         # Of the kernels on tensor cores the problems reach less yet; a share that falls is noticed all the same. What is
         # left: formulas of beta, chunks that are never cut, and statements that nobody has read.
         (r"tensor_prepare\b", "0.94"), (r"tensor_walk\b|channel_gradients(_low)?\b", "0.93"),
         (r"tensor_forward(_gradient|_terms)?\b", "0.92"), (r"tensor_states\b", "0.91"),
         (r"(tensor|channel)_join\b|channel_walk\b|staged_copy|token_log_decays", "0.9"),
         (r"tensor_(gate|key_gradient)\b", "0.87"), (r"\blog_decays|(channel|tensor_walk)_states\b", "0.85"),
         (r"tensor_join_transitions\b", "0.81")]
HERE = pathlib.Path(__file__).resolve().parent
PROBLEMS = [HERE / "mutation_problems.txt", HERE / "tensor_problems.txt"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--headrace", required=True, help="the command, with the kernels as PTX")
    parser.add_argument("--without", default="(?!)", help="a regular expression: kernels that the bar is not for")
    parser.add_argument("--bar", default="0.95", help="least share of each kernel's statements")
    parser.add_argument("--keep", help="a folder for counts and texts, to be looked at")
    parser.add_argument("programs", nargs="*", help="tests to run beside the problems")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(arguments.keep or scratch)
        texts, counts = folder / "texts", folder / "counts"
        texts.mkdir(parents=True)
        environment = {**os.environ, "HEADRACE_PTX_COVERAGE": str(counts), "HEADRACE_PTX_DUMP": str(texts)}
        commands = [({}, [program]) for program in arguments.programs]
        lines = [line for path in PROBLEMS for line in coverage.read_problems(path)]
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
        lower = [word for name, bar in LOWER for word in ("--lower", name, bar)]
        sys.exit(coverage.main([str(counts), "--texts", str(texts), "--bar", arguments.bar, "--without",
                                arguments.without, *lower]))


if __name__ == "__main__":
    main()
