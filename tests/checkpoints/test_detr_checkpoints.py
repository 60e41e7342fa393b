"""DETR and Table Transformer checkpoints in the hub's layout, from random transformers models."""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from tests.architectures.originals import random_pictures
from tests.conftest import Result
from tests.rows import each_row
from tests.timm_library import import_timm
from zoo import load
from zoo.checkpoints import Checkpoint, export_checkpoint, import_checkpoint
from zoo.checkpoints.configuration import find_layout, read_configuration
from zoo.errors import UsageError
from zoo.models.count import parameter_count
from zoo.registry import load_reference, registry
from zoo_export.export import export_model
from zoo_plugins.detr.config import DETRConfig
from zoo_runtime import load_session

Zoo = Callable[..., Result]
STAGES: dict[str, Any] = {
    "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16, 12], "depths": [1, 2, 1],
    "hidden_act": "gelu", "out_features": ["stage3"],
}  # fmt: skip
SIZES: dict[str, Any] = {
    "num_queries": 6, "d_model": 16, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 20, "decoder_ffn_dim": 24, "activation_function": "silu",
    "id2label": {0: "cat", 1: "dog", 2: "owl"}, "backbone_config": STAGES, "use_timm_backbone": False,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "detr": ("Detr", SIZES),
    "table transformer": ("TableTransformer", SIZES),
    "learned positions": ("Detr", {**SIZES, "position_embedding_type": "learned", "auxiliary_loss": True}),
    "learned positions of tables": ("TableTransformer", {**SIZES, "position_embedding_type": "learned"}),
    "one class": ("Detr", {**SIZES, "id2label": {0: "cat"}}),
}


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers use timm without a torchvision that works."""
    module = importlib.import_module("transformers.models.timm_backbone.modeling_timm_backbone")
    monkeypatch.setattr(module, "timm", import_timm(), raising=False)
    monkeypatch.setattr(module, "requires_backends", lambda *_: None)


def save(kind: str, config: dict[str, Any], folder: Path, **preparation: Any) -> Any:
    """Save a random model, its norms' statistics included, and its image processor."""
    cls = getattr(transformers, f"{kind}ForObjectDetection")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = cls(cls.config_class(**config)).eval().requires_grad_(False)
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape))
        for name, buffer in model.named_buffers():
            buffer.copy_(0.5 + torch.rand(buffer.shape) if name.endswith("var") else 0.3 * torch.randn(buffer.shape))
    model.save_pretrained(folder)
    body = {"image_processor_type": "DetrImageProcessor", "size": {"shortest_edge": 64, "longest_edge": 100}}
    (folder / "preprocessor_config.json").write_text(json.dumps({**body, **preparation}))
    return model


def edit(folder: Path, **changes: Any) -> Path:
    """Change keys of config.json; those that are None are removed."""
    path = folder / "config.json"
    hub = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in hub.items() if value is not None}))
    return folder


def require_round_trip(folder: Path) -> Any:
    """Import a checkpoint, publish the model, compare all tensors bit for bit, and return the import."""
    imported = import_checkpoint(folder / "hub", folder / "ours", verify=True)
    assert imported.comparison.exact < 1e-12
    export_checkpoint(folder / "ours", folder / "back", verify=True)
    before, after = (load_file(folder / name / "model.safetensors") for name in ("hub", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[key]) and tensor.dtype == after[key].dtype for key, tensor in before.items())
    again = import_checkpoint(folder / "back", folder / "again", verify=True)
    assert again.spec.config == imported.spec.config
    return imported


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", MODELS)
def test_checkpoint_is_imported_and_published(tmp_path: Path, name: str) -> None:
    """Outputs, images and objects equal the original's; every tensor survives bit for bit, statistics included."""
    theirs = save(*MODELS[name], tmp_path / "hub")
    imported = require_round_trip(tmp_path)
    assert imported.answers.counts == {"images to pixels": 4, "images to objects": 4}
    assert parameter_count(imported.spec) == sum(parameter.numel() for parameter in theirs.parameters())
    again, pixels = type(theirs).from_pretrained(tmp_path / "back").eval(), torch.randn(2, 3, 48, 61)
    with torch.inference_mode():
        assert torch.equal(again(pixels).pred_boxes, theirs(pixels).pred_boxes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Detr", {"backbone": "resnet18"}),
        ("TableTransformer", {"backbone": "resnet18"}),
        ("Detr", {"backbone": "resnet26", "dilation": True}),
    ],
    ids=str,
)
@pytest.mark.usefixtures("timm")
def test_backbones_of_timm(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    """They keep their names; config.json is as in earlier versions of transformers."""
    config = {key: value for key, value in SIZES.items() if key not in ("backbone_config", "use_timm_backbone")}
    save(kind, {**config, **changes}, tmp_path / "hub")
    imported = require_round_trip(tmp_path)
    assert imported.spec.config.backbone_library == "timm"
    hub = json.loads((tmp_path / "back/config.json").read_text())
    assert (hub["backbone"], hub["backbone_config"], hub["use_timm_backbone"]) == (changes["backbone"], None, True)


@pytest.mark.usefixtures("timm")
def test_files_of_earlier_versions(tmp_path: Path) -> None:
    """Options of timm in ``backbone_kwargs``, batches that norms counted, and names that transformers has in memory."""
    config = {key: value for key, value in SIZES.items() if key not in ("backbone_config", "use_timm_backbone")}
    save("Detr", {**config, "backbone": "resnet18"}, tmp_path / "hub", size=64, max_size=100)
    before = import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False).spec.config
    edit(
        tmp_path / "hub", backbone_config=None, use_timm_backbone=True, backbone="resnet18", scale_embedding=False,
        backbone_kwargs={"in_chans": 3, "out_indices": [1, 2, 3, 4]}, num_hidden_layers=2,
    )  # fmt: skip
    file = tmp_path / "hub/model.safetensors"
    tensors = load_file(file)
    for old, new in (("conv_encoder.", ""), ("out_proj", "o_proj"), (".fc", ".mlp.fc")):
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    tensors["model.backbone.model.layer1.0.bn1.num_batches_tracked"] = torch.tensor(7)
    save_file(tensors, file)
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "again", verify=False)
    assert imported.spec.config == before
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "again"))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def random_case(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """Draw a class and a configuration."""
    stages = draw.randint(1, 4)
    heads = [draw.choice([1, 2, 4]) for _ in range(2)]
    backbone = {
        "model_type": "resnet", "num_channels": draw.choice([1, 3]), "embedding_size": draw.randint(3, 12),
        "hidden_sizes": [draw.randint(4, 20) for _ in range(stages)], "hidden_act": draw.choice(["relu", "gelu"]),
        "depths": [draw.randint(1, 3) for _ in range(stages)], "layer_type": draw.choice(["basic", "bottleneck"]),
        "downsample_in_first_stage": draw.random() < 0.5, "downsample_in_bottleneck": draw.random() < 0.5,
    }  # fmt: skip
    config = {
        "backbone_config": backbone, "use_timm_backbone": False, "num_labels": draw.randint(1, 5),
        "d_model": draw.choice([4, 12, 24]), "num_queries": draw.randint(1, 9), "encoder_layers": draw.randint(1, 3),
        "decoder_layers": draw.randint(1, 3), "encoder_attention_heads": heads[0], "decoder_attention_heads": heads[1],
        "encoder_ffn_dim": draw.randint(3, 30), "decoder_ffn_dim": draw.randint(3, 30),
        "activation_function": draw.choice(["relu", "gelu", "silu"]), "auxiliary_loss": draw.random() < 0.5,
        "position_embedding_type": draw.choice(["sine", "learned"]), "dropout": draw.choice([0.0, 0.3]),
    }  # fmt: skip
    return draw.choice(["Detr", "TableTransformer"]), config


@pytest.mark.slow
def test_random_configurations(tmp_path: Path) -> None:
    draw = random.Random(0)
    for number in range(14):
        kind, config = random_case(draw)
        hub = tmp_path / str(number)
        save(kind, config, hub / "hub")
        (hub / "hub/preprocessor_config.json").unlink()
        imported = import_checkpoint(hub / "hub", hub / "ours", settings=["image_size=[60, 90]"], verify=True)
        assert imported.comparison.exact < 1e-12, (kind, config)


@pytest.mark.parametrize("name", ["detr", "table transformer"])
def test_padded_images_have_the_objects_of_the_original(tmp_path: Path, name: str) -> None:
    """A batch of images of several sizes, of which the model is given the pixels that are not padding."""
    theirs = save(*MODELS[name], tmp_path / "hub").double()
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    ours: Any = load(tmp_path / "ours").eval().double()
    x, mask = torch.randn(3, 3, 77, 52, dtype=torch.float64), torch.ones(3, 77, 52)
    mask[1, 40:], mask[2, :, 31:] = 0, 0
    with torch.inference_mode():
        found, wanted, whole = ours(x, mask), theirs(x, pixel_mask=mask), ours(x)
    for key in ("logits", "pred_boxes"):
        assert_close(found[key], wanted[key], rtol=0, atol=1e-7)  # Table Transformer has positions in float32
        assert_close(found[key][0], whole[key][0], rtol=0, atol=1e-12)
        assert (found[key][1:] - whole[key][1:]).abs().amax((1, 2)).min() > 1e-6


@pytest.mark.parametrize(
    "preparation",
    [
        {"size": 60, "max_size": 90, "image_processor_type": None, "feature_extractor_type": "DetrFeatureExtractor"},
        {"size": {"height": 48, "width": 48}, "resample": 3},
        {"size": {"shortest_edge": 70, "longest_edge": 75}, "image_mean": [0.1, 0.2, 0.3], "do_pad": False},
    ],
    ids=str,
)
def test_images_are_prepared_as_by_the_processor(tmp_path: Path, preparation: dict[str, Any]) -> None:
    save(*MODELS["detr"], tmp_path / "hub", **preparation)
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=True)
    assert imported.answers.counts == {"images to pixels": 4, "images to objects": 4}
    export_checkpoint(tmp_path / "ours", tmp_path / "back")
    load: Any = transformers.AutoImageProcessor.from_pretrained
    for picture in random_pictures((97, 61), (211, 300)):
        before, after = (
            load(tmp_path / name, backend="pil")(picture, return_tensors="pt")["pixel_values"]
            for name in ("hub", "back")
        )
        assert_close(before, after)


def test_defaults_of_the_processor(tmp_path: Path) -> None:
    """A file that states its class alone, and a checkpoint without a file."""
    save(*MODELS["detr"], tmp_path / "hub")
    file = tmp_path / "hub/preprocessor_config.json"
    file.write_text('{"feature_extractor_type": "DetrFeatureExtractor"}')
    configs = [import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False).spec.config]
    file.unlink()
    configs.append(import_checkpoint(tmp_path / "hub", tmp_path / "other", verify=False).spec.config)
    assert configs[0] == configs[1]
    config: Any = configs[0]
    assert (config.image_size, config.image_resize, config.image_mean[0]) == ((800, 1333), "edges", 0.485)


def pipeline_of(folder: Path, model: Any) -> Any:
    load: Any = transformers.AutoImageProcessor.from_pretrained
    kind: Any = transformers.ObjectDetectionPipeline
    return kind(model=model, image_processor=load(folder, backend="pil"), device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("size", [{"shortest_edge": 64, "longest_edge": 100}, {"height": 64, "width": 64}], ids=str)
@pytest.mark.parametrize("name", ["detr", "table transformer"])
def test_answers_of_an_export_equal_those_of_the_pipeline(tmp_path: Path, name: str, size: dict[str, int]) -> None:
    theirs = pipeline_of(tmp_path / "hub", save(*MODELS[name], tmp_path / "hub", size=size))
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    assert export_model(tmp_path / "ours").passed
    pictures = random_pictures((120, 64), (64, 64), (47, 200), (333, 251))
    with load_session(tmp_path / "ours") as session:
        for threshold in (0.0, 0.5):
            for answer, picture in zip(session.run(pictures, threshold=threshold), pictures, strict=True):
                expected = theirs(picture, threshold=threshold)
                assert [row["label"] for row in answer["objects"]] == [row["label"] for row in expected]
                for mine, its in zip(answer["objects"], expected, strict=True):
                    assert mine["score"] == pytest.approx(its["score"], abs=1e-5)
                    assert all(abs(mine["box"][edge] - place) <= 1 for edge, place in its["box"].items())


@each_row(("model_type", "kind"), [("detr", "DetrConfig"), ("table-transformer", "TableTransformerConfig")])
def test_defaults_equal_those_of_the_original(tmp_path: Path, model_type: str, kind: str) -> None:
    layout, original = find_layout(model_type, None)[2], getattr(transformers, kind)()

    def read(content: dict[str, Any]) -> Any:
        (tmp_path / "config.json").write_text(json.dumps(content))
        return read_configuration(layout, Checkpoint(tmp_path, planned={}), DETRConfig)

    assert read({"model_type": model_type}) == read({**original.to_dict(), "architectures": None})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backbone_config": {"model_type": "swin"}}, "backbone_config of 'swin' is not supported"),
        ({"backbone_config": {**STAGES, "out_features": ["stage2"]}}, "out_features .* without stage3"),
        ({"backbone_config": {**STAGES, "wave": 1}}, "not understood: wave"),
        (
            {"backbone_config": {"model_type": "timm_backbone", "backbone": "resnet50d"}},
            "backbone 'resnet50d' of timm is not supported",
        ),
        (
            {"backbone_config": {"model_type": "timm_backbone", "backbone": "resnet50", "output_stride": 8}},
            "output_stride 8 is not supported",
        ),
        (
            {"backbone_config": {"model_type": "timm_backbone", "backbone": "resnet18", "out_indices": [1, 2]}},
            r"out_indices \[1, 2\] without layer4",
        ),
        (
            {"backbone_config": None, "backbone": "microsoft/resnet-50", "use_timm_backbone": False},
            "backbone .* is that of another checkpoint",
        ),
        ({"position_embedding_type": "rotary"}, "position_embedding_type 'rotary' is not supported"),
        ({"num_hidden_layers": 3}, "num_hidden_layers 3 differs from encoder_layers 2"),
        ({"architectures": ["DetrForSegmentation"]}, "DetrForSegmentation is not supported"),
        ({"wave": 1}, "not understood: wave"),
    ],
    ids=str,
)
def test_unsupported_configurations_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save(*MODELS["detr"], tmp_path / "hub")
    edit(tmp_path / "hub", **changes)
    with pytest.raises(UsageError, match=message):
        import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pad_size": {"height": 100, "width": 100}}, "pad_size .* is not supported"),
        ({"size": {"max_height": 64, "max_width": 80}}, "size .* is not supported"),
        ({"size": {"shortest_edge": 64}}, "size .* is not supported"),
        ({"do_resize": False}, "do_resize False is not supported"),
        ({"do_normalize": False}, "do_normalize False is not supported"),
    ],
    ids=str,
)
def test_unsupported_processors_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save(*MODELS["detr"], tmp_path / "hub", **changes)
    with pytest.raises(UsageError, match=message):
        import_checkpoint(tmp_path / "hub", tmp_path / "ours")


@each_row(
    ("settings", "message"),
    [
        (["backbone_dilated=true"], "the ResNet of transformers has no dilation"),
        (["backbone_library=timm"], "timm has no ResNet of these sizes"),
        (["max_detections=3"], "cannot represent max_detections 3"),
    ],
)
def test_models_without_a_layout_are_refused(tmp_path: Path, zoo: Zoo, settings: list[str], message: str) -> None:
    chosen = [part for item in settings for part in ("--set", item)]
    zoo("build", "detr-tiny", "-o", "made", "--force", *chosen)
    zoo("publish", "made", "hub", "--layout", "hub").failed(2, message)
    assert not Path("hub").exists()


PUBLISHED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "detr-resnet-50": ("Detr", {}, {}),
    "detr-resnet-101": ("Detr", {}, {"depths": [3, 4, 23, 3]}),
    "table-transformer-detection": (
        "TableTransformer",
        {"num_queries": 15, "num_labels": 2},
        {"layer_type": "basic", "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2]},
    ),
}


@each_row("preset", PUBLISHED)
def test_presets_have_the_tensors_of_the_original(preset: str) -> None:
    """Their number of elements, on the meta device."""
    kind, config, stages = PUBLISHED[preset]
    cls, spec = getattr(transformers, f"{kind}ForObjectDetection"), registry().resolve(preset)
    backbone = {**stages, "out_features": ["stage4"], "model_type": "resnet"}
    with torch.device("meta"):
        theirs = cls(
            cls.config_class(**{"num_labels": 91, **config}, use_timm_backbone=False, backbone_config=backbone)
        )
        ours = load_reference(spec.architecture.model, spec.plugin)(spec.config)
    assert parameter_count(spec) == sum(parameter.numel() for parameter in theirs.parameters())
    assert sorted(tensor.numel() for tensor in ours.state_dict().values()) == sorted(
        tensor.numel() for tensor in theirs.state_dict().values()
    )
