"""The engine of models and tasks without rows of their own: one input after another.

Nothing makes the results of a batch equal those of its inputs alone. Kernels choose the order of additions by the sizes
of a product, so the last bits may differ, and int8 exports, which quantize activations by the largest value in the
batch, differ at every size. So these inputs are not batched: an answer would depend on who shares the batch.
"""

from __future__ import annotations

from zoo import plugins
from zoo.errors import ArtifactError, PluginError, ZooError
from zoo_runtime.server.work import Engine, Event, Work, as_error, last_event
from zoo_runtime.tasks.generate import Generate

__all__ = ["AloneEngine"]


class AloneEngine(Engine):
    """Answers one input at a time."""

    def __init__(self, name: str, limit: int) -> None:
        super().__init__(name, limit)
        self._current: Work | None = None

    @property
    def capacity(self) -> int:
        return 1

    @property
    def running(self) -> int:
        return int(self._current is not None)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._current = None
                while not (self._waiting or self._closing):
                    self._changed.wait()
                if self._closing:
                    return
                work = self._current = self._waiting.popleft()
            if work.cancelled:
                continue
            try:
                with plugins.blame(work.runner.plugin, "cannot answer", fault=ArtifactError, redirect=False):
                    event = self._answer(work)
            except Exception as error:
                event = Event(error=as_error(error))
            if event is not None:
                self._finish(work, event)

    def _answer(self, work: Work) -> Event | None:
        """Return the last event of a work, or None if it has been cancelled."""
        runner = work.runner
        if isinstance(runner, Generate) and _steps(runner) and runner.room(work.item) > 0:
            return self._generate(work, runner)
        (result,) = runner.answer([work.item])
        if isinstance(result, ZooError):
            return Event(error=result)
        if not isinstance(result, dict):
            raise PluginError(f"{runner.plugin} returned {type(result).__name__} as a result, which must be a dict")
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
        if row.error is not None:
            return Event(error=row.error)
        rest = text.rest()
        result = runner.result(item, row.ids, row.finish, text, row.ranks)
        return last_event(work, rest, result, delivered)


def _steps(runner: Generate) -> bool:
    """Return whether a text is generated token by token, so that it can be cancelled and streamed."""
    return not runner.in_one_graph and runner.chosen.num_beams == 1
