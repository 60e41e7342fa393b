"""Locations of a browser and of the npm package onnxruntime-web."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from zoo import memo
from zoo.errors import UsageError, argument

__all__ = ["BROWSER", "PACKAGE", "WEB_RUNTIMES", "Package", "WebRuntime", "find_browser", "find_package"]

WebRuntime = Literal["web-wasm", "web-webgpu"]
WEB_RUNTIMES: tuple[WebRuntime, ...] = get_args(WebRuntime)

BROWSER = "ZOO_BROWSER"
"""Environment variable with the executable of a browser based on Chromium."""
PACKAGE = "ZOO_ONNXRUNTIME_WEB"
"""Environment variable with the folder of the npm package onnxruntime-web."""
_EXECUTABLES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome", "msedge")
_NAME = "onnxruntime-web"
_MODULES: dict[WebRuntime, str] = {"web-wasm": "ort.wasm.min.mjs", "web-webgpu": "ort.webgpu.min.mjs"}


@dataclass(frozen=True, slots=True)
class Package:
    """The npm package onnxruntime-web."""

    folder: Path
    """The folder of its scripts and WebAssembly modules."""
    module: str
    """The name of the ES module for a runtime."""
    version: str


def find_browser(runtime: str) -> Path:
    """Return the executable of the browser that ``ZOO_BROWSER`` names, or else of the first on the path.

    Raises :class:`UsageError` if there is none.
    """
    chosen = os.environ.get(BROWSER)
    found = (shutil.which(name) for name in ([chosen] if chosen else _EXECUTABLES))
    path = next(filter(None, found), None)
    if path is None:
        what = f"{BROWSER}={chosen} is not an executable" if chosen else "there is no browser based on Chromium"
        remedy = f"install Chromium, or set {BROWSER} to the executable of Chrome or Edge"
        raise UsageError(what, argument("runtime", runtime), remedy)
    return Path(path)


def find_package(runtime: WebRuntime) -> Package:
    """Return the package in the folder that ``ZOO_ONNXRUNTIME_WEB`` names, or else the first that is found.

    It is looked for in the ``node_modules`` of the working directory, of its parents, and of zoo's cache.

    Raises :class:`UsageError` if there is none, or if it has no module for the runtime.
    """
    chosen, cache, here = os.environ.get(PACKAGE), memo.directory(), Path.cwd()
    parents = [here, *here.parents, *([cache] if cache is not None else [])]
    places = [Path(chosen)] if chosen else [parent / "node_modules" / _NAME for parent in parents]
    for place in places:
        version = _version(place)
        if version is not None:
            if not (place / "dist" / _MODULES[runtime]).is_file():
                raise UsageError(f"{_NAME} {version} has no {_MODULES[runtime]}", place, f"npm install {_NAME}@latest")
            return Package((place / "dist").resolve(), _MODULES[runtime], version)
    what = f"{PACKAGE}={chosen} is not the folder of {_NAME}" if chosen else f"{_NAME} is not installed"
    raise UsageError(what, argument("runtime", runtime), f"npm install {_NAME}, or set {PACKAGE} to its folder")


def _version(place: Path) -> str | None:
    """Return the version of a package that has this name, or None."""
    try:
        facts = json.loads((place / "package.json").read_text(encoding="utf-8"))
        return str(facts["version"]) if facts["name"] == _NAME else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
