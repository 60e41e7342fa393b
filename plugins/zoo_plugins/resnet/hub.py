"""ResNet checkpoints in the hub's layout."""

from __future__ import annotations

from zoo.checkpoints import ACTIVATIONS, Field, Layout, Rule
from zoo_plugins.resnet.config import ResNetConfig
from zoo_plugins.vit.hub import BACKBONE_KEYS, default_classes, preprocessor

__all__ = ["RESNET"]

_STAGE = "resnet.encoder.stages.*.layers.*"


RESNET = Layout(
    classes={"ResNetModel": "image-feature-extraction", "ResNetForImageClassification": "image-classification"},
    fields=(
        Field("num_channels", default=3),
        Field("embedding_size", "stem_size", default=64),
        Field("hidden_sizes", default=ResNetConfig.hidden_sizes),
        Field("depths", "num_stage_layers", default=ResNetConfig.num_stage_layers),
        Field("layer_type", "block", default="bottleneck"),
        Field("hidden_act", "activation", default="relu", values=ACTIVATIONS),
        Field("downsample_in_first_stage", default=False),
        Field("downsample_in_bottleneck", default=False),
    ),
    rules=(
        Rule("stem.layer.convolution", "resnet.embedder.embedder.convolution"),
        Rule("stem.layer.norm", "resnet.embedder.embedder.normalization"),
        Rule("stages.*.*.shortcut.convolution", f"{_STAGE}.shortcut.convolution"),
        Rule("stages.*.*.shortcut.norm", f"{_STAGE}.shortcut.normalization"),
        Rule("stages.*.*.layers.*.convolution", f"{_STAGE}.layer.*.convolution"),
        Rule("stages.*.*.layers.*.norm", f"{_STAGE}.layer.*.normalization"),
        Rule("head", "classifier.1"),
    ),
    prefix="resnet.",
    headless_tasks=("image-feature-extraction",),
    ignored_keys=BACKBONE_KEYS,
    read_extra=lambda checkpoint, _: default_classes(checkpoint),
    files=preprocessor,
    any_image_size=True,
    constant={"model_type": "resnet"},
)
"""``model_type`` resnet."""
