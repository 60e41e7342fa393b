"""Small models, a tokenizer, and comparisons of losses and gradients with those of other libraries."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import PreTrainedModel

import zoo
from tests.architectures.test_bert import make, transformers_twin
from zoo.config import Settings
from zoo.tokenizers.files.load import bert_tokenizer
from zoo.training.criterion import Batch, Criterion, Loss
from zoo.training.data.examples import Example
from zoo.training.data.order import generator
from zoo.training.loop import Trainer
from zoo.training.settings import TrainingSettings

CLS, SEP, MASK = 2, 3, 4
_PIECES = (
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *string.ascii_lowercase, *(f"##{c}" for c in string.ascii_lowercase),
)  # fmt: skip
LENGTH = 24
SMALL = {"vocab_size": len(_PIECES), "max_seq_len": LENGTH, "mask_token_id": MASK, "pad_token_id": 0}


def tokenizer() -> Tokenizer:
    """Return BERT's tokenizer with a vocabulary of letters, so that a word has as many tokens as letters."""
    vocabulary = {piece: number for number, piece in enumerate(_PIECES)}
    found = bert_tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"), lowercase=True)
    found.add_special_tokens(list(_PIECES[:5]))
    return found


def small_bert(task: str, **options: Any) -> nn.Module:
    """Return a small BERT in float64 and evaluation mode, without dropout, whose parameters are trained."""
    return make(**{**SMALL, "task": task, "dropout": 0.0, "type_vocab_size": 2, **options}).requires_grad_(True)


def with_twin(task: str, kind: type[PreTrainedModel], **options: Any) -> tuple[nn.Module, PreTrainedModel]:
    """Return a small BERT, and the same model of transformers."""
    ours = small_bert(task, **options)
    return ours, transformers_twin(ours, kind).requires_grad_(True)


def criterion_of(kind: type[Criterion], model: nn.Module, settings: Settings | None = None, **changes: Any) -> Any:
    """Return an objective for a model, with the tokenizer of :func:`tokenizer`."""
    arguments = {"tokenizer": tokenizer(), "max_length": LENGTH, **changes}
    backend = arguments["tokenizer"]
    tokens = None if backend is None else zoo.Tokenizer(backend)
    return kind(model.config, tokens, settings or Settings(), arguments["max_length"])


def batch_of(criterion: Criterion, rows: Sequence[Mapping[str, Any]], seed: int = 0) -> Batch:
    """Return the batch of rows."""
    examples = [criterion.encode(row) for row in rows]
    return criterion.collate(examples, [generator(seed, number) for number in range(len(examples))])


def mean_of(loss: Loss) -> Tensor:
    """Return the loss of a batch as a mean, or as the sum of the means of its terms."""
    return torch.stack([term.total / term.count for term in (loss, *loss.further)]).sum()


def assert_equal_losses(
    ours: nn.Module, found: Tensor, theirs: nn.Module, wanted: Tensor, names: Mapping[str, str], rtol: float = 1e-9
) -> None:
    """Compare two losses and their gradients with respect to parameters, by our name and theirs."""
    assert_close(found, wanted.to(found.dtype), rtol=rtol, atol=0)
    found.backward()
    wanted.backward()
    for our_name, their_name in names.items():
        gradient = ours.get_parameter(our_name).grad
        assert gradient.abs().max() > 1e-8
        limit = rtol * float(gradient.abs().max())
        assert_close(gradient, theirs.get_parameter(their_name).grad, rtol=rtol, atol=limit)


ENCODER = {
    "embeddings.token.weight": "bert.embeddings.word_embeddings.weight",
    "blocks.0.attention.query.weight": "bert.encoder.layer.0.attention.self.query.weight",
    "blocks.1.mlp.down.bias": "bert.encoder.layer.1.output.dense.bias",
}
"""Some parameters of the encoder, by our names and those of transformers."""


class Listed:
    """Examples in memory."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Example:
        return self._examples[index]

    @property
    def lengths(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.array([max(map(len, example.values())) for example in self._examples])


def trainer_of(model: nn.Module, criterion: Criterion, rows: Sequence[Mapping[str, Any]], **settings: Any) -> Trainer:
    """Return a trainer with plain gradient descent."""
    chosen = {"batch_size": 7, "max_steps": 3, "optimizer": "sgd", "learning_rate": 1e-2, **settings}
    examples = Listed([example for row in rows for example in criterion.examples(row)])
    return Trainer(model, criterion, examples, TrainingSettings(**chosen), validation=examples)
