"""Checkpoints of LFM2 and Granite 4, from random transformers models."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    PreTrainedModel,
)

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
    "num_attention_heads": 6, "num_key_value_heads": 3, "eos_token_id": 7, "pad_token_id": 3,
}  # fmt: skip
OURS = {
    "vocab_size": 61, "max_seq_len": 40, "hidden_size": 24, "num_layers": 4, "num_heads": 6, "num_kv_heads": 3,
    "norm_eps": 1e-3, "eos_token_id": 7, "pad_token_id": 3,
}  # fmt: skip
LFM2 = {**SIZES, "norm_eps": 1e-3, "layer_types": ["conv", "full_attention", "conv", "full_attention"]}
GRANITE = {
    **SIZES, "rms_norm_eps": 1e-3, "layer_types": ["linear_attention", "full_attention"] * 2, "num_local_experts": 0,
    "num_experts_per_tok": 0, "shared_intermediate_size": 37, "mamba_n_heads": 6, "mamba_d_state": 5,
    "mamba_d_conv": 3,
}  # fmt: skip
FAMILIES = {
    "lfm2": Family(
        Lfm2ForCausalLM,
        Lfm2Config,
        {**LFM2, "intermediate_size": 37, "block_multiple_of": 16},
        {
            **OURS, "convolution_layers": (True, False), "intermediate_size": 32, "kernel_size": 3, "head_dim": 4,
            "rope_theta": 1e6, "tie_embeddings": True,
        },
    ),
    "lfm2, given widths": Family(
        Lfm2ForCausalLM,
        Lfm2Config,
        {
            **LFM2, "intermediate_size": 37, "block_auto_adjust_ff_dim": False, "conv_L_cache": 4, "head_dim": 10,
            "tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
        },
        {
            **OURS, "convolution_layers": (True, False), "intermediate_size": 37, "kernel_size": 4, "head_dim": 10,
            "rope_theta": 50.0, "tie_embeddings": False,
        },
    ),
    "granitemoehybrid": Family(
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig,
        {
            **GRANITE, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.5,
            "attention_multiplier": 0.3, "mamba_n_groups": 2, "time_step_limit": [0.1, 0.7],
            "tie_word_embeddings": True,
        },
        {
            **OURS, "state_layers": (True, False), "intermediate_size": 37, "state_num_heads": 6, "state_head_dim": 8,
            "state_size": 5, "num_groups": 2, "kernel_size": 3, "rotary": False, "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4, "logit_multiplier": 0.4, "attention_scale": 0.3, "min_step": 0.1,
            "max_step": 0.7, "tie_embeddings": True,
        },
    ),
    "granitemoehybrid, rotary": Family(
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig,
        {
            **GRANITE, "position_embedding_type": "rope", "attention_bias": True,
            "mamba_conv_bias": False, "hidden_act": "gelu", "attention_dropout": 0.2, "mamba_expand": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
        },
        {
            **OURS, "rotary": True, "rope_theta": 50.0, "attention_bias": True, "projection_bias": False,
            "convolution_bias": False, "activation": "gelu", "dropout": 0.2, "state_head_dim": 12,
            "attention_scale": 1.0, "max_step": None, "tie_embeddings": False,
        },
    ),
}  # fmt: skip
UNSAID = {
    "_name_or_path", "transformers_version", "architectures", "dtype", "full_attn_idxs", "head_dim",
    "block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of", "intermediate_size",
    "position_embedding_type", "mamba_chunk_size",
}  # fmt: skip
"""Keys that are redundant, of experts or of speed, and those from which the width of a feed-forward network follows."""


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


def drawn(family: str, number: int) -> PreTrainedModel:
    """Draw a random configuration and a random model."""
    rng = random.Random(number)
    layers, kv_heads = rng.randint(1, 5), rng.choice([1, 2, 3])
    heads = kv_heads * rng.choice([1, 2])
    states = "conv" if family == "lfm2" else "linear_attention"
    kinds = [rng.choice([states, "full_attention"]) for _ in range(layers)]
    kinds[rng.randrange(layers)] = "full_attention"
    options: dict[str, Any] = {
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "hidden_size": heads * rng.choice([4, 6, 8]), "layer_types": kinds,
        "tie_word_embeddings": rng.choice([False, True]),
        "rope_parameters": {"rope_type": "default", "rope_theta": rng.choice([50.0, 1e4])},
    }  # fmt: skip
    if family == "lfm2":
        options |= {
            "intermediate_size": rng.choice([37, 48]), "conv_L_cache": rng.choice([2, 3, 4]),
            "conv_bias": rng.choice([False, True]), "block_multiple_of": rng.choice([4, 16]),
            "block_ffn_dim_multiplier": rng.choice([1.0, 1.3]), "block_auto_adjust_ff_dim": rng.choice([False, True]),
            **({"head_dim": 10} if rng.random() < 0.3 else {}),
        }  # fmt: skip
    else:
        groups = rng.choice([1, 2])
        options |= {
            "mamba_n_heads": heads * groups, "mamba_n_groups": groups, "mamba_expand": 2 * rng.choice([1, 2]),
            "mamba_d_state": rng.choice([3, 8]), "mamba_d_conv": rng.choice([2, 4]), "mamba_d_head": "auto",
            "mamba_chunk_size": rng.choice([4, 256]), "mamba_conv_bias": rng.choice([False, True]),
            "mamba_proj_bias": rng.choice([False, True]), "attention_bias": rng.choice([False, True]),
            "position_embedding_type": rng.choice([None, "rope", "nope"]),
            "time_step_limit": rng.choice([(0.0, float("inf")), (0.2, 0.9)]), "logits_scaling": rng.choice([1.0, 3.0]),
            "embedding_multiplier": rng.choice([1.0, 6.0]), "residual_multiplier": rng.choice([1.0, 0.3]),
            "attention_multiplier": rng.choice([0.1, 0.5]), "hidden_act": rng.choice(["silu", "relu"]),
        }  # fmt: skip
    return FAMILIES[family].make(**options)


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("number", range(20))
@pytest.mark.parametrize("family", ["lfm2", "granitemoehybrid"])
def test_random_configuration(tmp_path: Path, family: str, number: int) -> None:
    """Rows are compared without padding: the originals' convolutions read the biases of projections at padding."""
    theirs = drawn(family, number)
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


def test_old_names_of_layers_are_read(tmp_path: Path) -> None:
    """transformers 4 has other names of the kinds of layers, and infinity as a mapping."""
    theirs = FAMILIES["granitemoehybrid, rotary"].make()
    folder = save(theirs, tmp_path / "hub")
    edit(folder, layer_types=["mamba", "attention"] * 2, rope_parameters=None, rope_theta=50.0,
         normalization_function="rmsnorm", init_method="mup")  # fmt: skip
    import_checkpoint(folder, tmp_path / "ours", verify=True)
    same(tmp_path / "ours", theirs)
    edit(folder, layer_types=None, layers_block_type=["mamba", "attention"] * 2)
    import_checkpoint(folder, tmp_path / "again", verify=False)
    same(tmp_path / "again", theirs)


def test_defaults_equal_those_of_the_original(tmp_path: Path) -> None:
    tokens: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    said: dict[str, Any] = {"vocab_size": 61, "hidden_size": 64}
    check_defaults(Lfm2Config(**said, **tokens), said, 128000, tmp_path)
    layers = ["linear_attention"] * 31 + ["full_attention"]  # by default, none has attention, which is refused
    said |= {"num_local_experts": 0, "layer_types": layers}
    check_defaults(GraniteMoeHybridConfig(**said, **tokens), said, 2048, tmp_path)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("lfm2", {"layer_types": ["conv"]}, "layer_types must name 4 layers, each conv or full_attention"),
        ("lfm2", {"layer_types": ["conv"] * 4}, "convolution_layers must have a False within the layers"),
        ("lfm2", {"layer_types": None, "full_attn_idxs": 3}, "full_attn_idxs must be a list of numbers of layers"),
        ("lfm2", {"block_multiple_of": 0}, "must be positive, got 1.0 and 0"),
        ("lfm2", {"block_ffn_dim_multiplier": None}, "must be positive, got None and 16"),
        ("lfm2", {"conv_L_cache": 1}, "kernel_size must be 2 or more, got 1"),
        ("lfm2", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type 'yarn' is not supported"),
        ("lfm2", {"conv_kernel": 4}, "conv_kernel"),
        ("granitemoehybrid", {"num_local_experts": 2}, "num_local_experts 2 is not supported, only 0"),
        ("granitemoehybrid", {"layer_types": ["mamba"] * 4}, "state_layers must have a False within the layers"),
        ("granitemoehybrid", {"layer_types": ["other"] * 4}, "each linear_attention or full_attention, got"),
        ("granitemoehybrid", {"layers_block_type": ["attention"] * 4}, "layers_block_type .* differs from layer_types"),
        ("granitemoehybrid", {"layer_types": 3}, "layer_types must name 4 layers"),
        (
            "granitemoehybrid",
            {"mamba_d_head": 5},
            "mamba_n_heads 6 x mamba_d_head 5 is not",
        ),
        ("granitemoehybrid", {"mamba_n_heads": 7}, "is not divisible by mamba_n_heads 7"),
        ("granitemoehybrid", {"mamba_expand": None}, "mamba_expand None x hidden_size 24 is not divisible"),
        ("granitemoehybrid", {"logits_scaling": 0}, "logits_scaling must be positive, got 0"),
        ("granitemoehybrid", {"time_step_limit": [1]}, "time_step_limit must be two numbers"),
        ("granitemoehybrid", {"mamba_n_groups": 4}, "state_num_heads 6 is not divisible by num_groups 4"),
    ],
    ids=str,
)
def test_bad_configuration_is_refused(tmp_path: Path, family: str, changes: dict[str, Any], message: str) -> None:
    check_refused(FAMILIES[family].make(), changes, message, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["lfm2", "granitemoehybrid, rotary"])
def test_generated_texts_equal_the_original(tmp_path: Path, family: str) -> None:
    """Without limits of the step size, which Granite's class leaves out of steps that follow a cache."""
    theirs = FAMILIES[family].make(eos_token_id=None)
    sharpen(theirs)
    save(theirs, tmp_path / "hub")
    check_generation(theirs, tmp_path)
