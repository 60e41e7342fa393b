"""What a task is made of. A plugin adds one with the hook ``zoo_tasks`` and a subclass of :class:`Runner`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from zoo.config import Settings
from zoo.contract import Graph
from zoo.errors import ArtifactError, UsageError, ZooError

if TYPE_CHECKING:
    from zoo.plugins import Plugin
    from zoo_export.pipeline import Arrays
    from zoo_export.runtime.session import Session

__all__ = ["Answer", "Runner", "TextRunner", "Tokens"]

Array = np.ndarray[Any, Any]
Item = TypeVar("Item")


@dataclass
class Answer:
    """One input and what became of it."""

    number: int
    """Counted from 1."""
    input: Any
    result: dict[str, Any] = field(default_factory=dict)
    error: ZooError | None = None
    """Why there is no result."""
    id: Any = None
    """What its file calls it, where it comes from one."""


class Runner(ABC, Generic[Item]):
    """Does one task with one session: reads inputs, and answers them in batches."""

    options: type[Settings] = Settings
    """What can be chosen: a frozen dataclass, :class:`zoo.Settings`."""
    batch_size = 32
    """Inputs in a batch unless someone asks for another number."""
    plugin: Plugin
    """Who answers for it. The session says so."""

    def __init__(self, session: Session, chosen: Any) -> None:
        self.session, self.chosen = session, chosen

    @abstractmethod
    def read(self, value: Any, number: int) -> Item:
        """Make an input into what :meth:`answer` takes, or raise :class:`zoo.ArtifactError` about input ``number``."""

    def size(self, item: Item) -> int:
        """Inputs of like size are computed together."""
        return 1

    def fits(self, longest: int, size: int) -> bool:
        """Whether an input of a size may be in one batch with a longer one."""
        return True

    @abstractmethod
    def answer(self, items: Sequence[Item]) -> Sequence[dict[str, Any] | ZooError]:
        """A result for each item of a batch, or the error of one that has none."""

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        """Lines for people, one or more for each answer."""
        for answer in answers:
            yield f"{label(answer)}: {answer.result}"

    def read_all(self, answers: Sequence[Answer]) -> list[tuple[int, Item]]:
        """The items of a window of inputs, each with its place there. What cannot be read has its error noted."""
        items = []
        for place, answer in enumerate(answers):
            if answer.error is None:
                try:
                    items.append((place, self.read(answer.input, answer.number)))
                except ArtifactError as error:
                    answer.error = error
        return items


@dataclass(frozen=True)
class Tokens:
    """An input as token ids."""

    number: int
    ids: list[int]


class TextRunner(Runner[Tokens]):
    """Inputs are texts, or token ids."""

    def read(self, value: Any, number: int) -> Tokens:
        """Token ids, all of which the model knows and has positions for."""
        if isinstance(value, str):
            tokenizer = self.session.tokenizer
            if tokenizer is None:
                remedy = "attach one with --tokenizer FILE, or give --ids 1,2,3"
                raise UsageError("the model has no tokenizer", self.session.path, remedy)
            try:
                encoded = tokenizer.encode(value)
            except Exception as error:  # the library raises bare Exception, and UnicodeError for lone surrogates
                raise ArtifactError(f"cannot be encoded ({error})", f"input {number}") from error
            ids = [] if all(encoded.special_tokens_mask) else encoded.ids  # those that are put around every text
        elif isinstance(value, list | tuple) and all(_is_id(token) for token in value):
            ids = [int(token) for token in value]
        else:
            raise ArtifactError(f"neither a text nor token ids, but {type(value).__name__}", f"input {number}")
        self._check(ids, number)
        return Tokens(number, ids)

    def size(self, item: Tokens) -> int:
        """Tokens."""
        return len(item.ids)

    def feed(self, items: Sequence[Tokens], *, left: bool = False) -> Arrays:
        """Inputs of the first graph for a padded batch: ids, mask, and zeros for other token inputs."""
        length = max(len(item.ids) for item in items)
        ids, mask = np.zeros((2, len(items), length), dtype=np.int64)
        for row, item in enumerate(items):
            place = slice(length - len(item.ids), None) if left else slice(len(item.ids))
            ids[row, place], mask[row, place] = item.ids, 1
        feeds: Arrays = {}
        for tensor in self.graph.input_tensors():
            if tensor.is_mask:
                feeds[tensor.name] = mask
            elif tensor.upper is not None:
                feeds[tensor.name] = ids
                ids = np.zeros_like(ids)  # such as segments: everything is in the first
        return feeds

    def compute(self, items: Sequence[Tokens]) -> Arrays:
        """The outputs of the first graph for a batch."""
        return self.session.execute(self.graph, self.feed(items))

    @property
    def graph(self) -> Graph:
        """The first graph."""
        return self.session.graphs[0]

    def decode(self, ids: Sequence[int]) -> str | None:
        """The text of token ids, special ones included; None without a tokenizer."""
        tokenizer = self.session.tokenizer
        return None if tokenizer is None else tokenizer.decode(list(ids), skip_special_tokens=False)

    def _check(self, ids: Sequence[int], number: int) -> None:
        where = f"input {number}"
        if not ids:
            raise ArtifactError("has no tokens", where, "give at least one")
        longest = self.session.option("max_seq_len")
        if longest is not None and len(ids) > longest:
            raise ArtifactError(f"has {len(ids)} tokens, the model has {longest} positions", where, "shorten it")
        upper = self.graph.input_tensors()[0].upper
        if upper is not None and (min(ids) < 0 or max(ids) >= upper):
            what = f"has a token outside the vocabulary of {upper}"
            raise ArtifactError(what, where, "is this the model's tokenizer?")


def _is_id(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def label(answer: Answer) -> str:
    """What an input is called in a line for people."""
    return repr(answer.input) if isinstance(answer.input, str) else f"input {answer.number}"


def finite(items: Sequence[Any], values: Array, results: Sequence[dict[str, Any]]) -> list[Any]:
    """Results, with an error in the place of those whose ``values`` (one row each) are not all finite."""
    sound = [bool(np.isfinite(row).all()) for row in values]
    return [
        result if good else ArtifactError("the output is not finite", f"input {item.number}", "look at the weights")
        for item, result, good in zip(items, results, sound, strict=True)
    ]
