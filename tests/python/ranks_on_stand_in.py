"""headrace.torch.distributed on tensors in CUDA devices' memory, ranks as processes: the numbers of one on the CPU.

As torch_on_stand_in.py, for a _core that is built in the preset ptx; each process has an interpreter of its own.
"""

import device_jobs
import pytest
import ranks
import torch
from conftest import expect_within_bars

STRATEGIES = ["summary", "ring", "heads"]
CUTS = [[(0, 70)], [(70, 75), (75, 130)], [(130, 200)]]


@pytest.fixture(scope="module")
def three():
    group = ranks.Group(3, alone=True)
    yield group
    group.close()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("op", ["gated_delta_rule", "kda", "gla", "retention"])
def test_ranks_of_devices(three, op, strategy):
    """Each rank with tokens of its own on a device, forward and backward, beside one process on the CPU."""
    sizes, options = (3, 3, 64, 32), {"strategy": strategy, "token_ranges": CUTS}
    for errors in three.run(device_jobs.compare, op, [120, 80], sizes, torch.bfloat16, options):
        expect_within_bars(errors, torch.bfloat16)


def test_ranks_of_devices_in_double(three):
    for exchange in ("all_gather", "doubling"):
        options = {"strategy": "summary", "exchange": exchange}
        for errors in three.run(device_jobs.compare, "kda", [150], (1, 2, 16, 20), torch.float64, options):
            expect_within_bars(errors, torch.float64)


def test_convolution_of_ranks_of_devices(three):
    for errors in three.run(device_jobs.convolution, [10, 0, 60, 20], 24, 4):
        expect_within_bars(errors, torch.float32)


def test_tensors_of_all_ranks_of_devices(three):
    three.run(device_jobs.shards, [10, 0, 60, 20])
