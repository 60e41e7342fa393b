"""ViT and DeiT checkpoints in the hub's layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo import ImagePreparation, UsageError
from zoo.checkpoints import ACTIVATIONS, Checkpoint, Field, Layout, Rule, image_processor
from zoo_plugins.vit.config import ViTConfig

__all__ = ["BACKBONE_KEYS", "DEIT", "SWITCH", "VIT", "default_classes", "preprocessor"]

BACKBONE_KEYS = ("out_features", "out_indices", "stage_names")
"""Keys that say which features a detector reads."""
SWITCH = {True: True, False: False}
"""Values of a key that cannot state biases for each of query, key and value."""

_BLOCK = (
    ("attention.query", "attention.attention.query", "attention.q_proj"),
    ("attention.key", "attention.attention.key", "attention.k_proj"),
    ("attention.value", "attention.attention.value", "attention.v_proj"),
    ("attention.output", "attention.output.dense", "attention.o_proj"),
    ("norm_1", "layernorm_before", "layernorm_before"),
    ("norm_2", "layernorm_after", "layernorm_after"),
    ("mlp.up", "intermediate.dense", "mlp.fc1"),
    ("mlp.down", "output.dense", "mlp.fc2"),
)
"""Parts of a block: zoo's name, the name in the hub's files, and the in-memory name of transformers 5, which also
occurs in files."""
_TEACHER = "DeiTForImageClassificationWithTeacher"


def _rules(prefix: str) -> tuple[Rule, ...]:
    """Rules for the encoder's tensors."""
    return (
        Rule("embeddings.class_token", f"{prefix}embeddings.cls_token"),
        Rule("embeddings.distillation_token", f"{prefix}embeddings.distillation_token"),
        Rule("embeddings.position", f"{prefix}embeddings.position_embeddings"),
        Rule("embeddings.patch", f"{prefix}embeddings.patch_embeddings.projection"),
        *(Rule(f"blocks.*.{ours}", f"{prefix}encoder.layer.*.{theirs}") for ours, theirs, _ in _BLOCK),
        *(Rule(f"blocks.*.{ours}", f"{prefix}layers.*.{theirs}") for ours, _, theirs in _BLOCK),
        Rule("norm", f"{prefix}layernorm"),
        Rule("pooler", f"{prefix}pooler.dense"),
    )


def _derive(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    hub = checkpoint.config
    size = hub.get("pooler_output_size")
    if size not in (None, values["hidden_size"]):
        what = f"pooler_output_size {size} is not supported, only hidden_size {values['hidden_size']}"
        raise UsageError(what, checkpoint.config_file)
    pooler = any(name.endswith("pooler.dense.weight") for name in checkpoint.tensors)
    fields = {"pooler": pooler and values["task"] == "image-feature-extraction"}
    return {**default_classes(checkpoint), **fields}


def _derive_deit(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    second = (checkpoint.config.get("architectures") or [""])[0] == _TEACHER
    return {**_derive(checkpoint, values), "distilled": True, "distillation_head": second}


def _restore(c: ViTConfig) -> Mapping[str, Any]:
    if c.positions != "learned":
        raise UsageError(f"ViT and DeiT have learned positions, but positions is {c.positions!r}")
    return {"attention_probs_dropout_prob": c.dropout, "pooler_output_size": c.hidden_size}


def _restore_deit(c: ViTConfig) -> Mapping[str, Any]:
    return {**_restore(c), **({"architectures": [_TEACHER]} if c.distillation_head else {})}


def default_classes(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the number of classes of transformers' models for a checkpoint that states none."""
    return {} if checkpoint.config.keys() & {"id2label", "num_labels"} else {"num_classes": 2}


def preprocessor(c: ImagePreparation) -> Mapping[str, Any]:
    """Describe zoo's image preprocessing in the hub's format."""
    return image_processor(c, "ViT")


_FIELDS = (
    Field("image_size", default=224),
    Field("patch_size", default=16),
    Field("num_channels", default=3),
    Field("hidden_size", default=768),
    Field("num_hidden_layers", "num_layers", default=12),
    Field("num_attention_heads", "num_heads", default=12),
    Field("intermediate_size", default=3072),
    Field("hidden_act", "activation", default="gelu", values=ACTIVATIONS),
    Field("layer_norm_eps", "norm_eps", default=1e-12),
    Field("hidden_dropout_prob", "dropout", default=0.0),
    Field("qkv_bias", "attention_bias", default=True, values=SWITCH),
)
_ONLY = {"pooler_act": "tanh"}
_INERT = ("attention_probs_dropout_prob", "encoder_stride", "pooler_output_size")

VIT = Layout(
    classes={"ViTModel": "image-feature-extraction", "ViTForImageClassification": "image-classification"},
    fields=_FIELDS,
    rules=(*_rules("vit."), Rule("head", "classifier")),
    prefix="vit.",
    headless_tasks=("image-feature-extraction",),
    required_values=_ONLY,
    ignored_keys=_INERT,
    read_extra=_derive,
    write_extra=_restore,
    files=preprocessor,
    constant={"model_type": "vit"},
)
"""``model_type`` vit."""

DEIT = Layout(
    classes={
        "DeiTModel": "image-feature-extraction",
        "DeiTForImageClassification": "image-classification",
        _TEACHER: "image-classification",
    },
    fields=_FIELDS,
    rules=lambda c: (
        *_rules("deit."),
        Rule("head", "cls_classifier" if c.distillation_head else "classifier"),
        Rule("distillation_head", "distillation_classifier"),
    ),
    prefix="deit.",
    headless_tasks=("image-feature-extraction",),
    required_values=_ONLY,
    ignored_keys=_INERT,
    read_extra=_derive_deit,
    write_extra=_restore_deit,
    files=preprocessor,
    constant={"model_type": "deit"},
)
"""``model_type`` deit."""
