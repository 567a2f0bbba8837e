"""How XLA divides custom calls over devices: by heads, channels and batch rows, never by what a call must see whole."""

from __future__ import annotations

from math import prod
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# What a dimension counts: a name, along which a call may be divided; several, of which the first is the major one; or
# None, whole on every device. Arrays of a call that share a name are divided alike along it.
Label = Union[str, Tuple[str, ...], None]
Labels = Tuple[Label, ...]
Tensors = Dict[str, jax.Array]


def partitioned(name: str, function: Callable, labels: Callable) -> Callable:
    """`function` of arrays by name, which returns arrays by name, where XLA may divide it over devices.

    function(tensors, wide) is called with each device's part of the tensors. A result that lacks a name along which the
    call is divided is a sum over it: such results are in `wide`, wanted in their accumulated type, and are then added.
    labels(tensors): those of every tensor and result, by name. name: of the custom call, for the error where a
    derivative of it is asked for.
    """
    @jax.custom_jvp
    def whole(tensors: Tensors) -> Tensors:
        results = jax.eval_shape(lambda x: function(x, frozenset()), tensors)
        if any(x.size == 0 for x in tensors.values()):
            return function(tensors, frozenset())  # nothing to divide
        call = custom_partitioning(lambda tensors: function(tensors, frozenset()))
        division = _Division(function, labels(tensors), tensors, results)
        call.def_partition(division.partition, infer_sharding_from_operands=division.whole_results,
                           decode_shardings=False, **division.rule())
        return call(tensors)

    @whole.defjvp
    def refuse(primals: tuple, tangents: tuple) -> Tuple[Tensors, Tensors]:
        raise ValueError(f"The call to `headrace_{name}` cannot be differentiated: an operator has gradients of first "
                         "order, in reverse mode, and a step has none")

    return whole


class _Division:
    """One call, as XLA asks for its division."""

    def __init__(self, function: Callable, labels: Dict[str, Labels], tensors: Tensors, results: dict) -> None:
        arrays = {**tensors, **results}
        self.function, self.labels = function, {name: labels[name][:x.ndim] for name, x in arrays.items()}
        self.dtypes = {name: x.dtype for name, x in results.items()}
        self.names = tuple(sorted(tensors)), tuple(sorted(results))  # in the order of a tree's leaves
        pairs = [pair for name, x in arrays.items() for pair in zip(self.labels[name], x.shape)]
        self.sizes = {label: size for label, size in pairs if isinstance(label, str)}
        for label, size in pairs:  # of several names only the last may stand nowhere alone
            if isinstance(label, tuple):
                self.sizes.setdefault(label[-1], size // prod(self.sizes[part] for part in label[:-1]))

    def rule(self) -> Dict[str, Any]:
        """The arguments of def_partition that name the dimensions."""
        whole: List[str] = []

        def named(label: Label) -> str:
            if label is None:
                whole.append(f"whole{len(whole)}")
            return whole[-1] if label is None else label if isinstance(label, str) else f"({' '.join(label)})"

        sides = [", ".join(" ".join(map(named, self.labels[name])) for name in names) for names in self.names]
        alone = {label for names in self.names for name in names for label in self.labels[name]}
        sizes = {name: size for name, size in self.sizes.items() if name not in alone}
        return {"sharding_rule": " -> ".join(sides), "need_replication_factors": tuple(whole), **sizes}

    def partition(self, mesh: Mesh, tensors: tuple, results: dict) -> tuple:
        """What a device runs, and the shardings of tensors and results, in which XLA then brings them."""
        arrays = [*tensors[0].items(), *results.items()]
        devices = sorted(arrays[0][1].sharding.device_set, key=lambda device: device.id)
        mesh, axes = self._axes(mesh, devices, arrays)
        sums = {name: tuple(axis for label, names in axes.items() if not self._counts(name, label) for axis in names)
                for name in results}
        wide = frozenset(name for name, names in sums.items() if names)
        if wide and mesh.size < len(devices):  # inside shard_map over other axes, where XLA takes no sum from a call
            axes, wide = {}, frozenset()

        def run(tensors: Tensors) -> Tensors:
            values = self.function(tensors, wide)
            return values | {name: jax.lax.psum(values[name], sums[name]).astype(self.dtypes[name]) for name in wide}

        def sharding(name: str) -> NamedSharding:
            firsts = [label[0] if isinstance(label, tuple) else label or "" for label in self.labels[name]]
            return NamedSharding(mesh, PartitionSpec(*(axes.get(label) for label in firsts)))

        return mesh, run, {name: sharding(name) for name in results}, ({name: sharding(name) for name in tensors[0]},)

    def whole_results(self, mesh: Mesh, tensors: tuple, results: dict) -> dict:
        """For the partitioner before Shardy: nothing is divided."""
        return {name: NamedSharding(mesh, PartitionSpec()) for name in results}

    def _counts(self, name: str, label: str) -> bool:
        return any(label in (x if isinstance(x, tuple) else (x,)) for x in self.labels[name])

    def _axes(self, mesh: Mesh, devices: list, arrays: list) -> Tuple[Mesh, Dict[str, Tuple[str, ...]]]:
        """A mesh with axes of prime sizes, and those by which the call is divided along each name.

        Of all arrays the one decides that XLA has divided into the most parts.
        """
        best: Dict[str, List[int]] = {}
        primes: List[int] = []
        for name, x in arrays:
            counts, places = _places(x)
            shape = mesh.devices.shape if mesh.size == len(places) else (len(places),)
            sizes = [prime for size in shape for prime in _prime_factors(size)]
            found: Dict[str, List[int]] = {}
            for label, count, place in zip(self.labels[name], counts, places.T):
                if label is not None and count > 1:
                    first = label[0] if isinstance(label, tuple) else label
                    found[first] = self._dividing(first, _steps(place.reshape(sizes)), sizes)
            parts = prod(sizes[i] for axes in found.values() for i in axes)
            if not primes or parts > prod(primes[i] for axes in best.values() for i in axes):
                best, primes = found, sizes
        grid = np.array(devices[:prod(primes)]).reshape(primes)
        return (Mesh(grid, tuple(f"axis{i}" for i in range(len(primes)))),
                {label: tuple(f"axis{i}" for i in axes) for label, axes in best.items() if axes})

    def _dividing(self, label: str, axes: Sequence[int], sizes: Sequence[int]) -> List[int]:
        """The first of the axes, as many as divide what the label counts."""
        taken: List[int] = []
        for axis in axes:
            if self.sizes[label] % (prod(sizes[i] for i in taken) * sizes[axis]):
                break
            taken.append(axis)
        return taken


def _places(x: jax.ShapeDtypeStruct) -> Tuple[Sequence[int], np.ndarray]:
    """How many parts each dimension of x has, and which one each device has, [devices, dimensions].

    Devices are counted as XLA does, which inside shard_map are those that it has left to XLA.
    """
    rank = len(x.shape)
    sharding = x.sharding._to_xla_hlo_sharding(rank)
    if sharding.is_replicated():
        return (1,) * rank, np.zeros((1, rank), int)
    counts, order = sharding.tile_assignment_dimensions(), sharding.tile_assignment_devices()
    places = np.array(list(np.ndindex(*counts)))
    return counts[:rank], places[np.argsort(order), :rank]


def _steps(places: np.ndarray) -> List[int]:
    """The axes of a grid of devices by which `places` [grid] counts, the major one first; none if by no such axes."""
    steps = {}
    for axis in range(places.ndim):
        second = tuple(1 if i == axis else 0 for i in range(places.ndim))
        if places[second]:
            steps[axis] = int(places[second])
    axes = sorted(steps, key=lambda axis: -steps[axis])
    counted = sum(steps[axis] * np.indices(places.shape)[axis] for axis in axes)
    return axes if axes and np.array_equal(counted, places) else []


def _prime_factors(size: int) -> List[int]:
    """As many as 2 and larger, in rising order; none of 1."""
    for factor in range(2, size + 1):
        if size % factor == 0:
            return [factor, *_prime_factors(size // factor)]
    return []
