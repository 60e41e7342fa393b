"""The reference page of parity.json names every field that exports write."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

NAMED = {
    "adapters", "answers", "coverage", "files", "graphs", "kept_float32", "laws", "outputs", "past_bytes", "placement",
    "versions", "weights",
}  # fmt: skip
"""Fields whose content has names of the model, of its files or of the installation as keys."""


def fields(content: Any, above: str = "") -> Iterator[str]:
    """Yield the names of the fields of some evidence."""
    if isinstance(content, dict):
        for name, value in content.items():
            if above not in NAMED:
                yield name
            yield from fields(value, "" if above in NAMED and isinstance(value, dict) else name)
    elif isinstance(content, list):
        for value in content:
            yield from fields(value, above)


@pytest.mark.slow
def test_every_field_is_explained(zoo) -> None:
    assert zoo("build", "gpt-tiny", "--set", "num_layers=1", "-o", "tiny").status == 0
    for command in (("export", "tiny", "--onnx"), ("export", "tiny", "--onnx", "--generate"),
                    ("export", "tiny", "--onnx", "--profile", "serving"), ("quantize", "tiny", "--dtype", "int8"),
                    ("quantize", "tiny", "--dtype", "float16"), ("quantize", "tiny", "--cache", "int8")):  # fmt: skip
        done = zoo(*command)
        assert done.status == 0, done.err
    explained = set(re.findall(r"[\w-]+", (ROOT / "docs/reference/parity.md").read_text()))
    evidence = sorted(Path("tiny").glob("parity*.json"))
    assert len(evidence) == 6
    missing = {name for path in evidence for name in fields(json.loads(path.read_text()))} - explained
    assert missing == set()
