"""Generation settings in the hub's layout: generation_config.json, formerly part of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["DEFAULTS", "chosen_values"]

DEFAULTS: Mapping[str, Any] = {
    "bad_words_ids": None, "begin_suppress_tokens": None, "constraints": None, "diversity_penalty": 0.0,
    "do_sample": False, "dola_layers": None, "early_stopping": False, "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None, "force_words_ids": None, "forced_bos_token_id": None,
    "forced_decoder_ids": None, "forced_eos_token_id": None, "guidance_scale": 1.0, "length_penalty": 1.0,
    "max_length": 20, "max_new_tokens": None, "max_time": None, "min_length": 0, "min_new_tokens": 0, "min_p": None,
    "no_repeat_ngram_size": 0, "num_beam_groups": 1, "num_beams": 1, "penalty_alpha": 0.0,
    "renormalize_logits": False, "repetition_penalty": 1.0, "sequence_bias": None, "stop_strings": None,
    "suppress_tokens": None, "temperature": 1.0, "token_healing": False, "top_h": None, "top_k": 50, "top_p": 1.0,
    "typical_p": 1.0, "watermarking_config": None,
}  # fmt: skip
"""The keys that affect the generated text, with the defaults of transformers for absent or null values."""


def chosen_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that affect generation and differ from their defaults."""
    return {
        key: values[key]
        for key, default in DEFAULTS.items()
        if values.get(key) is not None and values[key] not in (default, [])
    }
