"""CLIP and SigLIP checkpoints in the hub's layout, whose configuration has a section for each encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zoo import UsageError
from zoo.checkpoints import ACTIVATIONS, Checkpoint, Field, Layout, Rule, image_processor
from zoo_plugins.clip.config import CLIPConfig

__all__ = ["CLIP", "SIGLIP"]

_TEXT, _IMAGE = "text_config", "vision_config"
_LEGACY_END = 2
"""``eos_token_id`` of old checkpoints, which is not the tokenizer's: transformers looks for the largest id instead."""
_IGNORED = (
    "add_cross_attention", "attention_type", "cross_attention_hidden_size", "dropout", "initializer_factor",
    "is_decoder", "output_scores", "projection_dim", "pruned_heads", "remove_invalid_values",
    "return_dict_in_generate", "tf_legacy_loss", "tie_encoder_decoder", "tie_word_embeddings",
)  # fmt: skip
"""Keys of sections that do not affect what a model computes. The width of projections is at the top of the file."""
_BLOCK = (
    ("norm_1", "layer_norm1"),
    ("attention.query", "self_attn.q_proj"),
    ("attention.key", "self_attn.k_proj"),
    ("attention.value", "self_attn.v_proj"),
    ("attention.output", "self_attn.out_proj"),
    ("norm_2", "layer_norm2"),
    ("mlp.up", "mlp.fc1"),
    ("mlp.down", "mlp.fc2"),
)


def _sections(*, siglip: bool) -> Mapping[str, Sequence[Field]]:
    """Return the fields of both sections."""
    shared = (
        Field("hidden_act", "activation", default="gelu_pytorch_tanh" if siglip else "quick_gelu", values=_KNOWN),
        Field("layer_norm_eps", "norm_eps", default=1e-6 if siglip else 1e-5),
        Field("attention_dropout", "dropout", default=0.0),
    )
    text = (
        Field("vocab_size", default=32000 if siglip else 49408),
        Field("max_position_embeddings", "max_seq_len", default=64 if siglip else 77),
        Field("hidden_size", "text_hidden_size", default=768 if siglip else 512),
        Field("num_hidden_layers", "text_num_layers", default=12),
        Field("num_attention_heads", "text_num_heads", default=12 if siglip else 8),
        Field("intermediate_size", "text_intermediate_size", default=3072 if siglip else 2048),
        Field("pad_token_id", default=1),
    )
    image = (
        Field("image_size", default=224),
        Field("patch_size", default=16 if siglip else 32),
        Field("num_channels", default=3),
        Field("hidden_size", "image_hidden_size", default=768),
        Field("num_hidden_layers", "image_num_layers", default=12),
        Field("num_attention_heads", "image_num_heads", default=12),
        Field("intermediate_size", "image_intermediate_size", default=3072),
    )
    return {_TEXT: (*text, *shared), _IMAGE: (*image, *shared)}


_KNOWN = {"gelu_pytorch_tanh": "gelu_tanh", **ACTIVATIONS}


def _read_clip(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    end = CLIP.section(checkpoint, _TEXT).get("eos_token_id", 49407)
    if type(end) is not int:
        raise UsageError(f"eos_token_id must be a number, got {end!r}", f"{checkpoint.config_file}, {_TEXT}")
    return {"text_pooling": "largest"} if end == _LEGACY_END else {"text_pooling": "end", "end_token_id": end}


def _write_clip(c: CLIPConfig) -> Mapping[str, Any]:
    end = _LEGACY_END if c.end_token_id is None else c.end_token_id
    widths = {"projection_dim": c.embedding_size}
    return {_TEXT: {"eos_token_id": end, **widths}, _IMAGE: widths}


def _read_siglip(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    text, image = (SIGLIP.section(checkpoint, name) for name in (_TEXT, _IMAGE))
    if image.get("vision_use_head", True) is not True:
        raise UsageError("vision_use_head false is not supported", checkpoint.config_file)
    size, pad = text.get("projection_size"), checkpoint.special_token("pad_token")
    half = (0.5,) * CLIPConfig.check_field("num_channels", values["num_channels"], checkpoint.config_file)
    return {
        **_SIGLIP_VALUES,
        "embedding_size": values["text_hidden_size"] if size is None else size,
        "image_mean": half,
        "image_std": half,
        **({} if pad is None else {"pad_token_id": pad}),
    }


_SIGLIP_VALUES: Mapping[str, Any] = {
    "causal": False, "pad_texts": True, "text_pooling": "last", "text_head_bias": True, "patch_bias": True,
    "pre_norm": False, "image_pooling": "attention", "image_head": False, "logit_bias": True,
    "label_probabilities": "sigmoid", "image_resize": "stretch",
}  # fmt: skip
"""The differences from CLIP that config.json does not state."""


def _rules(*own: Rule) -> tuple[Rule, ...]:
    return (
        Rule("text.token_embedding", "text_model.embeddings.token_embedding"),
        Rule("text.position_embedding", "text_model.embeddings.position_embedding"),
        Rule("text.norm", "text_model.final_layer_norm"),
        Rule("image.patch", "vision_model.embeddings.patch_embedding"),
        Rule("image.position_embedding", "vision_model.embeddings.position_embedding"),
        Rule("image.norm", "vision_model.post_layernorm"),
        *(
            Rule(f"{ours}.blocks.*.{part}", f"{theirs}_model.encoder.layers.*.{its}")
            for ours, theirs in (("text", "text"), ("image", "vision"))
            for part, its in _BLOCK
        ),
        *own,
    )


_HEAD = "vision_model.head"
CLIP = Layout(
    classes={"CLIPModel": "zero-shot-image-classification"},
    fields=(Field("projection_dim", "embedding_size", default=512),),
    sections=_sections(siglip=False),
    rules=_rules(
        Rule("text.head", "text_projection"),
        Rule("image.class_token", "vision_model.embeddings.class_embedding"),
        Rule("image.pre_norm", "vision_model.pre_layrnorm"),
        Rule("image.head", "visual_projection"),
        Rule("logit_scale", "logit_scale"),
    ),
    ignored_tensors=(r"(text|vision)_model\.embeddings\.position_ids",),
    ignored_keys=(*_IGNORED, "logit_scale_init_value"),
    read_extra=_read_clip,
    write_extra=_write_clip,
    files=lambda c: image_processor(c, "ViT"),
    end_token=lambda c: c.vocab_size - 1 if c.end_token_id is None else c.end_token_id,
    constant={"model_type": "clip"},
    tokenizer="CLIPTokenizer",
)  # fmt: skip
"""``model_type`` clip."""

SIGLIP = Layout(
    classes={"SiglipModel": "zero-shot-image-classification"},
    fields=(),
    sections=_sections(siglip=True),
    rules=_rules(
        Rule("text.head", "text_model.head"),
        Rule("image.pooling.query", f"{_HEAD}.probe"),
        *(
            Rule(
                tuple(f"image.pooling.attention.{part}.{kind}" for part in ("query", "key", "value")),
                f"{_HEAD}.attention.in_proj_{kind}",
            )
            for kind in ("weight", "bias")
        ),
        Rule("image.pooling.attention.output", f"{_HEAD}.attention.out_proj"),
        Rule("image.pooling.norm", f"{_HEAD}.layernorm"),
        Rule("image.pooling.mlp.up", f"{_HEAD}.mlp.fc1"),
        Rule("image.pooling.mlp.down", f"{_HEAD}.mlp.fc2"),
        Rule("logit_scale", "logit_scale", leading_axes=1),
        Rule("logit_bias", "logit_bias", leading_axes=1),
    ),
    ignored_tensors=(r"(text|vision)_model\.embeddings\.position_ids",),
    ignored_keys=(*_IGNORED, "projection_size", "vision_use_head"),
    read_extra=_read_siglip,
    write_extra=lambda c: {_TEXT: {"projection_size": c.embedding_size}},
    files=lambda c: image_processor(c, "Siglip"),
    constant={"model_type": "siglip"},
    tokenizer="SiglipTokenizer",
)
"""``model_type`` siglip."""
