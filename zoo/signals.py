"""Signals that end the ``zoo`` command, with status 128 plus their number.

An interrupted import of C code raises any error, or none. Until the command runs, nothing has to be cleaned up, so a
signal ends the process at once. Later it raises :class:`Interrupted`: stages are removed and child processes killed.
"""

from __future__ import annotations

import _thread
import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

__all__ = ["Interrupted", "catch", "deferred", "end_at_once", "ignore_first", "in_command", "interrupt", "interrupts",
           "postponed", "status"]  # fmt: skip

_received: list[int] = []
_waiting: list[int] = []
"""For each block of :func:`deferred` that the main thread is in, the number of signals before it."""
_caught: list[int] = []
"""The signals that are caught: none in a process that uses zoo as a library, nor those that its parent ignores."""

_command = False
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")
"""Windows has no SIGHUP."""
_REPEATED = 1.0
"""Seconds in which further signals count as the first: ``timeout`` and schedulers of clusters send theirs twice."""


class Interrupted(KeyboardInterrupt):
    """A signal was received.

    Once a plain ``KeyboardInterrupt`` has passed through ``exec``, as in an import of dataclasses, Python ends its
    process with SIGINT, whatever the exit status.
    """


def catch() -> None:
    """Catch the signals, unless the parent process ignores them, and end the process at once on one."""
    global _command
    _command = True
    for number in _numbers():
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            _caught.append(number)
    end_at_once()
    atexit.register(_ignore)  # the first to be registered is the last to be called


def _numbers() -> list[int]:
    return [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]


def in_command() -> bool:
    """Return whether this process is the command ``zoo``, not one that uses zoo as a library."""
    return _command


def end_at_once() -> None:
    """End the process at once on a signal from now on: there is nothing to clean up yet, or no longer."""
    for number in _caught:
        signal.signal(number, lambda number, _: os._exit(128 + number))


def _ignore() -> None:
    """Ignore signals: the exit status is settled, but Python restores their default action before it frees modules."""
    for number in _caught:
        signal.signal(number, signal.SIG_IGN)


def interrupt() -> None:
    """Raise :class:`Interrupted` on a signal from now on."""
    for number in _caught:
        signal.signal(number, _interrupt)
    sys.unraisablehook = _repeat


def interrupts(number: int) -> bool:
    """Return whether a signal raises a ``KeyboardInterrupt``, in a command or by Python's default."""
    return signal.getsignal(number) in (signal.default_int_handler, _interrupt)


def status() -> int | None:
    """Return the exit status that the first signal demands; None if there was no signal."""
    return 128 + _received[0] if _received else None


@contextmanager
def deferred() -> Iterator[None]:
    """Raise :class:`Interrupted` only after the block: short steps that belong together, or a removal."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _waiting.append(len(_received))
    try:
        yield
    finally:
        before = _waiting.pop()
        if len(_received) > before and not _waiting:
            raise Interrupted


@contextmanager
def postponed(notice: str = "") -> Iterator[Callable[[], bool]]:
    """Let a block finish after a first signal. Yields a function that tells whether one was received.

    The signal takes effect after the block; a second one takes effect at once. Processes that the block still needs
    call :func:`ignore_first`: they often receive the same signals.

    Args:
        notice: written to stderr when the first signal is received.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    effects: dict[int, Any] = {number: signal.getsignal(number) for number in _numbers() if interrupts(number)}
    received: list[tuple[int, float]] = []
    process = os.getpid()

    def note(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not received:
            received.append((number, now))
            if notice and os.getpid() == process:
                with suppress(OSError):
                    os.write(2, f"{notice}\n".encode())  # a print may be what the signal interrupts
        elif now - received[0][1] > _REPEATED:
            effects[number](number, frame)

    for number in effects:
        signal.signal(number, note)
    try:
        yield lambda: bool(received)
    finally:
        for number, effect in effects.items():
            signal.signal(number, effect)
    if received:
        number = received[0][0]
        effects[number](number, None)


def ignore_first() -> None:
    """Ignore the first signal in this process, which another one needs to finish its work. A later one ends it."""
    received: list[float] = []

    def note(number: int, _: FrameType | None) -> None:
        received.append(time.monotonic())
        if received[-1] - received[0] > _REPEATED:
            os._exit(128 + number)

    for number in _numbers():
        signal.signal(number, note)


def _interrupt(number: int, _: FrameType | None) -> None:
    _received.append(number)
    if not _waiting:
        raise Interrupted


def _repeat(unraisable: Any) -> None:
    """Raise an :class:`Interrupted` again that was raised where nothing can catch it, as in a destructor."""
    if isinstance(unraisable.exc_value, Interrupted):
        again = threading.Timer(0.01, _thread.interrupt_main)  # after this function, which cannot raise it either
        again.daemon = True
        again.start()
    else:
        sys.__unraisablehook__(unraisable)
