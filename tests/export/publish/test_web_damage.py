"""Damaged folders of published pages: the page and the promise say which file, in one sentence and not the engine's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from zoo_export.publish.web import sealed

Exported = Callable[..., Path]
ORT, LOADER = "vendor/onnxruntime-web/ort.wasm.min.js", "vendor/onnxruntime-web/ort-wasm-simd-threaded.js"
TOKENIZERS = "vendor/tokenizers/tokenizers.min.js"
EARLY = ("page.js", "zoo.js", "options.js", "errors.js")
"""Modules that the page needs to start; `errors.js` is read by the worker too."""
LATE = ("worker.js", "files.js", "numbers.js", "inputs.js", "text.js", "generate.js", ORT, LOADER, TOKENIZERS)
JAVASCRIPT = "text/javascript"
LOAD = """async () => {
  const { loadSession } = await import("./zoo.js");
  return await loadSession().then(() => null, ({ name, message }) => [name, message]);
}"""
SAYS = "said => document.getElementById('problem').textContent === said"


class Site:
    """A page whose server answers some requests with something else."""

    def __init__(self, page: Any, folder: Path) -> None:
        self.page, self.folder = page, folder

    def answer(self, name: str, body: bytes | str, kind: str) -> None:
        """Answer requests for a file like this, and load the page again."""
        self.page.context.unroute_all()
        self.page.context.route(f"**/{name}", lambda route: route.fulfill(body=body, content_type=kind))
        self.page.reload()

    def start_says(self, said: str) -> None:
        """The page says this without a click, and offers no model."""
        self.page.wait_for_function(SAYS, arg=said)
        assert self.page.is_hidden("#load")

    def loading_says(self, said: str, name: str = "DownloadError") -> None:
        """The page says this after a click, and the promise too."""
        self.page.wait_for_selector("#load")
        self.page.click("#load")
        self.page.wait_for_function(SAYS, arg=said)
        self.promise_says(said, name)

    def promise_says(self, said: str, name: str = "DownloadError") -> None:
        assert self.page.evaluate(LOAD) == [name, said]


@pytest.fixture
def site(exported_model: Exported, publish: Any, serve: Any, tab: Any) -> Iterator[Site]:
    folder = publish(exported_model("gpt-tiny"))
    yield Site(tab(serve(folder).url, allow="Failed to load module script"), folder)


def test_empty_modules(site: Site) -> None:
    for name in EARLY:
        site.answer(name, "", JAVASCRIPT)
        site.start_says(f"{name} is empty: publish the model again.")
    for name in LATE:
        site.answer(name, "", JAVASCRIPT)
        site.loading_says(f"{name} is empty: publish the model again.")
    site.answer("start.js", "", JAVASCRIPT)
    assert site.page.inner_text("#problem").startswith("This page needs a browser with JavaScript modules, and all of")


def cut(path: Path) -> str:
    """Return the first half of a text."""
    text = path.read_text()
    return text[: len(text) // 2]


@pytest.mark.slow
def test_modules_that_are_cut_off(site: Site) -> None:
    for name in EARLY:
        site.answer(name, cut(site.folder / name), JAVASCRIPT)
        modules = "page.js, zoo.js, errors.js, options.js"
        site.start_says(f"One of {modules} is damaged: publish the model again.")
    for name in ("text.js", "generate.js"):
        site.answer(name, cut(site.folder / name), JAVASCRIPT)
        site.loading_says(f"{name} is damaged: publish the model again.")
    for name in ("worker.js", "inputs.js"):
        site.answer(name, cut(site.folder / name), JAVASCRIPT)
        said = "The worker failed: load the model again. If this does not help, publish it again."
        site.loading_says(said, "WorkerError")


def test_modules_of_another_content(site: Site) -> None:
    """Modified modules of onnxruntime-web and of the tokenizers, which would compute something else, are refused."""
    for name in (ORT, LOADER, TOKENIZERS):
        site.answer(name, (site.folder / name).read_text() + ";", JAVASCRIPT)
        said = "has another SHA-256 than the file that was published: it is damaged or was replaced"
        site.loading_says(f"{name} {said}.")


@pytest.mark.slow
def test_a_web_page_in_place_of_a_file(site: Site) -> None:
    """As servers send where a file is missing, with the status 200."""
    for name in ("page.js", "options.js", "model.json"):
        site.answer(name, "<!doctype html><title>not found</title>", "text/html; charset=utf-8")
        site.start_says(f"{name} cannot be loaded (the server sent a web page instead).")
    site.promise_says("model.json cannot be loaded (the server sent a web page instead).")
    wasm, shard = LOADER.replace(".js", ".wasm"), "files/model.safetensors"
    for name in ("worker.js", wasm, shard, "generate.js", ORT):  # files before those that are cached then
        site.answer(name, "<!doctype html><title>not found</title>", "text/html")
        site.loading_says(f"{name} cannot be loaded (the server sent a web page instead).")


def test_damaged_descriptions(site: Site) -> None:
    """The description has a digest of itself, so any change is seen: a missing part, a size, a letter."""
    text = (site.folder / "model.json").read_text()
    manifest = json.loads(text)
    assert sealed({key: value for key, value in manifest.items() if key != "sha256"}) == text
    wrong = [text[:-1], text[:1000], text.replace('"size":', '"size":1', 1), "", "[]", "null", "3", '{"schema":1}']
    wrong += [json.dumps({**manifest, key: None}) for key in ("task", "files", "graphs", "runtimes", "sha256")]
    wrong += [text.replace('"evidence":', '"other":', 1), text.replace('"sha256":', '"other":')]
    manifest["files"]["model.safetensors"]["size"] = 2**33
    wrong.append(json.dumps(manifest, ensure_ascii=False, separators=(",", ":")))
    said = f"{site.page.url}model.json is damaged or was changed: publish the model again."
    for body in wrong:
        assert body != text
        site.answer("model.json", body, "application/json")
        site.start_says(said)
        site.promise_says(said)
    site.answer("model.json", '{"schema":2}', "application/json")
    site.start_says(f"{site.page.url}model.json has the unknown schema 2: publish the model again.")
    site.answer("model.json", text, "application/json")
    site.page.wait_for_selector("#load")
