"""ConvNeXt and ConvNeXt V2 checkpoints in the hub's layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo import UsageError
from zoo.checkpoints import ACTIVATIONS, Checkpoint, Field, Layout, Rule
from zoo_plugins.convnext.config import ConvNeXtConfig
from zoo_plugins.vit.hub import BACKBONE_KEYS, default_classes, preprocessor

__all__ = ["CONVNEXT", "CONVNEXT_V2"]


def _rules(prefix: str) -> tuple[Rule, ...]:
    """Rules for the tensors that both versions have."""
    stage = f"{prefix}.encoder.stages.*"
    return (
        Rule("patch", f"{prefix}.embeddings.patch_embeddings"),
        Rule("patch_norm", f"{prefix}.embeddings.layernorm"),
        Rule("stages.*.downsampling.*", f"{stage}.downsampling_layer.*"),
        Rule("stages.*.blocks.*.convolution", f"{stage}.layers.*.dwconv"),
        Rule("stages.*.blocks.*.norm", f"{stage}.layers.*.layernorm"),
        Rule("stages.*.blocks.*.up", f"{stage}.layers.*.pwconv1"),
        Rule("stages.*.blocks.*.down", f"{stage}.layers.*.pwconv2"),
        Rule("norm", f"{prefix}.layernorm"),
        Rule("head", "classifier"),
    )


def _check_stages(checkpoint: Checkpoint, values: Mapping[str, Any]) -> None:
    """Raise :class:`UsageError` if a checkpoint leaves out stages that it describes."""
    stages, depths = checkpoint.config.get("num_stages", 4), values["num_stage_layers"]
    if isinstance(depths, list | tuple) and stages != len(depths):
        raise UsageError(f"num_stages {stages} differs from the {len(depths)} depths", checkpoint.config_file)


def _derive(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    _check_stages(checkpoint, values)
    factor = checkpoint.config.get("layer_scale_init_value", 1e-6)
    if isinstance(factor, bool) or not isinstance(factor, int | float):
        raise UsageError(f"layer_scale_init_value must be a number, got {factor!r}", checkpoint.config_file)
    return {**default_classes(checkpoint), "layer_scale": factor if factor > 0 else None}


def _derive_v2(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    _check_stages(checkpoint, values)
    return {**default_classes(checkpoint), "response_norm": True}


def _restore(c: ConvNeXtConfig) -> Mapping[str, Any]:
    if c.response_norm:
        raise UsageError("convnext has no response_norm", None, "publish it as convnextv2")
    return {"num_stages": len(c.hidden_sizes), "layer_scale_init_value": c.layer_scale or 0.0}


def _restore_v2(c: ConvNeXtConfig) -> Mapping[str, Any]:
    if not c.response_norm or c.layer_scale is not None:
        raise UsageError("convnextv2 has response_norm and no layer_scale", None, "publish it as convnext")
    return {"num_stages": len(c.hidden_sizes)}


_COMMON: dict[str, Any] = {
    "fields": (
        Field("num_channels", default=3),
        Field("patch_size", default=4),
        Field("hidden_sizes", default=ConvNeXtConfig.hidden_sizes),
        Field("depths", "num_stage_layers", default=ConvNeXtConfig.num_stage_layers),
        Field("hidden_act", "activation", default="gelu", values=ACTIVATIONS),
        Field("layer_norm_eps", "norm_eps", default=1e-12),
        Field("image_size", default=224),
    ),
    "headless_tasks": ("image-feature-extraction",),
    "ignored_keys": ("drop_path_rate", "layer_scale_init_value", "num_stages", *BACKBONE_KEYS),
    "files": preprocessor,
    "any_image_size": True,
}

CONVNEXT = Layout(
    classes={"ConvNextModel": "image-feature-extraction", "ConvNextForImageClassification": "image-classification"},
    rules=(
        *_rules("convnext"),
        Rule("stages.*.blocks.*.scale.weight", "convnext.encoder.stages.*.layers.*.layer_scale_parameter"),
    ),
    prefix="convnext.",
    read_extra=_derive,
    write_extra=_restore,
    constant={"model_type": "convnext"},
    **_COMMON,
)
"""``model_type`` convnext."""

CONVNEXT_V2 = Layout(
    classes={"ConvNextV2Model": "image-feature-extraction", "ConvNextV2ForImageClassification": "image-classification"},
    rules=(
        *_rules("convnextv2"),
        Rule("stages.*.blocks.*.response_norm", "convnextv2.encoder.stages.*.layers.*.grn", leading_axes=3),
    ),
    prefix="convnextv2.",
    read_extra=_derive_v2,
    write_extra=_restore_v2,
    constant={"model_type": "convnextv2"},
    **_COMMON,
)
"""``model_type`` convnextv2."""
