"""Rounding 4-bit weights so that a Linear's outputs, rather than its weights, stay close (GPTQ, Frantar et al. 2023).

The columns of a weight are rounded in order, and the error of each is compensated by the columns that are not rounded
yet, as far as the inputs of the Linear are correlated. Only the second moments of these inputs are needed. They are
measured in float32 on random inputs, so the certificate's text plays no part in the choice.

N rows, K columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from zoo.arrays import Array
from zoo.artifact import ModelDirectory
from zoo.contract import sizes_of
from zoo.models import persist
from zoo.probe.grid import longest_length
from zoo.probe.inputs import Point, make_feeds
from zoo.probe.module import TorchExecutor
from zoo.probe.pipeline import run_pipeline
from zoo.system import free_memory

__all__ = ["input_moments"]

_WINDOW, _WINDOWS, _SEED = 256, 16, 1
"""Largest length of an input, number of inputs, and seed of the first."""
_MEMORY = 0.25
"""Part of the free memory for the moments that are measured at a time."""
_BLOCK = 512
"""Columns of a block of products."""


def input_moments(stored: ModelDirectory, columns: Mapping[str, int]) -> Iterator[tuple[str, Array | None]]:
    """Measure the mean of x x^T over the inputs x of Linears, on random inputs of the model.

    Args:
        stored: a float32 model.
        columns: K of each weight, by name.

    Yields:
        The name of each weight and its moments, (K, K) in float32, or None if no Linear has read it.
    """
    model = persist.load_directory(stored)
    groups: list[list[str]] = []
    room = 0.0
    for name, width in columns.items():
        size = 4.0 * width**2
        if not groups or size > room:
            groups.append([])
            room = _MEMORY * free_memory()
        groups[-1].append(name)
        room -= size
    for group in groups:
        moments = _measure(stored, model, group)
        for name in group:
            yield name, moments.pop(name, None)


def _measure(stored: ModelDirectory, model: torch.nn.Module, names: list[str]) -> dict[str, Array]:
    graphs = stored.spec.graphs
    length = min(_WINDOW, longest_length(stored.spec.config, graphs))
    for size in sizes_of(graphs).values():
        length = max(length // size.multiple_of * size.multiple_of, size.min)
    point = Point(1, length, 0, "none")
    run, recorder = TorchExecutor(model), _Recorder({id(model.get_parameter(name)): name for name in names})
    for seed in range(_SEED, _SEED + _WINDOWS):
        with recorder:
            run_pipeline(run, graphs, make_feeds(graphs, point, seed, length + 1), point, split=False)
    return recorder.means()


class _Recorder(TorchFunctionMode):
    """Sums x x^T over the inputs of Linears with the given weights."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._totals: dict[str, Tensor] = {}
        """Sums by name. They are symmetric: what lies below blocks on the diagonal is left out until the end."""
        self._counts: dict[str, int] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = self._names.get(id(args[1])) if function is F.linear and len(args) > 1 else None
        if name is not None:
            x = args[0].detach().flatten(0, -2)
            if name not in self._totals:
                self._totals[name] = x.new_zeros(x.shape[-1], x.shape[-1])
            for start in range(0, x.shape[-1], _BLOCK):
                columns = slice(start, start + _BLOCK)
                self._totals[name][columns, start:].addmm_(x[:, columns].T, x[:, start:])
            self._counts[name] = self._counts.get(name, 0) + len(x)
        return function(*args, **(kwargs or {}))

    def means(self) -> dict[str, Array]:
        """Return the mean of x x^T, by name. To be called once."""
        means = {}
        for name, total in self._totals.items():
            mean = means[name] = total.numpy()  # shares its memory
            for stop in range(_BLOCK, len(mean), _BLOCK):
                mean[stop:, stop - _BLOCK : stop] = mean[stop - _BLOCK : stop, stop:].T
            mean /= self._counts[name]
        return means
