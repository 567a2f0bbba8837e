"""`python -m headrace.bench`: forward and backward of one operator beside what else runs on this machine, interleaved.

Peers are taken where they are installed: the chunked PyTorch functions inside transformers, the plain functions of
fla-core, and a recurrence by jax.lax.scan. The least and the median time of each are printed as a table; --plot draws
them, --json keeps them. Peers that take long are called once.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import statistics
import time
from pathlib import Path

import torch

import headrace.torch as ht

OPERATORS = ("simple_gla", "gla", "gated_delta_rule", "kda")


def plain_module(operator):
    """fla-core's module of plain functions, by its file: the package around it wants a GPU at import. None without it."""
    spec = importlib.util.find_spec("fla")
    if spec is None:
        return None
    path = Path(spec.submodule_search_locations[0]) / "ops" / operator / "naive.py"
    spec = importlib.util.spec_from_file_location(f"plain_{operator}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def inputs(operator, T, H, D, seed=0):
    """float32 tensors by name, q, k, v [1, T, H, D]."""
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, T, H, D, generator=draw) for _ in range(3))
    tensors = {"q": q, "k": torch.nn.functional.normalize(k, dim=-1), "v": v}
    channels = (D,) if operator in ("gla", "kda") else ()
    tensors["g"] = torch.nn.functional.logsigmoid(torch.randn(1, T, H, *channels, generator=draw) + 3)
    if operator in ("gated_delta_rule", "kda"):
        tensors["beta"] = torch.sigmoid(torch.randn(1, T, H, generator=draw))
    return tensors


def ours(operator):
    return getattr(ht, f"chunk_{operator}")


def of_transformers(operator):
    """The function that transformers falls back to, unwrapped, or None."""
    places = {"gated_delta_rule": ("qwen3_next", "torch_chunk_gated_delta_rule"), "kda": ("kimi_linear", "chunk_kimi_delta_attention")}
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
    """A compiled token-by-token recurrence with its gradient: a function without arguments, or None."""
    if importlib.util.find_spec("jax") is None:
        return None
    import jax
    import jax.numpy as jnp

    delta, channel = "beta" in tensors, operator in ("gla", "kda")

    def attention(values):
        def token(S, x):
            S = S * jnp.exp(x["g"])[..., None] if channel else S * jnp.exp(x["g"])[..., None, None]
            write = (x["v"] - jnp.einsum("hkv,hk->hv", S, x["k"])) * x["beta"][..., None] if delta else x["v"]
            S = S + x["k"][..., None] * write[..., None, :]
            return S, jnp.einsum("hkv,hk->hv", S, x["q"])

        _, T, H, D = values["q"].shape
        _, o = jax.lax.scan(token, jnp.zeros((H, D, D)), jax.tree.map(lambda x: x[0], values))
        return (o * D**-0.5).sum()

    values = {name: jnp.asarray(x.numpy()) for name, x in tensors.items()}
    gradient = jax.jit(jax.grad(attention))
    return lambda: jax.block_until_ready(gradient(values))


def training_step(function, tensors):
    """o and the gradient of every input of sum(o)."""
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}

    def step():
        for x in leaves.values():
            x.grad = None
        result = function(leaves["q"], leaves["k"], leaves["v"], **{n: x for n, x in leaves.items() if n not in "qkv"})
        result[0].sum().backward()
        return leaves

    return step


def contenders(operator, tensors):
    """What can be timed: name -> a training step without arguments."""
    found = {"headrace": training_step(ours(operator), tensors)}
    for name, function in (("transformers, chunked PyTorch", of_transformers(operator)), ("fla-core, plain PyTorch", of_fla(operator))):
        if function is not None:
            found[name] = training_step(function, tensors)
    scan = of_jax(operator, tensors)
    if scan is not None:
        found["jax.lax.scan"] = scan
    return found


def measure(steps, seconds, slow=5.0):
    """Rounds in which every contender runs once; name -> times. A contender slower than `slow` seconds runs once in all."""
    times = {}
    for name, step in steps.items():  # the first call compiles and warms up
        start = time.perf_counter()
        step()
        first = time.perf_counter() - start
        times[name] = [first] if first > slow else []
    left = [name for name, taken in times.items() if not taken]
    begin = time.perf_counter()
    while left and (time.perf_counter() - begin < seconds * len(left) or min(len(times[n]) for n in left) < 3):
        for name in left:
            start = time.perf_counter()
            steps[name]()
            times[name].append(time.perf_counter() - start)
    return times


def table(operator, times):
    """Lines of text: milliseconds and how many times longer than headrace."""
    best = min(times["headrace"])
    lines = [f"{operator:32}{'ms min':>10}{'ms median':>11}{'calls':>7}{'/ headrace':>12}"]
    for name, taken in times.items():
        least, median = min(taken) * 1e3, statistics.median(taken) * 1e3
        lines.append(f"  {name:30}{least:10.1f}{median:11.1f}{len(taken):7}{least / best / 1e3:12.1f}")
    return lines


def plot(path, results, title):
    """Bars of the least times, logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    figure, axes = pyplot.subplots(1, len(results), figsize=(4 * len(results), 3.5), sharey=True, squeeze=False)
    for axis, (operator, times) in zip(axes[0], results.items()):
        names = list(times)
        axis.bar(range(len(names)), [min(times[n]) * 1e3 for n in names], color=["#c0392b"] + ["#7f8c8d"] * (len(names) - 1))
        axis.set_xticks(range(len(names)), [n.replace(", ", "\n") for n in names], fontsize=7)
        axis.set_yscale("log")
        axis.set_title(operator)
    axes[0][0].set_ylabel("milliseconds, forward + backward")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m headrace.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--operator", nargs="+", choices=OPERATORS, default=list(OPERATORS), help="operators, all of them by default")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dim", type=int, default=128, help="key and value channels of a head")
    parser.add_argument("--seconds", type=float, default=2.0, help="per contender at least")
    parser.add_argument("--slow", type=float, default=5.0, help="contenders slower than this many seconds run once")
    parser.add_argument("--json", help="write all times to this file")
    parser.add_argument("--plot", help="draw the least times into this PNG file")
    a = parser.parse_args(arguments)
    title = f"B 1, T {a.tokens}, H {a.heads}, D {a.dim}, float32, {torch.get_num_threads()} threads"
    print(f"forward + backward, {title}")
    results = {}
    for operator in a.operator:
        tensors = inputs(operator, a.tokens, a.heads, a.dim)
        results[operator] = measure(contenders(operator, tensors), a.seconds, a.slow)
        print("\n".join(table(operator, results[operator])), flush=True)
    if a.json:
        Path(a.json).write_text(json.dumps({"title": title, "seconds": results}, indent=2) + "\n")
    if a.plot:
        plot(a.plot, results, title)
    return results


if __name__ == "__main__":
    main()
