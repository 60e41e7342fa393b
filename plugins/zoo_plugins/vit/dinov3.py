"""DINOv3 checkpoints in the hub's layout: vision transformers, without the convolutional ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo import UsageError
from zoo.checkpoints import ACTIVATIONS, Checkpoint, Field, Layout, Rule
from zoo_plugins.vit.config import ViTConfig
from zoo_plugins.vit.dinov2 import DETECTOR_KEYS, left_out_tensors
from zoo_plugins.vit.hub import default_classes, preprocessor

__all__ = ["DINOV3"]

_BIASES = ("query_bias", "key_bias", "value_bias")
_BLOCK = (
    ("attention.query", "attention.q_proj"),
    ("attention.key", "attention.k_proj"),
    ("attention.value", "attention.v_proj"),
    ("attention.output", "attention.o_proj"),
    ("norm_1", "norm1"),
    ("norm_2", "norm2"),
    ("scale_1.weight", "layer_scale1.lambda1"),
    ("scale_2.weight", "layer_scale2.lambda1"),
    ("mlp.gate", "mlp.gate_proj"),
    ("mlp.up", "mlp.up_proj"),
    ("mlp.down", "mlp.down_proj"),
)
"""Parts of a block: zoo's name and the original's."""


def _derive(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    hub = checkpoint.config
    stated = [hub.get(key, default) for key, default in zip(_BIASES, (True, False, True), strict=True)]
    biases = ViTConfig.check_field("attention_bias", stated, checkpoint.config_file)
    return {**default_classes(checkpoint), "attention_bias": biases, "positions": "rotary"}


def _restore(c: ViTConfig) -> Mapping[str, Any]:
    if c.positions != "rotary" or c.distilled:
        raise UsageError(f"DINOv3 has rotary positions, but positions is {c.positions!r}")
    biases = (c.attention_bias,) * 3 if isinstance(c.attention_bias, bool) else c.attention_bias
    return dict(zip(_BIASES, biases, strict=True))


DINOV3 = Layout(
    classes={"DINOv3ViTModel": "image-feature-extraction"},
    fields=(
        Field("image_size", default=224),
        Field("patch_size", default=16),
        Field("num_channels", default=3),
        Field("hidden_size", default=384),
        Field("num_hidden_layers", "num_layers", default=12),
        Field("num_attention_heads", "num_heads", default=6),
        Field("intermediate_size", default=1536),
        Field("hidden_act", "activation", default="gelu", values=ACTIVATIONS),
        Field("layer_norm_eps", "norm_eps", default=1e-5),
        Field("rope_theta", default=100.0),
        Field("attention_dropout", "dropout", default=0.0),
        Field("layerscale_value", "layer_scale", default=1.0),
        Field("use_gated_mlp", "gated", default=False),
        Field("num_register_tokens", "num_registers", default=0),
    ),
    rules=(
        Rule("embeddings.class_token", "embeddings.cls_token"),
        Rule("embeddings.registers", "embeddings.register_tokens"),
        Rule("embeddings.patch", "embeddings.patch_embeddings"),
        *(
            Rule(f"blocks.*.{ours}", f"{layer}.*.{theirs}")
            for layer in ("layer", "model.layer")
            for ours, theirs in _BLOCK
        ),
        Rule("norm", "norm"),
    ),
    ignored_tensors=left_out_tensors,
    required_values={"proj_bias": True, "mlp_bias": True},
    ignored_keys=(*_BIASES, "drop_path_rate", "pos_embed_*", *DETECTOR_KEYS),
    read_extra=_derive,
    write_extra=_restore,
    files=preprocessor,
    constant={"model_type": "dinov3_vit"},
)
"""``model_type`` dinov3_vit. The mask token, which only pretraining uses, is left out."""
