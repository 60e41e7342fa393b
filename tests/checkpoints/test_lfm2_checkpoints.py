"""Checkpoints of LFM2, from random transformers models."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, Lfm2Config, Lfm2ForCausalLM

import zoo as library
from tests.checkpoints.decoders import (
    Family,
    check_defaults,
    check_generation,
    check_imported,
    check_published,
    check_refused,
    edit,
    logits_of,
    same,
    save,
    sharpen,
)
from zoo.checkpoints import Exact, import_checkpoint

SIZES = {
    "vocab_size": 61, "max_position_embeddings": 40, "hidden_size": 24, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 3, "norm_eps": 1e-3, "eos_token_id": 7, "pad_token_id": 3,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
}  # fmt: skip
OURS = {
    "vocab_size": 61, "max_seq_len": 40, "hidden_size": 24, "num_layers": 4, "num_heads": 6, "num_kv_heads": 3,
    "norm_eps": 1e-3, "eos_token_id": 7, "pad_token_id": 3, "convolution_layers": (True, False),
}  # fmt: skip
FAMILIES = {
    "lfm2": Family(
        Lfm2ForCausalLM,
        Lfm2Config,
        {**SIZES, "intermediate_size": 37, "block_multiple_of": 16},
        {**OURS, "intermediate_size": 32, "kernel_size": 3, "head_dim": 4, "rope_theta": 1e6, "tie_embeddings": True},
    ),
    "lfm2, given widths": Family(
        Lfm2ForCausalLM,
        Lfm2Config,
        {
            **SIZES, "intermediate_size": 37, "block_auto_adjust_ff_dim": False, "conv_L_cache": 4, "head_dim": 10,
            "tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
        },
        {
            **OURS, "intermediate_size": 37, "kernel_size": 4, "head_dim": 10, "rope_theta": 50.0,
            "tie_embeddings": False,
        },
    ),
}  # fmt: skip
UNSAID = {
    "_name_or_path", "transformers_version", "architectures", "dtype", "full_attn_idxs", "head_dim",
    "block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of", "intermediate_size",
}  # fmt: skip
"""Keys that are redundant, and those from which the width of the feed-forward network follows."""


@pytest.mark.parametrize("name", FAMILIES)
def test_checkpoint_is_imported(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    theirs = family.make()
    config = check_imported(theirs, tmp_path).spec.config
    assert {key: getattr(config, key) for key in family.ours} == family.ours
    same(tmp_path / "ours", theirs)


@pytest.mark.parametrize("name", FAMILIES)
def test_checkpoint_round_trip(tmp_path: Path, name: str) -> None:
    theirs = FAMILIES[name].make()
    import_checkpoint(save(theirs, tmp_path / "hub"), tmp_path / "ours", verify=False)
    again = check_published(theirs, tmp_path, UNSAID, AutoModelForCausalLM)
    assert torch.equal(logits_of(again), logits_of(theirs))


def drawn(number: int) -> Lfm2ForCausalLM:
    """Draw a random configuration and a random model."""
    rng = random.Random(number)
    layers, kv_heads = rng.randint(1, 5), rng.choice([1, 2, 3])
    heads = kv_heads * rng.choice([1, 2])
    kinds = [rng.choice(["conv", "full_attention"]) for _ in range(layers)]
    kinds[rng.randrange(layers)] = "full_attention"
    options: dict[str, Any] = {
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "hidden_size": heads * rng.choice([4, 6, 8]), "intermediate_size": rng.choice([37, 48]),
        "conv_L_cache": rng.choice([2, 3, 4]), "conv_bias": rng.choice([False, True]), "layer_types": kinds,
        "tie_word_embeddings": rng.choice([False, True]), "block_multiple_of": rng.choice([4, 16]),
        "block_ffn_dim_multiplier": rng.choice([1.0, 1.3]), "block_auto_adjust_ff_dim": rng.choice([False, True]),
        "rope_parameters": {"rope_type": "default", "rope_theta": rng.choice([50.0, 1e4])},
    }  # fmt: skip
    if rng.random() < 0.3:
        options["head_dim"] = 10
    theirs = FAMILIES["lfm2"].make(**options)
    assert isinstance(theirs, Lfm2ForCausalLM)
    return theirs


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("number", range(20))
def test_random_configuration(tmp_path: Path, number: int) -> None:
    """Rows are compared without padding: with ``conv_bias``, the convolutions of the original read padding."""
    theirs = drawn(number)
    check_imported(theirs, tmp_path)
    check_published(theirs, tmp_path, UNSAID)
    ids = torch.randint(61, (3, 20), generator=torch.Generator().manual_seed(1))
    ours, theirs = library.load(tmp_path / "ours").double(), theirs.double()
    with Exact(theirs), torch.inference_mode():
        assert_close(ours(ids), theirs(ids).logits, rtol=0, atol=1e-10)


def test_keys_of_published_files_are_understood(tmp_path: Path) -> None:
    """Older files number the layers with attention, and have other names of two settings, which decide."""
    theirs = FAMILIES["lfm2"].make()
    folder = save(theirs, tmp_path / "hub")
    edit(folder, layer_types=None, full_attn_idxs=[1, 3], rope_parameters=None, rope_theta=1000000.0,
         intermediate_size=999, block_ff_dim=37, tie_word_embeddings=False, tie_embedding=True)  # fmt: skip
    edit(folder, block_dim=24, block_mlp_init_scale=1.0, block_norm_eps=1e-5, block_out_init_scale=1.0,
         block_use_swiglu=True, block_use_xavier_init=True, conv_dim=24, conv_dim_out=24, conv_use_xavier_init=True,
         num_heads=6, use_pos_enc=True, theta=1000000.0)  # fmt: skip
    import_checkpoint(folder, tmp_path / "ours", verify=True)
    same(tmp_path / "ours", theirs)


def test_defaults_equal_those_of_the_original(tmp_path: Path) -> None:
    said: dict[str, Any] = {"vocab_size": 61, "hidden_size": 64}
    check_defaults(Lfm2Config(**said, bos_token_id=None, eos_token_id=None, pad_token_id=None), said, 128000, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["conv"]}, "layer_types must name 4 layers, each conv or full_attention"),
        ({"layer_types": ["conv"] * 4}, "convolution_layers must have a False within the layers"),
        ({"layer_types": None, "full_attn_idxs": 3}, "full_attn_idxs must be a list of numbers of layers, got 3"),
        ({"block_multiple_of": 0}, "must be positive, got 1.0 and 0"),
        ({"block_ffn_dim_multiplier": None}, "must be positive, got None and 16"),
        ({"conv_L_cache": 1}, "kernel_size must be 2 or more, got 1"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type 'yarn' is not supported"),
        ({"conv_kernel": 4}, "conv_kernel"),
    ],
    ids=str,
)
def test_bad_configuration_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    check_refused(FAMILIES["lfm2"].make(), changes, message, tmp_path)


@pytest.mark.slow
def test_generated_texts_equal_the_original(tmp_path: Path) -> None:
    theirs = FAMILIES["lfm2"].make(eos_token_id=None)
    sharpen(theirs)
    save(theirs, tmp_path / "hub")
    check_generation(theirs, tmp_path)
