"""Evidence in published folders: whoever has only the folder can check each digest that it states of a file there."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest

from tests.conftest import Result
from tests.export.publish.test_web import packages
from zoo.artifact import EVIDENCE_KEY, evidence_digest
from zoo_export.cli.publish import _NAMES

__all__ = ["packages"]

Zoo = Callable[..., Result]
Exported = Callable[..., Path]
WITHOUT = {"hub", "onnx-test"}
"""Layouts without evidence: one has no graph, the other holds what test runners read."""
OPTIONS = {"kserve": ["--storage-uri", "pvc://claim/models"]}
SOURCE = {"source_config", "source_weights", "source_companions", "source_files"}
SHA256 = re.compile(r"[0-9a-f]{64}")


def digests(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of each SHA-256 in evidence."""
    if isinstance(value, str) and SHA256.fullmatch(value):
        yield path
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from digests(item, (*path, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from digests(item, (*path, str(number)))


def of_the_source(evidence: Mapping[str, Any]) -> dict[str, Any]:
    """Return published evidence with the fields of the model directory in their former places."""
    return {key.removeprefix("source_"): value for key, value in evidence.items() if key != "files"}


def check_published(folder: Path, source: Path) -> None:
    found = sorted(path for path in folder.rglob("*.json") if re.match(r"parity|evidence", path.name))
    assert found
    covered = set()
    for path in found:
        evidence = json.loads(path.read_text())
        assert evidence["files"]
        for name, digest in evidence["files"].items():
            file = path.parent / name
            assert hashlib.sha256(file.read_bytes()).hexdigest() == digest
            covered.add(file)
            if name.endswith(".onnx"):
                entries = {item.key: item.value for item in onnx.load(file, load_external_data=False).metadata_props}
                assert entries[EVIDENCE_KEY] == evidence_digest(of_the_source(evidence))
        assert {where[0] for where in digests(evidence)} <= {"files", *SOURCE}
        before = json.loads((source / path.name).read_text())
        assert before["weights"] == evidence["source_weights"]
    assert set(folder.rglob("*.onnx*")) == covered


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("layout", [name for name in _NAMES if name not in WITHOUT])
def test_digests_are_of_the_files_that_lie_there(
    exported_model: Exported, packages: Path, zoo: Zoo, layout: str
) -> None:
    source = exported_model("gpt-tiny")
    result = zoo("publish", source, "out", "--layout", layout, *OPTIONS.get(layout, ()))
    assert result.status == 0, result.err
    check_published(Path("out"), source)


@pytest.mark.slow
@pytest.mark.parametrize("layout", sorted(WITHOUT))
def test_others_have_no_evidence(exported_model: Exported, zoo: Zoo, layout: str) -> None:
    assert zoo("publish", exported_model("gpt-tiny"), "out", "--layout", layout).status == 0
    assert not [path for path in Path("out").rglob("*.json") if re.match(r"parity|evidence", path.name)]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["onnx", "genai", "triton"])
def test_graphs_that_are_made_again_name_their_evidence(exported_copy: Exported, zoo: Zoo, layout: str) -> None:
    from tests.precisions import quantize

    folder = exported_copy("gpt-tiny")
    quantize(folder, "int8")
    variant = [] if layout == "onnx" else ["--variant", "int8"]
    result = zoo("publish", folder, "out", "--layout", layout, *variant)
    assert result.status == 0, result.err
    check_published(Path("out"), folder)
