"""Ending runs of graphs early: from another thread, after a time, or by Ctrl-C.

ONNX Runtime looks at the flag ``terminate`` of a run between operators and between iterations of a loop. A watching
thread sets it when time is over. Python runs handlers of signals in the main thread only, which a run of a graph
occupies, so the watching thread also receives them, through ``signal.set_wakeup_fd``, and ends that run first.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Self, TypeVar

from zoo import system
from zoo.errors import StoppedError, ZooError
from zoo.limits import GRAPH_SECONDS
from zoo_runtime.onnx_runtime import memory_limit
from zoo_runtime.onnx_runtime.ort import ort
from zoo_runtime.onnx_runtime.run_errors import run_error
from zoo_runtime.onnx_runtime.watcher import Watched, watcher

__all__ = ["Call", "Stoppable", "load", "named", "running"]

_GRACE = 2.0
"""Seconds in which a load has to end that was cancelled."""
T = TypeVar("T")


class Call(Watched):
    """A context manager whose runs of graphs end together. A call inside another one ends with it.

    Args:
        seconds: time after which they end.
        where: the model, for messages.
    """

    def __init__(self, seconds: float | None = None, where: object = None) -> None:
        self.where = where
        self.thread = None
        self._outer: Call | None = None
        self._reason: str | None = None
        self._deadline = math.inf if seconds is None else time.monotonic() + seconds
        self._late = f"took longer than {seconds:g} s" if seconds is not None else ""

    def stop(self) -> None:
        """End the runs in progress, from any thread, and refuse later ones."""
        self._reason = "interrupted"
        self.cancel()

    def cancel(self) -> None:
        """End the runs in progress. Later ones are refused if there is a reason."""
        for item in watcher().items():
            if isinstance(item, Stoppable) and item.call is not None and self in item.call.and_outer():
                item.cancel()

    def __enter__(self) -> Self:
        self._outer = _CALL.get()
        self._token: Token[Call | None] = _CALL.set(self)
        self._watcher = watcher()
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


@contextmanager
def named(model: object) -> Iterator[None]:
    """Name the model in errors of the block's runs."""
    token = _MODEL.set(model)
    try:
        yield
    finally:
        _MODEL.reset(token)


class Stoppable(Watched):
    """A block that another thread can end. It then raises an error, which becomes :class:`zoo.StoppedError`."""

    __slots__ = ("_end", "_limit", "_receives", "_watcher", "call")

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
        self._watcher = watcher()
        self._watcher.add(self, self._end)
        self._receives = call is None and self._watcher.receive()
        if call is not None:
            try:
                self.check()  # a call that ended before the watcher knew this block has not cancelled it
            except StoppedError:
                self._watcher.remove(self)
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
            problem = f"took longer than {self._limit} s"
            raise StoppedError(problem, self.where, f"raise {GRAPH_SECONDS.variable}") from cause


class running(Stoppable):  # noqa: N801  (a function for its users)
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
            raise run_error(error, self.where) from error


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


class _Loading(Stoppable):
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
