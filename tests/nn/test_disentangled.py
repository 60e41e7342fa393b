"""Disentangled attention against a computation pair by pair, and against transformers' module and rows of distances."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import DebertaV2Config
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention, make_log_bucket_position

from zoo.nn import DisentangledAttention, DistanceTable, PositionTerm, distance_rows
from zoo.nn.recording import recorded_attentions

HIDDEN, HEADS, LENGTH = 12, 3, 9
TERMS: list[tuple[PositionTerm, ...]] = [("c2p", "p2c"), ("c2p",), ("p2c",), ()]


def make(terms: tuple[PositionTerm, ...], *, shared: bool) -> tuple[DistanceTable, DisentangledAttention]:
    """Build float64 modules with random tensors, and distances that texts exceed."""
    torch.manual_seed(0)
    table = DistanceTable(HIDDEN, max_distance=6, num_buckets=4, norm_eps=1e-3)
    attention = DisentangledAttention(HIDDEN, HEADS, terms=terms, shared=shared)
    for module in (table, attention):
        for parameter in module.double().requires_grad_(False).parameters():
            nn.init.normal_(parameter, std=0.5)
    return table, attention


def texts() -> tuple[Tensor, Tensor]:
    """Draw two texts, (2, T, E), and the keys that each query sees, (2, 1, 1, T)."""
    x = torch.randn(2, LENGTH, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x, torch.arange(LENGTH).lt(torch.tensor([[LENGTH], [5]]))[:, None, None]


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("terms", TERMS)
def test_weights_are_those_of_the_equation(terms: tuple[PositionTerm, ...], sharing: bool) -> None:
    """Each score is the sum of the terms of one pair of tokens, over sqrt(n D)."""
    table, attention = make(terms, shared=sharing)
    x, mask = texts()
    embeddings, rows = table(LENGTH)
    _, found = attention.with_weights(x, mask=mask, distances=(embeddings, rows) if terms else None)
    size = HIDDEN // HEADS
    query, key = (part(x).unflatten(-1, (HEADS, size)) for part in (attention.query, attention.key))
    to_key = attention.position_key or attention.key
    to_query = attention.position_query or attention.query
    by_distance = distance_rows(6, 4)
    for text, head, i, j in ((0, 0, 0, 0), (0, 1, 8, 1), (0, 2, 1, 8), (1, 0, 3, 4), (1, 2, 4, 0)):
        scores = []
        for other in range(LENGTH if text == 0 else 5):
            row = by_distance[min(max(i - other, -6), 6) + 6]
            far = embeddings[row]
            score = query[text, i, head] @ key[text, other, head]
            if "c2p" in terms:
                score = score + query[text, i, head] @ to_key(far).unflatten(-1, (HEADS, size))[head]
            if "p2c" in terms:
                score = score + key[text, other, head] @ to_query(far).unflatten(-1, (HEADS, size))[head]
            scores.append(score / math.sqrt(size * (1 + len(terms))))
        wanted = torch.stack(scores).softmax(0)[j]
        assert_close(found[text, head, i, j], wanted, rtol=1e-6, atol=0)  # the root is rounded to float32
    assert not found[1, :, :, 5:].any()


@pytest.mark.parametrize("buckets", [-1, 8])
@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("terms", TERMS[:3])
def test_heads_equal_those_of_transformers(terms: tuple[PositionTerm, ...], sharing: bool, buckets: int) -> None:
    """Both compute with the same weights in float64, without padding."""
    torch.manual_seed(0)
    config = DebertaV2Config(
        hidden_size=HIDDEN, num_attention_heads=HEADS, relative_attention=True, pos_att_type=list(terms),
        share_att_key=sharing, max_relative_positions=7, position_buckets=buckets,
    )  # fmt: skip
    theirs = DisentangledSelfAttention(config).double().eval().requires_grad_(False)
    table = DistanceTable(HIDDEN, max_distance=7, num_buckets=max(buckets, 0)).double().requires_grad_(False)
    ours = DisentangledAttention(HIDDEN, HEADS, terms=terms, shared=sharing).double().requires_grad_(False)
    names = {"query": "query_proj", "key": "key_proj", "value": "value_proj", "position_key": "pos_key_proj",
             "position_query": "pos_query_proj"}  # fmt: skip
    for name, part in ours.named_children():
        if name != "output":
            part.load_state_dict(getattr(theirs, names[name]).state_dict())
    ours.output.load_state_dict({"weight": torch.eye(HIDDEN), "bias": torch.zeros(HIDDEN)})
    x, _ = texts()
    wanted, _ = theirs(x, torch.ones(2, 1, LENGTH, LENGTH), rel_embeddings=table.table.weight)
    embeddings, rows = table(LENGTH)
    assert_close(ours(x, distances=(embeddings, rows)), wanted, rtol=0, atol=1e-13)
    with recorded_attentions():
        assert_close(ours(x, distances=(embeddings, rows)), wanted, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("buckets", "farthest"), [(256, 512), (4, 5), (4, 20), (8, 33), (16, 64), (64, 512), (128, 512), (256, 1024)]
)
def test_rows_are_those_of_transformers(buckets: int, farthest: int) -> None:
    """transformers computes float32 logarithms, and clamps what lies beyond the table."""
    distances = torch.arange(-farthest, farthest + 1)
    wanted = make_log_bucket_position(distances, buckets, farthest).long() + buckets
    assert distance_rows(farthest, buckets) == wanted.clamp(0, 2 * buckets - 1).tolist()
    beyond = make_log_bucket_position(torch.tensor([-9 * farthest, 9 * farthest]), buckets, farthest) + buckets
    assert beyond.clamp(0, 2 * buckets - 1).tolist() == [0, 2 * buckets - 1]


def test_rows_without_buckets() -> None:
    """delta(i, j) of equation 3: 0 from -k on, 2 k - 1 up to k, and i - j + k between."""
    assert distance_rows(3) == [0, 1, 2, 3, 4, 5, 5]


@pytest.mark.parametrize(("farthest", "buckets"), [(20, 7), (20, 2), (5, 8)])
def test_buckets_that_do_not_fit_are_rejected(farthest: int, buckets: int) -> None:
    with pytest.raises(ValueError, match=f"{buckets} distance buckets do not fit a maximum distance of {farthest}"):
        distance_rows(farthest, buckets)


def test_heads_of_uneven_size_are_rejected() -> None:
    with pytest.raises(ValueError, match="hidden_size 12 is not divisible by num_heads 5"):
        DisentangledAttention(12, 5)
