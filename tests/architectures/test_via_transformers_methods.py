"""Functions and methods of transformers that zoo replaces: their values, and exports of classes that need them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.architectures.originals import save_random
from zoo.checkpoints import import_checkpoint
from zoo_export.export import export_model
from zoo_plugins.via_transformers.replaced import replace_methods

SIZES = {
    "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 40,
    "max_position_embeddings": 48,
}  # fmt: skip
SPARSE = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
REPLACED: dict[str, tuple[str, dict[str, Any]]] = {
    "DbrxForCausalLM": (
        "dbrx",
        {
            "vocab_size": 61, "d_model": 24, "n_heads": 4, "n_layers": 1, "max_seq_len": 48,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
            "ffn_config": {"hidden_size": 24, "ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "EsmForMaskedLM": ("esm", {**SIZES, "token_dropout": True, "mask_token_id": 9}),
    "FNetForMaskedLM": ("fnet", {**SIZES, "num_hidden_layers": 2}),
    "Gemma3nForCausalLM": (
        "gemma3n_text",
        {
            **SIZES, "num_key_value_heads": 2, "head_dim": 6, "num_hidden_layers": 2, "intermediate_size": [40, 40],
            "vocab_size_per_layer_input": 61, "hidden_size_per_layer_input": 8,
            "activation_sparsity_pattern": [0.95, 0.0], "layer_types": ["sliding_attention", "full_attention"],
            "num_kv_shared_layers": 0, "laurel_rank": 4, "altup_num_inputs": 2,
        },
    ),
    "JetMoeForCausalLM": ("jetmoe", {**SIZES, **SPARSE, "kv_channels": 6}),
    "LongcatFlashForCausalLM": (
        "longcat_flash",
        {
            "vocab_size": 61, "hidden_size": 24, "num_layers": 1, "num_attention_heads": 4, "ffn_hidden_size": 40,
            **LATENT, "head_dim": 4, "n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 3,
            "expert_ffn_hidden_size": 16, "num_hidden_layers": 2, "max_position_embeddings": 48,
        },
    ),
}  # fmt: skip
"""Classes with methods that are replaced."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **REPLACED,
    "CTRLLMHeadModel": (
        "ctrl", {"vocab_size": 61, "n_positions": 48, "n_embd": 24, "dff": 40, "n_layer": 2, "n_head": 4}
    ),
    "DeepseekV2ForCausalLM": (
        "deepseek_v2", {**SIZES, **LATENT, "head_dim": 4, "first_k_dense_replace": 1, "num_experts_per_tok": 2}
    ),
    "FlaubertWithLMHeadModel": ("flaubert", {"vocab_size": 61, "emb_dim": 24, "n_layers": 2, "n_heads": 4}),
    "Llama4ForCausalLM": (
        "llama4_text", {**SIZES, **SPARSE, "head_dim": 6, "intermediate_size_mlp": 40, "num_experts_per_tok": 1}
    ),
}  # fmt: skip
"""Classes that are exported with a function, a method or an argument of zoo's."""


def config_of(model_class: str) -> Any:
    model_type, own = MODELS[model_class]
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return transformers.AutoConfig.for_model(model_type, **own, **tokens)


@pytest.mark.parametrize("model_class", REPLACED)
def test_replaced_methods_have_the_same_values(model_class: str) -> None:
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(config_of(model_class)).double().eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(0.3 * torch.randn(parameter.shape, dtype=torch.float64))
    ids = torch.randint(3, 61, (3, 7))
    ids[0, :2] = 9  # masked, for ESM
    theirs = model(ids).logits
    replace_methods(model)
    assert any(name in vars(module) for module in model.modules() for name in ("forward", "_gaussian_topk"))
    torch.testing.assert_close(model(ids).logits, theirs, rtol=0, atol=1e-12)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("model_class", [name for name in MODELS if name not in REPLACED])
def test_imported_model_equals_the_original(tmp_path: Path, model_class: str) -> None:
    save_random(model_class, config_of(model_class), tmp_path / "hub")
    assert import_checkpoint(tmp_path / "hub", tmp_path / "ours").comparison.exact < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("model_class", MODELS)
def test_export_is_verified(tmp_path: Path, model_class: str) -> None:
    save_random(model_class, config_of(model_class), tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    assert export_model(tmp_path / "ours").passed
