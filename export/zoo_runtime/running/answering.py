"""Answering inputs with the runner of a task: in windows and batches, each error on its input."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeVar

from zoo import plugins
from zoo.artifact import PREFILL
from zoo.contract import Graph
from zoo.errors import ArtifactError, PluginError, UsageError, ZooError
from zoo.plugins import ZooWarning
from zoo.tokenizers.long_texts.truncation import trained_length
from zoo_runtime.onnx_runtime.adapters import number_of
from zoo_runtime.running.batching import batches
from zoo_runtime.running.context import Internals
from zoo_runtime.running.inputs import Answer
from zoo_runtime.running.opened import OpenExport
from zoo_runtime.running.runner import Runner
from zoo_runtime.serving.sizes import sizes_of_session

__all__ = ["Answering", "blame_runner", "fixed_batch"]

Step = TypeVar("Step")


class Answering:
    """Runs the tasks of a session.

    It knows the open export alone, since a cycle of references would keep a session that is no longer used in memory.

    Args:
        opened: the open export.
        truncate: number of tokens to which texts are truncated; None if longer ones are refused.
    """

    def __init__(self, opened: OpenExport, truncate: int | None) -> None:
        self._opened = opened
        self._truncate = truncate

    def answer(self, runner: Runner[Any], answers: Iterable[Answer], batch_size: int) -> Iterator[Answer]:
        """Answer inputs, and yield them in order."""
        window: list[Answer] = []
        size = max(runner.read_ahead, batch_size)
        for answer in answers:
            window.append(answer)
            if len(window) == size:
                yield from self._answer_window(runner, window, batch_size)
                window = []
        yield from self._answer_window(runner, window, batch_size)
        self._report_truncated(runner)

    def pieces(self, runner: Runner[Any], value: Any, adapter: str | None) -> Iterator[str]:
        """Answer one input, and yield the pieces of its text."""
        with blame_runner(runner, "cannot generate"), self._opened.stoppable():
            pieces = runner.stream(self._adapted(runner.read(value, 1), adapter))
        self._report_truncated(runner)
        return self.steps(runner, "cannot generate", pieces)

    def lead(self, runner: Runner[Any], text: str) -> str:
        """Return the text to show before the pieces."""
        with blame_runner(runner, "cannot generate"):
            return str(runner.lead(text))

    def show(self, runner: Runner[Any], answers: Sequence[Answer]) -> Iterator[str]:
        """Yield human-readable lines for answers without errors."""
        with blame_runner(runner, "cannot show answers"):
            lines = iter(runner.show(answers))
        yield from self.steps(runner, "cannot show answers", lines)

    def steps(self, runner: Runner[Any], action: str, steps: Iterator[Step]) -> Iterator[Step]:
        """Iterate over a runner's results, with each step under :func:`blame_runner`."""
        while True:
            with blame_runner(runner, action), self._opened.stoppable():
                try:
                    step = next(steps)
                except StopIteration:
                    return
            yield step

    def _report_truncated(self, runner: Runner[Any]) -> None:
        truncated = getattr(runner, "truncated", None)
        if truncated is None:
            return
        remedy = ""
        if self._truncate is not None and self._truncate == trained_length(self._opened.stored):
            truncated = f"{truncated}, as in training"
            remedy = ": read whole texts with --no-truncate (truncate=False)"
        warnings.warn(f"{truncated}: {self._opened.path}{remedy}", ZooWarning, stacklevel=2)

    def _answer_window(self, runner: Runner[Any], window: list[Answer], batch_size: int) -> Iterator[Answer]:
        """Answer a window of inputs, yielding each answer once it and all earlier ones are done."""
        with blame_runner(runner, "cannot read inputs"):
            read = runner.read_all(window)
            items = {place: self._adapted(item, window[place].adapter) for place, item in read}
            sizes = [(place, runner.size(item)) for place, item in items.items()]
            planned = list(batches(sizes, batch_size, runner.fits))
        # Batches are made by length, but answers are yielded in the order of the inputs: an answer waits for earlier
        # ones, and inputs that could not be read wait for none.
        waiting = set(items)
        shown = 0
        for batch in planned:
            self._compute(runner, [window[place] for place in batch], [items[place] for place in batch])
            waiting.difference_update(batch)
            while shown < len(window) and shown not in waiting:
                yield window[shown]
                shown += 1
        yield from window[shown:]

    def _adapted(self, item: Any, adapter: str | None) -> Any:
        """Return an item that names its adapter by number."""
        number = number_of(adapter, self._opened.adapters, self._opened.path)
        if not number:
            return item
        if not hasattr(item, "adapter"):
            raise UsageError("the task does not support adapters", self._opened.path)
        return replace(item, adapter=number)

    def _compute(self, runner: Runner[Any], answers: Sequence[Answer], items: Sequence[Any]) -> None:
        results: list[Any]
        try:
            with blame_runner(runner, "cannot answer"), self._opened.stoppable():
                results = list(runner.answer(items))
        except ArtifactError as error:
            results = [error] * len(items)
        if len(results) != len(items):
            raise PluginError(f"{runner.plugin} returned {len(results)} results for {len(items)} inputs")
        for answer, result in zip(answers, results, strict=True):
            if isinstance(result, ZooError):
                answer.error = result
            elif isinstance(result, dict):
                answer.result = result
            else:
                raise PluginError(f"{runner.plugin} returned {type(result).__name__} as a result, which must be a dict")


def fixed_batch(session: Internals, runner: Runner[Any]) -> int | None:
    """Return the batch size that the graph of a task requires, or None if it takes any."""
    if session.export.traits.interface == "rows":
        return sizes_of_session(session.sessions[PREFILL])["batch"]
    graph: Graph = getattr(runner, "graph", session.graphs[0])
    opened = session.sessions.get(graph.name)
    shapes = {item.name: item.shape for item in opened.get_inputs()} if opened else {}
    for tensor in graph.input_tensors():
        if tensor.dims[0] == graph.rows[0] and isinstance(shapes.get(tensor.name, [None])[0], int):
            return int(shapes[tensor.name][0])
    return None


def blame_runner(runner: Runner[Any], action: str) -> AbstractContextManager[None]:
    """Attribute a runner's errors to its plugin. stdout is not redirected, since sessions run in any thread."""
    return plugins.blame(runner.plugin, action, fault=ArtifactError, redirect=False)
