"""A browser for tests: Debian's chromium, driven by playwright. Tests are skipped where one of them is missing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from zoo_export.web.browser import FLAGS

__all__ = ["ARGUMENTS", "browser"]

ARGUMENTS = (*FLAGS, "--disable-gpu")
"""Arguments with which the browser makes no request of its own."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start the browser, headless. A module's tests share it; each opens a context of its own."""
    reason = "tests of pages need playwright: pip install -e .[test]"
    sync_api = pytest.importorskip("playwright.sync_api", reason=reason)
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("tests of pages need a browser: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, headless=True, args=list(ARGUMENTS))
        yield opened
        opened.close()
