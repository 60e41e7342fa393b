"""Detectors of transformers: how objects are found, answers of exports, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from tests.architectures.originals import save_random
from tests.conftest import Result
from tests.exported import sign_export
from zoo.checkpoints import export_checkpoint, import_checkpoint
from zoo.detection import find_objects
from zoo.errors import ParityError
from zoo_export.export import export_model
from zoo_runtime import load_session

Zoo = Callable[..., Result]

RESNET: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
LAST: dict[str, Any] = {"out_features": ["stage4"]}
THREE: dict[str, Any] = {"out_features": ["stage2", "stage3", "stage4"]}
DETR: dict[str, Any] = {
    "use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False, "d_model": 16, "num_queries": 5,
    "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
    "backbone_config": transformers.ResNetConfig(**RESNET, **LAST),
}  # fmt: skip
RT_DETR: dict[str, Any] = {
    "backbone_config": transformers.RTDetrResNetConfig(**RESNET, **THREE),
    "d_model": 16, "encoder_hidden_dim": 16, "encoder_in_channels": [16, 24, 32], "encoder_ffn_dim": 16,
    "encoder_attention_heads": 2, "num_queries": 6, "decoder_in_channels": [16, 16, 16], "decoder_ffn_dim": 16,
    "decoder_layers": 1, "decoder_attention_heads": 2,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "YolosForObjectDetection": (
        "YolosImageProcessor",
        {"image_size": [64, 64], "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
         "intermediate_size": 16, "num_detection_tokens": 5},
    ),
    "DetrForObjectDetection": ("DetrImageProcessor", DETR),
    "ConditionalDetrForObjectDetection": ("ConditionalDetrImageProcessor", DETR),
    "RTDetrForObjectDetection": ("RTDetrImageProcessor", RT_DETR),
}  # fmt: skip
"""For some classes: the image processor and the settings of a small model."""
SIZES = ((120, 64), (64, 64), (47, 200), (333, 251))
"""Widths and heights of images."""


def save(model_class: str, folder: Path, *, labels: Sequence[str] = ("cat", "dog", "owl"), **changes: Any) -> Any:
    """Save a random model and its image processor, for squares of 64 pixels, and return the model."""
    processor, sizes = MODELS[model_class]
    config = getattr(transformers, model_class).config_class(**sizes, id2label=dict(enumerate(labels)))
    model = save_random(model_class, config, folder)
    body = getattr(transformers, processor + "Pil")(size={"height": 64, "width": 64}).to_dict()
    body = {**body, "image_processor_type": processor, **changes}
    (folder / "preprocessor_config.json").write_text(json.dumps(body))
    return model


def photographs(sizes: Iterable[tuple[int, int]] = SIZES) -> list[Image.Image]:
    """Return images of several proportions: noise over a gradient."""
    random = np.random.default_rng(1)
    images = []
    for width, height in sizes:
        across = np.linspace(0, 200, width)[None, :, None] * np.linspace(0, 1, height)[:, None, None]
        images.append(Image.fromarray((across + random.integers(0, 56, (height, width, 3))).astype(np.uint8)))
    return images


@pytest.mark.parametrize(
    ("processor", "problem", "most"),
    [
        ("DetrImageProcessorPil", "single_label_classification", 150),
        ("YolosImageProcessorPil", "single_label_classification", 150),
        ("ConditionalDetrImageProcessorPil", "multi_label_classification", 100),
        ("DeformableDetrImageProcessorPil", "multi_label_classification", 100),
        ("RTDetrImageProcessorPil", "multi_label_classification", 150),
    ],
)
def test_objects_in_random_outputs(processor: str, problem: str, most: int) -> None:
    torch.manual_seed(0)
    logits, boxes = torch.randn(1, 150, 9), torch.rand(1, 150, 4)
    find: Any = getattr(transformers, processor)().post_process_object_detection
    every = find_objects(logits[0].numpy(), boxes[0].numpy(), problem, most, (70, 230))
    assert len(every.scores) == most
    for threshold in (0.0, every.scores.mean()):
        (theirs,) = find(SimpleNamespace(logits=logits, pred_boxes=boxes), threshold, torch.tensor([[70, 230]]))
        found = every.above(threshold)
        assert found.classes.tolist() == theirs["labels"].tolist()
        assert found.boxes.tolist() == theirs["boxes"].tolist()
        np.testing.assert_allclose(found.scores, theirs["scores"], rtol=0, atol=1e-6)


def pipeline_of(folder: Path, model: Any) -> Any:
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")  # type: ignore[no-untyped-call]
    kind: Any = transformers.ObjectDetectionPipeline
    return kind(model=model, image_processor=processor, device="cpu")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("model_class", MODELS)
def test_objects_are_compared(tmp_path: Path, model_class: str) -> None:
    save(model_class, tmp_path / "hub")
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers")
    assert imported.comparison.exact < 1e-13
    assert imported.answers.counts == {"images to pixels": 4, "images to objects": 4}


@pytest.mark.slow
@pytest.mark.parametrize("model_class", ["YolosForObjectDetection", "RTDetrForObjectDetection"])
def test_objects_of_one_class(tmp_path: Path, model_class: str) -> None:
    save(model_class, tmp_path / "hub", labels=["cat"])
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers")
    assert imported.answers.counts["images to objects"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("model_class", [name for name in MODELS if name != "RTDetrForObjectDetection"])
def test_answers_of_an_export_equal_those_of_the_pipeline(tmp_path: Path, model_class: str) -> None:
    theirs = pipeline_of(tmp_path / "hub", save(model_class, tmp_path / "hub"))
    import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    assert export_model(tmp_path / "ours").passed
    with load_session(tmp_path / "ours") as session:
        for threshold in (0.0, 0.5):
            for answer, image in zip(session.run(photographs(), threshold=threshold), photographs(), strict=True):
                expected = theirs(image, threshold=threshold)
                assert [row["label"] for row in answer["objects"]] == [row["label"] for row in expected]
                for mine, its in zip(answer["objects"], expected, strict=True):
                    assert mine["score"] == pytest.approx(its["score"], abs=1e-5)
                    for edge, place in its["box"].items():
                        assert abs(mine["box"][edge] - place) <= 1


@pytest.mark.slow
def test_export_of_a_model_that_chooses_its_queries_is_refused(tmp_path: Path) -> None:
    save("RTDetrForObjectDetection", tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    with pytest.raises(ParityError, match="amplifies rounding errors too much"):
        export_model(tmp_path / "ours")


def test_published_files_find_the_same_objects(tmp_path: Path) -> None:
    model_class = "YolosForObjectDetection"
    save(model_class, tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", tmp_path / "back")
    before, after = (
        pipeline_of(tmp_path / name, getattr(transformers, model_class).from_pretrained(tmp_path / name))
        for name in ("hub", "back")
    )
    image = photographs()[0]
    assert before(image, threshold=0.3) == after(image, threshold=0.3) != []


@pytest.mark.slow
def test_objects_in_a_file(tmp_path: Path, zoo: Zoo) -> None:
    theirs = pipeline_of(tmp_path / "hub", save("YolosForObjectDetection", tmp_path / "hub"))
    picture = photographs()[3]
    picture.getexif()[0x0112] = 6  # to be rotated by 90 degrees
    picture.save("picture.png", exif=picture.getexif())
    import_checkpoint(tmp_path / "hub", "ours")
    sign_export(Path("ours"))
    shown = zoo("run", "ours", "picture.png", "--option", "threshold=0.3").out.splitlines()
    expected = theirs("picture.png", threshold=0.3)
    assert shown[0] == f"'picture.png': {len(expected)} objects"
    places = [", ".join(map(str, row["box"].values())) for row in expected]
    assert [line.partition(" at ")[2] for line in shown[1:]] == places
    zoo("run", "ours", "picture.png", "--option", "threshold=2").failed(2, "threshold must lie in [0, 1], got 2")


def test_processors_that_zoo_does_not_know_are_refused(tmp_path: Path, zoo: Zoo) -> None:
    save("YolosForObjectDetection", tmp_path / "hub", size={"max_height": 64, "max_width": 80})
    file = tmp_path / "hub" / "preprocessor_config.json"
    problem = "YolosImageProcessorPil prepares images in a way that zoo does not know"
    zoo("import", tmp_path / "hub", "-o", "ours").failed(2, problem)
    save("YolosForObjectDetection", tmp_path / "hub", image_processor_type="RTDetrImageProcessor")
    problem = "RTDetrImageProcessorPil makes answers of outputs in a way that zoo does not know"
    zoo("import", tmp_path / "hub", "-o", "ours").failed(2, problem, file.name)
    save("YolosForObjectDetection", tmp_path / "hub", image_processor_type="ViTImageProcessor")
    zoo("import", tmp_path / "hub", "-o", "ours").failed(
        2, "ViTImageProcessorPil has no answers for object-detection", file.name
    )
    file.unlink()
    zoo("import", tmp_path / "hub", "-o", "ours").failed(2, "object-detection needs preprocessor_config.json")
    assert not Path("ours").exists()


def test_other_objects_than_those_of_the_pipeline_are_noticed(tmp_path: Path, zoo: Zoo) -> None:
    save("YolosForObjectDetection", tmp_path / "hub")
    refused = zoo("import", tmp_path / "hub", "-o", "ours", "--set", "max_detections=4")
    refused.failed(4, "the answer to an image of 97 x 61 pixels is not that of the original")
    assert not Path("ours").exists()
