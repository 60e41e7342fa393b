"""Exported models for tests of plots."""

from __future__ import annotations

from tests.exported import exported_build, exported_copy, exported_model, one_thread, showing

__all__ = ["exported_build", "exported_copy", "exported_model", "one_thread", "showing"]
