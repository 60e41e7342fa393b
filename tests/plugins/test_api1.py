"""A plugin written for version 1 of the contract keeps working with later versions of zoo."""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import zoo as library
from tests.conftest import THIRD_PARTY
from zoo import plugins
from zoo.hookspecs import OLDEST_API

DISTRIBUTION = THIRD_PARTY / "zoo-api1"
DIGEST = "d62aab5d48f8b48bd432b9c4029627bc9caf56a01b78163cb0cf80bb10c173a3"
"""SHA-256 of its files. Do not change them, since they stand for plugins written long ago: add another package."""


@pytest.fixture(autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put the plugin's distribution on the path, as in an editable installation."""
    info = tmp_path_factory.mktemp("site") / "zoo_api1-1.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: zoo-api1\nVersion: 1.0.0\n")
    (info / "entry_points.txt").write_text("[zoo.plugins]\napi1 = zoo_api1\n")
    monkeypatch.syspath_prepend(info.parent)
    monkeypatch.syspath_prepend(DISTRIBUTION)
    importlib.invalidate_caches()
    plugins.select(plugins.Selection())
    yield
    for name in [name for name in sys.modules if name.startswith("zoo_api1")]:
        del sys.modules[name]


def test_frozen_plugin_is_unchanged() -> None:
    files = sorted(path for path in DISTRIBUTION.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(DISTRIBUTION)}\n".encode() + path.read_bytes())
    assert digest.hexdigest() == DIGEST


def test_api_version_1_is_supported() -> None:
    """Before version 1 is dropped, a release must warn; this package is then removed (see docs, compatibility)."""
    assert OLDEST_API == 1


def test_frozen_plugin_loads_without_warnings(zoo) -> None:
    listed = zoo("plugins", "list", "--json")
    assert listed.err == ""
    (found,) = (row for row in listed.json["plugins"] if row["name"] == "api1")
    assert (found["status"], found["reason"], found["complaints"]) == ("ok", None, [])
    assert found["provides"] == {
        "architectures": ["api1"],
        "presets": ["api1-features", "api1-tiny"],
        "importers": ["api1-checkpoint"],
        "exporters": ["api1-text"],
        "tasks": ["api1-length"],
        "objectives": [],
        "datasets": [],
        "trackers": [],
        "engines": [],
        "commands": ["api1-greet"],
    }


@pytest.mark.slow
def test_every_contribution_works(zoo) -> None:
    """Build, load, export, verify, run; its task, format, checkpoints in both directions, and command."""
    shown = zoo("show", "api1-tiny", "--json").json
    assert zoo("api1-greet", "api1-tiny").out == f"hello, api1-tiny of {shown['parameters']:,} parameters\n"
    exported = zoo("export", "api1-tiny", "--onnx")
    assert exported.status == 0, exported.err
    assert "verified" in exported.out
    assert zoo("verify", "api1-tiny").status == 0
    assert zoo("run", "api1-tiny", "hello", "--max-new-tokens", "3").status == 0
    ran = zoo("run", "api1-tiny", "hello", "--task", "api1-length", "--json")
    assert ran.json["results"][0]["tokens"] == 5, ran.out
    said = zoo("export", "api1-tiny", "--format", "api1-text", "--option", "greeting=servus")
    assert (said.status, "NOT VERIFIED" in said.err) == (0, True)
    assert Path("api1-tiny/api1.txt").read_text() == "servus, api1-tiny: model in float32\n"
    assert zoo("publish", "api1-tiny", "theirs", "--layout", "hub").status == 0
    assert json.loads(Path("theirs/config.json").read_text())["model_type"] == "api1-checkpoint"
    imported = zoo("import", "theirs", "-o", "again", "--no-verify")
    assert imported.status == 0, imported.err
    mine, again = (library.load(name).state_dict() for name in ("api1-tiny", "again"))
    assert mine.keys() == again.keys()
    assert all(torch.equal(mine[name], again[name]) for name in mine)
    assert zoo("build", "api1-features").status == 0
    assert library.load("api1-features")(torch.tensor([[1, 2, 3]])).shape == (1, 3, 16)
