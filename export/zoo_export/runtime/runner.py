"""What a task is made of. A plugin adds one with the hook ``zoo_tasks`` and a subclass of :class:`Runner`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np

from zoo.config import Settings
from zoo.contract import Graph, TensorSpec
from zoo.errors import ArtifactError, UsageError, ZooError

if TYPE_CHECKING:
    from zoo.plugins import Plugin
    from zoo_export.pipeline import Arrays
    from zoo_export.runtime.session import Session

__all__ = ["Answer", "Pair", "Runner", "TextRunner", "Tokens"]

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


class Pair(NamedTuple):
    """One input of two texts, or of two lists of token ids, for tasks that read pairs.

    In a list of inputs any list or tuple of two will do; alone, two texts would be two inputs.
    """

    first: str | Sequence[int]
    """Of token ids all that come before the second, such as BERT's ``[CLS] first [SEP]``."""
    second: str | Sequence[int]
    """Of token ids all the rest."""


@dataclass(frozen=True)
class Tokens:
    """An input as token ids."""

    number: int
    ids: list[int]
    types: Sequence[int] = field(default=(), kw_only=True)
    """The segment of each; none is the first for all."""


class TextRunner(Runner[Tokens]):
    """Inputs are texts, or token ids; where the task reads pairs, two of either too."""

    needs: tuple[str, ...] = ()
    """Outputs of the first graph without which the task cannot be done."""
    takes_pairs = False
    """Whether an input may be a :class:`Pair`."""

    def __init__(self, session: Session, chosen: Any) -> None:
        super().__init__(session, chosen)
        require_outputs(self.graph, self.needs, session.path)

    def read(self, value: Any, number: int) -> Tokens:
        """Token ids, all of which the model knows and has positions for."""
        if isinstance(value, str):
            encoded = self._encode(number, value)
            around = all(encoded.special_tokens_mask)  # those that are put around every text
            item = Tokens(number, [] if around else encoded.ids, types=encoded.type_ids)
        elif are_ids(value):
            item = Tokens(number, [int(token) for token in value])
        elif is_pair(value):
            if not self.takes_pairs:
                raise ArtifactError("is a pair, which the task does not read", f"input {number}", "give one text")
            item = self._read_pair(number, *value)
        else:
            raise ArtifactError(f"neither a text nor token ids, but {type(value).__name__}", f"input {number}")
        self._check(item.ids, number)
        segments = segments_of(self.graph)
        if segments > 1 and max(item.types, default=0) >= segments:
            what = f"has tokens of segment {max(item.types)} from 0, the model has {segments}"
            raise ArtifactError(what, f"input {number}", "is this the model's tokenizer?")
        return item

    def _encode(self, number: int, *texts: str) -> Any:
        """What the tokenizer makes of input ``number``, one text or the two of a pair: its ``Encoding``."""
        tokenizer = self.session.tokenizer
        if tokenizer is None:
            remedy = "attach one with --tokenizer FILE, or give --ids 1,2,3"
            raise UsageError("the model has no tokenizer", self.session.path, remedy)
        try:
            return tokenizer.encode(*texts)
        except Exception as error:  # the library raises bare Exception, and UnicodeError for lone surrogates
            raise ArtifactError(f"cannot be encoded ({error})", f"input {number}") from error

    def size(self, item: Tokens) -> int:
        """Tokens."""
        return len(item.ids)

    def fits(self, longest: int, size: int) -> bool:
        """A shorter input is padded, which only a mask can tell a graph."""
        return size == longest or any(tensor.is_mask for tensor in self.graph.input_tensors())

    def feed(self, items: Sequence[Tokens], *, left: bool = False) -> Arrays:
        """Inputs of the first graph for a padded batch: ids, mask, positions, and segments.

        A model of one segment, such as RoBERTa, tells none apart: it is the segment of every token.
        """
        length = max(len(item.ids) for item in items)
        ids = np.full((len(items), length), self.session.option("pad_token_id") or 0, dtype=np.int64)
        mask, types, segments = np.zeros_like(ids), np.zeros_like(ids), segments_of(self.graph)
        for row, item in enumerate(items):
            place = slice(length - len(item.ids), None) if left else slice(len(item.ids))
            ids[row, place], mask[row, place] = item.ids, 1
            if segments > 1 and item.types:
                types[row, place] = item.types
        known = {"position_ids": np.maximum(mask.cumsum(1) - 1, 0), "token_type_ids": types}
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

    def _read_pair(self, number: int, first: Any, second: Any) -> Tokens:
        if isinstance(first, str):
            encoded = self._encode(number, first, second)
            item = Tokens(number, encoded.ids, types=encoded.type_ids)
            found = set(encoded.sequence_ids)
        else:
            types = [0] * len(first) + [1] * len(second)
            item = Tokens(number, [*map(int, first), *map(int, second)], types=types)
            found = {place for place, ids in enumerate((first, second)) if ids}
        for place, name in enumerate(("first", "second")):
            if place not in found:
                raise ArtifactError(f"the {name} text has no tokens", f"input {number}", "give at least one")
        return item

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


def are_ids(value: object) -> bool:
    """Whether an input is a list of token ids."""
    return isinstance(value, list | tuple) and all(
        isinstance(token, int | np.integer) and not isinstance(token, bool) for token in value
    )


def is_pair(value: object) -> bool:
    """Whether an input is two texts, or two lists of token ids."""
    return (
        isinstance(value, list | tuple)
        and len(value) == 2
        and (all(isinstance(part, str) for part in value) or all(are_ids(part) for part in value))
    )


def texts_of(value: object) -> tuple[str, ...]:
    """The text, or the two, that an input is; none where it is token ids or something else."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if is_pair(value) and isinstance(value[0], str) else ()  # type: ignore[index, arg-type]


def segments_of(graph: Graph) -> int:
    """Segments that the tokens of a graph may be of; 0 where it reads none."""
    return next((tensor.upper or 0 for tensor in graph.input_tensors() if tensor.name == "token_type_ids"), 0)


def require_outputs(graph: Graph, names: Sequence[str], where: object) -> None:
    """Raise :class:`UsageError` unless a graph has these outputs."""
    lacks = set(names) - {tensor.name for tensor in graph.output_tensors()}
    if lacks:
        raise UsageError(f"graph {graph.name} has no {', '.join(sorted(lacks))}", where, "choose another task")


def label(answer: Answer) -> str:
    """What an input is called in a line for people."""
    return ", ".join(map(repr, texts_of(answer.input))) or f"input {answer.number}"


def finite(items: Sequence[Any], values: Array, results: Sequence[dict[str, Any]]) -> list[Any]:
    """Results, with an error in the place of those whose ``values`` (one row each) are not all finite."""
    sound = [bool(np.isfinite(row).all()) for row in values]
    return [
        result if good else ArtifactError("the output is not finite", f"input {item.number}", "look at the weights")
        for item, result, good in zip(items, results, sound, strict=True)
    ]
