"""The example in docs/checkpoints.md works unchanged."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zoo as library
from tests.conftest import ROOT
from zoo.artifact import ModelDirectory

PAGE = ROOT / "docs" / "checkpoints.md"


@pytest.mark.slow
def test_plugin_of_the_page_reads_and_writes_its_family(
    install: Callable[..., Path], zoo: Callable[..., Any], tmp_path: Path
) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    install("tiny-bert", code)
    ours, theirs, again = (tmp_path / name for name in ("ours", "theirs", "again"))
    assert zoo("build", "bert-tiny", "-o", ours).status == 0
    result = zoo("publish", ours, theirs, "--layout", "hub", "--model-type", "tiny-bert", "--json")
    assert result.json["comparison"] == {"compared": False, "reason": "transformers 5.23.0 has no TinyBert"}
    hub = json.loads((theirs / "config.json").read_text())
    assert (hub["model_type"], hub["width"], hub["depth"]) == ("tiny-bert", 64, 2)
    tensors, block = load_file(theirs / "model.safetensors"), library.load(ours).blocks[1]
    parts = [part.weight for part in (block.attention.query, block.attention.key, block.attention.value)]
    assert torch.equal(tensors["layers.1.qkv.weight"], torch.cat(parts))
    assert torch.equal(tensors["layers.1.fc1.weight"], block.mlp.up.weight.T)
    assert zoo("import", theirs, "-o", again).status == 0
    first, second = (ModelDirectory.open(path) for path in (ours, again))
    assert first.weight_digests() == second.weight_digests()


def test_page_lists_every_family_of_the_benchmark() -> None:
    source = (ROOT / "benchmarks" / "checkpoints.py").read_text(encoding="utf-8")
    families = re.findall(r'^    "([^"]+)": Family\(', source, re.MULTILINE)
    assert len(families) > 15
    rows = re.findall(r"^\| ([^|]+?) \| `", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == families
