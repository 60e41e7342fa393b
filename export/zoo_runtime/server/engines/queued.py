"""The engine of models and tasks without rows of their own: one input after another, or batches with the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zoo import plugins
from zoo.errors import ArtifactError, PluginError, ZooError
from zoo_runtime.generation.choices import Ranked
from zoo_runtime.running.session import Session
from zoo_runtime.server.engines.exact_batches import MOST, Batches
from zoo_runtime.server.engines.work import Event, ModelEngine, Work, as_error, last_event
from zoo_runtime.tasks.generate.base import Generate
from zoo_runtime.tasks.generate.scoring import describe_prompt, score_prompt

__all__ = ["QueueEngine"]


class QueueEngine(ModelEngine):
    """Answers one input at a time, with those that wait and can be answered together with it.

    No input waits for others to come: while a batch is computed, the next one gathers.

    Args:
        session: the model.
        limit: maximum number of inputs that wait.
    """

    def __init__(self, session: Session, limit: int) -> None:
        super().__init__(f"queue of {session.path.name}", limit)
        self._session = session
        self._batches = Batches(session)
        self._current: list[Work] = []

    @property
    def capacity(self) -> int:
        """1: a batch consists of inputs that waited."""
        return 1

    @property
    def running(self) -> int:
        return len(self._current)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._current = []
                while not (self._waiting or self._closing):
                    self._changed.wait()
                if self._closing:
                    return
                self._drop_cancelled()
                works = self._current = self._take()
            if not works:
                continue
            for work, event in zip(works, self._answer(works), strict=True):
                if event is not None:
                    self._finish(work, event)

    def _take(self) -> list[Work]:
        """Remove the first of the works that wait, and those that are answered together with it."""
        if not self._waiting:
            return []
        first = self._waiting.pop()
        key = self._batches.key(first.runner, first.item)
        if key is None:
            return [first]
        same = [first, *(work for work in self._waiting if self._batches.key(work.runner, work.item) == key)]
        works = same[: 1 << (min(len(same), MOST).bit_length() - 1)]
        self._waiting.remove(works)
        return works

    def _answer(self, works: Sequence[Work]) -> Sequence[Event | None]:
        """Return the last event of each work, or None if it has been cancelled."""
        try:
            with plugins.blame(works[0].runner.plugin, "cannot answer", fault=ArtifactError, redirect=False):
                return self._compute(works)
        except Exception as error:
            if len(works) > 1:  # so that an input fails no other
                return [event for work in works for event in self._answer([work])]
            return [Event(error=as_error(error))]

    def _compute(self, works: Sequence[Work]) -> Sequence[Event | None]:
        self._session.check_weights()
        runner = works[0].runner
        if isinstance(runner, Generate) and (works[0].scores_prompt or works[0].reads_only):
            return [self._read(works[0], runner)]
        if isinstance(runner, Generate) and runner.is_one_text(works[0].item) and runner.room(works[0].item) > 0:
            return [self._generate(works[0], runner)]
        results = self._batches.answer(runner, [work.item for work in works])
        return [self._last(work, result) for work, result in zip(works, results, strict=True)]

    def _read(self, work: Work, runner: Generate) -> Event | None:
        """Return the last event of a text with the probabilities of its prompt, or without new tokens."""
        scores = None
        if work.scores_prompt:
            ranks: list[Ranked] = []
            for some in score_prompt(runner, work.item):
                if work.cancelled or self._closing:
                    return None
                ranks += some
                self._session.check_weights()
            scores = describe_prompt(runner, work.item, ranks)
            if work.streams:
                work.deliver(Event(ranks=scores, is_prompt=True))
        if work.reads_only:
            event: Event | None = last_event(work, "", runner.result(work.item, [], "length"))
        elif runner.is_one_text(work.item):
            event = self._generate(work, runner)
        else:
            (result,) = runner.answer([work.item])
            event = self._last(work, result)
        if event is not None and event.result is not None and scores is not None and not work.streams:
            event.result["prompt_logprobs"] = scores
        return event

    def _last(self, work: Work, result: Any) -> Event:
        """Return the last event of a work that is not generated token by token."""
        if isinstance(result, ZooError):
            return Event(error=result)
        if not isinstance(result, dict):
            problem = f"{work.runner.plugin} returned {type(result).__name__} as a result, which must be a dict"
            raise PluginError(problem)
        return last_event(work, str(result.get("generated") or ""), result)

    def _generate(self, work: Work, runner: Generate) -> Event | None:
        item, row, text, steps = runner.open(work.item)
        if work.seed is not None:
            row.seed = (work.seed, row.number)
        delivered = 0
        for _ in steps:
            if work.cancelled or self._closing:
                return None
            if work.streams and row.open and (piece := text.new()):
                ranks = runner.describe(row.ranks[delivered:])
                delivered = len(row.ids)
                work.deliver(Event(piece, delivered, ranks))
            self._session.check_weights()
        if row.error is not None:
            return Event(error=row.error)
        rest = text.rest()
        result = runner.result(item, row.ids, row.finish, text, row.ranks)
        return last_event(work, rest, result, delivered)
