"""A training step of one operator beside what else runs on this machine, and what a call costs beside its work.

Peers: the chunked PyTorch functions inside transformers, the plain functions of fla-core, a recurrence by
jax.lax.scan. A first call of each is not counted; then rounds in which every contender runs once. A short trial tells
which contenders would take too long or too much memory: they are named and left out.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

from headrace._measuring import in_turns, progress, seconds_of
from headrace._versions import require

require("headrace.bench", "torch")

import torch  # noqa: E402

import headrace.torch as ht  # noqa: E402

OPERATORS = ("simple_gla", "gla", "gated_delta_rule", "comba", "kda")
EMPTY = "empty autograd.Function"


class Step(NamedTuple):
    """A training step: seconds of the forward, of forward + backward, and the gradients of sum(o) by name."""

    forward: float
    both: float
    gradients: Dict[str, Any]


Steps = Dict[str, Callable[[], Step]]  # by the names of contenders, like
Times = Dict[str, List[Step]]


class Calls(NamedTuple):
    """Seconds of each of many small calls: without autograd, with it, and with the backward too."""

    forward: List[float]
    recorded: List[float]
    both: List[float]


def plain_module(operator):
    """fla-core's module of plain functions, by its file: the package around it wants a GPU. None without it."""
    package = importlib.util.find_spec("fla")
    if package is None or not package.submodule_search_locations:
        return None
    path = Path(package.submodule_search_locations[0]) / "ops" / operator / "naive.py"
    spec = importlib.util.spec_from_file_location(f"plain_{operator}", path)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def inputs(operator: str, T: int, H: int, D: int, seed: int = 0, B: int = 1) -> Dict[str, torch.Tensor]:
    """float32 tensors by name, q, k, v [B, T, H, D]."""
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, T, H, D, generator=draw) for _ in range(3))
    tensors = {"q": q, "k": torch.nn.functional.normalize(k, dim=-1), "v": v}
    channels = (D,) if operator in ("gla", "kda") else ()
    tensors["g"] = torch.nn.functional.logsigmoid(torch.randn(B, T, H, *channels, generator=draw) + 3)
    if operator in ("gated_delta_rule", "comba", "kda"):
        tensors["beta"] = torch.sigmoid(torch.randn(B, T, H, generator=draw))
    if operator == "comba":
        tensors["p"] = tensors["k"] * torch.sigmoid(torch.randn(H, 1, generator=draw))  # as its layer makes it
    return tensors


def ours(operator):
    return getattr(ht, f"chunk_{operator}")


def of_transformers(operator):
    """The function that transformers falls back to, unwrapped, or None."""
    places = {"gated_delta_rule": ("qwen3_next", "torch_chunk_gated_delta_rule"),
              "kda": ("kimi_linear", "chunk_kimi_delta_attention")}
    if operator not in places or importlib.util.find_spec("transformers") is None:
        return None
    model, name = places[operator]
    try:
        function = getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)
    except (ImportError, AttributeError):
        return None
    return getattr(function, "__wrapped__", function)


def of_fla(operator):
    module = plain_module(operator)
    if module is None:
        return None
    if operator == "gla":
        return lambda q, k, v, g: module.naive_recurrent_gla(q, k, v, g)  # its gate is called gk
    return getattr(module, f"naive_chunk_{operator}")


def of_jax(operator, tensors):
    """A compiled token-by-token recurrence and its gradient, which keeps one state in 64; None without JAX."""
    if importlib.util.find_spec("jax") is None:
        return None
    import jax
    import jax.numpy as jnp

    delta, channel = "beta" in tensors, operator in ("gla", "kda")

    def token(S, x):
        decayed = S * (jnp.exp(x["g"])[..., None] if channel else jnp.exp(x["g"])[..., None, None])
        asked, e = (S, x["p"]) if "p" in x else (decayed, x["k"])
        write = (x["v"] - jnp.einsum("hkv,hk->hv", asked, e)) * x["beta"][..., None] if delta else x["v"]
        S = decayed + x["k"][..., None] * write[..., None, :]
        return S, jnp.einsum("hkv,hk->hv", S, x["q"])

    @jax.checkpoint
    def span(S, tokens):
        return jax.lax.scan(token, S, tokens)

    def attention(values):
        _, T, H, D = values["q"].shape
        spans = jax.tree.map(lambda x: x[0].reshape(-1, math.gcd(T, 64), *x.shape[2:]), values)
        return jax.lax.scan(span, jnp.zeros((H, D, D)), spans)[1] * D**-0.5

    values = {name: jnp.asarray(x.numpy()) for name, x in tensors.items()}
    forward, gradient = jax.jit(attention), jax.jit(jax.grad(lambda values: attention(values).sum()))

    def step():
        start = time.perf_counter()
        jax.block_until_ready(forward(values))
        middle = time.perf_counter()
        gradients = jax.block_until_ready(gradient(values))
        return Step(middle - start, time.perf_counter() - middle, gradients)

    return step


def of_torch(function, tensors):
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}

    def step():
        for x in leaves.values():
            x.grad = None
        start = time.perf_counter()
        result = function(leaves["q"], leaves["k"], leaves["v"], **{n: x for n, x in leaves.items() if n not in "qkv"})
        middle = time.perf_counter()
        result[0].sum().backward()
        return Step(middle - start, time.perf_counter() - start, {name: x.grad for name, x in leaves.items()})

    return step


def contenders(operator: str, tensors: Dict[str, torch.Tensor]) -> Steps:
    """What can be timed: name -> a training step."""
    found = {"headrace": of_torch(ours(operator), tensors)}
    peers = {"transformers, chunked PyTorch": of_transformers(operator), "fla-core, plain PyTorch": of_fla(operator)}
    found |= {name: of_torch(function, tensors) for name, function in peers.items() if function is not None}
    scan = of_jax(operator, tensors)
    if scan is not None:
        found["jax.lax.scan"] = scan
    return found


def _mebibytes(file: str, key: str) -> float:
    """A line of /proc in MiB; NaN, which compares as false, where there is none."""
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return math.nan
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(key)), math.nan)


def too_much(step: Callable[[], Step], times_longer: float, limit: float) -> Optional[str]:
    """What speaks against a call that is `times_longer` than `step`: its time or its memory."""
    step()  # compiles
    before = _mebibytes("/proc/self/status", "VmRSS")
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    except OSError:
        pass
    seconds = step().both * times_longer
    needed = (_mebibytes("/proc/self/status", "VmHWM") - before) * times_longer
    available = _mebibytes("/proc/meminfo", "MemAvailable")
    if seconds > limit:
        return f"about {seconds:.0f} s a call; --limit is {limit:g} s"
    if needed > 0.8 * available:
        return f"about {needed / 1024:.0f} GiB of memory; {available / 1024:.0f} GiB are available"
    return None


def without_gradients(step: Callable[[], Step]) -> Step:
    return step()._replace(gradients={})


def table(operator: str, times: Times) -> List[str]:
    """Lines of text: milliseconds, and how many times as fast headrace is."""
    best = min(step.both for step in times["headrace"])
    lines = [f"{operator:32}{'forward ms':>12}{'forward + backward ms':>24}{'rounds':>9}{'headrace is':>18}",
             f"{'':32}{'least':>12}{'least':>13}{'median':>11}"]
    for name, steps in times.items():
        both = [step.both for step in steps]
        factor = "" if name == "headrace" else f"{min(both) / best:.1f} x as fast"
        lines.append(f"  {name:30}{min(s.forward for s in steps) * 1e3:12.1f}{min(both) * 1e3:13.1f}"
                     f"{statistics.median(both) * 1e3:11.1f}{len(steps):9}{factor:>18}")
    return lines


class Nothing(torch.autograd.Function):
    """PyTorch's own share of a differentiable call: outputs and gradients are allocated, nothing is computed."""

    @staticmethod
    def forward(ctx, *tensors):
        ctx.save_for_backward(*tensors)
        return torch.empty_like(tensors[0])

    @staticmethod
    def backward(ctx, d_o):
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors)


def small_calls(function: Callable[..., torch.Tensor], tensors: Dict[str, torch.Tensor], count: int = 300) -> Calls:
    """Times `count` calls of each kind of a function of tensors by name, with an output [1, T, H, D]."""
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    wanted, d_o = list(leaves.values()), torch.ones_like(tensors["v"])

    def both():
        torch.autograd.grad(function(**leaves), wanted, d_o)

    return Calls(*([seconds_of(call) for _ in range(count)]
                   for call in (lambda: function(**tensors), lambda: function(**leaves), both)))


def output_of(operator: str) -> Callable[..., torch.Tensor]:
    function = ours(operator)
    return lambda **tensors: function(**tensors)[0]


def overhead(operators: Sequence[str]) -> Dict[str, Calls]:
    """What a call costs beside its work: one token of one head, where the work is next to nothing."""
    calls = {operator: partial(small_calls, output_of(operator), inputs(operator, 1, 1, 16)) for operator in operators}
    calls[EMPTY] = partial(small_calls, lambda **x: Nothing.apply(*x.values()), inputs("gated_delta_rule", 1, 1, 16))
    return {name: Calls(*(sum(parts, []) for parts in zip(*rounds))) for name, rounds in in_turns(calls).items()}


def overhead_table(times: Dict[str, Calls]) -> List[str]:
    """Lines of text: microseconds of every kind of call."""
    lines = ["a call on one token of one head, D 16, microseconds: least and median",
             f"{'':28}{'forward':>18}{'with autograd':>18}{'and backward':>18}"]
    return lines + [f"  {name:26}" + "".join(f"{min(seconds) * 1e6:10.1f}{statistics.median(seconds) * 1e6:8.1f}"
                                             for seconds in calls) for name, calls in times.items()]


def left_out(operator: str, a: argparse.Namespace) -> Dict[str, str]:
    """The contenders that a trial of a sixteenth of the tokens speaks against, and why."""
    short = max(a.tokens // 16, min(a.tokens, 64))
    reasons = {}
    for name, step in contenders(operator, inputs(operator, short, a.heads, a.dim)).items():
        progress(f"{operator}: trial of {name}, {short} tokens")
        reason = too_much(step, a.tokens / short, a.limit)
        if reason is not None and name != "headrace":
            reasons[name] = reason
    return reasons


def train(operator: str, reasons: Dict[str, str], a: argparse.Namespace) -> Times:
    """Prints the table of one operator."""
    steps = contenders(operator, inputs(operator, a.tokens, a.heads, a.dim))
    calls: Steps = {name: partial(without_gradients, step) for name, step in steps.items() if name not in reasons}
    times = in_turns(calls, a.seconds, a.rounds)
    lines = table(operator, times) + [f"  {name:30}left out: {reason}" for name, reason in reasons.items()]
    print("\n".join(lines), flush=True)
    return times
