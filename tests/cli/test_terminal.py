"""Tables fit a terminal and verdicts have colours there; files and pipes get whole, plain text."""

from __future__ import annotations

import io
import json
import re
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.test_progress import terminal
from tests.conftest import Result
from zoo import cli
from zoo.cli import output, report

Zoo = Callable[..., Result]
ESCAPE = "\x1b["
RED, GREEN, YELLOW = "\x1b[31m", "\x1b[32m", "\x1b[33m"


def cells_of(text: str) -> int:
    """Number of columns on a terminal: two for wide characters (Unicode Standard Annex 11), none for marks."""
    return sum(
        0 if unicodedata.combining(one) else 2 if unicodedata.east_asian_width(one) in "WF" else 1 for one in text
    )


@pytest.mark.parametrize("width", [40, 60, 100, 400])
def test_tables_fit(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Every preset has a line, of at most the width of the terminal; only long cells are shortened."""
    with terminal(monkeypatch, "stdout") as screen:
        monkeypatch.setenv("COLUMNS", str(width))
        assert cli.main(["list"]) == 0
    lines = screen.text.replace("\r", "").splitlines()
    whole = io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", whole)
        assert cli.main(["list"]) == 0
    expected = whole.getvalue().splitlines()
    assert len(lines) == len(expected)
    if width >= 100:
        assert max(map(cells_of, lines)) <= width
    if width == 400:
        assert lines == expected
    else:
        assert any(line.endswith("…") for line in lines)
    names = [line.split()[0] for line in expected]
    assert all(name.startswith(line.split()[0].rstrip("…")) for name, line in zip(names, lines, strict=True))


TEXT = st.text(st.sampled_from("ab 語ü😀"), max_size=30)


@given(st.lists(st.tuples(TEXT, TEXT, st.integers(0, 10**6)), min_size=1, max_size=4), st.integers(45, 120))
def test_columns_stay_in_line(rows: list[tuple[str, str, int]], width: int) -> None:
    """Wide characters count twice. Numbers are never shortened."""
    with pytest.MonkeyPatch.context() as patch, terminal(patch, "stdout") as screen:
        patch.setenv("COLUMNS", str(width))
        report.columns(rows, right=[2])
    lines = screen.text.replace("\r", "").splitlines()
    assert max(map(cells_of, lines)) <= width
    assert [int(line.split()[-1]) for line in lines] == [number for _, _, number in rows]
    assert len({cells_of(line) for line in lines}) == 1  # right-aligned


def test_names_with_a_common_beginning_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of names are shortened in the middle, so that their ends tell them apart."""
    names = [f"a/very/long/common/beginning/of/the/name/{end}" for end in ("first", "second", "語語語")]
    with terminal(monkeypatch, "stdout") as screen:
        monkeypatch.setenv("COLUMNS", "40")
        report.columns([(name, number) for number, name in enumerate(names)], right=[1], middle=[0])
    lines = screen.text.replace("\r", "").splitlines()
    assert [cells_of(line) for line in lines] == [40] * 3
    for name, line in zip(names, lines, strict=True):
        first, _, last = line.rsplit(" ", 1)[0].strip().partition("…")
        assert name.startswith(first) and name.endswith(last)
        assert len(first) > 8 and len(last) > 12


def test_ellipsis_without_unicode(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        encoding = "ascii"  # type: ignore[assignment]

        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr(sys, "stdout", found := Terminal())
    report.columns([("a" * 50, "b")])
    assert found.getvalue() == f"{'a' * 14}...  b\n"


@pytest.mark.parametrize(
    ("variables", "on_terminal", "in_pipe"),
    [
        ({}, True, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"NO_COLOR": ""}, True, False),  # https://no-color.org: present and not empty
        ({"FORCE_COLOR": "1"}, True, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
        ({"TERM": "dumb"}, False, False),
    ],
)
def test_colours_of_messages(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], on_terminal: bool, in_pipe: bool
) -> None:
    with terminal(monkeypatch, "stderr") as screen:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert cli.main(["show", "nothing-like-it"]) == 2
    assert screen.plain.startswith("error: ")
    assert (RED in screen.text) == on_terminal
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    output.message("warning", "red \x1b[31m text")
    assert (YELLOW in pipe.getvalue()) == in_pipe
    assert "\\x1b[31m" in pipe.getvalue()  # text never colours itself


def test_colours_of_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In tables they take no width; in JSON there are none."""
    rows = [("first", "passed", 1), ("second", "failed", 22), ("passed by name", "-", 3)]
    with terminal(monkeypatch, "stdout") as screen:
        report.columns(rows, verdicts=output.VERDICTS)
        output.echo("m: model.onnx verified on cpu", verdicts=output.VERDICTS)
        output.echo("m: NOT VERIFIED (why)", verdicts=output.VERDICTS)
        output.echo("passed")
    first, second, third, good, bad, plain = screen.text.replace("\r", "").splitlines()
    assert GREEN in first and RED in second and ESCAPE not in third + plain
    assert f"{GREEN}verified\x1b[0m" in good and f"{RED}NOT VERIFIED\x1b[0m" in bad
    assert [line.index("1") if "1" in line else 0 for line in screen.plain.splitlines()[:1]] == [24]
    with terminal(monkeypatch, "stdout") as screen:
        assert cli.main(["plugins", "list", "--json"]) == 0
    assert ESCAPE not in screen.text
    json.loads(screen.text)


def test_no_bar_on_a_dumb_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for variables in ({"TERM": "dumb"}, {"TERM": "unknown"}):
        with terminal(monkeypatch, "stderr") as screen:
            for name, value in variables.items():
                monkeypatch.setenv(name, value)
            assert cli.main(["build", "gpt-tiny", "--force"]) == 0
        assert screen.text == ""
    with terminal(monkeypatch, "stderr") as screen:
        monkeypatch.setenv("NO_COLOR", "1")
        assert cli.main(["build", "gpt-tiny", "--force"]) == 0
    assert "building" in screen.plain
    assert not re.search(r"\x1b\[[\d;]*3[0-7]m|\x1b\[38", screen.text)
    assert Path("gpt-tiny").is_dir()
