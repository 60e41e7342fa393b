"""A browser for tests: Debian's chromium, driven by playwright. Tests are skipped where one of them is missing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from zoo.errors import UsageError
from zoo_export.web.browser import FLAGS
from zoo_export.web.install import PACKAGE, find_browser, find_package

__all__ = ["ARGUMENTS", "browser", "onnxruntime_web"]

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


@pytest.fixture(scope="session")
def onnxruntime_web() -> Iterator[Path]:
    """Let tests find onnxruntime-web in the ``node_modules`` of the repository, or where the environment says."""
    pytest.importorskip("playwright.sync_api", reason="tests in a browser need playwright: pip install -e .[test]")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(__file__).parents[1])
        try:
            find_browser("web-wasm")
            folder = find_package("web-wasm").folder.parent
        except UsageError as error:
            pytest.skip(f"tests in a browser need Chromium and onnxruntime-web ({error})")
        patch.undo()
        patch.setenv(PACKAGE, str(folder))
        yield folder
