"""SegFormer checkpoints in the hub's layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo import ImagePreparation, UsageError
from zoo.checkpoints import ACTIVATIONS, Checkpoint, Field, Layout, Rule, image_processor
from zoo_plugins.segformer.config import SegFormerConfig
from zoo_plugins.vit.hub import default_classes

__all__ = ["SEGFORMER"]

_STAGE = (
    ("patches.convolution", "encoder.patch_embeddings.*.proj", "stages.*.patch_embeddings.proj"),
    ("patches.norm", "encoder.patch_embeddings.*.layer_norm", "stages.*.patch_embeddings.layer_norm"),
    ("norm", "encoder.layer_norm.*", "stages.*.layer_norm"),
)
"""Parts of a stage: zoo's name, the name in the hub's files, and the in-memory name of transformers 5, which also
occurs in files."""
_BLOCK = (
    ("norm_1", "layer_norm_1", "layernorm_before"),
    ("norm_2", "layer_norm_2", "layernorm_after"),
    ("attention.query", "attention.self.query", "attention.q_proj"),
    ("attention.key", "attention.self.key", "attention.k_proj"),
    ("attention.value", "attention.self.value", "attention.v_proj"),
    ("attention.output", "attention.output.dense", "attention.o_proj"),
    ("reduction.convolution", "attention.self.sr", "attention.sequence_reduction.sequence_reduction"),
    ("reduction.norm", "attention.self.layer_norm", "attention.sequence_reduction.layer_norm"),
    ("mlp.up", "mlp.dense1", "mlp.fc1"),
    ("mlp.convolution", "mlp.dwconv.dwconv", "mlp.dwconv.dwconv"),
    ("mlp.down", "mlp.dense2", "mlp.fc2"),
)
"""Parts of a block, in the same way."""
_DECODER = (
    ("projections.*", "linear_c.*.proj"),
    ("projections.*", "linear_projections.*.proj"),
    ("fuse", "linear_fuse"),
    ("norm", "batch_norm"),
    ("classifier", "classifier"),
)


def _derive(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    stages, depths = checkpoint.config.get("num_encoder_blocks", 4), values["num_stage_layers"]
    if isinstance(depths, list | tuple) and stages != len(depths):
        raise UsageError(f"num_encoder_blocks {stages} differs from the {len(depths)} depths", checkpoint.config_file)
    return default_classes(checkpoint)


def _restore(c: SegFormerConfig) -> Mapping[str, Any]:
    return {"num_encoder_blocks": len(c.hidden_sizes), "attention_probs_dropout_prob": c.dropout}


def _preprocessor(c: ImagePreparation) -> Mapping[str, Any]:
    return image_processor(c, "Segformer")


SEGFORMER = Layout(
    classes={
        "SegformerModel": "image-feature-extraction",
        "SegformerForImageClassification": "image-classification",
        "SegformerForSemanticSegmentation": "semantic-segmentation",
    },
    fields=(
        Field("num_channels", default=3),
        Field("hidden_sizes", default=SegFormerConfig.hidden_sizes),
        Field("depths", "num_stage_layers", default=SegFormerConfig.num_stage_layers),
        Field("num_attention_heads", "num_heads", default=SegFormerConfig.num_heads),
        Field("patch_sizes", default=SegFormerConfig.patch_sizes),
        Field("strides", default=SegFormerConfig.strides),
        Field("sr_ratios", "reductions", default=SegFormerConfig.reductions),
        Field("mlp_ratios", default=SegFormerConfig.mlp_ratios),
        Field("hidden_act", "activation", default="gelu", values=ACTIVATIONS),
        Field("hidden_dropout_prob", "dropout", default=0.0),
        Field("decoder_hidden_size", default=256),
        Field("classifier_dropout_prob", "head_dropout", default=0.1),
    ),
    rules=(
        *(Rule(f"stages.*.{ours}", f"segformer.{theirs}") for ours, theirs, _ in _STAGE),
        *(Rule(f"stages.*.{ours}", f"segformer.{theirs}") for ours, _, theirs in _STAGE),
        *(Rule(f"stages.*.blocks.*.{ours}", f"segformer.encoder.block.*.*.{theirs}") for ours, theirs, _ in _BLOCK),
        *(Rule(f"stages.*.blocks.*.{ours}", f"segformer.stages.*.blocks.*.{theirs}") for ours, _, theirs in _BLOCK),
        *(Rule(f"decoder.{ours}", f"decode_head.{theirs}") for ours, theirs in _DECODER),
        Rule("head", "classifier"),
    ),
    prefix="segformer.",
    headless_tasks=("image-feature-extraction",),
    required_values={"reshape_last_stage": True},
    ignored_keys=(
        "attention_probs_dropout_prob", "downsampling_rates", "drop_path_rate", "image_size", "layer_norm_eps",
        "num_encoder_blocks", "semantic_loss_ignore_index",
    ),
    read_extra=_derive,
    write_extra=_restore,
    files=_preprocessor,
    any_image_size=True,
    constant={"model_type": "segformer"},
)  # fmt: skip
"""``model_type`` segformer."""
