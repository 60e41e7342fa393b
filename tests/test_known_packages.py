"""What nobody provides, a known package may: then the remedy is its name."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from zoo import isolation
from zoo.loading import CONTRIBUTIONS
from zoo.presets import built_in_presets, user_presets

THIRD_PARTY = Path(__file__).parent / "third_party"
KNOWN = tomllib.loads(built_in_presets().read_text(encoding="utf-8"))["packages"]


@pytest.mark.parametrize("package", KNOWN)
def test_a_known_package_provides_what_is_said_of_it(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It exists, its name is right, and each name is one of its plugins' contributions or presets."""
    folder = THIRD_PARTY / package
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == package
    assert f"tests/third_party/{package}" in KNOWN[package]["install"]
    monkeypatch.syspath_prepend(folder)
    jobs = {
        name: {"name": name, "module": module, "distribution": package, "version": project["version"]}
        for name, module in project["entry-points"]["zoo.plugins"].items()
    }
    provided: set[str] = set()
    for outcome in isolation.run("zoo.loading:report", jobs, seconds=60):
        assert outcome.failure is None
        assert outcome.value["status"] == "ok", outcome.value["reason"]
        provided |= {item["name"] for kind in CONTRIBUTIONS for item in outcome.value[kind]}
        provided |= set(outcome.value["presets"])
    assert provided >= set(KNOWN[package]["provides"]) > set()
    assert sys.path[0] == str(folder)


def test_every_example_is_known() -> None:
    """Those that add something to the zoo; one that is kept as it was written long ago does not."""
    assert set(KNOWN) == {path.name for path in THIRD_PARTY.iterdir() if path.is_dir()} - {"zoo-api1"}


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["show", "acme-tiny"], 2),
        (["build", "acme-tiny"], 2),
        (["show", "mine"], 5),
        (["import", ".", "--kind", "acme-1"], 2),
        (["export", "gpt-tiny", "--format", "acme-2"], 2),
        (["acme-3"], 2),
    ],
)
def test_whatever_is_missing_the_package_is_named(arguments: list[str], status: int, zoo) -> None:
    """An architecture, a model, a layout of checkpoints, a format, a command: from the user's own table too."""
    Path("config.json").write_text("{}")
    user_presets().parent.mkdir(parents=True)
    user_presets().write_text(
        'schema = 1\n[models.mine]\narch = "acme"\n[packages.zoo-acme]\n'
        'provides = ["acme", "acme-tiny", "acme-1", "acme-2", "acme-3"]\ninstall = "pip install zoo-acme"\n'
    )
    zoo(*arguments).failed(status, "zoo-acme provides it: pip install zoo-acme")


@pytest.mark.parametrize(
    "table",
    [
        'provides = "acme"\ninstall = "x"',
        "provides = []",
        'install = "x"',
        'provides = []\ninstall = "x"\nurl = "y"',
        "",
    ],
)
def test_a_damaged_table_is_named(table: str, zoo) -> None:
    user_presets().parent.mkdir(parents=True)
    user_presets().write_text(f"schema = 1\n[packages.zoo-acme]\n{table}\n")
    zoo("show", "acme-tiny").failed(2, "registry.toml [packages.zoo-acme]", "provides, a list of names, and install")
