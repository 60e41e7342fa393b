"""Plots of probabilities: bars are the numbers of the answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.exported import signed_export
from tests.plots.reading import artists, check_files, labels
from zoo.errors import UsageError
from zoo.plots import Distribution, distributions
from zoo_runtime import load_session, plot_answers

__all__ = ["signed_export"]

Exported = Callable[..., Path]


def bars(plot: Any) -> list[list[float]]:
    """Return the probabilities of each panel."""
    return [
        [bar.get_width() for bar in axes.patches if bar.get_gid() == "probability"]
        for axes in plot.figure.axes
        if axes.get_visible()
    ]


def test_bars_are_the_probabilities_of_next_tokens(exported_model: Exported, zoo: Any, tmp_path: Path) -> None:
    folder, texts = exported_model("gpt-tiny"), ["hello", "a $b$\n"]
    with load_session(folder) as session:
        results = session.run(texts, task="next-token", top_k=4)
        plot = plot_answers(session, texts, task="next-token", top_k=4)
    assert bars(plot) == [[part["probability"] for part in result["next"]] for result in results]
    for axes, result in zip(plot.figure.axes, results, strict=True):
        rest = 1 - sum(part["probability"] for part in result["next"])
        assert axes.get_xlabel() == f"probability (all others: {rest:.1%})"
        for name, part in zip(labels(axes.yaxis), result["next"], strict=True):
            assert name.startswith(repr(part["text"]))
    assert {"'hello'", "gpt-tiny: probabilities by next-token", "'a $b$\\n'"} <= set(check_files(plot, tmp_path))
    arguments = ("run", folder, *texts, "--task", "next-token", "--option", "top_k=4", "--figure", "a.svg")
    plain = zoo(*arguments[:-2])
    done = zoo(*arguments)
    assert (done.status, done.out) == (0, plain.out)
    assert done.err == "a.svg: gpt-tiny: probabilities by next-token\n"
    assert Path("a.svg").read_bytes() == Path("1.svg").read_bytes()
    zoo(*arguments).failed(2, "already exists: a.svg", "--force")
    assert len(zoo(*arguments, "--force", "--json").json["results"]) == 2


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("preset", "value"), [("bert-tiny", [1, 259, 2, 259]), ("textcnn-tiny", "a text")])
def test_other_tasks_give_probabilities(preset: str, value: Any, exported_model: Exported) -> None:
    """A panel for each mask; the classes of a text."""
    settings = ("task=fill-mask", "mask_token_id=259") if preset == "bert-tiny" else ()
    with load_session(exported_model(preset, *settings)) as session:
        result = session.run(value)
        plot = plot_answers(session, [value])
    groups = result["masks"] if "masks" in result else [result["classes"]]
    assert bars(plot) == [[part["probability"] for part in group] for group in groups]


@pytest.mark.slow
def test_probabilities_of_several_true_classes_do_not_add_up(exported_model: Exported) -> None:
    with load_session(exported_model("textcnn-tiny")) as session:
        plot = plot_answers(session, ["a text"], function_to_apply="sigmoid", top_k=1)
        assert plot.figure.axes[0].get_xlabel() == "probability"
        plot = plot_answers(session, ["a text"], top_k=1)
        assert "all others" in plot.figure.axes[0].get_xlabel()
        with pytest.raises(UsageError, match="a regression gives no probabilities"):
            plot_answers(session, ["a text"], function_to_apply="none")


def test_a_figure_needs_probabilities_and_few_inputs(exported_model: Exported, zoo: Any, tmp_path: Path) -> None:
    """Nothing is written, and nothing is run."""
    folder = exported_model("gpt-tiny")
    zoo("run", folder, "a", "--figure", "a.svg").failed(
        2, "the task text-generation gives no probabilities", "next-token"
    )
    next_token = ("run", folder, "--task", "next-token", "--figure")
    zoo(*next_token, "a.pdf", "a").failed(2, "unsupported figure format: a.pdf")
    zoo(*next_token, "a.svg", stdin=b"a\n").failed(2, "a figure shows 1 to 12 inputs of the command line, got 0")
    zoo(*next_token, "a.svg", *"abcdefghijklm").failed(2, "got 13")
    zoo(*next_token, "a.svg", "").failed(3, "empty input: input 1")
    assert list(tmp_path.iterdir()) == []
    Path("file").write_text("old")
    done = zoo(*next_token, "file/a.svg", "a")
    done.failed(6, "cannot write (Not a directory): file/a.svg")
    assert done.out == ""


@pytest.mark.parametrize("items", [[], [("a", 1.5)], [("a", float("nan"))], [("a", -0.1)]])
def test_other_numbers_are_not_probabilities(items: Any) -> None:
    with pytest.raises(UsageError, match="not a distribution of probabilities: an input"):
        distributions("model", [Distribution(title="an input", items=items)])
    with pytest.raises(UsageError, match="a plot shows 1 to 12 distributions, got 0"):
        distributions("model", [])


def test_names_may_contain_anything(tmp_path: Path) -> None:
    items = [("\x00\ud800 <&> $x^2$", 0.5), ("あ", 0.25), ("x" * 100, 1e-7)]
    plot = distributions("model", [Distribution(title="t", items=items)])
    texts = check_files(plot, tmp_path)
    assert {"<00><D800> <&> $x^2$", "あ", f"{'x' * 39}\N{HORIZONTAL ELLIPSIS}", "1e-07"} <= set(texts)
    assert [bar.get_width() for bar in artists(plot, "probability")] == [0.5, 0.25, 1e-7]
