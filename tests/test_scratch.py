"""Temporary folders: private, removed when they are no longer used, and after a crash by the next process."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from zoo import StorageError
from zoo.storage import scratch_folder

DIE = """
import os, signal
from zoo.storage import scratch_folder

with scratch_folder() as folder:
    (folder / "weights").write_bytes(b"copy")
    os.kill(os.getpid(), signal.SIGKILL)
"""
TAKE_TURNS = """
from zoo.storage import scratch_folder

for number in range(200):
    with scratch_folder() as folder:
        (folder / "file").write_text(str(number))
        assert (folder / "file").read_text() == str(number)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def run(code: str) -> subprocess.Popen[bytes]:
    """Start a process with this code."""
    return subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


def test_folder_is_private_and_removed(temporary: Path) -> None:
    """Even if files in it are read-only."""
    with scratch_folder() as folder:
        assert folder.is_relative_to(temporary)
        assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
        assert not list(folder.iterdir())
        (folder / "inner").mkdir()
        (folder / "inner/file").touch(mode=0o400)
        (folder / "inner").chmod(0o500)
    assert not list(temporary.iterdir())


def test_folder_is_removed_after_an_error(temporary: Path) -> None:
    """The error passes."""
    with pytest.raises(OSError, match=r"^mine$"), scratch_folder():
        raise OSError("mine")
    assert not list(temporary.iterdir())


def test_folders_of_killed_processes_are_removed(temporary: Path) -> None:
    """Folders of living processes, and folders that zoo did not make, are kept."""
    process = run(DIE)
    process.wait(60)
    (left,) = temporary.iterdir()
    assert (left / "content/weights").read_bytes() == b"copy"
    with scratch_folder() as living:
        assert not left.exists()
        (temporary / f"{living.parent.name}0").mkdir()
        (temporary / f"{living.parent.name}0/notes").touch()
        with scratch_folder() as other:
            assert living.exists()
            assert other.exists()
    assert [path.name for path in temporary.glob("*/*")] == ["notes"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make folders of other users")
def test_folders_of_other_users_are_kept(temporary: Path) -> None:
    """They may be traps: their owners can change them while they are being removed."""
    process = run(DIE)
    process.wait(60)
    (left,) = temporary.iterdir()
    os.chown(left, 65534, 65534)
    with scratch_folder():
        pass
    assert (left / "content/weights").exists()


def test_processes_keep_out_of_the_way_of_each_other(temporary: Path) -> None:
    """Each removes what others left, while they make theirs."""
    processes = [run(TAKE_TURNS) for _ in range(4)]
    assert [process.wait(120) for process in processes] == [0] * 4
    assert not list(temporary.iterdir())


def test_no_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch, temporary: Path) -> None:
    """One line, with what to do."""

    def refuse() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    message = f"no folder for temporary files is writable: {temporary}: set TMPDIR to a folder that is writable"
    with pytest.raises(StorageError) as caught, scratch_folder():
        pass
    assert str(caught.value) == message
