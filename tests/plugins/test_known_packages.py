"""A missing architecture, model or format that a known package provides is reported with that package's name."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from zoo.plugins.presets import built_in_presets, user_presets


def test_the_built_in_registry_names_no_packages() -> None:
    """The table is part of the wheel, and no package for it has been published yet."""
    assert "packages" not in tomllib.loads(built_in_presets().read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["show", "acme-tiny"], 2),
        (["build", "acme-tiny"], 2),
        (["show", "mine"], 5),
        (["import", ".", "--model-type", "acme-1"], 2),
        (["export", "gpt-tiny", "--format", "acme-2"], 2),
        (["acme-3"], 2),
    ],
)
def test_known_package_is_suggested_for_missing_names(arguments: list[str], status: int, zoo) -> None:
    """Architectures, models, checkpoint layouts, formats and commands, also from the user's own table."""
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
def test_damaged_table_is_reported(table: str, zoo) -> None:
    user_presets().parent.mkdir(parents=True)
    user_presets().write_text(f"schema = 1\n[packages.zoo-acme]\n{table}\n")
    zoo("show", "acme-tiny").failed(2, "registry.toml [packages.zoo-acme]", "provides, a list of names, and install")
