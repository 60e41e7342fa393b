"""Base class for tasks on texts or token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from zoo.contract import Graph, TensorSpec
from zoo.errors import ArtifactError, UsageError, Wording
from zoo.tokenizers.inputs import LongInputError, Side, TextInputs, require_tokens
from zoo.tokenizers.long_texts.truncation import trained_length, truncated_texts
from zoo_runtime.onnx_runtime.adapters import ADAPTER_IDS
from zoo_runtime.running.context import Context, internals
from zoo_runtime.running.inputs import Pair, are_ids, is_pair
from zoo_runtime.running.runner import Runner, require_outputs

if TYPE_CHECKING:
    from zoo.probe.pipeline import Arrays
    from zoo.tokenizers.tokenizer import Tokenizer

__all__ = ["TextRunner", "Tokens", "chosen_adapters"]

_TEXTS = ("Tea?", "Où est-il ? 🙂", "Дождь идёт", "شكرا جزيلا", "今日は雨です", "नमस्ते", "The rain has stopped by now.")
"""Samples of a task on texts."""
_LENGTHS = (1, 6, 4, 9)
"""Numbers of tokens of random samples."""


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
        return internals(self.session).truncate

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

    def _read_pair(
        self, number: int, first: Any, second: Any, names: tuple[str, str] = ("first text", "second text")
    ) -> Tokens:
        if isinstance(first, str):
            encoded = self.encode(number, first, second)
            item = Tokens(number, encoded.ids, types=encoded.type_ids, encoding=encoded)
            require_tokens(encoded, f"input {number}", *names)
            return item
        for name, ids in (("first", first), ("second", second)):
            if not ids:
                raise ArtifactError(f"the {name} text has no tokens", f"input {number}", "give at least one")
        return Tokens(number, [*map(int, first), *map(int, second)], types=[0] * len(first) + [1] * len(second))

    def _check(self, item: Tokens) -> None:
        """Raise :class:`ArtifactError` unless the model can read an item."""
        where = f"input {item.number}"
        limits = internals(self.session).input_limits
        self.inputs.check(item.ids, item.types, where, is_text=item.encoding is not None and self.can_truncate)
        for name, limit in limits.items():
            if len(item.ids) > limit:
                problem = f"{len(item.ids)} tokens do not fit into buffers for {limit}"
                raise LongInputError(problem, where, f"export with a larger --fix {name}=N")


def chosen_adapters(session: Context, items: Sequence[Any]) -> Arrays:
    """Return the input that chooses the adapter of each item, if the graphs of the session have adapters."""
    return {ADAPTER_IDS: np.array([item.adapter for item in items])} if internals(session).adapters else {}
