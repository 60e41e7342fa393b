"""Inputs that show what a bug does to a user: each witness returns the largest relative error that it finds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.export.parity.faults import Edit
from tests.exported import inlined
from zoo.artifact import ModelDirectory
from zoo.models import create, persist
from zoo.nn import Cache
from zoo.probe.inputs import Padding, Point, make_feeds
from zoo.probe.module import TorchExecutor
from zoo.probe.pipeline import Arrays, run_pipeline
from zoo.probe.positions import valid_positions
from zoo_export.trace.make import Options, make_graphs
from zoo_runtime.onnx_runtime.executor import OnnxExecutor
from zoo_runtime.onnx_runtime.providers import open_session

__all__ = [
    "Planted",
    "Witness",
    "against_itself",
    "at",
    "changes_its_inputs",
    "changes_its_weights",
    "graph_in_parts",
    "module_in_parts",
    "on_weights",
    "rows_alone",
    "without_a_cache",
]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Planted:
    """A built model and its serialised graphs, with or without a bug."""

    stored: ModelDirectory
    graphs: Mapping[str, bytes]

    @classmethod
    def make(cls, stored: ModelDirectory, edit: Edit | None = None, profile: str = "portable") -> Planted:
        """Create a model's graphs, and edit the last of them."""
        graphs = make_graphs(stored, Options.from_dict({"profile": profile}))
        if edit is not None:
            name = stored.spec.graphs[-1].name
            model = inlined(graphs[name])
            edit(model.graph)
            del model.graph.value_info[:]
            graphs[name] = model.SerializeToString()
        return cls(stored, graphs)

    @cached_property
    def sessions(self) -> dict[str, Any]:
        """A session for each graph."""
        return {
            name: open_session(graph, weights=self.stored.path, optimize=False, spin=False)
            for name, graph in self.graphs.items()
        }

    def exact(self) -> nn.Module:
        """Load the model in float64."""
        return persist.load_directory(self.stored).double()

    def own(self) -> nn.Module:
        """Load the model in its own dtype."""
        return persist.load_directory(self.stored)

    def feeds(self, point: Point, seed: int = 1) -> Arrays:
        """Generate inputs that no comparison uses."""
        return make_feeds(self.stored.spec.graphs, point, seed, 128)

    def run(self, feeds: Mapping[str, Array], point: Point) -> dict[str, Arrays]:
        """Run the graphs, on the past first."""
        executor = OnnxExecutor(self.sessions, np.dtype(self.stored.dtype), twice=False)
        return run_pipeline(executor, self.stored.spec.graphs, feeds, point, split=True)

    def distance(
        self, exact: Mapping[str, Arrays], found: Mapping[str, Arrays], feeds: Mapping[str, Array], point: Point
    ) -> float:
        """Return the largest relative error of all outputs, padding excepted."""
        return max(
            relative(exact[g.name][t.name], found[g.name][t.name], valid_positions(g, t, feeds, point))
            for g in self.stored.spec.graphs
            for t in g.output_tensors()
        )


Witness = Callable[[Planted], float]
"""Returns the largest relative error that a user meets at some input; infinite if the graph fails or changes shape."""


def relative(exact: Array, found: Array, valid: Array | None = None) -> float:
    """Return the largest error relative to the largest number of its row or of its channel."""
    if exact.shape != found.shape:
        return np.inf
    if valid is not None:
        exact, found = (np.where(valid, values, 0.0) for values in (exact, found))
    off, size = np.abs(found - exact).astype(np.float64), np.abs(exact)
    if not np.isfinite(off).all():
        return np.inf
    channels = tuple(range(exact.ndim - 1))
    largest = 0.0
    for axes in (-1, channels):
        worst, scale = off.max(axes), size.max(axes)
        largest = max(largest, float(np.max(worst / np.where(scale > 0, scale, 1.0), initial=0.0)))
    return largest


def at(
    batch: int = 2, length: int = 7, past: int = 0, padding: Padding = "none",
    change: Callable[[Arrays], None] | None = None, weights: Callable[[nn.Module], None] | None = None,
) -> Witness:  # fmt: skip
    """Compare the graphs, which read the past first, with the model in float64, which reads everything at once."""
    point = Point(batch, length, past, padding)

    def measure(planted: Planted) -> float:
        graphs = planted.stored.spec.graphs
        feeds = planted.feeds(point)
        if change is not None:
            change(feeds)
        exact = run_pipeline(TorchExecutor(planted.exact()), graphs, feeds, point, split=False)
        try:
            found = planted.run(feeds, point)
        except Exception:  # the runtime's exceptions have no common base class
            return np.inf
        return planted.distance(exact, found, feeds, point)

    return measure


def graph_in_parts(batch: int = 2, length: int = 7, past: int = 0, padding: Padding = "none") -> Witness:
    """Compare the graphs with the model in float64, both of which read the past first."""
    point = Point(batch, length, past, padding)

    def measure(planted: Planted) -> float:
        feeds = planted.feeds(point)
        exact = run_pipeline(TorchExecutor(planted.exact()), planted.stored.spec.graphs, feeds, point, split=True)
        return planted.distance(exact, planted.run(feeds, point), feeds, point)

    return measure


def module_in_parts(batch: int = 2, length: int = 7, past: int = 0, padding: Padding = "none") -> Witness:
    """Compare the model in float64, which reads the past first, with itself, which reads everything at once."""
    point = Point(batch, length, past, padding)

    def measure(planted: Planted) -> float:
        feeds, graphs = planted.feeds(point), planted.stored.spec.graphs
        model = TorchExecutor(planted.exact())
        whole, parts = (run_pipeline(model, graphs, feeds, point, split=split) for split in (False, True))
        return planted.distance(whole, parts, feeds, point)

    return measure


def against_itself(batch: int = 2, length: int = 7, past: int = 0) -> Witness:
    """Compare two calls of the model on the same input, with another in between."""
    point = Point(batch, length, past, "none")

    def measure(planted: Planted) -> float:
        model = TorchExecutor(planted.exact())
        graphs = planted.stored.spec.graphs
        calls = [run_pipeline(model, graphs, planted.feeds(point, seed), point, split=True) for seed in (1, 2, 1)]
        return max(relative(calls[0][g.name][t.name], calls[2][g.name][t.name]) for g in graphs for t in g.outputs)

    return measure


def rows_alone(batch: int = 5, length: int = 30, mask: bool = False) -> Witness:
    """Compare the rows of a batch with each row by itself; with ``mask``, each row without its padding."""
    point = Point(batch, length, 0, "right" if mask else "none")

    def measure(planted: Planted) -> float:
        model, graph = TorchExecutor(planted.exact()), planted.stored.spec.graphs[-1]
        feeds = planted.feeds(point)
        together = run_pipeline(model, (graph,), feeds, point, split=False)[graph.name]
        worst = 0.0
        for row in range(batch):
            count = int(feeds["attention_mask"][row].sum())
            single = {name: value[row : row + 1, :count] for name, value in feeds.items()}
            alone = run_pipeline(model, (graph,), single, Point(1, count, 0, "none"), split=False)[graph.name]
            for tensor in graph.outputs:
                found = together[tensor.name][row : row + 1]
                worst = max(worst, relative(alone[tensor.name], found[:, :count] if found.ndim > 2 else found))
        return worst

    return measure


def without_a_cache(planted: Planted) -> float:
    """Compare the graph with the model called without a cache, on two texts one after the other."""
    model, point = planted.exact(), Point(2, 7, 0, "none")
    worst = 0.0
    for seed in (1, 2):
        feeds = planted.feeds(point, seed)
        with torch.inference_mode():
            exact = model(torch.from_numpy(feeds["input_ids"]))
        worst = max(worst, relative(exact.numpy(), planted.run(feeds, point)["model"]["logits"]))
    return worst


def changes_its_inputs(planted: Planted) -> float:
    """Return the largest relative change of the tensors passed to the model."""
    model, graph = planted.exact(), planted.stored.spec.graphs[-1]
    feeds = planted.feeds(Point(2, 7, 0, "none"))
    inputs = {name: torch.from_numpy(value.copy()) for name, value in feeds.items()}
    past = graph.past
    assert past is not None
    ones = partial(torch.ones, 2, past.num_heads, 3, past.head_dim, dtype=torch.float64)
    pairs = [(ones(), ones()) for _ in range(past.num_layers)]
    inputs["attention_mask"] = torch.ones(2, 10, dtype=torch.int64)
    with torch.inference_mode():
        model(**inputs, past_key_values=Cache(pairs))
    ids = relative(feeds["input_ids"].astype(float), inputs["input_ids"].numpy().astype(float))
    return max(ids, *(relative(np.ones(tensor.shape), tensor.numpy()) for pair in pairs for tensor in pair))


def changes_its_weights(planted: Planted) -> float:
    """Return the largest relative change of a weight by one call."""
    model, point = planted.own(), Point(2, 7, 0, "none")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run_pipeline(TorchExecutor(model), planted.stored.spec.graphs, planted.feeds(point), point, split=True)
    return max(relative(before[name].double().numpy(), value.numpy()) for name, value in model.state_dict().items())


def on_weights(change: Callable[[nn.Module], None], witness: Witness, seed: int = 0) -> Witness:
    """Return a witness for the same graphs beside other weights in the same layout."""

    def measure(planted: Planted) -> float:
        model = create.build(planted.stored.spec, seed=seed, dtype=planted.stored.dtype)
        with torch.no_grad():
            change(model)
        with TemporaryDirectory() as folder:
            other = ModelDirectory.open(persist.save_spec(planted.stored.spec, model, Path(folder, "model")))
            return witness(Planted(other, planted.graphs))

    return measure
