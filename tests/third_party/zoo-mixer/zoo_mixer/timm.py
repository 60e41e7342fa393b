"""Checkpoint layout of timm's mixers. Sizes are read from the shapes of tensors."""

import math

from torch import nn

import zoo
from zoo.checkpoints import Layout, Rule

SHOWN = {
    "hidden_size": ("stem.proj.weight", 0),
    "num_channels": ("stem.proj.weight", 1),
    "patch_size": ("stem.proj.weight", 2),
    "num_patches": ("blocks.0.mlp_tokens.fc1.weight", 1),
    "token_intermediate_size": ("blocks.0.mlp_tokens.fc1.weight", 0),
    "intermediate_size": ("blocks.0.mlp_channels.fc1.weight", 0),
    "num_classes": ("head.weight", 0),
}
NAMES = {
    (32, 8, 512): "mixer_s32_224",
    (16, 8, 512): "mixer_s16_224",
    (32, 12, 768): "mixer_b32_224",
    (16, 12, 768): "mixer_b16_224",
    (32, 24, 1024): "mixer_l32_224",
    (16, 24, 1024): "mixer_l16_224",
}
"""timm's names of mixers by patch size, layers and width. It has no others."""
ARGUMENTS = {"img_size", "in_chans", "mlp_ratio", "num_classes"}
"""Arguments allowed in its files, which the tensors determine anyway."""


def derive(checkpoint, values):
    """Derive zoo's configuration."""
    name, where = checkpoint.config.get("architecture", ""), checkpoint.config_file
    arguments, pretrained = (checkpoint.config.get(key) or {} for key in ("model_args", "pretrained_cfg"))
    if name.partition(".")[0] not in NAMES.values() or arguments.keys() - ARGUMENTS:
        said = ", ".join([name, *sorted(arguments.keys() - ARGUMENTS)])
        raise zoo.UsageError(f"not supported ({said})", where, f"known: {', '.join(NAMES.values())}")
    found = {}
    for ours, (tensor, axis) in SHOWN.items():
        shape = checkpoint.tensors[tensor].shape if tensor in checkpoint.tensors else ()
        if len(shape) <= axis:
            raise zoo.ArtifactError(f"not a mixer with a classifier: {tensor} is missing or invalid", checkpoint.where)
        found[ours] = shape[axis]
    numbers = {name.split(".")[1] for name in checkpoint.tensors if name.startswith("blocks.")}
    found["image_size"] = found["patch_size"] * math.isqrt(found.pop("num_patches"))
    means = {f"image_{key}": pretrained[key] for key in ("mean", "std") if pretrained.get(key)}
    return {**found, "num_layers": len(numbers), **means}


def restore(c):
    """Build timm's config.json."""
    sizes = (c.patch_size, c.num_layers, c.hidden_size)
    if (c.activation, c.norm_eps) != ("gelu", 1e-6) or sizes not in NAMES:
        what = "patch_size {}, num_layers {}, hidden_size {}".format(*sizes)
        raise zoo.UsageError(f"timm has no mixer with {what}, {c.activation} and norm_eps {c.norm_eps}")
    return {
        "architecture": NAMES[sizes],
        "num_classes": c.num_classes,
        "num_features": c.hidden_size,
        "model_args": {
            "img_size": c.image_size,
            "in_chans": c.num_channels,
            "mlp_ratio": [(size + 0.5) / c.hidden_size for size in (c.token_intermediate_size, c.intermediate_size)],
            "num_classes": c.num_classes,
        },
        "pretrained_cfg": {
            "num_classes": c.num_classes,
            "input_size": [c.num_channels, c.image_size, c.image_size],
            "mean": list(c.image_mean),
            "std": list(c.image_std),
            "first_conv": "stem.proj",
            "classifier": "head",
        },
    }


class Original(nn.Module):
    """timm's own model with zoo's names of inputs and outputs."""

    def __init__(self, checkpoint, config):
        super().__init__()
        try:
            import timm

            self.model = timm.create_model(f"local-dir:{checkpoint.path.resolve()}", pretrained=True)
        except Exception as error:  # including those of a torchvision that does not match torch
            raise ImportError(f"timm cannot load it: {' '.join(str(error).split())[:200]}") from error

    def forward(self, pixel_values):
        return {"logits": self.model(pixel_values)}


TIMM = Layout(
    classes={"MlpMixer": "image-classification"},
    fields=(),
    rules=(
        Rule("patch", "stem.proj"),
        Rule("blocks.*.norm_1", "blocks.*.norm1"),
        Rule("blocks.*.mix_patches.up", "blocks.*.mlp_tokens.fc1"),
        Rule("blocks.*.mix_patches.down", "blocks.*.mlp_tokens.fc2"),
        Rule("blocks.*.norm_2", "blocks.*.norm2"),
        Rule("blocks.*.mix_channels.up", "blocks.*.mlp_channels.fc1"),
        Rule("blocks.*.mix_channels.down", "blocks.*.mlp_channels.fc2"),
        Rule("norm", "norm"),
        Rule("head", "head"),
    ),
    required_values={"global_pool": "avg"},
    ignored_keys=(
        "architecture", "label_descriptions", "label_names", "model_args", "num_classes", "num_features",
        "pretrained_cfg",
    ),
    read_extra=derive,
    write_extra=restore,
    original=Original,
)  # fmt: skip
"""``zoo import DIR --model-type timm-mixer``."""
