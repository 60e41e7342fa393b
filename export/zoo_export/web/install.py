"""Locations of a browser and of the npm package onnxruntime-web."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from zoo import memo
from zoo.errors import UsageError, argument

__all__ = [
    "BROWSER",
    "PACKAGE",
    "WEB_RUNTIMES",
    "Package",
    "WebRuntime",
    "find_browser",
    "find_package",
    "find_tokenizers",
]

WebRuntime = Literal["web-wasm", "web-webgpu"]
WEB_RUNTIMES: tuple[WebRuntime, ...] = get_args(WebRuntime)

BROWSER = "ZOO_BROWSER"
"""Environment variable with the executable of a browser based on Chromium."""
PACKAGE = "ZOO_ONNXRUNTIME_WEB"
"""Environment variable with the folder of the npm package onnxruntime-web."""
_EXECUTABLES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome", "msedge")
_NAME, _TOKENIZERS = "onnxruntime-web", "@huggingface/tokenizers"
_MODULES: dict[WebRuntime, str] = {"web-wasm": "ort.wasm.min.mjs", "web-webgpu": "ort.webgpu.min.mjs"}
_LOADERS: dict[WebRuntime, str] = {
    "web-wasm": "ort-wasm-simd-threaded", "web-webgpu": "ort-wasm-simd-threaded.asyncify"
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Package:
    """An npm package."""

    folder: Path
    """The folder of its scripts and WebAssembly modules."""
    module: str
    """The name of its ES module, of onnxruntime-web that for a runtime."""
    version: str
    loader: str = ""
    """The name, without suffix, of the script and the WebAssembly module that the ES module loads."""

    @property
    def names(self) -> tuple[str, str, str]:
        """The files of onnxruntime-web that run graphs: the ES module, the script and the WebAssembly module."""
        return self.module, f"{self.loader}.mjs", f"{self.loader}.wasm"

    def provider(self, runtime: WebRuntime) -> str:
        """Return the name of onnxruntime-web on a runtime, as evidence has it."""
        return f"onnxruntime-web {self.version} {runtime.removeprefix('web-')}"

    def digest(self) -> str:
        """Return the SHA-256 of the SHA-256 of these files, as builds of one version differ."""
        digests = (hashlib.sha256((self.folder / name).read_bytes()).digest() for name in self.names)
        return hashlib.sha256(b"".join(digests)).hexdigest()


def find_browser(runtime: str) -> Path:
    """Return the executable of the browser that ``ZOO_BROWSER`` names, or else of the first on the path.

    Raises :class:`UsageError` if there is none.
    """
    chosen = os.environ.get(BROWSER)
    paths = (shutil.which(name) for name in ([chosen] if chosen else _EXECUTABLES))
    path = next(filter(None, paths), None)
    if path is None:
        problem = f"{BROWSER}={chosen} is not an executable" if chosen else "there is no browser based on Chromium"
        remedy = f"install Chromium, or set {BROWSER} to the executable of Chrome or Edge"
        raise UsageError(problem, argument("runtime", runtime), remedy)
    return Path(path)


def find_package(runtime: WebRuntime) -> Package:
    """Return the package in the folder that ``ZOO_ONNXRUNTIME_WEB`` names, or else the first that is found.

    It is looked for in the ``node_modules`` of the working directory, of its parents, and of zoo's cache.

    Raises :class:`UsageError` if there is none, or if it has no module for the runtime.
    """
    folder = os.environ.get(PACKAGE)
    for place in [Path(folder)] if folder else _places(_NAME):
        version = _version(place, _NAME)
        if version is not None:
            if not (place / "dist" / _MODULES[runtime]).is_file():
                raise UsageError(f"{_NAME} {version} has no {_MODULES[runtime]}", place, f"npm install {_NAME}@latest")
            return Package((place / "dist").resolve(), _MODULES[runtime], version, _LOADERS[runtime])
    problem = f"{PACKAGE}={folder} is not the folder of {_NAME}" if folder else f"{_NAME} is not installed"
    raise UsageError(problem, argument("runtime", runtime), f"npm install {_NAME}, or set {PACKAGE} to its folder")


def find_tokenizers() -> Package:
    """Return the npm package @huggingface/tokenizers, beside onnxruntime-web or in a ``node_modules`` as that.

    Raises :class:`UsageError` if there is none.
    """
    folder = os.environ.get(PACKAGE)
    beside = [Path(folder).parent / _TOKENIZERS] if folder else []
    for place in [*beside, *_places(_TOKENIZERS)]:
        version = _version(place, _TOKENIZERS)
        if version is not None and (place / "dist" / "tokenizers.min.mjs").is_file():
            return Package((place / "dist").resolve(), "tokenizers.min.mjs", version)
    raise UsageError(f"{_TOKENIZERS} is not installed", None, f"npm install {_TOKENIZERS}")


def _places(name: str) -> list[Path]:
    """Return where an npm package may be installed."""
    cache, here = memo.directory(), Path.cwd()
    parents = [here, *here.parents, *([cache] if cache is not None else [])]
    return [parent / "node_modules" / name for parent in parents]


def _version(place: Path, name: str) -> str | None:
    """Return the version of the package in a folder if it has this name, or None."""
    try:
        facts = json.loads((place / "package.json").read_text(encoding="utf-8"))
        return str(facts["version"]) if facts["name"] == name else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
