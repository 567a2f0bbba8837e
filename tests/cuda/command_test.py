#!/usr/bin/env python3
"""The command's gen, run and bench on problems with the word cuda.

    command_test.py PATH_OF_HEADRACE
"""
import json
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "cli"))
from case import Case, main  # noqa: E402
from plain import read_file, recurrence  # noqa: E402

QUICK = ["--min-calls", "3", "--min-seconds", "0.001"]


def difference(results, expected):
    size = max(map(abs, expected))
    return max(abs(x - y) for x, y in zip(results, expected, strict=True)) / size


class Files(Case):
    def run_file(self, op, *arguments):
        self.report = self.json("run", op, "--in", self.x, "--out", self.y, "--json", *arguments)
        tensors, self.metadata = read_file(self.y)
        return {name: values for name, (_, _, values) in tensors.items()}

    def test_the_word_decides_where_a_file_is_computed(self):
        problem = ["gated_delta_rule:fwd", "t37", "h1", "hv2", "k16", "v8", "state=inout"]
        self.headrace("gen", *problem, "--out", self.y)
        on_host = read_file(self.y)
        self.headrace("gen", *problem, "cuda", "--out", self.x)
        tensors, metadata = read_file(self.x)
        self.assertEqual(tensors, on_host[0])
        self.assertEqual(metadata["device"], "cuda")
        o, states = recurrence("gated_delta_rule", tensors)
        for arguments, backend in (([], "cuda."), (["--device", "cuda", "--force", "cuda.recurrent"], "cuda.recurrent"),
                                   (["--device", "cpu"], "")):
            results = self.run_file("gated_delta_rule", *arguments)
            self.assertTrue(self.report["implementation"].startswith(backend), self.report)
            self.assertEqual(self.report["implementation"].startswith("cuda."), backend != "")
            self.assertEqual(self.report.get("device"), "cuda" if backend else None)
            self.assertLess(difference(results["o"], o), 3e-6)
            self.assertLess(difference(results["final_state"], states), 3e-6)

    def test_problems_of_a_device(self):
        text = self.headrace("check", "gla:fwd t5 h1", "--random", 8, "--seed", 3, "--device", "cuda", "-v")
        lines = [line for line in text.splitlines() if line.startswith("ok ")]
        self.assertEqual(len(lines), 9, text)
        for line in lines:
            self.assertRegex(line, " cuda .* cuda[.]")

    def test_without_a_device_nothing_is_missed(self):
        for check in (["gla:fwd t5 h1 cuda"], ["gla:fwd t5 h1", "gla:fwd t5 h1 cuda", "--all"],
                      ["gla:fwd t5 h1", "--device", "cuda"], ["--random", 3, "--device", "cuda"]):
            self.refused("no CUDA-capable device", "check", *check, env={**os.environ, "HEADRACE_PTX_DEVICES": "0"})

    def test_gradients(self):
        self.headrace("gen", "kda:bwd", "t20", "h2", "k16", "l2norm", "rawgate", "beta=sigmoid", "cuda",
                      "--out", self.x)
        there = self.run_file("kda", "--backward")
        here = self.run_file("kda", "--backward", "--device", "cpu")
        self.assertEqual(set(there), set(here))
        for name, gradient in here.items():
            self.assertLess(difference(there[name], gradient), 1e-4, name)

    def test_ragged_batch(self):
        self.headrace("gen", "gla:fwd", "varlen=0,5,5,20", "h1", "k16", "state=inout", "cuda", "--out", self.x)
        there, here = self.run_file("gla"), self.run_file("gla", "--device", "cpu")
        for name, expected in here.items():
            self.assertLess(difference(there[name], expected), 3e-6, name)

    def test_each_repetition_begins_with_the_files_pool(self):
        self.headrace("gen", "gated_delta_rule:step", "b3", "t1", "h1", "k16", "pool=5", "cuda", "--out", self.x)
        once, thrice = self.run_file("gated_delta_rule", "--step"), self.run_file("gated_delta_rule", "--step",
                                                                                  "--repeat", 3)
        self.assertEqual(self.report["calls"], 3)
        self.assertEqual(once, thrice)
        pool = read_file(self.x)[0]["pool"][2]
        self.assertNotEqual(once["pool"], pool)
        here = self.run_file("gated_delta_rule", "--step", "--device", "cpu")
        for name, expected in here.items():
            self.assertLess(difference(once[name], expected), 3e-6, name)

    def test_wrong_values_are_errors_as_on_the_cpu(self):
        for tensor, wrong, error in (("cu_seqlens", b"\x01", "cu_seqlens: expected "),
                                     ("g", b"\0\0\x80\x3f", "g: expected "),  # 1
                                     ("beta", b"\0\0\xc0\x7f", "beta: expected ")):  # NaN
            self.headrace("gen", "kda:fwd", "varlen=0,3,3,5,9", "h1", "k16", "cuda", "--out", self.x)
            contents = bytearray(pathlib.Path(self.x).read_bytes())
            header = 8 + int.from_bytes(contents[:8], "little")
            begin = header + json.loads(contents[8:header])[tensor]["data_offsets"][0]
            contents[begin:begin + len(wrong)] = wrong
            pathlib.Path(self.x).write_bytes(contents)
            for device in ("cuda", "cpu"):
                self.refused(error, "run", "kda", "--in", self.x, "--out", self.y, "--device", device)

    def test_what_is_refused(self):
        self.headrace("gen", "gla:fwd", "t5", "h1", "k16", "cuda", "--out", self.x)
        run = ["run", "gla", "--in", self.x, "--out", self.y]
        self.refused("--device: expected cpu or cuda, got 'gpu'", *run, "--device", "gpu")
        self.refused("force: expected an implementation of forward", *run, "--force", "generic.chunk")
        self.refused("no CUDA-capable device", *run, env={**os.environ, "HEADRACE_PTX_DEVICES": "0"})
        self.refused("out of memory", *run, env={**os.environ, "HEADRACE_PTX_MEMORY": "2000"})
        broken = {**os.environ, "HEADRACE_PTX_FAIL": "cudaLaunchKernel:1"}
        self.refused("CUDA: launch of", *run, env=broken)


class Bench(Case):
    def test_figures(self):
        report = self.folder / "bench.json"
        problems = ["kda:bwd t30 h1 k16 bf16 cuda", "gated_delta_rule:step t1 h1 k16 cuda", "gla:fwd t9 h1 k16"]
        text = self.headrace("bench", *problems, *QUICK, "--threads", "1", "--json", report)
        self.assertIn("measured peaks of headrace PTX interpreter", text)
        self.assertEqual(text.count("its times, rates and shares mean nothing"), 1)
        self.assertEqual(text.count("device ms min"), 2)
        value = json.loads(report.read_text(encoding="utf-8"))
        there, here = value["peaks"]
        self.assertEqual(there["device"], "headrace PTX interpreter")
        self.assertFalse(there["times_mean_something"])
        self.assertNotIn("device", here)
        for key in ("f32_gflops", "f64_gflops", "bf16_gflops", "f16_gflops", "copy_gbs"):
            self.assertGreater(there[key], 0, key)
        self.assertEqual([case["problem"].split()[0] for case in value["cases"]],
                         ["kda:bwd", "gated_delta_rule:step", "gla:fwd"])
        for case in value["cases"][:2]:
            row, = case["rows"]
            self.assertTrue(row["implementation"].startswith("cuda."), row)
            self.assertGreaterEqual(row["calls"], 3)
            for first, last in (("ms_min", "ms_median"), ("ms_median", "ms_tail"), ("call_ms_min", "call_ms_median"),
                                ("call_ms_median", "call_ms_tail")):
                self.assertGreater(row[first], 0)
                self.assertLessEqual(row[first], row[last])
            bound = max(case["floor_ms_bytes"], case["floor_ms_flop"])
            self.assertAlmostEqual(row["share_of_bound"], bound / row["ms_min"])
            dtype = "bf16" if "bf16" in case["problem"] else "f32"
            self.assertAlmostEqual(case["floor_ms_flop"], case["useful_flop"] / there[f"{dtype}_gflops"] * 1e-6)
            self.assertAlmostEqual(case["floor_ms_bytes"], case["least_bytes"] / there["copy_gbs"] * 1e-6)
        self.assertIn("share_of_limit", value["cases"][2]["rows"][0])

    def test_variants(self):
        problem = "gated_delta_rule:fwd t20 h1 k16 cuda"
        accepting = [row["name"] for row in self.json("explain", problem, "--json")["candidates"] if row["accepts"]]
        self.assertGreater(len(accepting), 1)
        case, = self.json("bench", problem, "--all", *QUICK, "--json", "-")["cases"]
        self.assertEqual([row["implementation"] for row in case["rows"]], accepting)

    def test_what_is_refused(self):
        bench = ["bench", "gla:fwd", "t5", "h1", "k16", "cuda"]
        self.refused("no ranks=P", *bench, "ranks=2")
        self.refused("no CUDA-capable device", *bench, env={**os.environ, "HEADRACE_PTX_DEVICES": "0"})
        self.refused("out of memory", *bench, env={**os.environ, "HEADRACE_PTX_MEMORY": "2000"})
        for call in ("cudaEventElapsedTime:2", "cudaLaunchHostFunc:1", "cudaLaunchKernel:9"):
            code = self.headrace(*bench, *QUICK, code=2, env={**os.environ, "HEADRACE_PTX_FAIL": call})
            self.assertNotIn("device ms min", code)
            self.one_line("CUDA: ")


if __name__ == "__main__":
    main()
