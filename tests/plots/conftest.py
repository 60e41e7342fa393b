"""Exported models for tests of plots."""

from __future__ import annotations

from tests.exported import exported_build, exported_copy, exported_model, once, one_thread, signed_showing

__all__ = ["exported_build", "exported_copy", "exported_model", "once", "one_thread", "signed_showing"]
