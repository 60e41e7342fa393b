"""The wheel works outside the checkout."""

from __future__ import annotations

import json
import tomllib
import zipfile
from pathlib import Path

from tests.packaging.conftest import ROOT
from zoo import scaffold


def test_top_level_is_three_packages(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert top == {"zoo", "zoo_export", "zoo_plugins"}
    for package in top:
        assert f"{package}/py.typed" in names
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_template_travels_in_the_wheel(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("zoo/template/")}
    assert names == {f"zoo/template/{file}" for file in scaffold.FILES}


def test_registry_travels_in_the_wheel(run, environment: Path) -> None:
    listed = json.loads(run("zoo", "list", "--json").stdout)
    with (ROOT / "registry.toml").open("rb") as file:
        presets = tomllib.load(file)["models"]
    names = {model["name"] for model in listed["models"]}
    assert set(presets) <= names
    where = run("python", "-c", "from zoo.presets import built_in_presets; print(built_in_presets())").stdout
    assert where.startswith(str(environment))


def test_no_file_of_the_checkout_is_imported(run, environment: Path) -> None:
    code = "import zoo, zoo_export, zoo_plugins; print(zoo.__file__, zoo_export.__file__, zoo_plugins.__file__)"
    for path in run("python", "-c", code).stdout.split():
        assert path.startswith(str(environment))
