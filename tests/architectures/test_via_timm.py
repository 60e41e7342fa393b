"""Models of timm: construction by name, import, export, and how images are prepared."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

import zoo as library
from tests.conftest import ROOT, Result
from tests.packaging.test_pages import BLOCK, check_output, commands
from tests.timm_library import import_timm
from zoo.checkpoints import export_checkpoint, import_checkpoint
from zoo.images import ImageReader
from zoo_export.export import export_model
from zoo_runtime import load_session

Zoo = Callable[..., Result]

MODELS = ("test_resnet", "test_vit", "test_efficientnet", "test_convnext", "test_maxvit", "test_nfnet", "test_byobnet")
"""Small models of several families: with batch norm, attention, relative positions, standardised weights."""


@pytest.fixture(scope="module", autouse=True)
def timm() -> Any:
    return import_timm()


def save(timm: Any, name: str, folder: Path, **arguments: Any) -> Any:
    """Save a random model, whose parameters are large enough for its answers to differ, as timm does."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = timm.create_model(name, **{"num_classes": 5, **arguments}).eval().requires_grad_(False)
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    timm.models.save_for_hf(model, folder, safe_serialization=True)
    return model


def edit(folder: Path, **changes: Any) -> None:
    """Change values of a checkpoint's config.json; those of its sections are added."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    for key, value in changes.items():
        values[key] = {**values[key], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(values))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", MODELS)
def test_model_is_built_exported_and_run(timm: Any, zoo: Zoo, name: str) -> None:
    size = 160 if name == "test_maxvit" else 32  # the former has windows of a fixed size
    assert zoo("build", f"timm:{name}", "--set", "num_classes=4", "--set", f"image_size={size}").status == 0
    assert export_model(name).passed
    ours = library.load(name)
    theirs = timm.create_model(name, num_classes=4).eval()
    theirs.load_state_dict({key: ours.state_dict()[key] for key in theirs.state_dict()})
    assert ours.config.cost().parameters == sum(parameter.numel() for parameter in theirs.parameters())
    pixels = np.random.default_rng(0).random((size, size, 3), dtype=np.float32)
    with load_session(name) as session:
        (answer,) = session.run([pixels])
    mean, std = (np.float32(theirs.pretrained_cfg[key]) for key in ("mean", "std"))
    with torch.inference_mode():
        chances = theirs(torch.from_numpy(((pixels - mean) / std).transpose(2, 0, 1)[None]))[0].softmax(-1)
    found = {int(row["label"]): row["probability"] for row in answer["classes"]}
    assert [found[number] for number in range(4)] == pytest.approx(chances.tolist(), abs=1e-4)


@pytest.mark.slow
def test_commands_of_the_page(zoo: Zoo) -> None:
    page = (ROOT / "docs" / "architectures" / "via-timm.md").read_text(encoding="utf-8")
    (block,) = (text for language, text in BLOCK.findall(page) if language == "console")
    for command, wanted in commands(block):
        done = zoo(*command.split()[1:])
        check_output(command, wanted, (done.out + done.err).splitlines())


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("classes", [5, 0])
@pytest.mark.parametrize("name", MODELS)
def test_checkpoint_round_trip(timm: Any, tmp_path: Path, name: str, classes: int) -> None:
    theirs = save(timm, name, tmp_path / "hub", num_classes=classes)
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="via-timm", verify=None)
    assert imported.comparison.exact < 1e-13
    ours = library.load(tmp_path / "ours")
    image = torch.randn(2, 3, 160, 160)
    with torch.inference_mode():
        if classes:
            assert_close(ours(image)["logits"], theirs(image))
        else:
            features = theirs.forward_features(image)
            assert_close(ours(image)["last_hidden_state"], features)
            assert_close(ours(image)["pooler_output"], theirs.forward_head(features, pre_logits=True))
    export_checkpoint(tmp_path / "ours", tmp_path / "back", verify=False)
    back = timm.create_model(f"local-dir:{tmp_path}/back", pretrained=True).eval()
    with torch.inference_mode():
        assert torch.equal(back(image), theirs(image))


def test_importer_follows_from_the_name(timm: Any, tmp_path: Path, zoo: Zoo) -> None:
    """Plain vision transformers have an architecture of zoo; ``--via timm`` chooses timm's own class."""
    save(timm, "test_convnext", tmp_path / "convnext")
    assert "via-timm for image-classification" in zoo("import", "convnext", "-o", "one").out
    arguments = {"depth": 1, "embed_dim": 192, "num_heads": 3, "img_size": 32}
    save(timm, "vit_tiny_patch16_224", tmp_path / "plain", **arguments)
    assert "vit for image-classification" in zoo("import", "plain", "-o", "two").out
    assert "via-timm for image-classification" in zoo("import", "plain", "-o", "three", "--via", "timm").out
    assert library.load("three").config.image_size == 32


def test_arguments_and_labels_are_read(timm: Any, tmp_path: Path) -> None:
    save(timm, "test_vit", tmp_path / "hub", in_chans=1, img_size=64, global_pool="avg")
    edit(tmp_path / "hub", label_names=list("abcde"), pretrained_cfg={"mean": [0.1], "std": [0.2], "crop_pct": 0.9})
    config: Any = import_checkpoint(tmp_path / "hub", tmp_path / "ours").spec.config
    assert (config.labels, config.image_size, config.num_channels) == (tuple("abcde"), 64, 1)
    assert (config.image_mean, config.image_std, config.image_crop) == ((0.1,), (0.2,), 0.9)
    assert config.arguments["global_pool"] == "avg"


@pytest.mark.slow
def test_computed_tensors_are_stored(timm: Any, tmp_path: Path, zoo: Zoo) -> None:
    """Swin's tables of relative positions and masks are no part of its checkpoints."""
    small = {"img_size": 32, "patch_size": 4, "window_size": 4, "embed_dim": 8, "depths": (1, 2), "num_heads": (2, 2)}
    save(timm, "swin_tiny_patch4_window7_224", tmp_path / "hub", **small)
    edit(tmp_path / "hub", pretrained_cfg={"fixed_input_size": False})
    import_checkpoint(
        tmp_path / "hub", tmp_path / "ours", verify=True if importlib.util.find_spec("torchvision") else None
    )
    ours = library.load(tmp_path / "ours")
    assert any("relative_position_index" in name for name in ours.fixed_tensors)
    assert export_model(tmp_path / "ours").passed


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "file of weights": ({"model_args": {"checkpoint_path": "weights.pth"}}, "'checkpoint_path' is no argument"),
    "download": ({"model_args": {"pretrained": True}}, "'pretrained' is no argument"),
    "description": ({"model_args": {"pretrained_cfg": {"file": "x"}}}, "'pretrained_cfg' is no argument"),
    "place": ({"architecture": "hf-hub:owner/name"}, "has no model 'hf-hub:owner/name'"),
    "unknown name": ({"architecture": "test_resnets"}, "did you mean 'test_resnet'"),
    "unknown argument": ({"model_args": {"depth_of": 3}}, "timm cannot construct test_resnet"),
    "deep": (
        {"architecture": "convnext_tiny", "model_args": {"depths": [10**9, 1, 1, 1]}},
        "arguments.depths 1000000000",
    ),
    "border": ({"pretrained_cfg": {"crop_mode": "border"}}, "crop_mode 'border' is not supported"),
    "beyond": ({"pretrained_cfg": {"crop_pct": 1.1}}, "crop_pct 1.1 is not supported"),
    "not square": ({"pretrained_cfg": {"input_size": [3, 160, 128]}}, "only squares"),
    "size of text": ({"pretrained_cfg": {"input_size": "large"}}, "input_size"),
    "classes": ({"num_classes": "five"}, "num_classes 'five' must be a number"),
}


@pytest.mark.parametrize(("changes", "problem"), REFUSED.values(), ids=REFUSED)
def test_configurations_that_are_refused(
    timm: Any, tmp_path: Path, zoo: Zoo, changes: dict[str, Any], problem: str
) -> None:
    save(timm, "test_resnet", tmp_path / "hub")
    edit(tmp_path / "hub", **changes)
    done = zoo("import", "hub", "-o", "ours")
    assert (done.status in (2, 3), done.err.count("\n")) == (True, 1)
    assert problem in done.err
    assert not Path("ours").exists()


def test_names_that_are_refused(zoo: Zoo) -> None:
    zoo("build", "timm:test_resnets").failed(2, "has no model 'test_resnets'", "did you mean 'test_resnet'")
    zoo("build", "timm:local-dir:x").failed(2, "timm:local-dir:x")
    zoo("build", "torch:test_resnet").failed(2, "unknown model 'torch:test_resnet'")
    zoo("build", "timm:vit_tiny_patch16_224", "--set", "image_size=64").failed(
        2, "cannot read images of 64 x 64 pixels"
    )


def test_description_follows_settings(zoo: Zoo) -> None:
    shown = zoo("show", "timm:test_resnet", "--set", "num_classes=3", "--json").json
    built = library.create_model("timm:test_resnet", num_classes=3)
    assert shown["parameters"] == sum(parameter.numel() for parameter in built.parameters())


@pytest.mark.parametrize(
    "name", ["test_resnet.r160_in1k", "test_vit.r160_in1k", "resnet50.a1_in1k", "levit_128s.fb_dist_in1k"]
)
def test_images_are_prepared_as_by_timm(timm: Any, name: str) -> None:
    """By its own transforms, for which torchvision is needed."""
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    fields = _fields(name)
    stated = timm.get_pretrained_cfg(name).to_dict()
    keys = ("input_size", "interpolation", "mean", "std", "crop_pct", "crop_mode")
    theirs = timm.data.create_transform(is_training=False, **{key: stated[key] for key in keys})
    size = fields["image_size"]
    ours = ImageReader.of({"image_margin": "even", **fields}.get, 3, size, size)
    random = np.random.default_rng(0)
    for height, width in ((61, 97), (64, 64), (148, 53), (427, 640), (239, 300), (236, 235)):
        image = Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))
        assert_close(torch.from_numpy(ours.normalize(ours.read(image))), theirs(image), rtol=0, atol=1e-5)


def _fields(name: str) -> dict[str, Any]:
    from zoo_plugins.via_timm.config import ViaTimmConfig

    return ViaTimmConfig.named_fields(name)


def test_margin_is_rounded_as_by_torchvision() -> None:
    """``int(round(margin / 2))``: 1, 3, 5 and 7 pixels leave 0, 2, 2 and 4 on the left."""
    for surplus, left in ((1, 0), (2, 1), (3, 2), (5, 2), (7, 4)):
        row = np.arange(8 + surplus, dtype=np.uint8)
        image = Image.fromarray(np.tile(row, (8 + surplus, 1)))
        options = {"image_crop": 8 / (8 + surplus), "image_resize": "shortest_edge", "image_resample": "nearest"}
        assert ImageReader.of({**options, "image_margin": "even"}.get, 1, 8, 8).read(image)[0, 0, 0] == left
        assert ImageReader.of(options.get, 1, 8, 8).read(image)[0, 0, 0] == surplus // 2
