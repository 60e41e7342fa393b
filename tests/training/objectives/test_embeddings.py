"""Losses of sentence embeddings against the formulas of sentence-transformers and of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.training.objectives.common import batch_of, criterion_of, small_bert, trainer_of
from zoo.errors import UsageError
from zoo.training.objectives.embeddings import SentenceEmbedding
from zoo.training.options import SentenceEmbeddingOptions as Options

ROWS = [
    {"text": "a cat", "pair": "one cat sat", "negative": "rain", "label": 0.9},
    {"text": "the rain", "pair": "it is wet", "negative": "a dry day", "label": 0.5},
    {"text": "good day", "pair": "hello", "negative": "bye", "label": -0.25},
]


def vectors(model: nn.Module, criterion: SentenceEmbedding, column: str) -> Tensor:
    """Return what the model makes of the texts of a column, one at a time."""
    found = []
    for row in ROWS:
        outputs = model(torch.tensor([criterion.token_ids(row, column).tolist()]))
        # of an encoder: the mean over the tokens
        found.append(outputs.get("sentence_embedding", outputs["last_hidden_state"].mean(1)))
    return torch.cat(found)


def reference(options: Options, text: Tensor, pair: Tensor, negative: Tensor | None) -> Tensor:
    match options.loss:
        case "in-batch-negatives":
            candidates = pair if negative is None else torch.cat([pair, negative])
            scores = options.scale * F.cosine_similarity(text[:, None], candidates[None], dim=-1)
            return F.cross_entropy(scores, torch.arange(len(text)))
        case "cosine-similarity":
            wanted = torch.tensor([row["label"] for row in ROWS], dtype=text.dtype)
            return F.mse_loss(F.cosine_similarity(text, pair), wanted)
        case "triplet":
            text, pair, negative = (F.normalize(item) for item in (text, pair, negative))
            return F.triplet_margin_with_distance_loss(
                text, pair, negative, distance_function=lambda a, b: (a - b).square().sum(-1), margin=options.margin
            )


@pytest.mark.parametrize("task", ["sentence-embedding", "feature-extraction"])
@pytest.mark.parametrize("negatives", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        Options(),
        Options(scale=7.0),
        Options(loss="cosine-similarity"),
        Options(loss="triplet"),
        Options(loss="triplet", margin=1.5),
    ],
    ids=lambda item: item.loss,
)
def test_loss_is_the_formula(task: str, negatives: bool, options: Options) -> None:
    if options.loss == "triplet" and not negatives:
        return
    pooling = {"pooling": "cls", "normalize": False} if task == "sentence-embedding" else {}
    ours, other = (small_bert(task, **pooling) for _ in range(2))
    criterion = criterion_of(SentenceEmbedding, ours, options)
    rows = [row if negatives else {name: value for name, value in row.items() if name != "negative"} for row in ROWS]
    loss = criterion.loss(ours, batch_of(criterion, rows))
    assert loss.count == len(ROWS)
    columns = [vectors(other, criterion, name) for name in ("text", "pair", "negative")]
    wanted = reference(options, columns[0], columns[1], columns[2] if negatives else None)
    torch.testing.assert_close(loss.total / loss.count, wanted, rtol=1e-6, atol=1e-9)  # labels are float32
    (loss.total / loss.count).backward()
    wanted.backward()
    for (name, one), (_, two) in zip(ours.named_parameters(), other.named_parameters(), strict=True):
        if not name.startswith("pooler."):
            torch.testing.assert_close(one.grad, two.grad, rtol=1e-5, atol=1e-8)


def test_in_batch_negatives_need_whole_steps() -> None:
    """Other losses are those of single rows, so that a step may be divided."""
    model = small_bert("sentence-embedding")
    with pytest.raises(UsageError, match="so a step cannot be divided: micro_batch_size 2 of batch_size 3"):
        trainer_of(model, criterion_of(SentenceEmbedding, model, Options()), ROWS, batch_size=3, micro_batch_size=2)
    for loss in ("cosine-similarity", "triplet"):
        results = []
        for size in (None, 2):
            model = small_bert("sentence-embedding")
            criterion = criterion_of(SentenceEmbedding, model, Options(loss=loss))
            trainer = trainer_of(model, criterion, ROWS * 4, batch_size=5, micro_batch_size=size)
            list(trainer.run())
            results.append(model.state_dict())
        for name, values in results[0].items():
            torch.testing.assert_close(results[1][name], values, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("loss", "row", "message"),
    [
        ("triplet", {"text": "a", "pair": "b"}, "has no 'negative', which the loss 'triplet' needs"),
        ("cosine-similarity", {"text": "a", "pair": "b"}, "has no 'label'"),
        ("cosine-similarity", {"text": "a", "pair": "b", "label": 5}, "label must be a number from -1 to 1, got 5"),
        ("cosine-similarity", {"text": "a", "pair": "b", "label": "nan"}, "a number from -1 to 1"),
        ("cosine-similarity", {"text": "a", "pair": "b", "label": [1]}, "a number from -1 to 1"),
        ("in-batch-negatives", {"text": "a", "pair": ""}, "pair is empty"),
        ("in-batch-negatives", {"text": "a", "pair": 3}, "pair must be a text, got int"),
    ],
)
def test_bad_rows(loss: Any, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        criterion_of(SentenceEmbedding, small_bert("sentence-embedding"), Options(loss=loss)).encode(row)
