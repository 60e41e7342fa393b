"""Recurrent classifiers against packed sequences in torch, and invariance to padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence
from torch.testing import assert_close

from zoo import UsageError
from zoo.models.count import parameter_count
from zoo.registry import registry
from zoo_plugins.rnn.config import RNNConfig
from zoo_plugins.rnn.model import RNN

SIZES = {"vocab_size": 30, "embedding_size": 6, "hidden_size": 7, "num_classes": 3}
TAGGER = {"task": "token-classification"}
VARIANTS: list[dict[str, Any]] = [
    {"cell": "lstm"},
    {"cell": "gru", "num_layers": 2},
    {"cell": "lstm", "bidirectional": False, "num_layers": 3},
    {"cell": "gru", "bidirectional": False},
]


def make(**options: Any) -> RNN:
    """Build a small float64 model in evaluation mode with random weights."""
    model = RNN(RNNConfig(**{**SIZES, **options})).double().eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return model.requires_grad_(False)


def packed(model: RNN, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Compute the logits of right-padded tokens and of texts with torch's layers on packed sequences."""
    c, weights = model.config, model.state_dict()
    layer = {"gru": nn.GRU, "lstm": nn.LSTM}[c.cell](
        c.embedding_size, c.hidden_size, c.num_layers, bidirectional=c.bidirectional
    ).double()
    layer.load_state_dict({name[7:]: value for name, value in weights.items() if name.startswith("layers.")})
    embedded = [weights["token_embedding.weight"][row] for row in rows]
    steps, last = layer(pack_sequence(embedded, enforce_sorted=False))
    states = last[0] if isinstance(last, tuple) else last
    ends = torch.cat((states[-2], states[-1]), 1) if c.bidirectional else states[-1]
    padded, _ = pad_packed_sequence(steps, batch_first=True)
    weight, bias = weights["classifier.weight"], weights["classifier.bias"]
    return (padded @ weight.T + bias).detach(), (ends @ weight.T + bias).detach()


def batch(rows: list[list[int]], extra: int, filler: int, left: bool) -> tuple[Tensor, Tensor]:
    length = max(map(len, rows)) + extra
    ids = torch.full((len(rows), length), filler)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        place = slice(length - len(row), None) if left else slice(len(row))
        ids[number, place], mask[number, place] = torch.tensor(row), 1
    return ids, mask


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@settings(max_examples=15, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 29), min_size=1, max_size=8), min_size=1, max_size=4),
    extra=st.integers(0, 3),
    filler=st.integers(0, 29),
    left=st.booleans(),
)
def test_outputs_equal_packed_sequences(
    variant: dict[str, Any], rows: list[list[int]], extra: int, filler: int, left: bool
) -> None:
    """With padding on either side."""
    ids, mask = batch(rows, extra, filler, left)
    text, tagger = make(**variant), make(**variant, **TAGGER)
    of_tokens, of_texts = packed(text, rows)
    assert_close(text(ids, mask), of_texts)
    found = tagger(ids, mask)
    for number, row in enumerate(rows):
        assert_close(found[number, mask[number].bool()], of_tokens[number, : len(row)])


def test_single_direction_is_causal() -> None:
    ids = torch.randint(30, (2, 7), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[:, 4] = (ids[:, 4] + 1) % 30
    one, both = make(**TAGGER, bidirectional=False), make(**TAGGER)
    assert (one(ids) != one(changed)).any(-1).any(0).tolist() == [False] * 4 + [True] * 3
    assert (both(ids) != both(changed)).any(-1).any(0).all()


def test_empty_text_is_finite() -> None:
    model = make()
    logits = model(torch.ones(2, 4, dtype=torch.long), torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0]]))
    assert_close(logits[1], model.classifier.bias.detach())


def test_published_parameters() -> None:
    """130,000 vectors of 50, four gates of 300 in each direction, with torch's two biases, and nine classes."""
    gates = 4 * (50 * 300 + 300 * 300 + 2 * 300)
    assert parameter_count(registry().resolve("bilstm-tagger")) == 130_000 * 50 + 2 * gates + 9 * 601 == 7_350_209


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("hidden_size=0", "hidden_size must be positive, got 0"),
        ("cell=gur", "'gru'"),
        ("dropout=1.0", "got 1.0"),
        ('labels=["a"]', "1 labels for num_classes 2"),
        ("pad_token_id=-1", "pad_token_id -1 lies outside vocab_size 260"),
    ],
)
def test_invalid_values_are_named(setting: str, message: str) -> None:
    with pytest.raises(UsageError) as failed:
        registry().resolve("rnn-tiny", [setting])
    assert message in str(failed.value)
