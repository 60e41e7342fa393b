"""Missing parts of a browser runtime are one line each, and exit status 2; packages are found in node_modules."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zoo.errors import UsageError
from zoo_export.web.install import BROWSER, PACKAGE, find_browser, find_package

Exported = Callable[..., Path]
Zoo = Callable[..., Any]
MODULE = "ort.wasm.min.mjs"


def install(folder: Path, name: str = "onnxruntime-web", *modules: str, version: str = "1.30.0") -> Path:
    """Write the files of an npm package that are looked at."""
    package = folder / name
    (package / "dist").mkdir(parents=True)
    (package / "package.json").write_text(json.dumps({"name": name, "version": version}))
    for module in modules:
        (package / "dist" / module).touch()
    return package


@pytest.fixture
def verify(exported_model: Exported, zoo: Zoo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], Any]:
    """Verify an export where the browser and onnxruntime-web seem to be installed."""
    monkeypatch.setenv(BROWSER, sys.executable)
    monkeypatch.setenv(PACKAGE, str(install(tmp_path, "onnxruntime-web", MODULE)))
    folder = exported_model("bert-tiny")
    return lambda: zoo("verify", folder, "--runtime", "web-wasm")


def test_missing_driver(verify: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "playwright.sync_api", None)
    verify().failed(2, "playwright is not installed: --runtime web-wasm: pip install attention-zoo[web]")


def test_missing_browser(verify: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(BROWSER, "/no/such/browser")
    verify().failed(2, f"{BROWSER}=/no/such/browser is not an executable: --runtime web-wasm", "install Chromium")
    monkeypatch.delenv(BROWSER)
    monkeypatch.setenv("PATH", str(tmp_path))
    verify().failed(2, "there is no browser based on Chromium", f"set {BROWSER}")


def test_browser_that_does_not_start(verify: Callable[[], Any]) -> None:
    """Python instead of a browser."""
    pytest.importorskip("playwright.sync_api")
    verify().failed(2, f"the browser {sys.executable} does not start")


def test_missing_package(verify: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(PACKAGE, str(tmp_path))
    verify().failed(2, f"{PACKAGE}={tmp_path} is not the folder of onnxruntime-web", "npm install onnxruntime-web")
    monkeypatch.delenv(PACKAGE)
    monkeypatch.chdir("/")
    verify().failed(2, "onnxruntime-web is not installed: --runtime web-wasm: npm install onnxruntime-web")
    monkeypatch.setenv(PACKAGE, str(install(tmp_path / "old", version="0.9.0")))
    verify().failed(2, f"onnxruntime-web 0.9.0 has no {MODULE}", "npm install onnxruntime-web@latest")


def test_package_is_found_where_npm_installs_it(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the working directory, then in its parents, then in zoo's cache; the environment variable comes first."""
    monkeypatch.delenv(PACKAGE, raising=False)
    inner = tmp_path / "site" / "pages"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    for folder, version in ((tmp_path, "1.1.0"), (tmp_path / "site", "1.2.0"), (inner, "1.3.0")):
        install(folder / "node_modules", "onnxruntime-web", MODULE, version=version)
        found = find_package("web-wasm")
        assert (found.version, found.module) == (version, MODULE)
        assert found.folder == folder / "node_modules" / "onnxruntime-web" / "dist"
    monkeypatch.setenv(PACKAGE, str(install(tmp_path / "chosen", "onnxruntime-web", MODULE, version="1.4.0")))
    assert find_package("web-wasm").version == "1.4.0"
    with pytest.raises(UsageError, match=r"has no ort\.webgpu\.min\.mjs"):
        find_package("web-webgpu")
    monkeypatch.delenv(PACKAGE)
    monkeypatch.chdir("/")
    kept = install(tmp_path / "cache" / "node_modules", "onnxruntime-web", MODULE, version="1.5.0")
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    assert find_package("web-wasm").folder == kept / "dist"


def test_browser_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BROWSER, sys.executable)
    assert find_browser("web-wasm") == Path(sys.executable)
