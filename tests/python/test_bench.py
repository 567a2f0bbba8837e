"""headrace.bench: every contender computes the same, and the table, the file and the picture are written."""

import json

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
    expected = {name: x.grad.clone() for name, x in steps["headrace"]().items()}
    for contender, step in steps.items():
        actual = step()
        for name, gradient in expected.items():
            values = torch.from_numpy(np.array(actual[name])) if contender == "jax.lax.scan" else actual[name].grad
            torch.testing.assert_close(values, gradient, rtol=1e-3, atol=1e-4, msg=lambda m: f"{contender}, {name}: {m}")


def test_what_is_written(tmp_path, capsys):
    files = [tmp_path / "times.json", tmp_path / "times.png"]
    bench.main(["--operator", "gla", "kda", "--tokens", "64", "--heads", "1", "--dim", "16", "--seconds", "0.01",
                "--json", str(files[0]), "--plot", str(files[1])])
    printed = capsys.readouterr().out
    assert "forward + backward, B 1, T 64, H 1, D 16" in printed and printed.count("headrace") == 4
    assert set(json.loads(files[0].read_text())["seconds"]) == {"gla", "kda"}
    assert files[1].read_bytes().startswith(b"\x89PNG")
