"""Serving graphs for any number of rows, beside those of which all sizes are fixed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from tests.export.graph.test_serving import DECODERS
from tests.exported import fix_rows
from zoo.artifact import ModelDirectory
from zoo_export.graph import any_rows
from zoo_export.trace.make import Options, make_graphs
from zoo_runtime.onnx_runtime.providers import open_session

Exported = Callable[..., Path]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("contrib", [True, False], ids=["grouped", "standard"])
@pytest.mark.parametrize("name", DECODERS)
def test_each_number_of_rows_computes_the_same(
    exported_build: Exported, monkeypatch: pytest.MonkeyPatch, name: str, contrib: bool
) -> None:
    """The fixed graph's first rows, also where the number of rows is another size of the model, such as 4 heads."""
    stored = ModelDirectory.open(exported_build(name, noise=True))
    generator = np.random.default_rng(0)
    for rows in (3, 4):
        options = Options(profile="serving", fix={"batch": rows, "capacity": 24, "sequence": 5}, contrib=contrib)
        free = make_graphs(stored, options)
        with monkeypatch.context() as patch:
            fix_rows(patch)
            fixed = make_graphs(stored, options)
        graph = next(graph for graph in free if graph not in ("prefill", "encoder"))
        assert {name: data for name, data in free.items() if name != graph} == {
            name: data for name, data in fixed.items() if name != graph
        }
        whole, other = (open_session(graphs[graph], weights=stored.path) for graphs in (fixed, free))
        assert all(item.shape[0] == "batch" for item in (*other.get_inputs(), *other.get_outputs()))
        feeds = {
            item.name: generator.integers(1, 20, item.shape)
            if item.type == "tensor(int64)"
            else generator.standard_normal(item.shape).astype(np.float32)
            for item in whole.get_inputs()
        }
        wanted = whole.run(None, feeds)
        for count in (1, 2, rows, rows + 5):
            some = {item: np.resize(array, (count, *array.shape[1:])) for item, array in feeds.items()}
            for found, array in zip(other.run(None, some), wanted, strict=True):
                expected = np.resize(array, found.shape)
                assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def test_graph_that_depends_on_the_number_of_rows_stays_fixed() -> None:
    """A constant that differs from row to row cannot be written for any number of rows."""

    def make(model: ir.Model, rows: int) -> ir.Model:
        ids = ir.Value(name="ids", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape((rows, 2)))
        weights = ir.node("Constant", [], {"value": ir.tensor(np.arange(rows * 2, dtype=np.float32).reshape(rows, 2))})
        added = ir.node("Add", [ids, weights.outputs[0]])
        added.outputs[0].name, added.outputs[0].type = "sum", ids.type
        added.outputs[0].shape = ids.shape
        graph = ir.Graph([ids], added.outputs, nodes=[weights, added], opset_imports={"": 24}, name="graph")
        return ir.Model(graph, ir_version=10)

    kept = any_rows.free_rows(make(None, 3), make, 3)  # type: ignore[arg-type]
    assert kept.graph.inputs[0].shape == (3, 2)
