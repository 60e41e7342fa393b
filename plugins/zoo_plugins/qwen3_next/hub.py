"""Checkpoints of Qwen3.5's text decoder and of Qwen3-Next in the hub's layout: two groupings of the same tensors.

Qwen3.5 is published with an image encoder. Such files hold the decoder under another prefix, and its configuration in a
section; the image encoder is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from zoo import UsageError
from zoo.checkpoints import ACTIVATIONS, Checkpoint, Field, Layout, Rule
from zoo_plugins.llama.hub_rope import read_partial_rotation
from zoo_plugins.llama.hub_shared import check_kinds, read_expert_layers, write_expert_layers
from zoo_plugins.qwen3_next.config import Qwen3NextConfig, Qwen3NextMoeConfig

__all__ = ["QWEN3_5", "QWEN3_5_IMAGES", "QWEN3_NEXT"]

_LINEAR, _FULL = "linear_attention", "full_attention"
_IMAGE_KEYS = ("mrope_section", "mrope_interleaved")
"""Keys of ``rope_parameters`` that divide the frequencies among the axes of images; the positions of a text are equal
on all axes."""


def _shared_rules(c: Qwen3NextConfig) -> tuple[Rule, ...]:
    attention, linear = "model.layers.*.self_attn", "model.layers.*.linear_attn"
    return (
        Rule("token_embedding", "model.embed_tokens"),
        Rule("blocks.*.norm_1", "model.layers.*.input_layernorm"),
        Rule("blocks.*.norm_2", "model.layers.*.post_attention_layernorm"),
        Rule(("blocks.*.attention.query", "blocks.*.attention.gate"), f"{attention}.q_proj", interleaved=c.num_heads),
        Rule("blocks.*.attention.key", f"{attention}.k_proj"),
        Rule("blocks.*.attention.value", f"{attention}.v_proj"),
        Rule("blocks.*.attention.output", f"{attention}.o_proj"),
        Rule("blocks.*.attention.query_norm", f"{attention}.q_norm"),
        Rule("blocks.*.attention.key_norm", f"{attention}.k_norm"),
        Rule("blocks.*.attention.convolution", f"{linear}.conv1d"),
        Rule("blocks.*.attention.step_bias", f"{linear}.dt_bias"),
        Rule("blocks.*.attention.log_decay", f"{linear}.A_log"),
        Rule("blocks.*.attention.norm", f"{linear}.norm"),
        Rule("blocks.*.attention.output", f"{linear}.out_proj"),
        Rule("blocks.*.mlp.gate", "model.layers.*.mlp.gate_proj"),
        Rule("blocks.*.mlp.up", "model.layers.*.mlp.up_proj"),
        Rule("blocks.*.mlp.down", "model.layers.*.mlp.down_proj"),
        Rule("norm", "model.norm"),
        Rule("head", "lm_head"),
    )


def _by_layer(rules: Sequence[Rule], c: Qwen3NextConfig) -> list[Rule]:
    """Repeat the rules of attention for each layer of their kind: the two kinds share names."""
    layer_kinds = []
    for rule in rules:
        kinds = {"self_attn": False, "linear_attn": True}
        kind = next((linear for name, linear in kinds.items() if f".{name}." in rule.theirs), None)
        if kind is None:
            layer_kinds.append(rule)
            continue
        for layer in (layer for layer in range(c.num_layers) if c.is_linear(layer) == kind):
            names = (rule.ours,) if isinstance(rule.ours, str) else rule.ours
            ours = tuple(name.replace("*", str(layer)) for name in names)
            theirs = rule.theirs.replace("*", str(layer))
            layer_kinds.append(Rule(ours if len(ours) > 1 else ours[0], theirs, interleaved=rule.interleaved))
    return layer_kinds


def _parts(*names: str) -> tuple[str, ...]:
    return tuple(f"blocks.*.attention.{name}" for name in names)


def _rules_3_5(c: Qwen3NextConfig) -> Sequence[Rule]:
    linear = "model.layers.*.linear_attn"
    linear_rules = (
        Rule(_parts("query", "key", "value"), f"{linear}.in_proj_qkv"),
        Rule("blocks.*.attention.gate", f"{linear}.in_proj_z"),
        Rule("blocks.*.attention.rate", f"{linear}.in_proj_b"),
        Rule("blocks.*.attention.step", f"{linear}.in_proj_a"),
    )
    return _by_layer((*_shared_rules(c), *linear_rules), c)


def _rules_next(c: Qwen3NextConfig) -> Sequence[Rule]:
    linear, groups, mlp = "model.layers.*.linear_attn", c.linear_num_key_heads, "model.layers.*.mlp"
    parts = ("gate", "up", "down")
    expert_rules = (
        Rule("blocks.*.mlp.router.scores", f"{mlp}.gate"),
        *(Rule(f"blocks.*.mlp.experts.{part}", f"{mlp}.experts.#.{part}_proj.weight") for part in parts),
        *(Rule(f"blocks.*.mlp.shared.{part}", f"{mlp}.shared_expert.{part}_proj") for part in parts),
        Rule("blocks.*.mlp.shared_gate", f"{mlp}.shared_expert_gate"),
        Rule(_parts("query", "key", "value", "gate"), f"{linear}.in_proj_qkvz", interleaved=groups),
        Rule(_parts("rate", "step"), f"{linear}.in_proj_ba", interleaved=groups),
    )
    return _by_layer((*_shared_rules(c), *expert_rules), c)


def _rules_images(c: Qwen3NextConfig) -> Sequence[Rule]:
    ours = _rules_3_5(c)
    return [replace(rule, theirs=rule.theirs.replace("model.", "model.language_model.", 1)) for rule in ours]


def _read(checkpoint: Checkpoint, values: dict[str, Any]) -> dict[str, Any]:
    return _read_layers(checkpoint.config, checkpoint.config_file, values)


def _read_layers(hub: Mapping[str, Any], where: object, values: dict[str, Any]) -> dict[str, Any]:
    """Read rotary positions and the kinds of the layers, by default every fourth with full attention."""
    count = Qwen3NextConfig.check_field("num_layers", values["num_layers"], where)
    period = hub.get("full_attention_interval", 4)
    if type(period) is not int or period < 1:
        raise UsageError(f"full_attention_interval must be positive, got {period!r}", where)
    kinds = hub.get("layer_types") or [_LINEAR if (layer + 1) % period else _FULL for layer in range(count)]
    width = Qwen3NextConfig.check_field("head_dim", values["head_dim"], where)
    return {
        "linear_layers": tuple(kind == _LINEAR for kind in check_kinds(kinds, count, (_LINEAR, _FULL), where)),
        **read_partial_rotation(hub, where, width, part=0.25, known=_IMAGE_KEYS),
    }


def _read_images(checkpoint: Checkpoint, values: dict[str, Any]) -> dict[str, Any]:
    """Read the section of the text decoder, which also names the tokens."""
    hub, where = QWEN3_5_IMAGES.section(checkpoint, _TEXT), f"{checkpoint.config_file}, {_TEXT}"
    for key, required in _REQUIRED.items():
        if hub.get(key, required) != required:
            raise UsageError(f"{key} {hub[key]!r} is not supported, only {required!r}", where)
    tokens = {key: hub[key] for key in _NO_TOKENS if hub.get(key) is not None}
    return {**tokens, **_read_layers(hub, where, values)}


def _refuse_images(c: Qwen3NextConfig) -> dict[str, Any]:
    raise UsageError("files of Qwen3_5ForConditionalGeneration include an image encoder, which the model lacks")


def _read_next(checkpoint: Checkpoint, values: dict[str, Any]) -> dict[str, Any]:
    """Read the layers with experts, beside what Qwen3.5 has."""
    fields = _read(checkpoint, values)
    return {**fields, "expert_layers": read_expert_layers(checkpoint, len(fields["linear_layers"]))}


def _write(c: Qwen3NextConfig) -> dict[str, Any]:
    part = c.turned_size / c.head_dim
    return {
        "layer_types": [_LINEAR if c.is_linear(layer) else _FULL for layer in range(c.num_layers)],
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta, "partial_rotary_factor": part},
        "partial_rotary_factor": part,
        "rope_theta": c.rope_theta,
    }


def _write_next(c: Qwen3NextMoeConfig) -> dict[str, Any]:
    return {**_write(c), **write_expert_layers([c.has_experts(layer) for layer in range(c.num_layers)])}


def _fields(*, vocab: int, hidden: int, layers: int, inner: int, kv_heads: int) -> tuple[Field, ...]:
    """Return the fields of config.json, with the defaults of a family."""
    return (
        Field("vocab_size", default=vocab),
        Field("max_position_embeddings", "max_seq_len", default=32768),
        Field("hidden_size", default=hidden),
        Field("num_hidden_layers", "num_layers", default=layers),
        Field("num_attention_heads", "num_heads", default=16),
        Field("num_key_value_heads", "num_kv_heads", default=kv_heads),
        Field("head_dim", default=256),
        Field("attention_bias", default=False),
        Field("attention_dropout", "dropout", default=0.0),
        Field("linear_num_value_heads", "linear_num_heads", default=32),
        Field("linear_value_head_dim", "linear_head_dim", default=128),
        Field("linear_num_key_heads", default=16),
        Field("linear_key_head_dim", default=128),
        Field("linear_conv_kernel_dim", "kernel_size", default=4),
        Field("intermediate_size", default=inner),
        Field("hidden_act", "activation", default="silu", values=ACTIVATIONS),
        Field("rms_norm_eps", "norm_eps", default=1e-6),
        Field("tie_word_embeddings", "tie_embeddings", default=False),
    )


_TEXT = "text_config"
_REQUIRED = {"attn_output_gate": True, "mamba_ssm_dtype": "float32"}
_UNUSED = (r".*\.rotary_emb\.inv_freq", r"(model\.)?mtp\..*")
_COMMON: dict[str, Any] = {"prefix": "model.", "ignored_tensors": _UNUSED, "required_values": _REQUIRED}
_KEYS = (
    "layer_types",
    "full_attention_interval",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "partial_rotary_factor",
    "mtp_*",
)
_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

_FIELDS_3_5 = _fields(vocab=248320, hidden=4096, layers=32, inner=12288, kv_heads=4)
_TIED = "tie_word_embeddings"

QWEN3_5 = Layout(
    classes={"Qwen3_5ForCausalLM": "text-generation"},
    fields=_FIELDS_3_5,
    rules=_rules_3_5,
    ignored_keys=_KEYS,
    read_extra=_read,
    write_extra=_write,
    constant={"model_type": "qwen3_5_text", **_NO_TOKENS},
    tokenizer="Qwen3_5Tokenizer",
    **_COMMON,
)
"""``model_type`` qwen3_5_text, the decoder of Qwen3.5 without its image encoder."""

QWEN3_5_IMAGES = Layout(
    classes={"Qwen3_5ForConditionalGeneration": "text-generation"},
    fields=[field for field in _FIELDS_3_5 if field.theirs == _TIED],
    sections={_TEXT: [field for field in _FIELDS_3_5 if field.theirs != _TIED]},
    rules=_rules_images,
    ignored_tensors=_UNUSED,
    left_out=("model.visual.*",),
    ignored_keys=(*_KEYS, *_REQUIRED, _TIED, "vision_config", "image_token_id", "video_token_id", "vision_*_token_id"),
    read_extra=_read_images,
    write_extra=_refuse_images,
    constant={"model_type": "qwen3_5"},
    tokenizer="Qwen3_5Tokenizer",
    overrides_tokenizer=True,
)
"""``model_type`` qwen3_5, whose image encoder is left out. Only read: without that encoder, the files are of
``model_type`` qwen3_5_text. ``tie_word_embeddings`` is that of the whole model."""

QWEN3_NEXT = Layout(
    classes={"Qwen3NextForCausalLM": "text-generation"},
    fields=(
        *_fields(vocab=151936, hidden=2048, layers=48, inner=5632, kv_heads=2),
        Field("num_experts", default=512),
        Field("num_experts_per_tok", "experts_per_token", default=10),
        Field("moe_intermediate_size", "expert_intermediate_size", default=512),
        Field("shared_expert_intermediate_size", "shared_intermediate_size", default=512),
        Field("norm_topk_prob", "normalize_routing", default=True),
    ),
    rules=_rules_next,
    ignored_keys=(
        *_KEYS, "mlp_only_layers", "decoder_sparse_step", "output_router_logits", "router_aux_loss_coef",
    ),
    read_extra=_read_next,
    write_extra=_write_next,
    constant={"model_type": "qwen3_next", **_NO_TOKENS},
    tokenizer="Qwen2Tokenizer",
    **_COMMON,
)  # fmt: skip
"""``model_type`` qwen3_next."""
