"""A cache that cannot be written stops no command, and a temporary folder that cannot be written is named."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Result
from tests.exported import exported_build, once, one_thread, signed_export
from zoo import memo, system

__all__ = ["exported_build", "once", "one_thread", "signed_export"]

Zoo = Callable[..., Result]


@pytest.mark.slow
def test_export_needs_no_cache(copy_of: Callable[..., Path]) -> None:
    """torch makes a folder for compiled files as soon as its tracer is imported."""
    Path("file").touch()
    copy_of("vit-tiny")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), memo.VARIABLE: "file/below"}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    command = [sys.executable, "-m", "zoo", "export", "vit-tiny", "--onnx", "--graph-only", "-q"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert Path("vit-tiny/model.onnx").exists()


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


@pytest.mark.slow
def test_full_temporary_folder_is_named(
    exported_model: Callable[..., Path], zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the model is not the one that lacks space for a copy of its weights."""
    model = exported_model("gpt-tiny", "max_seq_len=32")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setenv(memo.VARIABLE, "off")
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN  # so that a write fails instead
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        result = zoo("verify", model, "-q")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    error = result.failed(6, "cannot write (File too large): ", "zoo-scratch-", "raise the limit on the size of a file")
    assert str(model) not in error
