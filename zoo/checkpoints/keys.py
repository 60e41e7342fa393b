"""Keys of config.json that no layout reads, and the refusal of others."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from zoo.artifact.generation_config import DEFAULTS
from zoo.errors import UsageError, Wording

__all__ = ["EMPTY_KEYS", "INERT", "INERT_AT", "require_known"]

INERT = (
    *DEFAULTS, "*_layerdrop", "*_pdrop", "*dropout", "*dropout_prob", "_attn_implementation*", "_commit_hash",
    "_flash_attn_2_enabled", "_name_or_path", "_num_labels", "add_bias_logits", "architectures", "attn_implementation",
    "auto_map", "bos_token_id", "chunk_size_feed_forward", "classifier_from_token", "cls_token_id",
    "decoder_start_token_id", "device_map", "directionality", "dtype", "eos_token_id", "eos_token_ids",
    "finetuning_task", "gradient_checkpointing", "id2label", "init_std", "initializer_factor", "initializer_range",
    "is_encoder_decoder", "is_llama_config", "is_matryoshka", "is_original_qwen3_reranker", "label2id", "language",
    "low_cpu_mem_usage", "mask_token_id", "matryoshka_dimensions", "max_seq_length", "max_sequence_length",
    "model_max_length", "model_name", "model_type", "n_special", "name_or_path", "normalize_embedding", "num_labels",
    "num_return_sequences", "output_attentions", "output_hidden_states", "output_past", "output_scores",
    "pad_token_id", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head",
    "pooler_type",
    "predict_special_tokens", "prefix", "pretraining_tp", "problem_type", "remove_invalid_values", "replacing_rate",
    "return_dict", "return_dict_in_generate", "sbert_ce_default_activation_function", "sentence_transformers",
    "sep_token_id", "seq_length", "student_decoder_layers", "student_encoder_layers", "summary_*",
    "task_specific_params", "tf_legacy_loss", "tokenizer_class", "tokenizer_name", "torch_dtype", "torchscript",
    "transformers.js_config", "transformers_version", "trust_remote_code", "unk_token_id", "unsloth_fixed",
    "unsloth_version", "use_bfloat16", "use_cache", "use_return_dict", "use_safetensors",
)  # fmt: skip
"""Keys that do not affect what a model computes, in any family; ``*`` matches anything. Dropout acts in training."""
INERT_AT: Mapping[str, tuple[Any, ...]] = {
    "adapters": ({},),
    "add_cross_attention": (False,),
    "alibi": (False,),
    "attention_bias": (False,),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "compression_config": ({},),
    "cross_attention_hidden_size": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
    "is_decoder": (False,),
    "lm_head_bias": (False,),
    "logits_scaling": (1,),
    "mlp_bias": (False,),
    "num_experts": (0,),
    "parallel_attn": (False,),
    "partial_rotary_factor": (1,),
    "qk_layernorm": (False,),
    "qk_norm": (False,),
    "quantization": ({},),
    "quantization_config": ({},),
    "residual_multiplier": (1,),
    "rope_interleaved": (False,),
    "rope_ratio": (1,),
    "rope_scaling": (),
    "sliding_window": (),
    "tie_encoder_decoder": (False,),
    "use_mrope": (False,),
    "use_parallel_residual": (False,),
    "use_qk_norm": (False,),
    "use_sliding_window": (False,),
}
"""Keys that do not affect what a model computes at these values or null, in families that do not read them."""
EMPTY_KEYS: Mapping[str, Any] = {"pruned_heads": {}}
"""Keys of old files that must be empty, in any family."""


def require_known(hub: Mapping[str, Any], read: Collection[str], ignored: Sequence[str], where: object) -> None:
    """Raise :class:`UsageError` for keys that are neither read, nor ignored in any family, nor match ``ignored``."""
    patterns = (*INERT, *ignored)
    unknown = [key for key in hub if key not in read and not any(fnmatchcase(key, pattern) for pattern in patterns)]
    strange = [key for key in unknown if not (key in INERT_AT and hub[key] in (None, *INERT_AT[key]))]
    if strange:
        named = [f"{key} {hub[key]!r:.40}" if key in INERT_AT else key for key in strange]
        ways = f"allow_keys={strange}", " ".join(f"--allow-key {key}" for key in strange)
        which = "they do" if len(strange) > 1 else "it does"
        remedy = Wording(*(f"pass {way} if {which} not change the model" for way in ways))
        raise UsageError(f"not understood: {', '.join(named)}", where, remedy)
