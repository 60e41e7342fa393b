"""Exported models and a browser, for tests of attention pages."""

from __future__ import annotations

from tests.browser import browser
from tests.exported import exported_build, once, one_thread, signed_showing, verified_showing

__all__ = ["browser", "exported_build", "once", "one_thread", "signed_showing", "verified_showing"]
