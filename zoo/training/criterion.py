"""The base class of objectives. Importing this module imports torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from zoo.config import Config, Settings
from zoo.training.examples import Example

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

__all__ = ["Batch", "Criterion", "Loss", "Row", "mask_of", "padded", "wide"]

Array = np.ndarray[Any, Any]
Ids = np.ndarray[Any, np.dtype[np.int32]]
Row = Mapping[str, Any]
"""A row of data, by the roles of its columns: ``text``, ``label`` and so on."""
Batch = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of a batch as a sum and a count, so that a mean over several batches is exact."""

    total: Tensor
    """Sum over targets, a scalar."""
    count: int
    """Number of targets."""
    correct: int | None = None
    """Number of targets that are predicted, where that is defined."""


class Criterion(ABC):
    """An objective: how a row of data becomes an example, examples become a batch, and a batch becomes a loss.

    Args:
        config: the configuration of the model.
        tokenizer: the model's tokenizer, if it has one.
        settings: the objective's own settings, an instance of the declared class.
        max_length: longest example, in tokens.
    """

    packed: ClassVar[bool] = False
    """Whether examples are one stream of tokens, cut into blocks of ``max_length`` without regard to texts."""

    def __init__(self, config: Config, tokenizer: Tokenizer | None, settings: Settings, max_length: int) -> None:
        self.config, self.settings, self.max_length = config, settings, max_length
        self.truncated = 0
        """Number of texts that were cut to ``max_length``."""
        self._tokenizer = None if tokenizer is None else type(tokenizer).from_str(tokenizer.to_str())
        if self._tokenizer is not None and not self.packed:
            self._tokenizer.enable_truncation(max_length)  # keeps the special tokens around a text

    @abstractmethod
    def encode(self, row: Row) -> Example:
        """Return the example of a row, without anything random. Raises :class:`ValueError` for an unusable row."""

    @abstractmethod
    def collate(self, examples: Sequence[Example], generators: Sequence[np.random.Generator]) -> Batch:
        """Return a batch on the CPU. Whatever is random in an example comes from its generator."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Run the model and return the loss of a batch."""

    def encode_text(self, row: Row, role: str = "text", pair: str | None = None) -> Encoding:
        """Return the token ids of a text, or of two, with the tokenizer's special tokens.

        They are truncated to ``max_length`` unless examples are packed.

        Raises :class:`ValueError` if the model has no tokenizer, or a column is not a text.
        """
        if self._tokenizer is None:
            raise ValueError("the model has no tokenizer, so texts cannot be read: give lists of token ids")
        texts = [row[name] for name in (role, pair) if name is not None]
        for name, text in zip((role, pair), texts, strict=False):
            if not isinstance(text, str):
                raise ValueError(f"{name} must be a text, got {type(text).__name__}")
        encoded = self._tokenizer.encode(*texts)
        self.truncated += bool(encoded.overflowing)
        return encoded

    def token_ids(self, row: Row, role: str = "text") -> Ids:
        """Return the token ids of a column that holds a text, or a list of ids.

        Raises :class:`ValueError` if it is empty or neither of them, or an id is outside of the vocabulary.
        """
        value = row[role]
        if isinstance(value, list | tuple | np.ndarray):
            found = [int(item) for item in value if isinstance(item, int | np.integer) and not isinstance(item, bool)]
            if len(found) != len(value):
                raise ValueError(f"{role} must be a text or a list of token ids")
            if not self.packed and len(found) > self.max_length:
                self.truncated += 1
                found = found[: self.max_length]
        else:
            found = self.encode_text(row, role).ids
        return self.checked(found, role)

    def checked(self, ids: Sequence[int], role: str) -> Ids:
        """Return token ids as an array. Raises :class:`ValueError` if it is empty, or an id unknown."""
        size = getattr(self.config, "vocab_size", None)
        if not len(ids):
            raise ValueError(f"{role} is empty")
        outside = [item for item in (min(ids), max(ids)) if size is not None and not 0 <= item < size]
        if outside:
            raise ValueError(f"{role} has the token id {outside[0]}, outside of vocab_size {size}")
        return np.asarray(ids, np.int32)

    @property
    def pad_id(self) -> int:
        """The token that fills the rows of a batch."""
        found = getattr(self.config, "pad_token_id", None)
        return 0 if found is None else int(found)


def wide(logits: Tensor) -> Tensor:
    """Return logits in float32, or in their own dtype if it is wider, as losses need them."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def padded(rows: Sequence[Array], value: int) -> Tensor:
    """Return rows of integers as one tensor, (B, longest), padded on the right."""
    return pad_sequence([torch.from_numpy(row.astype(np.int64)) for row in rows], True, value)


def mask_of(rows: Sequence[Array]) -> Tensor:
    """Return the padding mask of :func:`padded` rows, (B, longest): 1 for a token, 0 for padding."""
    lengths = torch.tensor([len(row) for row in rows])
    return (torch.arange(int(lengths.max())) < lengths[:, None]).long()
