"""Checkpoints of GPT-NeoX and its relatives, from random transformers models."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BloomConfig,
    BloomForCausalLM,
    CodeGenConfig,
    CodeGenForCausalLM,
    Cohere2Config,
    Cohere2ForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MptConfig,
    MptForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    PersimmonConfig,
    PersimmonForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

import zoo as library
from tests.checkpoints.decoders import (
    Family,
    batch,
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
from zoo.checkpoints import Exact, export_checkpoint, import_checkpoint

SIZES = {
    "vocab_size": 61, "max_position_embeddings": 40, "hidden_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 6, "intermediate_size": 37, "attention_dropout": 0.2, "eos_token_id": 7, "pad_token_id": 3,
}  # fmt: skip
OURS = {
    "vocab_size": 61, "max_seq_len": 40, "hidden_size": 48, "num_layers": 3, "num_heads": 6, "intermediate_size": 37,
    "dropout": 0.2, "norm_eps": 1e-3, "eos_token_id": 7, "positions": "rotary", "norm": "layer", "qk_norm": False,
    "embedding_norm": False,
}  # fmt: skip
"""Our names for SIZES, and what most of these families share."""
GROUPED = {**SIZES, "num_key_value_heads": 3}
GPTJ = {
    "vocab_size": 61, "n_positions": 40, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_inner": 37, "rotary_dim": 6,
    "attn_pdrop": 0.2, "layer_norm_epsilon": 1e-3, "eos_token_id": 7, "pad_token_id": 3,
}  # fmt: skip
FALCON = {key: value for key, value in SIZES.items() if key != "intermediate_size"} | {
    "ffn_hidden_size": 37, "layer_norm_epsilon": 1e-3,
}  # fmt: skip
BLOOM = {
    "vocab_size": 61, "hidden_size": 48, "n_layer": 3, "n_head": 6, "layer_norm_epsilon": 1e-3,
    "attention_dropout": 0.2, "eos_token_id": 7, "pad_token_id": 3,
}  # fmt: skip
MPT = {
    "vocab_size": 61, "max_seq_len": 40, "d_model": 48, "n_layers": 3, "n_heads": 6, "layer_norm_epsilon": 1e-3,
    "attn_config": {"dtype": "float32"}, "eos_token_id": 7, "pad_token_id": 3,
}  # fmt: skip
BIASED = {
    **OURS, "positions": "alibi", "intermediate_size": 192, "parallel": False, "gated": False, "head_bias": False,
}  # fmt: skip
PART = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.75}
LAYERS = ["full_attention", "sliding_attention", "sliding_attention"]
FAMILIES = {
    "gpt_neox": Family(
        GPTNeoXForCausalLM,
        GPTNeoXConfig,
        {**SIZES, "layer_norm_eps": 1e-3, "hidden_dropout": 0.1, "hidden_act": "relu", "rope_parameters": PART},
        {
            **OURS, "activation": "relu", "rotary_dim": 6, "rope_theta": 100.0, "parallel": True, "shared_norm": False,
            "attention_bias": True, "attention_output_bias": True, "mlp_bias": True, "residual_dropout": 0.1,
            "tie_embeddings": False, "head_bias": False, "gated": False,
        },
    ),
    "gpt_neox, in turn": Family(
        GPTNeoXForCausalLM,
        GPTNeoXConfig,
        {
            **SIZES, "layer_norm_eps": 1e-3, "use_parallel_residual": False, "attention_bias": False,
            "tie_word_embeddings": True, "hidden_act": "gelu_new",
            "rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 50.0, "partial_rotary_factor": 0.5},
        },
        {
            **OURS, "activation": "gelu_tanh", "rotary_dim": 4, "rope_theta": 50.0, "rope_scaling": "linear",
            "rope_factor": 2.5, "parallel": False, "attention_bias": False, "attention_output_bias": False,
            "mlp_bias": True, "tie_embeddings": True,
        },
    ),
    "phi": Family(
        PhiForCausalLM,
        PhiConfig,
        {**GROUPED, "layer_norm_eps": 1e-3, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "rope_parameters": PART},
        {
            **OURS, "num_kv_heads": 3, "activation": "gelu_tanh", "rotary_dim": 6, "rope_theta": 100.0,
            "parallel": True, "shared_norm": True, "head_bias": True, "residual_dropout": 0.1,
        },
    ),
    "phi, norms of queries": Family(
        PhiForCausalLM,
        PhiConfig,
        {**SIZES, "layer_norm_eps": 1e-3, "qk_layernorm": True, "hidden_act": "silu"},
        {**OURS, "qk_norm": True, "num_kv_heads": 6, "rotary_dim": 4, "activation": "silu"},
    ),
    "stablelm": Family(
        StableLmForCausalLM,
        StableLmConfig,
        {**GROUPED, "layer_norm_eps": 1e-3, "use_qkv_bias": True, "hidden_dropout": 0.1, "rope_parameters": PART},
        {
            **OURS, "num_kv_heads": 3, "activation": "silu", "rotary_dim": 6, "rope_theta": 100.0, "gated": True,
            "parallel": False, "shared_norm": False, "attention_bias": True, "attention_output_bias": False,
            "mlp_bias": False, "residual_dropout": 0.1, "tie_embeddings": False,
        },
    ),
    "stablelm, parallel": Family(
        StableLmForCausalLM,
        StableLmConfig,
        {**GROUPED, "layer_norm_eps": 1e-3, "use_parallel_residual": True, "tie_word_embeddings": True},
        {
            **OURS, "num_kv_heads": 3, "rotary_dim": 2, "gated": True, "parallel": True, "shared_norm": True,
            "attention_bias": False, "tie_embeddings": True,
        },
    ),
    "starcoder2": Family(
        Starcoder2ForCausalLM,
        Starcoder2Config,
        {
            **GROUPED, "norm_epsilon": 1e-3, "sliding_window": 4, "residual_dropout": 0.1, "embedding_dropout": 0.1,
            "hidden_act": "gelu_new",
        },
        {
            **OURS, "num_kv_heads": 3, "activation": "gelu_tanh", "sliding_windows": (4,), "parallel": False,
            "attention_bias": True, "attention_output_bias": True, "mlp_bias": True, "residual_dropout": 0.1,
            "tie_embeddings": True, "gated": False, "rotary_dim": 8,
        },
    ),
    "starcoder2, no biases": Family(
        Starcoder2ForCausalLM,
        Starcoder2Config,
        {**GROUPED, "norm_epsilon": 1e-3, "use_bias": False, "tie_word_embeddings": False, "hidden_act": "relu"},
        {
            **OURS, "num_kv_heads": 3, "sliding_windows": (0,), "attention_bias": False, "mlp_bias": False,
            "attention_output_bias": False, "tie_embeddings": False, "norm_bias": True,
        },
    ),
    "gptj": Family(
        GPTJForCausalLM,
        GPTJConfig,
        {**GPTJ, "resid_pdrop": 0.1, "embd_pdrop": 0.1},
        {
            **OURS, "activation": "gelu_tanh", "rotary_dim": 6, "rope_theta": 10000.0, "parallel": True,
            "shared_norm": True, "attention_bias": False, "attention_output_bias": False, "mlp_bias": True,
            "head_bias": True, "residual_dropout": 0.1,
        },
    ),
    "gptj, whole heads": Family(
        GPTJForCausalLM,
        GPTJConfig,
        {**GPTJ, "rotary_dim": 8, "n_inner": None, "activation_function": "relu"},
        {**OURS, "intermediate_size": 192, "rotary_dim": 8, "activation": "relu"},
    ),
    "codegen": Family(
        CodeGenForCausalLM,
        CodeGenConfig,
        {**GPTJ, "n_head": 4, "resid_pdrop": 0.1, "embd_pdrop": 0.1},
        {
            **OURS, "num_heads": 4, "activation": "gelu_tanh", "rotary_dim": 6, "rope_theta": 10000.0,
            "parallel": True, "shared_norm": True, "attention_bias": False, "attention_output_bias": False,
            "mlp_bias": True, "head_bias": True, "residual_dropout": 0.1,
        },
    ),
    "codegen, two heads of a part": Family(
        CodeGenForCausalLM,
        CodeGenConfig,
        {**GPTJ, "n_head": 8, "n_inner": None, "activation_function": "relu"},
        {**OURS, "num_heads": 8, "intermediate_size": 192, "rotary_dim": 6, "activation": "relu"},
    ),
    "nemotron": Family(
        NemotronForCausalLM,
        NemotronConfig,
        {**GROUPED, "head_dim": 8, "norm_eps": 1e-3, "attention_bias": True, "rope_parameters": PART},
        {
            **OURS, "num_kv_heads": 3, "activation": "relu_squared", "rotary_dim": 6, "rope_theta": 100.0,
            "norm_offset": True, "gated": False, "parallel": False, "shared_norm": False, "attention_bias": True,
            "attention_output_bias": True, "mlp_bias": False, "norm_bias": True, "tie_embeddings": False,
        },
    ),
    "nemotron, wide heads": Family(
        NemotronForCausalLM,
        NemotronConfig,
        {
            **GROUPED, "head_dim": 12, "norm_eps": 1e-3, "mlp_bias": True, "tie_word_embeddings": True,
            "hidden_act": "silu",
        },
        {
            **OURS, "num_kv_heads": 3, "head_dim": 12, "activation": "silu", "rotary_dim": 6, "mlp_bias": True,
            "attention_bias": False, "attention_output_bias": False, "tie_embeddings": True,
        },
    ),
    "persimmon": Family(
        PersimmonForCausalLM,
        PersimmonConfig,
        {**SIZES, "layer_norm_eps": 1e-3, "hidden_dropout": 0.1, "rope_parameters": PART},
        {
            **OURS, "activation": "relu_squared", "rotary_dim": 6, "rope_theta": 100.0, "qk_norm": True,
            "joint_qk_norm": False, "norm_offset": False, "gated": False, "parallel": False, "attention_bias": True,
            "attention_output_bias": True, "mlp_bias": True, "residual_dropout": 0.1, "tie_embeddings": False,
        },
    ),
    "persimmon, plain queries": Family(
        PersimmonForCausalLM,
        PersimmonConfig,
        {**SIZES, "layer_norm_eps": 1e-3, "qk_layernorm": False, "tie_word_embeddings": True, "hidden_act": "gelu"},
        {**OURS, "activation": "gelu", "rotary_dim": 4, "qk_norm": False, "tie_embeddings": True},
    ),
    "falcon": Family(
        FalconForCausalLM,
        FalconConfig,
        {**FALCON, "hidden_dropout": 0.1, "activation": "relu"},
        {
            **OURS, "num_kv_heads": 1, "activation": "relu", "rotary_dim": 8, "parallel": True, "shared_norm": True,
            "attention_bias": False, "attention_output_bias": False, "mlp_bias": False, "tie_embeddings": True,
            "residual_dropout": 0.1, "norm_bias": True,
        },
    ),
    "falcon, groups": Family(
        FalconForCausalLM,
        FalconConfig,
        {
            **FALCON, "new_decoder_architecture": True, "num_kv_heads": 3, "bias": True, "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 50.0},
        },
        {
            **OURS, "num_kv_heads": 3, "parallel": True, "shared_norm": False, "attention_bias": True,
            "attention_output_bias": True, "mlp_bias": True, "tie_embeddings": False, "rope_factor": 2.5,
        },
    ),
    "falcon, one norm": Family(
        FalconForCausalLM,
        FalconConfig,
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        {**OURS, "num_kv_heads": 2, "parallel": True, "shared_norm": True},
    ),
    "falcon, in turn": Family(
        FalconForCausalLM,
        FalconConfig,
        {**FALCON, "multi_query": False, "parallel_attn": False, "bias": True},
        {**OURS, "num_kv_heads": 6, "parallel": False, "shared_norm": False, "mlp_bias": True},
    ),
    "bloom": Family(
        BloomForCausalLM,
        BloomConfig,
        {**BLOOM, "hidden_dropout": 0.1},
        {
            **BIASED, "max_seq_len": 2048, "activation": "gelu_tanh", "embedding_norm": True, "residual_dropout": 0.1,
            "attention_bias": True, "attention_output_bias": True, "mlp_bias": True, "norm_bias": True,
            "tie_embeddings": True,
        },
        tolerance=1e-7,  # its gelu has 8 digits of a constant
    ),
    "bloom, a head of its own": Family(
        BloomForCausalLM,
        BloomConfig,
        {**BLOOM, "n_head": 12, "tie_word_embeddings": False},
        {**BIASED, "num_heads": 12, "max_seq_len": 2048, "embedding_norm": True, "tie_embeddings": False},
        tolerance=1e-7,
    ),
    "mpt": Family(
        MptForCausalLM,
        MptConfig,
        {**MPT, "attn_config": {"softmax_scale": 0.4, "dtype": "float32"}},
        {
            **BIASED, "activation": "gelu", "dropout": 0.0, "residual_dropout": 0.0, "attention_bias": False,
            "attention_output_bias": False, "mlp_bias": False, "norm_bias": False, "tie_embeddings": True,
            "attention_scale": 0.4,
        },
    ),
    "mpt, a head of its own": Family(
        MptForCausalLM,
        MptConfig,
        {**MPT, "n_heads": 12, "tie_word_embeddings": False},
        {**BIASED, "num_heads": 12, "dropout": 0.0, "attention_scale": None, "tie_embeddings": False},
    ),
    "cohere": Family(
        CohereForCausalLM,
        CohereConfig,
        {**GROUPED, "layer_norm_eps": 1e-3, "logit_scale": 0.5, "attention_bias": True},
        {
            **OURS, "num_kv_heads": 3, "activation": "silu", "rotary_dim": 8, "rope_theta": 500000.0, "gated": True,
            "parallel": True, "shared_norm": True, "norm_bias": False, "attention_bias": True,
            "attention_output_bias": True, "mlp_bias": False, "logit_multiplier": 0.5, "tie_embeddings": True,
        },
    ),
    "cohere, scaled frequencies": Family(
        CohereForCausalLM,
        CohereConfig,
        {
            **SIZES, "layer_norm_eps": 1e-3, "tie_word_embeddings": False, "hidden_act": "gelu",
            "logit_scale": 2.0,
            "rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 50.0},
        },
        {
            **OURS, "num_kv_heads": 6, "activation": "gelu", "rope_factor": 2.5, "rope_theta": 50.0,
            "logit_multiplier": 2.0, "tie_embeddings": False, "attention_bias": False,
        },
    ),
    "cohere2": Family(
        Cohere2ForCausalLM,
        Cohere2Config,
        {**GROUPED, "layer_norm_eps": 1e-3, "logit_scale": 0.5, "layer_types": LAYERS, "sliding_window": 4},
        {
            **OURS, "num_kv_heads": 3, "rope_layers": (False, True, True), "sliding_windows": (0, 4, 4),
            "rope_theta": 10000.0, "logit_multiplier": 0.5, "norm_bias": False, "gated": True, "shared_norm": True,
        },
    ),
}  # fmt: skip
BASE = {name: family for name, family in FAMILIES.items() if "," not in name}
"""One of each family."""


@pytest.mark.slow_after(8)
@pytest.mark.parametrize("name", [*BASE, *(name for name in FAMILIES if name not in BASE)])
def test_checkpoint_is_imported(tmp_path: Path, name: str) -> None:
    """The import compares without padding and with right padding; this test adds left padding."""
    family = FAMILIES[name]
    theirs = family.make()
    config = check_imported(theirs, tmp_path).spec.config
    assert {key: getattr(config, key) for key in family.ours} == family.ours
    same(tmp_path / "ours", theirs, family.tolerance)


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("name", FAMILIES)
def test_checkpoint_round_trip(tmp_path: Path, name: str) -> None:
    """transformers loads the published checkpoint with the same configuration, tensors and outputs."""
    theirs = FAMILIES[name].make()
    import_checkpoint(save(theirs, tmp_path / "hub"), tmp_path / "ours", verify=False)
    again = check_published(theirs, tmp_path, UNSAID, AutoModelForCausalLM)
    assert torch.equal(logits_of(again), logits_of(theirs))


UNSAID = {"_name_or_path", "transformers_version", "architectures", "dtype", "n_inner", "num_ln_in_parallel_attn",
          "partial_rotary_factor", "seq_length"}  # fmt: skip
"""Keys that are redundant."""


# Old files, base models and classifiers.


def test_old_names_of_rotary_settings_are_read(tmp_path: Path) -> None:
    """transformers 4 writes ``rotary_pct`` for GPT-NeoX, and the part and the base beside the scaling for others."""
    for name, old in {
        "gpt_neox": {"rotary_pct": 0.75, "rotary_emb_base": 100.0, "rope_scaling": None},
        "gpt_neox, in turn": {
            "rotary_pct": 0.5, "rotary_emb_base": 50.0, "rope_scaling": {"type": "linear", "factor": 2.5},
        },
        "phi": {"partial_rotary_factor": 0.75, "rope_theta": 100.0},
        "nemotron": {"partial_rotary_factor": 0.75, "rope_theta": 100.0},
        "persimmon": {"partial_rotary_factor": 0.75, "rope_theta": 100.0},
        "stablelm": {"partial_rotary_factor": 0.75, "rope_theta": 100.0, "qk_layernorm": False},
        "cohere, scaled frequencies": {"rope_theta": 50.0, "rope_scaling": {"type": "linear", "factor": 2.5}},
    }.items():  # fmt: skip
        theirs = FAMILIES[name].make()
        folder = save(theirs, tmp_path / name)
        edit(folder, rope_parameters=None)
        edit(folder, **old)
        import_checkpoint(folder, tmp_path / f"our {name}", verify=True)
        same(tmp_path / f"our {name}", theirs)


def test_old_names_of_sizes_are_read(tmp_path: Path) -> None:
    theirs = FAMILIES["falcon"].make()
    folder = save(theirs, tmp_path / "hub")
    edit(folder, hidden_size=None, num_hidden_layers=None, num_attention_heads=None)
    edit(folder, n_embed=48, n_layer=3, n_head=6, apply_residual_connection_post_layernorm=False)
    import_checkpoint(folder, tmp_path / "ours", verify=False)
    same(tmp_path / "ours", theirs)
    theirs = FAMILIES["bloom"].make()
    folder = save(theirs, tmp_path / "bloom")
    edit(folder, hidden_size=None, n_layer=None, n_head=None, n_embed=48, num_hidden_layers=3, num_attention_heads=6)
    import_checkpoint(folder, tmp_path / "our bloom", verify=True)
    same(tmp_path / "our bloom", theirs, 1e-7)


def test_keys_of_published_files_are_understood(tmp_path: Path) -> None:
    """And Cohere 2's windows, which old files give by their period."""
    for name, keys in {
        "gptj": {"rotary": True, "scale_attn_weights": True, "summary_type": "cls_index"},
        "codegen": {"n_ctx": 2048, "scale_attn_weights": True, "summary_type": "cls_index"},
        "cohere": {"use_qk_norm": False},
        "bloom": {
            "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "masked_softmax_fusion": True,
            "n_inner": None, "offset_alibi": 100, "pretraining_tp": 4, "seq_length": 2048, "skip_bias_add": True,
            "skip_bias_add_qkv": False, "slow_but_exact": False, "unk_token_id": 0,
        },
        "mpt": {
            "architectures": ["MPTForCausalLM"], "init_config": {"name": "kaiming_normal_"}, "verbose": 0,
            "tokenizer_name": "EleutherAI/gpt-neox-20b", "torch_dtype": "bfloat16",
        },
        "starcoder2": {
            "activation_function": "gelu", "attention_softmax_in_fp32": True, "layer_norm_epsilon": 1e-5,
            "mlp_type": "default", "norm_type": "layer_norm", "scale_attention_softmax_in_fp32": True,
            "scale_attn_weights": True,
        },
        "cohere2": {
            "layer_types": None, "sliding_window_pattern": 2, "layer_switch": 2, "rotary_pct": 1.0,
            "order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj",
            "use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_block": True,
            "use_parallel_embedding": False, "cache_implementation": "hybrid",
        },
    }.items():  # fmt: skip
        own = {"layer_types": None, "sliding_window_pattern": 2} if name == "cohere2" else {}
        theirs = FAMILIES[name].make(**own)
        folder = save(theirs, tmp_path / name)
        edit(folder, **keys)
        import_checkpoint(folder, tmp_path / f"our {name}", verify=True)
        same(tmp_path / f"our {name}", theirs, FAMILIES[name].tolerance)


def test_buffers_of_old_files_are_ignored(tmp_path: Path) -> None:
    """Causal masks and frequencies; and GPT-NeoX's head by the name that its class has in memory."""
    modules = dict.fromkeys(("gptj", "codegen"), "transformer.h.0.attn")
    for name, module in {"gpt_neox": "gpt_neox.layers.0.attention", **modules}.items():
        theirs = FAMILIES[name].make()
        folder = save(theirs, tmp_path / name)
        tensors = load_file(folder / "model.safetensors")
        if name == "gpt_neox":
            assert "embed_out.weight" in tensors
            tensors = {key.replace("embed_out", "lm_head"): tensor for key, tensor in tensors.items()}
            tensors |= {f"{module}.rotary_emb.inv_freq": torch.ones(3)}
        tensors |= {f"{module}.bias": torch.ones(1, 1, 4, 4), f"{module}.masked_bias": torch.zeros(())}
        tensors |= {f"{module}.causal_mask": torch.ones(1, 1, 4, 4)} if name == "codegen" else {}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        import_checkpoint(folder, tmp_path / f"our {name}", verify=False)
        same(tmp_path / f"our {name}", theirs)


def test_cohere_2_without_windows_survives_a_round_trip(tmp_path: Path) -> None:
    """Its class builds the mask of a window even if no layer has one."""
    theirs = FAMILIES["cohere2"].make(layer_types=["full_attention"] * 3)
    import_checkpoint(save(theirs, tmp_path / "hub"), tmp_path / "ours", verify=False)
    export_checkpoint(tmp_path / "ours", tmp_path / "back", model_type="cohere2", verify=False)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager")
    assert torch.equal(logits_of(again), logits_of(theirs))


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", BASE)
def test_base_model_becomes_a_sentence_encoder(tmp_path: Path, name: str) -> None:
    """Its tensors have no prefix; its states are those of the original."""
    family = FAMILIES[name]
    theirs = AutoModel.from_config(family.make().config, attn_implementation="eager").eval().requires_grad_(False)
    for parameter in theirs.parameters():
        parameter.copy_(0.4 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    imported = import_checkpoint(save(theirs, tmp_path / "hub"), tmp_path / "ours", verify=True)
    assert imported.spec.config.task == "sentence-embedding"
    assert imported.comparison.exact < 1e-12
    exported = export_checkpoint(tmp_path / "ours", tmp_path / "back", model_type=theirs.config.model_type, verify=True)
    assert exported.comparison.exact < 1e-12
    before, after = (load_file(path / "model.safetensors") for path in (tmp_path / "hub", tmp_path / "back"))
    assert before.keys() == after.keys()


CLASSIFIED = [name for name in BASE if not name.startswith(("cohere", "codegen"))]
"""The families that have a text-classification class in transformers."""


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", CLASSIFIED)
def test_classifier_is_imported(tmp_path: Path, name: str) -> None:
    """Both read the last token that is not padding."""
    config = FAMILIES[name].make().config
    config.num_labels = 3
    theirs = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").eval()
    for parameter in theirs.requires_grad_(False).parameters():
        parameter.copy_(0.4 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    imported = import_checkpoint(save(theirs, tmp_path / "hub"), tmp_path / "ours", verify=True)
    assert imported.spec.config.task == "text-classification"
    assert imported.comparison.exact < 1e-12
    ids, _, _ = batch()
    ids[0, 15:] = 3
    mask = ids.ne(3).long()
    theirs = theirs.double()
    with Exact(theirs), torch.inference_mode():
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        wanted = theirs(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        found = library.load(tmp_path / "ours").double()(ids, mask)
    assert_close(found, wanted, rtol=0, atol=FAMILIES[name].tolerance)


# Defaults and refusals.

WIDE = {
    "vocab_size": 61,
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
    "intermediate_size": 37,
}
"""With 32 heads, because the default of StableLM is 32 key heads."""
BARE = {
    "gpt_neox": (WIDE, 2048),
    "phi": (WIDE, 2048),
    "stablelm": (WIDE, 4096),
    "starcoder2": (WIDE, 4096),
    "gptj": ({"vocab_size": 61, "n_embd": 512, "n_layer": 3, "n_head": 4}, 2048),
    "falcon": ({"vocab_size": 61}, 2048),
    "codegen": ({"n_embd": 512, "n_layer": 3, "n_head": 4}, 2048),
    "nemotron": (WIDE, 4096),
    "persimmon": (WIDE, 16384),
    "bloom": ({}, 2048),
    "mpt": ({}, 2048),
    "cohere": (WIDE, 8192),
    "cohere2": (WIDE, 8192),
}
"""The required sizes, and the default number of positions."""


@pytest.mark.parametrize(("name", "said", "positions"), [(name, *item) for name, item in BARE.items()])
def test_defaults_equal_those_of_the_original(tmp_path: Path, name: str, said: dict[str, Any], positions: int) -> None:
    """Missing keys have the defaults of the original class."""
    theirs = FAMILIES[name].config(**said, bos_token_id=None, eos_token_id=None)
    check_defaults(theirs, said, positions, tmp_path)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "longrope": (
        "gpt_neox",
        {"rope_parameters": {"rope_type": "longrope"}},
        "rope_type 'longrope' is not supported: .*known: default, linear, dynamic, llama3, yarn",
    ),
    "a part of nothing": ("phi", {"rope_parameters": {"partial_rotary_factor": 0}}, "must lie in \\(0, 1\\], got 0"),
    "a tied head with a bias": ("phi", {"tie_word_embeddings": True}, "tie_word_embeddings True is not supported"),
    "heads of their own size": ("phi", {"head_dim": 4}, "not understood: head_dim"),
    "a weight for each head": ("stablelm", {"qk_layernorm": True}, "qk_layernorm True is not supported"),
    "a weight for each head of Cohere": ("cohere", {"use_qk_norm": True}, "use_qk_norm True is not supported"),
    "no rotation": ("gptj", {"rotary": False}, "rotary False is not supported"),
    "all elements of all heads": ("gptj", {"rotary_dim": None}, "rotary_dim None is not supported"),
    "parts of two heads": ("codegen, two heads of a part", {"n_head": 6}, "n_head 6 is not divisible by 4"),
    "a part of all of Nemotron's heads": ("nemotron", {"rope_parameters": {"partial_rotary_factor": 2}}, "must lie in"),
    "an unknown key": ("persimmon", {"head_dim": 4}, "not understood: head_dim"),
    "a tied head": ("gptj", {"tie_word_embeddings": True}, "tie_word_embeddings True is not supported"),
    "biases of scores": ("falcon", {"alibi": True}, "alibi True is not supported"),
    "residuals of norms": (
        "bloom",
        {"apply_residual_connection_post_layernorm": True},
        "apply_residual_connection_post_layernorm True is not supported",
    ),
    "slices of projections": ("bloom", {"slow_but_exact": True}, "slow_but_exact True is not supported"),
    "learned positions": ("mpt", {"attn_config": {"alibi": False}}, "alibi False is not supported"),
    "steeper biases": ("mpt", {"attn_config": {"alibi_bias_max": 16}}, "alibi_bias_max 16 is not supported"),
    "clipped queries": ("mpt", {"attn_config": {"clip_qkv": 6.0}}, "clip_qkv 6.0 is not supported"),
    "norms of all queries": ("mpt", {"attn_config": {"qk_ln": True}}, "qk_ln True is not supported"),
    "one head of keys": (
        "mpt",
        {"attn_config": {"attn_type": "multiquery_attention"}},
        "attn_type 'multiquery_attention' is not supported",
    ),
    "biases of MPT": ("mpt", {"no_bias": False}, "no_bias False is not supported"),
    "scaled logits of MPT": ("mpt", {"logit_scale": 0.5}, "logit_scale 0.5 is not supported"),
    "wider layers of MPT": ("mpt", {"expansion_ratio": 2}, "expansion_ratio 2 is not supported"),
    "two norms of one": ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn 2 is not supported"),
    "groups in turn": ("falcon, groups", {"parallel_attn": False}, "needs parallel_attn True"),
    "a part of Falcon's heads": ("falcon", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    "no period": (
        "cohere2",
        {"layer_types": [], "sliding_window_pattern": 0},
        "sliding_window_pattern must be positive, got 0",
    ),
    "layers in chunks": ("cohere2", {"layer_types": ["chunked_attention"] * 3}, "layer_types must name 3 layers"),
    "another rotation": ("cohere2", {"position_embedding_type": "alibi"}, "position_embedding_type 'alibi' is not"),
    "another norm": ("starcoder2", {"norm_type": "rms_norm"}, "norm_type 'rms_norm' is not supported"),
    "a window in words": ("starcoder2", {"sliding_window": "4"}, "sliding_windows must be"),
    "an unknown activation": ("starcoder2", {"hidden_act": "mish"}, "hidden_act 'mish' is not supported"),
}


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED.values(), ids=REFUSED)
def test_unsupported_configuration_is_rejected(
    tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    check_refused(FAMILIES[name].make(), changes, message, tmp_path)


# Configurations at random.


FALCON_LACKS = ("hidden_act", "intermediate_size", "layer_norm_eps")


def _rope(rng: random.Random, *, parts: bool) -> dict[str, Any]:
    kind = rng.choice(("default", "linear", "llama3", "yarn"))
    own: dict[str, dict[str, Any]] = {
        "llama3": {
            "factor": 4.0,
            "low_freq_factor": 0.5,
            "high_freq_factor": 2.0,
            "original_max_position_embeddings": 11,
        },
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 11},
        "linear": {"factor": 2.5},
    }
    part = {"partial_rotary_factor": rng.choice((0.25, 0.5, 0.75, 1.0))} if parts else {}
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 50.0, **own.get(kind, {}), **part}}


def drawn(name: str, rng: random.Random) -> dict[str, Any]:
    """Draw the booleans and sizes of a family."""

    def flag() -> bool:
        return rng.choice((True, False))

    heads = rng.choice((4, 8))
    hidden = heads * rng.choice((8, 16))
    sizes = {
        "vocab_size": 61, "max_position_embeddings": 40, "hidden_size": hidden, "num_hidden_layers": rng.randint(1, 3),
        "num_attention_heads": heads, "intermediate_size": rng.randint(3, 40), "tie_word_embeddings": flag(),
        "hidden_act": rng.choice(("gelu", "gelu_new", "relu", "silu")), "layer_norm_eps": rng.choice((1e-6, 1e-2)),
    }  # fmt: skip
    plain = {key: value for key, value in sizes.items() if key != "layer_norm_eps"}
    groups = {"num_key_value_heads": rng.choice((1, 2, 4))}
    own: dict[str, Callable[[], dict[str, Any]]] = {
        "gpt_neox": lambda: {
            **sizes, **_rope(rng, parts=True), "use_parallel_residual": flag(), "attention_bias": flag(),
        },
        "phi": lambda: {
            **sizes, **groups, **_rope(rng, parts=True), "qk_layernorm": flag(), "tie_word_embeddings": False,
        },
        "stablelm": lambda: {
            **sizes, **groups, **_rope(rng, parts=True), "use_qkv_bias": flag(), "use_parallel_residual": flag(),
        },
        "starcoder2": lambda: {
            **plain, **groups, **_rope(rng, parts=False), "use_bias": flag(),
            "sliding_window": rng.choice((None, 2, 5)), "norm_epsilon": rng.choice((1e-6, 1e-2)),
        },
        "gptj": lambda: {
            "vocab_size": 61, "n_positions": 40, "n_embd": hidden, "n_layer": rng.randint(1, 3), "n_head": heads,
            "n_inner": rng.choice((None, 37)), "rotary_dim": rng.choice((2, 4, 8)),
            "activation_function": rng.choice(("gelu", "gelu_new", "relu")),
        },
        "codegen": lambda: {
            "vocab_size": 61, "n_positions": 40, "n_embd": hidden, "n_layer": rng.randint(1, 3), "n_head": heads,
            "n_inner": rng.choice((None, 37)), "rotary_dim": rng.choice((2, 4, 8)),
            "activation_function": rng.choice(("gelu", "gelu_new", "relu")),
        },
        "nemotron": lambda: {
            **plain, **groups, **_rope(rng, parts=True), "head_dim": rng.choice((None, 8, 16)),
            "attention_bias": flag(), "mlp_bias": flag(), "hidden_act": rng.choice(("relu2", "gelu")),
            "norm_eps": rng.choice((1e-6, 1e-2)),
        },
        "persimmon": lambda: {
            **sizes, **_rope(rng, parts=True), "qk_layernorm": flag(), "hidden_act": rng.choice(("relu2", "silu")),
        },
        "falcon": lambda: {
            **{key: value for key, value in sizes.items() if key not in FALCON_LACKS},
            **_rope(rng, parts=False), "bias": flag(), "multi_query": flag(), "activation": sizes["hidden_act"],
            **rng.choice((
                {"parallel_attn": flag()},
                {"new_decoder_architecture": True, "num_kv_heads": rng.choice((1, 2, heads)),
                 "num_ln_in_parallel_attn": rng.choice((None, 1, 2))},
            )),
        },
        "bloom": lambda: {
            "vocab_size": 61, "hidden_size": 96, "n_layer": rng.randint(1, 3),
            "n_head": rng.choice((1, 2, 3, 6, 12, 16)), "layer_norm_epsilon": rng.choice((1e-6, 1e-2)),
            "tie_word_embeddings": flag(),
        },
        "mpt": lambda: {
            "vocab_size": 61, "d_model": 96, "n_layers": rng.randint(1, 3), "n_heads": rng.choice((1, 2, 3, 6, 12, 16)),
            "max_seq_len": 40, "layer_norm_epsilon": rng.choice((1e-6, 1e-2)), "tie_word_embeddings": flag(),
            "attn_config": {"softmax_scale": rng.choice((None, 0.1, 1.0))},
        },
        "cohere": lambda: {
            **sizes, **groups, **_rope(rng, parts=False), "attention_bias": flag(), "logit_scale": rng.uniform(0.5, 2),
        },
        "cohere2": lambda: {
            **sizes, **groups, **_rope(rng, parts=False), "attention_bias": flag(), "logit_scale": 1.5,
            "sliding_window": rng.choice((2, 5)), "sliding_window_pattern": rng.randint(1, 3),
        },
    }  # fmt: skip
    return own[name]()


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", BASE)
def test_random_configurations_equal_the_original(tmp_path: Path, name: str, draws: int = 2) -> None:
    """Imported, and published back."""
    rng = random.Random(name)
    for number in range(draws):
        family = FAMILIES[name]
        options = drawn(name, rng)
        theirs = Family(family.model, family.config, options).make()
        folder = save(theirs, tmp_path / f"hub {number}")
        import_checkpoint(folder, tmp_path / f"ours {number}", verify=False)
        same(tmp_path / f"ours {number}", theirs, family.tolerance)
        export_checkpoint(
            tmp_path / f"ours {number}", tmp_path / f"back {number}", model_type=theirs.config.model_type, verify=False
        )
        again = AutoModelForCausalLM.from_pretrained(tmp_path / f"back {number}", attn_implementation="eager")
        # Falcon with one head of keys has two forms, which transformers computes in another order.
        assert_close(logits_of(again), logits_of(theirs), rtol=0, atol=1e-12)


# Generation.


@pytest.mark.slow
@pytest.mark.parametrize("name", BASE)
def test_generation_equals_transformers(tmp_path: Path, name: str) -> None:
    """After import, export and verification, greedy tokens of a ragged batch equal those of ``generate``."""
    theirs = FAMILIES[name].make(eos_token_id=None)
    sharpen(theirs)
    save(theirs, tmp_path / "hub")
    check_generation(theirs, tmp_path)
