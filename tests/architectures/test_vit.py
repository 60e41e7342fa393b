"""ViT and DeiT against transformers with the same weights, and invariances of patch sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import (
    DeiTConfig,
    DeiTForImageClassification,
    DeiTForImageClassificationWithTeacher,
    DeiTModel,
    PreTrainedModel,
    ViTForImageClassification,
    ViTModel,
)
from transformers import ViTConfig as TheirConfig

from tests.rows import each_row
from zoo import Config, UsageError
from zoo.registry import registry
from zoo_plugins.vit.config import ViTConfig
from zoo_plugins.vit.model import ViT

SIZES: dict[str, Any] = {
    "image_size": 12,
    "patch_size": 4,
    "num_channels": 2,
    "hidden_size": 15,
    "num_layers": 2,
    "num_heads": 3,
    "intermediate_size": 22,
    "norm_eps": 1e-4,
    "num_classes": 5,
}
FEATURES = {"task": "image-feature-extraction"}
# Names of the activations in transformers.
ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "silu": "silu"}


def make(**options: Any) -> ViT:
    """Build a small float64 model in evaluation mode with random weights, biases and norms."""
    model = ViT(ViTConfig(**{**SIZES, **options})).double().eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return model.requires_grad_(False)


def transformers_twin(ours: ViT) -> PreTrainedModel:
    """Build the transformers model with the same outputs and our weights."""
    c = ours.config
    kind: type[PreTrainedModel]
    if c.task == "image-feature-extraction":
        kind = DeiTModel if c.distilled else ViTModel
    elif c.distilled:
        kind = DeiTForImageClassificationWithTeacher if c.distillation_head else DeiTForImageClassification
    else:
        kind = ViTForImageClassification
    config = (DeiTConfig if c.distilled else TheirConfig)(
        image_size=c.image_size,
        patch_size=c.patch_size,
        num_channels=c.num_channels,
        hidden_size=c.hidden_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        intermediate_size=c.intermediate_size,
        hidden_act=ACTIVATIONS[c.activation],
        layer_norm_eps=c.norm_eps,
        qkv_bias=c.attention_bias,
        num_labels=c.num_classes,
        attn_implementation="sdpa",  # the eager softmax rounds to float32
    )
    options = {"add_pooling_layer": c.pooler} if c.task == "image-feature-extraction" else {}
    theirs = kind(config, **options).double().eval().requires_grad_(False)
    encoder = theirs.base_model
    encoder.embeddings.patch_embeddings.projection.load_state_dict(ours.embeddings.patch.state_dict())
    encoder.embeddings.cls_token.copy_(ours.embeddings.class_token)
    encoder.embeddings.position_embeddings.copy_(ours.embeddings.position)
    if c.distilled:
        encoder.embeddings.distillation_token.copy_(ours.embeddings.distillation_token)
    for block, layer in zip(ours.blocks, encoder.layers, strict=True):
        pairs = {
            "q_proj": block.attention.query,
            "k_proj": block.attention.key,
            "v_proj": block.attention.value,
            "o_proj": block.attention.output,
        }
        for name, part in pairs.items():
            getattr(layer.attention, name).load_state_dict(part.state_dict())
        layer.layernorm_before.load_state_dict(block.norm_1.state_dict())
        layer.layernorm_after.load_state_dict(block.norm_2.state_dict())
        layer.mlp.fc1.load_state_dict(block.mlp.up.state_dict())
        layer.mlp.fc2.load_state_dict(block.mlp.down.state_dict())
    encoder.layernorm.load_state_dict(ours.norm.state_dict())
    if c.pooler:
        encoder.pooler.dense.load_state_dict(ours.pooler.state_dict())
    if c.distillation_head:
        theirs.cls_classifier.load_state_dict(ours.head.state_dict())
        theirs.distillation_classifier.load_state_dict(ours.distillation_head.state_dict())
    elif c.task == "image-classification":
        theirs.classifier.load_state_dict(ours.head.state_dict())
    return theirs


def images(c: ViTConfig, batch: int = 3) -> Tensor:
    """Draw normalised pixels."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, c.num_channels, c.image_size, c.image_size, generator=generator, dtype=torch.float64)


CASES: dict[str, dict[str, Any]] = {
    "classes": {},
    "distilled, two heads": {"distilled": True},
    "distilled, one head": {"distilled": True, "distillation_head": False},
    "features": FEATURES,
    "pooled": {**FEATURES, "pooler": True},
    "distilled, pooled": {**FEATURES, "pooler": True, "distilled": True},
    "no biases": {"attention_bias": False},
    "one head": {"num_heads": 1, "norm_eps": 1e-12},
    "five layers": {"num_layers": 5, "intermediate_size": 7, "num_heads": 5},
    "grey, one patch": {"num_channels": 1, "patch_size": 12},
    "ignored border": {"image_size": 14, "patch_size": 4, "num_channels": 3},
    **{name: {"activation": name} for name in ACTIVATIONS},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_equals_transformers(options: dict[str, Any]) -> None:
    """All declared outputs, and no others."""
    ours = make(**options)
    pixels = images(ours.config)
    actual, expected = ours(pixels), transformers_twin(ours)(pixels)
    (graph,) = ours.config.graphs()
    assert list(actual) == [tensor.name for tensor in graph.output_tensors()]
    for tensor in graph.output_tensors():
        assert actual[tensor.name].shape == tensor.shape({"batch": 3})
        assert_close(actual[tensor.name], expected[tensor.name], atol=1e-12, rtol=0)


def as_patches(pixels: Tensor, size: int) -> Tensor:
    """(B, C, S, S) -> (B, P, C, size, size), row by row."""
    parts = pixels.unfold(2, size, size).unfold(3, size, size)  # (B, C, rows, columns, size, size)
    return parts.flatten(2, 3).transpose(1, 2)


def as_image(patches: Tensor, side: int) -> Tensor:
    """Invert :func:`as_patches`, with ``side`` patches per row."""
    rows = patches.transpose(1, 2).unflatten(2, (side, side))  # (B, C, rows, columns, size, size)
    return rows.transpose(3, 4).flatten(4, 5).flatten(2, 3)


@settings(deadline=None, max_examples=20)
@given(order=st.permutations(range(9)), distilled=st.booleans())
def test_patch_order_matters_only_through_positions(order: list[int], distilled: bool) -> None:
    """Swapping patches together with their positions does not change the special tokens' outputs."""
    model = make(**FEATURES, distilled=distilled)
    pixels, special = images(model.config), model.config.num_special_tokens
    before = model(pixels)["last_hidden_state"]
    moved = as_image(as_patches(pixels, 4)[:, order], 3)
    model.embeddings.position.copy_(
        model.embeddings.position[:, [*range(special), *(special + place for place in order)]]
    )
    after = model(moved)["last_hidden_state"]
    assert_close(after[:, :special], before[:, :special], atol=1e-12, rtol=0)
    assert_close(after[:, special:], before[:, special:][:, order], atol=1e-12, rtol=0)


def test_patch_order_matters() -> None:
    """Swapping patches without their positions changes the output."""
    model = make()
    pixels = images(model.config)
    assert_close(as_image(as_patches(pixels, 4), 3), pixels, atol=0, rtol=0)
    moved = as_image(as_patches(pixels, 4).flip(1), 3)
    assert (model(moved)["logits"] - model(pixels)["logits"]).abs().max() > 1e-3


def test_distilled_logits_are_the_mean_of_two_heads() -> None:
    """Each head reads its own token; with the other head's weights at 0, logits are halved."""
    both, one = make(distilled=True), make(distilled=True, distillation_head=False)
    features = make(**FEATURES, distilled=True)
    shared = {name: tensor for name, tensor in both.state_dict().items() if "head" not in name}
    features.load_state_dict(shared)
    one.load_state_dict({**shared, "head.weight": both.head.weight, "head.bias": both.head.bias})
    pixels = images(both.config)
    second = both.distillation_head(features(pixels)["last_hidden_state"][:, 1])
    assert_close(both(pixels)["logits"], (one(pixels)["logits"] + second) / 2, atol=1e-12, rtol=0)


def test_dropout_acts_in_training_only() -> None:
    model = make(dropout=0.5)
    pixels = images(model.config)
    assert model(pixels)["logits"].equal(make()(pixels)["logits"])
    model.train()
    assert not model(pixels)["logits"].equal(model(pixels)["logits"])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"num_heads": 4}, "hidden_size 15 is not divisible by num_heads 4"),
    "patches": ({"patch_size": 13}, "patch_size 13 is larger than image_size 12"),
    "no size": ({"image_size": 0}, "image_size must be positive, got 0"),
    "two sides": ({"image_size": [8, 12]}, r"image_size must be int, got \[8, 12\]"),
    "mean": ({"image_mean": (0.1, 0.2, 0.3)}, "has 3 numbers for num_channels 2"),
    "no deviation": ({"image_std": (0.1, 0.0)}, "image_std must be positive"),
    "labels": ({"labels": ["cat", "dog"]}, "2 labels for num_classes 5"),
    "a head without its token": ({"distillation_head": True}, "distilled is False"),
    "a pooler": ({"pooler": True}, "pooler is for the task 'image-feature-extraction'"),
    "no head": ({**FEATURES, "distilled": True, "distillation_head": True}, "distillation_head is for the task"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_invalid_configurations_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ViTConfig.from_dict({**SIZES, **options})


@each_row("options", CASES.values())
def test_configuration_survives_plain_data_round_trip(options: dict[str, Any]) -> None:
    config: Config = ViTConfig(**{**SIZES, **options})
    assert ViTConfig.from_dict(config.to_dict()) == config


def test_initialisation() -> None:
    """Weights, tokens and positions lie within two standard deviations of 0.02; biases are 0 and norms 1."""
    spec = registry().resolve("vit-tiny", ["distilled=true"])
    model = spec.model_class()(spec.config)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            assert parameter.eq(1.0 if name.endswith("weight") else 0.0).all(), name
        else:
            assert 0 < parameter.abs().max() <= 0.04, name
            assert parameter.std().item() == pytest.approx(0.0176, rel=0.3), name  # of a truncated normal
