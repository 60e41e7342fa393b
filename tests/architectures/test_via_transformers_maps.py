"""Models of transformers with an answer for each pixel: classes and depths, of imports and of exports."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from numpy.testing import assert_allclose
from PIL import Image

from tests.architectures.originals import save_random
from tests.architectures.test_via_transformers_detection import photographs
from tests.conftest import Result
from tests.exported import sign_export
from zoo.checkpoints import export_checkpoint, import_checkpoint
from zoo_export.export import export_model
from zoo_runtime import load_session

Zoo = Callable[..., Result]

VIT: dict[str, Any] = {
    "image_size": 32, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2,
    "intermediate_size": 24,
}  # fmt: skip
NECK: dict[str, Any] = {"neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 8}
DPT = {**VIT, **NECK, "backbone_out_indices": [0, 1, 2, 3]}
DINOV2: Any = transformers.Dinov2Config
DINO = DINOV2(
    image_size=28, patch_size=7, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, apply_layernorm=True,
    out_features=["stage1", "stage2", "stage3", "stage4"], reshape_hidden_states=False,
)  # fmt: skip
SEGFORMER = {"hidden_sizes": [8, 16, 24, 32], "num_attention_heads": [1, 2, 2, 4], "decoder_hidden_size": 16}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "SegformerForSemanticSegmentation": ("SegformerImageProcessor", {**SEGFORMER, "depths": [1] * 4}, {}),
    "DPTForDepthEstimation": ("DPTImageProcessor", DPT, {}),
    "DPTForSemanticSegmentation": ("DPTImageProcessor", DPT, {}),
    "BeitForSemanticSegmentation": (
        "BeitImageProcessor", {**VIT, "out_indices": [1, 2, 3, 4], "pool_scales": [1, 2]}, {"do_center_crop": False}
    ),
    "MobileNetV2ForSemanticSegmentation": (
        "MobileNetV2ImageProcessor", {"depth_multiplier": 0.35},
        {"size": {"shortest_edge": 36}, "crop_size": {"height": 32, "width": 32}},
    ),
    "DepthAnythingForDepthEstimation": (
        "DPTImageProcessor", {**NECK, "backbone_config": DINO, "patch_size": 7, "reassemble_hidden_size": 16},
        {"size": {"height": 28, "width": 28}},
    ),
}  # fmt: skip
"""For some classes: the image processor, the settings of a small model and those of the processor."""


def save(model_class: str, folder: Path, **changes: Any) -> Any:
    """Save a random model and its image processor, and return the model."""
    processor, sizes, preparation = MODELS[model_class]
    labels = {"id2label": {0: "cat", 1: "dog", 2: "owl"}} if "Segmentation" in model_class else {}
    config = getattr(transformers, model_class).config_class(**sizes, **labels)
    model = save_random(model_class, config, folder)
    body = getattr(transformers, processor + "Pil")(**{"size": {"height": 32, "width": 32}, **preparation}).to_dict()
    body = {**body, "image_processor_type": processor, **changes}
    (folder / "preprocessor_config.json").write_text(json.dumps(body))
    return model


def pipeline_of(folder: Path, model: Any) -> Any:
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")  # type: ignore[no-untyped-call]
    depth = "Depth" in type(model).__name__
    kind: Any = transformers.DepthEstimationPipeline if depth else transformers.ImageSegmentationPipeline
    return kind(model=model, image_processor=processor, device="cpu")


def class_map(answer: Any) -> np.ndarray[Any, Any]:
    runs = answer["map"]
    return np.repeat(runs["classes"], runs["lengths"]).reshape(runs["height"], runs["width"])


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("model_class", MODELS)
def test_answers_for_pixels_are_compared(tmp_path: Path, model_class: str) -> None:
    save(model_class, tmp_path / "hub")
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers")
    assert imported.comparison.exact < 1e-13
    kind = "depths" if "Depth" in model_class else "segments"
    assert imported.answers.counts == {"images to pixels": 4, f"images to {kind}": 4}


@pytest.mark.slow
@pytest.mark.parametrize("model_class", MODELS)
def test_answers_of_an_export_equal_those_of_the_pipeline(tmp_path: Path, model_class: str) -> None:
    theirs = pipeline_of(tmp_path / "hub", save(model_class, tmp_path / "hub"))
    import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    assert export_model(tmp_path / "ours").passed
    with load_session(tmp_path / "ours") as session:
        answers = session.run(photographs())
    for answer, image in zip(answers, photographs(), strict=True):
        expected = theirs(image)
        if "Depth" in model_class:
            depth = expected["predicted_depth"].numpy()
            assert answer["predicted_depth"].shape == (image.height, image.width)
            assert_allclose(answer["predicted_depth"], depth, rtol=0, atol=1e-4 * max(1, np.abs(depth).max()))
        else:
            found = class_map(answer)
            names = ["cat", "dog", "owl"]
            same = sum(((found == names.index(row["label"])) & (np.asarray(row["mask"]) > 0)).sum() for row in expected)
            assert found.size == image.height * image.width
            assert same >= found.size - 3  # where two logits are equal up to rounding
            assert {row["label"] for row in answer["segments"]} == {row["label"] for row in expected}
            assert sum(row["pixels"] for row in answer["segments"]) == found.size


@pytest.mark.slow
def test_segments_of_a_file(tmp_path: Path, zoo: Zoo) -> None:
    model_class = "SegformerForSemanticSegmentation"
    theirs = pipeline_of(tmp_path / "hub", save(model_class, tmp_path / "hub"))
    photographs()[3].save("picture.png")
    import_checkpoint(tmp_path / "hub", "ours")
    sign_export(Path("ours"))
    (answer,) = zoo("run", "ours", "picture.png", "--json").json["results"]
    expected = theirs(photographs()[3])
    assert (answer["map"]["height"], answer["map"]["width"]) == (251, 333)
    assert [row["label"] for row in answer["segments"]] == [row["label"] for row in expected]
    for mine, its in zip(answer["segments"], expected, strict=True):
        assert mine["pixels"] == pytest.approx((np.asarray(its["mask"]) > 0).sum(), abs=3)
    best = max(answer["segments"], key=lambda row: row["pixels"])
    shown = zoo("run", "ours", "picture.png").out
    assert shown.startswith(f"'picture.png': {best['label']}: {best['pixels'] / (251 * 333):.4f}")
    result = zoo("run", "ours", "picture.png", "picture.png", "--maps", "maps", "--json")
    assert "maps: 2 maps written" in result.err
    assert [row["file"] for row in result.json["results"]] == ["1-picture.png", "2-picture.png"]
    classes = np.asarray(Image.open("maps/1-picture.png"))
    assert (classes.dtype, classes.shape) == (np.uint8, (251, 333))
    assert np.array_equal(classes, class_map(answer))
    assert {row["class"]: row["label"] for row in answer["segments"]} == {
        number: ("cat", "dog", "owl")[number] for number in np.unique(classes).tolist()
    }
    zoo("run", "ours", "picture.png", "--maps", "maps").failed(2, "is not empty", "--maps maps", "--force")
    zoo("run", "ours", "picture.png", "--maps", "picture.png").failed(6, "picture.png")
    assert zoo("run", "ours", "picture.png", "--maps", "maps", "--force").status == 0
    assert {path.name for path in Path("maps").iterdir()} == {"1-picture.png", "2-picture.png"}
    resumed = ("run", "ours", "picture.png", "picture.png", "--maps", "maps", "-o", "out.jsonl", "--resume")
    assert zoo(*resumed).status == 0  # as after an interruption between a map and its result
    Path("out.jsonl").unlink()
    Path("maps/2-picture.png").write_bytes(b"of others")
    zoo(*resumed).failed(2, "is not the map of this input: maps/2-picture.png: move it elsewhere")
    assert Path("maps/2-picture.png").read_bytes() == b"of others"


@pytest.mark.slow
def test_depths_of_a_file_and_of_published_files(tmp_path: Path, zoo: Zoo) -> None:
    model_class = "DPTForDepthEstimation"
    theirs = pipeline_of(tmp_path / "hub", save(model_class, tmp_path / "hub"))
    photographs()[0].save("picture.png")
    import_checkpoint(tmp_path / "hub", "ours")
    sign_export(Path("ours"))
    depth = theirs(photographs()[0])["predicted_depth"].numpy()
    (answer,) = zoo("run", "ours", "picture.png", "--json").json["results"]
    assert_allclose(answer["predicted_depth"], depth, rtol=0, atol=1e-4 * max(1, np.abs(depth).max()))
    assert "'picture.png': 120 x 64 pixels, depths from" in zoo("run", "ours", "picture.png", "--maps", "maps").out
    assert_allclose(np.load("maps/1-picture.npy"), answer["predicted_depth"], rtol=1e-6)
    export_checkpoint("ours", tmp_path / "back")
    again = pipeline_of(tmp_path / "back", getattr(transformers, model_class).from_pretrained(tmp_path / "back"))
    assert_allclose(again(photographs()[0])["predicted_depth"].numpy(), depth, rtol=0, atol=1e-5 * np.abs(depth).max())


def test_other_depths_than_those_of_the_pipeline_are_noticed(tmp_path: Path, zoo: Zoo) -> None:
    save("DPTForDepthEstimation", tmp_path / "hub")
    refused = zoo("import", tmp_path / "hub", "-o", "ours", "--set", "depth_resample=bilinear")
    refused.failed(4, "the answer to an image of 97 x 61 pixels is not that of the original")
    save("DPTForDepthEstimation", tmp_path / "hub", keep_aspect_ratio=True, size={"height": 32, "width": 48})
    zoo("import", tmp_path / "hub", "-o", "ours").failed(2, "DPTForDepthEstimation cannot be called with images alone")
    assert not Path("ours").exists()
