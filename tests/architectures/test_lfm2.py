"""LFM2: parts of a text, padding, states, settings and published sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Lfm2Config as HubConfig
from transformers import Lfm2ForCausalLM

from tests.architectures.equations import randomized
from tests.architectures.hybrids import CUTS, check_padding, check_parts
from zoo.registry import registry
from zoo_plugins.lfm2.config import Lfm2Config
from zoo_plugins.lfm2.model import Lfm2

SIZES: dict[str, Any] = {
    "vocab_size": 23, "hidden_size": 12, "num_layers": 5, "max_seq_len": 40, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 6, "kernel_size": 4, "intermediate_size": 17, "convolution_layers": (True, False),
}  # fmt: skip
VARIANTS: list[dict[str, Any]] = [
    {},
    {"convolution_bias": True, "tie_embeddings": False, "convolution_layers": (False, True, True)},
    {"convolution_layers": (False,)},
]


def make(**options: Any) -> Lfm2:
    torch.manual_seed(0)
    return randomized(Lfm2(Lfm2Config(**SIZES | options)), scale=0.3)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_calls_on_parts_equal_one_call(options: dict[str, Any], cuts: tuple[int, ...]) -> None:
    check_parts(make(**options), cuts, [(2, 12, 3)])


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_padding_on_the_left_changes_nothing(options: dict[str, Any]) -> None:
    check_padding(make(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"convolution_layers": (True,)}, r"must have a False within the layers, got \(True,\) for num_layers 5"),
        ({"convolution_layers": ()}, "convolution_layers must have a False"),
        ({"convolution_layers": (True, False), "num_layers": 1}, "for num_layers 1"),
        ({"num_kv_heads": 3}, "num_heads"),
        ({"head_dim": 3}, "head_dim must be positive and even for rotary positions, got 3"),
        ({"head_dim": None, "num_heads": 8}, "hidden_size"),
        ({"kernel_size": 1}, "kernel_size must be 2 or more, got 1"),
        ({"intermediate_size": 0}, "intermediate_size must be positive"),
    ],
)
def test_impossible_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Lfm2Config(**SIZES | options)


@pytest.mark.parametrize(
    ("name", "parameters"), [("lfm2-350m", 354_483_968), ("lfm2-700m", 742_489_344), ("lfm2-1.2b", 1_170_340_608)]
)
def test_published_sizes_have_as_many_parameters_as_the_original(name: str, parameters: int) -> None:
    c = registry().resolve(name).config
    assert isinstance(c, Lfm2Config)
    hub = HubConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        full_attn_idxs=[2, 5, 8, 10, 12, 14],
        block_auto_adjust_ff_dim=False,
        intermediate_size=c.intermediate_size,
    )
    with torch.device("meta"):
        theirs = Lfm2ForCausalLM(hub)
    theirs.tie_weights()
    assert c.cost().parameters == sum(value.numel() for value in theirs.parameters()) == parameters
