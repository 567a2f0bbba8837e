"""Problems of the Python tests: the inputs of each operator, by name."""

import os
import re
from pathlib import Path

import pytest
import torch

# The bf16 dot product is tested also where fp32 is faster.
os.environ.setdefault("HEADRACE_MAX_ISA", "avx512_bf16")

# operator: (gates, needs beta, needs p)
OPERATORS = {
    "linear_attention": ([], False, False),
    "retention": (["g_gamma"], False, False),
    "simple_gla": (["g", "g_gamma"], False, False),
    "gla": (["g"], False, False),
    "delta_rule": ([], True, False),
    "gated_delta_rule": (["g"], True, False),
    "comba": (["g"], True, True),
    "kda": (["g"], True, False),
}


def pytest_configure(config):
    config.addinivalue_line("markers", "alone: measures times, so nothing else should run beside it")


@pytest.fixture(autouse=True)
def seed():
    """What a test draws does not depend on the tests before it."""
    torch.manual_seed(0)


def make_problem(op, B=2, T=37, H=2, HV=None, K=16, V=24, dtype=torch.float64, cu_seqlens=None, state=False, seed=0):
    """The tensors that `op` takes, float64 values that `dtype` represents exactly."""
    HV = HV or H
    draw = torch.Generator().manual_seed(seed)

    def normal(*sizes):
        return torch.randn(*sizes, generator=draw, dtype=torch.float64)

    gates, beta, erase = OPERATORS[op]
    unit = torch.nn.functional.normalize
    tensors = {"q": normal(B, T, H, K), "k": unit(normal(B, T, H, K), dim=-1), "v": normal(B, T, HV, V)}
    if erase:
        tensors["p"] = unit(normal(B, T, H, K), dim=-1)
    channel = (K,) if op in ("gla", "kda") else ()
    if "g" in gates:
        tensors["g"] = torch.nn.functional.logsigmoid(normal(B, T, HV, *channel) + 2)
    if "g_gamma" in gates:
        tensors["g_gamma"] = -torch.rand(HV, generator=draw, dtype=torch.float64) / 2
    if beta:
        tensors["beta"] = torch.sigmoid(normal(B, T, HV))
    if state:
        N = B if cu_seqlens is None else len(cu_seqlens) - 1
        tensors["initial_state"] = normal(N, HV, K, V)
    # q, k, v and p in the type under test, gates and states in float32 (float64: all in float64)
    rest = torch.float64 if dtype == torch.float64 else torch.float32
    tensors = {name: x.to(dtype if name in "qkvp" else rest) for name, x in tensors.items()}
    if cu_seqlens is not None:
        tensors["cu_seqlens"] = torch.tensor(cu_seqlens)
    return tensors


@pytest.fixture
def problem():
    return make_problem


def has_dot_products():
    return "avx512_bf16" in Path("/proc/cpuinfo").read_text()


@pytest.fixture
def chunks_served(capfd, monkeypatch):
    """chunks_served(dtype) -> whether chunk forms served all calls since the last, in bf16 with its dot products."""
    monkeypatch.setenv("HEADRACE_VERBOSE", "1")
    capfd.readouterr()

    def check(dtype):
        names = set(re.findall(r": served by (\S+)", capfd.readouterr().err))
        form = r"avx512_bf16\.chunk" if dtype == torch.bfloat16 and has_dot_products() else r"\w+\.chunk"
        return names != set() and all(re.match(form, name) for name in names)

    return check


# The bars of docs/numerics.md: outputs and states; gradients of q, k, v, p and states; gradients of gates.
BARS = {
    torch.float64: (1e-11, 1e-11, 1e-11),
    torch.float32: (3e-6, 1e-5, 1e-5),
    torch.bfloat16: (4e-3, 6e-3, 1.5e-2),
    torch.float16: (2e-3, 3e-3, 7.5e-3),
}


def bar(name, dtype):
    """The bar of a result by its name."""
    if name in ("o", "final_state", "y"):
        return BARS[dtype][0]
    return BARS[dtype][1 if name[2:] in ("q", "k", "v", "p", "x", "initial_state") else 2]


def expect_within_bars(errors, dtype, *what):
    """errors: by the names of results."""
    for name, error in errors.items():
        assert error < bar(name, dtype), (*what, name, error)


def relative_error(actual, expected):
    expected = expected.double()
    return ((actual.double() - expected).norm() / expected.norm().clamp_min(1e-300)).item()
