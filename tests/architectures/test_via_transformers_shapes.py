"""Image models of transformers whose images are not square: imported, exported, answering as the original."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.testing import assert_allclose
from PIL import Image

import zoo as library
from tests.architectures.originals import save_random, word_tokenizer
from tests.architectures.test_via_transformers_detection import photographs
from tests.conftest import Result
from tests.exported import sign_export
from zoo.checkpoints import Exact, export_checkpoint, import_checkpoint, process_images
from zoo.errors import ArtifactError, UsageError
from zoo.images import ImageReader
from zoo_export.export import export_model
from zoo_plugins.via_transformers.images import read_preparation
from zoo_runtime import load_session

Zoo = Callable[..., Result]

SIDES = {"height": 48, "width": 32}
VIT: dict[str, Any] = {
    "image_size": [48, 32], "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2,
    "intermediate_size": 24,
}  # fmt: skip
SEGFORMER = {
    "hidden_sizes": [8, 16, 24, 32], "num_attention_heads": [1, 2, 2, 4], "decoder_hidden_size": 16, "depths": [1] * 4,
}  # fmt: skip
DINOV2: Any = transformers.Dinov2Config
DINO = DINOV2(
    image_size=28, patch_size=7, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, apply_layernorm=True,
    out_features=["stage1", "stage2", "stage3", "stage4"], reshape_hidden_states=False,
)  # fmt: skip
DEPTH_ANYTHING: dict[str, Any] = {
    "backbone_config": DINO, "patch_size": 7, "reassemble_hidden_size": 16, "neck_hidden_sizes": [8, 8, 16, 16],
    "fusion_hidden_size": 8,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ViTForImageClassification": ("ViTImageProcessor", VIT, {"size": SIDES}),
    "BeitForImageClassification": (
        "BeitImageProcessor", VIT, {"size": {"height": 60, "width": 40}, "crop_size": SIDES, "do_center_crop": True}
    ),
    "SegformerForSemanticSegmentation": (
        "SegformerImageProcessor", SEGFORMER, {"size": {"height": 32, "width": 64}}
    ),
    "DepthAnythingForDepthEstimation": (
        "DPTImageProcessor", DEPTH_ANYTHING, {"size": {"height": 28, "width": 42}}
    ),
}  # fmt: skip
"""For some classes: the image processor, the settings of a small model and those of the processor."""
RESNET = transformers.ResNetConfig(
    embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], out_features=["stage4"]
)
DETR: dict[str, Any] = {
    "use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False, "d_model": 16, "num_queries": 5,
    "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "backbone_config": RESNET,
}  # fmt: skip
EDGES = {"size": {"shortest_edge": 64, "longest_edge": 96}}
YOLOS = {
    "image_size": [64, 96], "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 16, "num_detection_tokens": 5,
}  # fmt: skip
FIT = {"size": {"height": 28, "width": 28}, "keep_aspect_ratio": True, "ensure_multiple_of": 7}
MANY_SIZES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "DetrForObjectDetection": ("DetrImageProcessor", DETR, EDGES),
    "YolosForObjectDetection": ("YolosImageProcessor", YOLOS, EDGES),
}
"""The same for classes whose images have many sizes."""
SIZES = ((120, 64), (64, 64), (47, 200), (33, 251), (300, 20))
"""Widths and heights of images."""


def save(model_class: str, folder: Path, table: Any = None, **changes: Any) -> Any:
    """Save a random model and its image processor, and return the model."""
    processor, sizes, preparation = (table or MODELS)[model_class]
    labels = {} if "Depth" in model_class else {"id2label": {0: "cat", 1: "dog", 2: "owl"}}
    model = save_random(model_class, getattr(transformers, model_class).config_class(**sizes, **labels), folder)
    save_processor(folder, processor, **preparation, **changes)
    return model


def save_processor(folder: Path, name: str, **settings: Any) -> None:
    body = getattr(transformers, name + "Pil")(**settings).to_dict()
    folder.mkdir(exist_ok=True)
    (folder / "preprocessor_config.json").write_text(json.dumps({**body, "image_processor_type": name}))


def pipeline_of(folder: Path, model: Any) -> Any:
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")  # type: ignore[no-untyped-call]
    name = type(model).__name__
    kinds = {
        "Classification": "ImageClassificationPipeline",
        "Segmentation": "ImageSegmentationPipeline",
        "Depth": "DepthEstimationPipeline",
        "Detection": "ObjectDetectionPipeline",
    }
    kind: Any = getattr(transformers, next(kind for part, kind in kinds.items() if part in name))
    return kind(model=model, image_processor=processor, device="cpu")


def require_equal(answer: Any, expected: Any, image: Image.Image) -> None:
    """Check an answer of zoo against that of a pipeline."""
    if "classes" in answer:
        assert {row["label"]: pytest.approx(row["probability"], abs=1e-4) for row in answer["classes"]} == {
            row["label"]: row["score"] for row in expected
        }
    elif "predicted_depth" in answer:
        depth = expected["predicted_depth"].numpy()
        assert answer["predicted_depth"].shape == (image.height, image.width)
        assert_allclose(answer["predicted_depth"], depth, rtol=0, atol=1e-4 * max(1, np.abs(depth).max()))
    elif "objects" in answer:
        assert len(answer["objects"]) == len(expected) > 0
        for found, wanted in zip(answer["objects"], expected, strict=True):
            assert found["label"] == wanted["label"]
            assert found["score"] == pytest.approx(wanted["score"], abs=1e-4)
            assert_allclose(list(found["box"].values()), list(wanted["box"].values()), rtol=0, atol=1)
    else:
        runs, names = answer["map"], ["cat", "dog", "owl"]
        found = np.repeat(runs["classes"], runs["lengths"]).reshape(runs["height"], runs["width"])
        assert found.shape == (image.height, image.width)
        same = sum(((found == names.index(row["label"])) & (np.asarray(row["mask"]) > 0)).sum() for row in expected)
        assert same >= found.size - 3  # where two logits are equal up to rounding


@pytest.mark.slow
@pytest.mark.parametrize("model_class", MODELS)
def test_answers_of_an_export_equal_those_of_the_pipeline(tmp_path: Path, model_class: str) -> None:
    model = save(model_class, tmp_path / "hub")
    theirs = pipeline_of(tmp_path / "hub", model)
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers")
    assert imported.comparison.exact < 1e-13
    assert imported.answers.counts["images to pixels"] == 4
    assert export_model(tmp_path / "ours").passed
    with load_session(tmp_path / "ours") as session:
        answers = session.run(photographs(SIZES))
    for answer, image in zip(answers, photographs(SIZES), strict=True):
        require_equal(answer, theirs(image), image)
    export_checkpoint(tmp_path / "ours", tmp_path / "back")
    again = pipeline_of(tmp_path / "back", type(model).from_pretrained(tmp_path / "back"))
    require_equal(answers[0], again(photographs(SIZES)[0]), photographs(SIZES)[0])


def test_size_of_images_that_are_not_square(tmp_path: Path, zoo: Zoo) -> None:
    save("ViTForImageClassification", tmp_path / "hub")
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers")
    assert imported.spec.config.image_size == (48, 32)
    assert zoo("show", tmp_path / "ours", "--json").json["config"]["image_size"] == [48, 32]
    assert imported.spec.config.graphs()[0].input_tensors()[0].dims == ("batch", 3, 48, 32)
    pixels = torch.rand(2, 3, 48, 32)
    assert library.load(tmp_path / "ours")(pixel_values=pixels)["logits"].shape == (2, 3)
    refused = zoo("import", tmp_path / "hub", "-o", "b", "--via", "transformers", "--set", "image_size=48,32,16")
    refused.failed(2, "image_size must be one number, or height and width, got (48, 32, 16)")
    refused = zoo("import", tmp_path / "hub", "-o", "b", "--via", "transformers", "--set", "image_size=48,0")
    refused.failed(2, "image_size must be positive, got (48, 0)")
    assert not Path("b").exists()


@pytest.mark.slow
@pytest.mark.parametrize("model_class", MANY_SIZES)
def test_images_of_many_sizes_have_the_answers_of_the_pipeline(tmp_path: Path, model_class: str) -> None:
    theirs = pipeline_of(tmp_path / "hub", save(model_class, tmp_path / "hub", MANY_SIZES))
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers")
    assert imported.comparison.exact < 1e-13
    assert imported.answers.counts["images to pixels"] == 4
    assert imported.spec.graphs[0].input_tensors()[0].dims == ("batch", 3, "height", "width")
    assert export_model(tmp_path / "ours").passed
    images, options = photographs(SIZES), {"threshold": 0.0} if "Detection" in model_class else {}
    if "Yolos" in model_class:  # whose processor refuses narrow images
        images = [image for image in images if min(image.size) >= 40]
    with load_session(tmp_path / "ours") as session:
        answers = session.run([*images, *reversed(images)], **options)
    for answer, image in zip(answers, [*images, *reversed(images)], strict=True):
        require_equal(answer, theirs(image, **options), image)
    export_checkpoint(tmp_path / "ours", tmp_path / "back")
    assert read_preparation(tmp_path / "back") == read_preparation(tmp_path / "hub")


@pytest.mark.parametrize(
    ("processor", "settings", "rule", "multiple"),
    [
        ("DetrImageProcessor", {}, "edges", 1),
        ("DetrImageProcessor", {"size": {"shortest_edge": 37, "longest_edge": 101}, "resample": 3}, "edges", 1),
        ("YolosImageProcessor", {}, "edges", 16),
        ("DPTImageProcessor", {**FIT, "size": {"height": 32, "width": 45}}, "fit", 7),
        ("DPTImageProcessor", {"size": {"height": 32, "width": 45}, "keep_aspect_ratio": True}, "fit", 1),
        ("GLPNImageProcessor", {}, "round_down", 32),
    ],
)
def test_rules_for_many_sizes_are_found(
    tmp_path: Path, processor: str, settings: dict[str, Any], rule: str, multiple: int
) -> None:
    save_processor(tmp_path, processor, **settings)
    found = read_preparation(tmp_path)
    assert (found["image_resize"], found["image_multiple"]) == (rule, multiple)


def test_rules_for_many_sizes_that_zoo_does_not_know_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_processor(tmp_path, "DetrImageProcessor", size={"max_height": 60, "max_width": 90})
    with pytest.raises(UsageError, match="DetrImageProcessorPil prepares images in a way that zoo does not know"):
        read_preparation(tmp_path)
    save_processor(tmp_path, "DetrImageProcessor")
    monkeypatch.setattr(ImageReader, "_proportional", lambda _, width, height: (width * 800 // min(width, height), 800))
    with pytest.raises(UsageError, match="DetrImageProcessorPil prepares images in a way that zoo does not know"):
        read_preparation(tmp_path)


@pytest.mark.slow
def test_images_that_are_too_narrow_are_refused(tmp_path: Path, zoo: Zoo) -> None:
    save("DetrForObjectDetection", tmp_path / "hub", MANY_SIZES)
    imported = import_checkpoint(tmp_path / "hub", "ours", model_type="transformers")
    assert (imported.spec.config.image_size, imported.spec.config.image_resize) == ((64, 96), "edges")
    sign_export(Path("ours"))
    for width, height, problem in (
        (1, 500, "which is empty"),
        (1, 150, "an image becomes 1 x 150 pixels, but its height must be from 1 to 96"),
    ):
        Image.new("RGB", (width, height)).save("narrow.png")
        zoo("run", "ours", "narrow.png").failed(3, problem, "input 1")
    photographs(SIZES)[0].save("wide.png")
    assert zoo("run", "ours", "wide.png", "--option", "threshold=0").status == 0
    refused = zoo("import", tmp_path / "hub", "-o", "b", "--via", "transformers", "--task", "image-feature-extraction")
    refused.failed(2, "image_resize 'edges' is for answers per object or pixel, not image-feature-extraction")


SWIN = {"image_size": [64, 48], "patch_size": 4, "embed_dim": 8, "depths": [1, 2], "num_heads": [2, 2]}
MBART = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "max_position_embeddings": 48,
}  # fmt: skip
TOKENS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
VOCABULARY = ["<s>", "<pad>", "</s>", "<unk>", "<s_task>", *(f"w{number}" for number in range(56))]


def save_donut(folder: Path, **settings: Any) -> Any:
    """Save a random Donut with its tokenizer, and an image processor with the keys of the published files."""
    parts = (
        transformers.AutoConfig.for_model("donut-swin", **SWIN, window_size=4),
        transformers.AutoConfig.for_model("mbart", vocab_size=len(VOCABULARY), **TOKENS, **MBART),
    )
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        *parts, **TOKENS, decoder_start_token_id=2
    )
    model = save_random("VisionEncoderDecoderModel", config, folder)
    word_tokenizer(VOCABULARY, additional_special_tokens=["<s_task>"]).save_pretrained(folder)
    body = {
        "do_align_long_axis": False, "do_normalize": True, "do_pad": True, "do_resize": True, "do_thumbnail": True,
        "feature_extractor_type": "DonutFeatureExtractor", "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        "image_processor_type": "DonutImageProcessor", "resample": 2, "size": [48, 64],
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps({**body, **settings}))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("turns", [False, True])
def test_texts_of_donut_equal_those_of_transformers(tmp_path: Path, turns: bool) -> None:
    theirs = save_donut(tmp_path / "hub", do_align_long_axis=turns).double()
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    config = imported.spec.config
    assert (config.image_size, config.image_resize) == ((64, 48), "turn_and_pad" if turns else "pad")
    assert export_model(tmp_path / "ours").passed
    options: dict[str, Any] = {"min_new_tokens": 8, "max_new_tokens": 12, "num_beams": 3, "repetition_penalty": 1.5}
    with load_session(tmp_path / "ours") as session:
        found = session.run(photographs(SIZES), prompt="<s_task> w3", **options)
    read: Any = transformers.AutoImageProcessor.from_pretrained
    export_checkpoint(tmp_path / "ours", tmp_path / "back")
    pixels, again = (
        read(tmp_path / name, backend="pil")(photographs(SIZES), return_tensors="pt")["pixel_values"]
        for name in ("hub", "back")
    )
    assert torch.equal(pixels, again)
    prompt = torch.tensor([[4, VOCABULARY.index("w3")]] * len(SIZES))
    with Exact(theirs), torch.inference_mode():
        rows = theirs.generate(pixels.double(), decoder_input_ids=prompt, do_sample=False, **options).tolist()
    assert len({tuple(row) for row in rows}) > 2
    for answer, row in zip(found, rows, strict=True):
        ids = answer["generated_ids"]
        assert row[2 : 2 + len(ids)] == ids
        assert set(row[2 + len(ids) :]) <= {TOKENS["pad_token_id"]}


@pytest.mark.parametrize("width", [48, 130])
@pytest.mark.parametrize("turns", [False, True])
def test_images_are_padded_as_by_donut(tmp_path: Path, turns: bool, width: int) -> None:
    """Images of many proportions, those that are shrunk to a single row or column among them."""
    save_processor(
        tmp_path, "DonutImageProcessor", size={"height": 64, "width": width}, do_align_long_axis=turns, resample=3
    )
    theirs = process_images(tmp_path).processor
    kind = "turn_and_pad" if turns else "pad"
    reader = ImageReader.of({"image_resize": kind, "image_resample": "bicubic"}.get, 3, 64, width)
    random = np.random.default_rng(0)
    for size in ((1, 1), (64, width), (width, 64), (63, 1), (300, 5), (8, 300), (77, 78), (500, 499), (33, 34)):
        image = Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8))
        wanted = theirs(image, return_tensors="np")["pixel_values"][0]
        assert_allclose(reader.normalize(reader.read(image)), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("change", [{"do_pad": False}, {"do_resize": False}, {"do_thumbnail": False}])
def test_other_settings_of_donut_are_refused(tmp_path: Path, zoo: Zoo, change: dict[str, bool]) -> None:
    save_donut(tmp_path / "hub", **change)
    zoo("import", tmp_path / "hub", "-o", "ours").failed(2, "mage", "preprocessor_config.json")
    assert not Path("ours").exists()


def test_image_that_would_become_too_large_is_refused() -> None:
    reader = ImageReader.of({"image_resize": "pad"}.get, 3, 2560, 1920)
    with pytest.raises(ArtifactError, match="1 x 1000 pixels would become 1920 x 1920000, so crop the image"):
        reader.read(Image.new("RGB", (1, 1000)), "input 1")
