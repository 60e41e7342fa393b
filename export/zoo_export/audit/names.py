"""Names of inputs and outputs in the graphs of other tools.

optimum, transformers.exporters, onnxruntime-genai, mobius, the converters of ONNX Runtime and sentence-transformers
name the same things differently. Each name is mapped to that in the declared graph, or to one of :data:`COMPUTED`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from types import MappingProxyType

__all__ = [
    "CACHE_POSITION",
    "COMPUTED",
    "ENCODER_STATES",
    "LOGITS_TO_KEEP",
    "POSITIONS",
    "TOKEN_TYPES",
    "USE_CACHE",
    "cache_key",
    "is_cross",
    "known_input",
    "known_output",
]

POSITIONS, CACHE_POSITION, USE_CACHE = "position_ids", "cache_position", "use_cache_branch"
ENCODER_STATES, LOGITS_TO_KEEP, TOKEN_TYPES = "encoder_hidden_states", "logits_to_keep", "token_type_ids"
COMPUTED: Mapping[str, str] = MappingProxyType(
    {
        POSITIONS: "(decoder_)?position_ids",
        CACHE_POSITION: "cache_position",
        USE_CACHE: "use_cache_branch",
        ENCODER_STATES: r"encoder_(hidden_states?|outputs?|last_hidden_state)(\.last_hidden_state|\.0)?",
        LOGITS_TO_KEEP: "(num_)?logits_to_keep",
        TOKEN_TYPES: "token_type_ids|segment_ids|token_types?",
    }
)
"""Inputs that are computed from the declared ones, and their names as regular expressions."""
_INPUTS: Mapping[str, str] = {
    "input_ids": "input_ids|tokens",
    "decoder_input_ids": "decoder_input_ids|input_ids",
    "attention_mask": "attention_mask|(encoder|input|padding)_(attention_)?mask",
    "decoder_attention_mask": "decoder_attention_mask|attention_mask",
    "pixel_values": "pixel_values|images?",
    "input_features": "input_features|audio_features|mel(_features)?",
    "waveform": "waveform|input_values|audio",
}
_OUTPUTS: Mapping[str, str] = {
    "logits": "(lm_|output_)?logits",
    "last_hidden_state": "last_hidden_state|hidden_states|token_embeddings|encoder_(hidden_states?|outputs?)",
    "features": "last_hidden_state|hidden_states|token_embeddings",
    "sentence_embedding": "sentence_embeddings?",
    "pooler_output": "pooler_output|pooled_output",
    "text_embeds": "text_embeds|text_embeddings",
    "image_embeds": "image_embeds|image_embeddings",
}
_CACHE = re.compile(r"(?:(?:input|output)\.)?(?:past|present)(?:_key_values)?(?=[._])")
"""How the name of an input or output begins that holds what a decoder keeps of earlier tokens."""
_WORDS = {"keys": "key", "values": "value", "decoder": "self", "encoder": "cross"}

Key = tuple[str, ...]
"""The sorted words of the name of a cache's tensor that distinguish it from the other tensors of the cache."""


def cache_key(name: str) -> Key | None:
    """Return the key by which an input of a cache and the output that follows it are paired; None for other names.

    >>> cache_key("past_key_values.3.decoder.key") == cache_key("present_key_self_3")
    True
    >>> cache_key("input.past_key_values.layers.0.keys"), cache_key("input_ids")
    (('0', 'key', 'self'), None)
    """
    start = _CACHE.match(name)
    rest = re.sub("_(attention_)?cache", "", name[start.end() :]) if start else ""
    words = {_WORDS.get(word, word) for word in re.split(r"[._]+", rest)} - {"", "layer", "layers", "attention"}
    if not any(word.isdigit() for word in words):
        return None
    return tuple(sorted(words if words & {"self", "cross"} else {*words, "self"}))


def is_cross(key: Key) -> bool:
    """Whether a tensor of a cache holds keys or values of the encoder, which do not change from call to call."""
    return "cross" in key


def known_input(name: str, declared: Collection[str]) -> str | None:
    """Return the declared input, or the one of :data:`COMPUTED`, that an input stands for, or None."""
    return name if name in declared else _first(name, _INPUTS, declared) or _first(name, COMPUTED, COMPUTED)


def known_output(name: str, declared: Collection[str]) -> str | None:
    """Return the declared output that an output stands for, or None."""
    return name if name in declared else _first(name, _OUTPUTS, declared)


def _first(name: str, patterns: Mapping[str, str], known: Collection[str]) -> str | None:
    return next((ours for ours, pattern in patterns.items() if ours in known and re.fullmatch(pattern, name)), None)
