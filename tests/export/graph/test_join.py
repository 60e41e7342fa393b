"""Joined products: the same results, and the comparison's view of their weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from zoo.artifact import ModelDirectory
from zoo.artifact.weights import SINGLE, read_layout
from zoo.errors import ArtifactError, ParityError
from zoo_export.graph.join import PARTS_KEY, join, parts_of, separate, span
from zoo_export.graph.links import referenced_tensors
from zoo_export.parity.compare import compare
from zoo_export.trace.make import Options, make_graphs, unlinked_graphs

Exported = Callable[..., Path]
Zoo = Callable[..., Any]
Change = Callable[[onnx.ModelProto], None]

CPU = Options(profile="cpu")
QKV = ("query", "key", "value")


def joined(model: onnx.ModelProto) -> dict[str, list[str]]:
    """Return the parts of each joined initialiser, without the names of the blocks."""
    found = {tensor.name: parts_of(tensor) for tensor in model.graph.initializer}
    return {name: [part for part, _ in parts] for name, parts in found.items() if parts}


def parsed(folder: Path) -> onnx.ModelProto:
    (graph,) = make_graphs(ModelDirectory.open(folder), CPU).values()
    return onnx.load_model_from_string(graph)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("name", "changes", "wanted"),
    [
        ("gpt-tiny", (), [[f"attention.{part}.{leaf}" for part in QKV] for leaf in ("weight", "bias")]),
        ("llama-tiny", ("num_heads=4", "num_kv_heads=2"),
         [[f"attention.{part}.weight" for part in QKV], ["mlp.gate.weight", "mlp.up.weight"]]),
        pytest.param("bert-tiny", (), [[f"attention.{part}.{leaf}" for part in QKV] for leaf in ("weight", "bias")],
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_siblings_are_joined(
    exported_build: Exported, name: str, changes: tuple[str, ...], wanted: list[list[str]]
) -> None:
    folder = exported_build(name, *changes)
    model, layout = parsed(folder), read_layout(folder)
    found = joined(model)
    layers = ModelDirectory.open(folder).spec.config.num_layers
    assert sorted(found.values()) == sorted([f"blocks.{n}.{part}" for part in parts] for n in range(layers)
                                            for parts in wanted)  # fmt: skip
    places = {tensor.name: {entry.key: entry.value for entry in tensor.external_data}
              for tensor in model.graph.initializer if tensor.name in found}  # fmt: skip
    for whole, parts in found.items():
        read = [layout[part].read(folder) for part in parts]
        start = int(places[whole]["offset"])
        data = (folder / places[whole]["location"]).read_bytes()[start : start + int(places[whole]["length"])]
        assert data == b"".join(read)


@pytest.mark.parametrize("name", ["gpt-tiny", pytest.param("llama-tiny", marks=pytest.mark.slow)])
def test_separate_restores_the_products(exported_build: Exported, name: str) -> None:
    """For a layout in which nothing is adjacent. The nodes are the same but for their names and places."""
    stored = ModelDirectory.open(exported_build(name))
    (plain,) = unlinked_graphs(stored.spec, stored.dtype, CPU).values()
    apart = dict(sorted(stored.layout.items()))
    model = onnx.load_model_from_string(plain)
    join(model, stored.layout)
    assert joined(model)
    separate(model, stored.layout)
    assert joined(model)
    shifted = {
        place: type(tensor)(tensor.file, tensor.dtype, tensor.shape, tensor.offset + 8 * number, tensor.length)
        for number, (place, tensor) in enumerate(apart.items())
    }
    separate(model, shifted)

    def nodes(graph: onnx.GraphProto) -> list[object]:
        return sorted((n.op_type, *n.input, *n.output, *sorted(map(str, n.attribute))) for n in graph.node)

    wanted = onnx.load_model_from_string(plain)
    assert nodes(model.graph) == nodes(wanted.graph)
    assert {t.name: list(t.dims) for t in model.graph.initializer} == {
        t.name: list(t.dims) for t in wanted.graph.initializer
    }


def first(model: onnx.ModelProto) -> tuple[onnx.TensorProto, onnx.TensorProto, onnx.NodeProto]:
    """Return the first joined weight and bias, and the node that divides their product."""
    weight, bias = (item for item in model.graph.initializer if item.name.startswith("blocks.0") and parts_of(item))
    (product,) = (node for node in model.graph.node if weight.name in node.input)
    (split,) = (node for node in model.graph.node if product.output[0] in node.input)
    return weight, bias, split


def swap(one: int, other: int) -> Change:
    def change(model: onnx.ModelProto) -> None:
        split = first(model)[2]
        names = list(split.output)
        names[one], names[other] = names[other], names[one]
        split.output[:] = names

    return change


def move(which: int, amount: int) -> Change:
    """Let the joined weight (0) or bias (1) begin a number of bytes later."""

    def change(model: onnx.ModelProto) -> None:
        tensor = first(model)[which]
        (offset,) = (entry for entry in tensor.external_data if entry.key == "offset")
        offset.value = str(int(offset.value) + amount)

    return change


def store(which: int) -> Change:
    """Store the joined weight or bias in the graph."""

    def change(model: onnx.ModelProto) -> None:
        tensor = first(model)[which]
        place = {entry.key: entry.value for entry in tensor.external_data}
        start = int(place["offset"])
        data = Path(FOLDERS[-1], place["location"]).read_bytes()[start : start + int(place["length"])]
        del tensor.external_data[:]
        tensor.data_location = onnx.TensorProto.DEFAULT
        tensor.raw_data = data

    return change


FOLDERS: list[Path] = []
"""The model directory under test."""
ROW = 64 * 4


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(move(0, 64 * ROW), id="the weights of key, value and output"),
        pytest.param(swap(1, 2), id="key and value swapped"),
        pytest.param(store(0), id="weights in the graph"),
        pytest.param(swap(0, 1), id="query and key swapped"),
        pytest.param(move(0, ROW), id="a row later"),
        pytest.param(move(0, -ROW), id="a row earlier"),
        pytest.param(move(1, ROW), id="the biases of key, value and output"),
        pytest.param(store(1), id="biases in the graph"),
    ],
)
def test_wrong_parts_are_refused(exported_build: Exported, change: Change) -> None:
    folder = exported_build("gpt-tiny", noise=True, gain=4.0)
    FOLDERS.append(folder)
    stored, model = ModelDirectory.open(folder), parsed(folder)
    change(model)
    try:
        report = compare(stored, {"model": model.SerializeToString()})
    except ParityError as error:
        assert "points at no tensor" in str(error)
    else:
        assert not report.passed


@pytest.mark.slow
def test_joined_weights_are_compared_and_perturbed(exported_build: Exported) -> None:
    stored = ModelDirectory.open(exported_build("gpt-tiny", noise=True, gain=4.0))
    graphs = make_graphs(stored, CPU)
    assert referenced_tensors(graphs.values(), stored.layout) == set(stored.layout)
    report = compare(stored, graphs)
    assert report.failures == []
    assert report.evidence["unused_tensors"] == []


def list_parts(which: int, change: Callable[[list[Any]], object]) -> Change:
    """Change the list of parts of the first joined weight (0) or bias (1)."""

    def apply(model: onnx.ModelProto) -> None:
        tensor = first(model)[which]
        (entry,) = (entry for entry in tensor.metadata_props if entry.key == PARTS_KEY)
        parts = json.loads(entry.value)
        change(parts)
        entry.value = json.dumps(parts)

    return apply


FIT = "do not fit the nodes that read it"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(list_parts(0, list.pop), FIT, id="fewer weights"),
        pytest.param(list_parts(1, list.pop), FIT, id="fewer biases"),
        pytest.param(list_parts(1, list.clear), FIT, id="a bias of no parts"),
        pytest.param(list_parts(0, lambda parts: parts.append(["more", 1])), FIT, id="more weights"),
        pytest.param(lambda model: first(model)[2].output.pop(), FIT, id="fewer outputs"),
        pytest.param(lambda model: first(model)[2].input.pop(), FIT, id="no sizes"),
        pytest.param(lambda model: setattr(first(model)[2], "op_type", "Identity"), FIT, id="not divided"),
        pytest.param(lambda model: model.graph.node.remove(first(model)[2]), FIT, id="not read"),
        pytest.param(lambda model: model.graph.node.append(first(model)[2]), FIT, id="divided twice"),
        pytest.param(list_parts(0, lambda parts: parts[0].__setitem__(1, 2**70)), PARTS_KEY, id="too many rows"),
        pytest.param(list_parts(0, lambda parts: parts[0].__setitem__(1, -1)), PARTS_KEY, id="negative rows"),
        pytest.param(list_parts(0, lambda parts: parts[0].__setitem__(1, "64")), PARTS_KEY, id="rows as a text"),
        pytest.param(list_parts(0, lambda parts: parts[0].__setitem__(0, None)), PARTS_KEY, id="no name"),
    ],
)
def test_parts_of_another_graph_are_refused(exported_build: Exported, change: Change, message: str) -> None:
    """They are separated only where the weights lie in another order."""
    stored = ModelDirectory.open(exported_build("gpt-tiny"))
    model = parsed(stored.path)
    change(model)
    apart = {
        name: replace(tensor, offset=tensor.offset + 8 * number)
        for number, (name, tensor) in enumerate(stored.layout.items())
    }
    with pytest.raises(ArtifactError, match=message):
        separate(model, apart)


@pytest.mark.slow
def test_weights_in_another_order_separate_the_products(exported_build: Exported, zoo: Zoo) -> None:
    folder = exported_build("gpt-tiny", noise=True)
    assert zoo("export", folder, "--onnx", "--profile", "cpu", "--graph-only").status == 0
    assert joined(onnx.load(folder / "model.cpu.onnx", load_external_data=False))
    with safe_open(folder / SINGLE, framework="pt") as reader:
        metadata = reader.metadata()
    save_file(load_file(folder / SINGLE), folder / SINGLE, metadata)
    assert zoo("relink", folder).status == 0
    assert not joined(onnx.load(folder / "model.cpu.onnx", load_external_data=False))
    assert zoo("verify", folder, "--variant", "cpu").status == 0


def test_link_joins_nothing_of_other_shapes(exported_build: Exported) -> None:
    """A layout whose parts have other numbers of rows, though they follow one another, does not fit."""
    stored = ModelDirectory.open(exported_build("gpt-tiny"))
    parts = [(f"blocks.0.attention.{part}.weight", rows) for part, rows in zip(QKV, (63, 65, 64), strict=True)]
    assert span(parts, stored.layout) is None
    assert span([(name, 64) for name, _ in parts], stored.layout) is not None
    assert span([(name, 64) for name, _ in reversed(parts)], stored.layout) is None
