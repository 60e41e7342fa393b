"""Image models of transformers: how images are prepared, classes and features, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch.testing import assert_close

import zoo as library
from tests.architectures.originals import save_random
from tests.conftest import Result
from zoo.checkpoints import export_checkpoint, import_checkpoint
from zoo_export.export import export_model
from zoo_runtime import load_session

Zoo = Callable[..., Result]

NARROW = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
SMALL_VIT = {
    "image_size": 32, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ResNetForImageClassification": (
        "ConvNextImageProcessor", {"embedding_size": 8, **NARROW}, {"size": {"shortest_edge": 32}, "crop_pct": 0.875}
    ),
    "BeitForImageClassification": (
        "BeitImageProcessor", SMALL_VIT, {"size": {"height": 40, "width": 40}, "crop_size": {"height": 32, "width": 32}}
    ),
    "ConvNextV2ForImageClassification": ("ConvNextImageProcessor", NARROW, {"size": {"shortest_edge": 384}}),
    "LevitForImageClassification": (
        "LevitImageProcessor",
        {"image_size": 64, "hidden_sizes": [16, 32, 48], "num_attention_heads": [1, 2, 3], "depths": [1, 1, 1],
         "key_dim": [8, 8, 8]},
        {"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}},
    ),
    "SegformerForImageClassification": (
        "SegformerImageProcessor",
        {"hidden_sizes": [8, 16, 24, 32], "num_attention_heads": [1, 2, 2, 4]}, {"size": {"height": 64, "width": 64}},
    ),
    "SwinForImageClassification": (
        "ViTImageProcessor",
        {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 2], "num_heads": [2, 2], "window_size": 4},
        {"size": {"height": 32, "width": 32}, "resample": 3, "image_mean": [0.48, 0.45, 0.4]},
    ),
    "CLIPForImageClassification": (
        "CLIPImageProcessor",
        {"text_config": {"num_hidden_layers": 1}, "vision_config": {**SMALL_VIT, "projection_dim": 16}},
        {"size": {"shortest_edge": 36}, "crop_size": {"height": 32, "width": 32}},
    ),
    "Dinov2WithRegistersModel": (
        "BitImageProcessor",
        {key: value for key, value in SMALL_VIT.items() if key != "intermediate_size"},
        {"size": {"shortest_edge": 36}, "crop_size": {"height": 32, "width": 32}},
    ),
}  # fmt: skip
"""For some classes: the image processor, its settings and those of a small model."""


def save(model_class: str, folder: Path, **changes: Any) -> Any:
    """Save a random model and its image processor."""
    processor, sizes, preparation = MODELS[model_class]
    labels = {"id2label": {0: "cat", 1: "dog", 2: "owl"}} if "Classification" in model_class else {}
    config = getattr(transformers, model_class).config_class(**sizes, **labels)
    model = save_random(model_class, config, folder)
    body = getattr(transformers, processor + "Pil")(**preparation).to_dict()
    body = {**body, "image_processor_type": processor, **changes}
    (folder / "preprocessor_config.json").write_text(json.dumps(body))
    return model


def photographs() -> list[Image.Image]:
    random = np.random.default_rng(1)
    return [Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in ((60, 90), (200, 71))]


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("model_class", MODELS)
def test_images_and_classes_are_compared(tmp_path: Path, model_class: str) -> None:
    save(model_class, tmp_path / "hub")
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers")
    assert imported.comparison.exact < 1e-13
    classes = {"images to classes": 4} if "Classification" in model_class else {}
    assert imported.answers.counts == {"images to pixels": 4, **classes}


@pytest.mark.slow
@pytest.mark.parametrize("model_class", MODELS)
def test_answers_of_an_export_equal_those_of_the_original(tmp_path: Path, model_class: str) -> None:
    theirs = save(model_class, tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers", verify=False)
    assert export_model(tmp_path / "ours").passed
    read: Any = transformers.AutoImageProcessor.from_pretrained
    processor = read(tmp_path / "hub", backend="pil")
    images = photographs()
    with load_session(tmp_path / "ours") as session:
        found = list(session.run(images))
    with torch.inference_mode():
        wanted = theirs(processor(images, return_tensors="pt")["pixel_values"])
    for number, answer in enumerate(found):
        if "Classification" in model_class:
            chances = wanted.logits[number].softmax(-1)
            assert {row["label"]: pytest.approx(row["probability"], abs=1e-4) for row in answer["classes"]} == dict(
                zip(("cat", "dog", "owl"), chances.tolist(), strict=True)
            )
        else:
            assert_close(
                torch.from_numpy(answer["last_hidden_state"]), wanted.last_hidden_state[number], atol=1e-4, rtol=1e-4
            )


@pytest.mark.parametrize("model_class", ["ResNetForImageClassification", "Dinov2WithRegistersModel"])
def test_published_files_prepare_images_alike(tmp_path: Path, model_class: str) -> None:
    save(model_class, tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers")
    export_checkpoint(tmp_path / "ours", tmp_path / "back")
    read: Any = transformers.AutoImageProcessor.from_pretrained
    before, after = (
        read(tmp_path / name, backend="pil")(photographs(), return_tensors="pt")["pixel_values"]
        for name in ("hub", "back")
    )
    assert_close(before, after)
    before, after = (
        getattr(transformers, model_class).from_pretrained(tmp_path / name)(before)[0] for name in ("hub", "back")
    )
    assert torch.equal(before, after)


@pytest.mark.parametrize(
    "changes",
    [
        {"do_rescale": False, "image_mean": [127.5, 120, 110], "image_std": [127.5, 100, 90]},
        {"rescale_factor": 1 / 127.5, "image_mean": [1, 1, 1], "image_std": [1, 0.9, 0.8]},
        {"rescale_factor": 1 / 127.5, "do_normalize": False},
        {"do_convert_rgb": True},
        {"do_convert_rgb": False},
    ],
)
def test_scales_and_transparency_of_processors(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Also of the processor that is written back."""
    config = transformers.IJepaConfig(**SMALL_VIT)
    transformers.IJepaForImageClassification(config).save_pretrained(tmp_path / "hub")
    body = {"image_processor_type": "ViTImageProcessor", "size": {"height": 32, "width": 32}, **changes}
    (tmp_path / "hub" / "preprocessor_config.json").write_text(json.dumps(body))
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=True)
    assert imported.answers.counts["images to classes"] == 4
    assert imported.spec.config.image_transparency == ("white" if changes.get("do_convert_rgb") else "ignored")
    export_checkpoint(tmp_path / "ours", tmp_path / "back")
    again = import_checkpoint(tmp_path / "back", tmp_path / "again", verify=True).spec.config
    assert again.images() == imported.spec.config.images()


def test_huge_sizes_of_a_processor_are_refused_at_once(tmp_path: Path, zoo: Zoo) -> None:
    save("ResNetForImageClassification", tmp_path / "hub")
    file = tmp_path / "hub" / "preprocessor_config.json"
    for size in ({"shortest_edge": 10**7}, {"height": 10**7, "width": 32}):
        file.write_text(json.dumps({**json.loads(file.read_text()), "size": size}))
        zoo("import", tmp_path / "hub", "-o", "ours", "--via", "transformers").failed(
            3, "pixels: at most 67,108,864 are allowed"
        )


def test_preparation_that_zoo_does_not_know_is_refused(tmp_path: Path, zoo: Zoo) -> None:
    """MobileViT's channels are in the order blue, green, red."""
    sizes = {"hidden_sizes": [8, 12, 16], "neck_hidden_sizes": [4, 8, 8, 8, 8, 8, 16], "image_size": 64}
    transformers.MobileViTForImageClassification(transformers.MobileViTConfig(**sizes)).save_pretrained(
        tmp_path / "hub"
    )
    processor = transformers.MobileViTImageProcessorPil(
        size={"shortest_edge": 72}, crop_size={"height": 64, "width": 64}
    )
    body = {**processor.to_dict(), "image_processor_type": "MobileViTImageProcessor"}
    (tmp_path / "hub" / "preprocessor_config.json").write_text(json.dumps(body))
    zoo("import", tmp_path / "hub", "-o", "ours").failed(
        2, "MobileViTImageProcessorPil prepares images in a way that zoo does not know", "preprocessor_config.json"
    )
    assert not Path("ours").exists()


def test_defaults_of_a_processor_that_a_layout_does_not_know_are_noticed(tmp_path: Path, zoo: Zoo) -> None:
    """CLIP's processor resizes with another filter than ViT's if its file names none."""
    torch.manual_seed(0)
    transformers.ViTForImageClassification(transformers.ViTConfig(**SMALL_VIT)).save_pretrained(tmp_path / "hub")
    body = {
        "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 32}, "do_center_crop": True,
        "crop_size": {"height": 32, "width": 32}, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    }  # fmt: skip
    file = tmp_path / "hub" / "preprocessor_config.json"
    file.write_text(json.dumps(body))
    zoo("import", tmp_path / "hub", "-o", "ours").failed(4, "an image of 97 x 61 pixels becomes other pixels than by")
    assert not Path("ours").exists()
    file.write_text(json.dumps({**body, "resample": 3}))
    assert "4 images to pixels, 4 images to classes" in zoo("import", tmp_path / "hub", "-o", "ours").out


def test_images_of_another_size_than_the_class_reads_are_refused(tmp_path: Path, zoo: Zoo) -> None:
    config = transformers.IJepaConfig(**SMALL_VIT)
    transformers.IJepaForImageClassification(config).save_pretrained(tmp_path / "hub")
    body = {"image_processor_type": "ViTImageProcessor", "size": {"height": 24, "width": 24}}
    (tmp_path / "hub" / "preprocessor_config.json").write_text(json.dumps(body))
    zoo("import", tmp_path / "hub", "-o", "ours").failed(2, "doesn't match model (32*32)")


def test_size_of_a_class_that_has_none(tmp_path: Path, zoo: Zoo) -> None:
    save("ResNetForImageClassification", tmp_path / "hub")
    (tmp_path / "hub" / "preprocessor_config.json").unlink()
    options = ("--via", "transformers", "--set", "image_size=48")
    assert zoo("import", tmp_path / "hub", "-o", "ours", *options).status == 0
    assert library.load("ours").config.image_size == 48


def test_size_in_the_section_for_images(tmp_path: Path) -> None:
    save("CLIPForImageClassification", tmp_path / "hub")
    (tmp_path / "hub" / "preprocessor_config.json").unlink()
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers")
    assert imported.spec.config.image_size == 32


def test_logits_of_another_name(tmp_path: Path) -> None:
    """PP-LCNet returns them as its last hidden state."""
    config = transformers.PPLCNetConfig(scale=0.25, class_expand=16, id2label={0: "cat", 1: "dog", 2: "owl"})
    theirs = save_random("PPLCNetForImageClassification", config, tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", settings=["image_size=32", "num_channels=3"])
    pixels = torch.rand(2, 3, 32, 32)
    with torch.inference_mode():
        assert torch.equal(library.load(tmp_path / "ours")(pixel_values=pixels)["logits"], theirs(pixels)[0])


def test_tensor_without_elements(tmp_path: Path) -> None:
    save("Dinov2WithRegistersModel", tmp_path / "hub")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "hub", num_register_tokens=0)
    transformers.Dinov2WithRegistersModel(config).save_pretrained(tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers")
    assert library.load(tmp_path / "ours").embeddings.register_tokens.shape == (1, 0, 16)


def test_features_get_a_classifier(tmp_path: Path) -> None:
    save("Dinov2WithRegistersModel", tmp_path / "hub")
    imported = import_checkpoint(
        tmp_path / "hub",
        tmp_path / "ours",
        model_type="transformers",
        task="image-classification",
        settings=["labels=bad,good"],
    )
    assert imported.spec.config.model_class == "Dinov2WithRegistersForImageClassification"
    assert set(imported.head.new) == {"classifier.weight", "classifier.bias"}
