#!/usr/bin/env python3
"""The instructions that `headrace plan` counts with (src/cuda/plumbing/issued.cpp) beside those that warps executed.

    issued.py build/ptx             # compares
    issued.py build/ptx --write     # measures the table anew; the library is to be rebuilt then

Each kernel on tensor cores, and that of a step, is run in problems that differ in one size, chunks, value heads or values, as often as the
table has numbers of it; a row is the solution of these equations. Exit code 1: a number is stale by more than --within,
a kernel has none, or its warps execute with fewer of their lanes than LANES.
"""

import argparse
import collections
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import typing

import coverage

TABLE = pathlib.Path(__file__).resolve().parents[2] / "src" / "cuda" / "plumbing" / "issued.cpp"
ROWS = re.compile(r"(?<=    // begin\n).*?(?=    // end\n)", re.DOTALL)
# Of the compute capability whose code the table is of: where products of groups of warps take the place of many others.
CAPABILITY = "9.0"
# Without K; the first of each form is one that a comparison runs, and those in segments. Blocks have whole chunks and 16
# values for each warp, sequences whole segments.
FORWARDS = {"gated_delta_rule": ["t512 h1 hv4 v64", "t128 h1 hv4 v64", "t128 h4 v64", "t1024 h1 v192", "t3072 h3 v192"],
            "comba": ["t256 h1 hv4 v64", "t128 h1 hv4 v64", "t128 h4 v64"],
            "simple_gla": ["t256 h1 v64", "t128 h1 v64", "t1536 h1 v64"],
            "kda": ["t512 h4 v64", "t128 h4 v64", "t1024 h1 v64", "t3072 h17 v64"],
            "gla": ["t512 h1 v64", "t128 h1 v64", "t1024 h1 v64", "t3072 h17 v64"]}
IN_SEGMENTS = ("t3072", "t2048", "t1536")
LONG = (*IN_SEGMENTS, "t1024")
BY_TWO = ["t256 h67 v128", "t128 h67 v128"]  # with as many heads that two groups walk, of the delta rule in bf16
WIDE = ("gated_delta_rule", "comba")  # which have kernels of 256 channels, in bf16 and not in segments
SWEPT = ["t128 h4 hv8 v64", "t512 h8 v64", "t128 h8 v64", "t64 h8 v128", "t64 h34 v128",
         "t2048 h4 v64", "t2048 h13 v64"]  # in segments of 512 tokens, of 1024
BACKWARDS = {"gated_delta_rule": SWEPT, "comba": SWEPT, "kda": SWEPT, "gla": SWEPT,
             "simple_gla": ["t128 h8 v{K}", "t192 h8 v{K}", "t64 h8 v{K}", "t64 h1 hv8 v{K}", "t128 h4 hv8 v{K}"]}
# In double, of types that are computed so, with the form that this is for.
IN_DOUBLE = {"fwd": ("cuda.walk", ["t128 h1 v64", "t64 h1 v64"]),
             "bwd": ("cuda.split", ["t64 h2 v64", "t128 h2 v64", "t64 h1 hv2 v64", "t64 h2 v128"])}
STEP_SIZES = ["b2 t1 h2 v128"]
DOUBLE_OPERATORS = ("gated_delta_rule", "simple_gla", "kda", "gla")
CHANNEL_GATES = ("kda", "gla")
RULES = {"gated_delta_rule": "delta", "kda": "delta", "comba": "comba", "simple_gla": "additive", "gla": "additive"}
IN_F16 = {("gated_delta_rule", "fwd"), ("comba", "fwd")}
# The numbers of a row that a kernel has; of others one is enough.
BESIDE, STEP, HEAD, VALUES = range(4)
NUMBERS = {"tensor_prepare": (STEP, HEAD), "tensor_add_outputs": (STEP, HEAD),
           **dict.fromkeys(("tensor_gradients", "channel_gradients", "split_gradients"), (STEP, HEAD, VALUES)),
           **dict.fromkeys(("tensor_walk", "tensor_walk_two", "tensor_walk_states", "tensor_join_transitions", "tensor_sweeps",
                            "tensor_sweep_segments", "channel_sweep_segments",
                            "tensor_forward", "tensor_forward_gradient", "tensor_forward_terms", "channel_walk", "channel_walk_two",
                            "channel_sweeps", "channel_estimate", "channel_join", "channel_states",
                            "walk_forward", "split_sweeps"),
                         (BESIDE, STEP))}
PREPARED_HEADS = 4
WITH_FETCHING, FETCHING = ("tensor_walk", "tensor_sweeps", "tensor_sweep_segments"), 4  # kernels with more than 64 channels; warps
GROUP, THREE_GROUPS = 4, 384  # warps; threads of blocks that have a third group, which the table leaves out
# The least share of a warp's lanes that execute an instruction, on the mean, where all tiles are whole: what is lost are
# lanes that part, at masks, or have nothing to do. Gradients under gates per channel lose up to a fifth, where lanes
# part on the diagonals of triangles; so does prepare where pairs of tokens meet in between, of which at each level half
# of the lanes have the later one. In double few lanes compute the decays of one gate per token and their gradients.
LANES = 0.85
# A block of channel_prepare_low looks at a place with each of up to 16 lanes, here at one.
FEWER = {"channel_prepare_low": 0.35, "channel_gradients": 0.75, "channel_prepare": 0.8, "split_gradients": 0.65,
         "split_sweeps": 0.73}


class Row(typing.NamedTuple):
    """What the table knows a kernel by."""
    kernel: str
    rule: str
    K: int
    backward: bool


class Measured(typing.NamedTuple):
    """All launches of a kernel in a problem: how often warps do what the numbers are of, what was planned and found."""
    problem: str
    times: list
    planned: float
    executed: int
    lanes: float  # on the mean of a warp's


def sizes_of(operator, direction, K, dtype, quick):
    sizes = (FORWARDS if direction == "fwd" else BACKWARDS)[operator]
    if dtype != "bf16" and (operator, direction) not in IN_F16:
        return []
    if K > 128:
        short = [each for each in sizes if not each.startswith(LONG)]
        sizes = short if operator in WIDE and dtype == "bf16" else []
    if (K, direction, dtype) == (128, "fwd", "bf16") and RULES[operator] != "additive":
        sizes = sizes + BY_TWO
    return sizes[:1] + [each for each in sizes if each.startswith(IN_SEGMENTS) or each == BY_TWO[0]] if quick else sizes


def problems(quick):
    """[(operator, direction, K, sizes, type, form)]"""
    on_16_bits = [(operator, direction, K, sizes.format(K=K), dtype, "cuda.tensor")
                  for K in (256, 128, 64) for dtype in ("bf16", "f16") for direction in ("fwd", "bwd")
                  for operator in FORWARDS for sizes in sizes_of(operator, direction, K, dtype, quick)]
    steps = [(operator, "step", K, sizes, "bf16", "cuda.recurrent") for K in (256, 128, 64) for operator in FORWARDS
             for sizes in STEP_SIZES]
    return on_16_bits + steps + [(operator, direction, K, sizes, "f64", form) for K in (128, 64) for operator in DOUBLE_OPERATORS
                         for direction, (form, all_sizes) in IN_DOUBLE.items()
                         for sizes in (all_sizes[:1] if quick else all_sizes)]


class Runs:
    """Runs of the command on the interpreter."""

    def __init__(self, build, scratch):
        self.headrace, self.runtime = build / "tools/headrace/headrace", build / "tests/ptx/runtime"
        self.scratch, self.texts = scratch, {}

    def executed(self, problem):
        """{symbol of a kernel: (instructions, lanes of warps that executed them, in warps)}"""
        file = self.scratch / "counts"
        file.unlink(missing_ok=True)
        switches = {"COVERAGE": file, "RACES": 0, "ORDER": "ascending", "CAPABILITY": CAPABILITY}
        if not self.texts:
            switches["DUMP"] = self.scratch
        environment = {**os.environ, "LD_LIBRARY_PATH": str(self.runtime),
                       **{f"HEADRACE_PTX_{key}": str(value) for key, value in switches.items()}}
        done = subprocess.run([self.headrace, "check", problem], env=environment, capture_output=True, text=True,
                              check=False)
        if done.returncode != 0:
            sys.exit(f"{problem}: {done.stdout}{done.stderr}")
        self.texts = self.texts or coverage.read_texts(self.scratch)
        _, counts, lanes = coverage.read_counts([file])
        return {kernel: (coverage.issued_by(self.texts[kernel], its),
                         coverage.issued_by(self.texts[kernel], lanes[kernel]) / coverage.WARP_LANES)
                for kernel, its in counts.items()}

    def planned(self, problem):
        # Launches depend on the GPU that is there: on the one that executes them.
        environment = {**os.environ, "LD_LIBRARY_PATH": str(self.runtime), "HEADRACE_PTX_CAPABILITY": str(CAPABILITY)}
        done = subprocess.run([self.headrace, "plan", problem, "--json"], env=environment, capture_output=True,
                              text=True, check=True)
        return json.loads(done.stdout)["gpu"]["launches"]


def size_of(sizes, name, otherwise):
    found = re.search(rf"\b{name}(\d+)", sizes)
    return int(found.group(1)) if found else otherwise


def times_of(launch, sizes, K):
    """How often warps do what the numbers of a row are of: of blocks where others fetch for them, those with values."""
    heads = size_of(sizes, "h", 1)
    group = size_of(sizes, "hv", heads) // heads
    parts = -(-group // PREPARED_HEADS) if launch["kernel"] == "tensor_prepare" else 1
    others = FETCHING if launch["kernel"] in WITH_FETCHING and K > 64 else 0
    others += GROUP if launch["threads"] == THREE_GROUPS else 0
    warps, blocks_of_values = launch["threads"] // 32 - others, -(-size_of(sizes, "v", 0) // 64)
    if launch["kernel"] == "channel_estimate":  # a warp for each head
        warps = size_of(sizes, "hv", heads) / launch["blocks"]
    steps = warps * launch["all_steps"]
    if launch["kernel"] == "channel_gradients":  # a value head each; one stores gradients of keys that it does not share
        return [warps * launch["blocks"], steps, steps * (group == 1), steps * blocks_of_values]
    return [warps * launch["blocks"], steps, steps * group / parts, steps * group / parts * blocks_of_values]


def measure(runs, quick):
    """{row: [Measured]}"""
    rows = collections.defaultdict(list)
    for operator, direction, K, sizes, dtype, form in problems(quick):
        problem = f"{operator}:{direction} {sizes} k{K} {dtype} force={form} cuda"
        executed, launches = runs.executed(problem), runs.planned(problem)
        for kernel in {launch["kernel"]: None for launch in launches}:
            if not kernel.startswith(("tensor_", "channel_", "walk_forward", "split_", "recurrent_step")):
                continue
            its = [launch for launch in launches if launch["kernel"] == kernel]
            times = [sum(column) for column in zip(*(times_of(launch, sizes, K) for launch in its))]
            found = [its for symbol, its in executed.items() if re.search(f"{len(kernel)}{kernel}[IE]", symbol)]
            instructions, lanes = (sum(column) for column in zip(*found))
            swept = direction == "bwd" and operator != "simple_gla"
            of_channels = " channel" if (dtype == "f64" or direction == "step") and operator in CHANNEL_GATES else ""
            rule = RULES[operator] + of_channels + ("" if dtype == "bf16" else f" {dtype}")
            rows[Row(kernel, rule, K, swept)].append(
                Measured(problem, times, sum(launch["issued"] for launch in its), instructions, lanes / instructions))
    return rows


def solved(matrix, right):
    """x of matrix x = right, by elimination."""
    rows = [list(map(float, row)) + [float(value)] for row, value in zip(matrix, right)]
    size = len(rows)
    for i in range(size):
        best = max(range(i, size), key=lambda row: abs(rows[row][i]))
        rows[i], rows[best] = rows[best], rows[i]
        if abs(rows[i][i]) < 1e-9:
            raise SystemExit("the problems do not tell the numbers of a row apart")
        for row in range(size):
            if row != i:
                factor = rows[row][i] / rows[i][i]
                rows[row] = [a - factor * b for a, b in zip(rows[row], rows[i])]
    return [rows[i][size] / rows[i][i] for i in range(size)]


def numbers_of(row, measured):
    """The numbers of a row, which leave the least squares of relative differences."""
    which = NUMBERS.get(row.kernel, (STEP,))
    weighed = [[1000 * of.times[i] / of.executed for i in which] for of in measured]
    normal = [[sum(a[i] * a[j] for a in weighed) for j in range(len(which))] for i in range(len(which))]
    right = [1000 * sum(a[i] for a in weighed) for i in range(len(which))]
    solution = dict(zip(which, solved(normal, right)))
    least = [-solution.get(STEP, 0)] + 3 * [0]  # of a sweep's last step, which does less, that much is missing beside
    return [max(low, round(solution.get(i, 0))) for i, low in enumerate(least)]


def write(rows):
    lines = []
    for row, measured in sorted(rows.items()):
        numbers = ", ".join(str(number) for number in numbers_of(row, measured))
        lines.append(f'    {{"{row.kernel}", "{row.rule}", {row.K}, {str(row.backward).lower()}, {numbers}}},\n')
    text = TABLE.read_text(encoding="utf-8")
    TABLE.write_text(ROWS.sub(lambda _: "".join(lines), text), encoding="utf-8")
    print(f"{TABLE}: {len(lines)} rows")


def compare(rows, within):
    stale = apart = 0
    for row, measured in sorted(rows.items()):
        for of in measured:
            difference = of.planned / of.executed - 1
            notes = {"STALE": abs(difference) > within,
                     "LANES APART": of.lanes < FEWER.get(row.kernel, LANES)}
            stale, apart = stale + notes["STALE"], apart + notes["LANES APART"]
            said = "".join(f"  {note}" for note, applies in notes.items() if applies)
            print(f"{of.executed:12} executed by {of.lanes:6.1%} of lanes, planned {difference:+7.1%}  {row.kernel} "
                  f"{row.rule} {of.problem}{said}")
    if stale:
        print(f"{stale} numbers of {TABLE.name} are not those of the kernels as they are: measure them anew,\n"
              "    python3 tests/cuda/issued.py build/ptx --write")
    if apart:
        print(f"{apart} times fewer than {LANES:.0%} of a warp's lanes execute its instructions: see LANES")
    return 1 if stale or apart or not rows else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("build", type=pathlib.Path, help="a build of preset ptx")
    parser.add_argument("--write", action="store_true", help="measure all problems and write the table")
    parser.add_argument("--all", action="store_true", help="compare all problems that the table is made of")
    parser.add_argument("--within", type=float, default=0.05, help="the largest difference, as a share")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        runs = Runs(arguments.build.resolve(), pathlib.Path(scratch))
        rows = measure(runs, quick=not arguments.write and not arguments.all)
    if arguments.write:
        write(rows)
        return 0
    return compare(rows, arguments.within)


if __name__ == "__main__":
    sys.exit(main())
