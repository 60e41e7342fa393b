"""The printed tensors of a public attention lecture, from zoo.nn's own attention."""

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from zoo.nn import MultiHeadAttention, attention_weights, build_mask, scaled_dot_product_attention

GOLDENS = json.loads((Path(__file__).parent.parent / "goldens" / "attention_lecture.json").read_text("utf-8"))
EXPECTED = {case["name"]: torch.tensor(case["expected"], dtype=torch.float32) for case in GOLDENS["cases"]}
KEEP = torch.tensor(next(case["keep"] for case in GOLDENS["cases"] if case["name"] == "dropout mask"))
INPUTS = torch.tensor(GOLDENS["inputs"])[None]  # (1, 6, 3)


def plain() -> tuple[Tensor, Tensor]:
    """Multiply the query by the sqrt(D) that attention divides by, so that scores are unscaled."""
    return INPUTS[None] * math.sqrt(3), INPUTS[None]


def scores(query: Tensor, key: Tensor) -> Tensor:
    """Recover Q K^T / sqrt(D) from the weights: an extra zero key scores 0, so log(w / w_0) is the score."""
    weights = attention_weights(query, torch.cat((key, torch.zeros_like(key[:, :, :1])), dim=2))
    return (weights[..., :-1] / weights[..., -1:]).log()


def single_head(query: nn.Module, key: nn.Module, value: nn.Module) -> MultiHeadAttention:
    """Build one head of width 2 with the given projections and W^O = I."""
    layer = MultiHeadAttention(3, 1, head_dim=2, bias=False, dropout=0.5).eval()
    layer.query, layer.key, layer.value, layer.output = query, key, value, nn.Identity()
    return layer.requires_grad_(False)


@cache
def from_rand() -> MultiHeadAttention:
    """Draw the lecture's W_q, W_k, W_v with torch.rand. It applies them from the right: nn.Linear holds transposes."""
    projections = [nn.Linear(3, 2, bias=False) for _ in range(3)]
    torch.manual_seed(123)
    for projection in projections:
        projection.weight.data = torch.rand(3, 2).T
    return single_head(*projections)


@cache
def from_linear() -> MultiHeadAttention:
    """Create the lecture's nn.Linear layers, in the same order."""
    torch.manual_seed(789)
    return single_head(*(nn.Linear(3, 2, bias=False) for _ in range(3)))


class InjectedDraw(TorchDispatchMode):
    """Replaces torch's Bernoulli draw by the lecture's keep mask; torch still does the dropping and scaling."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bernoulli_.float:
            return args[0].copy_(KEEP)
        return func(*args, **(kwargs or {}))


def dropped_weights() -> Tensor:
    """Compute the causal weights after dropout, as attention over identity values."""
    layer = from_linear().train()
    try:
        with InjectedDraw():
            memory = (layer.keys_values(INPUTS)[0], torch.eye(6)[None, None])
            return layer.with_weights(INPUTS, memory=memory, mask=build_mask(6, 6, causal=True))[0]
    finally:
        layer.eval()


def query_2() -> tuple[Tensor, Tensor]:
    """Return the lecture's query of the second token, (1, 1, 1, 2), and all keys, (1, 1, 6, 2)."""
    layer = from_rand()
    return layer.query(INPUTS)[None, :, 1:2], layer.keys_values(INPUTS)[0]


CASES: dict[str, Callable[[], Tensor]] = {
    "plain scores": lambda: scores(*plain()),
    "plain weights": lambda: attention_weights(*plain()),
    "plain context": lambda: scaled_dot_product_attention(*plain(), INPUTS[None]),
    "query 2": lambda: query_2()[0],
    "scores 2": lambda: scores(*query_2()) * math.sqrt(2),
    "weights 2": lambda: from_rand().with_weights(INPUTS)[1][:, :, 1],
    "context 2": lambda: from_rand()(INPUTS)[:, 1],
    "single head, Linear": lambda: from_linear()(INPUTS),
    "single head, Linear, weights": lambda: from_linear().with_weights(INPUTS)[1],
    "causal weights": lambda: from_linear().with_weights(INPUTS, mask=build_mask(6, 6, causal=True))[1],
    "dropout mask": dropped_weights,
}


def test_every_lecture_case_is_covered() -> None:
    """Every printed tensor is covered exactly once."""
    assert CASES.keys() == EXPECTED.keys()
    assert len(GOLDENS["cases"]) == len(EXPECTED)


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    """Equal to the four printed digits."""
    expected = EXPECTED[name]
    assert_close(CASES[name]().reshape(expected.shape), expected, atol=5.1e-5, rtol=0)


def test_fused_attention_drops_the_same_weights() -> None:
    """The printed dropout case again, through the fused function."""
    layer = from_linear()
    query, key = layer.query(INPUTS)[None], layer.keys_values(INPUTS)[0]
    mask = build_mask(6, 6, causal=True)
    with InjectedDraw():
        dropped = scaled_dot_product_attention(query, key, torch.eye(6)[None, None], mask=mask, dropout=0.5)
    assert_close(dropped[0, 0], EXPECTED["dropout mask"], atol=5.1e-5, rtol=0)
