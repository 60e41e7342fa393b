"""The thread that ends runs of graphs at their deadlines and on Ctrl-C."""

from __future__ import annotations

import _thread
import math
import os
import signal
import socket
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress

from zoo import signals

__all__ = ["Watched", "Watcher", "watcher"]

_SLEEP = 3600.0
"""Longest sleep of the watcher, in seconds."""
_WAKE = b"\0"
_MAIN = threading.main_thread().ident


class Watched(ABC):
    """What the watcher ends."""

    __slots__ = ("thread",)

    thread: int | None
    """The thread that it runs in; those of the main thread end on Ctrl-C. None if it runs in several."""

    @abstractmethod
    def cancel(self) -> None:
        """End it, from any thread."""


class Watcher:
    """A thread that ends runs at their deadlines and on signals that interrupt, as Ctrl-C.

    :mod:`threading` does not count it: a process that it keeps from being forked (:func:`zoo.system.computing_apart`)
    would be slower, and a forked process starts its own.
    """

    def __init__(self) -> None:
        self._deadlines: dict[Watched, float] = {}
        self._next = math.inf
        """When it wakes. Only a sooner deadline wakes it before, because this costs as much as a small run."""
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        _thread.start_new_thread(self._watch, ())

    def add(self, item: Watched, deadline: float) -> None:
        """End ``item`` at a time, and on Ctrl-C if it is a run of the main thread."""
        self._deadlines[item] = deadline
        if deadline < self._next:
            self._next = deadline
            with suppress(BlockingIOError):  # it is awake
                self._writer.send(_WAKE)

    def remove(self, item: Watched) -> None:
        """Leave ``item`` alone from now on."""
        self._deadlines.pop(item, None)

    def items(self) -> list[Watched]:
        """Return what it would end now."""
        return list(self._deadlines)

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
                else:
                    item.cancel()
                    self.remove(item)
            self._next = min(self._next, *later)
            self._reader.settimeout(max(self._next - now, 0.001))
            with suppress(TimeoutError):
                numbers = self._reader.recv(64)
                if any(signals.interrupts(number) for number in numbers if number):  # 0 only wakes
                    for item in self.items():
                        if item.thread == _MAIN:
                            item.cancel()


_watcher: Watcher | None = None
_STARTING = threading.Lock()


def watcher() -> Watcher:
    """Return the watcher of this process, started on first use."""
    global _watcher
    if _watcher is None:
        with _STARTING:
            if _watcher is None:
                _watcher = Watcher()
    return _watcher


def _forget() -> None:
    """In a forked process, which has no watching thread yet, and whose only thread is the main one."""
    global _watcher, _STARTING, _MAIN
    _watcher = None
    _STARTING = threading.Lock()
    _MAIN = threading.get_ident()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_forget)
