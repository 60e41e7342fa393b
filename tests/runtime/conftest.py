"""Exported models for tests of the runtime."""

from __future__ import annotations

from tests.exported import (
    exported_build,
    exported_copy,
    exported_with,
    once,
    one_thread,
    redeclared,
    signed_export,
)

__all__ = [
    "exported_build",
    "exported_copy",
    "exported_with",
    "once",
    "one_thread",
    "redeclared",
    "signed_export",
]
