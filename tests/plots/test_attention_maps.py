"""Plots of attention: the weights are those of the verified graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.plots.reading import artists, check_files, labels, texts
from zoo import plots
from zoo.errors import UsageError
from zoo_runtime import Pair, load_session

Showing = Callable[..., Path]


def weights_of(folder: Path, value: Any) -> Any:
    with load_session(folder, variant="attentions") as session:
        return session.run(value, task="attentions")


def drawn(plot: Any, gid: str) -> np.ndarray[Any, Any]:
    (item,) = artists(plot, gid)
    return np.asarray(item.get_array())


@pytest.mark.slow
def test_one_head_has_its_weights_and_tokens(showing: Showing, zoo: Any, tmp_path: Path) -> None:
    folder, text = showing("gpt-tiny"), "time $x$"
    result = weights_of(folder, text)
    plot = plots.attention(folder, text, layers=[1], heads=[2])
    assert np.array_equal(drawn(plot, "weights"), result["attentions"]["attentions.1.2"])
    axes = plot.figure.axes[0]
    tokens = [token if token.strip() else "\N{OPEN BOX}" for token in result["texts"]]
    assert labels(axes.xaxis) == labels(axes.yaxis) == tokens
    assert {"key", "query", "attention weight", plot.title} <= set(check_files(plot, tmp_path))
    done = zoo("show", folder, text, "--figure", "a.svg", "--of", "attention", "--layer", 1, "--head", 2)
    assert done.out == f"a.svg: {plot.title}\n"
    assert Path("a.svg").read_bytes() == Path("1.svg").read_bytes()


@pytest.mark.slow
def test_all_heads_are_drawn(showing: Showing, tmp_path: Path) -> None:
    folder = showing("transformer-tiny")
    result = weights_of(folder, Pair("abc", "de"))["attentions"]
    plot = plots.attention(folder, "abc", "de")
    found = {item.get_gid() for axes in plot.figure.axes for item in axes.get_children() if item.get_gid()}
    wanted = {f"{'.'.join(name.split('.')[:-1])}-{name.split('.')[-1]}" for name in result}
    assert found == wanted
    for name, weights in result.items():
        stem, _, head = name.rpartition(".")
        assert np.array_equal(drawn(plot, f"{stem}-{head}"), weights)
    assert "decoder.cross_attentions.1" in check_files(plot, tmp_path)


@pytest.mark.slow
def test_lines_are_as_wide_as_the_weights_of_a_query(showing: Showing, zoo: Any, tmp_path: Path) -> None:
    folder, text = showing("gpt-tiny"), "times"
    result = weights_of(folder, text)["attentions"]
    plot = plots.attention(folder, text, layers=[0], token=-2)
    seen = 0
    for head in range(4):
        for key, weight in enumerate(result[f"attentions.0.{head}"][3]):
            lines = list(artists(plot, f"attentions.0-{head}-{key}"))
            assert len(lines) == (weight >= 0.02)
            for line in lines:
                assert np.isclose(line.get_linewidth(), 4 * weight)
                assert np.allclose(line.get_ydata(), (3, key), atol=0.3)
                seen += 1
    assert seen > 4
    assert plot.title == "gpt-tiny: attention of token 3 (e)"
    assert {"head 0", "head 3", "attentions.0"} <= set(check_files(plot, tmp_path))
    arguments = ("show", folder, text, "--figure", "a.svg", "--of", "attention", "--layer", 0, "--token", -2)
    assert zoo(*arguments).out == f"a.svg: {plot.title}\n"
    assert "e" in texts(Path("a.svg"))


@pytest.mark.slow
def test_attention_that_cannot_be_drawn(showing: Showing, zoo: Any, tmp_path: Path, copy_of: Any) -> None:
    folder = showing("gpt-tiny")
    show = ("show", folder, "a", "--figure", "a.svg", "--of", "attention")
    zoo(*show, "--token", 1).failed(2, "no token 1 in attentions.0", "choose from -1 to 0")
    zoo(*show, "--layer", 9).failed(2, "no layer 9")
    zoo(*show, "b", "c").failed(2, "expected one input or a pair, got 3")
    zoo("show", folder, "--figure", "a.svg", "--of", "attention").failed(2, "--of attention needs an input")
    zoo("show", folder, "a", "--unverified", "--figure", "a.svg", "--of", "parity").failed(2, "does not apply")
    before = {path.name for path in tmp_path.iterdir()}
    plain = copy_of("gpt-tiny")
    zoo("show", plain, "a", *show[3:]).failed(3, "not exported for attentions", "--attentions")
    assert {path.name for path in tmp_path.iterdir()} - {plain.name} == before


@pytest.mark.slow
def test_lines_between_many_tokens_are_refused(showing: Showing) -> None:
    with pytest.raises(UsageError, match="lines are drawn for at most 48 tokens, got 60"):
        plots.attention(showing("gpt-tiny", "max_seq_len=64"), "a" * 60, token=0)
