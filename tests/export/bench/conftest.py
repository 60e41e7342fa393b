"""Exports for tests of measurements."""

from __future__ import annotations

from tests.exported import signed_export

__all__ = ["signed_export"]
