"""Plain vision transformers in timm's layout. Settings missing from config.json follow from the tensors' shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from zoo import ArtifactError, UsageError
from zoo.checkpoints import Checkpoint, Layout, Rule
from zoo_plugins.via_timm.images import describe_preparation, preparation, process_images, stated_preparation
from zoo_plugins.vit.config import ViTConfig

__all__ = ["TIMM"]

_STANDARD = re.compile(
    r"(?:vit|deit)_(tiny|small|base|large|huge|giant|gigantic)_(?:distilled_)?patch\d+_\d+(?:[._].*)?"
)
_HEADS = {
    "tiny": (192, 3), "small": (384, 6), "base": (768, 12), "large": (1024, 16), "huge": (1280, 16),
    "giant": (1408, 16), "gigantic": (1664, 16),
}  # fmt: skip
"""Width and number of heads of each standard size. The number of heads cannot be read from tensors."""
_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"}
_PLAIN = {
    "class_token": True, "final_norm": True, "fc_norm": None, "global_pool": "token", "init_values": None,
    "no_embed_class": False, "pos_embed": "learn", "pre_norm": False, "proj_bias": True, "qk_norm": False,
    "reg_tokens": 0,
}  # fmt: skip
"""Arguments for which only these values are supported."""
_SHOWN = ("depth", "embed_dim", "img_size", "in_chans", "mlp_ratio", "num_classes", "patch_size", "qkv_bias")
"""Arguments that follow from the tensors."""
_TRAINING = ("drop_path_rate", "drop_rate", "fix_init", "weight_init")


def _derive(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    tensors, where = checkpoint.tensors, checkpoint.config_file
    arguments, pretrained = (checkpoint.config.get(key) or {} for key in ("model_args", "pretrained_cfg"))
    for key, value in arguments.items():
        if key not in (*_SHOWN, *_TRAINING, "act_layer", "num_heads") and _PLAIN.get(key) != value:
            raise UsageError(f"model_args.{key} {value!r} is not supported", where, "import it with --via timm")
    activation = arguments.get("act_layer") or "gelu"
    if activation not in _ACTIVATIONS:
        what = f"model_args.act_layer {activation!r} is not supported"
        raise UsageError(what, where, f"known: {', '.join(_ACTIVATIONS)}")
    hidden, channels, patch, width = _shape(checkpoint, "patch_embed.proj.weight", 4)
    rows, (intermediate, _) = _shape(checkpoint, "pos_embed", 3)[1], _shape(checkpoint, "blocks.0.mlp.fc1.weight", 2)
    distilled, classifier = "dist_token" in tensors, "head.weight" in tensors
    side = math.isqrt(max(0, rows - 1 - distilled))
    if patch != width or side == 0 or rows != side * side + 1 + distilled:
        raise UsageError(f"patches of {patch} x {width} with {rows} positions are not those of a square image", where)
    if classifier and distilled != ("head_dist.weight" in tensors):
        raise ArtifactError("only one of dist_token and head_dist.weight is present", checkpoint.where)
    fields: dict[str, Any] = {
        **preparation(stated_preparation(checkpoint), where),
        "task": "image-classification" if classifier else "image-feature-extraction",
        "image_size": _image_size(arguments, pretrained, side, patch),
        "patch_size": patch,
        "num_channels": channels,
        "hidden_size": hidden,
        "num_layers": len({name.split(".")[1] for name in tensors if name.startswith("blocks.")}),
        "num_heads": values.get("num_heads") or _heads(checkpoint, arguments, hidden),
        "intermediate_size": intermediate,
        "activation": _ACTIVATIONS[activation],
        "norm_eps": 1e-6,
        "attention_bias": "blocks.0.attn.qkv.bias" in tensors,
        "distilled": distilled,
        **({"num_classes": _shape(checkpoint, "head.weight", 2)[0]} if classifier else {}),
    }
    names = checkpoint.config.get("label_names")
    return {**fields, "labels": [str(name) for name in names]} if classifier and isinstance(names, list) else fields


def _shape(checkpoint: Checkpoint, name: str, rank: int) -> tuple[int, ...]:
    """Return the shape of a tensor that every vision transformer has."""
    tensor = checkpoint.tensors.get(name)
    if tensor is None or len(tensor.shape) != rank:
        shape = "missing" if tensor is None else f"of shape {tensor.shape}"
        raise ArtifactError(f"not a plain vision transformer: {name} is {shape}", checkpoint.where)
    return tensor.shape


def _image_size(arguments: Mapping[str, Any], pretrained: Mapping[str, Any], side: int, patch: int) -> int:
    """Return the declared size if it matches the number of patches: tensors do not show a margin below one patch."""
    for said in (arguments.get("img_size"), pretrained.get("input_size")):
        size = said[-1] if isinstance(said, Sequence) and said else said
        if isinstance(size, int) and size // patch == side:
            return size
    return side * patch


def _heads(checkpoint: Checkpoint, arguments: Mapping[str, Any], hidden: int) -> int:
    """Return the declared number of heads, or that of the standard size in the name if the widths agree."""
    if isinstance(arguments.get("num_heads"), int):
        return int(arguments["num_heads"])
    name = str(checkpoint.config.get("architecture"))
    standard = _STANDARD.fullmatch(name)
    width, heads = _HEADS[standard[1]] if standard else (0, 0)
    if width != hidden:
        what = f"the number of heads of {name} with width {hidden} is not known"
        raise UsageError(what, checkpoint.config_file, "set num_heads")
    return heads


def _restore(c: ViTConfig) -> Mapping[str, Any]:
    if c.task == "image-classification" and c.distilled and not c.distillation_head:
        raise UsageError("timm has no distillation token without its head", "distillation_head")
    if c.positions != "learned" or not isinstance(c.attention_bias, bool):
        what = f"positions {c.positions!r} with attention_bias {c.attention_bias} cannot be represented"
        raise UsageError(what, None, "only learned positions, and one value for all biases")
    hidden, intermediate = c.hidden_size, c.intermediate_size or 0
    ratio = intermediate / hidden
    classes = c.num_classes if c.task == "image-classification" else 0
    return {
        "architecture": "deit_base_distilled_patch16_224" if c.distilled else "vit_base_patch16_224",
        "num_classes": classes,
        "num_features": hidden,
        "model_args": {  # complete, so that the architecture's name does not matter
            "img_size": c.image_size,
            "patch_size": c.patch_size,
            "in_chans": c.num_channels,
            "num_classes": classes,
            "embed_dim": hidden,
            "depth": c.num_layers,
            "num_heads": c.num_heads,
            "mlp_ratio": ratio if int(hidden * ratio) == intermediate else (intermediate + 0.5) / hidden,
            "qkv_bias": c.attention_bias,
            "act_layer": c.activation,
        },
        "pretrained_cfg": {
            "num_classes": classes,
            **describe_preparation(c),
            "fixed_input_size": True,
            "first_conv": "patch_embed.proj",
            "classifier": ["head", "head_dist"] if c.distilled else "head",
        },
    }


class _Timm(nn.Module):
    """A timm model with zoo's names of inputs and outputs."""

    def __init__(self, model: nn.Module, task: str) -> None:
        super().__init__()
        self.model: Any = model
        self.task = task

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        if self.task == "image-classification":
            return {"logits": self.model(pixel_values)}
        return {"last_hidden_state": self.model.forward_features(pixel_values)}


def _original(checkpoint: Checkpoint, config: ViTConfig) -> nn.Module:
    try:
        import timm

        model = timm.create_model(f"local-dir:{checkpoint.path.resolve()}", pretrained=True)
    except Exception as error:  # from timm on untrusted files, or from a torchvision that does not match torch
        raise ImportError(f"timm cannot load it: {' '.join(str(error).split())[:200]}") from error
    original: type[_Timm] = type(type(model).__name__, (_Timm,), {"__module__": "timm"})  # name shown in reports
    return original(model, config.task)


TIMM = Layout(
    classes={"VisionTransformer": ("image-classification", "image-feature-extraction")},
    fields=(),
    rules=(
        Rule("embeddings.class_token", "cls_token"),
        Rule("embeddings.distillation_token", "dist_token"),
        Rule("embeddings.position", "pos_embed"),
        Rule("embeddings.patch", "patch_embed.proj"),
        Rule("blocks.*.norm_1", "blocks.*.norm1"),
        Rule(("blocks.*.attention.query", "blocks.*.attention.key", "blocks.*.attention.value"), "blocks.*.attn.qkv"),
        Rule("blocks.*.attention.output", "blocks.*.attn.proj"),
        Rule("blocks.*.norm_2", "blocks.*.norm2"),
        Rule("blocks.*.mlp.up", "blocks.*.mlp.fc1"),
        Rule("blocks.*.mlp.down", "blocks.*.mlp.fc2"),
        Rule("norm", "norm"),
        Rule("head", "head"),
        Rule("distillation_head", "head_dist"),
    ),
    required_values={"global_pool": "token"},
    ignored_keys=(
        "architecture",
        "label_descriptions",
        "label_names",
        "model_args",
        "num_classes",
        "num_features",
        "pretrained_cfg",
    ),
    read_extra=_derive,
    write_extra=_restore,
    original=_original,
    process_images=process_images,
)
"""Checkpoints written by timm, whose config.json names an ``architecture``."""
