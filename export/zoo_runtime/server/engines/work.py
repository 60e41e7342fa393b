"""Inputs that wait for an engine, and the events of their answers."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zoo.errors import PluginError, ZooError
from zoo_runtime.running.runner import Runner
from zoo_runtime.server.engines.waiting import Waiting

__all__ = ["Event", "FullError", "ModelEngine", "Work", "as_error", "last_event"]


class FullError(Exception):
    """The queue of an engine has no room for more inputs.

    Args:
        seconds: the time after which there may be room.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the queue is full for about {seconds:.0f} s")
        self.seconds = seconds


@dataclass(frozen=True)
class Event:
    """A part of an answer: new text, or its end, which has either a result or an error."""

    text: str = ""
    tokens: int = 0
    """Number of tokens generated so far."""
    ranks: Sequence[Mapping[str, Any]] | None = None
    """The log-probabilities of the tokens since the last event, if the options ask for them."""
    result: dict[str, Any] | None = None
    error: ZooError | None = None
    is_prompt: bool = False
    """Whether the log-probabilities are those of the prompt's tokens, of which the first has none."""

    @property
    def is_last(self) -> bool:
        """Whether no further event follows."""
        return self.result is not None or self.error is not None


@dataclass(eq=False)
class Work:
    """One input to answer.

    Args:
        runner: the task, with its options.
        item: the input, as the runner has read it.
        deliver: called in the engine's thread with each event. It must not block or raise.
        seed: random seed of a generated text, in place of that of the runner's options.
        streams: deliver text as soon as it is final, instead of the result alone.
        scores_prompt: add the log-probabilities of the prompt's tokens to the result, as ``prompt_logprobs``, or
            deliver them before the text if it is streamed.
        reads_only: generate nothing.
    """

    runner: Runner[Any]
    item: Any
    deliver: Callable[[Event], None]
    seed: int | None = None
    streams: bool = False
    scores_prompt: bool = False
    reads_only: bool = False
    cancelled: bool = False
    """Set by any thread to end the work within one step. No event follows."""
    begun: float = field(default_factory=time.monotonic)

    def cancel(self) -> None:
        """End the work within one step. No event follows."""
        self.cancelled = True


class ModelEngine(ABC):
    """Answers inputs in a thread of its own. Clients take turns, and so do the requests of each client.

    Args:
        name: name of the thread.
        limit: maximum number of inputs that wait.
    """

    def __init__(self, name: str, limit: int) -> None:
        self.limit = limit
        self._waiting: Waiting[Work] = Waiting()
        self._changed = threading.Condition()
        self._closing = False
        self._seconds = 1.0
        """Moving average of the time from the arrival of an input to its answer."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, works: Sequence[Work], client: Hashable = None) -> None:
        """Add the inputs of a request to the queue, all or none.

        Args:
            works: the inputs.
            client: identifies who sent the request.

        Raises:
            FullError: there is no room for them.
        """
        with self._changed:
            self._drop_cancelled()
            if len(self._waiting) + len(works) > self.limit + max(0, self.capacity - self.running):
                raise FullError(max(1.0, self._seconds))
            self._waiting.add(works, client)
            self._changed.notify()

    def close(self) -> None:
        """End the thread. Inputs that are not answered yet get no further events."""
        with self._changed:
            self._closing = True
            self._waiting.clear()
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def most(self) -> int:
        """Maximum number of inputs that are accepted together."""
        return self.limit + self.capacity

    @property
    def waiting(self) -> int:
        """Number of inputs that wait."""
        return len(self._waiting)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Maximum number of inputs that are answered at the same time."""

    @property
    @abstractmethod
    def running(self) -> int:
        """Number of inputs that are being answered."""

    @abstractmethod
    def _run(self) -> None:
        """Answer inputs until the engine closes."""

    def _finish(self, work: Work, event: Event) -> None:
        """Deliver the last event of a work."""
        self._seconds = 0.9 * self._seconds + 0.1 * (time.monotonic() - work.begun)
        if not work.cancelled:
            work.deliver(event)

    def _drop_cancelled(self) -> None:
        if cancelled := {work for work in self._waiting if work.cancelled}:
            self._waiting.remove(cancelled)


def last_event(work: Work, text: str, result: dict[str, Any], delivered: int = 0) -> Event:
    """Return the last event of a work.

    Args:
        work: the work.
        text: the text since the last event.
        result: the result of the task.
        delivered: number of tokens at the last event.
    """
    ranks = result["logprobs"][delivered:] if "logprobs" in result else None
    return Event(text if work.streams else "", len(result.get("generated_ids", ())), ranks, result)


def as_error(error: Exception) -> ZooError:
    """Return an exception of a task as an error."""
    if isinstance(error, ZooError):
        return error
    wrapped = PluginError(f"cannot answer ({type(error).__name__}: {error})")
    wrapped.__cause__ = error
    return wrapped
