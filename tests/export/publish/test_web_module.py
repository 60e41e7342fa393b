"""The module of a published page, called in ways that its documentation does not allow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zoo.errors import ArtifactError
from zoo_runtime import load_session

Exported = Callable[..., Path]
TOLD = """
const { loadSession } = await import(new URL("page/zoo.js", location.href).href);
const told = (promise) => promise.then(
  (session) => { session.close?.(); return null; }, ({ name, message }) => [name, message],
);
"""
"""Return the name and the message of an error, or null."""


@pytest.fixture
def page(exported_model: Exported, publish: Any, serve: Any, tab: Any) -> Any:
    """Open a page whose folder ``page`` has a published model."""
    folder = publish(exported_model("gpt-tiny"))
    folder.rename(folder.with_name("page"))
    (folder.parent / "index.html").write_text("<!doctype html><title>own</title><link rel=icon href=data:,>")
    return tab(serve(folder.parent).url)


def evaluate(page: Any, script: str) -> Any:
    return page.evaluate(f"async () => {{ {TOLD} {script} }}")


def test_folders_need_no_slash(page: Any) -> None:
    """Relative to the page, as a text or an address."""
    found = evaluate(
        page,
        """return await Promise.all(["page", "page/", new URL("page", location.href), undefined]
             .map((source) => told(loadSession(source))));""",
    )
    assert found == [None] * 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            "{ unverifed: true }",
            "Unknown option unverifed: loadSession has task, runtime, threads, unverified, ",
        ),
        ("{ toString: 1 }", "Unknown option toString: "),
        ("{ threads: 'x' }", 'threads must be int or none, got "x".'),
        ("{ threads: 0 }", "threads must be positive, got 0."),
        ("{ cache: 1 }", "cache must be bool or none, got 1."),
        ("{ signal: 5 }", "signal must be AbortSignal or none, got 5."),
        ("{ onProgress: 5 }", "onProgress must be Function or none, got 5."),
        ("{ runtime: 'web-fpga' }", "The browser or the folder has no web-fpga."),
    ],
)
def test_options_of_loading_are_checked(page: Any, options: str, said: str) -> None:
    name, message = evaluate(page, f"return await told(loadSession('page', {options}));")
    assert name == "InputError"
    assert message.startswith(said)


def test_options_of_a_call_are_checked(page: Any) -> None:
    """Also options named like members of every object, missing options, and a signal that is aborted already."""
    found = evaluate(
        page,
        """
        const session = await loadSession("page", null), given = [
          { constructor: 1 }, JSON.parse('{"__proto__": 1}'), { signal: 5 }, { onText: 5 }, null,
          { max_new_tokens: undefined }, { signal: AbortSignal.abort("why") },
        ], results = [];
        for (const options of given) results.push(await told(session.run("hello", options)));
        for (const options of [{ signal: 5 }, { signal: AbortSignal.abort("why") }, null])
          results.push(await told(session.stream("hello", options).next()));
        for (const text of ["a\\ud800b", "a\\ud83d\\ude42"]) results.push(await told(session.run(text)));
        return results;
        """,
    )
    texts = [None if item is None else item[1].partition(": text-generation has")[0] for item in found]
    assert texts == [
        "Unknown option constructor",
        "Unknown option __proto__",
        "signal must be AbortSignal or none, got 5.",
        "onText must be Function or none, got 5.",
        None,
        None,
        "The call was cancelled.",
        "signal must be AbortSignal or none, got 5.",
        "The call was cancelled.",
        None,
        "The text contains a lone surrogate.",
        None,
    ]
    assert [item and item[0] for item in found] == [
        *["InputError"] * 4, None, None, "AbortError", "InputError", "AbortError", None, "InputError", None,
    ]  # fmt: skip


def test_lone_surrogates_are_refused_by_zoo_run_too(exported_model: Exported) -> None:
    with (
        load_session(exported_model("gpt-tiny")) as session,
        pytest.raises(ArtifactError, match="is not valid Unicode"),
    ):
        session.run("a\ud800b")
