"""Graphs with fixed dimensions are compared and run at this size only."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from tests.conftest import Result
from zoo.errors import UsageError
from zoo_export.trace.make import Options

Exported = Callable[..., Path]
Zoo = Callable[..., Result]


def shapes(path: Path) -> dict[str, list[Any]]:
    """The dimensions of each input and output, by name."""
    graph = onnx.load(path, load_external_data=False).graph
    return {
        value.name: [dim.dim_value or dim.dim_param for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }


@pytest.mark.slow
def test_encoder_of_one_size(exported_build: Exported, zoo: Zoo) -> None:
    folder = exported_build("bert-tiny", noise=True)
    result = zoo("export", folder, "--onnx", "--fix", "batch=1", "--fix", "sequence=16", "--json")
    assert (result.status, result.err) == (0, "")
    assert shapes(folder / "model.onnx")["input_ids"] == [1, 16]
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    assert "Shape" not in {node.op_type for node in model.graph.node}
    evidence = json.loads((folder / "parity.json").read_text())
    assert evidence["options"]["fix"] == ["batch=1", "sequence=16"]
    assert {(point["batch"], point["length"]) for point in evidence["grid"]["points"]} == {(1, 16)}
    assert zoo("verify", folder, "--retrace").status == 0
    sixteen, four = (",".join(map(str, range(count))) for count in (16, 4))
    assert zoo("run", folder, "--ids", sixteen, "--ids", sixteen).status == 0
    zoo("run", folder, "--ids", four).failed(
        2, "input_ids has size 4 in a dimension that the export fixes at 16", "--fix"
    )


@pytest.mark.slow
def test_decoder_of_one_row(exported_build: Exported, zoo: Zoo, tmp_path: Path) -> None:
    folder = exported_build("gpt-tiny", noise=True, gain=4.0)
    assert zoo("export", folder, "--onnx").status == 0
    texts = ("time", "flies like")
    wanted = zoo("run", folder, *texts, "--max-new-tokens", 4, "--json").json["results"]
    result = zoo("export", folder, "--onnx", "--fix", "batch=1", "--force")
    assert (result.status, result.err) == (0, "")
    found = shapes(folder / "model.onnx")
    assert found["input_ids"] == [1, "sequence"]
    assert found["present.0.key"][:3] == [1, 4, "past_sequence + sequence"]
    assert zoo("run", folder, *texts, "--max-new-tokens", 4, "--json").json["results"] == wanted
    for options in (("--batch-size", 2), ("--num-beams", 2)):
        zoo("run", folder, texts[0], texts[0], *options).failed(2, "input_ids has size 2", "fixes at 1")
    for options in ((), ("--runtime", "reference")):
        assert zoo("verify", folder, *options).status == 0
    assert zoo("diff", folder).status == 0
    assert zoo("publish", folder, tmp_path / "copy", "--layout", "standalone").status == 0
    zoo("export", folder, "--onnx", "--generate").failed(2, "without fixed dimensions", "--fix")


@pytest.mark.slow
@pytest.mark.parametrize("opset", [18, 24])
def test_older_and_newer_opsets(exported_build: Exported, zoo: Zoo, opset: int) -> None:
    folder = exported_build("vit-tiny")
    assert zoo("export", folder, "--onnx", "--opset", opset, "--fix", "batch=3").status == 0
    assert shapes(folder / "model.onnx")["logits"][0] == 3
    assert {item.version for item in onnx.load(folder / "model.onnx", load_external_data=False).opset_import} == {opset}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--fix", "batch"), "'batch' is not NAME=SIZE: --fix"),
        (("--fix", "batch=-1"), "'batch=-1' is not NAME=SIZE: --fix"),
        (("--fix", "batch=0"), "the size of batch must be positive, got 0"),
        (("--fix", "batch=1", "--fix", "batch=2"), "batch is fixed twice"),
        (("--fix", "bach=1"), "gpt-tiny has no free dimension 'bach': --fix: did you mean 'batch'?"),
        (("--fix", "sequence=1"), "sequence cannot be fixed"),
        (("--fix", "batch=1", "--profile", "cpu"), "graphs of this profile cannot have fixed dimensions"),
        (("--fix", "batch=1", "--generate"), "without fixed dimensions"),
    ],
)
def test_refusals(built: Exported, zoo: Zoo, tmp_path: Path, options: tuple[str, ...], reason: str) -> None:
    folder = shutil.copytree(built("gpt-tiny"), tmp_path / "gpt-tiny")
    zoo("export", folder, "--onnx", *options).failed(2, reason)
    assert not (folder / "model.onnx").exists()


def test_size_beyond_the_positions_is_refused(built: Exported, zoo: Zoo) -> None:
    zoo("export", built("bert-tiny"), "--onnx", "--fix", "sequence=999").failed(2, "positions", "--fix sequence=999")


def test_sizes_are_a_mapping_that_evidence_lists() -> None:
    options = Options(fix={"batch": 2, "sequence": 16})
    texts = ["batch=2", "sequence=16"]
    assert options == Options.from_dict({"fix": texts}) == Options.from_dict({"fix": {"batch": 2, "sequence": 16}})
    assert options.facts()["fix"] == options.to_dict()["fix"] == texts
    assert Options.of_export({"options": options.facts()}).fix == options.fix
    assert Options.parse_settings(["fix=[batch=2, 'sequence=16']"]) == {"fix": {"batch": 2, "sequence": 16}}
    with pytest.raises(TypeError):
        options.fix["batch"] = 3  # type: ignore[index]


@pytest.mark.parametrize(
    ("fix", "words"),
    [
        (["batch=1", "batch=2"], "batch is fixed twice"),
        (["batch"], "'batch' is not NAME=SIZE"),
        ({"batch": True}, "fix must be a list of DIM=SIZE"),
        ("batch=1", "fix must be a list of DIM=SIZE"),
        ({"batch": 0}, "the size of batch must be positive, got 0"),
    ],
)
def test_refused_sizes(fix: object, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        Options.from_dict({"fix": fix})
