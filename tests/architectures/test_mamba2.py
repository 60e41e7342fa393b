"""Mamba-2 against its equations token by token in numpy, its padding, its states and its settings."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from tests.architectures.equations import block_weights, random_ids, randomized, rms, silu
from zoo.nn import LayerStates
from zoo_plugins.mamba2.config import Mamba2Config
from zoo_plugins.mamba2.model import Mamba2

SIZES: dict[str, Any] = {
    "vocab_size": 23, "hidden_size": 12, "num_layers": 2, "head_dim": 4, "state_size": 5, "num_groups": 3,
    "kernel_size": 3,
}  # fmt: skip
VARIANTS: list[dict[str, Any]] = [
    {},
    {"num_groups": 1, "tie_embeddings": False, "convolution_bias": False},
    {"intermediate_size": 36, "projection_bias": True, "min_step": 0.3, "max_step": 0.9, "activation": "gelu"},
]


def make(**options: Any) -> Mamba2:
    torch.manual_seed(0)
    return randomized(Mamba2(Mamba2Config(**{**SIZES, **options})))


def by_hand(model: Mamba2, tokens: list[int]) -> np.ndarray:
    """The equations of section 7, one token after the other."""
    c = model.config
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    x = weights["token_embedding.weight"][tokens]
    activation = silu if c.activation == "silu" else lambda x: torch.nn.functional.gelu(torch.from_numpy(x)).numpy()
    for layer in range(c.num_layers):
        w = block_weights(weights, layer)
        state = np.zeros((c.num_heads, c.head_dim, c.state_size))
        window = np.zeros((c.kernel_size, c.channels))
        out = []
        for token in x:
            projected = w["mixer.input.weight"] @ (rms(token, c.norm_eps) * w["norm.weight"])
            projected = projected + w.get("mixer.input.bias", 0)
            gate, mixed, steps = np.split(projected, [c.width, c.width + c.channels])
            window = np.concatenate((window[1:], mixed[None]))
            mixed = (window * w["mixer.convolution.weight"][:, 0].T).sum(0) + w.get("mixer.convolution.bias", 0)
            u, b, q = np.split(activation(mixed), [c.width, c.width + c.num_groups * c.state_size])
            steps = np.log1p(np.exp(steps + w["mixer.step_bias"]))
            steps = np.clip(steps, c.min_step, np.inf if c.max_step is None else c.max_step)
            heads = []
            for head in range(c.num_heads):
                group = slice(*(c.state_size * (head * c.num_groups // c.num_heads + n) for n in (0, 1)))
                part = u[head * c.head_dim : (head + 1) * c.head_dim]
                decay = np.exp(-np.exp(w["mixer.log_decay"][head]) * steps[head])
                state[head] = decay * state[head] + steps[head] * np.outer(part, b[group])
                heads.append(state[head] @ q[group] + w["mixer.skip"][head] * part)
            y = (np.concatenate(heads) * silu(gate)).reshape(c.num_groups, -1)
            y = rms(y, c.norm_eps).reshape(-1) * w["mixer.norm.weight"]
            out.append(w["mixer.output.weight"] @ y + w.get("mixer.output.bias", 0))
        x = x + np.stack(out)
    return rms(x, c.norm_eps) * weights["norm.weight"] @ weights["head.weight"].T


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_model_equals_the_equations(options: dict[str, Any]) -> None:
    model, tokens = make(**options), random_ids(1, 37)
    np.testing.assert_allclose(model(tokens)[0].numpy(), by_hand(model, tokens[0].tolist()), rtol=0, atol=1e-10)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("cuts", [(1,), (16,), (3, 4, 33), tuple(range(1, 37))], ids=str)
def test_calls_on_parts_equal_one_call(options: dict[str, Any], cuts: tuple[int, ...]) -> None:
    model, tokens = make(**options), random_ids(2, 37)
    states = LayerStates.empty(2)
    parts = [model(tokens[:, start:stop], past_states=states) for start, stop in pairwise((0, *cuts, 37))]
    assert_close(torch.cat(parts, 1), model(tokens))
    assert [value.shape for value in states[0].values()] == [
        (2, model.config.channels, 2), (2, model.config.num_heads, 5, 4),
    ]  # fmt: skip


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_padding_on_the_left_changes_nothing(options: dict[str, Any]) -> None:
    model, tokens = make(**options), random_ids(1, 20)
    mask = torch.ones(1, 29, dtype=torch.long)
    mask[:, :9] = 0
    padded, states, alone = torch.cat((random_ids(1, 9), tokens), 1), LayerStates.empty(2), LayerStates.empty(2)
    assert_close(model(padded, mask, states)[:, 9:], model(tokens, past_states=alone))
    for ours, theirs in zip(states, alone, strict=True):
        assert_close(dict(ours), dict(theirs))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 5}, "intermediate_size"),
        ({"num_groups": 4}, "6 heads cannot be divided into num_groups 4"),
        ({"kernel_size": 1}, "kernel_size must be 2 or more, got 1"),
        ({"min_step": -0.1}, "min_step must lie between 0 and max_step None, got -0.1"),
        ({"min_step": 0.5, "max_step": 0.1}, "min_step must lie between 0 and max_step 0.1, got 0.5"),
        ({"state_size": 0}, "state_size must be positive"),
    ],
)
def test_impossible_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mamba2Config(**{**SIZES, **options})


def test_initial_step_sizes_lie_in_the_range_of_the_paper() -> None:
    torch.manual_seed(0)
    model = Mamba2(Mamba2Config(**{**SIZES, "hidden_size": 512, "num_groups": 1}))
    mixer = model.blocks[0].mixer
    steps = torch.nn.functional.softplus(mixer.step_bias)
    assert 9e-4 < steps.min() < 2e-3 < 5e-2 < steps.max() < 0.11
    assert_close(mixer.log_decay.exp(), torch.arange(1, 257).float())
