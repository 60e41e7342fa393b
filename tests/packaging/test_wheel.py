"""The wheel works outside the checkout."""

from __future__ import annotations

import json
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT
from zoo.plugins import scaffold

pytestmark = pytest.mark.slow


def test_top_level_is_four_packages(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert top == {"zoo", "zoo_export", "zoo_plugins", "zoo_runtime"}
    for package in top:
        assert f"{package}/py.typed" in names
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_wheel_contains_the_template(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("zoo/plugins/template/")}
    assert names == {f"zoo/plugins/template/{file}" for file in scaffold.FILES}


def test_wheel_contains_the_registry(run, environment: Path) -> None:
    listed = json.loads(run("zoo", "list", "--json").stdout)
    with (ROOT / "registry.toml").open("rb") as file:
        presets = tomllib.load(file)["models"]
    names = {model["name"] for model in listed["models"]}
    assert set(presets) <= names
    where = run("python", "-c", "from zoo.plugins.presets import built_in_presets; print(built_in_presets())").stdout
    assert where.startswith(str(environment))


def test_checkout_is_not_imported(run, environment: Path) -> None:
    names = ("zoo", "zoo_export", "zoo_plugins", "zoo_runtime")
    code = f"import sys, {', '.join(names)}; print(*(sys.modules[name].__file__ for name in {names}))"
    for path in run("python", "-c", code).stdout.split():
        assert path.startswith(str(environment))
