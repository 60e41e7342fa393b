"""Differences between operating systems: locks, durable writes, swaps of directories, processes, memory.

Tests run on Linux. Code for another system is a function of its own where possible, so that it is tested there too.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn, TypeVar

from zoo import memo, signals
from zoo.errors import StorageError, ZooWarning, storage_errors

if sys.platform != "win32":
    import fcntl

__all__ = [
    "MAX_THREADS",
    "Release",
    "call_in_thread",
    "computing_apart",
    "end_tree",
    "free_memory",
    "has_abandoned_threads",
    "has_parent",
    "interpreter",
    "interruptible",
    "is_own",
    "library_file",
    "limit_memory",
    "limit_processor_time",
    "lock",
    "native_threads",
    "release_large_blocks",
    "release_memory",
    "swap",
    "sync",
    "try_lock",
    "usable_cores",
]

T = TypeVar("T")
Release = Callable[[], None]
"""Releases a lock. Locks are also released when the process ends."""

MAX_THREADS = 1024
"""Maximum number of threads that a session may be given; thousands take minutes to start, or fail to."""

_NOTICE, _LIMIT = 1.5, 60.0
"""Seconds to wait for a lock before a warning, and before an error."""
_POLL = 0.05
_PATIENCE = 0.5
"""Seconds between questions whether to wait on for a thread."""
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's ``mallopt``."""
_LARGE_BLOCK = 2**20
"""Bytes from which a block has pages of its own."""


def lock(directory: Path) -> Release:
    """Lock a directory, waiting until the lock is free.

    Warns after a second or two, and raises :class:`StorageError` after a minute.
    """
    started, warned = time.monotonic(), False
    while (release := try_lock(directory)) is None:
        waited = time.monotonic() - started
        if waited > _LIMIT:
            what = f"another process has kept this directory locked for {_LIMIT:g} s"
            raise StorageError(what, directory, "wait for that process or end it, then run the command again")
        if waited > _NOTICE and not warned:
            warnings.warn(f"waiting for another process that has locked {directory}", ZooWarning, stacklevel=2)
            warned = True
        time.sleep(_POLL)
    return release


def try_lock(directory: Path) -> Release | None:
    """Lock a directory without waiting. Return None if this or another process has locked it already."""
    if sys.platform == "win32":
        release = _lock_file(directory)
    else:
        release = _lock_itself(directory)
    return release


if sys.platform != "win32":

    def _lock_itself(directory: Path) -> Release | None:
        """Lock the directory's inode: nothing is written, and other users and other machines respect the lock."""
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), directory.stat()):
                return lambda: os.close(descriptor)
        except BlockingIOError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # locked by another process, or replaced by another directory
        return None


def is_own(path: Path) -> bool:
    """Return whether this user owns a file or directory."""
    return sys.platform == "win32" or path.lstat().st_uid == os.geteuid()


def _lock_file(directory: Path) -> Release | None:
    """Lock a file that stands for the directory's path. It excludes only this user's processes on this machine.

    The file is not in the directory, because Windows cannot rename a directory while a file in it is open, nor beside
    it, where the user may lack write permission.
    """
    if not directory.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(directory))
    return lock_name(os.path.normcase(directory.resolve()))


def lock_name(name: str) -> Release | None:
    """Lock a name without waiting. Return None if this or another process of this user has locked it already."""
    import filelock

    place = _lock_folder() / f"{hashlib.sha256(os.fsencode(name)).hexdigest()}.lock"
    held = filelock.FileLock(place)
    try:
        held.acquire(blocking=False)
    except filelock.Timeout:
        return None

    def release() -> None:
        held.release()
        with suppress(OSError):  # Windows refuses while another process has it open; that process removes it
            place.unlink()

    return release


def _lock_folder() -> Path:
    """Return the folder for lock files, the same for all of this user's processes.

    Without a runtime directory, platformdirs chooses a folder among temporary files, which ``TMPDIR`` changes. It is
    used only where the cache cannot be written.
    """
    import platformdirs

    folder = None if os.environ.get("XDG_RUNTIME_DIR") else memo.folder("locks")
    if folder is None:
        with storage_errors("runtime directory"):
            folder = platformdirs.user_runtime_path("zoo", appauthor=False, ensure_exists=True)
    return folder


def swap(one: Path, other: Path) -> bool:
    """Swap two directories atomically. Return False where the system or the file system cannot."""
    if sys.platform == "linux":
        rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if rename is not None:
            if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
                return True
            code = ctypes.get_errno()
            if code not in (errno.ENOSYS, errno.EINVAL):
                raise OSError(code, os.strerror(code), str(other))
    return False


def sync(path: Path) -> None:
    """Flush a file or directory to disk. No-op for directories on Windows, which cannot flush them."""
    if sys.platform == "win32" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def end_tree(process: int) -> None:
    """Kill a session leader and all the processes that it started."""
    with suppress(ProcessLookupError, PermissionError):
        if sys.platform == "win32":
            _kill_tree(process)
        else:
            os.killpg(process, signal.SIGKILL)


def _kill_tree(process: int) -> None:
    """Kill a process, then its descendants. Descendants whose parent has ended are not found."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(process)
        for each in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                each.kill()


def has_parent(process: int) -> bool:
    """Return whether the current process has this parent and it is alive. Windows keeps the id of an ended parent."""
    import psutil

    parent = psutil.Process().parent()
    return parent is not None and parent.pid == process


def interpreter() -> list[str]:
    """Return the command of a Python that imports nothing from the working directory.

    It ignores ``PYTHONPATH`` and the like where this process does (``python -I``).
    """
    return [sys.executable, "-I" if sys.flags.isolated else "-P"]


def library_file(name: str) -> str:
    """Return the platform's file name for a shared library."""
    prefix, suffix = {"win32": ("", ".dll"), "darwin": ("lib", ".dylib")}.get(sys.platform, ("lib", ".so"))
    return f"{prefix}{name}{suffix}"


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    if sys.platform == "linux":
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return cores


def interruptible(function: Callable[[], T]) -> T:
    """Call a function in another thread and wait for it, so that Ctrl-C ends the wait, even for native code.

    The thread then goes on until the function or the process ends. Other threads than the main one, which do not
    receive Ctrl-C, call the function themselves.
    """
    if threading.current_thread() is not threading.main_thread():
        return function()
    return call_in_thread(function, lambda: False)


def call_in_thread(function: Callable[[], T], give_up: Callable[[], bool]) -> T:
    """Call a function in another thread and wait for it, but raise ``TimeoutError`` once ``give_up`` returns True.

    The thread then goes on until the function or the process ends; see :func:`has_abandoned_threads`.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)
        running.release()

    # An interrupted Event raises errors of its own locks, and an interrupted Thread.join forgets the thread.
    running = threading.Lock()
    running.acquire()
    thread = threading.Thread(target=call, daemon=True)
    try:
        with signals.deferred():
            thread.start()
        while not running.acquire(timeout=_PATIENCE):
            if give_up():
                raise TimeoutError
    except BaseException:
        _abandoned.append(running)
        raise
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


_abandoned: list[threading.Lock] = []
"""Held while their threads run."""


def has_abandoned_threads() -> bool:
    """Return whether a thread of :func:`call_in_thread` runs that nobody waits for.

    Native code may crash when it runs while the process is torn down, so ``os._exit`` has to end it.
    """
    return any(running.locked() for running in _abandoned)


@contextmanager
def computing_apart(function: Callable[[], bytes]) -> Iterator[Callable[[], bytes | None]]:
    """Compute a result in a forked process while the block runs. Yields a function that waits for it.

    The result is None if the function raised, if the process was killed, and where a process cannot be forked: outside
    Linux, or where this one has threads, which the other would lack. The function cannot change anything here. Its
    process is killed when the block ends.
    """
    if sys.platform != "linux" or threading.active_count() > 1:
        yield lambda: None
        return
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        _compute(function, writing)
    os.close(writing)
    try:
        with open(reading, "rb", closefd=False) as pipe:
            yield lambda: _checked(pipe.read())
    finally:
        os.close(reading)
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def _compute(function: Callable[[], bytes], writing: int) -> NoReturn:
    """Write a result and its digest to a pipe, and end this process."""
    try:
        data = function()
        with open(writing, "wb") as pipe:
            pipe.write(hashlib.sha256(data).digest() + data)
    finally:
        os._exit(0)


def _checked(data: bytes) -> bytes | None:
    """Return a result, or None if it is incomplete."""
    digest, result = data[:32], data[32:]
    return result if hashlib.sha256(result).digest() == digest else None


def native_threads() -> int:
    """Return the number of threads of this process, those of libraries included, or 0 where it is unknown."""
    with suppress(OSError):
        return len([*Path("/proc/self/task").iterdir()])
    return 0


def free_memory() -> float:
    """Return the bytes of memory available without swapping, within the limit of the container."""
    free = _available_memory()
    with suppress(OSError, ValueError):  # no control group, or "max"
        group = Path("/sys/fs/cgroup")
        limit, used = ((group / name).read_text(encoding="ascii") for name in ("memory.max", "memory.current"))
        free = min(free, float(limit) - float(used))
    return free


def _available_memory() -> float:
    """Return the bytes of memory available without swapping, on the whole machine."""
    with suppress(OSError):  # as psutil does on Linux, whose import takes as long as opening a small model
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return float(value.removesuffix("kB")) * 1024
    import psutil

    return float(psutil.virtual_memory().available)


def limit_memory(size: float | None) -> None:
    """Let this process allocate at most ``size`` more bytes from now on, or as many as at its start for None.

    Linux counts private writable mappings, whether they are used or not, and of files too. No-op elsewhere.
    """
    global _data_limit
    if sys.platform == "linux":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if _data_limit is None:
            _data_limit = soft
        limits = [limit for limit in (_data_limit, hard) if limit != resource.RLIM_INFINITY]
        if size is not None:
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])
            limits.append(pages * resource.getpagesize() + int(size))
        resource.setrlimit(resource.RLIMIT_DATA, (min(limits, default=resource.RLIM_INFINITY), hard))


_data_limit: int | None = None
"""The soft limit at the start of the process."""


def limit_processor_time(seconds: float) -> None:
    """End this process with SIGPROF once it has taken so many more seconds of processor time. No-op on Windows.

    The signal has no handler, so it also ends long operations of native code.
    """
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)


def release_memory() -> None:
    """Return freed memory to the system. glibc keeps what lies between blocks in use; other libraries do not."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def release_large_blocks() -> None:
    """Return every large block of memory to the system as soon as it is freed, from now on.

    glibc otherwise keeps more and more of them: up to the size of the largest one that was freed, at most 32 MB. Other
    libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)
        mallopt(_M_TRIM_THRESHOLD, _LARGE_BLOCK)  # it has grown with the largest block, too
