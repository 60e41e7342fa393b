"""Import each family of checkpoints, compare it with the original, export it to ONNX and back, and print a table.

    python benchmarks/checkpoints.py [FAMILY ...]
    python benchmarks/checkpoints.py --tasks

With --tasks, checkpoints of every class of a family become models of every task, and are compared with transformers'
Auto classes on the same files; the table has the largest difference of outputs in float64 over the classes.

Each checkpoint is a small model of transformers with random weights and unusual sizes. Errors are relative to the
largest output: the difference of zoo's and the original model in float64, and the error of each in float32 with respect
to the original in float64.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from zoo.artifact import ModelDirectory
from zoo.checkpoints import export_checkpoint, import_checkpoint
from zoo.errors import ZooError
from zoo.models.count import parameter_count
from zoo_export import export_model

_ENCODER = {
    "vocab_size": 61, "max_position_embeddings": 40, "hidden_size": 30, "num_hidden_layers": 2,
    "num_attention_heads": 3, "intermediate_size": 37, "hidden_act": "relu", "layer_norm_eps": 1e-3,
}  # fmt: skip
_DECODER = {
    "vocab_size": 61, "max_position_embeddings": 40, "hidden_size": 30, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8, "intermediate_size": 37, "rms_norm_eps": 1e-3,
    "hidden_act": "gelu", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
_LATENT = {
    **{key: value for key, value in _DECODER.items() if key != "head_dim"}, "num_attention_heads": 3,
    "num_key_value_heads": 3, "q_lora_rank": None, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 7, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 9, "n_group": 4,
    "topk_group": 2, "first_k_dense_replace": 1,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "mscale": 0.8, "mscale_all_dim": 0.5,
                        "original_max_position_embeddings": 10},
}  # fmt: skip
_SEQ2SEQ = {
    "vocab_size": 61, "max_position_embeddings": 40, "d_model": 30, "encoder_layers": 2, "decoder_layers": 3,
    "encoder_attention_heads": 3, "decoder_attention_heads": 3, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37,
    "activation_function": "relu", "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
_T5 = {
    "vocab_size": 61, "d_model": 30, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 3,
    "layer_norm_epsilon": 1e-3, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20,
}  # fmt: skip
_VISION = {
    "hidden_size": 30, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 37, "hidden_act": "relu",
    "layer_norm_eps": 1e-3, "image_size": 24, "patch_size": 8, "num_channels": 2, "num_labels": 5,
}  # fmt: skip
_STAGES = {
    "num_channels": 2, "hidden_sizes": [8, 12, 20], "depths": [2, 1, 1], "num_labels": 5, "hidden_act": "silu",
}  # fmt: skip
_WINDOWS = {
    "num_channels": 2, "image_size": 23, "patch_size": 2, "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 3],
    "window_size": 4, "mlp_ratio": 2.5, "num_labels": 5, "hidden_act": "silu", "layer_norm_eps": 1e-3,
}  # fmt: skip
_DETECTOR = {
    "num_queries": 7, "d_model": 24, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 3,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 37, "decoder_ffn_dim": 29, "activation_function": "silu",
    "num_labels": 5, "use_timm_backbone": False,
    "backbone_config": {**_STAGES, "embedding_size": 6, "out_features": ["stage3"], "model_type": "resnet"},
}  # fmt: skip
_SOUND = {
    "vocab_size": 11, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 37,
    "conv_dim": [8, 12], "conv_kernel": [10, 3], "conv_stride": [5, 2], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 7, "num_conv_pos_embedding_groups": 4, "hidden_act": "relu",
}  # fmt: skip
_TEXTS = {**_ENCODER, "hidden_size": 24, "max_position_embeddings": 16, "eos_token_id": 5}
_IMAGES = {key: value for key, value in _VISION.items() if key != "num_labels"}


_NEOX = {
    "vocab_size": 61, "max_position_embeddings": 40, "hidden_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 6, "intermediate_size": 37, "layer_norm_eps": 1e-3, "hidden_act": "gelu", "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
_GEMMA = {**_DECODER, "sliding_window": 7, "query_pre_attn_scalar": 11}

_DINO = {key: value for key, value in _VISION.items() if key != "intermediate_size"} | {"mlp_ratio": 2}


@dataclass(frozen=True)
class Family:
    """A class of transformers and a configuration that differs from its defaults."""

    cls: str
    config: dict[str, Any]


_HYBRID = {
    "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 4, "intermediate_size": 37, "num_attention_heads": 6,
    "num_key_value_heads": 3, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_key_head_dim": 5, "linear_value_head_dim": 4, "linear_conv_kernel_dim": 3, "rms_norm_eps": 1e-3,
    "max_position_embeddings": 90, "bos_token_id": 1, "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
FAMILIES = {
    "BERT": Family("BertForMaskedLM", _ENCODER),
    "RoBERTa": Family("RobertaForMaskedLM", {**_ENCODER, "pad_token_id": 3}),
    "DistilBERT": Family(
        "DistilBertForMaskedLM",
        {"vocab_size": 61, "max_position_embeddings": 40, "dim": 30, "n_layers": 2, "n_heads": 3, "hidden_dim": 37},
    ),
    "ALBERT": Family("AlbertForMaskedLM", {**_ENCODER, "embedding_size": 12}),
    "ELECTRA": Family("ElectraForMaskedLM", {**_ENCODER, "embedding_size": 12}),
    "MPNet": Family("MPNetForMaskedLM", {**_ENCODER, "pad_token_id": 1}),
    "Nomic BERT": Family(
        "NomicBertForMaskedLM",
        {**_ENCODER, "hidden_act": "gelu", "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
    ),
    "RoFormer": Family("RoFormerForMaskedLM", {**_ENCODER, "embedding_size": 12}),
    "DeBERTa-v2": Family(
        "DebertaV2ForMaskedLM",
        {**_ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8,
         "share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False},
    ),
    "ESM-2": Family(
        "EsmForMaskedLM",
        {**_ENCODER, "position_embedding_type": "rotary", "token_dropout": True, "mask_token_id": 9, "pad_token_id": 1},
    ),
    "Longformer": Family("LongformerForMaskedLM", {**_ENCODER, "pad_token_id": 3, "attention_window": 8}),
    "ModernBERT": Family(
        "ModernBertForMaskedLM",
        {"vocab_size": 61, "max_position_embeddings": 40, "hidden_size": 30, "num_hidden_layers": 3,
         "num_attention_heads": 3, "intermediate_size": 37, "norm_eps": 1e-3, "local_attention": 8, "pad_token_id": 0},
    ),
    "GPT-1": Family(
        "OpenAIGPTLMHeadModel",
        {"vocab_size": 61, "n_positions": 40, "n_embd": 30, "n_layer": 2, "n_head": 3, "layer_norm_epsilon": 1e-3,
         "afn": "silu", "bos_token_id": 1, "eos_token_id": 2},
    ),
    "GPT-2": Family(
        "GPT2LMHeadModel",
        {"vocab_size": 61, "n_positions": 40, "n_embd": 30, "n_layer": 2, "n_head": 3, "n_inner": 37,
         "layer_norm_epsilon": 1e-3, "activation_function": "relu", "bos_token_id": 1, "eos_token_id": 2},
    ),
    "GPT-Neo": Family(
        "GPTNeoForCausalLM",
        {"vocab_size": 61, "max_position_embeddings": 40, "hidden_size": 30, "num_layers": 4, "num_heads": 3,
         "intermediate_size": 37, "window_size": 5, "attention_types": [[["global", "local"], 2]],
         "layer_norm_epsilon": 1e-3, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "OPT": Family(
        "OPTForCausalLM",
        {"vocab_size": 61, "max_position_embeddings": 40, "hidden_size": 30, "num_hidden_layers": 2,
         "num_attention_heads": 3, "ffn_dim": 37, "word_embed_proj_dim": 12, "do_layer_norm_before": False,
         "activation_function": "gelu", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    ),
    "Llama": Family("LlamaForCausalLM", {**_DECODER, "attention_bias": True}),
    "Mistral": Family("MistralForCausalLM", {**_DECODER, "sliding_window": 7}),
    "Qwen 2": Family("Qwen2ForCausalLM", _DECODER),
    "Qwen 3": Family("Qwen3ForCausalLM", _DECODER),
    "Gemma": Family("GemmaForCausalLM", _DECODER),
    "Gemma 2": Family("Gemma2ForCausalLM", {**_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 9.0}),
    "Gemma 3": Family("Gemma3ForCausalLM", _GEMMA),
    "Phi-3": Family(
        "Phi3ForCausalLM", {**_DECODER, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}
    ),
    "SmolLM3": Family("SmolLM3ForCausalLM", {**_DECODER, "no_rope_layer_interval": 2}),
    "Granite": Family(
        "GraniteForCausalLM",
        {**_DECODER, "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "logits_scaling": 7.0,
         "attention_multiplier": 0.2},
    ),
    "OLMo 2": Family("Olmo2ForCausalLM", _DECODER),
    "OLMo 3": Family("Olmo3ForCausalLM", {**_DECODER, "sliding_window": 7}),
    "EXAONE 4": Family("Exaone4ForCausalLM", {**_DECODER, "sliding_window": 7, "sliding_window_pattern": 2}),
    "GLM-4": Family("GlmForCausalLM", _DECODER),
    "GLM-4-0414": Family("Glm4ForCausalLM", _DECODER),
    "ERNIE 4.5": Family("Ernie4_5ForCausalLM", {**_DECODER, "use_bias": True}),
    "Helium": Family("HeliumForCausalLM", {**_DECODER, "hidden_size": 48}),
    "Seed-OSS": Family("SeedOssForCausalLM", {**_DECODER, "attention_out_bias": True}),
    "Ministral": Family("MinistralForCausalLM", {**_DECODER, "sliding_window": 7}),
    "CWM": Family("CwmForCausalLM", {**_DECODER, "hidden_size": 48, "sliding_window": 7}),
    "VaultGemma": Family(
        "VaultGemmaForCausalLM", {**_GEMMA, "hidden_size": 48, "attn_logit_softcapping": 5.0}
    ),
    "GPT-NeoX": Family("GPTNeoXForCausalLM", _NEOX),
    "Phi": Family("PhiForCausalLM", {**_NEOX, "num_key_value_heads": 3, "qk_layernorm": True}),
    "GPT-J": Family(
        "GPTJForCausalLM",
        {"vocab_size": 61, "n_positions": 40, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_inner": 37, "rotary_dim": 4,
         "layer_norm_epsilon": 1e-3, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "Falcon": Family(
        "FalconForCausalLM",
        {"vocab_size": 61, "max_position_embeddings": 40, "hidden_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 6, "num_kv_heads": 3, "new_decoder_architecture": True, "ffn_hidden_size": 37,
         "layer_norm_epsilon": 1e-3, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "StableLM": Family("StableLmForCausalLM", {**_NEOX, "num_key_value_heads": 3, "use_qkv_bias": True}),
    "StarCoder 2": Family(
        "Starcoder2ForCausalLM",
        {**{key: value for key, value in _NEOX.items() if key != "layer_norm_eps"}, "num_key_value_heads": 3,
         "sliding_window": 7, "norm_epsilon": 1e-3},
    ),
    "Cohere": Family("CohereForCausalLM", {**_NEOX, "num_key_value_heads": 3, "logit_scale": 0.5}),
    "Cohere 2": Family(
        "Cohere2ForCausalLM",
        {**_NEOX, "num_key_value_heads": 3, "logit_scale": 0.5, "sliding_window": 7, "sliding_window_pattern": 2},
    ),
    "CodeGen": Family(
        "CodeGenForCausalLM",
        {"vocab_size": 61, "n_positions": 40, "n_embd": 48, "n_layer": 2, "n_head": 8, "n_inner": 37, "rotary_dim": 4,
         "layer_norm_epsilon": 1e-3, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "BLOOM": Family(
        "BloomForCausalLM",
        {"vocab_size": 61, "hidden_size": 48, "n_layer": 2, "n_head": 6, "layer_norm_epsilon": 1e-3, "bos_token_id": 1,
         "eos_token_id": 2, "pad_token_id": 0},
    ),
    "MPT": Family(
        "MptForCausalLM",
        {"vocab_size": 61, "max_seq_len": 40, "d_model": 48, "n_layers": 2, "n_heads": 12, "layer_norm_epsilon": 1e-3,
         "attn_config": {"softmax_scale": 0.4}, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "Nemotron": Family(
        "NemotronForCausalLM",
        {**{key: value for key, value in _NEOX.items() if key not in ("layer_norm_eps", "hidden_act")},
         "num_key_value_heads": 3, "head_dim": 12, "norm_eps": 1e-3},
    ),
    "Persimmon": Family(
        "PersimmonForCausalLM", {key: value for key, value in _NEOX.items() if key != "hidden_act"}
    ),
    "Mixtral": Family("MixtralForCausalLM", {**_DECODER, "num_local_experts": 5, "num_experts_per_tok": 3}),
    "OLMoE": Family(
        "OlmoeForCausalLM",
        {**{key: value for key, value in _DECODER.items() if key != "head_dim"}, "num_attention_heads": 3,
         "num_experts": 7, "num_experts_per_tok": 3},
    ),
    "Qwen 3 MoE": Family(
        "Qwen3MoeForCausalLM",
        {**_DECODER, "moe_intermediate_size": 14, "num_experts": 6, "num_experts_per_tok": 2, "mlp_only_layers": [1],
         "norm_topk_prob": True},
    ),
    "gpt-oss": Family(
        "GptOssForCausalLM",
        {**_DECODER, "sliding_window": 7, "num_local_experts": 5, "num_experts_per_tok": 3},
    ),
    "DeepSeek-V2": Family(
        "DeepseekV2ForCausalLM",
        {**_LATENT, "topk_method": "group_limited_greedy", "n_shared_experts": 1, "routed_scaling_factor": 1.5},
    ),
    "DeepSeek-V3": Family("DeepseekV3ForCausalLM", {**_LATENT, "q_lora_rank": 12}),
    "Mamba-2": Family(
        "Mamba2ForCausalLM",
        {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 3, "num_heads": 6, "head_dim": 8, "state_size": 5,
         "n_groups": 3, "conv_kernel": 3, "layer_norm_epsilon": 1e-3, "time_step_limit": (0.05, 0.4),
         "eos_token_id": 2},
    ),
    "Qwen3.5": Family("Qwen3_5ForCausalLM", _HYBRID),
    "Qwen3-Next": Family(
        "Qwen3NextForCausalLM",
        {
            **_HYBRID, "num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 9,
            "shared_expert_intermediate_size": 11,
        },
    ),
    "LFM2": Family(
        "Lfm2ForCausalLM",
        {"vocab_size": 61, "max_position_embeddings": 40, "hidden_size": 24, "num_hidden_layers": 3,
         "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 37, "block_auto_adjust_ff_dim": False,
         "layer_types": ["conv", "full_attention", "conv"], "norm_eps": 1e-3, "eos_token_id": 2, "conv_L_cache": 4},
    ),
    "Granite 4": Family(
        "GraniteMoeHybridForCausalLM",
        {"vocab_size": 61, "max_position_embeddings": 40, "hidden_size": 24, "num_hidden_layers": 3,
         "num_attention_heads": 6, "num_key_value_heads": 3, "shared_intermediate_size": 37, "num_local_experts": 0,
         "num_experts_per_tok": 0, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
         "mamba_n_heads": 6, "mamba_n_groups": 2, "mamba_d_state": 5, "mamba_d_conv": 3, "rms_norm_eps": 1e-3,
         "attention_multiplier": 0.3, "residual_multiplier": 0.4, "logits_scaling": 2.5, "eos_token_id": 2},
    ),
    "T5": Family("T5ForConditionalGeneration", _T5),
    "T5 v1.1": Family(
        "T5ForConditionalGeneration", {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    ),
    "BART": Family("BartForConditionalGeneration", {**_SEQ2SEQ, "scale_embedding": True}),
    "M2M100": Family("M2M100ForConditionalGeneration", {**_SEQ2SEQ, "activation_function": "gelu"}),
    "Marian": Family(
        "MarianMTModel", {**_SEQ2SEQ, "activation_function": "swish", "scale_embedding": True, "forced_eos_token_id": 2}
    ),
    "PEGASUS": Family("PegasusForConditionalGeneration", {**_SEQ2SEQ, "scale_embedding": True}),
    "Blenderbot": Family("BlenderbotForConditionalGeneration", {**_SEQ2SEQ, "scale_embedding": True}),
    "Whisper": Family(
        "WhisperForConditionalGeneration",
        {"vocab_size": 61, "num_mel_bins": 20, "d_model": 24, "encoder_layers": 2, "decoder_layers": 3,
         "encoder_attention_heads": 4, "decoder_attention_heads": 3, "encoder_ffn_dim": 40, "decoder_ffn_dim": 36,
         "max_source_positions": 25, "max_target_positions": 32, "activation_function": "relu", "bos_token_id": 49,
         "eos_token_id": 49, "pad_token_id": 49, "decoder_start_token_id": 50, "suppress_tokens": None,
         "begin_suppress_tokens": None},
    ),
    "wav2vec 2.0": Family("Wav2Vec2ForCTC", {**_SOUND, "feat_extract_norm": "layer", "do_stable_layer_norm": True}),
    "HuBERT": Family("HubertForCTC", _SOUND),
    "ViT": Family("ViTForImageClassification", _VISION),
    "DINOv2": Family("Dinov2ForImageClassification", {**_DINO, "use_swiglu_ffn": True}),
    "DINOv2 with registers": Family(
        "Dinov2WithRegistersForImageClassification", {**_DINO, "num_register_tokens": 3}
    ),
    "DINOv3": Family(
        "DINOv3ViTModel",
        {**_IMAGES, "hidden_size": 24, "num_register_tokens": 3, "use_gated_mlp": True, "rope_theta": 20.0},
    ),
    "DeiT": Family("DeiTForImageClassificationWithTeacher", _VISION),
    "ResNet": Family("ResNetForImageClassification", {**_STAGES, "embedding_size": 6, "hidden_act": "gelu"}),
    "ConvNeXt": Family("ConvNextForImageClassification", {**_STAGES, "num_stages": 3, "patch_size": 3}),
    "ConvNeXt V2": Family("ConvNextV2ForImageClassification", {**_STAGES, "num_stages": 3, "patch_size": 3}),
    "Swin": Family("SwinForImageClassification", _WINDOWS),
    "Swin V2": Family(
        "Swinv2ForImageClassification", {**_WINDOWS, "image_size": 24, "pretrained_window_sizes": [3, 0]}
    ),
    "SegFormer": Family(
        "SegformerForSemanticSegmentation",
        {
            **_STAGES, "num_encoder_blocks": 3, "num_attention_heads": [2, 3, 4], "patch_sizes": [7, 3, 3],
            "strides": [16, 4, 2], "sr_ratios": [4, 2, 1], "mlp_ratios": [2, 3, 4], "decoder_hidden_size": 14,
        },
    ),
    "DETR": Family("DetrForObjectDetection", _DETECTOR),
    "Table Transformer": Family("TableTransformerForObjectDetection", {**_DETECTOR, "auxiliary_loss": True}),
    "CLIP": Family("CLIPModel", {"text_config": _TEXTS, "vision_config": _IMAGES, "projection_dim": 14}),
    "SigLIP": Family("SiglipModel", {"text_config": {**_TEXTS, "projection_size": 30}, "vision_config": _IMAGES}),
    "LLaVA": Family(
        "LlavaForConditionalGeneration",
        {
            "text_config": {**_DECODER, "model_type": "llama"},
            "vision_config": {**_IMAGES, "model_type": "clip_vision_model"},
            "image_token_index": 5, "vision_feature_layer": [-2, -1], "projector_hidden_act": "relu",
        },
    ),
}  # fmt: skip
_COLUMNS = ("family", "class", "parameters", "float64", "float32", "the original's", "ONNX verified", "round trip")


def main() -> None:
    """Measure the named families, or all, and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("families", nargs="*", choices=[*FAMILIES, []], metavar="FAMILY")
    parser.add_argument("--tasks", action="store_true", help="Print the table of tasks.")
    options = parser.parse_args()
    names = options.families or list(FAMILIES)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if options.tasks:
        print_tasks()
        return
    print("| " + " | ".join(_COLUMNS) + " |")
    print("| --- | --- |" + " ---: |" * 6)
    refused = 0
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            try:
                cells = measure(FAMILIES[name], Path(folder))
            except ZooError as error:
                cells, refused = [f"`{FAMILIES[name].cls}`", f"refused: {error.what}", *[""] * 5], refused + 1
            print("| " + " | ".join((name, *cells)) + " |", flush=True)
    raise SystemExit(refused > 0)


def print_tasks() -> None:
    """Print the table of families and tasks, one for each kind of model."""
    sys.path.insert(0, str(Path(__file__).parents[1]))  # the families are defined in the tests
    from tests.checkpoints import moves

    for kind, tasks in moves.TASKS.items():
        print("| family | classes | " + " | ".join(tasks) + " |")
        print("| --- | ---: |" + " ---: |" * len(tasks))
        for name, family in moves.FAMILIES.items():
            if family.tasks != kind:
                continue
            largest = dict.fromkeys(tasks, 0.0)
            for cls in family.classes:
                with tempfile.TemporaryDirectory() as folder:
                    moves.make(family, cls, Path(folder) / "hub")
                    for task in tasks:
                        move = moves.measure(family, Path(folder) / "hub", task, Path(folder) / task)
                        if move.unequal or move.new != move.theirs:
                            raise SystemExit(f"{name} {cls} for {task}: {move}")
                        largest[task] = max(largest[task], move.difference)
            cells = [f"{value:.1e}" for value in largest.values()]
            print("| " + " | ".join((name, str(len(family.classes)), *cells)) + " |", flush=True)
        print()


def measure(family: Family, folder: Path) -> list[str]:
    """Return the cells of one row."""
    cls = getattr(transformers, family.cls)
    torch.manual_seed(0)
    model = cls(cls.config_class(**family.config)).eval()
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]  # not tables of sinusoids
    model.requires_grad_(False)
    for parameter in learned:
        parameter.copy_(0.3 * torch.randn(parameter.shape))
    model.save_pretrained(folder / "hub")
    imported = import_checkpoint(folder / "hub", folder / "ours", verify=True)
    compared = imported.comparison
    report = export_model(folder / "ours")
    points = len(report.evidence["grid"]["points"])
    return [
        f"`{family.cls}`",
        f"{parameter_count(imported.spec):,}",
        f"{compared.exact:.1e}",
        f"{compared.error:.1e}",
        f"{compared.original_error:.1e}",
        f"{points} points" if report.passed else "no",
        round_trip(folder),
    ]


def round_trip(folder: Path) -> str:
    """Export to the hub's layout and import again; describe whether configuration and weights survive unchanged."""
    try:
        made = export_checkpoint(folder / "ours", folder / "out", verify=True)
    except ZooError as error:
        return f"no: {error}"
    import_checkpoint(folder / "out", folder / "again", verify=False)
    first, second = (ModelDirectory.open(folder / name) for name in ("ours", "again"))
    same = first.spec.config == second.spec.config and first.weight_digests() == second.weight_digests()
    return f"bit for bit, as {made.model_type}" if same else "no"


if __name__ == "__main__":
    main()
