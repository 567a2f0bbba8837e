#!/usr/bin/env python3
"""`headrace plan` says what is launched and what it does: its launches and counts beside those of the interpreter.

    plan_test.py PATH_OF_HEADRACE

A problem is planned and run. The launches must be the same; multiply-adds, barriers, accesses to tiles and bytes of
device memory are compared with the instructions that warps executed. Sizes are multiples of a warp and of a chunk, so
that no lane idles at a tensor. In backwards the interpreter runs some loops once for each part of a warp that came
apart before them, which a GPU joins again: there the plan may lie below by more.
"""

import collections
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

LAUNCH = re.compile(r"launch \d+ (\S+) grid (\d+),1,1 block (\d+),1,1 shared \d+\+(\d+)")
BYTES = {"u16": 2, "f32": 4, "b32": 4, "u32": 4, "f64": 8, "b64": 8, "u64": 8}
EXACT, APART = 0.01, 0.15
HERE = pathlib.Path(__file__).resolve().parent
COUNTED = ("tensor_flop", "fma_flop", "tile_bytes", "input_bytes", "output_bytes", "saved_bytes", "barriers")


class Plan(unittest.TestCase):
    program = ""

    def run_on_stand_in(self, problem, **of_gpu):
        """([(kernel, blocks, threads, shared bytes)], {kernel: {instruction: executions by warps}})"""
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            switches = {"TRACE": 1, "COVERAGE": folder / "counts", "DUMP": folder, "RACES": 0, "ORDER": "ascending", **of_gpu}
            environment = {**os.environ, **{f"HEADRACE_PTX_{key}": str(value) for key, value in switches.items()}}
            done = subprocess.run([self.program, "check", problem], env=environment, capture_output=True, text=True,
                                  check=False)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            texts = [path.read_text(encoding="utf-8") for path in folder.glob("*.ptx")]
            counts = collections.defaultdict(collections.Counter)
            for line in (folder / "counts").read_text(encoding="utf-8").splitlines():
                kernel, what, number, *lanes = line.split("\t")
                if what == "statements":
                    text = next(text for text in texts if f".entry {kernel}(" in text).split("\n")
                    continue
                statement = re.sub(r"^(\{\s*)?(@!?%\w+\s+)?", "", text[int(what) - 1].strip())
                instruction = statement.split()[0].rstrip(";")
                counts[kernel][instruction] += int(number)
                counts[kernel]["lanes " + instruction] += int(lanes[0])
        launches = [(kernel, int(blocks), int(threads), int(shared))
                    for kernel, blocks, threads, shared in LAUNCH.findall(done.stdout + done.stderr)]
        return launches, counts

    def planned(self, problem, **environment):
        done = subprocess.run([self.program, "plan", problem, "--json"], env={**os.environ, **environment},
                              capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return json.loads(done.stdout)["gpu"]["launches"]

    def compared(self, problem, below=EXACT, only=""):
        """The launches agree; counts agree to 1 %, or lie below by no more than `below`, of all launches of a kernel
        together and of all kernels, or of one. Returns the first launch."""
        launches, counts = self.run_on_stand_in(problem)
        planned = self.planned(problem)
        self.assertEqual(len(launches), len(planned), launches)
        for (symbol, *grid), launch in zip(launches, planned):
            self.assertIn(launch["kernel"], symbol)
            self.assertEqual(grid, [launch[key] for key in ("blocks", "threads", "shared_bytes")])
        working = collections.defaultdict(list)
        for (symbol, *_), launch in zip(launches, planned):
            if launch["kernel"] != "numbers":
                working[symbol].append(launch)
        for symbol, of_kernel in working.items():
            total = {key: sum(launch[key] for launch in of_kernel) if key in COUNTED else value
                     for key, value in of_kernel[0].items()}
            if total["kernel"].startswith(only):
                self.compare(problem, total, counts[symbol], below)
        return next(iter(working.values()))[0]

    def compare(self, problem, launch, executed, below):
        def total(pattern, weight=lambda instruction: 1):
            return sum(count * weight(name) for name, count in executed.items() if re.fullmatch(pattern, name))

        def moved(kind):
            def size(name):
                return BYTES[name.rsplit(".", 1)[1]] * (4 if ".v4." in name else 2 if ".v2." in name else 1)
            return total(rf"lanes {kind}\.global\.[\w.]+", size)

        def of_tile(instruction):
            """Accesses of 128 bytes: 512 of a matrix or of 16 bytes a lane, 256 of doubles where a tile has them. Pairs of
            floats are factors of columns, which eight lanes share."""
            wide = ".x4." in instruction or re.search(r"\.v4\.|\.v2\..64", instruction) or instruction.startswith("cp.async.cg")
            doubles = instruction.endswith("f64") and launch["arithmetic"] == "f64"
            apart = launch["kernel"] == "tensor_gradients" and ".v2.f32" in instruction  # sums that each lane keeps
            return 4 if wide else 2 if doubles or apart else 1

        # Written by one part of a launch and read by another; or by launches of their own.
        saved_in = {"tensor_prepare": 0, "tensor_walk": 1, "tensor_forward_gradient": 0, "tensor_add_outputs": 1, "tensor_gradients": 1}.get(launch["kernel"], 0.5) * launch["saved_bytes"]
        saved_out = launch["saved_bytes"] - saved_in
        tiles = r"(ld|st)(\.shared)?(\.v[24])?\.[fu](32|64)|shfl.*|ldmatrix.*|cp\.async\.c[ag]\..*"
        if launch["arithmetic"] == "f32":
            tiles = tiles.replace("(32|64)", "32")
        pairs = {
            "products on tensor cores": (launch["tensor_flop"] / (512 if launch["arithmetic"] == "f64" else 4096),
                                         total(r"mma\.sync.*"), EXACT),
            "barriers": (launch["barriers"], total(r"bar(rier)?\.sync") / (launch["threads"] / 32), EXACT),
            "accesses": (launch["tile_bytes"] / 128, total(tiles, of_tile), max(2 * below, 0.07)),
            "bytes in": (launch["input_bytes"] + saved_in, moved("ld") + 512 * total(r"cp\.async\.cg\..*") + 128 * total(r"cp\.async\.ca\..*"), EXACT),
            "bytes out": (launch["output_bytes"] + saved_out, moved("st"), EXACT),
        }
        # of numbers that several lanes read
        again = {"tensor_prepare": 0.03, "tensor_walk": 0.03, "tensor_gradients": 0.03, "recurrent_forward": 0.52,
                 "recurrent_step": 0.15}.get(launch["kernel"], EXACT)
        pairs["bytes in"] = (*pairs["bytes in"][:2], again)
        if launch["tensor_flop"] == 0:  # else of elementwise work
            pairs["multiply-adds"] = launch["fma_flop"] / 64, total(rf"fma\.rn\.{launch['arithmetic']}"), below
        for name, (expected, found, low) in pairs.items():
            with self.subTest(problem=problem, count=name):
                self.assertGreaterEqual(expected, (1 - low) * found)
                self.assertLessEqual(expected, 1.01 * found)

    def test_forwards(self):
        self.compared("gated_delta_rule:fwd t64 h2 k64 v64 bf16 force=cuda.walk cuda")
        self.compared("simple_gla:fwd t64 h2 hv4 k64 v128 bf16 force=cuda.walk cuda")
        self.compared("kda:fwd t64 h2 k64 v64 bf16 force=cuda.walk cuda", below=0.02)  # exponentials multiply too
        spilled = self.compared("comba:fwd t64 h2 k128 v128 bf16 state=inout force=cuda.walk cuda")
        self.assertGreater(spilled["spill_bytes"], 0)
        for operator in ("gated_delta_rule", "simple_gla", "kda"):
            self.compared(f"{operator}:fwd t64 h2 k64 v64 f64 force=cuda.walk cuda")
        self.compared("gla:fwd t32 h1 k64 v64 bf16 force=cuda.recurrent cuda", below=0.07)

    def test_steps(self):
        self.compared("gated_delta_rule:step b2 t1 h2 hv4 k64 v64 cuda", below=0.07)
        self.compared("kda:step b2 t1 h2 k128 v128 bf16 l2norm cuda", below=0.07)

    def test_tensor_cores(self):
        """Of 64 heads, which need no segments; a forward in segments and a backward launch what is planned."""
        launch = self.compared("gated_delta_rule:fwd t128 h33 k64 v64 bf16 force=cuda.tensor cuda")
        self.assertGreater(launch["tensor_flop"], 0)
        self.compared("simple_gla:fwd t256 h1 k128 v64 bf16 force=cuda.tensor cuda")
        self.compared("gated_delta_rule:fwd t256 h1 k128 v64 bf16 l2norm force=cuda.tensor cuda")
        self.compared("comba:fwd t128 h1 hv4 k128 v128 bf16 force=cuda.tensor cuda")
        self.compared("gated_delta_rule:fwd t256 h1 k256 v64 bf16 l2norm force=cuda.tensor cuda")
        self.compared("comba:fwd t128 h1 hv4 k256 v128 bf16 force=cuda.tensor cuda")
        self.compared("simple_gla:fwd t256 h1 k128 v64 f16 force=cuda.tensor cuda")
        self.compared("gated_delta_rule:fwd t256 h1 k128 v64 f16 l2norm force=cuda.tensor cuda")
        for problem, count in {"gated_delta_rule:fwd t2048 h1 k64 v64 bf16": 4, "linear_attention:bwd t128 h1 k64 v64 bf16": 3,
                               "linear_attention:bwd t600 h1 hv2 k64 v64 bf16": 9, "linear_attention:bwd t600 h1 k64 v64 bf16": 7,
                               "simple_gla:bwd t128 h8 k64 v64 f16": 4,
                               "simple_gla:bwd t128 h8 k64 v64 gate=step+head bf16": 6,
                               "gated_delta_rule:fwd t100 b2 h3 k64 v64 rawgate bf16": 3,
                               "retention:fwd t128 h2 k64 v64 bf16": 1,
                               "gated_delta_rule:bwd t64 h8 k64 v64 bf16": 3,
                               "gated_delta_rule:bwd t64 h8 k256 v64 l2norm bf16": 4, "delta_rule:bwd t64 h8 k256 v64 bf16": 3,
                               "comba:bwd t64 h8 k64 v64 gate=step+head bf16": 6,
                               "retention:fwd t128 h1 k256 v136 bf16": 3, "gla:fwd t128 h33 k160 v64 bf16": 5,
                               "gla:bwd t256 h1 k256 v200 bf16": 7, "simple_gla:bwd t128 h2 k256 v200 bf16": 10,
                               "simple_gla:fwd t1024 h1 k64 v64 bf16 state=inout": 3, "gla:fwd t2048 h1 k64 v64 bf16": 4,
                               "kda:fwd t2048 h1 k64 v64 bf16": 6,
                               "kda:bwd t64 h8 k64 v64 bf16": 6, "gla:bwd t64 h8 k64 v64 bf16": 3,
                               "gated_delta_rule:summary t128 h2 k64 v64 bf16": 2, "kda:summary t128 h2 k64 v64 bf16": 4,
                               "gated_delta_rule:summary t128 h1 k256 v64 bf16": 5, "gla:summary t128 h33 k64 v64 bf16": 3,
                               "simple_gla:summary t128 h66 k64 v64 bf16": 2, "simple_gla:summary t1024 h1 k64 v64 bf16": 3,
                               "kda:summary_bwd t64 h8 k64 v64 bf16": 4}.items():
            launches, _ = self.run_on_stand_in(problem + " force=cuda.tensor cuda")
            planned = self.planned(problem + " force=cuda.tensor cuda")
            self.assertEqual([list(grid) for _, *grid in launches],
                             [[launch[key] for key in ("blocks", "threads", "shared_bytes")] for launch in planned])
            self.assertEqual(len(launches), count, problem)

    def test_two_groups(self):
        """Of many heads blocks walk 128 values, where groups of warps share registers and the blocks come in fewer waves."""
        for sizes, gpu, blocks in (("h66 v128", "h200", 0), ("h67 v128", "h200", 67), ("h67 v72", "h200", 67),
                                   ("h132 v128", "h200", 132), ("h133 v128", "h200", 0), ("h90 v192", "h200", 0),
                                   ("h67 v256", "h200", 0), ("h100 v256", "h200", 200), ("h67 v128", "a100", 0)):
            for operator, kernel in (("gated_delta_rule", "tensor_walk"), ("kda", "channel_walk")):
                walk = self.planned(f"{operator}:fwd t128 {sizes} k128 bf16 cuda={gpu}")[-1]
                self.assertEqual(walk["kernel"], kernel + "_two" * (blocks > 0), f"{sizes}, {gpu}")
                if blocks:
                    self.assertEqual((walk["blocks"], walk["threads"]), (blocks, 384))
        for operator, kernel in (("comba", "tensor_walk_two"), ("kda", "channel_walk_two")):
            problem = f"{operator}:fwd t128 h67 k128 v128 bf16 cuda"
            launches, _ = self.run_on_stand_in(problem, CAPABILITY="9.0")
            planned = self.planned(problem, HEADRACE_PTX_CAPABILITY="9.0")
            self.assertEqual([list(grid) for _, *grid in launches],
                             [[launch[key] for key in ("blocks", "threads", "shared_bytes")] for launch in planned])
            self.assertIn(kernel, launches[-1][0])

    def test_key_gradients(self):
        """Value heads that share keys; of unit length."""
        self.compared("linear_attention:bwd t256 h2 hv6 k64 v64 bf16 force=cuda.tensor cuda")
        for heads in ("h2 hv8", "h8"):
            self.compared(f"retention:bwd t64 {heads} k128 v128 l2norm bf16 force=cuda.tensor cuda", only="tensor_add")
        for operator in ("retention:fwd", "linear_attention:bwd"):
            self.compared(f"{operator} t64 h33 k256 v128 bf16 force=cuda.tensor cuda", only="tensor_add")

    def test_delta_gradients(self):
        for operator, sizes in (("gated_delta_rule", "k64 v128 l2norm"), ("comba", "k128 v64"), ("delta_rule", "k128 v64"),
                                ("gated_delta_rule", "k256 v128"), ("comba", "k256 v64")):
            self.compared(f"{operator}:bwd t128 h2 hv4 {sizes} bf16 force=cuda.tensor cuda", only="tensor_gradients")

    def test_split(self):
        problem = "gated_delta_rule:bwd t128 h1 hv2 k64 v64 bf16 gate=step+head force=cuda.split cuda"
        launches, counts = self.run_on_stand_in(problem)
        planned = self.planned(problem)
        self.assertEqual([launch["kernel"] for launch in planned], ["split_sweeps", "split_gradients", "parameter_sums"])
        self.assertEqual([list(grid) for _, *grid in launches],
                         [[launch[key] for key in ("blocks", "threads", "shared_bytes")] for launch in planned])
        gradients = planned[1]
        self.assertEqual(gradients["barriers"] * 8, counts[launches[1][0]]["bar.sync"])

    def test_backwards(self):
        for operator in ("simple_gla", "gated_delta_rule", "gla"):
            launch = self.compared(f"{operator}:bwd t64 h2 hv4 k64 v64 bf16 force=cuda.walk cuda", below=APART)
            self.assertGreater(launch["saved_bytes"], 0)

    def test_ragged_batches(self):
        """There are as many blocks as any lengths could ask for; the plan knows how many have a chunk, or, of lengths
        on a device, how many of sequences of mean length have."""
        for direction in ("gated_delta_rule:fwd", "gated_delta_rule:bwd", "kda:fwd", "kda:bwd"):
            for launch in self.planned(f"{direction} t256 h2 hv4 k128 bf16 cuda"):
                self.assertEqual(launch["idle_blocks"], 0, launch["kernel"])
            # Where lengths lie depends on how many there are (harness/device_call.cpp).
            for lengths, chunks, places in (("0,1,129,200,201,256", 7, 9), ("0,256,256", 4, 6), ("0,1,129,256", 6, 7)):
                of_chunks = [launch for launch in self.planned(f"{direction} varlen={lengths} h2 hv4 k128 bf16 cuda")
                             if launch["idle_blocks"] > 0]
                self.assertTrue(any("prepare" in launch["kernel"] for launch in of_chunks), direction)
                for launch in of_chunks:
                    self.assertEqual(launch["idle_blocks"] * places, launch["blocks"] * (places - chunks), launch)
                    self.assertEqual(launch["all_steps"] * places, launch["blocks"] * chunks, launch)

    def test_of_a_named_gpu(self):
        """Its limits count, not those of the GPU that is there, or of none; all launches have room there."""
        problems = [line for line in (HERE.parent.parent / "problems/gpu.txt").read_text(encoding="utf-8").splitlines()
                    if line and not line.startswith("#")]
        elsewhere = [{"HEADRACE_PTX_CAPABILITY": "8.0", "HEADRACE_PTX_SHARED": "99"},
                     {"HEADRACE_PTX_CAPABILITY": "9.0"}, {"HEADRACE_PTX_DEVICES": "0"}]
        for gpu, threads in (("h200", 384), ("a100", 256)):
            for problem in problems:
                named = re.sub(r"\bcuda\b", f"cuda={gpu}", problem)
                plans = [self.planned(named, **its) for its in elsewhere]
                self.assertEqual(plans[0], plans[1], named)
                self.assertEqual(plans[0], plans[2], named)
                for launch in plans[0]:
                    self.assertGreater(launch["blocks_at_once"], 0, f"{named}: {launch}")
            walk = self.planned(f"comba:fwd t8192 h32 k128 bf16 cuda={gpu}")[-1]
            self.assertEqual((walk["kernel"], walk["threads"]), ("tensor_walk", threads))

    def test_small_launches(self):
        """Those of sequences before and behind all others, the sums of parameters behind the walk."""
        problem = "simple_gla:bwd varlen=0,40,64,100 h2 k32 v32 gate=step+head rawgate force=cuda.walk cuda"
        launches, _ = self.run_on_stand_in(problem)
        planned = self.planned(problem)
        self.assertEqual([list(grid) for _, *grid in launches],
                         [[launch[key] for key in ("blocks", "threads", "shared_bytes")] for launch in planned])
        names = [launch["kernel"] for launch in planned]
        self.assertEqual(names, ["check_sequences", "walk_backward", *["parameter_sums"] * 3, "spoil"])
        for launch in planned:
            self.assertEqual(launch["steps"], 2 if launch["kernel"] == "walk_backward" else 0)


if __name__ == "__main__":
    Plan.program = sys.argv.pop(1)
    unittest.main()
