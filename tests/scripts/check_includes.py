#!/usr/bin/env python3
"""Fails where a file includes one of ours that the table of docs/architecture.md does not allow, or in a cycle."""
import pathlib
import re
import sys

SOURCES = {".hpp", ".cpp", ".h", ".c", ".cuh", ".cu"}
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
# Where an include of ours is looked for besides the file's own folder; anything found in none of them is not ours.
SEARCH = ["include", "src", "tests/ptx", "."]

# The first row whose prefix fits a file decides: (prefix of the file, prefixes that it may include).
PUBLIC = "include/headrace/"
TILES = ["src/core/", "src/cpu/plumbing/kernel_args.hpp", "src/cpu/simd/", "src/cpu/isa/", "src/cpu/tiles/"]
FORM = [PUBLIC, "src/core/", "src/algorithms/", "src/cpu/implementations.hpp", "src/cpu/plumbing/", *TILES]
CUDA_TILES = ["include/headrace/tensor.hpp", "include/headrace/launches.hpp", "src/core/types.hpp", "src/cuda/ptx.hpp",
              "src/cuda/plumbing/kernel_args.hpp", "src/cuda/tiles/"]
CUDA_FORM = [PUBLIC, "src/core/", "src/algorithms/", "src/cuda/implementations.hpp", "src/cuda/kernels/kernels.hpp",
             "src/cuda/plumbing/", *CUDA_TILES]
TABLE = [
    ("include/headrace/", [PUBLIC]),
    ("src/core/", [PUBLIC, "src/core/", "src/operators.hpp"]),
    ("src/algorithms/", ["src/core/types.hpp", "src/algorithms/"]),
    ("src/cpu/isa/", ["src/core/types.hpp", "src/cpu/isa/"]),
    ("src/cpu/simd/", ["src/core/types.hpp", "src/cpu/isa/", "src/cpu/simd/"]),
    ("src/cpu/plumbing/", [PUBLIC, "src/core/", "src/cpu/plumbing/"]),
    ("src/cpu/tiles/", [*TILES]),
    ("src/cpu/chunk/", [*FORM, "src/cpu/chunk/"]),
    ("src/cpu/recurrent/", [*FORM, "src/cpu/recurrent/"]),
    ("src/cpu/layers/", [PUBLIC, "src/core/", "src/cpu/plumbing/", *TILES, "src/cpu/layers/"]),
    ("src/cpu/products/", [PUBLIC, "src/core/", "src/cpu/plumbing/", *TILES, "src/cpu/products/"]),
    ("src/cpu/kernels/", ["src/core/", "src/cpu/"]),
    ("src/cpu/implementations", [PUBLIC, "src/core/", "src/cpu/implementations.hpp"]),
    ("src/cuda/ptx.hpp", []),
    ("src/cuda/plumbing/", [PUBLIC, "src/core/", "src/cuda/kernels/kernels.hpp", "src/cuda/layers/layer_args.hpp",
                            "src/cuda/plumbing/"]),
    ("src/cuda/tiles/", CUDA_TILES),
    ("src/cuda/chunk/", [*CUDA_FORM, "src/cuda/chunk/"]),
    ("src/cuda/recurrent/", [*CUDA_FORM, "src/cuda/recurrent/"]),
    ("src/cuda/layers/", [PUBLIC, "src/core/", "src/cuda/kernels/kernels.hpp", "src/cuda/plumbing/", *CUDA_TILES,
                          "src/cuda/layers/"]),
    ("src/cuda/products/", [PUBLIC, "src/core/", "src/cuda/kernels/kernels.hpp", "src/cuda/plumbing/", *CUDA_TILES,
                            "src/cuda/products/"]),
    ("src/cuda/kernels/", ["include/headrace/tensor.hpp", "include/headrace/launches.hpp", "src/core/types.hpp",
                           "src/core/factor.hpp", "src/cuda/"]),
    ("src/cuda/implementations", [PUBLIC, "src/core/", "src/cuda/implementations.hpp"]),
    ("src/no_cuda/", [PUBLIC, "src/core/", "src/cuda/implementations.hpp", "src/cuda/layers/layers.hpp",
                      "src/cuda/products/products.hpp"]),
    ("src/implementations.cpp", [PUBLIC, "src/core/", "src/cpu/implementations.hpp", "src/cuda/implementations.hpp"]),
    ("src/dispatch", [PUBLIC, "src/core/", "src/dispatch.hpp"]),
    ("src/operators.hpp", [PUBLIC, "src/core/problem.hpp"]),
    ("src/layers.cpp", [PUBLIC, "src/core/", "src/cpu/layers/layers.hpp", "src/cuda/layers/layers.hpp"]),
    ("src/products.cpp", [PUBLIC, "src/core/", "src/cpu/products/products.hpp", "src/cuda/products/products.hpp"]),
    ("src/headrace", [PUBLIC, "src/core/", "src/dispatch.hpp", "src/operators.hpp"]),
    ("reference/", ["include/headrace/tensor.hpp", "reference/"]),
    ("harness/device_loops", ["harness/device_loops.hpp", "src/cuda/ptx.hpp"]),
    ("harness/", [PUBLIC, "reference/", "harness/"]),
    ("tools/", [PUBLIC, "reference/", "harness/", "tools/"]),
    ("bench/", [PUBLIC, "reference/", "harness/", "bench/"]),
    ("examples/", [PUBLIC, "examples/"]),
    ("python/", [PUBLIC, "python/"]),
    ("tests/package/", [PUBLIC]),
    ("tests/", [""]),
]


def resolve(root, path, name):
    """The path, relative to root, of the file that `name` names in `path`; None if it is not ours."""
    for folder in [path.parent] + [root / place for place in SEARCH]:
        candidate = (folder / name).resolve()
        if candidate.is_file() and candidate.is_relative_to(root):
            return candidate.relative_to(root).as_posix()
    return None


def rule_for(name):
    for prefix, allowed in TABLE:
        if name.startswith(prefix):
            return allowed
    return None


def cycle_in(graph):
    """A list of files that include each other in a ring, or None."""
    state, trail = {}, []

    def visit(name):
        state[name] = "open"
        trail.append(name)
        for target in graph.get(name, ()):
            if state.get(target) == "open":
                return trail[trail.index(target):] + [target]
            if target not in state:
                found = visit(target)
                if found:
                    return found
        trail.pop()
        state[name] = "done"
        return None

    for name in graph:
        if name not in state:
            found = visit(name)
            if found:
                return found
    return None


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    folders = ["include", "src", "reference", "harness", "tools", "bench", "examples", "python", "tests"]
    paths = sorted(path for folder in folders for path in (root / folder).rglob("*") if path.suffix in SOURCES)
    graph, failures, includes = {}, [], 0
    for path in paths:
        name = path.relative_to(root).as_posix()
        allowed = rule_for(name)
        if allowed is None:
            failures.append(f"{name}: no row of the table covers this file")
            continue
        graph[name] = []
        for target in INCLUDE.findall(path.read_text(encoding="utf-8")):
            ours = resolve(root, path, target)
            if ours is None:
                continue
            includes += 1
            graph[name].append(ours)
            if not any(ours.startswith(prefix) for prefix in allowed):
                failures.append(f"{name} includes {ours}; it may include {', '.join(allowed) or 'nothing of ours'}")
    cycle = cycle_in({name: [t for t in targets if t != name] for name, targets in graph.items()})
    if cycle:
        failures.append("cycle: " + " -> ".join(cycle))
    print("\n".join(failures + [f"{len(paths)} files, {includes} includes of ours, {len(failures)} not allowed"]))
    return 1 if failures or includes == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
