"""Chat templates rendered in processes of their own, which :mod:`zoo.tokenizers.chat.sandbox` describes."""

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

__all__ = ["TemplateFailure", "TemplateLimit", "render"]

_SERVER = "zoo.tokenizers.chat.sandbox"
_START = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); importlib.import_module(sys.argv[2]).serve()"
)
_SECONDS = 5.0
"""Limit on the processor time of a request. A published template takes a millisecond."""
_PATIENCE = 60.0
"""Seconds to wait for an answer, even on a busy machine, and where a system cannot limit processor time."""


class TemplateFailure(Exception):  # noqa: N818 - it names the program that failed, like TemplateError in Jinja
    """A template is not valid, raised an error, or took too much time or memory."""


class TemplateLimit(TemplateFailure):
    """A template took too much time or memory."""


class _Renderer:
    """A process that runs a module's ``serve``. It ends with this one, because its input does."""

    def __init__(self, server: str) -> None:
        self._parent = os.getpid()
        self._process = subprocess.Popen(
            [*system.interpreter(), "-c", _START, json.dumps(sys.path), server],
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

    def answer(self, request: str) -> dict[str, Any]:
        """Return the answer to a request. Raises :class:`TemplateFailure` if there is none."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the process has ended, and so has its output
            self._process.stdin.write(request.encode() + b"\n")
            self._process.stdin.flush()
        try:
            line = self._lines.get(timeout=_PATIENCE)
        except queue.Empty:
            raise TemplateLimit(f"it takes more than {_PATIENCE:g} s") from None
        if not line.endswith(b"\n"):
            raise self._ending()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ending(self) -> TemplateFailure:
        status = self._process.wait()
        if status == -getattr(signal, "SIGPROF", 0):
            return TemplateLimit(f"it takes more than {_SECONDS:g} s of processor time")
        return TemplateFailure(f"its process ended with status {status}")

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # what is unwritten is lost
                if pipe is not None:
                    pipe.close()


_renderers: dict[str, _Renderer] = {}
"""The processes by server. One renders all templates: each is as safe from the others as this process is."""
_lock = threading.Lock()


def render(source: str, values: Mapping[str, Any] | None, server: str = _SERVER) -> str:
    """Return the text of a template.

    Args:
        source: the program.
        values: its variables, which can be written as JSON; or None to compile the program only.
        server: the module whose ``serve`` renders it.

    Raises:
        TemplateLimit: the program took too much time or memory.
        TemplateFailure: the program is not valid, or raised an error.
        TypeError, ValueError: a variable cannot be written as JSON.
    """
    request = json.dumps({"source": source, "values": values, "seconds": _SECONDS})
    with _lock:
        if server not in _renderers or not _renderers[server].is_ready:
            _renderers[server] = _Renderer(server)
        try:
            answer = _renderers[server].answer(request)
        except BaseException:  # also an interrupt: the answer would be taken for that to the next request
            _close(server)
            raise
    if "error" in answer:
        raise (TemplateLimit if answer["is_limit"] else TemplateFailure)(answer["error"])
    text: str = answer["text"]
    return text


def _close(server: str) -> None:
    renderer = _renderers.pop(server, None)
    if renderer is not None and renderer.is_own:
        renderer.close()


@atexit.register
def _close_all() -> None:
    for server in tuple(_renderers):
        _close(server)
