"""Ending runs of graphs early: from another thread, after a time, or by Ctrl-C.

ONNX Runtime looks at the flag ``terminate`` of a run between operators and between iterations of a loop. A watching
thread sets it when time is over. Python runs handlers of signals in the main thread only, which a run of a graph
occupies, so the watching thread also receives them, through ``signal.set_wakeup_fd``, and ends that run first.
"""

from __future__ import annotations

import _thread
import math
import os
import re
import signal
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Self, TypeVar

from zoo import signals, system
from zoo.errors import ArtifactError, StoppedError, UsageError, ZooError
from zoo.limits import GRAPH_SECONDS
from zoo_runtime.onnx_runtime import memory_limit
from zoo_runtime.onnx_runtime.ort import ort

__all__ = ["Call", "OutOfMemoryError", "RunError", "load", "memory_error", "named", "running"]

_SLEEP = 3600.0
"""Longest sleep of the watcher, in seconds."""
_GRACE = 2.0
"""Seconds in which a load has to end that was cancelled."""
_LACK = re.compile(r"bad_alloc|bad allocation|Failed to allocate memory|out of memory")
"""Parts of messages about a lack of memory."""

T = TypeVar("T")


class Call:
    """A context manager whose runs of graphs end together. A call inside another one ends with it.

    Args:
        seconds: time after which they end.
        where: the model, for messages.
    """

    def __init__(self, seconds: float | None = None, where: object = None) -> None:
        self.where = where
        self._outer: Call | None = None
        self._reason: str | None = None
        self._deadline = math.inf if seconds is None else time.monotonic() + seconds
        self._late = f"took longer than {seconds:g} s" if seconds is not None else ""

    def stop(self) -> None:
        """End the runs in progress, from any thread, and refuse later ones."""
        self._reason = "interrupted"
        _watch().cancel_all(self)

    def __enter__(self) -> Self:
        self._outer = _CALL.get()
        self._token: Token[Call | None] = _CALL.set(self)
        self._watcher = _watch()
        self._receives = self._outer is None and self._watcher.receive()
        if self._deadline < math.inf:
            self._watcher.add(self, self._deadline)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._deadline < math.inf:
            self._watcher.remove(self)
        if self._receives:
            signal.set_wakeup_fd(-1)
        _CALL.reset(self._token)

    @property
    def reason(self) -> str | None:
        """Why its runs have to end, or None."""
        if self._reason is None and time.monotonic() >= self._deadline:
            return self._late
        return self._reason

    def and_outer(self) -> Iterator[Call]:
        """Iterate over this call and those that it is inside of."""
        call: Call | None = self
        while call is not None:
            yield call
            call = call._outer


_CALL: ContextVar[Call | None] = ContextVar("_CALL", default=None)
_MODEL: ContextVar[object] = ContextVar("_MODEL", default=None)
_WAKE = b"\0"
_MAIN = threading.main_thread().ident


@contextmanager
def named(model: object) -> Iterator[None]:
    """Name the model in errors of the block's runs."""
    token = _MODEL.set(model)
    try:
        yield
    finally:
        _MODEL.reset(token)


class _Stoppable(ABC):
    """A block that another thread can end. It then raises an error, which becomes :class:`zoo.StoppedError`."""

    __slots__ = ("_end", "_limit", "_receives", "_watcher", "call", "thread")

    @abstractmethod
    def cancel(self) -> None:
        """Make what the block waits for raise an error, from any thread."""

    @property
    def where(self) -> object:
        """The model or the file, for messages."""
        return _MODEL.get() if self.call is None else self.call.where

    def enter(self) -> None:
        """Let the block be ended by the calls that it belongs to, and by the limit on time."""
        self.call = call = _CALL.get()
        self.thread = threading.get_ident()
        self._limit = GRAPH_SECONDS.value()
        self._end = time.monotonic() + self._limit
        self._watcher = watcher = _watch()
        watcher.add(self, self._end)
        self._receives = call is None and watcher.receive()
        if call is not None:
            try:
                self.check()
            except StoppedError:
                watcher.remove(self)
                raise

    def exit(self, error: BaseException | None) -> None:
        """Raise :class:`zoo.StoppedError` instead of ``error`` if the block was ended."""
        self._watcher.remove(self)
        if self._receives:
            signal.set_wakeup_fd(-1)
        if isinstance(error, Exception) and not isinstance(error, StoppedError):
            self.check(error)

    def check(self, cause: Exception | None = None) -> None:
        """Raise :class:`zoo.StoppedError` if the block has to end."""
        if self.call is not None:
            for call in self.call.and_outer():
                if (reason := call.reason) is not None:
                    raise StoppedError(reason, self.where) from cause
        if time.monotonic() >= self._end:
            what = f"took longer than {self._limit} s"
            raise StoppedError(what, self.where, f"raise {GRAPH_SECONDS.variable}") from cause


class _Watcher:
    """A thread that ends runs at their deadlines and on signals that interrupt, as Ctrl-C.

    :mod:`threading` does not count it: a process that it keeps from being forked (:func:`zoo.system.computing_apart`)
    would be slower, and a forked process starts its own.
    """

    def __init__(self) -> None:
        self._deadlines: dict[Call | _Stoppable, float] = {}
        self._next = math.inf
        """When it wakes. Only a sooner deadline wakes it before, because this costs as much as a small run."""
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        _thread.start_new_thread(self._watch, ())

    def add(self, item: Call | _Stoppable, deadline: float) -> None:
        """End ``item`` at a time, and on Ctrl-C if it is a run of the main thread."""
        self._deadlines[item] = deadline
        if deadline < self._next:
            self._next = deadline
            with suppress(BlockingIOError):  # it is awake
                self._writer.send(_WAKE)

    def remove(self, item: Call | _Stoppable) -> None:
        self._deadlines.pop(item, None)

    def cancel_all(self, call: Call) -> None:
        """End the runs in progress of a call."""
        for item in list(self._deadlines):
            if isinstance(item, _Stoppable) and item.call is not None and call in item.call.and_outer():
                item.cancel()

    def receive(self) -> bool:
        """Return whether this thread receives signals from now on, until ``signal.set_wakeup_fd(-1)``.

        Only the main thread can let it, and an event loop may receive them itself.
        """
        if threading.get_ident() != _MAIN:
            return False
        mine = self._writer.fileno()
        before = signal.set_wakeup_fd(mine, warn_on_full_buffer=False)
        if before in (-1, mine):  # mine if Ctrl-C ended the code that ends this
            return True
        signal.set_wakeup_fd(before)
        return False

    def _watch(self) -> None:
        while True:
            self._next = math.inf  # what is added from here on wakes it
            now = time.monotonic()
            later = [now + _SLEEP]
            for item, deadline in list(self._deadlines.items()):
                if deadline > now:
                    later.append(deadline)
                    continue
                if isinstance(item, Call):
                    self.cancel_all(item)
                else:
                    item.cancel()
                self.remove(item)
            self._next = min(self._next, *later)
            self._reader.settimeout(max(self._next - now, 0.001))
            with suppress(TimeoutError):
                numbers = self._reader.recv(64)
                if any(signals.interrupts(number) for number in numbers if number):  # 0 only wakes
                    for item in list(self._deadlines):
                        if isinstance(item, _Stoppable) and item.thread == _MAIN:
                            item.cancel()


_watcher: _Watcher | None = None
_STARTING = threading.Lock()


def _watch() -> _Watcher:
    global _watcher
    if _watcher is None:
        with _STARTING:
            if _watcher is None:
                _watcher = _Watcher()
    return _watcher


def _forget() -> None:
    """In a forked process, which has no watching thread yet, and whose only thread is the main one."""
    global _watcher, _STARTING, _MAIN
    _watcher, _STARTING, _MAIN = None, threading.Lock(), threading.get_ident()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_forget)


class RunError(ArtifactError):
    """ONNX Runtime cannot run a graph, or refuses its inputs. The cause is its own error."""


class OutOfMemoryError(RunError):
    """A graph needs more memory than there is."""


class running(_Stoppable):  # noqa: N801  (a function for its users)
    """A context manager that gives the options for a run of a graph, by default new ones, so that it can be stopped.

    Raises:
        StoppedError: it was ended, or took longer than it may.
        RunError: ONNX Runtime raises an error.
        UsageError: an input has another size than the graph fixes for a dimension.
    """

    __slots__ = ("_options",)

    def __init__(self, options: ort.RunOptions | None = None) -> None:
        if options is None:
            options = ort.RunOptions()
            options.add_run_config_entry("gpu_graph_id", "0")  # the default, which ONNX Runtime is slow to find out
        options.terminate = False  # an earlier run may have been ended
        self._options = options

    def cancel(self) -> None:
        self._options.terminate = True

    def __enter__(self) -> ort.RunOptions:
        memory_limit.limit_run()
        self.enter()
        return self._options

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.exit(error)
        if isinstance(error, Exception) and not isinstance(error, ZooError):
            raise _as_zoo_error(error, self.where) from error


def load(options: ort.SessionOptions, graph: object, function: Callable[[], T]) -> T:
    """Call a function that opens a session with the given options, so that it can be stopped.

    ONNX Runtime looks at the flag of a load between its steps. One step may take hours if there are tens of thousands
    of nodes, so the function runs in another thread, which is left alone if it does not end soon.

    Args:
        options: the options of the session.
        graph: its file, for messages.
        function: opens it.

    Raises:
        StoppedError: it was ended, or took longer than it may.
    """
    with _Loading(options, graph) as block:
        try:
            return system.call_in_thread(function, block.is_deaf)
        except TimeoutError as error:
            block.check(error)
            raise StoppedError("interrupted", block.where) from error


class _Loading(_Stoppable):
    __slots__ = ("_cancelled", "_graph", "_options")

    def __init__(self, options: ort.SessionOptions, graph: object) -> None:
        self._options = options
        self._graph = graph
        self._cancelled = math.inf

    def cancel(self) -> None:
        self._cancelled = min(self._cancelled, time.monotonic())
        self._options.set_load_cancellation_flag(True)

    def is_deaf(self) -> bool:
        """Return whether ONNX Runtime has ignored the flag for some seconds."""
        return time.monotonic() > self._cancelled + _GRACE

    @property
    def where(self) -> object:
        return self._graph or super().where

    def __enter__(self) -> Self:
        self.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.cancel()
        self.exit(error)


def memory_error(error: Exception, where: object) -> OutOfMemoryError | None:
    """Return the error to raise for one of ONNX Runtime or Python about a lack of memory, or None for another error."""
    if not isinstance(error, MemoryError) and not _LACK.search(str(error)):
        return None
    found = re.search(r"requested buffer of size (\d+)", str(error))
    size = f" (for {int(found[1]):,} bytes at once)" if found else ""
    return OutOfMemoryError(f"the graph ran out of memory{size}", where, memory_limit.remedy())


def _as_zoo_error(error: Exception, where: object) -> ZooError:
    """Convert an error of ONNX Runtime, which raises a dozen classes without a common base."""
    if (lack := memory_error(error, where)) is not None:
        return lack
    found = re.search(r"invalid dimensions for input: (\S+).*?Got: (\d+) Expected: (\d+)", str(error), re.DOTALL)
    if found is None:
        return RunError(f"onnxruntime cannot run the graph ({error})", where)
    name, got, expected = found.groups()
    what = f"{name} has size {got} in a dimension that the export fixes at {expected}"
    return UsageError(what, where, "give inputs of this size, or export without --fix")
