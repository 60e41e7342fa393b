"""DeepSeek against its equations token by token in numpy, parts of a text, padding and settings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from tests.architectures.equations import (
    check_padding,
    check_parts,
    random_ids,
    randomized,
    rms,
    rms_decoder,
    silu,
    softmax,
)
from zoo import KeyValues
from zoo.nn import GatedFeedForward
from zoo.registry import registry
from zoo_plugins.deepseek.config import DeepseekConfig
from zoo_plugins.deepseek.model import Deepseek, DeepseekExperts

SIZES: dict[str, Any] = {
    "vocab_size": 23, "hidden_size": 12, "num_layers": 3, "max_seq_len": 40, "num_heads": 2, "latent_size": 8,
    "head_dim": 6, "rotary_dim": 4, "value_head_dim": 5, "intermediate_size": 10, "num_experts": 8,
    "experts_per_token": 3, "expert_intermediate_size": 7, "num_shared_experts": 2, "rope_theta": 50.0,
}  # fmt: skip
VARIANTS: list[dict[str, Any]] = [
    {},
    {"query_latent_size": 9, "num_groups": 4, "groups_per_token": 2, "routing_factor": 2.5, "dense_layers": 0},
    {
        "router_scores": "sigmoid", "num_groups": 2, "normalize_routing": True, "routing_factor": 1.7,
        "rope_interleaved": False, "tie_embeddings": True, "num_shared_experts": 1,
    },
    {
        "router_scores": "sigmoid", "num_groups": 4, "groups_per_token": 3, "experts_per_token": 2, "dense_layers": 2,
        "attention_bias": True, "mlp_bias": True, "query_latent_size": 5, "norm_eps": 1e-2,
        "rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_length": 10, "rope_mscale": 0.7,
        "rope_mscale_all_dim": 0.4,
    },
]  # fmt: skip


def make(**options: Any) -> Deepseek:
    """Build a random model, with corrections that change the choice of experts."""
    torch.manual_seed(0)
    model = randomized(Deepseek(DeepseekConfig(**{**SIZES, **options})))
    for name, buffer in model.named_buffers():
        assert name.endswith("router.correction")
        torch.nn.init.normal_(buffer, std=0.3)
    return model


def dense(w: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def turn(part: np.ndarray, position: int, model: Deepseek) -> np.ndarray:
    """Turn pairs of elements, neighbours or not, by the angles of a position."""
    c, half = model.config, len(part) // 2
    first, second = (part[::2], part[1::2]) if c.rope_interleaved else (part[:half], part[half:])
    turned = (first + 1j * second) * np.exp(1j * position * np.array(model.positions.frequencies))
    return np.concatenate((turned.real, turned.imag)) * c.rope_attention_factor


def attend(w: dict[str, np.ndarray], x: np.ndarray, model: Deepseek) -> np.ndarray:
    """Attention of each token to itself and those before it, one head after another."""
    c = model.config
    queries = x
    if c.query_latent_size is not None:
        queries = rms(dense(w, "attention.query_down", x), 1e-6) * w["attention.query_norm.weight"]
    queries = dense(w, "attention.query", queries).reshape(len(x), c.num_heads, -1)
    latent, shared = np.split(dense(w, "attention.down", x), [c.latent_size], axis=1)
    latent = rms(latent, 1e-6) * w["attention.norm.weight"]
    expanded = dense(w, "attention.up", latent).reshape(len(x), c.num_heads, -1)
    scale = 1 / np.sqrt(c.head_dim + c.rotary_dim)
    if c.rope_scaling == "yarn":
        scale *= (0.1 * c.rope_mscale_all_dim * np.log(c.rope_factor) + 1) ** 2
    out = np.zeros((len(x), c.num_heads, c.value_head_dim))
    for t in range(len(x)):
        for head in range(c.num_heads):
            plain, turned = np.split(queries[t, head], [c.head_dim])
            query = np.concatenate((plain, turn(turned, t, model)))
            keys = [np.concatenate((expanded[s, head, : c.head_dim], turn(shared[s], s, model))) for s in range(t + 1)]
            out[t, head] = softmax(np.stack(keys) @ query * scale) @ expanded[: t + 1, head, c.head_dim :]
    return dense(w, "attention.output", out.reshape(len(x), -1))


def feed_forward(w: dict[str, np.ndarray], token: np.ndarray, c: DeepseekConfig) -> np.ndarray:
    """The sum over a token's experts and the shared ones, or the feed-forward network of a layer without any."""

    def gated(name: str) -> np.ndarray:
        return dense(w, f"{name}.down", silu(dense(w, f"{name}.gate", token)) * dense(w, f"{name}.up", token))

    if "mlp.router.scores.weight" not in w:
        return gated("mlp")
    logits = dense(w, "mlp.router.scores", token)
    scores = softmax(logits) if c.router_scores == "softmax" else 1 / (1 + np.exp(-logits))
    ranks = scores + w.get("mlp.router.correction", 0.0)
    groups = np.sort(ranks.reshape(c.num_groups, -1))
    of_groups = groups[:, -1] if c.router_scores == "softmax" else groups[:, -2:].sum(1)
    allowed = np.repeat(np.argsort(np.argsort(-of_groups)) < c.groups_per_token, c.num_experts // c.num_groups)
    chosen = np.argsort(-np.where(allowed, ranks, -np.inf))[: c.experts_per_token]
    weights = scores[chosen] / (scores[chosen].sum() if c.normalize_routing else 1) * c.routing_factor
    gate, up, down = (w[f"mlp.experts.{part}"] for part in ("gate", "up", "down"))
    outputs = [down[number] @ (silu(gate[number] @ token) * (up[number] @ token)) for number in chosen]
    return weights @ np.stack(outputs) + gated("mlp.shared")


def by_hand(model: Deepseek, tokens: list[int]) -> np.ndarray:
    return rms_decoder(
        model,
        tokens,
        lambda w, x, _: attend(w, x, model),
        lambda w, token: feed_forward(w, token, model.config),
    )


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_outputs_equal_the_equations(options: dict[str, Any]) -> None:
    model, tokens = make(**options), random_ids(1, 11)
    wanted = torch.from_numpy(by_hand(model, tokens[0].tolist()))
    assert_close(model(tokens)[0], wanted, rtol=1e-5, atol=1e-5)  # the model's rotations are rounded to float32


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("cuts", [(1,), (3, 4, 33), tuple(range(1, 37))], ids=str)
def test_calls_on_parts_equal_one_call(options: dict[str, Any], cuts: tuple[int, ...]) -> None:
    """With a cache, heads attend to latent vectors; without, to keys and values."""
    check_parts(make(**options), cuts)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_padding_changes_nothing(options: dict[str, Any], side: str) -> None:
    check_padding(make(**options), side)


def test_first_layers_have_no_experts() -> None:
    kinds = [type(block.mlp) for block in make(dense_layers=2).blocks]
    assert kinds == [GatedFeedForward, GatedFeedForward, DeepseekExperts]


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v2", "deepseek-v3"])
def test_cache_has_the_size_of_the_paper(name: str) -> None:
    """DeepSeek-AI 2024, DeepSeek-V2, table 1: per layer and token, 9/2 times the width of a head."""
    config = registry().resolve(name).config
    assert isinstance(config, DeepseekConfig)
    (past,) = config.graphs()[0].pasts
    assert isinstance(past, KeyValues)
    assert past.elements_per_token() == config.num_layers * 9 * config.head_dim // 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_groups": 3}, "num_experts 8 is not divisible by num_groups 3"),
        ({"groups_per_token": 2}, "groups_per_token 2 is above num_groups 1"),
        ({"num_groups": 4}, "experts_per_token 3 is above the 2 experts of groups_per_token 1"),
        (
            {"num_groups": 8, "groups_per_token": 4, "router_scores": "sigmoid"},
            "a group needs two experts or more for 'sigmoid', got num_experts 8 in num_groups 8",
        ),
        ({"rotary_dim": 3}, "rotary_dim must be even, got 3"),
        ({"dense_layers": 4}, "dense_layers must be from 0 to num_layers 3, got 4"),
        ({"rope_scaling": "yarn", "rope_theta": 1.0}, "rope_theta must exceed 1 for 'yarn', got 1.0"),
        ({"rope_mscale": -1.0}, "rope_mscale and rope_mscale_all_dim must not be negative, got -1.0 and 0.0"),
        ({"num_shared_experts": 0}, "num_shared_experts must be positive, got 0"),
        ({"query_latent_size": 0}, "query_latent_size must be positive, got 0"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DeepseekConfig(**{**SIZES, **options})
