"""Exported models and a browser, for tests of attention pages."""

from __future__ import annotations

from tests.browser import browser
from tests.exported import exported_build, one_thread, showing

__all__ = ["browser", "exported_build", "one_thread", "showing"]
