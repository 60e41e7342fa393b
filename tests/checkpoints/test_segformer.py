"""SegFormer checkpoints in the hub's layout, from random transformers models."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.architectures.originals import random_pictures
from tests.checkpoints.image_models import check_import, save_image_model
from tests.rows import each_row
from zoo.checkpoints import Checkpoint, export_checkpoint, import_checkpoint
from zoo.checkpoints.configuration import find_layout, read_configuration
from zoo.errors import UsageError
from zoo.models.count import parameter_count
from zoo.registry import load_reference, registry
from zoo_export.export import export_model
from zoo_plugins.segformer.config import SegFormerConfig
from zoo_runtime import load_session

SIZES: dict[str, Any] = {
    "num_encoder_blocks": 3, "hidden_sizes": [8, 12, 20], "depths": [2, 1, 1], "num_attention_heads": [2, 3, 4],
    "patch_sizes": [7, 3, 2], "strides": [4, 2, 2], "sr_ratios": [5, 2, 1], "mlp_ratios": [4, 3, 2],
    "decoder_hidden_size": 14, "hidden_act": "silu", "id2label": {0: "cat", 1: "dog", 2: "owl"},
}  # fmt: skip
LABELS = ("cat", "dog", "owl")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "segments": ("SegformerForSemanticSegmentation", SIZES),
    "classes": ("SegformerForImageClassification", SIZES),
    "features": ("SegformerModel", SIZES),
}
COUNTS = {
    "segments": {"images to pixels": 4, "images to segments": 4},
    "classes": {"images to pixels": 4, "images to classes": 4},
    "features": {"images to pixels": 4},
}


def save(model_class: str, config: dict[str, Any], folder: Path, **preparation: Any) -> Any:
    """Save a random model and its image processor, for 48 x 48 pixels by default."""
    settings = {"image_processor_type": "SegformerImageProcessor", "size": {"height": 48, "width": 48}, **preparation}
    return save_image_model(model_class, config, folder, settings)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", MODELS)
def test_checkpoint_is_imported_and_published(tmp_path: Path, name: str) -> None:
    """Outputs, images and answers equal the original's; every tensor survives bit for bit, statistics included."""
    model_class, config = MODELS[name]
    theirs = save(model_class, config, tmp_path / "hub")
    check_import(theirs, tmp_path, COUNTS[name])


def test_files_may_have_the_names_of_transformers_in_memory(tmp_path: Path) -> None:
    theirs = save(*MODELS["segments"], tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    tensors = {name: tensor.contiguous() for name, tensor in theirs.state_dict().items()}
    assert not any("encoder.block" in name for name in tensors)
    save_file(tensors, tmp_path / "hub/model.safetensors", {"format": "pt"})
    import_checkpoint(tmp_path / "hub", tmp_path / "again", verify=True)
    first, second = (load_file(tmp_path / folder / "model.safetensors") for folder in ("ours", "again"))
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def random_case(draw: random.Random) -> tuple[str, dict[str, Any], int]:
    """Draw a class, a configuration and the size of an image."""
    stages = draw.randint(1, 4)
    config: dict[str, Any] = {
        "num_encoder_blocks": stages, "num_channels": draw.choice([1, 3]),
        "hidden_sizes": [6 * draw.randint(1, 3) for _ in range(stages)],
        "depths": [draw.randint(1, 3) for _ in range(stages)],
        "num_attention_heads": [draw.choice([1, 2, 3, 6]) for _ in range(stages)],
        "patch_sizes": [draw.randint(2, 7) for _ in range(stages)],
        "strides": [draw.randint(1, 4) if stage < 2 else 1 for stage in range(stages)],
        "sr_ratios": [draw.choice([1, 2, 3]) for _ in range(stages)],
        "mlp_ratios": [draw.randint(1, 4) for _ in range(stages)], "decoder_hidden_size": draw.randint(3, 12),
        "hidden_act": draw.choice(["relu", "gelu", "silu"]), "layer_norm_eps": 10 ** -draw.randint(2, 6),
        "num_labels": draw.randint(2, 5),
    }  # fmt: skip
    kinds = ["Model", "ForImageClassification", "ForSemanticSegmentation"]
    return f"Segformer{draw.choice(kinds)}", config, draw.randint(33, 60)


@pytest.mark.slow
def test_random_configurations(tmp_path: Path) -> None:
    draw = random.Random(1)
    for number in range(12):
        model_class, config, side = random_case(draw)
        hub = tmp_path / str(number)
        save(model_class, config, hub / "hub")
        (hub / "hub/preprocessor_config.json").unlink()
        imported = import_checkpoint(hub / "hub", hub / "ours", settings=[f"image_size={side}"], verify=True)
        assert imported.comparison.exact < 1e-12, (model_class, config)


@pytest.mark.parametrize(
    "settings",
    [
        {"size": 40, "do_reduce_labels": True, "resample": 3},
        {"size": {"height": 32, "width": 32}, "do_center_crop": True, "crop_size": 20, "image_mean": [0.1, 0.2, 0.3]},
    ],
    ids=str,
)
def test_images_are_prepared_as_by_the_processor(tmp_path: Path, settings: dict[str, Any]) -> None:
    """A reduction of labels is for training, and the processor crops nothing even if it is told to."""
    save(*MODELS["segments"], tmp_path / "hub", **settings)
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=True)
    assert imported.answers.counts == COUNTS["segments"]
    config: Any = imported.spec.config
    size = settings["size"]
    assert config.image_size == (size if isinstance(size, int) else size["height"])
    export_checkpoint(tmp_path / "ours", tmp_path / "back", verify=True)
    load: Any = transformers.AutoImageProcessor.from_pretrained
    before, after = (
        load(tmp_path / name, backend="pil")(random_pictures((97, 61), (411, 700)), return_tensors="pt")["pixel_values"]
        for name in ("hub", "back")
    )
    torch.testing.assert_close(before, after)


def test_defaults_of_the_processor(tmp_path: Path) -> None:
    """A file that states its class alone, under the old key."""
    save(*MODELS["features"], tmp_path / "hub")
    (tmp_path / "hub/preprocessor_config.json").write_text('{"feature_extractor_type": "SegformerFeatureExtractor"}')
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=True)
    assert imported.answers.counts == COUNTS["features"]
    config: Any = imported.spec.config
    assert (config.image_size, config.image_mean) == (512, (0.485, 0.456, 0.406))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["segments", "classes"])
def test_answers_of_an_export_equal_those_of_the_pipeline(tmp_path: Path, name: str) -> None:
    save(*MODELS[name], tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    assert export_model(tmp_path / "ours").passed
    load: Any = transformers.AutoImageProcessor.from_pretrained
    kind = "image-segmentation" if name == "segments" else "image-classification"
    processor, pipeline = load(tmp_path / "hub", backend="pil"), cast("Any", transformers.pipeline)
    ask = pipeline(kind, model=str(tmp_path / "hub"), image_processor=processor, device="cpu")
    pictures = random_pictures((500, 333), (97, 411))
    with load_session(tmp_path / "ours") as session:
        for picture, answer in zip(pictures, session.run(pictures), strict=True):
            expected = ask(picture)
            if name == "classes":
                chances = {row["label"]: pytest.approx(row["score"], abs=1e-4) for row in expected}
                assert {row["label"]: row["probability"] for row in answer["classes"]} == chances
                continue
            runs = answer["map"]
            found = np.repeat(runs["classes"], runs["lengths"]).reshape(runs["height"], runs["width"])
            assert found.shape == (picture.height, picture.width)
            assert [row["label"] for row in answer["segments"]] == [row["label"] for row in expected]
            same = sum(
                ((found == LABELS.index(row["label"])) & (np.asarray(row["mask"]) > 0)).sum() for row in expected
            )
            assert same >= found.size - 3  # where two logits are equal up to rounding


def test_defaults_equal_those_of_the_original(tmp_path: Path) -> None:
    layout, original = find_layout("segformer", None)[2], transformers.SegformerConfig()

    def read(content: dict[str, Any]) -> Any:
        (tmp_path / "config.json").write_text(json.dumps(content))
        return read_configuration(layout, Checkpoint(tmp_path, planned={}), SegFormerConfig)

    assert read({"model_type": "segformer"}) == read({**original.to_dict(), "architectures": None})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reshape_last_stage": False}, "reshape_last_stage False is not supported, only True"),
        ({"num_encoder_blocks": 2}, "num_encoder_blocks 2 differs from the 3 depths"),
        ({"sr_ratios": [8, 4]}, "reductions has 2 stages, but hidden_sizes 3"),
        ({"sr_ratios": [8, 4, 7]}, "the map of stage 2 has a side of 4, less than its reduction"),
        ({"hidden_act": "mish"}, "hidden_act 'mish' is not supported"),
        ({"qkv_bias": True}, "not understood: qkv_bias"),
    ],
    ids=str,
)
def test_unsupported_configurations_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save(*MODELS["segments"], tmp_path / "hub")
    path = tmp_path / "hub/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(UsageError, match=message):
        import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


WIDE = {"hidden_sizes": [64, 128, 320, 512]}
PUBLISHED: dict[str, dict[str, Any]] = {
    "segformer-b0": {},
    "segformer-b1": WIDE,
    "segformer-b2": {**WIDE, "depths": [3, 4, 6, 3], "decoder_hidden_size": 768},
    "segformer-b3": {**WIDE, "depths": [3, 4, 18, 3], "decoder_hidden_size": 768},
    "segformer-b4": {**WIDE, "depths": [3, 8, 27, 3], "decoder_hidden_size": 768},
    "segformer-b5": {**WIDE, "depths": [3, 6, 40, 3], "decoder_hidden_size": 768},
}


@each_row("preset", PUBLISHED)
def test_presets_have_the_tensors_of_the_original(preset: str) -> None:
    """Their number of elements, on the meta device."""
    spec = registry().resolve(preset)
    with torch.device("meta"):
        cls: Any = transformers.SegformerForSemanticSegmentation
        theirs = cls(cls.config_class(**PUBLISHED[preset], num_labels=150))
        ours = load_reference(spec.architecture.model, spec.plugin)(spec.config)
    assert parameter_count(spec) == sum(parameter.numel() for parameter in theirs.parameters())
    assert sorted(tensor.numel() for tensor in ours.state_dict().values()) == sorted(
        tensor.numel() for tensor in theirs.state_dict().values()
    )
