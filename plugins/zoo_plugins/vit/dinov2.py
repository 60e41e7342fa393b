"""DINOv2 checkpoints in the hub's layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zoo import UsageError
from zoo.checkpoints import ACTIVATIONS, Checkpoint, Field, Layout, Rule
from zoo_plugins.vit.config import ViTConfig
from zoo_plugins.vit.hub import preprocessor

__all__ = ["DINOV2"]

_LAYER = "dinov2.encoder.layer.*"


def _rules(c: ViTConfig) -> Sequence[Rule]:
    joined = (Rule(("blocks.*.mlp.gate", "blocks.*.mlp.up"), f"{_LAYER}.mlp.weights_in"),)
    return (
        Rule("embeddings.class_token", "dinov2.embeddings.cls_token"),
        Rule("embeddings.position", "dinov2.embeddings.position_embeddings"),
        Rule("embeddings.patch", "dinov2.embeddings.patch_embeddings.projection"),
        Rule("blocks.*.attention.query", f"{_LAYER}.attention.attention.query"),
        Rule("blocks.*.attention.key", f"{_LAYER}.attention.attention.key"),
        Rule("blocks.*.attention.value", f"{_LAYER}.attention.attention.value"),
        Rule("blocks.*.attention.output", f"{_LAYER}.attention.output.dense"),
        Rule("blocks.*.norm_1", f"{_LAYER}.norm1"),
        Rule("blocks.*.norm_2", f"{_LAYER}.norm2"),
        Rule("blocks.*.scale_1.weight", f"{_LAYER}.layer_scale1.lambda1"),
        Rule("blocks.*.scale_2.weight", f"{_LAYER}.layer_scale2.lambda1"),
        *(joined if c.gated else (Rule("blocks.*.mlp.up", f"{_LAYER}.mlp.fc1"),)),
        Rule("blocks.*.mlp.down", f"{_LAYER}.mlp.{'weights_out' if c.gated else 'fc2'}"),
        Rule("norm", "dinov2.layernorm"),
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
    return fields if hub.keys() & {"id2label", "num_labels"} else {**fields, "num_classes": 2}


def _restore(c: ViTConfig) -> Mapping[str, Any]:
    """Write the ratio of widths, and that the mask token of the pretraining is missing."""
    width = c.intermediate_size or 0
    ratio = max(1, round(width * (1.5 if c.gated else 1.0) / c.hidden_size))
    if _width(c.hidden_size, ratio, gated=c.gated) != width:
        raise UsageError(f"mlp_ratio cannot represent intermediate_size {width} of hidden_size {c.hidden_size}")
    acts = {"hidden_act": "gelu"} if c.gated and c.activation == "silu" else {}
    return {"mlp_ratio": ratio, "use_mask_token": False, "attention_probs_dropout_prob": c.dropout, **acts}


DINOV2 = Layout(
    classes={"Dinov2Model": "image-feature-extraction", "Dinov2ForImageClassification": "image-classification"},
    fields=(
        Field("image_size", default=224),
        Field("patch_size", default=14),
        Field("num_channels", default=3),
        Field("hidden_size", default=768),
        Field("num_hidden_layers", "num_layers", default=12),
        Field("num_attention_heads", "num_heads", default=12),
        Field("hidden_act", "activation", default="gelu", values=ACTIVATIONS),
        Field("layer_norm_eps", "norm_eps", default=1e-6),
        Field("hidden_dropout_prob", "dropout", default=0.0),
        Field("qkv_bias", "attention_bias", default=True),
        Field("layerscale_value", "layer_scale", default=1.0),
        Field("use_swiglu_ffn", "gated", default=False),
    ),
    rules=_rules,
    prefix="dinov2.",
    headless_tasks=("image-feature-extraction",),
    ignored_tensors=(r"(dinov2\.)?embeddings\.mask_token",),
    ignored_keys=(
        "mlp_ratio",
        "use_mask_token",
        "attention_probs_dropout_prob",
        "drop_path_rate",
        "apply_layernorm",  # the remaining keys are of the backbone
        "reshape_hidden_states",
        "out_features",
        "out_indices",
        "stage_names",
    ),
    read_extra=_derive,
    write_extra=_restore,
    files=preprocessor,
    constant={"model_type": "dinov2"},
)
"""``model_type`` dinov2. The mask token, which only pretraining uses, is left out."""
