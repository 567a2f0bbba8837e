#!/usr/bin/env python3
"""Problems and test programs execute 95 % of the statements of each kernel: one table.

    coverage_test.py --headrace build/ptx/tools/headrace/headrace --without _loop --counts FOLDER
    coverage_test.py --headrace build/ptx/tools/headrace/headrace --without _loop --all

on the interpreter: the first problems of mutation_problems.txt and tensor_problems.txt, and whatever left its counts in
a folder; or all the problems. As compute capability 9.0, by the PTX of compute_90a, the problems are those of
tensor_problems.txt and the kernels those that have products of groups of warps (wgmma), with code of their own there
(third groups of warps, say), and all of these products are executed.

What nobody executes is printed with its place in the kernel's text; with a build of CMAKE_CUDA_FLAGS=-lineinfo,
coverage.py on the same files also says where in the sources.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

import coverage

HERE = pathlib.Path(__file__).resolve().parent
PROBLEMS = {"8.0": ["mutation_problems.txt", "tensor_problems.txt"], "9.0": ["tensor_problems.txt"]}
# Of the problems side by side, orders of threads and arithmetics of the tensor cores.
PARTS = [{"ORDER": "descending", "MMA": "exact"}, {"ORDER": "random", "MMA": "truncated"}]


def run(arguments, folder, scratch):
    """Runs the problems, which leave counts and texts in the folder."""
    lines = [line for name in PROBLEMS[arguments.capability]
             for line in coverage.read_problems(HERE / name, arguments.all)]
    for number, (settings, problems) in enumerate(coverage.by_shared_memory(lines)):
        running = []
        for part, switches in enumerate(PARTS):
            file = scratch / f"problems_{number}_{part}.txt"
            file.write_text("\n".join(problems[part::len(PARTS)] or problems) + "\n", encoding="utf-8")
            its = {"CAPABILITY": arguments.capability, "COVERAGE": folder / f"counts_{part}", "DUMP": folder / "texts",
                   **switches, **settings}
            environment = {**os.environ, **{f"HEADRACE_PTX_{key}": str(value) for key, value in its.items()}}
            running.append(subprocess.Popen([arguments.headrace, "check", "--file", file], env=environment, text=True,
                                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace"))
        outputs = [process.communicate()[0] for process in running]
        for process, output in zip(running, outputs):
            print(output.strip().rsplit("\n", 1)[-1])
            if process.returncode != 0:
                sys.exit(f"{process.args}: exit code {process.returncode}\n{output}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--headrace", required=True, help="the command, with the kernels as PTX")
    parser.add_argument("--capability", choices=PROBLEMS, default="8.0", help="that of the GPU that is interpreted")
    parser.add_argument("--without", default="(?!)", help="a regular expression: kernels that the bar is not for")
    parser.add_argument("--bar", default="0.95", help="least share of each kernel's statements")
    parser.add_argument("--counts", type=pathlib.Path, help="a folder with HEADRACE_PTX_COVERAGE of other tests")
    parser.add_argument("--all", action="store_true", help="run all problems of the files, for minutes more")
    parser.add_argument("--keep", type=pathlib.Path, help="a folder for counts and texts, to be looked at")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = pathlib.Path(name)
        folder = arguments.keep or scratch / "kept"
        (folder / "texts").mkdir(parents=True)
        run(arguments, folder, scratch)
        counts = sorted(folder.glob("counts_*"))
        if arguments.counts:
            others = sorted(arguments.counts.glob("*"))
            if not others:
                sys.exit(f"{arguments.counts} holds no counts of other tests")
            counts += others
        words = [*map(str, counts), "--texts", str(folder / "texts"), "--bar", arguments.bar, "--without",
                 arguments.without]
        if arguments.capability == "9.0":
            words += ["--each", r"wgmma\.mma_async"]
        sys.exit(coverage.main(words))


if __name__ == "__main__":
    main()
