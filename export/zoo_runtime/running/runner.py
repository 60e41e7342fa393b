"""Base classes for tasks. A plugin adds a task with the hook ``zoo_tasks`` and a subclass of :class:`Runner`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from zoo.config import Settings
from zoo.contract import Graph, TensorSpec
from zoo.errors import ArtifactError, UsageError, Wording, ZooError
from zoo.tokenizers.inputs import LongInputError, Side, TextInputs, require_tokens
from zoo.tokenizers.truncation import trained_length, truncated_texts
from zoo_runtime.onnx_runtime.adapters import ADAPTER_IDS

if TYPE_CHECKING:
    from zoo.artifact import Export, ModelDirectory
    from zoo.plots import Distribution
    from zoo.plugins import Plugin
    from zoo.probe.pipeline import Arrays
    from zoo.tokenizers.chat import ChatTemplate
    from zoo.tokenizers.tokenizer import Tokenizer
    from zoo_runtime.generation.stepper import Stepper
    from zoo_runtime.onnx_runtime.ort import ort
    from zoo_runtime.serving.rows import Rows

__all__ = [
    "Answer",
    "Context",
    "Pair",
    "Runner",
    "TextRunner",
    "Tokens",
    "are_ids",
    "chosen_adapters",
    "finite",
    "is_pair",
    "label",
    "require_outputs",
    "texts_of",
]

Array = np.ndarray[Any, Any]
Item = TypeVar("Item")

_TEXTS = ("Tea?", "Où est-il ? 🙂", "Дождь идёт", "شكرا جزيلا", "今日は雨です", "नमस्ते", "The rain has stopped by now.")
"""Samples of a task on texts."""
_LENGTHS = (1, 6, 4, 9)
"""Numbers of tokens of random samples."""


@dataclass
class Answer:
    """One input with its result or error."""

    number: int
    """Counted from 1."""
    input: Any
    result: dict[str, Any] = field(default_factory=dict)
    error: ZooError | None = None
    """The reason why there is no result."""
    id: Any = None
    """The input's id in its file, if it comes from a file."""
    adapter: str | None = None
    """The name of the adapter to run it with; None for the model itself."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The row of the input's file, if it is to be written with the result."""


class Context(Protocol):
    """The open model that a runner works with, a :class:`zoo_runtime.Session`."""

    @property
    def path(self) -> Path:
        """The model directory."""
        ...

    @property
    def stored(self) -> ModelDirectory:
        """The model's files and description."""
        ...

    @property
    def export(self) -> Export:
        """The open export."""
        ...

    @property
    def task(self) -> str:
        """The model's declared task."""
        ...

    @property
    def adapters(self) -> Sequence[str]:
        """The names of the adapters, if the graphs have some."""
        ...

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """The declared graphs in execution order."""
        ...

    @property
    def config(self) -> Settings:
        """The architecture's configuration."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of floating-point inputs and of caches."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, which does not truncate, or None if inputs are token ids."""
        ...

    @property
    def provider(self) -> str:
        """Where the graphs run: ``cpu`` or ``cuda``."""
        ...

    @property
    def truncate(self) -> int | None:
        """Number of tokens to which texts are truncated; None if longer ones are refused."""
        ...

    @property
    def chat(self) -> ChatTemplate | None:
        """The template of chats, if inputs are chats."""
        ...

    @property
    def input_limits(self) -> Mapping[str, int]:
        """Sizes of an export for serving that limit the tokens of an input, by dimension; empty for other exports."""
        ...

    @property
    def free_rows(self) -> list[Rows]:
        """Buffers of an export for serving that are not in use."""
        ...

    def open_rows(self) -> Rows:
        """Allocate the buffers of an export for serving."""
        ...

    @property
    def sessions(self) -> Mapping[str, ort.InferenceSession]:
        """ONNX Runtime sessions by graph name."""
        ...

    def option(self, name: str) -> Any:
        """Return a field of the configuration, or None if the architecture has no such field."""
        ...

    def warn(self, what: str) -> None:
        """Issue a warning once per session."""
        ...

    def execute(self, graph: Graph, feeds: Mapping[str, Array]) -> Arrays:
        """Run one graph on arrays."""
        ...

    def stepper(self, feeds: Mapping[str, Array] = ..., *, rows: int | None = None) -> Stepper:
        """Open the decoder, to be run token by token."""
        ...

    def draft(self, directory: str) -> Context:
        """Open another exported model, which drafts tokens for this one."""
        ...


class Runner(ABC, Generic[Item]):
    """Performs one task on one session: reads inputs, and answers them in batches."""

    options: type[Settings] = Settings
    """The task's options: a frozen dataclass derived from :class:`zoo.Settings`."""
    batch_size = 32
    """Number of inputs per batch. Set by the session if another is chosen."""
    variant: str | None = None
    """The export variant that the task requires, or None for any."""
    sample_options: Mapping[str, Any] = {}
    """Options with which :meth:`samples` are run."""
    chats = False
    """Whether the task reads chats, in a session that has ``chat``."""
    makes_variants = False
    """Whether results have ``variants``, each with a ``text`` that may replace the input, or None without one."""
    plugin: Plugin
    """The plugin that provides the task. Set by the session."""

    def __init__(self, session: Context, chosen: Any) -> None:
        self.session, self.chosen = session, chosen

    @classmethod
    def defaults(cls, session: Context, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return options from the model's own files that do not contradict the ``given`` ones."""
        return {}

    def samples(self) -> Sequence[Any]:
        """Return inputs on which ``zoo export`` and ``zoo verify`` run a task that declares a formula.

        Those that do not fit the model, such as long texts, are left out.
        """
        return ()

    def gather(self, texts: Sequence[str]) -> list[Any]:
        """Return the inputs that the texts of a command line are; by default one each."""
        return list(texts)

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
        raise UsageError(f"{self.session.task} does not support streaming", self.session.path)

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


class Pair(NamedTuple):
    """One input of two texts, or of two lists of token ids, for tasks that read pairs.

    Inside a list of inputs, any list or tuple of two is a pair. Passed alone, a plain list of two texts is two inputs,
    so a single pair must be a ``Pair``.
    """

    first: str | Sequence[int]
    """A text, or all token ids before the second part, such as BERT's ``[CLS] first [SEP]``."""
    second: str | Sequence[int] | Sequence[str]
    """A text, or all remaining token ids; or a list of texts, for tasks that compare them with the first."""


@dataclass(frozen=True)
class Tokens:
    """An input as token ids."""

    number: int
    ids: list[int]
    types: Sequence[int] = field(default=(), kw_only=True)
    """Segment of each token; empty if all tokens are in the first segment."""
    encoding: Any = field(default=None, kw_only=True, repr=False, compare=False)
    """The tokenizer's ``Encoding`` of a text or a pair of texts; None for token ids."""
    adapter: int = field(default=0, kw_only=True)
    """The number of its adapter, in the variant ``adapters``; set by the session."""


class TextRunner(Runner[Tokens]):
    """Base class for tasks on texts or token ids, or on pairs of them."""

    needs: tuple[str, ...] = ()
    """Outputs of the first graph that the task requires."""
    takes_pairs = False
    """Whether an input may be a :class:`Pair`."""
    padding: Side = "right"
    """The side on which :meth:`feed` is asked to pad."""
    can_truncate = True
    """Whether the caller has an option that truncates texts, which errors may name."""

    def __init__(self, session: Context, chosen: Any) -> None:
        super().__init__(session, chosen)
        self.inputs = TextInputs(session.graphs, session.config, session.path)
        """The inputs of the first graph."""
        self._truncating: Tokenizer | None = None
        self._cut_lists = 0
        """Number of lists of token ids that were truncated."""
        require_outputs(self.graph, self.needs, session.path)

    def samples(self) -> Sequence[Any]:
        """Return texts in several scripts, or random token ids without a tokenizer; also pairs, if there are any."""
        singles: Sequence[Any] = _TEXTS
        if self.session.tokenizer is None:
            random = np.random.default_rng(0)
            singles = [random.integers(self.ids_input.upper or 1, size=size).tolist() for size in _LENGTHS]
        return [*singles, Pair(*singles[:2])] if self.takes_pairs else singles

    def read(self, value: Any, number: int) -> Tokens:
        """Convert an input to token ids, and check them against the model's vocabulary and positions."""
        if isinstance(value, str):
            encoded = self.encode(number, value)
            empty = all(encoded.special_tokens_mask)  # only the special tokens that every text gets
            item = Tokens(number, [] if empty else encoded.ids, types=encoded.type_ids, encoding=encoded)
        elif are_ids(value):
            item = Tokens(number, self._cut([int(token) for token in value]))
        elif is_pair(value):
            if not self.takes_pairs:
                raise ArtifactError("the task does not accept pairs", f"input {number}", "give one text")
            item = self._read_pair(number, *value)
        else:
            raise ArtifactError(f"expected a text or token ids, got {type(value).__name__}", f"input {number}")
        self._check(item)
        return item

    def text_limit(self) -> int | None:
        """Return the number of tokens to which texts are truncated; None if longer ones are refused."""
        return self.session.truncate

    def encode(self, number: int, *texts: str) -> Any:
        """Return the tokenizer's ``Encoding`` of a text or a pair, truncated if the session truncates."""
        if self._truncating is None:
            self._truncating = self.tokenizer.truncating(self.text_limit(), side=self.padding)
        if self._truncating.limit is None:
            self.check_lengths(number, *texts)
        return self._truncating.encode(*texts, where=f"input {number}", overflowing=False)

    def check_lengths(self, number: int, *texts: str) -> None:
        """Raise ``LongInputError`` for a text that a part of it shows to be too long, before it is encoded."""
        for text in texts:
            self.inputs.check_length(text, self.tokenizer.exceeds, f"input {number}", can_truncate=self.can_truncate)

    @property
    def truncated(self) -> str | None:
        """The number of truncated texts in words, for a warning; None if it is 0."""
        count = self._cut_lists + (self._truncating.truncated if self._truncating is not None else 0)
        return truncated_texts(count, self.text_limit()) if count else None

    def _cut(self, ids: list[int]) -> list[int]:
        """Return a list of token ids, truncated as in training if zoo has trained the model on truncated ones."""
        limit = self.text_limit() if trained_length(self.session.stored) is not None else None
        if limit is None or len(ids) <= limit:
            return ids
        self._cut_lists += 1
        return ids[-limit:] if self.padding == "left" else ids[:limit]

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, which does not truncate. Raises :class:`UsageError` if the model has none."""
        if self.session.tokenizer is None:
            remedy = Wording(
                "attach one with tokenizer=FILE, or give token ids",
                "attach one with --tokenizer FILE, or give --ids 1,2,3",
            )
            raise UsageError("the model has no tokenizer", self.session.path, remedy)
        return self.session.tokenizer

    def size(self, item: Tokens) -> int:
        """Number of tokens."""
        return len(item.ids)

    def fits(self, longest: int, size: int) -> bool:
        """Items of different lengths need padding, which is only possible if the graph has a mask for that side."""
        return size == longest or self.inputs.can_pad(self.padding)

    def feed(self, items: Sequence[Tokens], *, left: bool = False) -> Arrays:
        """Build the first graph's inputs for a padded batch: ids, mask, positions and segments."""
        feeds = self.inputs.batch([(item.ids, item.types) for item in items], "left" if left else "right")
        return feeds | chosen_adapters(self.session, items)

    def compute(self, items: Sequence[Tokens]) -> Arrays:
        """Run the first graph on a batch and return its outputs."""
        return self.session.execute(self.graph, self.feed(items))

    @property
    def graph(self) -> Graph:
        """The first graph."""
        return self.session.graphs[0]

    @property
    def ids_input(self) -> TensorSpec:
        """The first graph's token id input: the first input with a vocabulary."""
        return self.inputs.ids_input

    def decode(self, ids: Sequence[int]) -> str | None:
        """Decode token ids, including special tokens; None without a tokenizer."""
        tokenizer = self.session.tokenizer
        return None if tokenizer is None else tokenizer.decode(ids, special_tokens=True)

    def _read_pair(self, number: int, first: Any, second: Any) -> Tokens:
        if isinstance(first, str):
            encoded = self.encode(number, first, second)
            item = Tokens(number, encoded.ids, types=encoded.type_ids, encoding=encoded)
            require_tokens(encoded, f"input {number}", "first text", "second text")
            return item
        for name, ids in (("first", first), ("second", second)):
            if not ids:
                raise ArtifactError(f"the {name} text has no tokens", f"input {number}", "give at least one")
        return Tokens(number, [*map(int, first), *map(int, second)], types=[0] * len(first) + [1] * len(second))

    def _check(self, item: Tokens) -> None:
        """Raise :class:`ArtifactError` unless the model can read an item."""
        where, limits = f"input {item.number}", self.session.input_limits
        self.inputs.check(item.ids, item.types, where, is_text=item.encoding is not None and self.can_truncate)
        for name, limit in limits.items():
            if len(item.ids) > limit:
                what = f"{len(item.ids)} tokens do not fit into buffers for {limit}"
                raise LongInputError(what, where, f"export with a larger --fix {name}=N")


def chosen_adapters(session: Context, items: Sequence[Any]) -> Arrays:
    """Return the input that chooses the adapter of each item, if the graphs of the session have adapters."""
    return {ADAPTER_IDS: np.array([item.adapter for item in items])} if session.adapters else {}


def are_ids(value: object) -> bool:
    """Whether an input is a list of token ids."""
    return isinstance(value, list | tuple) and all(
        isinstance(token, int | np.integer) and not isinstance(token, bool) for token in value
    )


def is_pair(value: object) -> bool:
    """Whether an input is a pair of texts or of token id lists."""
    return (
        isinstance(value, list | tuple)
        and len(value) == 2
        and (all(isinstance(part, str) for part in value) or all(are_ids(part) for part in value))
    )


def texts_of(value: object) -> tuple[str, ...]:
    """Return the texts of an input: one, a pair, or a pair of one and a list; empty for token ids and other inputs."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, Pair) and isinstance(value.first, str) and isinstance(value.second, list | tuple):
        return (value.first, *value.second) if all(isinstance(text, str) for text in value.second) else ()
    return tuple(value) if is_pair(value) and isinstance(value[0], str) else ()  # type: ignore[index, arg-type]


def require_outputs(graph: Graph, names: Sequence[str], where: object) -> None:
    """Raise :class:`UsageError` unless a graph has the outputs ``names``."""
    lacks = set(names) - {tensor.name for tensor in graph.output_tensors()}
    if lacks:
        raise UsageError(f"graph {graph.name} has no {', '.join(sorted(lacks))}", where, "choose another task")


def label(answer: Answer) -> str:
    """Name of an input in human-readable output."""
    return ", ".join(map(repr, texts_of(answer.input))) or f"input {answer.number}"


def finite(items: Sequence[Any], values: Array, results: Sequence[dict[str, Any]]) -> list[Any]:
    """Replace each result whose row of ``values`` contains NaN or infinity by an error."""
    sound = [bool(np.isfinite(row).all()) for row in values]
    return [
        result
        if good
        else ArtifactError("output contains NaN or infinity", f"input {item.number}", "check the weights")
        for item, result, good in zip(items, results, sound, strict=True)
    ]
