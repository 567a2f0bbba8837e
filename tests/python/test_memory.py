"""The memory of a training step through PyTorch is what the library's plan says: no hidden copies."""

import subprocess
import sys

STEP = """
import sys, torch
from headrace import _core
from headrace.torch import chunk_gated_delta_rule
from headrace._arguments import options

def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) / 1024

def step(T):
    q, k, v = (torch.randn(1, T, 8, 128, requires_grad=True) for _ in range(3))
    g, beta = (-torch.rand(1, T, 8)).requires_grad_(), torch.rand(1, T, 8, requires_grad=True)
    d_o = torch.randn(1, T, 8, 128)
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
    before = status("VmRSS")
    o, _ = chunk_gated_delta_rule(q, k, v, g, beta)
    o.backward(d_o)
    peak = status("VmHWM") - before
    inputs = [q, k, v, None, g, None, None, beta, None, None, None, None]
    gradients = [None if x is None else x.grad for x in inputs[:-1]]
    plan = _core.plan("backward", "gated_delta_rule", [x if x is None else x.detach() for x in inputs], [d_o, None],
                      gradients, options(None, False, False, "log_decay", -5.0, "value", 0))
    made = sum(e[4] for e in plan if e[1] in ("output", "workspace")) / 2**20 + o.numel() * 4 / 2**20
    return peak, made

step(64)  # pools of threads, allocator
peak, made = step(4096)
print(peak, made)
"""


def test_a_training_step_takes_what_the_plan_says():
    printed = subprocess.run([sys.executable, "-c", STEP], check=True, capture_output=True, text=True).stdout.split()
    peak, planned = float(printed[0]), float(printed[1])
    assert planned > 60  # outputs and gradients of 16 MiB each
    # a few MiB for pages that threads and allocators touch; one hidden copy of a tensor would add 16
    assert 0.7 * planned < peak < planned + 8, (peak, planned)
