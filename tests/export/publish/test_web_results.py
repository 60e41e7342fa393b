"""Results of published pages: the names and the values of ``zoo_runtime.load_session``, for every task."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.exported import LIVELY
from zoo.errors import ArtifactError
from zoo_runtime import Pair, load_session
from zoo_runtime.files.results import plain

Exported = Callable[..., Path]
TEXTS = ["hello", "Où est-il ? 🙂", "a\nb"]
LABELS = 'labels=["one", "two", "three"]'


def close(value: Any) -> Any:
    """Let numbers of a result differ by rounding; names and lengths may not."""
    if isinstance(value, dict):
        return {key: close(item) for key, item in value.items()}
    if isinstance(value, list):
        return [close(item) for item in value]
    return pytest.approx(value, abs=1e-5) if isinstance(value, float) else value


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    ("name", "settings", "task"),
    [
        ("bert-tiny", (), None),
        ("bert-tiny", (), "sentence-embedding"),
        ("rnn-tiny", ("num_classes=3", LABELS), None),
        ("rnn-tiny", ("num_classes=3",), None),
        ("rnn-tiny", ("num_classes=3", LABELS, "problem_type=multi_label_classification"), None),
        ("rnn-tiny", ("num_classes=3", LABELS, "problem_type=regression"), None),
        ("textcnn-tiny", (), None),
        ("bert-tiny", ("feature_layers=[1, 2]",), None),
        ("longformer-tiny", (), None),
        ("linformer-tiny", (), "sentence-embedding"),
        ("modernbert-tiny", (), "sentence-embedding"),
        ("modernbert-tiny", ("task=sentence-embedding",), None),
        ("gpt-tiny", LIVELY["gpt-tiny"], None),
        ("t5-tiny", (), None),
    ],
)
def test_results(exported_model: Exported, publish: Any, run: Any, name: str, settings: Any, task: str | None) -> None:
    given = settings if isinstance(settings, dict) else {"noise": True, "gain": 3.0}
    source = exported_model(name, *(() if isinstance(settings, dict) else settings), **given)
    with load_session(source, task=task) as session:
        wanted = session.run(TEXTS)
    for one, other in zip(run(publish(source), *TEXTS, load={"task": task}), wanted, strict=True):
        del one["pieces"]
        assert one == close(plain(other))
    assert plain(wanted[0]) != plain(wanted[1])


@pytest.mark.slow
def test_fill_mask(exported_model: Exported, publish: Any, run: Any) -> None:
    source = exported_model("perceiver-tiny", noise=True, gain=2.0)
    with load_session(source) as session:
        text = f"ab{session.runner().decode([session.option('mask_token_id')])}d"  # type: ignore[attr-defined]
        (wanted,) = session.run([text])
    (found,) = run(publish(source), text)
    del found["pieces"]
    assert found == close(plain(wanted))


def test_pairs_that_are_unicode_only_together(exported_model: Exported, publish: Any, serve: Any, tab: Any) -> None:
    source, pair = exported_model("rnn-tiny"), ["a\ud83d", "\ude42b"]
    script = """async () => {
      const { loadSession } = await import("./zoo.js"), session = await loadSession();
      return await session.run(["a\\ud83d", "\\ude42b"]).then(() => null, ({ name, message }) => [name, message]);
    }"""
    found = tab(serve(publish(source)).url).evaluate(script)
    assert found == ["InputError", "The text contains a lone surrogate."]
    with load_session(source) as session, pytest.raises(ArtifactError, match="cannot be encoded"):
        session.run(Pair(*pair))


def test_tasks_that_a_page_cannot_run(exported_model: Exported, publish: Any, serve: Any, tab: Any) -> None:
    script = """async (task) => {
      const { loadSession } = await import("./zoo.js");
      return await loadSession(undefined, { task }).then(() => null, ({ name, message }) => [name, message]);
    }"""
    page = tab(serve(publish(exported_model("rnn-tiny"))).url)
    for task in ("sentence-embedding", "feature-extraction", "chess"):
        said = f"The model's task is text-classification: a page cannot run {task}."
        assert page.evaluate(script, task) == ["InputError", said]
    assert page.evaluate(script, "text-classification") is None
