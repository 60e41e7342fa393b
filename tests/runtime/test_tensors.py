"""``zoo run`` of models whose task is tensors in, tensors out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zoo as library
from tests.exported import sign_export
from zoo import plugins
from zoo.models import create, persist
from zoo.registry import ModelSpec, config_class
from zoo_runtime import load_session
from zoo_runtime.tasks.tensors import Tensors

Zoo = Callable[..., Any]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export the module of the defaults, which scores texts of 64 token ids."""
    folder: Path = tmp_path_factory.mktemp("tensors") / "scorer"
    plugin, architecture = plugins.active().architecture("own-module")
    spec = ModelSpec("scorer", plugin, architecture, config_class(plugin, architecture)())
    persist.save_spec(spec, create.build(spec, seed=0, dtype="float32"), folder)
    sign_export(folder)
    return folder


def test_outputs_of_rows(directory: Path, zoo: Zoo) -> None:
    """Rows of JSON and of arrays give the outputs of the module; a mask is 1 unless it is given."""
    model = library.load(directory)
    rows = [[5, 3, 9], [7, 63, 0, 4, 1]]
    with torch.inference_mode():
        wanted = [float(model(input_ids=torch.tensor([row]), mask=torch.ones(1, len(row)))["score"]) for row in rows]
    with load_session(directory) as session:
        found = session.run([{"input_ids": np.array(row, dtype=np.int32)} for row in rows])
        padded = session.run({"input_ids": [5, 3, 9, 8], "mask": [1, 1, 1, 0]})
    np.testing.assert_allclose([result["score"] for result in found], wanted, rtol=1e-5)
    np.testing.assert_allclose(padded["score"], wanted[0], rtol=1e-5)
    texts = [json.dumps({"input_ids": row}) for row in rows]
    result = zoo("run", directory, *texts, "--json").json
    np.testing.assert_allclose([item["score"] for item in result["results"]], wanted, rtol=1e-5)
    assert f"score {wanted[0]:.3f}" in zoo("run", directory, texts[0]).out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("some text", "'some text' is no JSON: input 1: give a JSON object"),
        ("[" * 100_000, "is no JSON"),
        ("[1, 2]", "expected tensors by name: input 1: give a JSON object"),
        ("{}", "input_ids is missing"),
        ('{"ids": [1]}', "the model has no input 'ids': input 1: known: input_ids, mask"),
        ('{"input_ids": [[1]]}', "input_ids must be int64 of shape (sequence), got int64 (1, 1)"),
        ('{"input_ids": [0.5]}', "input_ids must be int64 of shape (sequence), got float64 (1,)"),
        ('{"input_ids": ["a"]}', "input_ids must be int64"),
        ('{"input_ids": [[1], 2]}', "input_ids is no tensor"),
        ('{"input_ids": [64]}', "input_ids must lie in 0 to 63"),
        ('{"input_ids": [-1]}', "input_ids must lie in 0 to 63"),
        ('{"input_ids": [1, 2], "mask": [1]}', "sequence"),
        ('{"mask": [1]}', "input_ids is missing"),
    ],
)
def test_bad_inputs(text: str, message: str, directory: Path, zoo: Zoo) -> None:
    zoo("run", directory, text).failed(3, message)


def test_other_graphs() -> None:
    """The task reads one graph without a past."""

    class Context:
        path = Path("m")

        def __init__(self, *graphs: library.Graph) -> None:
            self.graphs = graphs

    one = library.Graph(inputs=(library.token_ids("ids", 9),), outputs=(library.floats("y", "batch"),))
    past = library.causal_graph(vocab_size=9, num_layers=1, num_kv_heads=1, head_dim=4)
    rows = library.Graph(inputs=one.inputs, outputs=one.outputs, rows=("batch", "texts"))
    for context in (Context(one, one), Context(past), Context(rows)):
        with pytest.raises(library.UsageError, match="reads models of one graph"):
            Tensors(context, None)  # type: ignore[arg-type]
