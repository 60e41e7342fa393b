"""What a task is made of. A plugin adds one with the hook ``zoo_tasks`` and a subclass of :class:`Runner`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from zoo.config import Settings
from zoo.contract import Graph, TensorSpec
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

    @classmethod
    def defaults(cls, session: Session, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Options that the model's own files choose, to be taken where people ``given`` none that contradict them."""
        return {}

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

    def stream(self, item: Item) -> Iterator[str]:
        """The result of one item as a text that comes in pieces, where the task has such."""
        raise UsageError(f"{self.session.task} has nothing to stream", self.session.path)

    @property
    def streams(self) -> bool:
        """Whether the task has results that come in pieces."""
        return type(self).stream is not Runner.stream

    def lead(self, text: str) -> str:
        """What is shown before what is streamed for a text."""
        return ""

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

    needs: tuple[str, ...] = ()
    """Outputs of the first graph without which the task cannot be done."""

    def __init__(self, session: Session, chosen: Any) -> None:
        super().__init__(session, chosen)
        require_outputs(self.graph, self.needs, session.path)

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

    def fits(self, longest: int, size: int) -> bool:
        """A shorter input is padded, which only a mask can tell a graph."""
        return size == longest or any(tensor.is_mask for tensor in self.graph.input_tensors())

    def feed(self, items: Sequence[Tokens], *, left: bool = False) -> Arrays:
        """Inputs of the first graph for a padded batch: ids, mask, positions, and the first of two segments."""
        length = max(len(item.ids) for item in items)
        ids = np.full((len(items), length), self.session.option("pad_token_id") or 0, dtype=np.int64)
        mask = np.zeros_like(ids)
        for row, item in enumerate(items):
            place = slice(length - len(item.ids), None) if left else slice(len(item.ids))
            ids[row, place], mask[row, place] = item.ids, 1
        known = {"position_ids": np.maximum(mask.cumsum(1) - 1, 0), "token_type_ids": np.zeros_like(ids)}
        known[self.ids_input.name] = ids
        tensors = [tensor for tensor in self.graph.inputs if isinstance(tensor, TensorSpec)]
        known |= {tensor.name: mask for tensor in tensors if tensor.is_mask}
        strange = sorted({tensor.name for tensor in tensors} - set(known))
        if strange:
            raise UsageError(f"nothing here can feed {', '.join(strange)}", f"graph {self.graph.name}")
        return {tensor.name: known[tensor.name] for tensor in tensors}

    def compute(self, items: Sequence[Tokens]) -> Arrays:
        """The outputs of the first graph for a batch."""
        return self.session.execute(self.graph, self.feed(items))

    @property
    def graph(self) -> Graph:
        """The first graph."""
        return self.session.graphs[0]

    @cached_property
    def ids_input(self) -> TensorSpec:
        """Its input of token ids: the first that has a vocabulary."""
        for tensor in self.graph.input_tensors():
            if tensor.upper is not None and not tensor.is_mask:
                return tensor
        raise UsageError(f"graph {self.graph.name} reads no token ids", self.session.path)

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
        upper = self.ids_input.upper
        if upper is not None and (min(ids) < 0 or max(ids) >= upper):
            what = f"has a token outside the vocabulary of {upper}"
            raise ArtifactError(what, where, "is this the model's tokenizer?")


def _is_id(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def require_outputs(graph: Graph, names: Sequence[str], where: object) -> None:
    """Raise :class:`UsageError` unless a graph has these outputs."""
    lacks = set(names) - {tensor.name for tensor in graph.output_tensors()}
    if lacks:
        raise UsageError(f"graph {graph.name} has no {', '.join(sorted(lacks))}", where, "choose another task")


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
