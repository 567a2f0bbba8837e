#!/usr/bin/env python3
"""gpu_check and scripts/gpu_check.sh, in the interpreter; and the script's way on a GPU, with tools that only say so.

    gpu_check_test.py BUILD        a build of the preset ptx
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SMALL = "kda:fwd t20 h1 k16 cuda"
NVIDIA_SMI = """#!/bin/sh
echo 8.0
"""
# Fails where it is asked for racecheck; else it runs the program.
SANITIZER = """#!/bin/sh
[ "$2" != racecheck ] || { echo "========= Error: Race reported"; exit 9; }
while [ "${1#--}" != "$1" ]; do shift 2; done
exec "$@"
"""


class Case(unittest.TestCase):
    build = pathlib.Path()

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.results = self.folder / "results.jsonl"

    def execute(self, *command, code=0, **variables):
        environment = {**os.environ, "LD_LIBRARY_PATH": str(self.build / "tests/ptx/runtime"), **variables}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280,
                              check=False)
        self.assertEqual(done.returncode, code, f"{command}\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def gpu_check(self, *arguments, **options):
        return self.execute(self.build / "tests/cuda/gpu_check/gpu_check", *arguments, "--results", self.results,
                            **options)

    def lines(self, stage):
        every = [json.loads(line) for line in self.results.read_text(encoding="utf-8").splitlines()]
        return [line for line in every if line["stage"] == stage]


class Program(Case):
    def test_conformance_by_each_implementation(self):
        self.gpu_check("conformance", SMALL)
        runs = self.lines("conformance")
        self.assertLessEqual({"cuda.walk", "cuda.recurrent"}, {run["implementation"] for run in runs})
        for run in runs:
            self.assertTrue(run["ok"])
            self.assertTrue(0 < run["share_of_bar"] < 1, run)

    def test_shards_are_disjoint_and_end_in_time(self):
        problems = []
        for shard in range(2):
            self.gpu_check("conformance", "--shard", f"{shard}/900", "--count", "3")
            problems.append({line["problem"] for line in self.lines("conformance")})
        self.assertTrue(problems[0] < problems[1])
        self.assertIn("out of time", self.gpu_check("conformance", SMALL, SMALL, "--seconds", "0.001"))

    def test_a_miss_fails(self):
        output = self.gpu_check("conformance", SMALL, code=1, HEADRACE_PTX_FAIL="cudaLaunchKernel:1")
        self.assertIn("MISS kda:fwd", output)
        bad, good = self.lines("conformance")
        self.assertFalse(bad["ok"])
        self.assertIn("launch", bad["message"])
        self.assertIn("headrace check", bad["repeat"])
        self.assertTrue(good["ok"])

    def test_a_lost_device_is_left_behind(self):
        three = [SMALL, SMALL.replace("20", "21"), SMALL.replace("20", "22")]
        output = self.gpu_check("conformance", *three, code=1, HEADRACE_PTX_FAIL="cudaDeviceSynchronize:1")
        self.assertEqual(output.count("LOST the device"), 3)
        self.assertEqual(sum(not line["ok"] for line in self.lines("conformance")), 3)

    def test_streams(self):
        self.gpu_check("streams", SMALL)
        checks = {line["check"]: line["ok"] for line in self.lines("streams")}
        self.assertEqual(checks, {name: True for name in ("overlap", "repeats", "graph", "returns at once")})

    def test_an_error_is_the_failure_of_one_check(self):
        output = self.gpu_check("streams", SMALL, code=1, HEADRACE_PTX_FAIL="cudaGraphLaunch:2")
        self.assertIn("WRONG graph: kda:fwd", output)
        self.assertEqual([line["check"] for line in self.lines("streams") if not line["ok"]], ["graph"])

    def test_bench(self):
        self.gpu_check("bench", SMALL, "gated_delta_rule:step t1 h1 k16 cuda")
        peaks, = self.lines("peaks")
        self.assertFalse(peaks["times_mean_something"])
        for line in self.lines("bench"):
            for key in ("device_ms_min", "device_ms_median", "device_ms_tail", "call_us_min", "bound_ms_bytes"):
                self.assertGreater(line[key], 0, key)
        self.assertIn("expected the word cuda", self.gpu_check("bench", "kda:fwd t20", code=2))
        self.assertIn("NOT MEASURED", self.gpu_check("bench", SMALL, code=1, HEADRACE_PTX_FAIL="cudaLaunchHostFunc:1"))

    def test_what_is_refused(self):
        for words, text in ((["nonsense"], "got 'nonsense'"), (["bench"], "expected problems"),
                            (["conformance", "--shard", "2/2"], "I below N"), (["device", "--nobody", "1"], "no such"),
                            (["device", "--seconds", "-1"], "got '-1'"), (["streams", "gla:up"], "gla:up")):
            self.assertIn(text, self.gpu_check(*words, code=2))


class Script(Case):
    def script(self, *arguments, **options):
        return self.execute("bash", "scripts/gpu_check.sh", "--build", str(self.build), "--out", str(self.folder),
                            *arguments, **options)

    def outcomes(self):
        return {line["name"]: line["status"] for line in self.lines("stages")}

    def test_the_interpreter_is_said_to_be_one(self):
        output = self.script("--interpreter")
        self.assertIn("no GPU is used", output)
        self.assertIn("no GPU, so no times", output)
        self.assertIn("0 wrong", output)
        outcomes = self.outcomes()
        for name in ("device", "conformance", "sample of all", "streams", "bench"):
            self.assertEqual(outcomes.pop(name), "ok", name)
        self.assertEqual(set(outcomes.values()), {"not run"})
        self.assertGreater(len({line["implementation"] for line in self.lines("conformance")}), 1)

    def test_a_miss_is_an_exit_status(self):
        output = self.script("--interpreter", "--seconds", "16", code=1, HEADRACE_PTX_FAIL="cudaLaunchKernel:9")
        self.assertEqual(self.outcomes()["conformance"], "FAILED")
        self.assertIn("WRONG conformance: ", output)

    def test_the_way_on_a_gpu(self):
        tools = self.folder / "tools"
        tools.mkdir()
        for name, text in (("nvidia-smi", NVIDIA_SMI), ("compute-sanitizer", SANITIZER)):
            (tools / name).write_text(text, encoding="utf-8")
            (tools / name).chmod(0o755)
        problems = self.folder / "problems.txt"
        problems.write_text(SMALL + "\n", encoding="utf-8")
        output = self.script("--problems", str(problems), "--seconds", "150", code=1,
                             PATH=f"{tools}:{os.environ['PATH']}")
        outcomes = self.outcomes()
        for name in ("conformance", "streams", "memcheck", "initcheck", "synccheck", "bench"):
            self.assertEqual(outcomes[name], "ok", output)
        self.assertEqual(outcomes["racecheck"], "FAILED")
        self.assertIn("Race reported", output)
        self.assertEqual(len(self.lines("bench")), 1)

    def test_without_a_build(self):
        output = self.execute("bash", "scripts/gpu_check.sh", "--interpreter", "--build", str(self.folder), "--out",
                              str(self.folder), code=1)
        self.assertIn("is not there", output)
        self.assertIn("unknown option", self.execute("bash", "scripts/gpu_check.sh", "--frob", code=1))


if __name__ == "__main__":
    Case.build = pathlib.Path(sys.argv.pop(1)).resolve()
    unittest.main()
