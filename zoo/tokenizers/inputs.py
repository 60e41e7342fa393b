"""Batches of token ids as a model's first graph reads them. B batch, T tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from zoo.arrays import Array
from zoo.config import Settings
from zoo.contract import Graph, Size, TensorSpec, sizes_of, standard_fields
from zoo.errors import ArtifactError, UsageError, Wording

if TYPE_CHECKING:
    from tokenizers import Encoding

__all__ = ["LongInputError", "Side", "TextInputs", "padded", "require_tokens", "segments_of"]

Side = Literal["left", "right"]

_SHORTEN = Wording("shorten it, or pass truncate=True", "shorten it, or pass --truncate")


class LongInputError(ArtifactError):
    """An input has more tokens than the model reads."""


class TextInputs:
    """The inputs of a model that reads token ids.

    Args:
        graphs: the declared graphs in execution order; the first one reads the ids.
        config: the architecture's configuration.
        directory: the model directory.
    """

    def __init__(self, graphs: Sequence[Graph], config: Settings, directory: Path) -> None:
        self.graph = graphs[0]
        self.directory = directory
        fields = standard_fields(config)
        self.positions = fields.max_seq_len
        """Maximum number of tokens."""
        self.pad_id = fields.pad_token_id or 0
        self.segments = segments_of(self.graph)
        """Number of segments (token types); 0 if the graph has no such input."""
        self._sizes = sizes_of(graphs)

    @property
    def length(self) -> int | None:
        """The number of tokens to which the graph's texts are padded, whose padding it reads; None if it is free."""
        length = None if self._ids is None else self._ids.dims[-1]
        return length if isinstance(length, int) else None

    @cached_property
    def _ids(self) -> TensorSpec | None:
        tensors = self.graph.input_tensors()
        return next((tensor for tensor in tensors if tensor.upper is not None and not tensor.is_mask), None)

    @property
    def ids_input(self) -> TensorSpec:
        """The token id input: the first input with a vocabulary. Raises :class:`UsageError` if there is none."""
        if self._ids is None:
            raise UsageError(f"graph {self.graph.name} has no token id input", self.directory)
        return self._ids

    @property
    def side(self) -> Side:
        """The side of padding: the left before tokens to be generated, otherwise the right, if the mask allows it."""
        preferred: Side = "left" if self.graph.pasts else "right"
        other: Side = "left" if preferred == "right" else "right"
        return other if not self.can_pad(preferred) and self.can_pad(other) else preferred

    def can_pad(self, side: Side) -> bool:
        """Whether texts of different lengths can be padded on a side: the graph has a mask for it, or reads padding."""
        if self.length is not None and side == "right":
            return True
        return any(tensor.is_mask and tensor.padding in ("both", side) for tensor in self.graph.input_tensors())

    def check(self, ids: Sequence[int], types: Sequence[int], where: object, *, is_text: bool) -> None:
        """Raise :class:`ArtifactError` unless the model can read a row.

        Args:
            ids: token ids.
            types: the segment of each token; empty if all are in the first one.
            where: the input, for errors.
            is_text: whether the ids are those of a text, which can be truncated.
        """
        if not ids:
            raise ArtifactError("empty input", where, "give at least one token")
        if self.positions is not None and len(ids) > self.positions:
            raise self._too_long(str(len(ids)), where, is_text)
        allowed = self._sizes.get(str(self.ids_input.dims[-1]), Size())
        if not allowed.allows(len(ids)):
            raise ArtifactError(f"{len(ids)} tokens, but the number must be {allowed}", where)
        upper = self.ids_input.upper
        if upper is not None and (min(ids) < 0 or max(ids) >= upper):
            what = f"token id outside the vocabulary of {upper}"
            raise ArtifactError(what, where, "is this the model's tokenizer?")
        if self.segments > 1 and max(types, default=0) >= self.segments:
            what = f"segment {max(types)} is out of range: the model has {self.segments}, numbered from 0"
            raise ArtifactError(what, where, "is this the model's tokenizer?")

    def check_length(
        self, text: str, exceeds: Callable[[str, int, object], bool], where: object, *, can_truncate: bool = True
    ) -> None:
        """Raise ``LongInputError`` for a text with more tokens than positions, if a part of it shows that.

        A long text takes much memory to encode. :meth:`check` finds the others.

        Args:
            text: the text.
            exceeds: ``exceeds`` of the :class:`zoo.tokenizers.tokenizer.Tokenizer` that encodes it.
            where: the input, for errors.
            can_truncate: whether the error may name truncation as a remedy.
        """
        if self.positions is not None and exceeds(text, self.positions, where):
            raise self._too_long(f"more than {self.positions}", where, can_truncate)

    def _too_long(self, count: str, where: object, can_truncate: bool) -> LongInputError:
        what = f"{count} tokens exceed the model's {self.positions} positions"
        return LongInputError(what, where, _SHORTEN if can_truncate else "shorten it")

    def batch(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]], side: Side) -> dict[str, Array]:
        """Return the graph's inputs for a padded batch, each (B, T): ids, mask, positions and segments.

        If the model has a single segment, as RoBERTa does, all tokens get segment 0.

        Args:
            rows: ids and segments of each row; segments are empty if all tokens are in the first one.
            side: the side of padding.

        Raises:
            UsageError: the graph has an input of another kind.
        """
        ids = padded([row for row, _ in rows], side, self.pad_id, self.length)
        mask = padded([[1] * len(row) for row, _ in rows], side, length=self.length)
        segments = [types or [0] * len(row) for row, types in rows]
        types = padded(segments, side, length=self.length) if self.segments > 1 else mask * 0
        columns = {"position_ids": np.maximum(mask.cumsum(1) - 1, 0), "token_type_ids": types, self.ids_input.name: ids}
        tensors = [tensor for tensor in self.graph.inputs if isinstance(tensor, TensorSpec)]
        columns |= {tensor.name: mask for tensor in tensors if tensor.is_mask}
        unknown = sorted({tensor.name for tensor in tensors} - set(columns))
        if unknown:
            raise UsageError(f"unsupported graph inputs {', '.join(unknown)}", f"graph {self.graph.name}")
        return {tensor.name: columns[tensor.name] for tensor in tensors}


def padded(rows: Sequence[Any], side: Side, fill: int = 0, length: int | None = None) -> Array:
    """Return rows of integers, or of tuples of them, as one array, (B, T) or (B, T, n); T is at least ``length``."""
    length = max(length or 0, *map(len, rows))
    inner = np.shape(rows[0])[1:]
    result = np.full((len(rows), length, *inner), fill, dtype=np.int64)
    for number, row in enumerate(rows):
        result[number, slice(length - len(row), None) if side == "left" else slice(len(row))] = row
    return result


def segments_of(graph: Graph) -> int:
    """Return the number of segments (token types) of a graph; 0 if it has no such input."""
    return next((tensor.upper or 0 for tensor in graph.input_tensors() if tensor.name == "token_type_ids"), 0)


def require_tokens(encoded: Encoding, where: object, *names: str) -> None:
    """Raise :class:`ArtifactError` if one of the encoded texts has no tokens. ``names`` are those of the texts."""
    present = set(encoded.sequence_ids)
    for number, name in enumerate(names):
        if number not in present:
            raise ArtifactError(f"the {name} has no tokens", where, "give at least one")
