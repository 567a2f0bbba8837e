"""Steps beside a busy neighbour, in a process that has used PyTorch, and headrace.latency, which measures them."""

import argparse
import statistics

import pytest

from headrace import latency


def test_what_is_printed(capsys, tmp_path):
    results = latency.main(["--processes", "1", "--steps", "60", "--heads", "2", "--dim", "16",
                            "--json", str(tmp_path / "times.json")])
    printed = capsys.readouterr().out
    assert list(results) == list(latency.NEIGHBOURS) and all(name in printed for name in results)
    for (process,) in results.values():
        assert len(process.default) == len(process.one) == 50 and len(process.training) == 15
        assert all(time > 0 for times in process for time in times)
    assert (tmp_path / "times.json").stat().st_size > 1000


@pytest.mark.parametrize("argument", ["--processes", "--steps", "--heads", "--dim"])
def test_bad_numbers(argument, capsys):
    with pytest.raises(SystemExit):
        latency.main([argument, "0"])
    assert f"{argument}: expected a positive number, got 0" in capsys.readouterr().err


@pytest.mark.alone
def test_a_busy_neighbour_does_not_hold_up_a_step():
    """A team that waits for its threads takes 8 to 16 ms in one of ten steps."""
    options = argparse.Namespace(processes=1, steps=500, heads=16, dim=128)
    measured = []
    for _ in range(5):
        (process,) = latency.beside(1, 19, options)
        measured.append(latency.percentile(process.default, 0.9))
        if measured[-1] < 1e-3:
            return
    pytest.fail(f"90th percentiles of {measured} s, median {statistics.median(process.default)} s")
