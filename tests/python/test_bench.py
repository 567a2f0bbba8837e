"""headrace.bench: every contender computes the same, and the table, the file and the picture are written."""

import json
import re

import numpy as np
import pytest
import torch

from headrace import bench


@pytest.mark.parametrize("operator", bench.OPERATORS)
def test_contenders_agree(operator):
    tensors = bench.inputs(operator, 128, 2, 16)
    steps = bench.contenders(operator, tensors)
    assert {"headrace", "fla-core, plain PyTorch"} <= set(steps)
    if operator in ("gated_delta_rule", "kda"):
        assert "transformers, chunked PyTorch" in steps
    expected = steps["headrace"]().gradients
    for contender, step in steps.items():
        forward, both, actual = step()
        assert 0 < forward < both or contender == "jax.lax.scan"  # whose gradient is a call of its own
        for name, gradient in expected.items():
            values = torch.tensor(np.asarray(actual[name]))
            torch.testing.assert_close(values, gradient, rtol=1e-3, atol=1e-4,
                                       msg=lambda message: f"{contender}, {name}: {message}")


def test_what_is_written(tmp_path, capsys):
    files = [tmp_path / "times.json", tmp_path / "times.png"]
    bench.main(["--operator", "gla", "kda", "--tokens", "64", "--heads", "1", "--dim", "16", "--seconds", "0.01",
                "--memory", "fresh", "--json", str(files[0]), "--plot", str(files[1])])
    printed = capsys.readouterr().out
    assert "B 1, T 64, H 1, D 16, float32" in printed and "memory fresh in every call" in printed
    assert printed.count("\n  headrace ") == 2 and printed.count(" x as fast") >= 3
    assert "left out" not in printed
    seconds = json.loads(files[0].read_text())["forward, forward + backward seconds"]
    assert set(seconds) == {"gla", "kda"} and len(seconds["kda"]["headrace"]) >= 3
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_slow_contenders_are_left_out_by_name(capsys):
    times = bench.main(["--operator", "gla", "--tokens", "256", "--heads", "1", "--dim", "16", "--seconds", "0.01",
                        "--limit", "0", "--memory", "fresh"])
    assert list(times["gla"]) == ["headrace"]
    assert "fla-core, plain PyTorch       left out: about" in capsys.readouterr().out


def test_contenders_that_need_too_much_memory_are_left_out():
    def step():
        torch.ones(2**24)  # 64 MiB
        return bench.Step(0.0, 0.0, {})

    assert bench.too_much(step, 1, 1.0) is None
    assert re.fullmatch(r"about \d+ GiB of memory; \d+ GiB are available", bench.too_much(step, 1e5, 1.0))
    with open("/proc/meminfo") as lines:
        available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 1024
    assert bench.too_much(step, 0.4 * available / 64, 1.0) is None
    assert bench.too_much(step, 1.6 * available / 64, 1.0) is not None


def test_memory_in_use_can_be_read():
    with open("/proc/meminfo") as lines:
        total = next(int(line.split()[1]) for line in lines if line.startswith("MemTotal"))
    assert 0 < bench._mebibytes("/proc/self/status", "VmRSS") < total / 1024
    assert np.isnan(bench._mebibytes("/proc/no such file", "VmRSS"))
