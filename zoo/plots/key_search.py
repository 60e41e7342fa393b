"""Plots of the search in a product-key memory (Lample et al. 2019, section 3.2).

H heads, M tokens, n half-keys per side, k slots read per head.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zoo.arrays import Array
from zoo.artifact import ModelDirectory
from zoo.errors import ArtifactError, UsageError
from zoo.models import persist
from zoo.nn import ProductKeyMemory
from zoo.plots.plot import COLOURS, MAP, MARKERS, Plot, drawn, new_figure
from zoo.plots.stored import as_floats
from zoo.probe.inputs import Point, make_feeds
from zoo.probe.module import TorchExecutor
from zoo.probe.pipeline import run_pipeline, token_input
from zoo.tokenizers.loading import load_tokenizer

__all__ = ["memory"]

_Call = tuple[str, ProductKeyMemory, Tensor]


@dataclass(frozen=True)
class _Search:
    """The search of one head for one token."""

    scores: Array
    """Of all half-keys, (2, n)."""
    slots: Array
    """The slots that are read, best first, (k): i n + j for the half-keys i and j."""
    chosen: Array
    """Their scores, (k)."""
    size: int
    """n"""


def memory(directory: str | os.PathLike[str], text: str, *, layer: int = 0, head: int = 0, token: int = -1) -> Plot:
    """Plot how a head of a product-key memory finds its slots for one token of a text.

    The scores are those of the PyTorch module in the stored dtype, by the modules :class:`zoo.nn.ProductKeyMemory`.

    Args:
        directory: the model directory of a text model.
        text: the text that the model reads.
        layer: which of the memories, in the order in which they are called.
        head: the head of the memory.
        token: position of the token; from the end if negative.

    Raises:
        UsageError: the model has no product-key memory, an index is too large, or matplotlib is not installed.
        ArtifactError: the model directory is damaged, or the text cannot be read.
    """
    stored = ModelDirectory.open(Path(directory))
    model = persist.load_directory(stored)
    tokens, calls = _run(stored, model, text)
    name = stored.description["name"]
    if not calls:
        problem = f"{stored.spec.architecture.name} has no product-key memory"
        raise UsageError(problem, name, "choose a model with zoo.nn.ProductKeyMemory")
    for kind, index, least, size in (
        ("memory", layer, 0, len(calls)),
        ("head", head, 0, calls[0][1].num_heads),
        ("token", token, -len(tokens), len(tokens)),
    ):
        if not least <= index < size:
            raise UsageError(f"no {kind} {index}", name, f"choose from {least} to {size - 1}")
    token %= len(tokens)
    path, module, x = calls[layer]
    with torch.no_grad():
        scores = as_floats(module.score(x)[:, head, token])
        best, slots = module.search(x)
    search = _Search(scores, slots[token, head].numpy(), as_floats(best[token, head]), module.num_keys)
    where = f"{path}, head {head}, token {token} ({tokens[token]!r})"
    return _draw(f"{name}: product-key search in {where}", search)


def _run(
    stored: ModelDirectory, model: nn.Module, text: str
) -> tuple[list[str], list[tuple[str, ProductKeyMemory, Tensor]]]:
    """Return the tokens of a text, and each memory with its path and the input that it reads, (1, M, E)."""
    graph = stored.spec.graphs[0]
    ids_name = token_input(graph)
    if ids_name is None:
        raise UsageError("the model reads no tokens", stored.path)
    tokenizer = load_tokenizer(stored.path)
    ids = tokenizer.encode(text).ids
    if not ids:
        raise ArtifactError("the text is empty", repr(text), "give at least one token")
    calls: list[_Call] = []
    for path, module in model.named_modules():
        if isinstance(module, ProductKeyMemory):

            def keep(module: nn.Module, given: tuple[Any, ...], path: str = path) -> None:
                assert isinstance(module, ProductKeyMemory)
                calls.append((path, module, given[0]))

            module.register_forward_pre_hook(keep)
    point = Point(1, len(ids), 0, "none")
    feeds = {**make_feeds(stored.spec.graphs, point, 0, len(ids)), ids_name: np.array([ids])}
    run_pipeline(TorchExecutor(model), stored.spec.graphs, feeds, point, split=False)
    return [tokenizer.decode([number]) for number in ids], calls


@drawn
def _draw(title: str, search: _Search) -> Plot:
    """Draw the scores of the half-keys of both sides, and the sums of the best."""
    count = len(search.slots)
    places = [np.argsort(-side, kind="stable")[:count] for side in search.scores]  # the best of each side
    halves = search.slots // search.size, search.slots % search.size
    rows, columns = ([side.tolist().index(half) for half in each] for side, each in zip(places, halves, strict=True))
    figure = new_figure(title, 3.7)
    grid = figure.add_gridspec(2, 2, width_ratios=(1.15, 1))
    for number, side in enumerate(search.scores):
        axes = figure.add_subplot(grid[number, 0])
        axes.vlines(range(search.size), 0, side, color="0.8", linewidth=0.8)
        axes.plot(range(search.size), side, "o", color="0.65", markersize=2, gid=f"scores-{number}")
        axes.plot(places[number], side[places[number]], MARKERS[number], color=COLOURS[number], markersize=4,
                  label=f"{count} best", gid=f"best-{number}")  # fmt: skip
        axes.axhline(0, color="0.4", linewidth=0.6)
        axes.locator_params(axis="x", integer=True)
        axes.set(xlabel=f"half-key of side {number + 1}", ylabel="score")
        axes.legend(loc="lower right", bbox_to_anchor=(1, 0.98), handletextpad=0.1, borderaxespad=0)
    axes = figure.add_subplot(grid[:, 1])
    sums = search.scores[0][places[0], None] + search.scores[1][None, places[1]]
    drawing = axes.pcolormesh(
        np.arange(count + 1) - 0.5,
        np.arange(count + 1) - 0.5,
        sums,
        cmap=MAP,
        gid="sums",
        edgecolors="face",
        linewidth=0.3,
    )
    axes.invert_yaxis()
    weights = np.exp(search.chosen - search.chosen.max())
    axes.scatter(
        columns, rows, s=150 * weights / weights.sum(), color="white", edgecolors="black", linewidths=0.8,
        label=f"{count} slots that are read, area by weight", gid="slots",
    )  # fmt: skip
    if count <= 16:
        for setter, side in ((axes.set_xticks, places[1]), (axes.set_yticks, places[0])):
            setter(range(count), [str(place) for place in side])
        axes.tick_params(axis="x", rotation=90)
    axes.tick_params(length=0)
    axes.set(xlabel="best half-keys of side 2", ylabel="best half-keys of side 1")
    figure.colorbar(drawing, ax=axes, label="sum of both scores", pad=0.01).outline.set_visible(False)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), handletextpad=0.1, borderaxespad=0)
    return Plot(title, figure)
