"""Differences between operating systems: code paths of other systems are forced, and must give the same results."""

from __future__ import annotations

import ast
import ctypes
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT, Result
from tests.test_storage import MERGED, NEW, OLD, TARGET, add, dies, make, names, prepare, read, replace, write
from zoo import ArtifactError, StorageError, system
from zoo.artifact import ModelDirectory
from zoo.errors import ZooWarning
from zoo.storage import recover

POSIX = {"crypt", "fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
"""Modules that do not exist on Windows."""


@pytest.fixture(params=["flock", "file"])
def either_lock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Use each kind of lock. Returns the folder for the files of the second kind."""
    folder = tmp_path.with_name(f"{tmp_path.name}-locks")
    if request.param == "file":
        monkeypatch.setattr(system, "_lock_folder", lambda: (folder.mkdir(exist_ok=True), folder)[1])
        monkeypatch.setattr(system, "try_lock", system._lock_file)
    return folder


@pytest.fixture
def portable(either_lock: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use each kind of lock without an atomic swap of directories."""
    monkeypatch.setattr(system, "swap", lambda one, other: False)
    return either_lock


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the patience to a fraction of a second."""
    monkeypatch.setattr(system, "_NOTICE", 0.1)
    monkeypatch.setattr(system, "_LIMIT", 0.4)


def test_lock_is_exclusive(either_lock: Path) -> None:
    """For one directory under different names."""
    write(TARGET, OLD)
    write(Path("other"), OLD)
    release = system.try_lock(TARGET)
    assert release is not None
    assert system.try_lock(TARGET.absolute()) is None
    elsewhere = system.try_lock(Path("other"))
    assert elsewhere is not None
    release()
    again = system.try_lock(TARGET)
    assert again is not None
    again()
    elsewhere()
    assert read(TARGET) == OLD
    assert not either_lock.exists() or not list(either_lock.iterdir())


def test_lock_needs_a_directory(either_lock: Path) -> None:
    with pytest.raises(FileNotFoundError):
        system.try_lock(TARGET)


def test_lock_ends_with_its_process(either_lock: Path) -> None:
    write(TARGET, OLD)
    child = os.fork()
    if child == 0:
        os._exit(0 if system.try_lock(TARGET) is not None else 1)
    assert os.waitpid(child, 0)[1] == 0
    release = system.try_lock(TARGET)
    assert release is not None
    release()


def test_wait_for_a_lock_is_announced_and_ends(either_lock: Path, hasty: None) -> None:
    """Another process holds the directory's lock for good."""
    write(TARGET, OLD)
    release = system.try_lock(TARGET)
    assert release is not None
    with pytest.warns(ZooWarning, match=r"^waiting for another process that has locked .*target$") as warned:  # noqa: SIM117
        with pytest.raises(
            StorageError, match=r"another process has kept this directory locked for 0.4 s: .*target: .*run the com"
        ):
            add()
    assert len(warned) == 1
    release()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        add()
    assert read(TARGET) == MERGED


def test_command_reports_waiting(
    zoo: Callable[..., Result], copy_of: Callable[..., Path], hasty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line while waiting, one after giving up, and the exit status of a storage error."""
    (copy_of("gpt-tiny") / ".zoo-commit").mkdir()
    release = system.try_lock(Path("gpt-tiny"))
    assert release is not None
    result = zoo("verify", "gpt-tiny")
    release()
    assert result.status == StorageError.exit_code == 6
    warning, error = result.err.splitlines()
    assert warning == "warning: waiting for another process that has locked gpt-tiny"
    assert error.startswith(
        "error: another process has kept this directory locked for 0.4 s: gpt-tiny: wait for that process"
    )


@pytest.mark.parametrize(("operation", "after"), [(make, NEW), (replace, NEW), (add, MERGED)])
def test_directories_are_written_without_atomic_swaps(
    operation: Callable[[], None], after: dict[str, bytes], portable: Path
) -> None:
    if operation is not make:
        write(TARGET, OLD)
    operation()
    assert read(TARGET) == after
    assert names() == ["target"]
    assert not portable.exists() or not list(portable.iterdir())


def test_reader_finds_the_old_directory_after_a_crash_between_two_renames(portable: Path) -> None:
    """Readers recover it, without another write."""
    missing = 0
    for number in (1, 2, 3):
        prepare(replace)
        assert dies(replace, "rename", number)
        missing += not TARGET.exists()
        with pytest.raises(ArtifactError, match=r"target/(config\.json|a\.txt)"):  # neither state is a model
            ModelDirectory.open(TARGET)
        recover(TARGET)
        assert read(TARGET) in (OLD, NEW)
        replace()
        assert names() == ["target"]
    assert missing == 1


@pytest.mark.parametrize("path", [".", "..", "/", "missing", "x" * 255])
def test_recovery_of_any_path_is_harmless(path: str) -> None:
    recover(Path(path))


def test_only_living_parents_count() -> None:
    assert system.has_parent(os.getppid())
    assert not system.has_parent(os.getpid())


@pytest.fixture
def family() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start a process that starts another; yield both, the second by its id."""
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
        process.kill()


@pytest.mark.parametrize("end", [system.end_tree, system._kill_tree])
def test_killing_a_process_kills_its_children(
    end: Callable[[int], None], family: tuple[subprocess.Popen[str], int]
) -> None:
    process, child = family
    end(process.pid)
    assert process.wait(10) < 0
    for _ in range(100):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("its child process is still running")


def test_killing_an_ended_process_is_harmless() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    process.wait()
    system.end_tree(process.pid)
    system._kill_tree(process.pid)


def test_cores_and_memory() -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 1e8 < system.free_memory() <= total
    assert system._available_memory() == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    assert 1 <= system.usable_cores() <= (os.cpu_count() or 1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_freed_memory_is_returned() -> None:
    """Small blocks are returned although others between them are in use."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    system.release_memory()  # what other tests freed would be allocated again
    before = resident()
    blocks = [ctypes.c_void_p(libc.malloc(100_000)) for _ in range(2000)]
    for block in blocks:
        ctypes.memset(block, 1, 100_000)
    assert resident() - before > 1.5e8
    for block in blocks[:-1]:
        libc.free(block)
    system.release_memory()
    assert resident() - before < 0.5e8
    libc.free(blocks[-1])


@pytest.mark.parametrize(
    ("platform", "name"), [("linux", "libx.so"), ("darwin", "libx.dylib"), ("win32", "x.dll"), ("freebsd", "libx.so")]
)
def test_library_files(platform: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert system.library_file("x") == name


@pytest.mark.slow
def test_posix_modules_are_imported_conditionally() -> None:
    """An unconditional import at the top of a module would fail there."""
    files = [file for folder in ("zoo", "export", "plugins") for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    for file in files:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            found = [node.module] if isinstance(node, ast.ImportFrom) else []
            found += [name.name for name in node.names] if isinstance(node, ast.Import) else []
            assert POSIX.isdisjoint(found), file


@pytest.mark.skipif(sys.platform != "linux", reason="an option of glibc")
def test_large_blocks_are_returned_when_they_are_freed() -> None:
    """By default, glibc keeps a freed block of 30 MB below one in use, if a block as large was freed before."""
    code = """
import sys
import numpy as np, psutil
from zoo import system
if sys.argv[1] == "now":
    system.release_large_blocks()
for _ in range(2):
    blocks = [np.ones(30 * 2**17) for _ in range(8)]
    full = psutil.Process().memory_info().rss
    last = blocks.pop()
    del blocks
print(full - psutil.Process().memory_info().rss)
"""
    freed = {when: int(subprocess.check_output([sys.executable, "-c", code, when])) for when in ("now", "later")}
    assert freed["now"] > 0.8 * 7 * 30 * 2**20 > freed["later"]


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_result_of_another_process() -> None:
    """A process without threads forks. Failures, deaths and incomplete results are None. None outlives the block."""
    code = """
import os, signal, threading, time
import psutil
from zoo import system
def fail(): raise ValueError
def die(): os.kill(os.getpid(), signal.SIGKILL)
def own(): return str(os.getpid()).encode()
for function in (own, fail, die, lambda: b"", lambda: bytes(10_000_000)):
    with system.computing_apart(function) as result:
        data = result()
    print(None if data is None else len(data), data == own())
with system.computing_apart(lambda: time.sleep(60)):
    assert len(psutil.Process().children()) == 1
assert not psutil.Process().children()
threading.Thread(target=time.sleep, args=(1,)).start()
with system.computing_apart(own) as result:
    print(result())
"""
    lines = subprocess.check_output([sys.executable, "-c", code], text=True, stderr=subprocess.DEVNULL).splitlines()
    assert int(lines[0].split()[0]) > 0
    assert lines[0].endswith("False")
    assert lines[1:] == ["None False", "None False", "0 False", "10000000 False", "None"]


def test_an_interrupted_wait_raises_nothing_else() -> None:
    """Wherever the signal comes. A KeyboardInterrupt inside a wait for an Event may become a RuntimeError."""
    code = """
import random, signal, time
from zoo import system
system._PATIENCE = 0.0002
signal.signal(signal.SIGALRM, signal.default_int_handler)
random.seed(0)
for _ in range(300):
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.002, 0.006))
        system.call_in_thread(lambda: time.sleep(0.02), lambda: False)
    except KeyboardInterrupt:
        print("interrupted")
while system.has_abandoned_threads():
    time.sleep(0.01)
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == 300 * "interrupted\n"


def test_native_code_is_left_alone() -> None:
    """When the caller gives up, or is interrupted; the process then has to end without waiting for it."""
    go = threading.Event()
    with pytest.raises(TimeoutError):
        system.call_in_thread(go.wait, lambda: True)
    assert system.has_abandoned_threads()
    go.set()
    while system.has_abandoned_threads():
        time.sleep(0.01)
    assert system.call_in_thread(lambda: 7, lambda: False) == 7
    with pytest.raises(ZeroDivisionError):
        system.call_in_thread(lambda: 1 / 0, lambda: False)
