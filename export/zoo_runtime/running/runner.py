"""Base class for tasks. A plugin adds a task with the hook ``zoo_tasks`` and a subclass of :class:`Runner`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np

from zoo.arrays import Array
from zoo.config import Settings
from zoo.contract import Graph
from zoo.errors import ArtifactError, UsageError, ZooError
from zoo_runtime.running.context import Context
from zoo_runtime.running.inputs import Answer, label

if TYPE_CHECKING:
    from zoo.plots import Distribution
    from zoo.plugins import Plugin

__all__ = ["GathersTexts", "MakesVariants", "Runner", "WritesMaps", "finite", "require_outputs"]

Item = TypeVar("Item")


class Runner(ABC, Generic[Item]):
    """Performs one task on one session: reads inputs, and answers them in batches."""

    options: type[Settings] = Settings
    """The task's options: a frozen dataclass derived from :class:`zoo.Settings`."""
    batch_size = 32
    """Number of inputs per batch. Set by the session if another is chosen."""
    read_ahead = 1024
    """Number of inputs that are read, sorted by size and batched together; at least a batch."""
    variant: str | None = None
    """The export variant that the task requires, or None for any."""
    sample_options: Mapping[str, Any] = {}
    """Options with which :meth:`samples` are run."""
    chats = False
    """Whether the task reads chats, in a session that has ``chat``."""
    image_chats = False
    """Whether a chat may have an image."""
    plugin: Plugin
    """The plugin that provides the task. Set by the session."""

    def __init__(self, session: Context, chosen: Any) -> None:
        self.session = session
        self.chosen = chosen

    @classmethod
    def defaults(cls, session: Context, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return options from the model's own files that do not contradict the ``given`` ones."""
        return {}

    def samples(self) -> Sequence[Any]:
        """Return inputs on which ``zoo export`` and ``zoo verify`` run a task that declares a formula.

        Those that do not fit the model, such as long texts, are left out.
        """
        return ()

    @abstractmethod
    def read(self, value: Any, number: int) -> Item:
        """Convert input ``number`` to an item for :meth:`answer`, or raise :class:`zoo.ArtifactError`."""

    def size(self, item: Item) -> int:
        """Return the size of an item; items of similar size are batched together."""
        return 1

    def fits(self, longest: int, size: int) -> bool:
        """Whether an item of a given size can share a batch with a longer one."""
        return True

    @abstractmethod
    def answer(self, items: Sequence[Item]) -> Sequence[dict[str, Any] | ZooError]:
        """Return the result or the error of each item of a batch."""

    def stream(self, item: Item) -> Iterator[str]:
        """Yield the result of one item as pieces of text, if the task supports streaming."""
        raise UsageError("the task does not support streaming", self.session.path)

    @property
    def streams(self) -> bool:
        """Whether the task supports streaming."""
        return type(self).stream is not Runner.stream

    def lead(self, text: str) -> str:
        """Return the text to show before the streamed pieces, such as the prompt."""
        return ""

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        """Yield one or more human-readable lines per answer."""
        for answer in answers:
            yield f"{label(answer)}: {answer.result}"

    def distributions(self, answer: Answer) -> Sequence[Distribution]:
        """Return the probabilities in an answer, for ``zoo run --figure``; only tasks that give some define it."""
        raise UsageError("the task gives no probabilities", self.session.path)

    def read_all(self, answers: Sequence[Answer]) -> list[tuple[int, Item]]:
        """Read a window of inputs into pairs (index, item), setting ``error`` on answers that cannot be read."""
        items = []
        for place, answer in enumerate(answers):
            if answer.error is None:
                try:
                    items.append((place, self.read(answer.input, answer.number)))
                except ArtifactError as error:
                    answer.error = error
        return items


@runtime_checkable
class GathersTexts(Protocol):
    """A task that makes its inputs of the texts of a command line, or refuses some of them."""

    def gather(self, texts: Sequence[str]) -> list[Any]:
        """Return the inputs that the texts of a command line are."""
        ...


@runtime_checkable
class MakesVariants(Protocol):
    """A task whose results have ``variants``, each with a ``text`` that may replace the input, or None without one."""

    makes_variants: bool


@runtime_checkable
class WritesMaps(Protocol):
    """A task with an answer for each pixel of an image, which it can write to a file."""

    map_suffix: str
    """The ending of the file's name."""

    def write_map(self, result: Mapping[str, Any], target: Path) -> None:
        """Write the map of a result."""
        ...


def require_outputs(graph: Graph, names: Sequence[str], where: object) -> None:
    """Raise :class:`UsageError` unless a graph has the outputs ``names``."""
    lacks = set(names) - {tensor.name for tensor in graph.output_tensors()}
    if lacks:
        raise UsageError(f"graph {graph.name} has no {', '.join(sorted(lacks))}", where, "choose another task")


def finite(items: Sequence[Any], values: Array, results: Sequence[dict[str, Any]]) -> list[Any]:
    """Replace each result whose row of ``values`` contains NaN or infinity by an error."""
    sound = [bool(np.isfinite(row).all()) for row in values]
    return [
        result
        if good
        else ArtifactError("output contains NaN or infinity", f"input {item.number}", "check the weights")
        for item, result, good in zip(items, results, sound, strict=True)
    ]
