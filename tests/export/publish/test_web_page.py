"""Published pages in a browser: the results of every task, downloads, evidence, and what visitors see."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.exported import LIVELY, change_weights
from zoo.artifact import ModelDirectory, write_json
from zoo.errors import UsageError
from zoo.models import create, persist
from zoo.registry import registry
from zoo_export import export_model
from zoo_export.publish.web import sealed
from zoo_export.web.browser import _DEVICE_FLAGS, _SOFTWARE, FLAGS
from zoo_export.web.install import find_browser
from zoo_runtime import load_session
from zoo_runtime.generation.options import Generation

Exported = Callable[..., Path]


def shows(page: Any) -> Any:
    """Wait until a page can load its model."""
    page.wait_for_selector("#load")
    return page


def loads(page: Any) -> Any:
    """Load the model."""
    shows(page).click("#load")
    page.wait_for_selector("#form")
    return page


def done(page: Any) -> str:
    """Wait for the end of a run, and return the result."""
    page.wait_for_selector("#run:not([aria-disabled])")
    return str(page.inner_text("#output"))


TEXTS = ["hello", "Où est-il ? 🙂", "a\nb"]


@pytest.fixture
def lively(exported_model: Exported) -> Path:
    """A decoder that does not only repeat its last token."""
    return exported_model("gpt-tiny", **LIVELY["gpt-tiny"])


def test_greedy_tokens_are_those_of_python(lively: Path, publish: Any, run: Any) -> None:
    """Also with a penalty, suppressed tokens, a stop string, and when the positions end."""
    folder = publish(lively)
    with load_session(lively) as session:
        for options in (
            {"max_new_tokens": 100},
            {"max_new_tokens": 12, "repetition_penalty": 1.7, "suppress_tokens": [10, 32], "no_repeat_ngram_size": 2},
            {"max_new_tokens": 8, "min_new_tokens": 4, "stop": ["b", "\ufffd"]},
            {"max_new_tokens": 3, "stop": [f"no {number}" for number in range(60_000)]},
            {"max_new_tokens": 5, "temperature": 0.7, "top_k": 1},
        ):
            wanted = session.run(TEXTS, **options)
            found = run(folder, *TEXTS, **options)
            for one, other in zip(found, wanted, strict=True):
                assert len(set(other["generated_ids"])) > 1
                assert {key: one[key] for key in other} == other
                assert "".join(one["pieces"]) == other["generated"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["t5-tiny", "llama-tiny", "gemma-tiny", "mamba2-tiny", "qwen3-next-tiny", "seq2seq-tiny", "transformer-tiny"],
)
def test_decoder(exported_model: Exported, publish: Any, run: Any, name: str) -> None:
    """States beside keys and values, and decoders with an encoder."""
    source = exported_model(name, **LIVELY.get(name, {"gain": 3.0}))
    with load_session(source) as session:
        wanted = session.run(TEXTS, max_new_tokens=16)
    found = run(publish(source), *TEXTS, max_new_tokens=16)
    assert [one["generated_ids"] for one in found] == [other["generated_ids"] for other in wanted]
    assert [one["generated"] for one in found] == [other["generated"] for other in wanted]


def test_page_writes_a_text(lively: Path, publish: Any, serve: Any, tab: Any) -> None:
    """The page shows the evidence, the bytes downloaded and the text, and is operated with the keyboard alone."""
    folder = publish(lively)
    with load_session(lively) as session:
        (wanted,) = session.run(["hello"], max_new_tokens=20)
    server = serve(folder)
    page = shows(tab(server.url))
    size = sum(
        part["size"]
        for pieces in json.loads((folder / "model.json").read_text())["files"].values()
        for part in pieces["parts"]
    )
    assert page.inner_text("#verdict").startswith("Verified on onnxruntime-web ")
    total = float(re.search(r"\(([\d.]+) MB\)", page.inner_text("#load"))[1])  # type: ignore[index]
    assert total > size / 1e6
    assert not [path for path in server.asked if ".wasm" in path]
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector("#form")
    assert page.evaluate("document.activeElement.id") == "text"
    assert "one thread" in page.inner_text("#status")
    page.keyboard.press("Control+A")
    page.keyboard.insert_text("hello")
    page.fill("#max_new_tokens", "20")
    page.focus("#text")
    page.keyboard.press("Control+Enter")
    page.wait_for_function("() => /^Done/.test(document.getElementById('status').textContent)")
    assert page.text_content("#output") == "hello" + wanted["generated"]
    assert "20 new tokens" in page.inner_text("#status")


@contextmanager
def described(folder: Path) -> Iterator[dict[str, Any]]:
    """Change the description of a published model."""
    manifest = json.loads((folder / "model.json").read_text())
    del manifest["sha256"]
    yield manifest
    (folder / "model.json").write_text(sealed(manifest), encoding="utf-8")


def problem(page: Any) -> str:
    """Try to load, and return what the page says."""
    shows(page).click("#load")
    page.wait_for_selector("#load:not([aria-disabled])")
    page.wait_for_selector("#problem", state="visible")
    return str(page.inner_text("#problem"))


@pytest.fixture
def small(exported_model: Exported) -> Path:
    return exported_model("bert-tiny")


def test_model_without_evidence_needs_consent(small: Path, publish: Any, serve: Any, tab: Any) -> None:
    folder = publish(small, evidence=False)
    page = tab(serve(folder).url)
    assert "it was not compared there" in problem(page)
    assert page.inner_text("#verdict").startswith("Not verified on wasm: it was not compared there")
    page.check("#agreed")
    loads(page)
    page.click("#run")
    assert "1.0000" in done(page)


@pytest.mark.slow
def test_foreign_tokens_need_consent(small: Path, publish: Any, serve: Any, tab: Any) -> None:
    """The page tokenises samples, and compares their ids with those of Python."""
    folder = publish(small)
    with described(folder) as manifest:
        manifest["tokenizer"]["samples"][0]["ids"] = [1, 2, 3]
    page = tab(serve(folder).url)
    assert problem(page) == 'This page divides texts into other tokens than zoo does, such as "Tea?".'
    page.check("#agreed")
    loads(page)


NETWORK = "Failed to load resource|Failed to load module script"


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["files/model.safetensors.002", "vendor/onnxruntime-web/ort-wasm-simd-threaded.wasm"])
def test_damaged_files_are_refused(small: Path, publish: Any, serve: Any, tab: Any, name: str) -> None:
    """Truncated, altered, longer, or missing; a sound one loads afterwards, and the rest comes from the cache."""
    folder = publish(small, max_shard_bytes=100_000)
    server = serve(folder)
    page = tab(server.url, allow=NETWORK)
    path = folder / name
    content = path.read_bytes()
    path.write_bytes(content[:-7])
    assert problem(page).startswith(f"{name} ends after {len(content) - 7} of {len(content)} bytes")
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert problem(page).startswith(f"{name} has another SHA-256 than the file that was published")
    path.write_bytes(content + b"!")
    assert problem(page).startswith(f"{name} has more than {len(content)} bytes")
    path.unlink()
    assert problem(page).startswith(f"{name} cannot be loaded (404")
    path.write_bytes(content)
    server.asked.clear()
    loads(page)
    if name.endswith("002"):
        assert [path for path in server.asked if path.endswith((".wasm", "safetensors.001"))] == []
    assert f"/{name}" in server.asked


@pytest.mark.slow
def test_files_are_kept_in_the_cache(small: Path, publish: Any, serve: Any, tab: Any) -> None:
    """A second visit asks for no file; a file that was damaged in the cache is loaded again, an old one removed."""
    folder = publish(small, max_shard_bytes=100_000)
    server = serve(folder)
    page = loads(tab(server.url))
    server.asked.clear()
    page.reload()
    loads(page)
    assert not [
        path
        for path in server.asked
        if path.startswith(("/files/", "/vendor/onnxruntime-web/ort-wasm-simd-threaded.wasm"))
    ]
    spoilt = page.evaluate(
        """async () => {
          const cache = await caches.open(`zoo ${location.href}`);
          const key = (await cache.keys()).find(({ url }) => url.includes("safetensors.001"));
          const content = new Uint8Array(await (await cache.match(key)).arrayBuffer());
          content[0] ^= 1;
          await cache.put(key, new Response(content));
          await cache.put("files/old?sha256=0", new Response("old"));
          return (await cache.keys()).length;
        }"""
    )
    server.asked.clear()
    page.reload()
    loads(page)
    assert [path for path in server.asked if path.startswith("/files/")] == ["/files/model.safetensors.001"]
    assert page.evaluate("async () => (await (await caches.open(`zoo ${location.href}`)).keys()).length") == spoilt - 1


@pytest.mark.slow
def test_download_can_be_cancelled(small: Path, publish: Any, serve: Any, tab: Any) -> None:
    """Progress is shown in bytes, and files that were complete when the download was cancelled are kept."""
    page = shows(tab(serve(publish(small)).url))
    url = page.url
    found = page.evaluate(
        """async () => {
          const { loadSession } = await import("./zoo.js");
          const control = new AbortController(), seen = [];
          const error = await loadSession(undefined, { signal: control.signal, onProgress: (progress) => {
            seen.push(progress);
            if (progress.loaded > 1e6) control.abort();
          } }).catch((error) => error);
          return { name: error.name, seen };
        }"""
    )
    assert found["name"] == "AbortError"
    counts = [item["loaded"] for item in found["seen"]]
    assert counts == sorted(counts)
    assert counts[-1] < found["seen"][0]["total"] * 1.001
    page.goto(url)
    loads(page)


def test_generation_can_be_cancelled(lively: Path, publish: Any, serve: Any, tab: Any) -> None:
    """The page stays responsive, and can go on afterwards."""
    page = loads(tab(serve(publish(lively)).url))
    found = page.evaluate(
        """async () => {
          const { loadSession } = await import("./zoo.js");
          const session = await loadSession(), control = new AbortController(), pieces = [];
          const onText = (piece) => { pieces.push(piece); if (pieces.length === 3) control.abort(); };
          const options = { max_new_tokens: 120, signal: control.signal, onText };
          const error = await session.run("hello", options).catch((error) => error);
          const streamed = [];
          for await (const piece of session.stream("hello", { max_new_tokens: 12 })) streamed.push(piece);
          const whole = await session.run("hello", { max_new_tokens: 12 });
          session.close();
          const closed = await session.run("hello").catch((error) => error);
          const said = [closed.name, closed.message];
          return { name: error.name, count: pieces.length, streamed, whole: whole.generated, closed: said };
        }"""
    )
    assert found["name"] == "AbortError"
    assert 3 <= found["count"] < 60
    assert "".join(found["streamed"]) == found["whole"]
    assert len(found["streamed"]) > 1
    assert found["closed"] == ["ClosedError", "The session is closed."]


@pytest.mark.slow
def test_isolated_pages_use_threads(lively: Path, publish: Any, serve: Any, tab: Any) -> None:
    """The tokens are those of one thread."""
    folder = publish(lively)
    with load_session(lively) as session:
        (wanted,) = session.run(["hello"], max_new_tokens=40)
    page = shows(tab(serve(folder, isolates=True).url))
    found = page.evaluate(
        """async () => {
          const { loadSession } = await import("./zoo.js");
          const session = await loadSession(undefined, { threads: 3 });
          return { threads: session.threads, ids: (await session.run("hello", { max_new_tokens: 40 })).generated_ids };
        }"""
    )
    assert found == {"threads": 3, "ids": wanted["generated_ids"]}


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("WebAssembly.validate = () => false;", "This browser is too old: its WebAssembly lacks vector instructions."),
        (
            "delete window.Worker;",
            "This browser is too old: it lacks WebAssembly, workers, AbortSignal.throwIfAborted or Array.with.",
        ),
        (
            "delete AbortSignal.prototype.throwIfAborted;",
            "it lacks WebAssembly, workers, AbortSignal.throwIfAborted",
        ),
        ("Object.defineProperty(window, 'isSecureContext', { value: false });", "served over HTTPS or from localhost"),
    ],
)
def test_browser_that_cannot_run_it(small: Path, publish: Any, serve: Any, tab: Any, script: str, said: str) -> None:
    page = tab(serve(publish(small)).url, script=script)
    page.wait_for_function("said => document.getElementById('problem').textContent.includes(said)", arg=said)
    assert page.is_hidden("#load")


def test_page_opened_as_a_file_says_why_it_does_not_work(small: Path, publish: Any, browser: Any) -> None:
    page = browser.new_page()
    page.goto((publish(small) / "index.html").as_uri())
    page.wait_for_function(
        "() => /opened as a file, it cannot load/.test(document.getElementById('problem').textContent)"
    )
    page.close()


@pytest.mark.slow
def test_model_that_is_too_large(small: Path, publish: Any, serve: Any, tab: Any) -> None:
    """For 32-bit memory, and for what the browser has left."""
    folder = publish(small)
    with described(folder) as manifest:
        (part,) = manifest["files"]["model.safetensors"]["parts"]
        size, part["size"] = part["size"], 2**33
    page = tab(serve(folder).url)
    assert problem(page) == "The model has 8.6 GB, but a page can use 4.3 GB at most."
    with described(folder) as manifest:
        (part,) = manifest["files"]["model.safetensors"]["parts"]
        part["size"], manifest["files"]["model.safetensors"]["size"] = size, 2**53
    later = (folder / "model.json").stat().st_mtime + 9
    os.utime(folder / "model.json", (later, later))  # servers tell versions apart by the second
    page.reload()
    assert "The browser cannot reserve" in problem(page)


def test_inputs_that_the_model_does_not_read(small: Path, publish: Any, serve: Any, tab: Any) -> None:
    page = loads(tab(serve(publish(small)).url))
    page.fill("#text", "a" * 40)
    page.click("#run")
    page.wait_for_selector("#problem", state="visible")
    assert re.fullmatch(r"The text has \d+ tokens, the model reads 32: shorten it\.", page.inner_text("#problem"))
    page.fill("#text", "tea\nno")
    page.click("#run")
    page.wait_for_selector("#output table")
    assert page.is_hidden("#problem")
    found = page.evaluate(
        """async () => {
          const { loadSession } = await import("./zoo.js");
          const session = await loadSession();
          return await session.run("").catch((error) => [error.name, error.message]);
        }"""
    )
    assert found == ["InputError", "The text is empty."]


ERRORS = """async ({ inputs, options }) => {
  const { loadSession } = await import("./zoo.js");
  const session = await loadSession(), told = (error) => [error.name, error.message];
  const values = { NaN, Infinity, undefined };
  const replaced = (value) => (Object.hasOwn(values, value) ? values[value] : value);
  const results = { inputs: [], options: [] };
  for (const input of inputs) results.inputs.push(await session.run(replaced(input)).then(() => null, told));
  for (const { ...given } of options) {
    for (const name in given) given[name] = replaced(given[name]);
    results.options.push(await session.run("hello", { max_new_tokens: 2, ...given }).then(() => null, told));
  }
  return results;
}"""
"""Return the error of each input and each set of options; null for those that run."""
REFUSED: list[dict[str, Any]] = [
    {"max_new_tokens": 0}, {"max_new_tokens": -5}, {"max_new_tokens": 1.5}, {"max_new_tokens": "abc"},
    {"max_length": 0}, {"min_length": -1}, {"min_new_tokens": -1}, {"min_new_tokens": None},
    {"temperature": -1}, {"temperature": "hot"}, {"temperature": None}, {"temperature": True},
    {"temperature": 1, "top_p": 0}, {"temperature": 1, "top_p": 1.5}, {"temperature": 1, "min_p": 2},
    {"temperature": 1, "min_p": -1}, {"temperature": 1, "top_k": 0}, {"temperature": 1, "top_k": -3},
    {"temperature": 1, "top_k": 1.5}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}, {"temperature": 0, "top_k": 5},
    {"repetition_penalty": 0}, {"repetition_penalty": -1}, {"repetition_penalty": "x"}, {"no_repeat_ngram_size": -2},
    {"seed": "x"}, {"seed": -1}, {"seed": None}, {"seed": 1.5}, {"stop": [""]}, {"forced_eos_token_id": 1.5},
]  # fmt: skip
"""Options that zoo run refuses."""
ACCEPTED: list[dict[str, Any]] = [
    {"max_new_tokens": None, "max_length": 8}, {"max_new_tokens": "undefined"}, {"temperature": 1.0, "seed": 3},
    {"temperature": 0.5, "top_p": 1, "top_k": 1, "min_p": 0}, {"top_p": None, "top_k": None, "stop": ["a"]},
    {"suppress_tokens": [0, 1], "forced_eos_token_id": 3}, {"repetition_penalty": 2, "no_repeat_ngram_size": 0},
]  # fmt: skip


def in_javascript(said: str) -> str:
    """Translate an error message of Python into that of the page: values are written as in JavaScript."""
    said = re.sub(r" \(\w+\)$", "", said).replace("'", '"')
    for one, other in ((r"got None$", "got null"), (r"got True$", "got true"), (r"(\d)\.0$", r"\1")):
        said = re.sub(one, other, said)
    return f"{said[0].upper()}{said[1:]}." if said.startswith("a stop") else f"{said}."


def test_options_are_checked_as_by_zoo_run(lively: Path, publish: Any, serve: Any, tab: Any) -> None:
    """With its words; options that pages lack, and inputs of other types, are refused too."""
    outside: list[dict[str, Any]] = [
        {"suppress_tokens": [5, 9999]},
        {"stop_token_ids": [-1]},
        {"forced_bos_token_id": 260},
    ]
    others: list[dict[str, Any]] = [
        {"temperature": "NaN"}, {"repetition_penalty": "Infinity"}, {"stop": "o"}, {"suppress_tokens": 5},
        {"stop_token_ids": ["a"]}, {"maxNewTokens": 3}, {"num_beams": 4}, {"logit_bias": {"5": 9}},
    ]  # fmt: skip
    page = shows(tab(serve(publish(lively)).url))
    inputs = ["undefined", None, 5, {}, [], ["a"], ["a", "b"], ["a", "b", "c"]]
    found = page.evaluate(ERRORS, {"inputs": inputs, "options": [*REFUSED, *outside, *others, *ACCEPTED]})
    errors = iter(found["options"])
    with load_session(lively) as session:
        for given in [*REFUSED, *outside]:
            with pytest.raises(UsageError) as refused:
                session.run("hello", **{"max_new_tokens": 2, **given})
            name, said = next(errors)
            assert name == "InputError"
            assert said == in_javascript(refused.value.what)
        for given in ACCEPTED:
            session.run("hello", **{name: value for name, value in given.items() if value != "undefined"})
    known = "max_new_tokens, max_length, "
    for wanted in (
        "temperature must be finite, got NaN.", "repetition_penalty must be finite, got Infinity.",
        'stop must be list of str, got "o".', "suppress_tokens must be list of int, got 5.",
        'stop_token_ids must be list of int, got ["a"].', f"Unknown option maxNewTokens: text-generation has {known}",
        "num_beams is not supported in the browser: use zoo run.", "logit_bias is not supported in the browser",
    ):  # fmt: skip
        name, said = next(errors)
        assert name == "InputError"
        assert said.startswith(wanted)
    assert list(errors) == [None] * len(ACCEPTED)
    pair = ["InputError", "The task does not accept pairs: give one text."]
    assert found["inputs"].pop(6) == pair
    shown = ["undefined", "null", "5", "[object Object]", "[]", '["a"]', '["a", "b", "c"]']
    assert found["inputs"] == [["InputError", f"The input must be a text, got {value}."] for value in shown]


def test_every_option_of_zoo_run_is_supported_or_refused(lively: Path, publish: Any) -> None:
    manifest = json.loads((publish(lively) / "model.json").read_text())
    assert sorted([*manifest["rules"], *manifest["unsupported"]]) == sorted(Generation.field_types())
    assert {*manifest["generation"], "seed"} == set(manifest["rules"])


@pytest.mark.slow
def test_tasks_without_options_and_with_pairs(
    exported_model: Exported, small: Path, publish: Any, serve: Any, tab: Any
) -> None:
    """Options are refused where a task has none; a classifier reads pairs, as zoo run does."""
    given = {"inputs": [["tea", "no"]], "options": [{}, {"temperature": 1}]}
    pages = (small, exported_model("rnn-tiny"))
    found, classified = [shows(tab(serve(publish(path)).url)).evaluate(ERRORS, given) for path in pages]
    assert found["inputs"] == [["InputError", "The task does not accept pairs: give one text."]]
    assert found["options"][1] == ["InputError", "Unknown option max_new_tokens: feature-extraction has none."]
    with load_session(pages[1]) as session:
        assert session.runner().takes_pairs  # type: ignore[attr-defined]
    assert classified["inputs"] == [None]


def complaint(page: Any) -> str:
    """Wait for the sentence that says what is wrong, and return it."""
    page.wait_for_selector("#problem", state="visible")
    return str(page.inner_text("#problem"))


def test_form_says_which_option_is_wrong(lively: Path, publish: Any, serve: Any, tab: Any) -> None:
    """Also with Ctrl+Enter; and the button keeps the focus, also after it was hidden behind Stop."""
    page = loads(tab(serve(publish(lively)).url))
    page.fill("#temperature", "1")
    page.fill("#top_p", "0")
    page.click("#run")
    assert complaint(page) == "top_p must be positive, got 0."
    page.fill("#top_p", "")
    page.fill("#temperature", "-1")
    page.press("#text", "Control+Enter")
    page.wait_for_function("() => document.getElementById('problem').textContent.startsWith('temperature')")
    assert complaint(page) == "temperature must not be negative, got -1."
    page.fill("#temperature", "0.73")
    page.fill("#max_new_tokens", "2.5")
    page.press("#max_new_tokens", "Enter")
    page.wait_for_function("() => document.getElementById('problem').textContent.startsWith('max')")
    assert complaint(page) == "max_new_tokens must be int or none, got 2.5."
    page.focus("#max_new_tokens")
    page.keyboard.press("Control+A")
    page.keyboard.type("1e")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.getElementById('problem').textContent.includes('number')")
    assert complaint(page) == "max_new_tokens must be a number."
    page.fill("#max_new_tokens", "5")
    page.focus("#run")
    page.keyboard.press("Enter")
    page.wait_for_function("() => /^Done: 5 new tokens/.test(document.getElementById('status').textContent)")
    assert page.is_hidden("#problem")
    assert page.evaluate("document.activeElement.id") == "run"
    page.fill("#max_new_tokens", "120")
    press = "document.getElementById('run').click(); document.getElementById('stop').focus();"
    assert page.evaluate(f"{press} document.activeElement.id") == "stop"
    done(page)
    assert page.evaluate("document.activeElement.id") == "run"


def test_form_runs_with_the_options_of_the_model(
    lively: Path, publish: Any, serve: Any, tab: Any, tmp_path: Path
) -> None:
    """Numbers that are no multiples of a step, and a maximum length, which counts the prompt."""
    folder = Path(shutil.copytree(lively, tmp_path / "models" / lively.name))
    options = {"do_sample": True, "temperature": 0.65, "top_p": 0.92, "top_k": 50, "max_length": 12}
    stored = ModelDirectory.open(folder)
    with stored.adding(action="generation") as stage:
        write_json(stage / "generation_config.json", options)
    page = loads(tab(serve(publish(folder)).url))
    assert [page.input_value(f"#{name}") for name in ("temperature", "top_p", "top_k")] == ["0.65", "0.92", "50"]
    page.fill("#text", "hello")
    page.click("#run")
    page.wait_for_function("() => /^Done: 7 new tokens/.test(document.getElementById('status').textContent)")
    page.fill("#temperature", "0")
    page.fill("#max_new_tokens", "9")
    page.click("#run")
    page.wait_for_function("() => /^Done: 9 new tokens/.test(document.getElementById('status').textContent)")
    with load_session(folder) as session:
        wanted = session.run("hello", temperature=0.0, max_new_tokens=9)
    assert page.text_content("#output") == "hello" + wanted["generated"]


def test_blank_texts_are_refused(small: Path, publish: Any, serve: Any, tab: Any) -> None:
    page = loads(tab(serve(publish(small)).url))
    page.fill("#text", "  \n \n")
    page.click("#run")
    assert complaint(page) == "The text is empty."
    assert page.is_hidden("#output table")


def test_leaving_a_stream_cancels_it(lively: Path, publish: Any, serve: Any, tab: Any) -> None:
    """In the worker too, which goes on with the next call at once; and a signal still cancels a stream."""
    found = shows(tab(serve(publish(lively)).url)).evaluate(
        """async () => {
          const { loadSession } = await import("./zoo.js");
          const session = await loadSession(), run = session.run.bind(session);
          let sent = 0, failure;
          session.run = (input, options) => {
            const result = run(input, { ...options, onText: (piece) => { sent += 1; options.onText(piece); } });
            result.catch((error) => { failure = error.name; });
            return result;
          };
          for await (const piece of session.stream("hello", { max_new_tokens: 120 })) if (piece) break;
          const after = await run("hello", { max_new_tokens: 4 }), left = [sent, failure];
          const control = new AbortController(), options = { max_new_tokens: 120, signal: control.signal };
          let name;
          try {
            for await (const _ of session.stream("hello", options)) control.abort();
          } catch (error) {
            name = error.name;
          }
          return { left, name, count: after.generated_ids.length };
        }"""
    )
    assert found["left"][0] < 60
    assert found["left"][1] == "AbortError"
    assert (found["name"], found["count"]) == ("AbortError", 4)


def replace(answer: dict[str, Any], route: Any) -> None:
    """Answer a request for a module with this."""
    route.fulfill(body="export {};", **answer)


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    "name",
    [
        "zoo.js", "worker.js", "generate.js", "vendor/onnxruntime-web/ort-wasm-simd-threaded.js", "options.js",
        "inputs.js", "text.js", "vendor/onnxruntime-web/ort.wasm.min.js", "vendor/tokenizers/tokenizers.min.js",
    ],
)  # fmt: skip
def test_modules_that_are_missing_or_of_another_type(
    lively: Path, publish: Any, serve: Any, tab: Any, name: str
) -> None:
    """The page names the file, before the model runs, and says what the server must send."""
    page = tab(serve(publish(lively)).url, allow=NETWORK)
    for wanted, answer in (
        (f"{name} cannot be loaded (404", {"status": 404}),
        (f"{name} is sent as text/plain: the server must send it as text/javascript.", {"content_type": "text/plain"}),
    ):
        page.context.route(f"**/{name}", partial(replace, answer))
        page.reload()
        if name not in ("zoo.js", "options.js"):
            shows(page).click("#load")
        page.wait_for_function("said => document.getElementById('problem').textContent.startsWith(said)", arg=wanted)
        page.context.unroute_all()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_page_is_accessible(lively: Path, publish: Any, serve: Any, tab: Any, theme: str, width: int) -> None:
    """Before loading, with a result, and with an error; and nothing is wider than the window."""
    playwright = pytest.importorskip("axe_playwright_python.sync_playwright")

    def check(page: Any) -> None:
        found = playwright.Axe().run(page).response["violations"]
        assert [(item["id"], [node["html"] for node in item["nodes"]]) for item in found] == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")

    page = shows(tab(serve(publish(lively)).url, width=width, theme=theme))
    check(page)
    page.click("#evidence summary")
    check(page)
    loads(page)
    page.click("#run")
    done(page)
    check(page)
    page.fill("#text", "")
    page.click("#run")
    page.wait_for_selector("#problem", state="visible")
    check(page)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 384) == (theme == "dark")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert-tiny", "rnn-tiny", "perceiver-tiny", "vit-tiny", "t5-tiny"])
def test_page_of_each_task(
    exported_model: Exported, publish: Any, serve: Any, tab: Any, tmp_path: Path, name: str
) -> None:
    """The example that is filled in runs, and axe finds nothing in its result."""
    from PIL import Image

    playwright = pytest.importorskip("axe_playwright_python.sync_playwright")
    page = loads(tab(serve(publish(exported_model(name))).url, width=390))
    if name == "vit-tiny":
        Image.new("RGB", (50, 40), "red").save(tmp_path / "red.png")
        page.set_input_files("#image", tmp_path / "red.png")
    else:
        page.fill("#text", page.input_value("#text")[:20] if name != "perceiver-tiny" else page.input_value("#text"))
    page.click("#run")
    page.wait_for_function("() => /^Done/.test(document.getElementById('status').textContent)")
    assert page.text_content("#output")
    assert page.is_hidden("#problem")
    assert playwright.Axe().run(page).response["violations"] == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.slow
def test_quantised_decoder(exported_with: Exported, publish: Any, run: Any, tmp_path: Path) -> None:
    """Its caches are buffers with spare positions, which grow; parts of the float32 weights are read too."""
    from tests.precisions import quantize

    folder = Path(shutil.copytree(exported_with("gpt-tiny"), tmp_path / "gpt-tiny"))
    quantize(folder, "int8")
    page = publish(folder, variant="int8")
    with load_session(folder, variant="int8") as session:
        wanted = session.run(TEXTS, max_new_tokens=100)
    found = run(page, *TEXTS, max_new_tokens=100)
    assert [one["generated_ids"] for one in found] == [other["generated_ids"] for other in wanted]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram"])
def test_decoder_with_a_trained_tokenizer(zoo: Any, publish: Any, run: Any, tmp_path: Path, kind: str) -> None:
    """Texts become the tokens of Python, and tokens the same text, also where a piece ends inside a character."""
    corpus = ROOT / "docs" / "howto" / "train.md"
    assert zoo("tokenizer", "train", corpus, "--vocab-size", 400, "--kind", kind, "-o", "tokenizer.json").status == 0
    spec = registry().resolve("gpt-tiny", ("max_seq_len=64", "vocab_size=400", "eos_token_id=399"))
    model = create.build(spec, seed=1, dtype="float32")
    change_weights(model, 1, noise=False, gain=12.0)
    source = persist.save_spec(spec, model, tmp_path / "worded", tokenizer="tokenizer.json")
    assert export_model(source).passed
    texts = ["The model reads tokens, and the loss", "Où est-il ? 🙂", "1,234.5 x"]
    with load_session(source) as session:
        wanted = session.run(texts, max_new_tokens=24)
    for one, other in zip(run(publish(source), *texts, max_new_tokens=24), wanted, strict=True):
        assert {key: one[key] for key in other} == other
        assert "".join(one["pieces"]) == other["generated"]
    assert len(set(wanted[0]["generated_ids"])) > 3


@pytest.mark.slow
def test_verified_and_published(exported_copy: Exported, onnxruntime_web: Path, zoo: Any, serve: Any, tab: Any) -> None:
    """From the comparison in a browser to the page, which states its evidence."""
    folder = exported_copy("bert-tiny")
    subprocess.run([sys.executable, "-m", "zoo", "verify", folder, "--runtime", "web-wasm"], check=True)
    assert "web-wasm: verified" in zoo("publish", folder, "page", "--layout", "web").out
    evidence = json.loads((folder / "evidence.web-wasm.json").read_text())
    page = loads(tab(serve(Path("page")).url))
    said = page.inner_text("#verdict")
    assert f"Verified on {evidence['provider']} in {evidence['browser']}" in said
    assert f"on {len(evidence['grid']['points'])} inputs" in said
    page.click("#run")
    assert "1.0000" in done(page)


@pytest.mark.slow
def test_webgpu_is_used_where_it_was_verified(
    lively: Path, publish: Any, attest: Any, serve: Any, browser: Any, tmp_path: Path
) -> None:
    """In a browser that has it; another one uses WebAssembly, and so does a page without evidence for WebGPU."""
    folder = Path(shutil.copytree(lively, tmp_path / "models" / lively.name))
    plain = publish(folder)
    attest(folder, runtime="web-webgpu", device="SwiftShader")
    both = publish(folder)
    with load_session(lively) as session:
        (wanted,) = session.run(["hello"], max_new_tokens=8)
    flags = [*FLAGS, *_DEVICE_FLAGS["web-webgpu"], *_SOFTWARE]
    with_gpu = browser.browser_type.launch(executable_path=find_browser("web-webgpu"), args=flags)
    for opened, page_folder, runtime in (
        (with_gpu, both, "web-webgpu"), (with_gpu, plain, "web-wasm"), (browser, both, "web-wasm"),
    ):  # fmt: skip
        page = opened.new_page()
        page.goto(serve(page_folder).url)
        found = page.evaluate(
            """async () => {
              const { loadSession } = await import("./zoo.js");
              const session = await loadSession();
              return [session.runtime, (await session.run("hello", { max_new_tokens: 8 })).generated_ids];
            }"""
        )
        assert found == [runtime, wanted["generated_ids"]]
        page.close()
    with_gpu.close()
