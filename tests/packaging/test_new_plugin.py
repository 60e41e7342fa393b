"""A new plugin is created, installed, tested and exported in an environment with only the wheel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.mark.slow
def test_new_plugin_works_without_edits(run, tmp_path: Path) -> None:
    made = json.loads(run("zoo", "plugins", "new", "rwkv-ish", "--json").stdout)
    assert all((tmp_path / "rwkv-ish" / file).is_file() for file in made["files"])
    run("pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation", "./rwkv-ish")
    plugins = json.loads(run("zoo", "plugins", "list", "--json").stdout)["plugins"]
    found = next(plugin for plugin in plugins if plugin["name"] == "rwkv-ish")
    assert (found["distribution"], found["version"], found["status"]) == ("zoo-rwkv-ish", "0.1.0", "ok")
    passed = run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "rwkv-ish").stdout
    assert " passed" in passed
    run("zoo", "plugins", "check", "rwkv-ish")
    run("zoo", "export", "rwkv-ish-tiny", "--onnx")
    assert json.loads(run("zoo", "verify", "rwkv-ish-tiny", "--json").stdout)["verified"] is True
    results = json.loads(run("zoo", "run", "rwkv-ish-tiny", "abc", "--max-new-tokens", "4", "--json").stdout)
    assert len(results["results"][0]["generated_ids"]) == 4
