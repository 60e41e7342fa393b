"""Checkpoints of DINOv2, with registers or without, in the hub's layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from zoo import UsageError
from zoo.checkpoints import ACTIVATIONS, Checkpoint, Field, Layout, Rule
from zoo_plugins.vit.config import ViTConfig
from zoo_plugins.vit.hub import BACKBONE_KEYS, SWITCH, default_classes, preprocessor

__all__ = ["DETECTOR_KEYS", "DINOV2", "DINOV2_WITH_REGISTERS", "left_out_tensors"]

DETECTOR_KEYS = (*BACKBONE_KEYS, "apply_layernorm", "reshape_hidden_states")
"""Keys that say which features a detector reads, and in which form."""


def _rules(c: ViTConfig, prefix: str) -> Sequence[Rule]:
    layer = f"{prefix}.encoder.layer.*"
    joined = (Rule(("blocks.*.mlp.gate", "blocks.*.mlp.up"), f"{layer}.mlp.weights_in"),)
    return (
        Rule("embeddings.class_token", f"{prefix}.embeddings.cls_token"),
        Rule("embeddings.position", f"{prefix}.embeddings.position_embeddings"),
        Rule("embeddings.registers", f"{prefix}.embeddings.register_tokens"),
        Rule("embeddings.patch", f"{prefix}.embeddings.patch_embeddings.projection"),
        Rule("blocks.*.attention.query", f"{layer}.attention.attention.query"),
        Rule("blocks.*.attention.key", f"{layer}.attention.attention.key"),
        Rule("blocks.*.attention.value", f"{layer}.attention.attention.value"),
        Rule("blocks.*.attention.output", f"{layer}.attention.output.dense"),
        Rule("blocks.*.norm_1", f"{layer}.norm1"),
        Rule("blocks.*.norm_2", f"{layer}.norm2"),
        Rule("blocks.*.scale_1.weight", f"{layer}.layer_scale1.lambda1"),
        Rule("blocks.*.scale_2.weight", f"{layer}.layer_scale2.lambda1"),
        *(joined if c.gated else (Rule("blocks.*.mlp.up", f"{layer}.mlp.fc1"),)),
        Rule("blocks.*.mlp.down", f"{layer}.mlp.{'weights_out' if c.gated else 'fc2'}"),
        Rule("norm", f"{prefix}.layernorm"),
        Rule("head", "classifier"),
    )


def _width(hidden_size: int, ratio: float, *, gated: bool) -> int:
    """Return the hidden width of the feed-forward network; a gated one has two thirds, rounded up to eights."""
    width = int(hidden_size * ratio)
    return (int(width * 2 / 3) + 7) // 8 * 8 if gated else width


def _derive(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    hub, where = checkpoint.config, checkpoint.config_file
    ratio, hidden = hub.get("mlp_ratio", 4), ViTConfig.check_field("hidden_size", values["hidden_size"], where)
    if not isinstance(ratio, int | float) or ratio <= 0:
        raise UsageError(f"mlp_ratio must be positive, got {ratio!r}", where)
    width = _width(hidden, ratio, gated=values["gated"] is True)
    fields: dict[str, Any] = {"intermediate_size": width, "classify_patches": True}
    if values["gated"]:
        fields["activation"] = "silu"  # whatever hidden_act says
    return {**default_classes(checkpoint), **fields}


def _restore(c: ViTConfig) -> Mapping[str, Any]:
    """Write the ratio of widths."""
    if c.positions != "learned":
        raise UsageError(f"DINOv2 has learned positions, but positions is {c.positions!r}")
    width = c.intermediate_size or 0
    ratio = max(1, round(width * (1.5 if c.gated else 1.0) / c.hidden_size))
    if _width(c.hidden_size, ratio, gated=c.gated) != width:
        raise UsageError(f"mlp_ratio cannot represent intermediate_size {width} of hidden_size {c.hidden_size}")
    acts = {"hidden_act": "gelu"} if c.gated and c.activation == "silu" else {}
    return {"mlp_ratio": ratio, "attention_probs_dropout_prob": c.dropout, **acts}


def left_out_tensors(c: ViTConfig) -> Sequence[str]:
    """Patterns of the mask token, which only pretraining uses, and of registers if there are none."""
    empty = () if c.num_registers else (r"(.+\.)?embeddings\.register_tokens",)
    return (r"(.+\.)?embeddings\.mask_token", *empty)


def _family(name: str, title: str, patch_size: int, *fields: Field, **constant: Any) -> Layout:
    """Return the layout of a family, given its ``model_type``, the beginning of the names of its classes, and the
    default of ``patch_size``."""
    return Layout(
        classes={
            f"{title}Model": "image-feature-extraction",
            f"{title}ForImageClassification": "image-classification",
        },
        fields=(
            Field("image_size", default=224),
            Field("patch_size", default=patch_size),
            Field("num_channels", default=3),
            Field("hidden_size", default=768),
            Field("num_hidden_layers", "num_layers", default=12),
            Field("num_attention_heads", "num_heads", default=12),
            Field("hidden_act", "activation", default="gelu", values=ACTIVATIONS),
            Field("layer_norm_eps", "norm_eps", default=1e-6),
            Field("hidden_dropout_prob", "dropout", default=0.0),
            Field("qkv_bias", "attention_bias", default=True, values=SWITCH),
            Field("layerscale_value", "layer_scale", default=1.0),
            Field("use_swiglu_ffn", "gated", default=False),
            *fields,
        ),
        rules=partial(_rules, prefix=name),
        prefix=f"{name}.",
        headless_tasks=("image-feature-extraction",),
        ignored_tensors=left_out_tensors,
        ignored_keys=("mlp_ratio", "attention_probs_dropout_prob", "drop_path_rate", *DETECTOR_KEYS),
        read_extra=_derive,
        write_extra=_restore,
        files=preprocessor,
        constant={"model_type": name, **constant},
    )


DINOV2 = _family("dinov2", "Dinov2", 14, use_mask_token=False)
"""``model_type`` dinov2. The mask token, which only pretraining uses, is left out."""
DINOV2_WITH_REGISTERS = _family(
    "dinov2_with_registers", "Dinov2WithRegisters", 16, Field("num_register_tokens", "num_registers", default=4)
)
"""``model_type`` dinov2_with_registers, without the mask token."""
