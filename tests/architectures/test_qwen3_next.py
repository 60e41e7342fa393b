"""Qwen3-Next: parts of a text, padding, states, settings and published sizes. Its layers have tests of their own."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from tests.architectures.equations import random_ids, randomized
from zoo.nn import Cache, LayerStates
from zoo.registry import registry
from zoo_plugins.qwen3_next.config import Qwen3NextConfig
from zoo_plugins.qwen3_next.model import Qwen3Next

SIZES: dict[str, Any] = {
    "vocab_size": 23, "hidden_size": 12, "num_layers": 5, "linear_layers": (True, False), "max_seq_len": 40,
    "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "rotary_dim": 4, "linear_num_heads": 4, "linear_head_dim": 3,
    "linear_num_key_heads": 2, "linear_key_head_dim": 5, "kernel_size": 3, "intermediate_size": 17,
}  # fmt: skip
VARIANTS: list[dict[str, Any]] = [
    {},
    {"attention_bias": True, "tie_embeddings": True, "linear_layers": (False, True, True), "activation": "gelu"},
]


def make(**options: Any) -> Qwen3Next:
    torch.manual_seed(0)
    return randomized(Qwen3Next(Qwen3NextConfig(**{**SIZES, **options})), scale=0.3)


def pasts(model: Qwen3Next) -> tuple[Cache, list[LayerStates]]:
    return Cache.empty(model.config.num_full), LayerStates.empty(model.config.num_linear)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("cuts", [(1,), (5,), (3, 4, 33), tuple(range(1, 37))], ids=str)
def test_calls_on_parts_equal_one_call(options: dict[str, Any], cuts: tuple[int, ...]) -> None:
    model, tokens = make(**options), random_ids(2, 37)
    cache, states = pasts(model)
    parts = [model(tokens[:, start:stop], None, cache, states) for start, stop in pairwise((0, *cuts, 37))]
    assert_close(torch.cat(parts, 1), model(tokens))
    assert cache.length == 37
    assert [tuple(value.shape) for value in states[-1].values()] == [(2, 32, 2), (2, 4, 5, 3)]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_padding_on_the_left_changes_nothing(options: dict[str, Any]) -> None:
    model, tokens = make(**options), random_ids(1, 20)
    mask = torch.ones(1, 29, dtype=torch.long)
    mask[:, :9] = 0
    padded = torch.cat((random_ids(1, 9), tokens), 1)
    cache, states = pasts(model)
    parts = [model(padded[:, :15], mask[:, :15], cache, states), model(padded[:, 15:], mask, cache, states)]
    other, alone = pasts(model)
    assert_close(torch.cat(parts, 1)[:, 9:], model(tokens, None, other, alone))
    for ours, theirs in zip(states, alone, strict=True):
        assert_close(dict(ours), dict(theirs))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"linear_layers": (True,)}, r"linear_layers must have both True and False within the layers, got \(True,\)"),
        ({"linear_layers": ()}, "linear_layers must have both True and False"),
        ({"linear_layers": (True, False), "num_layers": 1}, "for num_layers 1"),
        ({"rotary_dim": 3}, "rotary_dim must be even and at most head_dim 6, got 3"),
        ({"rotary_dim": 8}, "rotary_dim must be even and at most head_dim 6, got 8"),
        ({"linear_num_heads": 3}, "linear_num_heads"),
        ({"num_kv_heads": 3}, "num_heads"),
        ({"kernel_size": 1}, "kernel_size must be 2 or more, got 1"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim must be positive"),
    ],
)
def test_impossible_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Qwen3NextConfig(**{**SIZES, **options})


@pytest.mark.parametrize("name", ["qwen3.5-0.8b", "qwen3.5-9b", "qwen3.5-27b"])
def test_published_sizes_have_as_many_parameters_as_the_original(name: str) -> None:
    c = registry().resolve(name).config
    hub = Qwen3_5TextConfig(
        hidden_size=c.hidden_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        linear_num_value_heads=c.linear_num_heads,
        intermediate_size=c.intermediate_size,
        tie_word_embeddings=c.tie_embeddings,
    )
    with torch.device("meta"):
        theirs = Qwen3_5ForCausalLM(hub)
    theirs.tie_weights()
    assert c.cost().parameters == sum(value.numel() for value in theirs.parameters())
