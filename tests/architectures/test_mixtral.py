"""Mixtral against its equations token by token in numpy, parts of a text, padding and settings."""

from __future__ import annotations

from collections.abc import Callable
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
    rms_decoder,
    silu,
    softmax,
)
from zoo.nn import GatedFeedForward, MixtureOfExperts, recorded_routes
from zoo_plugins.mixtral.config import MixtralConfig
from zoo_plugins.mixtral.model import Mixtral

SIZES: dict[str, Any] = {
    "vocab_size": 23, "hidden_size": 12, "num_layers": 3, "max_seq_len": 40, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 6, "intermediate_size": 10, "num_experts": 5, "experts_per_token": 2, "rope_theta": 50.0,
}  # fmt: skip
VARIANTS: list[dict[str, Any]] = [
    {},
    {"normalize_routing": False, "num_experts": 7, "experts_per_token": 3, "expert_intermediate_size": 5},
    {"expert_layers": (False, True), "experts_per_token": 1, "tie_embeddings": True},
    {
        "attention_bias": True, "attention_output_bias": True, "attention_sinks": True, "mlp_bias": True,
        "expert_limit": 0.4, "activation": "gelu_sigmoid", "sliding_windows": (3, 0),
        "expert_layers": (True, True, False),
    },
]  # fmt: skip


def make(**options: Any) -> Mixtral:
    torch.manual_seed(0)
    return randomized(Mixtral(MixtralConfig(**{**SIZES, **options})))


def rotate(head: np.ndarray, position: int, theta: float) -> np.ndarray:
    """Turn the pair (j, j + R / 2) of a head's R elements by the angle position / theta^(2j / R)."""
    half = len(head) // 2
    turned = (head[:half] + 1j * head[half:]) * np.exp(1j * position / theta ** (np.arange(half) / half))
    return np.concatenate((turned.real, turned.imag))


def dense(w: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def attend(w: dict[str, np.ndarray], x: np.ndarray, c: MixtralConfig, window: int | None) -> np.ndarray:
    """Attention of each token to itself and those before it, one head after another."""
    queries, keys, values = (
        dense(w, f"attention.{name}", x).reshape(len(x), -1, c.head_dim) for name in ("query", "key", "value")
    )
    shared = queries.shape[1] // keys.shape[1]
    out = np.zeros_like(queries)
    for t in range(len(x)):
        first = 0 if window is None else max(0, t + 1 - window)
        for head in range(queries.shape[1]):
            query = rotate(queries[t, head], t, c.rope_theta)
            past = np.stack([rotate(keys[s, head // shared], s, c.rope_theta) for s in range(first, t + 1)])
            scores = past @ query / np.sqrt(len(query))
            if c.attention_sinks:
                scores = np.append(scores, w["attention.sink"][head])
            out[t, head] = softmax(scores)[: len(past)] @ values[first : t + 1, head // shared]
    return dense(w, "attention.output", out.reshape(len(x), -1))


def feed_forward(w: dict[str, np.ndarray], token: np.ndarray, c: MixtralConfig) -> np.ndarray:
    """The sum over a token's experts, or the feed-forward network of a layer without any."""
    activation = silu if c.activation == "silu" else sigmoid_gelu
    if "mlp.router.scores.weight" not in w:
        inner = activation(dense(w, "mlp.gate", token)) * dense(w, "mlp.up", token)
        return dense(w, "mlp.down", inner)
    logits = dense(w, "mlp.router.scores", token)
    chosen = np.argsort(-logits)[: c.experts_per_token]
    shares = softmax(logits[chosen]) if c.normalize_routing else softmax(logits)[chosen]
    return sum(share * expert(w, number, token, activation, c) for share, number in zip(shares, chosen, strict=True))


def sigmoid_gelu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-1.702 * x))


def expert(
    w: dict[str, np.ndarray],
    number: int,
    token: np.ndarray,
    activation: Callable[[np.ndarray], np.ndarray],
    c: MixtralConfig,
) -> np.ndarray:
    def product(part: str, x: np.ndarray) -> np.ndarray:
        bias = w[f"mlp.experts.{part}_bias"][number] if c.mlp_bias else 0.0
        return w[f"mlp.experts.{part}"][number] @ x + bias

    gate, up = product("gate", token), product("up", token)
    if c.expert_limit is not None:
        gate, up = np.minimum(gate, c.expert_limit), np.clip(up, -c.expert_limit, c.expert_limit) + 1
    return product("down", activation(gate) * up)


def by_hand(model: Mixtral, tokens: list[int]) -> np.ndarray:
    c = model.config
    return rms_decoder(
        model,
        tokens,
        lambda w, x, layer: attend(w, x, c, c.window(layer)),
        lambda w, token: feed_forward(w, token, c),
    )


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_outputs_equal_the_equations(options: dict[str, Any]) -> None:
    model, tokens = make(**options), random_ids(1, 11)
    wanted = torch.from_numpy(by_hand(model, tokens[0].tolist()))
    assert_close(model(tokens)[0], wanted, rtol=1e-5, atol=1e-5)  # the model's rotations are rounded to float32


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("cuts", [(1,), (3, 4, 33), tuple(range(1, 37))], ids=str)
def test_calls_on_parts_equal_one_call(options: dict[str, Any], cuts: tuple[int, ...]) -> None:
    check_parts(make(**options), cuts)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_padding_changes_nothing(options: dict[str, Any], side: str) -> None:
    """Padding is routed too, but no token reads what it computes."""
    check_padding(make(**options), side)


def test_the_pattern_of_layers_repeats() -> None:
    model = make(num_layers=5, expert_layers=(False, False, True))
    kinds = [type(block.mlp) for block in model.blocks]
    assert kinds == [GatedFeedForward, GatedFeedForward, MixtureOfExperts, GatedFeedForward, GatedFeedForward]
    with recorded_routes() as routes:
        model(random_ids(2, 7))
    assert [tuple(part.shape) for part in routes[0]] == [(14, 5), (14, 2)]
    assert len(routes) == 1
    same = MixtralConfig(num_layers=4, expert_layers=(False, True, False, True))
    assert same.expert_layers == (False, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experts_per_token": 6}, "experts_per_token 6 is above num_experts 5"),
        ({"num_experts": 0}, "num_experts"),
        ({"expert_intermediate_size": -1}, "expert_intermediate_size"),
        ({"expert_limit": 0.0}, "expert_limit must be positive, got 0.0"),
        ({"router_aux_loss": -0.1}, "router_aux_loss must not be negative, got -0.1"),
        ({"expert_layers": ()}, r"expert_layers must be one or more booleans, got \(\)"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MixtralConfig(**{**SIZES, **options})
