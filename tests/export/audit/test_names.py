"""Names that other tools give to inputs, outputs and caches."""

from __future__ import annotations

from tests.rows import each_row
from zoo_export.audit.names import cache_key, known_input, known_output

SELF, CROSS = ("1", "key", "self"), ("1", "cross", "key")
CACHES = [
    ("past_key_values.1.key", SELF),  # optimum, onnxruntime-genai, mobius
    ("present.1.key", SELF),
    ("past_key_values.1.decoder.key", SELF),  # optimum
    ("present.1.encoder.key", CROSS),
    ("past_key_values.1.cross.key", CROSS),  # mobius
    ("input.past_key_values.layers.1.keys", SELF),  # transformers.exporters
    ("past_key_values.layers.1.keys", SELF),
    ("output.past_key_values.cross_attention_cache.layers.1.keys", CROSS),
    ("past_key_self_1", SELF),  # the converters of ONNX Runtime
    ("present_key_cross_1", CROSS),
    ("past_1", ("1", "self")),
    ("present_1", ("1", "self")),
    ("past_conv.1", ("1", "conv", "self")),
    ("past_sequence_length", None),
    ("attention_mask", None),
    ("logits", None),
]


@each_row(("name", "key"), CACHES)
def test_caches(name: str, key: tuple[str, ...] | None) -> None:
    assert cache_key(name) == key


@each_row(
    ("name", "declared", "ours"),
    [
        ("input_ids", ("input_ids", "attention_mask"), "input_ids"),
        ("input_ids", ("decoder_input_ids", "attention_mask"), "decoder_input_ids"),
        ("encoder_attention_mask", ("decoder_input_ids", "attention_mask"), "attention_mask"),
        ("encoder_outputs.last_hidden_state", ("decoder_input_ids",), "encoder_hidden_states"),
        ("encoder_hidden_states", ("decoder_input_ids",), "encoder_hidden_states"),
        ("position_ids", ("input_ids",), "position_ids"),
        ("num_logits_to_keep", ("input_ids",), "logits_to_keep"),
        ("token_type_ids", ("input_ids",), "token_type_ids"),
        ("pixel_values", ("pixel_values",), "pixel_values"),
        ("x", ("input_ids",), None),
    ],
)
def test_inputs(name: str, declared: tuple[str, ...], ours: str | None) -> None:
    assert known_input(name, declared) == ours


@each_row(
    ("name", "declared", "ours"),
    [
        ("logits", ("logits",), "logits"),
        ("token_embeddings", ("sentence_embedding", "last_hidden_state"), "last_hidden_state"),
        ("last_hidden_state", ("sentence_embedding", "features"), "features"),
        ("sentence_embedding", ("sentence_embedding",), "sentence_embedding"),
        ("hidden_states.3", ("last_hidden_state",), None),
    ],
)
def test_outputs(name: str, declared: tuple[str, ...], ours: str | None) -> None:
    assert known_output(name, declared) == ours
