"""Progress bars of long commands on a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from zoo import cli


class Screen:
    """Terminal output."""

    def __init__(self) -> None:
        self.text = ""

    @property
    def plain(self) -> str:
        """Output without control sequences."""
        return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", self.text)

    @property
    def last_line(self) -> str:
        """The text left on the last line; progress bars erase themselves."""
        after = self.text.rpartition("\x1b[2K")[2]
        return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", after).strip()


@contextlib.contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch, *streams: str) -> Iterator[Screen]:
    """Connect streams of this process to a terminal."""
    for variable in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    master, slave = pty.openpty()
    screen, parts = Screen(), []

    def read() -> None:
        with contextlib.suppress(OSError):  # EIO when the other end is closed
            while data := os.read(master, 4096):
                parts.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with open(slave, "w", encoding="utf-8") as file, monkeypatch.context() as patch:  # noqa: PTH123
            for stream in streams:
                patch.setattr(sys, stream, file)
            yield screen
    finally:
        reader.join()
        os.close(master)
        screen.text = b"".join(parts).decode()


def test_build_shows_bytes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On stderr; nothing remains at the end."""
    with terminal(monkeypatch, "stderr") as screen:
        assert cli.main(["build", "gpt-tiny"]) == 0
    assert "building" in screen.plain
    assert re.search(r"\d+(\.\d+)?/\d+(\.\d+)? [kM]B", screen.plain), screen.plain
    assert screen.last_line == ""
    assert capsys.readouterr().out.startswith("gpt-tiny: ")


def test_import_and_adapt_show_bytes(copy_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Like build."""
    copy_of("gpt-tiny")
    assert cli.main(["publish", "gpt-tiny", "hub", "--layout", "hub"]) == 0
    for command, *arguments in (
        ("importing", "import", "hub", "-o", "ours", "--no-verify"),
        ("adapting", "adapt", "gpt-tiny", "--set", "dropout=0.5", "-o", "other"),
    ):
        with terminal(monkeypatch, "stderr") as screen:
            assert cli.main(list(arguments)) == 0
        assert command in screen.plain
        assert re.search(r"/\d+(\.\d+)? [kM]B", screen.plain), screen.plain


@pytest.fixture(scope="module")
def model(built: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build and export a model without verification, which suffices to run it."""
    path = shutil.copytree(built("bert-tiny"), tmp_path_factory.mktemp("progress") / "bert-tiny")
    assert cli.main(["export", str(path), "--onnx", "--graph-only"]) == 0
    return path


def embed(model: Path, file: str) -> list[str]:
    options = f"--unverified --task sentence-embedding --input {file} --output out.jsonl"
    return ["run", str(model), *options.split()]


@pytest.mark.slow
@pytest.mark.parametrize("streams", [("stderr",), ("stdout", "stderr")], ids="-".join)
def test_run_counts_inputs(model: Path, monkeypatch: pytest.MonkeyPatch, streams: tuple[str, ...]) -> None:
    """Relative to the rows of the file, even if stdout is a terminal; the last line reports the output file."""
    Path("in.txt").write_text("".join(f"text {number}\n" for number in range(7)) + "\n")
    run = embed(model, "in.txt")
    with terminal(monkeypatch, *streams) as screen:
        assert cli.main(run) == 3  # for the empty line
    assert "8/8" in screen.plain
    assert re.search(r"[\d.]+/s", screen.plain)
    assert "out.jsonl: 7 results written, 1 of 8 inputs failed" in screen.plain
    with terminal(monkeypatch, *streams) as screen:
        assert cli.main([*run, "--resume"]) == 3
    assert "out.jsonl: 0 results written, 7 kept from an earlier run, 1 of 1 inputs failed" in screen.plain


@pytest.mark.slow
def test_no_progress_without_a_terminal(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stderr has only warnings."""
    Path("in.jsonl").write_text('{"text": "a"}\n\n{"text": "b"}\n')
    assert cli.main(embed(model, "in.jsonl")) == 0
    assert cli.main(["build", "gpt-tiny"]) == 0
    assert capsys.readouterr().err == ""


def tiny_run(name: str) -> list[str]:
    """Return a command that trains for 24 steps, with two evaluations."""
    Path("notes.txt").write_text("".join(f"note {number}: {number} and {number + 1}\n" for number in range(60)))
    settings = ("max_length=16", "batch_size=2", "hidden_size=16", "num_layers=1", "evaluate_every=12")
    data = ["--data", "notes.txt", "--validation", "notes.txt"]
    return ["train", "gpt-tiny", *data, "-o", name, "--max-steps", "24", *(
        part for setting in settings for part in ("--set", setting))]  # fmt: skip


def test_training_shows_loss_and_rate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The bar shows the loss and the rate of each step; evaluations are printed on separate lines."""
    with terminal(monkeypatch, "stderr") as screen:
        monkeypatch.setenv("COLUMNS", "80")
        assert cli.main(tiny_run("m")) == 0
    found = re.findall(r"loss \d+\.\d{4}, rate \d\.\de-\d\d .*?(\d+)/24", screen.plain)
    assert found
    assert re.search(r"\d:\d\d:\d\d|-:--:--", screen.plain)
    lines = [line.strip() for line in screen.plain.splitlines() if line.strip().startswith("step ")]
    assert [line.partition(":")[0] for line in lines] == ["step 12 of 24", "step 24 of 24"]
    assert all("; evaluation: loss" in line for line in lines)  # not wrapped by words
    assert max(len(line) for line in re.split(r"[\r\n]+", screen.plain) if "/24" in line) <= 80
    assert screen.last_line == ""
    capsys.readouterr()
    assert cli.main(tiny_run("n")) == 0
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err
    assert [line.partition(":")[0] for line in said.err.splitlines() if line.startswith("step ")] == [
        f"step {number} of 24" for number in (10, 12, 20, 24)
    ]


@pytest.mark.slow
def test_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch, "stderr") as screen:
        monkeypatch.setenv("TERM", "dumb")
        assert cli.main(tiny_run("m")) == 0
    assert "\x1b" not in screen.text
    assert len(re.findall(r"step \d+ of 24", screen.text)) == 4


def test_bench_names_the_measurement(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = ["bench", str(model), "--unverified", "--no-torch", "--seconds", "0.3", "--lengths", "8,16", "--json"]
    with terminal(monkeypatch, "stderr") as screen:
        assert cli.main(bench) == 0
    for length in (8, 16):
        assert f"encode 1 x {length}: timing onnxruntime" in screen.plain, screen.plain
    assert "1/2" in screen.plain
