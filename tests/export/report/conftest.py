"""A browser for tests of reports."""

from __future__ import annotations

from tests.browser import browser

__all__ = ["browser"]
