"""The base class of objectives. Importing this module imports torch."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from zoo.arrays import Array
from zoo.config import Config, Settings
from zoo.contract import KeyValues, standard_fields
from zoo.errors import ArtifactError, PluginError
from zoo.nn import Cache, LayerStates
from zoo.training.data.examples import Example
from zoo.training.data.labels import IGNORED

if TYPE_CHECKING:
    from tokenizers import Encoding

    from zoo.tokenizers.tokenizer import Tokenizer
    from zoo.training.processes import Processes

__all__ = ["IGNORED", "Batch", "Criterion", "Loss", "Row", "Sums", "is_list", "listed_ids", "mask_of", "padded", "wide"]

Ids = np.ndarray[Any, np.dtype[np.int32]]
Row = Mapping[str, Any]
"""A row of data, by the roles of its columns: ``text``, ``label`` and so on."""
Batch = Mapping[str, Tensor]
"""The tensors of a batch by name, (B, ...) each."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of a batch as a sum and a count, so that a mean over several batches is exact."""

    total: Tensor
    """Sum over targets, a scalar."""
    count: int
    """Number of targets."""
    correct: int | None = None
    """Number of targets that are predicted, where that is defined."""
    further: tuple[Loss, ...] = ()
    """Further terms with targets of their own. The loss of a step is the sum of the means of all terms, each over the
    targets of the whole step; :meth:`Criterion.counts` gives their numbers."""


class Sums:
    """The sums of losses over several batches.

    Args:
        terms: number of terms of the losses.
    """

    def __init__(self, terms: int) -> None:
        self._totals = [0.0] * terms
        self._counts = [0.0] * terms
        self._correct = [0.0] * terms
        self._judged = [0.0] * terms
        """Targets that are predicted, and those for which this is defined."""

    def add(self, loss: Loss) -> None:
        """Add the loss of a batch. Raises :class:`PluginError` if it has a negative number of targets."""
        terms = (loss, *loss.further)
        if any(term.count < 0 for term in terms):
            counts = ", ".join(str(term.count) for term in terms)
            raise PluginError(f"the objective counts {counts} targets in a batch")
        self._totals = [total + term.total.item() for total, term in zip(self._totals, terms, strict=True)]
        self._counts = [total + term.count for total, term in zip(self._counts, terms, strict=True)]
        for place, term in enumerate(terms):
            if term.correct is not None:
                self._correct[place] += term.correct
                self._judged[place] += term.count

    def add_up(self, processes: Processes) -> None:
        """Replace the sums by those over all processes."""
        parts = (self._totals, self._counts, self._correct, self._judged)
        sums = iter(processes.sums(*(value for part in parts for value in part)))
        self._totals, self._counts, self._correct, self._judged = ([next(sums) for _ in part] for part in parts)

    @property
    def targets(self) -> int:
        """Number of targets of the first term."""
        return int(self._counts[0])

    @property
    def losses(self) -> list[float | None]:
        """The mean of each term over its targets; None for one without targets."""
        pairs = zip(self._totals, self._counts, strict=True)
        return [total / count if count else None for total, count in pairs]

    @property
    def loss(self) -> float:
        """Sum of the means of all terms. Terms without targets are left out."""
        return sum(loss for loss in self.losses if loss is not None)

    @property
    def accuracies(self) -> list[float | None]:
        """Share of the targets of each term that are predicted, where that is defined."""
        pairs = zip(self._correct, self._judged, strict=True)
        return [correct / count if count else None for correct, count in pairs]

    @property
    def accuracy(self) -> float | None:
        """Share of the targets of the first term that are predicted, where that is defined."""
        return self.accuracies[0]

    def by_name(self, names: Sequence[str]) -> dict[str, float]:
        """Return the losses and accuracies that are defined, such as ``next_sentence_loss``, by the names of terms."""
        kinds = (("loss", self.losses), ("accuracy", self.accuracies))
        values_by_name = {f"{name}_{kind}": values[place] for place, name in enumerate(names) for kind, values in kinds}
        return {name: value for name, value in values_by_name.items() if value is not None}


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
    has_length: ClassVar[bool] = True
    """Whether ``max_length`` limits examples; if not, it is 0."""
    terms: ClassVar[int] = 1
    """Number of terms of the loss; :meth:`counts` is needed if there are several."""
    names: ClassVar[tuple[str, ...]] = ()
    """The name of each term, such as ``masked_lm``, if there are several: evaluations give each by its name."""
    models_language: ClassVar[bool] = False
    """Whether the first term is the mean negative log-likelihood of tokens, whose exponential is the perplexity."""
    divides: ClassVar[bool] = False
    """Whether a text that is longer than ``max_length`` becomes several examples, so that nothing is truncated."""
    label_fields: ClassVar[tuple[str, ...]] = ("label", "labels", "span", "similarity")
    """Fields of examples that hold labels. Examples that differ in these alone are counted."""
    divisible: bool = True
    """Whether the loss of an example is independent of the others in its batch, so that a step can be computed in
    parts."""

    @property
    def loss_unit(self) -> str:
        """The unit of the loss, for plots."""
        if self.terms > 1:
            return "sum of means per target"
        return "nats per token" if self.models_language else "mean per target"

    def __init__(self, config: Config, tokenizer: Tokenizer | None, settings: Settings, max_length: int) -> None:
        self.config = config
        self.settings = settings
        self.max_length = max_length
        self.truncated = 0
        """Number of texts that were cut to ``max_length``."""
        self.encoded = self.unknown = 0
        """Number of tokens of texts, without special ones, and of those among them that the tokenizer does not know.
        Only counted for tokenizers that have an unknown token."""
        self.noted: Counter[str] = Counter()
        """What else is to be known of the examples, such as windows without an answer, with their numbers."""
        limit = max_length if self.has_length and not self.packed else None
        self._tokenizer = None if tokenizer is None else tokenizer.truncating(limit)
        graph = config.graphs()[-1]
        tensors = [tensor for item in config.graphs() for tensor in item.input_tensors()]
        self._inputs = {tensor.name for tensor in tensors}
        self._pasts = {item.name: item for item in graph.pasts}
        self._masks = {tensor.name for tensor in tensors if tensor.is_mask}
        self._output = graph.output_tensors()[0].name

    @property
    def text_limit(self) -> int | None:
        """The number of tokens to which the trained model's texts are truncated; None if they are not."""
        return self.max_length if self.has_length and not self.packed and not self.divides else None

    @abstractmethod
    def encode(self, row: Row) -> Example:
        """Return the example of a row, without anything random. Raises :class:`ValueError` for an unusable row."""

    def examples(self, row: Row) -> Iterable[Example]:
        """Return all examples of a row; by default the one of :meth:`encode`."""
        return (self.encode(row),)

    def augment(self, example: Example, generator: np.random.Generator) -> Example:
        """Return an example with random changes that are made for training only; by default without any."""
        return example

    @abstractmethod
    def collate(self, examples: Sequence[Example], generators: Sequence[np.random.Generator]) -> Batch:
        """Return a batch on the CPU. Whatever is random in an example comes from its generator."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Run the model and return the loss of a batch."""

    def counts(self, batch: Batch) -> tuple[int, ...]:
        """Return the number of targets of each term of :meth:`loss`, from the batch alone.

        The weights of the targets of a step are computed from them before its first backward pass, so that the
        gradients of its parts can be added up.
        """
        raise NotImplementedError(f"{type(self).__name__} has {self.terms} terms, but no counts")

    def outputs(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Run the model on those tensors of a batch that are its inputs, and return its outputs by name.

        Arguments that ``forward`` requires beside them get what stands for nothing: a mask of ones, segments of zeros,
        an empty past.
        """
        inputs: dict[str, Any] = {name: tensor for name, tensor in batch.items() if name in self._inputs}
        for name in _required(model) - inputs.keys():
            like = next(iter(inputs.values()))
            if name in self._pasts:
                past = self._pasts[name]
                inputs[name] = (Cache if isinstance(past, KeyValues) else LayerStates).empty(past.num_layers)
            else:
                inputs[name] = torch.full_like(like, int(name in self._masks))
        return self.named(model(**inputs))

    def named(self, outputs: Any) -> Mapping[str, Tensor]:
        """Return by name what a model's ``forward`` returns."""
        return outputs if isinstance(outputs, Mapping) else {self._output: outputs}

    def text_batch(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """Return the fields ``input_ids`` and, if stored, ``token_type_ids`` of examples, padded on the right.

        The padding mask is included. Tensors that the model does not read are left out.
        """
        ids = [example["input_ids"] for example in examples]
        batch = {"input_ids": padded(ids, self.pad_id), "attention_mask": mask_of(ids)}
        if "token_type_ids" in examples[0]:
            batch["token_type_ids"] = padded([example["token_type_ids"] for example in examples], 0)
        return {name: tensor for name, tensor in batch.items() if name in self._inputs}

    def pair_fields(self, encoded: Encoding) -> dict[str, Ids]:
        """Return the fields of an encoded pair of texts for :meth:`text_batch`."""
        return {
            "input_ids": self.checked(encoded.ids, "text"),
            "token_type_ids": np.asarray(encoded.type_ids, np.int32),
        }

    def encode_text(self, row: Row, role: str = "text", pair: str | None = None, *, offsets: bool = True) -> Encoding:
        """Return the token ids of a text, or of two, with the tokenizer's special tokens.

        The role ``target`` is read by the tokenizer of target texts, if the model has one. They are truncated to
        ``max_length`` unless examples are packed. A single text is encoded several times faster without ``offsets``,
        the places of tokens in it.

        Raises :class:`ValueError` if the model has no tokenizer, or a column is empty or not a text.
        """
        names = (role, pair) if pair is not None else (role,)
        for name in names:
            if not isinstance(row[name], str):
                raise ValueError(f"{name} must be a text, got {type(row[name]).__name__}")
        texts = [row[name] for name in names]
        try:
            tokenizer = self.tokenizer.target if role == "target" else self.tokenizer
            encoded = tokenizer.encode(*texts, offsets=offsets)
        except ArtifactError as error:
            raise ValueError(error.what) from error
        present = set(encoded.sequence_ids)
        for number, name in enumerate(names):
            if number not in present:
                raise ValueError(f"{name} is empty")
        self.truncated += bool(encoded.overflowing)
        if tokenizer.unknown_id is not None:
            for piece in (encoded, *(encoded.overflowing if pair is None else ())):
                self.encoded += len(piece) - tokenizer.added(pair is not None)
                self.unknown += piece.ids.count(tokenizer.unknown_id)
        return encoded

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, which truncates to ``max_length``. Raises :class:`ValueError` if the model has none."""
        if self._tokenizer is None:
            raise ValueError("the model has no tokenizer, so texts cannot be read: give lists of token ids")
        return self._tokenizer

    def token_ids(self, row: Row, role: str = "text") -> Ids:
        """Return the token ids of a column that holds a text, or a list of ids.

        Raises :class:`ValueError` if it is empty or neither of them, or an id is outside of the vocabulary.
        """
        if not is_list(row[role]):
            return self.checked(self.encode_text(row, role, offsets=False).ids, role)
        ids = listed_ids(row, role)
        if not self.packed and len(ids) > self.max_length:
            self.truncated += 1
            ids = ids[: self.max_length]
        return self.checked(ids, role)

    def checked(self, ids: Sequence[int], role: str) -> Ids:
        """Return token ids as an array. Raises :class:`ValueError` if it is empty, or an id unknown."""
        fields = standard_fields(self.config)
        name, size = "vocab_size", fields.vocab_size
        if role == "target" and fields.target_vocab_size is not None:
            name, size = "target_vocab_size", fields.target_vocab_size
        if not len(ids):
            raise ValueError(f"{role} is empty")
        array = np.asarray(ids, np.int64)
        outside = [item for item in (array.min(), array.max()) if size is not None and not 0 <= item < size]
        if outside:
            raise ValueError(f"{role} has the token id {outside[0]}, outside of {name} {size}")
        return array.astype(np.int32)

    @property
    def end_id(self) -> int | None:
        """The token that ends a text, the first one if there are several; None if the model has none."""
        end = standard_fields(self.config).eos_token_id
        return end[0] if isinstance(end, tuple) else end

    @property
    def pad_id(self) -> int:
        """The token that fills the rows of a batch."""
        return standard_fields(self.config).pad_token_id or 0


def _required(model: nn.Module) -> set[str]:
    """Return the arguments of a model's ``forward`` without a default."""
    parameters = inspect.signature(getattr(model, "_orig_mod", model).forward).parameters.values()
    return {item.name for item in parameters if item.default is item.empty and item.kind != item.VAR_KEYWORD}


def is_list(value: Any) -> bool:
    """Return whether a value of a column is a list."""
    return isinstance(value, list | tuple | np.ndarray)


def listed_ids(row: Row, role: str) -> list[int]:
    """Return a column that holds a list of token ids. Raises :class:`ValueError` if other things are in it."""
    ids = [int(item) for item in row[role] if isinstance(item, int | np.integer) and not isinstance(item, bool)]
    if len(ids) != len(row[role]):
        raise ValueError(f"{role} must be a text or a list of token ids")
    return ids


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
