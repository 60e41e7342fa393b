"""Errors of a smaller precision by layer: those of the stored weights, and those of the blocks' outputs on a text.

Both are relative: the norm of the difference from float32, divided by the norm in float32.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from zoo.arrays import Array
from zoo.artifact import Export, ModelDirectory
from zoo.models import persist
from zoo.plots.plot import COLOURS, MARKERS, Plot, draw_map, drawn, layer_of, new_figure, printable
from zoo.probe.inputs import Point
from zoo.probe.module import TorchExecutor
from zoo_export.certificate import Sample, sample, window_feeds
from zoo_export.parity.modules import module_outputs
from zoo_export.variants.reduced.model import ReducedModel, read_reduced
from zoo_export.variants.reduced.smallest import precision_recipe

__all__ = ["LayerErrors", "draw_layers", "layer_errors", "plot_layers"]

_CELLS = 16
"""Maximum number of columns of a heat map with numbers in its cells."""


@dataclass(frozen=True)
class LayerErrors:
    """Relative errors of a precision."""

    variant: str
    weights: Mapping[str, float]
    """The error of each weight that is stored in this precision, by name."""
    blocks: Mapping[str, float]
    """The error of each block's output, by graph and path; a block is an element of a module list."""
    tokens: int
    """Number of tokens of the text on which outputs were computed; 0 if the model reads none."""


def plot_layers(
    directory: str | os.PathLike[str], precision: str, *, text: str | os.PathLike[str] | None = None
) -> Plot:
    """Plot the errors of a smaller precision by layer.

    Args:
        directory: a model directory with a verified export of the precision.
        precision: the precision, or the name of the variant.
        text: text to measure the blocks on; a built-in sample by default.

    Raises:
        ArtifactError: there is no such export, or the text cannot be read.
        ParityError: the export is not verified.
        UsageError: matplotlib is not installed.
    """
    stored = ModelDirectory.open(Path(directory))
    export = Export(stored, precision)
    export.check()
    export.check_verified()
    errors = layer_errors(stored, read_reduced(stored, precision), sample(stored, None if text is None else Path(text)))
    return draw_layers(str(stored.description["name"]), errors)


def layer_errors(stored: ModelDirectory, reduced: ReducedModel, tokens: Sample) -> LayerErrors:
    """Measure the errors of a model in another precision, on the first window of a sample.

    The outputs are those of the PyTorch module, with the weights of that precision and activations rounded as the
    variant's graphs do.
    """
    other = precision_recipe(reduced.variant).executor(stored, reduced)
    reference = TorchExecutor(persist.load_directory(stored))
    graphs, window = stored.spec.graphs, tokens.windows[0]
    point = Point(1, len(window), 0, "none")
    feeds = window_feeds(graphs, point, window, 0)
    blocks: dict[str, float] = {}
    for number, graph in enumerate(graphs):
        exact, rounded = (module_outputs(e, graph, graphs[: number + 1], feeds, point) for e in (reference, other))
        for path, values in exact.items():
            if path.rpartition(".")[2].isdecimal() and path in rounded:
                blocks[path if len(graphs) == 1 else f"{graph.name} {path}"] = _relative(rounded[path], values)
    read = 0 if tokens.to_dict()["tokens"] == 0 else len(window)
    return LayerErrors(reduced.variant, dict(_weight_errors(stored, reduced)), blocks, read)


def _weight_errors(stored: ModelDirectory, reduced: ReducedModel) -> Iterator[tuple[str, float]]:
    """Yield the name and the error of each weight of two or more dimensions that is stored in the precision."""
    for name, weight in precision_recipe(reduced.variant).weights(reduced):
        place = stored.layout[name]
        if len(place.shape) > 1 and place.dtype == "F32":
            with safe_open(stored.file(place.file), framework="numpy") as reader:
                original = reader.get_tensor(name)
            yield name, _relative(weight.reshape(original.shape), original)


def _relative(values: Array, wanted: Array) -> float:
    values, wanted = values.astype(np.float64), wanted.astype(np.float64)
    size = float(np.linalg.norm(wanted))
    return float(np.linalg.norm(values - wanted)) / size if size else 0.0


@drawn
def draw_layers(name: str, errors: LayerErrors) -> Plot:
    """Plot errors that were measured. ``name`` is that of the model."""
    kinds, table = _table(errors.weights)
    on = f" (outputs on {errors.tokens} tokens)" if errors.tokens else ""
    title = f"{name}: relative error of {errors.variant} by layer{on}"
    figure = new_figure(title, max(3.0, 1.2 + 0.2 * len(kinds)))
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_weights(left, kinds, table)
    _draw_blocks(right, errors.blocks)
    right.set_title("outputs of blocks")
    return Plot(title, figure)


def _table(weights: Mapping[str, float]) -> tuple[list[str], Array]:
    """Return the kinds of weights, those without a layer last, and the error of each kind by layer.

    The last column is for those without a layer, if there are any.
    """
    places = {name: layer_of(name) for name in weights}
    kinds = [kind for _, kind in sorted({(layer is None, kind) for kind, layer in places.values()})]
    depth = max((layer for _, layer in places.values() if layer is not None), default=-1) + 1
    alone = any(layer is None for _, layer in places.values())
    table = np.full((len(kinds), depth + alone), np.nan)
    for name, (kind, layer) in places.items():
        table[kinds.index(kind), depth if layer is None else layer] = weights[name]
    return kinds, table


def _draw_weights(axes: Any, kinds: Sequence[str], table: Array) -> None:
    """Draw a heat map, with the numbers in it if there are few columns."""
    draw_map(axes, 100 * table, "relative error in %", low=0, gid="weights")
    columns = table.shape[1]
    layers = columns - bool(np.isnan(table[:, :-1]).all(1).any())
    highest = np.nanmax(table)
    for row, column in zip(*np.nonzero(np.isfinite(table)), strict=True) if columns <= _CELLS else ():
        value = table[row, column]
        colour = "white" if value < 0.55 * highest else "black"
        axes.text(column, row, f"{100 * value:.2g}", ha="center", va="center", color=colour, fontsize=6)
    step = max(1, -(-layers // 12))
    axes.set_xticks([*range(0, layers, step), *range(layers, columns)],
                    [*map(str, range(0, layers, step)), *["none"] * (columns - layers)])  # fmt: skip
    axes.set_yticks(range(len(kinds)), [printable(kind) for kind in kinds])
    axes.tick_params(length=0)
    axes.set_xlabel("layer")
    axes.set_title("weights")


def _draw_blocks(axes: Any, errors: Mapping[str, float]) -> None:
    """Draw a line over the layers for each list of blocks."""
    series: dict[str, list[tuple[int, float]]] = {}
    for name, error in errors.items():
        kind, layer = layer_of(name)
        series.setdefault(kind, []).append((layer or 0, 100 * error))
    for number, (kind, points) in enumerate(series.items()):
        x, y = zip(*points, strict=True)
        axes.plot(x, y, f"{MARKERS[number % len(MARKERS)]}-", color=COLOURS[number % len(COLOURS)], markersize=4,
                  linewidth=0.8, label=printable(kind), gid=f"blocks-{kind}")  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.locator_params(axis="x", integer=True)
    axes.set(xlabel="layer", ylabel="relative error in %")
    axes.grid(axis="y")
    if len(series) > 1:
        axes.legend()
