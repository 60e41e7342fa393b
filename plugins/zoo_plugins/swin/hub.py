"""Swin and Swin V2 checkpoints in the hub's layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo import UsageError
from zoo.checkpoints import ACTIVATIONS, Checkpoint, Field, Layout, Rule
from zoo_plugins.swin.config import SwinConfig
from zoo_plugins.vit.hub import BACKBONE_KEYS, SWITCH, default_classes, preprocessor

__all__ = ["SWIN", "SWIN_V2"]

_BLOCK = (
    ("norm_1", "layernorm_before"),
    ("norm_2", "layernorm_after"),
    ("attention.query", "attention.self.query"),
    ("attention.key", "attention.self.key"),
    ("attention.value", "attention.self.value"),
    ("attention.output", "attention.output.dense"),
    ("mlp.up", "intermediate.dense"),
    ("mlp.down", "output.dense"),
)
"""Parts of a block of both versions: zoo's name, and the name in the hub's files."""
_TABLE = ("attention.positions.table", "attention.self.relative_position_bias_table")
_IN_MEMORY = (
    ("attention.query", "attention.q_proj"),
    ("attention.key", "attention.k_proj"),
    ("attention.value", "attention.v_proj"),
    ("attention.output", "attention.o_proj"),
    ("attention.positions.table", "attention.relative_position_bias.relative_position_bias_table"),
    ("mlp.up", "mlp.fc1"),
    ("mlp.down", "mlp.fc2"),
)
"""Names of Swin in the memory of transformers 5, which also occur in files."""
_CONTINUOUS = (
    ("attention.positions.up", "attention.self.continuous_position_bias_mlp.0"),
    ("attention.positions.down", "attention.self.continuous_position_bias_mlp.2"),
)


def _rules(prefix: str, *blocks: tuple[str, str]) -> tuple[Rule, ...]:
    """Rules for the tensors of a version with these parts of blocks."""
    stage = f"{prefix}.encoder.layers.*"
    return (
        Rule("patch", f"{prefix}.embeddings.patch_embeddings.projection"),
        Rule("patch_norm", f"{prefix}.embeddings.norm"),
        *(Rule(f"stages.*.blocks.*.{ours}", f"{stage}.blocks.*.{theirs}") for ours, theirs in blocks),
        Rule("stages.*.merging", f"{stage}.downsample"),
        Rule("norm", f"{prefix}.layernorm"),
        Rule("head", "classifier"),
    )


def _sizes(checkpoint: Checkpoint, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of both versions that do not follow from single keys."""
    width, depths = checkpoint.config.get("embed_dim", 96), values["num_stage_layers"]
    if type(width) is not int or not isinstance(depths, list | tuple):
        raise UsageError(f"embed_dim {width!r} with depths {depths!r} is not possible", checkpoint.config_file)
    sizes = {"hidden_sizes": tuple(width * 2**stage for stage in range(len(depths)))}
    return {**default_classes(checkpoint), **sizes}


def _derive(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    fields = _sizes(checkpoint, values)
    _check_windows(SwinConfig.from_dict({**values, **fields}, checkpoint.config_file))
    return fields


def _derive_v2(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    bias, windows = (checkpoint.config.get(key) for key in ("qkv_bias", "pretrained_window_sizes"))
    fields = {
        **_sizes(checkpoint, values),
        "norm_first": False,
        "cosine": True,
        "positions": "continuous",
        "attention_bias": (True if bias is None else bias, False, True if bias is None else bias),
        "pretrained_windows": tuple(windows) if windows and any(windows) else (),
    }
    _check_windows_v2(SwinConfig.from_dict({**values, **fields}, checkpoint.config_file))
    return fields


def _check_windows(c: SwinConfig) -> None:
    """Raise :class:`UsageError` for a window that is larger than a map, where transformers fails."""
    if c.window(stage := len(c.hidden_sizes) - 1) < c.window_size:
        side = c.map_side(stage)
        raise UsageError(f"window_size {c.window_size} exceeds the map of the last stage, {side} x {side}")


def _check_windows_v2(c: SwinConfig) -> None:
    """Raise :class:`UsageError` where transformers, which rounds down the sides of maps to limit windows, computes maps
    with a side of one more."""
    for stage in range(len(c.hidden_sizes)):
        side, rounded = c.map_side(stage), c.image_size // c.patch_size // 2**stage
        if rounded < side and rounded <= c.window_size:
            what = f"image_size {c.image_size} is no multiple of patch_size {c.patch_size} x {2**stage}"
            raise UsageError(f"{what}, and window_size {c.window_size} not smaller than the map of {side} x {side}")


def _width(c: SwinConfig) -> int:
    """Return the width of the first stage, if those of the others follow from it."""
    width = c.hidden_sizes[0]
    if any(size != width * 2**stage for stage, size in enumerate(c.hidden_sizes)):
        raise UsageError(f"hidden_sizes {list(c.hidden_sizes)} cannot be represented, only sizes that double")
    return width


def _restore(c: SwinConfig) -> Mapping[str, Any]:
    if not c.norm_first or c.cosine or c.positions != "table":
        raise UsageError("swin has norms before sub-layers, dot products and positions 'table'", None, "try swinv2")
    _check_windows(c)
    return {"embed_dim": _width(c), "attention_probs_dropout_prob": c.dropout}


def _restore_v2(c: SwinConfig) -> Mapping[str, Any]:
    if c.norm_first or not c.cosine or c.positions != "continuous":
        raise UsageError("swinv2 has norms after sub-layers, cosines and positions 'continuous'", None, "try swin")
    _check_windows_v2(c)
    biases = (c.attention_bias,) * 3 if isinstance(c.attention_bias, bool) else c.attention_bias
    if biases[0] != biases[2] or biases[1]:
        raise UsageError(f"swinv2 has no biases of keys, and equal ones of queries and values, not {list(biases)}")
    windows = c.pretrained_windows or (0,) * len(c.hidden_sizes)
    keys = {"qkv_bias": biases[0], "pretrained_window_sizes": list(windows)}
    return {"embed_dim": _width(c), "attention_probs_dropout_prob": c.dropout, **keys}


_FIELDS = (
    Field("image_size", default=224),
    Field("patch_size", default=4),
    Field("num_channels", default=3),
    Field("depths", "num_stage_layers", default=SwinConfig.num_stage_layers),
    Field("num_heads", default=SwinConfig.num_heads),
    Field("window_size", default=7),
    Field("mlp_ratio", default=4.0),
    Field("hidden_act", "activation", default="gelu", values=ACTIVATIONS),
    Field("hidden_dropout_prob", "dropout", default=0.0),
    Field("layer_norm_eps", "norm_eps", default=1e-5),
)
_COMMON: dict[str, Any] = {
    "headless_tasks": ("image-feature-extraction",),
    "required_values": {"use_absolute_embeddings": False},
    "files": preprocessor,
}
_INERT = (
    "attention_probs_dropout_prob", "drop_path_rate", "embed_dim", "encoder_stride", "hidden_size", "num_layers",
    "path_norm", *BACKBONE_KEYS,
)  # fmt: skip

SWIN = Layout(
    classes={"SwinModel": "image-feature-extraction", "SwinForImageClassification": "image-classification"},
    fields=(*_FIELDS, Field("qkv_bias", "attention_bias", default=True, values=SWITCH)),
    rules=_rules("swin", *_BLOCK, _TABLE, *_IN_MEMORY),
    prefix="swin.",
    ignored_tensors=(r".*\.relative_position_index",),
    ignored_keys=_INERT,
    read_extra=_derive,
    write_extra=_restore,
    any_image_size=True,
    constant={"model_type": "swin"},
    **_COMMON,
)
"""``model_type`` swin."""

SWIN_V2 = Layout(
    classes={"Swinv2Model": "image-feature-extraction", "Swinv2ForImageClassification": "image-classification"},
    fields=_FIELDS,
    rules=(
        *_rules("swinv2", *_BLOCK, *_CONTINUOUS),
        Rule("stages.*.blocks.*.attention.log_scale", "swinv2.encoder.layers.*.blocks.*.attention.self.logit_scale"),
    ),
    prefix="swinv2.",
    ignored_tensors=(r".*\.relative_(position_index|coords_table)",),
    ignored_keys=(*_INERT, "pretrained_window_sizes", "qkv_bias"),
    read_extra=_derive_v2,
    write_extra=_restore_v2,
    constant={"model_type": "swinv2"},
    **_COMMON,
)
"""``model_type`` swinv2."""
