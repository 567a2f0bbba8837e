"""`python -m headrace.torch.distributed` measures every strategy and prints its table."""

import subprocess
import sys

import pytest
from conftest import has_dot_products


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "headrace.torch.distributed", *arguments], capture_output=True,
                          text=True, timeout=120)


@pytest.mark.parametrize("heads", [8, 9])
def test_the_table_has_every_strategy(heads):
    answer = run("--tokens", "256", "--heads", str(heads), "--head-dim", "64", "--ranks", "2", "--repeats",
                 "1", "--link", "10", "100")
    assert answer.returncode == 0, answer.stderr
    lines = answer.stdout.splitlines()
    named = ("one process", "summary", "ring", "heads")
    rows = {line.split("  ")[0]: line.split() for line in lines if line.startswith(named)}
    assert set(rows) == set(named)
    assert "model" in answer.stdout and "100 Gbit/s" in answer.stdout
    for strategy in ("summary", "ring"):
        seconds, share, sent, *modelled = map(float, rows[strategy][1:])
        assert seconds > 0 and share > 0 and sent > 0 and len(modelled) == 2
    # The busiest rank sends one state, in f32; in a ring with its roundings, and in f64 where fp32 kernels leave so few
    # tokens to the recurrent form.
    state = heads * 64 * 64 * 4
    assert abs(float(rows["summary"][3]) * 2**20 - state) < 2**13
    in_ring = state if has_dot_products() else 2 * state
    assert abs(float(rows["ring"][3]) * 2**20 - (in_ring + heads * 80 * 4)) < 2**13
    assert (rows["heads"][1] == "needs") == (heads == 9)


def test_wrong_arguments():
    answer = run("--ranks", "0")
    assert answer.returncode == 2 and "expected a positive number, got 0" in answer.stderr
