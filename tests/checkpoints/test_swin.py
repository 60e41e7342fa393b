"""Swin and Swin V2 checkpoints in the hub's layout, from random transformers models."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.checkpoints.image_models import check_answers, check_import, edit, save_image_model
from tests.rows import each_row
from zoo.checkpoints import Checkpoint, import_checkpoint
from zoo.checkpoints.configuration import find_layout, read_configuration
from zoo.errors import UsageError
from zoo.models.count import parameter_count
from zoo.registry import load_reference, registry
from zoo_plugins.swin.config import SwinConfig

SIZES: dict[str, Any] = {
    "image_size": 48, "patch_size": 4, "embed_dim": 12, "depths": [2, 1, 2], "num_heads": [2, 3, 4], "window_size": 3,
    "mlp_ratio": 2.6, "hidden_act": "silu", "layer_norm_eps": 1e-3, "num_labels": 4,
}  # fmt: skip
V2 = {**SIZES, "pretrained_window_sizes": [5, 0, 2]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "classes": ("SwinForImageClassification", SIZES),
    "features": ("SwinModel", SIZES),
    "padding": ("SwinForImageClassification", {**SIZES, "image_size": 47, "window_size": 2, "qkv_bias": False}),
    "v2": ("Swinv2ForImageClassification", V2),
    "v2, features": ("Swinv2Model", {**SIZES, "qkv_bias": False}),
    "v2, limited windows": ("Swinv2ForImageClassification", {**SIZES, "window_size": 5}),
}


def save(model_class: str, config: dict[str, Any], folder: Path, **preparation: Any) -> Any:
    """Save a random model and its image processor."""
    side = config["image_size"]
    size = {"size": {"height": side, "width": side}, "resample": 3}
    return save_image_model(
        model_class, config, folder, {"image_processor_type": "ViTImageProcessor", **size, **preparation}
    )


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("name", MODELS)
def test_checkpoint_is_imported_and_published(tmp_path: Path, name: str) -> None:
    """Outputs and images equal the original's, and every tensor survives bit for bit."""
    model_class, config = MODELS[name]
    theirs = save(model_class, config, tmp_path / "hub")
    classes = {"images to classes": 4} if "Classification" in model_class else {}
    check_import(theirs, tmp_path, {"images to pixels": 4, **classes}, side=config["image_size"])


def test_other_names_and_computed_tensors(tmp_path: Path) -> None:
    """Files may have the names that transformers 5 uses in memory, and indices that follow from the window."""
    theirs = save(*MODELS["classes"], tmp_path / "hub")
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=True)
    tensors = {name: tensor.contiguous() for name, tensor in theirs.state_dict().items()}
    assert tensors.keys() != load_file(tmp_path / "hub/model.safetensors").keys()
    index = torch.zeros(9, 9, dtype=torch.int64)
    tensors["swin.encoder.layers.0.blocks.0.attention.self.relative_position_index"] = index
    save_file(tensors, tmp_path / "hub/model.safetensors", {"format": "pt"})
    again = import_checkpoint(tmp_path / "hub", tmp_path / "again", verify=True)
    first, second = (load_file(tmp_path / folder / "model.safetensors") for folder in ("ours", "again"))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert again.spec.config == imported.spec.config


def random_case(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """Draw a class and a configuration in which transformers can compute all maps."""
    stages, kind = draw.randint(1, 4), draw.choice(["Swin", "Swinv2"])
    config: dict[str, Any] = {
        "num_channels": draw.choice([1, 3]), "patch_size": draw.randint(1, 4), "embed_dim": 6 * draw.randint(1, 3),
        "depths": [draw.randint(1, 3) for _ in range(stages)], "qkv_bias": draw.random() < 0.5,
        "num_heads": [draw.choice([1, 2, 3, 6]) for _ in range(stages)], "mlp_ratio": draw.choice([1.0, 2.5, 4.0]),
        "hidden_act": draw.choice(["relu", "gelu", "silu"]), "layer_norm_eps": 10 ** -draw.randint(2, 6),
        "num_labels": draw.randint(2, 5),
    }  # fmt: skip
    last = draw.randint(2, 5)  # at least so many positions along the last map
    unit = config["patch_size"] * 2 ** (stages - 1)
    config |= {"image_size": last * unit, "window_size": draw.randint(1, last)}
    if kind == "Swin":
        config["image_size"] -= draw.randrange(unit)
    else:
        config["window_size"] += draw.choice([0, 3])
        config["pretrained_window_sizes"] = [draw.choice([0, 3, 6]) for _ in range(stages)]
    return kind + draw.choice(["Model", "ForImageClassification"]), config


@pytest.mark.slow
def test_random_configurations(tmp_path: Path) -> None:
    draw = random.Random(0)
    for number in range(16):
        model_class, config = random_case(draw)
        hub = tmp_path / str(number)
        save(model_class, config, hub / "hub")
        (hub / "hub/preprocessor_config.json").unlink()
        imported = import_checkpoint(hub / "hub", hub / "ours", verify=True)
        assert imported.comparison.exact < 1e-12, (model_class, config)


def test_size_of_images_is_that_of_the_processor(tmp_path: Path) -> None:
    """Swin has no weights that depend on it, and transformers does not read it from config.json."""
    save(*MODELS["classes"], tmp_path / "hub", size={"height": 56, "width": 56})
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=True)
    config: Any = imported.spec.config
    assert config.image_size == 56
    assert imported.answers.counts == {"images to pixels": 4, "images to classes": 4}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["classes", "padding", "v2"])
def test_answers_of_an_export_equal_those_of_the_pipeline(tmp_path: Path, name: str) -> None:
    save(*MODELS[name], tmp_path / "hub")
    check_answers(tmp_path)


@each_row(("model_type", "kind"), [("swin", "SwinConfig"), ("swinv2", "Swinv2Config")])
def test_defaults_equal_those_of_the_original(tmp_path: Path, model_type: str, kind: str) -> None:
    layout, original = find_layout(model_type, None)[2], getattr(transformers, kind)()

    def read(content: dict[str, Any]) -> Any:
        (tmp_path / "config.json").write_text(json.dumps(content))
        return read_configuration(layout, Checkpoint(tmp_path, planned={}), SwinConfig)

    assert read({"model_type": model_type}) == read({**original.to_dict(), "architectures": None})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("classes", {"use_absolute_embeddings": True}, "use_absolute_embeddings True is not supported"),
        ("classes", {"window_size": 4}, "window_size 4 exceeds the map of the last stage, 3 x 3"),
        ("classes", {"hidden_act": "mish"}, "hidden_act 'mish' is not supported"),
        ("classes", {"embed_dim": [12]}, r"embed_dim \[12\] with depths"),
        ("classes", {"qkv_bias": [True, False, True]}, "qkv_bias .* is not supported"),
        ("classes", {"patch_size": [4, 2]}, "patch_size must be int"),
        ("classes", {"pretrained_window_sizes": [0, 0, 0]}, "not understood: pretrained_window_sizes"),
        ("v2", {"pretrained_window_sizes": [5, 0, 1]}, "pretrained_windows must be 0, or 2 or more"),
        ("v2", {"image_size": 45}, "image_size 45 is no multiple of patch_size 4 x 4, and window_size 3 not smaller"),
        ("v2", {"qkv_bias": "no"}, "attention_bias must be"),
    ],
    ids=str,
)
def test_unsupported_configurations_are_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    save(*MODELS[name], tmp_path / "hub")
    (tmp_path / "hub/preprocessor_config.json").unlink()
    edit(tmp_path / "hub", **changes)
    with pytest.raises(UsageError, match=message):
        import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("preset", "settings", "model_type", "message"),
    [
        ("swinv2-tiny", ["attention_bias=true"], "swin", "swin has norms before sub-layers, dot products"),
        ("swin-tiny", [], "swinv2", "swinv2 has norms after sub-layers, cosines"),
        ("swinv2-tiny", ["attention_bias=true"], "swinv2", "swinv2 has no biases of keys"),
        ("swin-tiny", ["hidden_sizes=[16, 24]"], "swin", "cannot be represented, only sizes that double"),
        ("swin-tiny", ["window_size=5"], "swin", "window_size 5 exceeds the map of the last stage, 4 x 4"),
        ("swin-tiny", ["attention_bias=[true, false, true]"], "swin", "qkv_bias cannot represent"),
    ],
)
def test_models_without_an_original_are_not_published(
    preset: str, settings: list[str], model_type: str, message: str
) -> None:
    layout = find_layout(model_type, None)[2]
    with pytest.raises(UsageError, match=message):
        layout.write_config(registry().resolve(preset, settings).config, None)


DEEP = {"depths": [2, 2, 18, 2]}
BASE = {**DEEP, "embed_dim": 128, "num_heads": [4, 8, 16, 32]}
WINDOWS = {"image_size": 256, "window_size": 8}
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "swin-t": ("SwinForImageClassification", {}),
    "swin-s": ("SwinForImageClassification", DEEP),
    "swin-b": ("SwinForImageClassification", BASE),
    "swin-l": ("SwinForImageClassification", {**DEEP, "embed_dim": 192, "num_heads": [6, 12, 24, 48]}),
    "swinv2-t": ("Swinv2ForImageClassification", WINDOWS),
    "swinv2-s": ("Swinv2ForImageClassification", {**WINDOWS, **DEEP}),
    "swinv2-b": ("Swinv2ForImageClassification", {**WINDOWS, **BASE}),
}


@each_row("preset", PUBLISHED)
def test_presets_have_the_tensors_of_the_original(preset: str) -> None:
    """Their number of elements, for 1000 classes, on the meta device."""
    model_class, config = PUBLISHED[preset]
    cls = getattr(transformers, model_class)
    spec = registry().resolve(preset)
    with torch.device("meta"):
        theirs = cls(cls.config_class(**config, num_labels=1000))
        ours = load_reference(spec.architecture.model, spec.plugin)(spec.config)
    assert parameter_count(spec) == sum(parameter.numel() for parameter in theirs.parameters())
    assert sorted(tensor.numel() for tensor in ours.state_dict().values()) == sorted(
        tensor.numel() for tensor in theirs.state_dict().values()
    )
