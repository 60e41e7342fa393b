"""``zoo diff``: a table of modules, and the first that diverges."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from tests.exported import inlined
from zoo.errors import ParityError
from zoo.nn import FeedForward
from zoo_export.diff import diff_model
from zoo_plugins.gpt.model import GPTBlock

Exported = Callable[..., Path]
Zoo = Callable[..., Any]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["gpt-tiny", "bert-tiny", "transformer-tiny", "vit-tiny"])
def test_correct_export_has_no_divergence(exported_model: Exported, zoo: Zoo, name: str) -> None:
    result = zoo("diff", exported_model(name), "--json")
    assert result.status == 0, result.err
    for modules in result.json["graphs"].values():
        assert len(modules) > 20
        assert not any(module["diverges"] for module in modules)
        assert all(module["error"] <= 1e-4 * module["scale"] for module in modules)
        paths = [module["path"] for module in modules]
        for path in paths:  # inner modules return before the enclosing ones
            outer = path.rpartition(".")[0]
            assert outer not in paths or paths.index(path) < paths.index(outer)


@pytest.mark.slow
def test_unexported_model_is_traced(exported_build: Exported, zoo: Zoo, snapshot: Callable[[], Any]) -> None:
    assert zoo("build", "gpt-tiny").status == 0
    before = snapshot()
    result = zoo("diff", "gpt-tiny")
    assert (result.status, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0].split() == ["MODEL", "CLASS", "ERROR", "TORCH", "RELATIVE"]
    assert [line.split()[0] for line in lines if "GPTBlock" in line] == ["blocks.0", "blocks.1"]
    assert "blocks.0.attention.query" not in result.out
    assert "blocks.0.attention.query" in zoo("diff", "gpt-tiny", "--all").out
    assert snapshot() == before


def test_an_unknown_variant_is_not_the_plain_export(exported_model: Exported, zoo: Zoo) -> None:
    zoo("diff", exported_model("gpt-tiny"), "--variant", "atentions").failed(3, "not exported for atentions")


def scaled(graph: Any) -> None:
    """Change the attention scale of the second block."""
    (node,) = (n for n in graph.node if n.op_type == "Attention" and n.metadata_props[0].value.startswith("blocks.1"))
    node.attribute.add(name="scale", type=1, f=0.1)


def tanh_dropped(graph: Any) -> None:
    """Replace the approximate GELU of the first block by the exact one."""
    node = next(n for n in graph.node if n.op_type == "Gelu")
    next(item for item in node.attribute if item.name == "approximate").s = b"none"


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("fault", "module", "cls"),
    [(scaled, "blocks.1.attention.output (Linear)", None), (tanh_dropped, "blocks.0.mlp.down (Linear)", FeedForward)],
)
def test_first_diverging_module_is_named(
    exported_copy: Exported, seal: Callable[[Path], None], zoo: Zoo, fault: Any, module: str, cls: Any
) -> None:
    folder = exported_copy("gpt-tiny")
    model = inlined((folder / "model.onnx").read_bytes())
    fault(model.graph)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    seal(folder)
    result = zoo("diff", folder)
    assert result.status == 4
    assert f"graph 'model' diverges from the model in {module}" in result.err
    assert result.out.count("<- begins here") == 1
    assert module.split()[0] in next(line for line in result.out.splitlines() if "begins here" in line)
    if cls is not None:
        assert f"zoo.nn.feed_forward:{inspect.getsourcelines(cls)[1]}" in result.err


def test_graph_that_reads_other_bytes_is_not_compared(
    exported_copy: Exported, seal: Callable[[Path], None], zoo: Zoo
) -> None:
    folder = exported_copy("gpt-tiny")
    model = onnx.load_model_from_string((folder / "model.onnx").read_bytes())
    place = next(entry for entry in model.graph.initializer[0].external_data if entry.key == "offset")
    place.value = str(int(place.value) + 4)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    seal(folder)
    with pytest.raises(ParityError, match="points at no tensor"):
        diff_model(folder)
    zoo("diff", folder).failed(4, "points at no tensor")


def test_source_is_the_line_of_the_class(exported_model: Exported, zoo: Zoo) -> None:
    modules = {item["path"]: item for item in zoo("diff", exported_model("gpt-tiny"), "--json").json["graphs"]["model"]}
    assert modules["blocks.0"]["source"] == f"zoo_plugins.gpt.model:{inspect.getsourcelines(GPTBlock)[1]}"
    assert modules["blocks.0.norm_1"]["source"] == modules["blocks.0"]["source"]


def test_diff_of_a_missing_directory_is_reported(zoo: Zoo) -> None:
    zoo("diff", "nowhere").failed(3, "no such directory", "nowhere")
