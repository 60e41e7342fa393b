"""ResNet and ConvNeXt checkpoints in the hub's layout, from random transformers models."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.testing import assert_close

from tests.architectures.originals import random_pictures
from tests.checkpoints.image_models import check_answers, check_import, edit, save_image_model
from tests.rows import each_row
from zoo.checkpoints import Checkpoint, export_checkpoint, import_checkpoint
from zoo.checkpoints.configuration import find_layout, read_configuration
from zoo.errors import UsageError
from zoo.models.count import parameter_count
from zoo.registry import load_reference, registry
from zoo_plugins.convnext.config import ConvNeXtConfig
from zoo_plugins.resnet.config import ResNetConfig

SIZES: dict[str, Any] = {"num_channels": 3, "hidden_sizes": [8, 12, 12], "depths": [2, 1, 1], "num_labels": 4}
RESNET = {**SIZES, "embedding_size": 6, "hidden_act": "gelu"}
CONVNEXT = {**SIZES, "num_stages": 3, "patch_size": 3, "hidden_act": "silu", "layer_norm_eps": 1e-3}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bottlenecks": ("ResNetForImageClassification", RESNET),
    "basic blocks": ("ResNetForImageClassification", {**RESNET, "layer_type": "basic"}),
    "strides of the paper": (
        "ResNetForImageClassification",
        {**RESNET, "downsample_in_bottleneck": True, "downsample_in_first_stage": True},
    ),
    "a first stage of other width": ("ResNetModel", {**RESNET, "embedding_size": 8}),
    "convnext": ("ConvNextForImageClassification", {**CONVNEXT, "layer_scale_init_value": 0.3}),
    "convnext without factors": ("ConvNextModel", {**CONVNEXT, "layer_scale_init_value": 0.0}),
    "convnext v2": ("ConvNextV2ForImageClassification", CONVNEXT),
    "convnext v2, features": ("ConvNextV2Model", CONVNEXT),
}
CONVNEXT_PROCESSOR = {"image_processor_type": "ConvNextImageProcessor", "image_mean": [0.4, 0.5, 0.6]}


def save(model_class: str, config: dict[str, Any], folder: Path, **preparation: Any) -> Any:
    """Save a random model and its image processor, for 48 x 48 pixels by default."""
    settings = {**CONVNEXT_PROCESSOR, "size": {"shortest_edge": 48}, **preparation}
    return save_image_model(model_class, config, folder, settings, spread=0.4)


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("name", MODELS)
def test_checkpoint_is_imported_and_published(tmp_path: Path, name: str) -> None:
    """Outputs and images equal the original's; every tensor survives bit for bit, running statistics included."""
    model_class, config = MODELS[name]
    theirs = save(model_class, config, tmp_path / "hub")
    classes = {"images to classes": 4} if "Classification" in model_class else {}
    check_import(theirs, tmp_path, {"images to pixels": 4, **classes}, exact=1e-13)


def test_number_of_batches_survives(tmp_path: Path) -> None:
    """Publication keeps the counters of training batches of the batch norms, which are integers."""
    save(*MODELS["basic blocks"], tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    export_checkpoint(tmp_path / "ours", tmp_path / "back", verify=False)
    counts = [value for key, value in load_file(tmp_path / "back/model.safetensors").items() if "batches" in key]
    assert counts
    assert all(value.dtype == torch.int64 and value == 7 for value in counts)


def random_case(draw: random.Random) -> tuple[str, dict[str, Any], int]:
    """Draw a class, a configuration and the size of an image."""
    stages = draw.randint(1, 4)
    config: dict[str, Any] = {
        "num_channels": draw.choice([1, 3]), "hidden_sizes": [draw.randint(4, 20) for _ in range(stages)],
        "depths": [draw.randint(1, 3) for _ in range(stages)], "hidden_act": draw.choice(["relu", "gelu", "silu"]),
        "num_labels": draw.randint(2, 5),
    }  # fmt: skip
    kind = draw.choice(["ResNet", "ConvNext", "ConvNextV2"])
    if kind == "ResNet":
        config |= {
            "embedding_size": draw.randint(3, 12), "layer_type": draw.choice(["basic", "bottleneck"]),
            "downsample_in_first_stage": draw.random() < 0.5, "downsample_in_bottleneck": draw.random() < 0.5,
        }  # fmt: skip
    else:
        config |= {"num_stages": stages, "patch_size": draw.randint(2, 4), "layer_norm_eps": 10 ** -draw.randint(2, 6)}
        config |= {"layer_scale_init_value": draw.choice([0.0, 0.3])} if kind == "ConvNext" else {}
    return kind + draw.choice(["Model", "ForImageClassification"]), config, draw.randint(33, 60)


@pytest.mark.slow
def test_random_configurations(tmp_path: Path) -> None:
    draw = random.Random(0)
    for number in range(12):
        model_class, config, side = random_case(draw)
        hub = tmp_path / str(number)
        save(model_class, config, hub / "hub")
        (hub / "hub/preprocessor_config.json").unlink()
        imported = import_checkpoint(hub / "hub", hub / "ours", settings=[f"image_size={side}"], verify=True)
        assert imported.comparison.exact < 1e-12, (model_class, config)


@pytest.mark.parametrize("size", [32, 224, {"shortest_edge": 384}, {"shortest_edge": 400}], ids=str)
def test_images_are_prepared_as_by_the_processor(tmp_path: Path, size: Any) -> None:
    """A side below 384 is a part of the shortest edge, and a longer one is that of a stretched image."""
    side = size if isinstance(size, int) else size["shortest_edge"]
    save(*MODELS["basic blocks"], tmp_path / "hub", size=size, crop_pct=0.9, resample=2)
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=True)
    assert imported.answers.counts == {"images to pixels": 4, "images to classes": 4}
    config: Any = imported.spec.config
    assert config.image_size == side
    assert config.image_resize == ("shortest_edge" if side < 384 else "stretch")
    export_checkpoint(tmp_path / "ours", tmp_path / "back")
    load: Any = transformers.AutoImageProcessor.from_pretrained
    before, after = (
        load(tmp_path / name, backend="pil")(random_pictures((97, 61), (411, 700)), return_tensors="pt")["pixel_values"]
        for name in ("hub", "back")
    )
    assert before.shape[-2:] == (side, side)
    assert_close(before, after)


def test_defaults_of_the_processor(tmp_path: Path) -> None:
    """A file that states its class alone."""
    save(*MODELS["basic blocks"], tmp_path / "hub")
    (tmp_path / "hub/preprocessor_config.json").write_text('{"feature_extractor_type": "ConvNextFeatureExtractor"}')
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=True)
    assert imported.answers.counts["images to pixels"] == 4
    config: Any = imported.spec.config
    assert (config.image_size, config.image_resample) == (384, "bicubic")


@pytest.mark.slow
@pytest.mark.parametrize("side", [224, 384])
@pytest.mark.parametrize("name", ["bottlenecks", "convnext"])
def test_answers_of_an_export_equal_those_of_the_pipeline(tmp_path: Path, name: str, side: int) -> None:
    save(*MODELS[name], tmp_path / "hub", size={"shortest_edge": side}, crop_pct=0.875)
    check_answers(tmp_path)


@each_row(
    ("model_type", "kind", "cls"),
    [
        ("resnet", "ResNetConfig", ResNetConfig),
        ("convnext", "ConvNextConfig", ConvNeXtConfig),
        ("convnextv2", "ConvNextV2Config", ConvNeXtConfig),
    ],
)
def test_defaults_equal_those_of_the_original(tmp_path: Path, model_type: str, kind: str, cls: Any) -> None:
    layout, original = find_layout(model_type, None)[2], getattr(transformers, kind)()

    def read(content: dict[str, Any]) -> Any:
        (tmp_path / "config.json").write_text(json.dumps(content))
        return read_configuration(layout, Checkpoint(tmp_path, planned={}), cls)

    assert read({"model_type": model_type}) == read({**original.to_dict(), "architectures": None})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("bottlenecks", {"layer_type": "dense"}, "block must be one of 'basic', 'bottleneck'"),
        ("bottlenecks", {"hidden_act": "mish"}, "hidden_act 'mish' is not supported"),
        ("bottlenecks", {"depths": [2, 1]}, "hidden_sizes has 3 stages, but num_stage_layers 2"),
        ("convnext", {"num_stages": 2}, "num_stages 2 differs from the 3 depths"),
        ("convnext", {"layer_scale_init_value": "small"}, "layer_scale_init_value must be a number, got 'small'"),
        ("convnext", {"patch_size": [4, 2]}, "patch_size must be int"),
        ("convnext v2", {"use_grn": True}, "not understood: use_grn"),
    ],
    ids=str,
)
def test_unsupported_configurations_are_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    edit(save_hub(name, tmp_path), **changes)
    with pytest.raises(UsageError, match=message):
        import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def save_hub(name: str, folder: Path) -> Path:
    save(*MODELS[name], folder / "hub")
    return folder / "hub"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": {"height": 48, "width": 48}}, "size .* is not supported"),
        ({"crop_pct": 0}, "crop_pct 0 is not supported"),
        ({"do_center_crop": True, "crop_size": 40}, "do_center_crop is not supported beside crop_pct"),
    ],
    ids=str,
)
def test_unsupported_processors_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save(*MODELS["bottlenecks"], tmp_path / "hub", **changes)
    with pytest.raises(UsageError, match=message):
        import_checkpoint(tmp_path / "hub", tmp_path / "ours")


@pytest.mark.parametrize(
    ("preset", "model_type", "message"),
    [
        ("convnextv2-test", "convnext", "convnext has no response_norm"),
        ("convnext-test", "convnextv2", "convnextv2 has response_norm and no layer_scale"),
    ],
)
def test_versions_are_not_confused(preset: str, model_type: str, message: str) -> None:
    layout = find_layout(model_type, None)[2]
    with pytest.raises(UsageError, match=message):
        layout.write_config(registry().resolve(preset).config, None)


PUBLISHED = {
    "resnet-50": ("ResNetForImageClassification", {}),
    "resnet-18": (
        "ResNetForImageClassification",
        {"layer_type": "basic", "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2]},
    ),
    "convnext-tiny": ("ConvNextForImageClassification", {}),
    "convnextv2-tiny": ("ConvNextV2ForImageClassification", {}),
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
