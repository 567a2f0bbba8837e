#!/usr/bin/env python3
"""The first problems of tensor_problems.txt on the interpreter as a GPU of compute capability 9.0, by the PTX of
compute_90a: none misses its bar, and of the kernels that have products of groups of warps (wgmma), with code of their
own there (third groups of warps, say), all of these are executed, and 95 % of all statements.

    group_products_test.py --headrace build/ptx/tools/headrace/headrace
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

import coverage

BAR = 0.95  # as coverage_test.py's of the others' code
PROBLEMS = pathlib.Path(__file__).resolve().parent / "tensor_problems.txt"
# Of the problems side by side, orders of threads and arithmetics of the tensor cores.
PARTS = [{"ORDER": "descending", "MMA": "exact"}, {"ORDER": "random", "MMA": "truncated"}]


def run(headrace, folder, beyond):
    """Runs the problems, which leave counts and texts in the folder."""
    for number, (settings, problems) in enumerate(coverage.by_shared_memory(coverage.read_problems(PROBLEMS, beyond))):
        running = []
        for part, switches in enumerate(PARTS):
            file = folder / f"problems_{number}_{part}.txt"
            file.write_text("\n".join(problems[part::len(PARTS)] or problems) + "\n", encoding="utf-8")
            its = {"CAPABILITY": "9.0", "COVERAGE": folder / "counts", "DUMP": folder / "texts", **switches, **settings}
            environment = {**os.environ, **{f"HEADRACE_PTX_{key}": str(value) for key, value in its.items()}}
            running.append(subprocess.Popen([headrace, "check", "--file", file], env=environment, text=True,
                                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace"))
        outputs = [process.communicate()[0] for process in running]
        for process, output in zip(running, outputs):
            print(output.strip().rsplit("\n", 1)[-1])
            if process.returncode != 0:
                sys.exit(f"{process.args}: exit code {process.returncode}\n{output}")


def products_of(folder):
    """[(kernel, products, those that ran, share of all statements that ran)] of the kernels that have some."""
    _, counts, _ = coverage.read_counts([folder / "counts"])
    texts = coverage.read_texts(folder / "texts")
    names = coverage.readable(sorted(texts))
    found = []
    for kernel, statements in texts.items():
        lines = [statement.line for statement in statements if statement.text.lstrip().startswith("wgmma.mma_async")]
        if lines:
            ran = sum(1 for statement in statements if counts[kernel][statement.line]) / len(statements)
            found.append((names[kernel], len(lines), sum(1 for line in lines if counts[kernel][line]), ran))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--headrace", required=True, help="the command, with the kernels as PTX")
    parser.add_argument("--all", action="store_true", help="run all problems of the file, for minutes more")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        (folder / "texts").mkdir()
        run(arguments.headrace, folder, arguments.all)
        found = products_of(folder)
    for name, products, ran, share in sorted(found):
        print(f"{ran:4} of {products:3} products ran, {share:.1%} of all statements  {name}")
    if not found:
        sys.exit("no kernel has products of groups: expected PTX of compute_90a in the program")
    sys.exit(1 if any(ran < products or share < BAR for _, products, ran, share in found) else 0)


if __name__ == "__main__":
    main()
