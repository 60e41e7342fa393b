"""Sessions of onnxruntime-web in a headless browser."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import load, save

from zoo.errors import IncomparableError, UsageError, argument
from zoo.probe.pipeline import Arrays
from zoo_export.web.install import Package, WebRuntime, find_browser, find_package
from zoo_export.web.server import Server, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser as Chromium
    from playwright.sync_api import ConsoleMessage, Page

__all__ = ["FLAGS", "TIMEOUT", "Browser", "WebGraph", "WebSession", "open_browser"]

TIMEOUT = 600.0
"""Default limit for a call, in seconds. A call loads a graph, or runs it once."""

FLAGS = ["--no-sandbox", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip
"""Options of the browser: it reads nothing but the files of this process."""
_DEVICE_FLAGS: dict[WebRuntime, list[str]] = {
    "web-wasm": ["--disable-gpu"],
    "web-webgpu": ["--enable-unsafe-webgpu", "--enable-features=Vulkan", "--ignore-gpu-blocklist"],
}
_SOFTWARE = ["--use-webgpu-adapter=swiftshader", "--enable-unsafe-swiftshader"]
"""Options with which the processor renders what a graphics card would."""
_CALL = """([function_, ...given]) => void setTimeout(async () => {
  let answer;
  try { answer = { value: await (await import("./page.mjs"))[function_](...given) ?? null }; }
  catch (error) { answer = { error: String(error?.message ?? error) }; }
  console.debug("zoo:" + JSON.stringify(answer));
})"""
"""Calls a function of the page, and writes its answer to the console. Errors of WebAssembly are plain numbers."""
_ANSWER = "zoo:"
_PLACED = re.compile(r"placed on \[(\w+)\]")
_NODE = re.compile(r"VerifyEachNodeIsAssignedToAnEp\w*\] +(\w+) \(")
"""Lines of the verbose log of onnxruntime-web: the nodes of a provider follow its name."""


@dataclass(frozen=True, slots=True)
class WebGraph:
    """A serialised graph and its files of weights."""

    data: bytes
    weights: Mapping[str, Path | bytes] = field(default_factory=dict)
    """The files at which the graph points, or their contents, by the name in the graph."""


class WebSession:
    """A session in a tab of the browser.

    Args:
        tab: the tab.
        name: the session's name in the tab.
        inputs: the names of the graph's inputs.
        outputs: the names of its outputs.
    """

    def __init__(self, tab: _Tab, name: str, inputs: list[str], outputs: list[str]) -> None:
        self._tab, self._name, self.inputs, self.outputs = tab, name, inputs, outputs

    def run(self, arrays: Arrays) -> Arrays:
        """Run the graph. Raises as :meth:`Browser.open` does."""
        server = self._tab.server
        server.files["feeds"] = save({name: np.asarray(value, order="C") for name, value in arrays.items()})
        try:
            self._tab.call("run", self._name, "feeds", "outputs")
            return {name: value.copy() for name, value in load(server.posted["outputs"]).items()}
        finally:
            server.files.pop("feeds")
            server.posted.pop("outputs", None)


class Browser:
    """A headless browser that runs graphs on onnxruntime-web.

    Args:
        runtime: ``web-wasm`` or ``web-webgpu``.
        chromium: the browser.
        server: serves the page and the graphs.
        package: onnxruntime-web.
        timeout: limit for each call, in seconds.
    """

    def __init__(
        self,
        runtime: WebRuntime,
        chromium: Chromium,
        server: Server,
        package: Package,
        timeout: float = TIMEOUT,
    ) -> None:
        self.runtime, self._chromium, self._server, self.package = runtime, chromium, server, package
        self.timeout = timeout
        self.name = f"Chromium {chromium.version}"
        self.device = ""
        """The graphics adapter, once a graph is open."""
        self._tabs: list[_Tab] = []
        self._opened = 0

    @property
    def provider(self) -> str:
        """Runtime, version and provider, as evidence names them."""
        return self.package.provider(self.runtime)

    def open(self, graphs: Mapping[str, WebGraph], *, optimize: bool) -> dict[str, WebSession]:
        """Open graphs, by name, in a new tab.

        Raises:
            IncomparableError: the tab does not answer in time.
            RuntimeError: onnxruntime-web cannot load a graph; its message.
        """
        tab = self._tab()
        return {name: self._open(tab, name, graph, optimize) for name, graph in graphs.items()}

    def placement(self, graph: WebGraph) -> dict[str, Counter[str]]:
        """Return the operators of an optimised graph by execution provider, with the number of nodes of each.

        Raises as :meth:`open` does.
        """
        tab, provider = self._tab(), ""
        counts: dict[str, Counter[str]] = {}

        def read(message: ConsoleMessage) -> None:
            nonlocal provider
            for line in message.text.splitlines():
                if (placed := _PLACED.search(line)) is not None:
                    provider = placed[1]
                elif provider and (node := _NODE.search(line)) is not None:
                    counts.setdefault(provider, Counter())[node[1]] += 1

        tab.page.on("console", read)
        self._open(tab, "placement", graph, optimize=True, verbose=True)
        return counts

    def _tab(self) -> _Tab:
        tab = _Tab(self._chromium.new_page(), self._server, self.timeout, self.provider)
        self._tabs.append(tab)
        tab.page.goto(f"{self._server.root}index.html")
        self.device = tab.call("start", f"./ort/{self.package.module}", self.runtime == "web-webgpu")
        return tab

    def _open(self, tab: _Tab, name: str, graph: WebGraph, optimize: bool, *, verbose: bool = False) -> WebSession:
        self._opened += 1
        folder = f"graphs/{self._opened}"
        served: dict[str, Path | bytes] = {f"{folder}/{file}": content for file, content in graph.weights.items()}
        url = f"{folder}/{name}.onnx"
        self._server.files |= {url: graph.data, **served}
        try:
            where = self._server.root + url
            provider = self.runtime.removeprefix("web-")
            facts = tab.call("open", name, where, list(graph.weights), provider, optimize, verbose)
        finally:
            for path in (url, *served):
                del self._server.files[path]
        return WebSession(tab, name, facts["inputs"], facts["outputs"])

    def close_tabs(self) -> None:
        """Close all sessions, and return their memory to the system."""
        for tab in self._tabs:
            tab.page.close()
        self._tabs.clear()


@dataclass(frozen=True, slots=True)
class _Tab:
    page: Page
    server: Server
    timeout: float
    provider: str

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a function of page.mjs.

        Raises:
            IncomparableError: it does not return in time.
            RuntimeError: it throws; the message.
        """
        from playwright.sync_api import TimeoutError as Late

        try:  # not evaluate(), which waits for ever if the tab is busy
            with self.page.expect_console_message(
                lambda message: message.text.startswith(_ANSWER), timeout=1000 * self.timeout
            ) as answer:
                self.page.evaluate(_CALL, [function, *arguments])
        except Late as error:
            problem = f"{self.provider} did not answer within {self.timeout:g} s"
            raise IncomparableError(problem, None, argument("timeout", text="allow more with {}")) from error
        result = json.loads(answer.value.text.removeprefix(_ANSWER))
        if "error" in result:
            raise RuntimeError(result["error"])
        return result["value"]


@contextmanager
def open_browser(runtime: WebRuntime, timeout: float = TIMEOUT) -> Iterator[Browser]:
    """Start a browser without a window. ``timeout`` limits each call in it, in seconds.

    Raises :class:`UsageError` if the browser, its driver or onnxruntime-web is not installed, or if it does not start.
    """
    package, executable = find_package(runtime), find_browser(runtime)
    where = argument("runtime", runtime)
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError as error:
        raise UsageError("playwright is not installed", where, "pip install attention-zoo[web]") from error
    with serving() as server, sync_playwright() as driver:
        server.files |= {
            "index.html": b'<!doctype html><link rel="icon" href="data:,"><title>zoo</title>',
            "page.mjs": files("zoo_export.web").joinpath("page.mjs").read_bytes(),
            **{f"ort/{path.name}": path for path in package.folder.iterdir() if path.suffix in (".mjs", ".wasm")},
        }
        flags = [*FLAGS, *_DEVICE_FLAGS[runtime], *(_SOFTWARE if runtime == "web-webgpu" else [])]
        try:
            chromium = driver.chromium.launch(executable_path=executable, args=flags)
        except Error as error:
            first = str(error).strip().partition("\n")[0]
            raise UsageError(f"the browser {executable} does not start ({first})", where) from error
        with chromium:
            yield Browser(runtime, chromium, server, package, timeout)
