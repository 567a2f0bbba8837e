#!/usr/bin/env python3
"""headrace plan: memory, ways to share the tokens, launches on a GPU.

usage: plan_test.py PATH_OF_HEADRACE
"""
import sys

sys.dont_write_bytecode = True
from case import Case, main  # noqa: E402


class Plan(Case):
    def test_memory(self):
        plan = self.json("plan", "simple_gla:bwd b2 t4096 h16 k128 bf16", "--json")
        by_name = {row["name"]: row for row in plan["tensors"]}
        self.assertEqual(by_name["q"], {"name": "q", "role": "input", "shape": [2, 4096, 16, 128], "dtype": "bf16",
                                        "bytes": 32 << 20})
        self.assertEqual(by_name["d_v"]["role"], "output")
        sizes = plan["bytes"]
        self.assertEqual(sum(row["bytes"] for row in plan["tensors"]), sizes["peak"])
        self.assertEqual(sizes["inputs"] + sizes["outputs"] + sizes["workspace"], sizes["peak"])
        self.assertEqual(sizes["training_step_peak"], max(sizes["peak"], sizes["forward_peak"]))
        forward = self.json("plan", "simple_gla:fwd b2 t4096 h16 k128 bf16", "--json")["bytes"]
        self.assertEqual((forward["peak"], forward["backward_peak"]), (sizes["forward_peak"], sizes["peak"]))
        self.assertIn("peak of a training step", self.headrace("plan", "simple_gla:fwd t1048576 h16 k128"))
        self.assertNotIn("training", self.headrace("plan", "gla:step b8 t1"))

    def test_ranks(self):
        problem = "gated_delta_rule:fwd t16384 h16 k128 ranks=4"
        self.assertNotIn("model", self.json("plan", problem, "--json"))
        model = self.json("plan", f"{problem} link=25", "--gflops", "100", "--json")["model"]
        summary, ring, heads = model["strategies"]
        self.assertEqual([summary["name"], ring["name"], heads["name"]], ["summary", "ring", "heads"])
        self.assertEqual((ring["message_bytes"], summary["message_bytes"]), (1 << 20, 2 << 20))
        self.assertEqual(heads["message_bytes"] * 3, (4 * 16 * 128 * 4 + 2 * 16 * 4) * 4096 * 3 / 4)
        self.assertTrue(0 < summary["efficiency"] < ring["efficiency"] < 1)
        self.assertGreater(ring["seconds"], ring["flop"] / 100e9)
        alone = self.json("plan", "gla:bwd ranks=1 link=1", "--json")["model"]["strategies"]
        self.assertEqual([s["efficiency"] for s in alone], [1, 1, 1])
        text = self.headrace("plan", "gla:fwd h6 t4096 ranks=4 link=25")
        self.assertIn("model, not measured: 4 ranks", text)
        self.assertIn("heads do not divide", text)

    def test_gpu(self):
        self.refused("cuda=h300: expected h200, h100 or a100", "plan", "kda:fwd cuda=h300")
        self.refused("--peers: expected cuda=NAME or nothing, got 'kda:fwd'", "plan", "--peers", "kda:fwd")
        self.refused("expected one problem, got 0", "plan")
        problem = "gated_delta_rule:fwd t8192 h16 hv64 k128 bf16 cuda"
        if "cuda.walk" not in self.json("list", "--json")["implementations"]:
            self.refused("none for CUDA tensors is compiled in", "plan", problem)
            self.refused("none for CUDA tensors is compiled in", "plan", "--peers")
            return
        plan = self.json("plan", problem + "=h200", "--json")["gpu"]
        self.assertEqual((plan["name"], plan["title"]), ("h200", "NVIDIA H200"))
        self.assertEqual(plan["useful_bytes"], 8192 * (2 * 16 * 256 + 64 * (2 * 256 + 8)))
        self.assertAlmostEqual(plan["bound_seconds"], 0.111e-3, delta=1e-6)
        self.assertAlmostEqual(plan["seconds"], sum(launch["seconds"] for launch in plan["launches"]))
        self.assertEqual([peer["name"] for peer in plan["peers"]], ["FlashInfer", "FlashQLA", "FLA"])
        walk = self.json("plan", problem, "force=cuda.walk", "--json")["gpu"]["launches"][0]
        self.assertEqual((walk["kernel"], walk["blocks"], walk["steps"]), ("walk_forward", 128, 256))
        self.assertGreaterEqual(walk["seconds"], max(walk["floors"].values()))
        recurrent = self.json("plan", problem, "force=cuda.recurrent", "--json")["gpu"]
        self.assertEqual(recurrent["implementation"], "cuda.recurrent")
        self.assertEqual([(launch["blocks"], launch["steps"]) for launch in recurrent["launches"]], [(64 * 4, 8192)])
        self.assertEqual(self.json("plan", problem + "=a100", "--json")["gpu"]["peers"], [])
        text = self.headrace("plan", problem)
        for words in ("NVIDIA H200", "a model, not measured", "share of the bound", "published: 0.397 FlashQLA"):
            self.assertIn(words, text)
        peers = self.json("plan", "--peers", "cuda=h200", "--json")
        self.assertTrue(all(row["seconds"] > row["bound_seconds"] for row in peers), peers)
        self.assertGreaterEqual(sum(bool(row["peers"]) for row in peers), 10)
        self.assertIn("0.814 FLA", self.headrace("plan", "--peers"))


if __name__ == "__main__":
    main()
