"""A cache that cannot be written stops no command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Result
from zoo import memo, system

Zoo = Callable[..., Result]


def test_export_needs_no_cache(copy_of: Callable[..., Path]) -> None:
    """torch makes a folder for compiled files as soon as its tracer is imported."""
    Path("file").touch()
    copy_of("gpt-tiny")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), memo.VARIABLE: "file/below"}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    command = [sys.executable, "-m", "zoo", "export", "gpt-tiny", "--onnx", "--graph-only", "-q"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert Path("gpt-tiny/model.onnx").exists()


@pytest.mark.parametrize("place", ["/proc/none", "file"])
def test_train_needs_no_cache(place: str, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for the tokens of its texts nor for its lock."""
    Path("file").touch()
    Path("texts.txt").write_text("one two three\n" * 50)
    monkeypatch.setenv(memo.VARIABLE, place)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    result = zoo("train", "gpt-tiny", "--data", "texts.txt", "-o", "model", "--max-steps", 1, "-q")
    assert (result.status, result.err) == (0, "")


def test_locks_are_not_among_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes of one user exclude each other, whatever their ``TMPDIR``."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv(memo.VARIABLE, "cache")
    release = system.lock_name("run")
    assert release is not None
    (lock,) = Path("cache/locks").iterdir()
    release()
    assert not lock.exists()
