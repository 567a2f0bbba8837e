"""The memory of a training step through PyTorch is what the library's plan says: no hidden copies."""

import subprocess
import sys

import pytest

STEP = """
import sys, torch
from headrace import _core
from headrace import torch as ht
from headrace._arguments import options

def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) / 1024

op, layout = sys.argv[1:]

def normal(T):
    if layout == "transposed":
        return torch.randn(1, 8, T, 128).transpose(1, 2)
    return torch.randn(1, T, 8, 128)

def step(T):
    q, k, v = (normal(T).requires_grad_() for _ in range(3))
    g, beta = (-torch.rand(1, T, 8)).requires_grad_(), None
    if op == "gated_delta_rule":
        beta = torch.rand(1, T, 8, requires_grad=True)
    d_o = normal(T)
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
    before = status("VmRSS")
    o, _ = getattr(ht, f"chunk_{op}")(q, k, v, g, *([] if beta is None else [beta]))
    o.backward(d_o)
    peak = status("VmHWM") - before
    inputs = [q, k, v, None, g, None, None, beta, None, None, None, None]
    gradients = [None if x is None else x.grad for x in inputs[:-1]]
    plan = _core.plan("backward", op, [x if x is None else x.detach() for x in inputs], [d_o, None],
                      gradients, options(None, False, False, "log_decay", -5.0, "value", 0))
    made = sum(e[4] for e in plan if e[1] in ("output", "workspace")) / 2**20 + o.numel() * 4 / 2**20
    return peak, made

step(64)  # pools of threads, allocator
peak, made = step(4096)
print(peak, made)
"""


@pytest.mark.parametrize("op, layout", [("gated_delta_rule", "contiguous"), ("gated_delta_rule", "transposed"),
                                        ("simple_gla", "transposed")])
def test_a_training_step_takes_what_the_plan_says(op, layout):
    printed = subprocess.run([sys.executable, "-c", STEP, op, layout], check=True, capture_output=True, text=True)
    peak, planned = map(float, printed.stdout.split())
    assert planned > 60  # outputs and gradients of 16 MiB each
    # 4 MiB for what no plan names: stacks of threads, objects of Python, whole pages; a copy of one tensor would add 16
    assert 0.7 * planned < peak < planned + 4, (peak, planned)
