"""Chat templates rendered in a process of their own, which :mod:`zoo.tokenizers.chat.sandbox` describes."""

from __future__ import annotations

import atexit
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from zoo import system

__all__ = ["TemplateFailure", "render"]

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import zoo.tokenizers.chat.sandbox as s; s.serve()"
_SECONDS = 5.0
"""Limit on the processor time of a request. A published template takes a millisecond."""
_PATIENCE = 60.0
"""Seconds to wait for an answer, even on a busy machine, and where a system cannot limit processor time."""


class TemplateFailure(Exception):  # noqa: N818 - it names the program that failed, like TemplateError in Jinja
    """A template is not valid, raised an error, or took too much time or memory."""


class _Renderer:
    """The process. It ends with this one, because its input does."""

    def __init__(self) -> None:
        self._parent = os.getpid()
        self._process = subprocess.Popen(
            [*system.interpreter(), "-c", _START, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt from the keyboard reaches this process alone
        )
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def is_own(self) -> bool:
        """Whether this process has started it, and is not a fork of the one that has."""
        return self._parent == os.getpid()

    @property
    def is_ready(self) -> bool:
        """Whether it can be asked."""
        return self.is_own and self._process.poll() is None

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(b"")

    def answer(self, request: str) -> dict[str, str]:
        """Return the answer to a request. Raises :class:`TemplateFailure` if there is none."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the process has ended, and so has its output
            self._process.stdin.write(request.encode() + b"\n")
            self._process.stdin.flush()
        try:
            line = self._lines.get(timeout=_PATIENCE)
        except queue.Empty:
            raise TemplateFailure(f"it takes more than {_PATIENCE:g} s") from None
        if not line.endswith(b"\n"):
            raise TemplateFailure(self._ending())
        answer: dict[str, str] = json.loads(line)
        return answer

    def _ending(self) -> str:
        status = self._process.wait()
        if status == -getattr(signal, "SIGPROF", 0):
            return f"it takes more than {_SECONDS:g} s of processor time"
        return f"its process ended with status {status}"

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # what is unwritten is lost
                if pipe is not None:
                    pipe.close()


_renderer: _Renderer | None = None
"""The process of all templates: each is as safe from the others as this process is."""
_lock = threading.Lock()


def render(source: str, values: Mapping[str, Any] | None) -> str:
    """Return the text of a template.

    Args:
        source: the program.
        values: its variables, which can be written as JSON; or None to compile the program only.

    Raises:
        TemplateFailure: the program is not valid, raised an error, or took too much time or memory.
        TypeError, ValueError: a variable cannot be written as JSON.
    """
    global _renderer
    request = json.dumps({"source": source, "values": values, "seconds": _SECONDS})
    with _lock:
        if _renderer is None or not _renderer.is_ready:
            _renderer = _Renderer()
        try:
            answer = _renderer.answer(request)
        except BaseException:  # also an interrupt: the answer would be taken for that to the next request
            _close()
            raise
    if "error" in answer:
        raise TemplateFailure(answer["error"])
    return answer["text"]


@atexit.register
def _close() -> None:
    global _renderer
    if _renderer is not None and _renderer.is_own:
        _renderer.close()
    _renderer = None
