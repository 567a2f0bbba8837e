"""Forked children compute the bits of a parent that used threads: os.fork, Pool and DataLoader.

A hung one is killed with its group.
"""

import os
import signal
import subprocess
import sys

import pytest

# What both processes compute, from tensors made before the fork: forward and backward through PyTorch, step and layers,
# and through NumPy. As bytes: PyTorch's own functions may wait for lost threads in the child.
COMMON = """
import multiprocessing, os, sys
import numpy, torch
import headrace.numpy as hn
import headrace.torch as ht

torch.manual_seed(0)
q, v = torch.randn(2, 2, 200, 4, 32)
k = torch.nn.functional.normalize(q, dim=-1)
g, beta = -torch.rand(2, 200, 4), torch.rand(2, 200, 4)
x, weight = torch.randn(2, 512, 128), torch.randn(128, 4)
arrays = [t.numpy() for t in (q, k, v, g, beta)]

def bits():
    inputs = [t.detach().requires_grad_() for t in (q, k, v, g, beta)]
    o, state = ht.chunk_gated_delta_rule(*inputs, output_final_state=True)
    results = [o, state, *torch.autograd.grad(o, inputs, v)]
    token, pool = [t[:, :1] for t in (q, k, v)], torch.ones(2, 4, 32, 32)
    results.append(ht.fused_recurrent_gated_delta_rule(*token, g=g[:, :1], beta=beta[:, :1], initial_state=pool,
                                                       ssm_state_indices=torch.tensor([1, 0]))[0])
    results.append(pool)  # a step in place
    results += [ht.short_convolution(x, weight)[0], ht.rms_norm_gated(x, x)]
    results = [t.detach().numpy() for t in results]
    results.append(hn.forward("gated_delta_rule", *arrays[:3], g=arrays[3], beta=arrays[4])[0])
    return [r.tobytes() for r in results]

def torch_threads():
    "PyTorch's OpenMP, which may be the one that headrace uses, has threads now."
    torch.set_num_threads(3)
    torch.randn(1 << 20).exp().sum()

def headrace_threads():
    bits()

def has_threads():
    return len(os.listdir("/proc/self/task")) > 1

def task(i):
    return bits()
"""

OS_FORK = """
expected = bits()
for _ in range(2):
    child = os.fork()
    if child == 0:
        os._exit(0 if bits() == expected else 1)
    assert os.waitpid(child, 0)[1] == 0
assert bits() == expected
"""

POOL = """
expected = None if sys.argv[1] == "torch_threads" else bits()
with multiprocessing.get_context("fork").Pool(2) as pool:
    results = pool.map(task, range(4))
expected = expected or bits()
assert all(result == expected for result in results)
"""

DATA_LOADER = """
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return bits()

def more_threads(worker):
    torch.set_num_threads(3)  # a loader sets its workers to one

loader = torch.utils.data.DataLoader(Data(), num_workers=2, batch_size=None, multiprocessing_context="fork",
                                     worker_init_fn=more_threads)
results = [result for _ in range(2) for result in loader]
assert len(results) == 8 and all(result == bits() for result in results)
"""


@pytest.mark.parametrize("used", ["headrace_threads", "torch_threads"])
@pytest.mark.parametrize("fork", [OS_FORK, POOL, DATA_LOADER], ids=["os_fork", "pool", "data_loader"])
def test_a_child_computes_the_bits_of_its_parent(fork, used):
    script = COMMON + f"{used}()\nassert has_threads()\n" + fork + "print('done')\n"
    # Several threads on any machine; what may be slow is the import on a busy one
    environment = {**os.environ, "OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "passive"}
    process = subprocess.Popen([sys.executable, "-c", script, used], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               text=True, env=environment, start_new_session=True)
    try:
        printed, _ = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        pytest.fail("the child hung")
    assert process.returncode == 0 and printed == "done\n", printed
