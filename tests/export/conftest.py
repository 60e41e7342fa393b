"""Exported models for tests of the exporter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Result
from tests.export.parity.small_plugin import DISTRIBUTION, PLUGIN, PRESETS, source
from tests.exported import (
    exported_build,
    exported_copy,
    exported_model,
    exported_with,
    once,
    one_thread,
    redeclared,
    showing,
    verified_showing,
)

__all__ = [
    "exported_build",
    "exported_copy",
    "exported_model",
    "exported_with",
    "once",
    "one_thread",
    "redeclared",
    "showing",
    "verified_showing",
]


@pytest.fixture
def build_small(install: Callable[..., Path], zoo: Callable[..., Result]) -> Callable[..., None]:
    """Build a preset of the small plugin, with edits of its source, in the folder ``model``."""

    def build(name: str, *edits: tuple[str, str]) -> None:
        install(DISTRIBUTION, PLUGIN, files=source(*edits))
        Path("zoo.toml").write_text(PRESETS)
        assert zoo("build", name, "-o", "model").status == 0

    return build
