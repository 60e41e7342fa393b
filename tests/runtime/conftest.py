"""Exported models for tests of the runtime."""

from __future__ import annotations

from tests.exported import (
    exported_build,
    exported_copy,
    exported_model,
    exported_with,
    one_thread,
    redeclared,
)

__all__ = ["exported_build", "exported_copy", "exported_model", "exported_with", "one_thread", "redeclared"]
