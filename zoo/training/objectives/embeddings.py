"""Sentence embeddings: texts of like meaning have similar vectors (Reimers and Gurevych 2019, section 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.arrays import Array
from zoo.nn.pooling import normalize, pool
from zoo.training.criterion import Batch, Criterion, Loss, Row, wide
from zoo.training.data.examples import Example
from zoo.training.options import SentenceEmbeddingOptions

__all__ = ["SentenceEmbedding"]


class SentenceEmbedding(Criterion):
    """One of three losses of unit vectors. The columns are ``text``, ``pair`` and the one that the loss needs.

    - ``in-batch-negatives``: the cross-entropy of each text's pair among the pairs of the batch, and among those in
      ``negative`` if that column is given; logits are ``scale`` times the cosine similarities (van den Oord et al.
      2018, equation 4; ``MultipleNegativesRankingLoss`` of sentence-transformers). It depends on the whole batch, so
      ``micro_batch_size`` must not differ from ``batch_size``. In evaluations it depends on the size of batches, too.
    - ``cosine-similarity``: the squared difference between the cosine similarity and ``label``, in [-1, 1].
    - ``triplet``: max(0, d(text, pair) - d(text, negative) + ``margin``) with the squared distance d (Schroff et al.
      2015, equation 3).

    A model for the task ``sentence-embedding`` pools as it is configured; hidden states of other encoders are averaged
    over the tokens, as by ``zoo run --task sentence-embedding``.
    """

    settings: SentenceEmbeddingOptions

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.divisible = self.settings.loss != "in-batch-negatives"

    def encode(self, row: Row) -> Example:
        needed = {"cosine-similarity": "label", "triplet": "negative"}.get(self.settings.loss)
        if needed is not None and needed not in row:
            raise ValueError(f"has no {needed!r}, which the loss {self.settings.loss!r} needs")
        example = {"text": self.token_ids(row), "pair": self.token_ids(row, "pair")}
        if "negative" in row and self.settings.loss != "cosine-similarity":
            example["negative"] = self.token_ids(row, "negative")
        if self.settings.loss != "cosine-similarity":
            return example
        return {**example, "similarity": _similarity(row["label"])}

    def collate(self, examples: Sequence[Example], generators: Sequence[np.random.Generator]) -> Batch:
        """Return all texts of the batch, then all pairs, then all negatives, as rows of one input."""
        columns = [name for name in ("text", "pair", "negative") if name in examples[0]]
        texts = [{"input_ids": example[name]} for name in columns for example in examples]
        batch = {**self.text_batch(texts), "columns": torch.tensor(len(columns))}
        if "similarity" in examples[0]:
            batch["similarity"] = torch.tensor([float(example["similarity"][0]) for example in examples])
        return batch

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        vectors = self.embed(self.outputs(model, batch), batch)
        text, pair, *negative = vectors.chunk(int(batch["columns"]))  # (B, E) each
        match self.settings.loss:
            case "in-batch-negatives":
                logits = self.settings.scale * text @ torch.cat((pair, *negative)).T  # (B, B) or (B, 2 B)
                targets = torch.arange(len(text), device=text.device)
                right = logits.detach().argmax(1).eq(targets)
                return Loss(F.cross_entropy(logits, targets, reduction="sum"), len(text), int(right.sum()))
            case "cosine-similarity":
                similarity = batch["similarity"].to(text.dtype)
                return Loss(F.mse_loss((text * pair).sum(1), similarity, reduction="sum"), len(text))
            case "triplet":
                near, far = ((text - other).square().sum(1) for other in (pair, negative[0]))
                losses = (near - far + self.settings.margin).relu()
                return Loss(losses.sum(), len(text), int(near.lt(far).sum()))

    def embed(self, outputs: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Return unit vectors (rows, E), from the outputs of a model."""
        vectors = outputs.get("sentence_embedding")
        if vectors is None:
            vectors = pool(outputs["last_hidden_state"], batch.get("attention_mask"), "mean")
        return normalize(wide(vectors))


def _similarity(label: Any) -> Array:
    """Return a label as an array (1,). Raises :class:`ValueError` unless it is a number from -1 to 1."""
    try:
        number = float(label)
    except (TypeError, ValueError):
        number = float("nan")
    if not -1 <= number <= 1:
        raise ValueError(f"label must be a number from -1 to 1, got {label!r}")
    return np.array([number], np.float32)
