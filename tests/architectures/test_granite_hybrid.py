"""Granite 4: parts of a text, padding, states, settings and published sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

from tests.architectures.equations import randomized
from tests.architectures.hybrids import CUTS, check_padding, check_parts
from zoo.registry import registry
from zoo_plugins.granite_hybrid.config import GraniteHybridConfig
from zoo_plugins.granite_hybrid.model import GraniteHybrid

SIZES: dict[str, Any] = {
    "vocab_size": 23, "hidden_size": 12, "num_layers": 5, "max_seq_len": 40, "num_heads": 2, "num_kv_heads": 1,
    "kernel_size": 4, "intermediate_size": 17, "state_layers": (True, False), "state_num_heads": 4,
    "state_head_dim": 3, "state_size": 5, "num_groups": 2, "attention_scale": 0.4,
}  # fmt: skip
VARIANTS: list[dict[str, Any]] = [
    {},
    {"state_layers": (False, True, True), "rotary": True, "tie_embeddings": False, "max_step": 0.5},
    {"state_layers": (False,)},
]


def make(**options: Any) -> GraniteHybrid:
    torch.manual_seed(0)
    return randomized(GraniteHybrid(GraniteHybridConfig(**SIZES | options)), scale=0.3)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_calls_on_parts_equal_one_call(options: dict[str, Any], cuts: tuple[int, ...]) -> None:
    check_parts(make(**options), cuts, [(2, 32, 3), (2, 4, 5, 3)])


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_padding_on_the_left_changes_nothing(options: dict[str, Any]) -> None:
    check_padding(make(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state_layers": (True,)}, r"must have a False within the layers, got \(True,\) for num_layers 5"),
        ({"state_layers": ()}, "state_layers must have a False"),
        ({"num_heads": 5}, "hidden_size"),
        ({"num_heads": 4, "rotary": True}, "heads must have an even width for rotary positions, got 3"),
        ({"num_groups": 3}, "state_num_heads 4 is not divisible by num_groups 3"),
        ({"kernel_size": 1}, "kernel_size must be 2 or more, got 1"),
        ({"min_step": 0.5, "max_step": 0.1}, "min_step must lie between 0 and max_step 0.1, got 0.5"),
        ({"logit_multiplier": 0}, "logit_multiplier must be positive"),
    ],
)
def test_impossible_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GraniteHybridConfig(**SIZES | options)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("granite-4.0-h-350m", 340_332_224),
        ("granite-4.0-h-1b", 1_461_538_368),
        ("granite-4.0-h-micro", 3_191_396_096),
    ],
)
def test_published_sizes_have_as_many_parameters_as_the_original(name: str, parameters: int) -> None:
    c = registry().resolve(name).config
    assert isinstance(c, GraniteHybridConfig)
    hub = GraniteMoeHybridConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        layer_types=["linear_attention" if c.has_states(layer) else "full_attention" for layer in range(c.num_layers)],
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_n_heads=c.state_num_heads,
        mamba_d_state=c.state_size,
        shared_intermediate_size=c.intermediate_size,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        theirs = GraniteMoeHybridForCausalLM(hub)
    theirs.tie_weights()
    assert c.cost().parameters == sum(value.numel() for value in theirs.parameters()) == parameters
