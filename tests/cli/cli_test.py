#!/usr/bin/env python3
"""Drives the headrace command as a user would and judges its files with a recurrence of a few lines.

usage: cli_test.py PATH_OF_HEADRACE
"""
import json
import math
import random
import re
import sys

sys.dont_write_bytecode = True
from case import Case, main  # noqa: E402
from plain import GATES, error, example, read_file, recurrence, write_file  # noqa: E402


class Questions(Case):
    def test_help_and_version(self):
        self.assertRegex(self.headrace("--version"), r"^headrace \d+\.\d+\.\d+\n$")
        general = self.headrace("--help")
        for command in ("list", "explain", "plan", "gen", "run", "check", "bench"):
            self.assertIn(command, general)
            text = self.headrace(command, "--help")
            self.assertIn(f"headrace {command} ", text.split("Example")[1])
            self.assertLessEqual(max(map(len, text.splitlines())), 120)
        self.headrace("check", "gla:fwd", "nonsense", code=2)
        words = re.search(r"nonsense: expected one of (.*)\n", self.stderr)[1].split(", ")
        self.assertGreater(len(words), 30)
        for word in words:
            self.assertIn(word, self.headrace("check", "--help"))

    def test_list(self):
        listed = self.json("list", "--json")
        self.assertEqual([row["name"] for row in listed["operators"]], list(GATES))
        self.assertGreater(len(listed["implementations"]), 3)
        self.assertIn("qwen3-next-80b", [preset["name"] for preset in listed["presets"]])
        text = self.headrace("list")
        for word in [*GATES, *listed["implementations"]]:
            self.assertIn(word, text)

    def test_explain(self):
        problem = "kda:bwd t100 h2 k32 bf16 threads=2"
        answer = self.json("explain", *problem.split(), "--json")
        self.assertEqual(answer["problem"], problem)
        accepting = [row["name"] for row in answer["candidates"] if row["accepts"]]
        self.assertEqual(answer["implementation"], accepting[0])
        self.assertGreater(len(accepting), 1)
        self.assertIn("serves this problem", self.headrace("explain", problem))
        forced = self.json("explain", problem, f"force={accepting[-1]}", "--json")
        self.assertEqual(forced["implementation"], accepting[-1])
        # what it names is what runs, also where an implementation that could serve leaves it to a later one
        for problem in ("gated_delta_rule:fwd t2 h2 k16", "kda:bwd t6 h2 k32", "gla:fwd t7 h2 k32",
                        "simple_gla:bwd t6 h4 k32", "kda:step t1 h2 k32", "gla:fwd t64 h2 k64 bf16",
                        "gla:fwd t2 h4 gv", "retention:bwd t100 h2 k16"):
            answer = self.json("explain", problem, "--json")
            (result,) = self.json("check", problem, "--json", "-")["results"]
            self.assertEqual(answer["implementation"], result["implementation"], problem)
            table = self.headrace("explain", problem)
            self.assertRegex(table, re.escape(answer["implementation"]) + " +serves this problem")
            self.assertEqual(table.count("serves this problem"), 1, table)
        # the value-side gate exists in the recurrent form only: some refuse, with a reason
        refusals = [row["refusal"] for row in self.json("explain", "gla:fwd", "gv", "--json")["candidates"]]
        self.assertTrue("" in refusals and any(refusals), refusals)
        # on a GPU, of a build without CUDA
        if not self.json("explain", "gla:fwd cuda", "--json")["candidates"]:
            reason = "no implementation accepts gla forward b1 t256 h4 hv4 k64 v64 f32 cuda: none for CUDA tensors is " \
                     "compiled in (HEADRACE_CUDA)"
            self.assertIn(reason, self.headrace("explain", "gla:fwd cuda"))
            for command in (["plan"], ["check"], ["check", "--all"], ["bench"], ["gen", "--out", self.y]):
                self.refused(reason, *command, "gla:fwd cuda")

    def test_pieces_are_checked_and_timed(self):
        self.assertIn("1 problem checked", self.headrace("check", "kda:bwd t100 h2 k32 state=inout ranks=3"))
        bench = ["bench", "kda:fwd t100 h2 k32 ranks=3", "gla:summary t100 h2 k32", "--min-calls", "1",
                 "--min-seconds", "0.001"]
        self.assertIn("kda:fwd t100 h2 k32 ranks=3", self.headrace(*bench))


class Run(Case):
    def run_file(self, op, *flags, tensors=None, metadata=None):
        if tensors:
            write_file(self.x, tensors, metadata)
        self.report = self.json("run", op, "--in", self.x, "--out", self.y, "--json", *flags)
        return {name: values for name, (_, _, values) in read_file(self.y)[0].items()}

    def test_every_operator(self):
        for op in GATES:
            with self.subTest(op):
                tensors = example(op)
                results = self.run_file(op, tensors=tensors)
                o, states = recurrence(op, tensors)
                self.assertLess(error(results["o"], o), 1e-11)
                self.assertLess(error(results["final_state"], states), 1e-11)
                self.assertEqual(set(results), {"o", "final_state"})
                self.assertEqual({"o": [2, 5, 2, 4], "final_state": [2, 2, 3, 4]},
                                 {row["name"]: row["shape"] for row in self.report["outputs"]})
                self.assertGreater(self.report["ms_min"], 0)

    def test_gradients(self):
        """Central differences of sum(o d_o) + sum(final_state d_final_state), one element of each input."""
        step = 1e-5
        for op in GATES:
            tensors = example(op)
            output = self.run_file(op, tensors=tensors)
            rng = random.Random(1)
            weights = {name: [rng.uniform(-1, 1) for _ in output[name]] for name in output}
            shapes = {row["name"]: row["shape"] for row in self.report["outputs"]}
            gradients = self.run_file(op, "--backward", tensors={
                **tensors, "d_o": ("F64", shapes["o"], weights["o"]),
                "d_final_state": ("F64", shapes["final_state"], weights["final_state"])})
            self.assertEqual(set(gradients), {"d_" + name for name in tensors})
            for name, (dtype, shape, values) in tensors.items():
                with self.subTest(op=op, name=name):
                    at = rng.randrange(len(values))
                    losses = []
                    for sign in (1, -1):
                        moved = values[:at] + [values[at] + sign * step] + values[at + 1:]
                        results = recurrence(op, {**tensors, name: (dtype, shape, moved)})
                        losses.append(sum(w * x for key, part in zip(("o", "final_state"), results)
                                          for w, x in zip(weights[key], part)))
                    self.assertAlmostEqual(gradients["d_" + name][at], (losses[0] - losses[1]) / (2 * step), delta=1e-7)

    def test_options_of_the_command_and_of_the_file(self):
        tensors = example("gated_delta_rule", "F32")
        reference = recurrence("gated_delta_rule", tensors, scale=0.7, reverse=True, l2norm=True)
        flags = ["--scale", "0.7", "--reverse", "--l2norm"]
        metadata = {"scale": "0.7", "reverse": "true", "l2norm": "true", "made_by": "another tool"}
        for results in (self.run_file("gated_delta_rule", *flags, tensors=tensors),
                        self.run_file("gated_delta_rule", tensors=tensors, metadata=metadata)):
            for name, expected in zip(("o", "final_state"), reference):
                self.assertLess(error(results[name], expected), 3e-6)
        back = self.run_file("gated_delta_rule", "--no-reverse", tensors=tensors, metadata=metadata)
        forth, _ = recurrence("gated_delta_rule", tensors, scale=0.7, l2norm=True)
        self.assertLess(error(back["o"], forth), 3e-6)

    def test_value_first_states(self):
        tensors = example("gla", B=1, HV=1, K=3, V=2)
        o, states = recurrence("gla", tensors)
        dtype, _, values = tensors["initial_state"]
        tensors["initial_state"] = (dtype, [1, 1, 2, 3], [values[c * 2 + i] for i in range(2) for c in range(3)])
        results = self.run_file("gla", "--vfirst", tensors=tensors)
        self.assertLess(error(results["o"], o), 1e-11)
        self.assertLess(error(results["final_state"], [states[c * 2 + i] for i in range(2) for c in range(3)]), 1e-11)

    def test_gates_and_beta_from_their_raw_forms(self):
        tensors = example("gated_delta_rule")
        plain = dict(tensors)
        a_log = [-0.5, 0.3]
        sigmoid = lambda x: 1 / (1 + math.exp(-x))
        heads = len(a_log)
        raw = tensors["g"][2]
        tensors["A_log"] = ("F64", [heads], a_log)
        plain["beta"] = ("F64", tensors["beta"][1], [2 * sigmoid(b) for b in tensors["beta"][2]])
        softplus = [-math.exp(a_log[i % heads]) * math.log1p(math.exp(x)) for i, x in enumerate(raw)]
        bounded = [-3 * sigmoid(math.exp(a_log[i % heads]) * x) for i, x in enumerate(raw)]
        for flags, g in ((["--gate-form", "softplus"], softplus),
                         (["--gate-form", "bounded", "--lower-bound", "-3"], bounded)):
            results = self.run_file("gated_delta_rule", *flags, "--beta-form", "two_sigmoid", tensors=tensors)
            plain["g"] = ("F64", tensors["g"][1], g)
            self.assertLess(error(results["o"], recurrence("gated_delta_rule", plain)[0]), 1e-11)

    def test_ragged_batch(self):
        tensors = example("kda", B=1, T=7)
        lengths = [3, 0, 4]
        dtype, (_, HV, K, V), values = tensors["initial_state"]
        tensors["initial_state"] = (dtype, [3, HV, K, V], values * 3)
        tensors["cu_seqlens"] = ("I64", [4], [0, 3, 3, 7])
        results = self.run_file("kda", tensors=tensors)
        o, states, begin = [], [], 0
        for length in lengths:
            part = {"initial_state": (dtype, [1, HV, K, V], values)}
            for name in ("q", "k", "v", "g", "beta"):
                _, shape, all_values = tensors[name]
                row = math.prod(shape[2:])
                part[name] = (dtype, [1, length, *shape[2:]], all_values[begin * row:(begin + length) * row])
            outputs, final = recurrence("kda", part)
            o, states, begin = o + outputs, states + final, begin + length
        self.assertLess(error(results["o"], o), 1e-11)
        self.assertLess(error(results["final_state"], states), 1e-11)

    def test_step(self):
        tensors = example("comba", T=1)
        o, states = recurrence("comba", tensors)
        row = len(states) // 2
        dtype, shape, values = tensors.pop("initial_state")
        # three rows: sequence 0 lives in row 2, sequence 1 in row 0, row 1 belongs to nobody
        tensors["pool"] = (dtype, [3, *shape[1:]], values[row:] + [9.0] * row + values[:row])
        tensors["indices"] = ("I32", [2], [2, 0])
        for repeat in ("1", "3"):  # every call starts from the file's pool
            results = self.run_file("comba", "--step", "--repeat", repeat, tensors=tensors)
            self.assertLess(error(results["o"], o), 1e-11)
            self.assertLess(error(results["pool"], states[row:] + [9.0] * row + states[:row]), 1e-11)

    def test_generated_files(self):
        self.headrace("gen", "gla:fwd", "t37", "h2", "k16", "v8", "f32", "state=inout", "scale=0.5", "reverse",
                      "--out", self.x)
        tensors, metadata = read_file(self.x)
        self.assertEqual(tensors["q"][1], [1, 37, 2, 16])
        self.assertEqual({key: metadata[key] for key in ("operator", "scale", "reverse")},
                         {"operator": "gla", "scale": "0.5", "reverse": "true"})
        again = self.folder / "again.safetensors"
        self.headrace("gen", metadata["problem"], "--out", again)
        self.assertEqual(self.x.read_bytes(), again.read_bytes())
        o, states = recurrence("gla", tensors, scale=0.5, reverse=True)
        candidates = self.json("explain", metadata["problem"], "--json")["candidates"]
        accepting = [row["name"] for row in candidates if row["accepts"]]
        for name in accepting:
            results = self.run_file("gla", "--force", name, "--chunk", "16", "--threads", "2")
            self.assertEqual(self.report["implementation"], name)
            self.assertLess(error(results["o"], o), 3e-6)
            self.assertLess(error(results["final_state"], states), 3e-6)
        self.headrace("gen", "kda:bwd", "t20", "h2", "k16", "bf16", "l2norm", "rawgate", "beta=sigmoid",
                      "--out", self.x)
        gradients = self.run_file("kda", "--backward")
        self.assertTrue({"d_q", "d_k", "d_v", "d_g", "d_beta", "d_A_log"} <= set(gradients))
        self.assertTrue(all(math.isfinite(x) for values in gradients.values() for x in values))

    def test_empty_batch(self):
        self.headrace("gen", "simple_gla:fwd", "t0", "h2", "k8", "--out", self.x)
        self.assertEqual(self.run_file("simple_gla"), {"o": [], "final_state": [0.0] * (2 * 8 * 8)})


class Errors(Case):
    def test_commands(self):
        self.refused("subcommand", )
        self.refused("expected a command, one of list, explain, plan, gen, run, check, bench, got 'frobnicate'",
                     "frobnicate")
        self.refused("PROBLEM is required", "explain")
        self.refused("--out is required", "gen", "gla:fwd")
        self.refused("expected one problem, got 2", "plan", "gla:fwd", "kda:fwd")
        self.refused("nothing to check", "check")
        self.refused("nothing to measure", "bench")
        self.refused("no-such-file", "check", "--file", "no-such-file")

    def test_problems(self):
        for command in (["explain"], ["plan"], ["check"], ["bench"], ["gen", "--out", self.y]):
            self.refused("glb:fwd", *command, "glb:fwd")
            self.refused("t-4", *command, "gla:fwd", "t-4")
            self.refused("h0", *command, "gla:fwd h0")

    def test_files(self):
        arguments = ["--in", self.x, "--out", self.y]
        self.refused("x.safetensors: could not be opened: No such file", "run", "gla", *arguments)
        self.refused("operator: expected one of linear_attention, ", "run", "glb", *arguments)
        self.x.write_bytes(b"\xff" * 100)
        self.refused("x.safetensors: header: its size", "run", "gla", *arguments)
        tensors = example("gla")
        write_file(self.x, {name: tensors[name] for name in ("q", "v")})
        self.refused("x.safetensors: has no tensor 'k'", "run", "gla", *arguments)
        write_file(self.x, tensors)
        self.refused("has no tensor 'd_o' nor 'd_final_state'", "run", "gla", "--backward", *arguments)
        self.refused("has no tensor 'pool'", "run", "gla", "--step", *arguments)
        self.refused("--backward: cannot be given with --step", "run", "gla", "--backward", "--step", *arguments)
        self.refused("could not be created", "run", "gla", "--in", self.x, "--out", self.folder / "none" / "y")
        self.assertEqual(list(self.folder.iterdir()), [self.x])

    def test_tensors(self):
        arguments = ["--in", self.x, "--out", self.y]
        tensors = example("gla")
        for name, tensor, expected in (
                ("k", ("F64", [2, 5, 1, 2], [0.0] * 20), "k: "),
                ("g", ("F64", [2, 5, 2], [0.0] * 20), "g: "),
                ("g", ("F64", tensors["g"][1], [0.5] + tensors["g"][2][1:]), "g: "),
                ("v", ("F64", [80], [0.0] * 80), "v: "),
                ("q", ("I32", tensors["q"][1], [0] * 30), "q: "),
                ("initial_state", ("F64", [1, 2, 3, 4], [0.0] * 24), "initial_state: "),
                ("cu_seqlens", ("I64", [3], [0, 3, 5]), "q: expected batch 1 with cu_seqlens, got 2")):
            with self.subTest(name):
                write_file(self.x, {**tensors, name: tensor})
                self.refused(expected, "run", "gla", *arguments)
        write_file(self.x, {**tensors, "g": ("F64", tensors["g"][1], [0.5] * len(tensors["g"][2]))})
        self.headrace("run", "gla", *arguments, "--allow-positive-gates")
        self.y.unlink()
        write_file(self.x, {**tensors, "K": tensors["k"]})
        self.headrace("run", "gla", *arguments)
        self.assertIn("tensor 'K' is not used", self.stderr)

    def test_options(self):
        arguments = ["run", "gla", "--in", self.x, "--out", self.y]
        write_file(self.x, example("gla"))
        for flag, value, expected in (("--scale", "big", "--scale: expected a number, got 'big'"),
                                      ("--chunk", "17", "chunk: "),
                                      ("--chunk", "x", "--chunk: expected a whole number"),
                                      ("--gate-form", "x", "--gate-form: expected log_decay, softplus or bounded"),
                                      ("--saved", "f31", "--saved: expected f64, f32, bf16 or f16"),
                                      ("--force", "nobody", "force: expected one of"), ("--threads", "-1", "--threads"),
                                      ("--repeat", "0", "--repeat"), ("--no-such-flag", "1", "--no-such-flag")):
            with self.subTest(flag + " " + value):
                self.refused(expected, *arguments, flag, value)
        write_file(self.x, example("gla"), {"scale": "big"})
        self.refused("x.safetensors: metadata: scale: expected a number, got 'big'", *arguments)


class Check(Case):
    def test_problems_and_files(self):
        self.assertIn("1 problem checked", self.headrace("check", "gla:bwd", "t20", "h2", "k16"))
        listing = self.folder / "problems.txt"
        listing.write_text("# two problems\nkda:fwd t9 h1 k8\n\ncomba:bwd t5 h1 k8 f64  # the second\n")
        text = self.headrace("check", "--file", listing, "--verbose")
        self.assertIn("2 problems checked", text)
        self.assertIn("ok   kda:fwd t9 h1 k8", text)

    def test_all(self):
        problem = "gated_delta_rule:fwd t40 h1 k16"
        report = self.folder / "report.json"
        self.headrace("check", problem, "--all", "--json", report)
        results = json.loads(report.read_text())["results"]
        accepting = [row["name"] for row in self.json("explain", problem, "--json")["candidates"] if row["accepts"]]
        self.assertEqual([row["implementation"] for row in results], accepting)
        for row in results:
            self.assertTrue(row["ok"])
            self.assertLess(max(tensor["error"] for tensor in row["errors"]), 1e-4)

    def test_random(self):
        first, again, other = (self.json("check", "--random", "15", "--seed", seed, "--json", "-")
                               for seed in (3, 3, 4))
        self.assertEqual((first["problems"], first["missed"]), (15, 0), first)
        lines = [[row["problem"] for row in report["results"]] for report in (first, again, other)]
        self.assertEqual(lines[0], lines[1])
        self.assertFalse(set(lines[0]) & set(lines[2]))
        self.refused("--device: gpu not in {cpu,cuda}", "check", "--random", "3", "--device", "gpu")
        if "cuda.walk" not in self.json("list", "--json")["implementations"]:
            for problems in (["--random", "3"], ["gla:fwd", "t5"]):
                self.refused("this build has no CUDA", "check", *problems, "--device", "cuda")

    def test_a_miss(self):
        miss = ["gla:fwd", "t5", "scale=1e300"]  # which f32 does not hold
        text = self.headrace("check", *miss, "gla:fwd", "t5", code=1)
        self.assertIn("MISS gla:fwd", text)
        self.assertIn("repeat: headrace check ", text)
        self.assertIn("2 problems checked", text)
        self.assertIn("1 missed", text)
        report = json.loads(self.headrace("check", *miss, "--json", "-", code=1))
        self.assertEqual((report["missed"], report["results"][0]["ok"]), (1, False))
        self.assertIn("MISS gla:fwd", self.stderr)


class Bench(Case):
    def test_figures(self):
        problem = "gla:fwd t64 h2 k16 v8 state=inout"
        report = self.folder / "bench.json"
        text = self.headrace("bench", problem, "--threads", "1", "--min-seconds", "0.01", "--json", report)
        self.assertIn("measured peaks, 1 thread", text)
        self.assertIn("share of limit", text)
        value = json.loads(report.read_text())
        peaks, case = value["peaks"][0], value["cases"][0]
        self.assertGreater(min(peaks["f32_gflops"], peaks["f64_gflops"], peaks["copy_gbs"]), 0.1)
        self.assertEqual(case["useful_flop"], 4 * 64 * 2 * 16 * 8)
        token_elements = 64 * 2 * (16 + 16 + 16 + 8 + 8)  # q k g v o
        self.assertEqual(case["least_bytes"], 4 * (token_elements + 2 * 2 * 16 * 8))
        row, = case["rows"]
        self.assertGreaterEqual(row["calls"], 5)
        self.assertLessEqual(row["ms_min"], row["ms_median"])
        self.assertAlmostEqual(row["share_of_limit"], case["floor_ms_flop"] / row["ms_min"])
        self.assertAlmostEqual(row["useful_gflops"], case["useful_flop"] / row["ms_min"] * 1e-6)

    def test_useful_work(self):
        quick = ["--min-seconds", "0.001", "--json", "-"]
        for problem, per_token in (("simple_gla:bwd", 10), ("kda:fwd", 6), ("comba:bwd", 16), ("delta_rule:step", 6)):
            tokens = 1 if problem.endswith("step") else 32
            case, = self.json("bench", problem, f"t{tokens}", "h2", "hv4", "k8", "v16", *quick)["cases"]
            self.assertEqual(case["useful_flop"], per_token * tokens * 4 * 8 * 16)
            self.assertGreater(case["rows"][0]["share_of_limit"], 0)

    def test_variants(self):
        problem = "gated_delta_rule:fwd t40 h1 k16"
        accepting = [row["name"] for row in self.json("explain", problem, "--json")["candidates"] if row["accepts"]]
        case, = self.json("bench", problem, "--all", "--steps", "--min-seconds", "0.001", "--json", "-")["cases"]
        self.assertEqual([(row["implementation"], row["num_steps"]) for row in case["rows"]],
                         [(name, steps) for name in accepting for steps in (1, 2, 4, 8)])

    def test_the_implementation_that_serves_is_timed(self):
        for problem in ("kda:fwd t4 h1 k16", "kda:fwd t400 h1 k16"):  # the chunk form yields to the recurrent one
            serving = self.json("explain", problem, "--json")["implementation"]
            case, = self.json("bench", problem, "--min-seconds", "0.001", "--json", "-")["cases"]
            self.assertEqual([row["implementation"] for row in case["rows"]], [serving])
            self.headrace("gen", problem, "--out", self.x)
            self.assertIn(f" {serving}, ", self.headrace("run", "kda", "--in", self.x, "--out", self.y))

    def test_presets(self):
        value = self.json("bench", "--preset", "deltanet-1.3b", "deltanet-1.3b:step", "t1", "--min-calls", "1",
                          "--min-seconds", "0.001", "--json", "-")
        self.assertEqual([case["problem"].split()[0] for case in value["cases"]], ["delta_rule:step", "delta_rule:fwd"])


if __name__ == "__main__":
    main()
