"""Checkpoints of ViT, DeiT and DINOv2: import from transformers and writing back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import (
    DeiTConfig,
    DeiTForImageClassification,
    DeiTForImageClassificationWithTeacher,
    DeiTForMaskedImageModeling,
    DeiTImageProcessorPil,
    DeiTModel,
    Dinov2Config,
    Dinov2ForImageClassification,
    Dinov2Model,
    Dinov2WithRegistersForImageClassification,
    Dinov2WithRegistersModel,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
    ViTModel,
)
from transformers.utils import logging

import zoo as library
from zoo.checkpoints import Checkpoint, Exact, export_checkpoint, import_checkpoint
from zoo.errors import ArtifactError, UsageError
from zoo_export import export_model

Zoo = Callable[..., Any]
SIZES: dict[str, Any] = {
    "image_size": 14,
    "patch_size": 4,
    "num_channels": 2,
    "hidden_size": 15,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 22,
    "hidden_act": "gelu_new",
    "layer_norm_eps": 1e-3,
    "hidden_dropout_prob": 0.2,
    "num_labels": 3,
}
OURS: dict[str, Any] = {
    "image_size": 14,
    "patch_size": 4,
    "num_channels": 2,
    "hidden_size": 15,
    "num_layers": 2,
    "num_heads": 3,
    "intermediate_size": 22,
    "activation": "gelu_tanh",
    "norm_eps": 1e-3,
    "attention_bias": True,
    "dropout": 0.2,
    "num_classes": 3,
    "labels": ("LABEL_0", "LABEL_1", "LABEL_2"),
    "problem_type": "single_label_classification",
    "image_resample": "bilinear",
    "image_resize": "stretch",
    "image_crop": 1.0,
    "image_margin": "down",
    "image_transparency": "ignored",
    "gated": False,
    "positions": "learned",
    "rope_theta": 100.0,
    "num_registers": 0,
    "layer_scale": None,
    "classify_patches": False,
}
"""Our names for SIZES."""
FEATURES = {"task": "image-feature-extraction", "problem_type": None, "labels": ()}
NAMES = ("cat", "dog", "fish")
KINDS: dict[str, tuple[type[PreTrainedModel], dict[str, Any], dict[str, Any]]] = {
    "vit": (ViTForImageClassification, {}, {}),
    "vit, pooled": (ViTModel, {}, {**FEATURES, "pooler": True}),
    "vit, features": (ViTModel, {"add_pooling_layer": False}, FEATURES),
    "vit, no biases, labels": (
        ViTForImageClassification,
        {"qkv_bias": False, "id2label": dict(enumerate(NAMES)), "label2id": {name: n for n, name in enumerate(NAMES)}},
        {"attention_bias": False, "labels": NAMES},
    ),
    "vit, two classes": (
        ViTForImageClassification,
        {"num_labels": 2},
        {"num_classes": 2, "labels": ("LABEL_0", "LABEL_1")},
    ),
    "deit": (DeiTForImageClassification, {}, {"distilled": True}),
    "deit, two heads": (
        DeiTForImageClassificationWithTeacher,
        {"hidden_act": "relu"},
        {"distilled": True, "distillation_head": True, "activation": "relu"},
    ),
    "deit, pooled": (DeiTModel, {}, {**FEATURES, "distilled": True, "pooler": True}),
    "deit, features": (DeiTModel, {"add_pooling_layer": False}, {**FEATURES, "distilled": True}),
}


DINO_SIZES = {**{key: value for key, value in SIZES.items() if key != "intermediate_size"}, "mlp_ratio": 2}
DINO_OURS = {**OURS, "layer_scale": 1.0, "classify_patches": True, "intermediate_size": 30}
DINO: dict[str, tuple[type[PreTrainedModel], dict[str, Any], dict[str, Any]]] = {
    "classes": (Dinov2ForImageClassification, {"layerscale_value": 0.3}, {"layer_scale": 0.3}),
    "gated": (
        Dinov2ForImageClassification,
        {"use_swiglu_ffn": True, "hidden_act": "gelu", "qkv_bias": False},
        {"gated": True, "activation": "silu", "attention_bias": False, "intermediate_size": 24},
    ),
    "features": (Dinov2Model, {"use_mask_token": False}, FEATURES),
    "gated features": (
        Dinov2Model,
        {"use_swiglu_ffn": True, "hidden_act": "gelu"},
        {**FEATURES, "gated": True, "activation": "silu", "intermediate_size": 24},
    ),
    "registers": (Dinov2WithRegistersForImageClassification, {"num_register_tokens": 3}, {"num_registers": 3}),
    "features and registers": (Dinov2WithRegistersModel, {}, {**FEATURES, "num_registers": 4}),
    "no registers": (Dinov2WithRegistersModel, {"num_register_tokens": 0}, {**FEATURES, "num_registers": 0}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silence transformers' reports."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    yield
    logging.set_verbosity(level)
    logging.enable_progress_bar()


def randomise(model: nn.Module) -> None:
    """Randomise all tensors, including norms and biases."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    model.eval().requires_grad_(False)


def make(kind: type[PreTrainedModel] = ViTForImageClassification, **options: Any) -> PreTrainedModel:
    """Build a small transformers model."""
    arguments = {key: options.pop(key) for key in ("add_pooling_layer",) if key in options}
    config = (ViTConfig if kind.__name__.startswith("ViT") else DeiTConfig)(
        **{**SIZES, **options}, attn_implementation="eager"
    )
    model = kind(config, **arguments)
    randomise(model)
    return model


def save(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def edit(folder: Path, **changes: Any) -> Path:
    """Change values in a checkpoint's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """Change the tensors of a checkpoint."""
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, {"format": "pt"})
    return folder


def images(batch: int = 3) -> Tensor:
    return torch.randn(batch, 2, 14, 14, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def same(folder: Path, theirs: PreTrainedModel) -> None:
    """Assert that every declared output is equal in float64."""
    ours, theirs = library.load(folder).double(), theirs.double()
    with torch.inference_mode(), Exact(theirs):
        found, wanted = ours(images()), theirs(images())
    assert found
    for name, value in found.items():
        assert_close(value, wanted[name], rtol=0, atol=1e-10)
        assert value.std() > 1e-2


@pytest.mark.parametrize(("kind", "options", "changes"), DINO.values(), ids=DINO)
def test_dinov2_round_trip(
    tmp_path: Path, kind: type[PreTrainedModel], options: dict[str, Any], changes: dict[str, Any]
) -> None:
    """The imported model has the same outputs, and is written back bit for bit except for the mask token."""
    config: Any = kind.config_class
    theirs = kind(config(**{**DINO_SIZES, **options}, attn_implementation="eager"))
    randomise(theirs)
    hub = save(theirs, tmp_path / "hub")
    imported = import_checkpoint(hub, tmp_path / "ours", verify=True)
    assert imported.comparison.exact < 1e-14
    values = imported.spec.config.to_dict()
    wanted = {**DINO_OURS, "task": "image-classification", **changes}
    assert {key: values[key] for key in wanted} == wanted
    same(tmp_path / "ours", theirs)
    model_type = theirs.config.model_type
    exported = export_checkpoint(tmp_path / "ours", tmp_path / "back", model_type=model_type, verify=True)
    assert exported.model_type == model_type
    first, second = (load_file(folder / "model.safetensors") for folder in (hub, tmp_path / "back"))
    changed = first.keys() ^ second.keys()
    left_out = ("embeddings.mask_token", *(() if values["num_registers"] else ("embeddings.register_tokens",)))
    assert {name for name in changed if not name.endswith(left_out)} == set()
    assert all(torch.equal(first[name], tensor) for name, tensor in second.items())
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (hub, tmp_path / "back"))
    read = {key: value for key, value in before.items() if key in after} | (
        {"use_mask_token": False} if exported.model_type == "dinov2" else {}
    )
    assert {**read, "transformers_version": 0, "attention_probs_dropout_prob": 0.2}.items() <= {
        **after, "transformers_version": 0,
    }.items()  # fmt: skip
    again = kind.from_pretrained(tmp_path / "back", attn_implementation="eager")
    with torch.inference_mode():
        found, expected = again(images().float()), theirs.float()(images().float())
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_dinov2_ratio_is_whole(tmp_path: Path) -> None:
    """The original class accepts no other ratio of widths."""
    theirs = Dinov2Model(Dinov2Config(**DINO_SIZES))
    hub = save(theirs, tmp_path / "hub")
    import_checkpoint(hub, tmp_path / "ours", verify=False)
    odd = library.create_model("dinov2-tiny", intermediate_size=100)
    library.save(odd, tmp_path / "odd")
    with pytest.raises(UsageError, match="mlp_ratio cannot represent intermediate_size 100 of hidden_size 64"):
        export_checkpoint(tmp_path / "odd", tmp_path / "back", model_type="dinov2")
    with pytest.raises(UsageError, match="mlp_ratio must be positive, got 0"):
        import_checkpoint(edit(hub, mlp_ratio=0), tmp_path / "other", verify=False)


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(("kind", "options", "changes"), KINDS.values(), ids=KINDS)
def test_checkpoint_round_trip(
    tmp_path: Path, kind: type[PreTrainedModel], options: dict[str, Any], changes: dict[str, Any]
) -> None:
    """The imported model has the same outputs; writing it gives the same tensors, configuration and outputs."""
    theirs = make(kind, **options)
    hub = save(theirs, tmp_path / "hub")
    imported = import_checkpoint(hub, tmp_path / "ours", verify=True)
    assert imported.comparison.exact < 1e-14
    values = imported.spec.config.to_dict()
    expected = {"task": "image-classification", "distilled": False, "distillation_head": False, "pooler": False}
    expected |= {**OURS, "image_mean": (0.5, 0.5), "image_std": (0.5, 0.5), **changes}
    assert values == expected
    same(tmp_path / "ours", theirs)
    exported = export_checkpoint(tmp_path / "ours", tmp_path / "back", verify=True)
    assert exported.model_type == ("deit" if kind.__name__.startswith("DeiT") else "vit")
    first, second = (load_file(folder / "model.safetensors") for folder in (hub, tmp_path / "back"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (hub, tmp_path / "back"))
    untold = {"encoder_stride", "initializer_range", "transformers_version"}
    assert before.keys() - untold == after.keys() - ({"id2label", "label2id", "problem_type"} - before.keys())
    trained = {"attention_probs_dropout_prob": 0.2}  # zoo has a single dropout
    assert {**{key: before[key] for key in before.keys() - untold}, **trained}.items() <= after.items()
    again = kind.from_pretrained(tmp_path / "back", attn_implementation="eager")
    with torch.inference_mode():
        found, wanted = again(images().float()), theirs.float()(images().float())
    assert wanted.keys() <= found.keys()  # transformers adds a new pooler if there was none
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    "kind", [ViTForImageClassification, ViTModel, DeiTForImageClassificationWithTeacher], ids=lambda kind: kind.__name__
)
def test_current_and_old_tensor_names_are_read(tmp_path: Path, kind: type[PreTrainedModel]) -> None:
    """Current names in transformers, and names in files of all versions."""
    theirs = make(kind)
    first, second = save(theirs, tmp_path / "files"), save(theirs, tmp_path / "memory", save_original_format=False)
    prefix = "" if kind is ViTModel else "vit." if kind is ViTForImageClassification else "deit."
    assert f"{prefix}encoder.layer.1.attention.attention.query.weight" in Checkpoint.open(first).tensors
    assert f"{prefix}layers.1.attention.q_proj.weight" in Checkpoint.open(second).tensors
    for folder in (first, second):
        import_checkpoint(folder, folder / "ours", verify=False)
        same(folder / "ours", theirs)


def test_base_model_saved_with_a_prefix_is_read(tmp_path: Path) -> None:
    theirs = make(ViTModel)
    hub = rewrite(
        save(theirs, tmp_path / "hub"), lambda tensors: {f"vit.{name}": tensor for name, tensor in tensors.items()}
    )
    import_checkpoint(hub, tmp_path / "ours")
    same(tmp_path / "ours", theirs)


def test_missing_keys_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    """Old files omit default values, and the names of two classes."""
    config = ViTConfig(num_hidden_layers=1, hidden_size=48, num_attention_heads=12, intermediate_size=3072)
    theirs = ViTForImageClassification(config)
    hub = save(theirs, tmp_path / "hub")
    kept = {"model_type": "vit", "hidden_size": 48, "num_hidden_layers": 1, "architectures": [type(theirs).__name__]}
    (hub / "config.json").write_text(json.dumps(kept))
    imported = import_checkpoint(hub, tmp_path / "ours", verify=True)
    assert imported.comparison.exact < 1e-12
    found: Any = imported.spec.config
    assert (found.image_size, found.patch_size, found.norm_eps, found.num_classes) == (224, 16, 1e-12, 2)


def test_preparation_that_no_file_states_is_named(tmp_path: Path, zoo: Zoo) -> None:
    hub = save(make(num_channels=3), tmp_path / "hub")
    result = zoo("import", hub, "-o", tmp_path / "ours")
    reason = "images are prepared by default values: the checkpoint has no preprocessor_config.json"
    assert (result.status, result.err) == (0, f"note: {hub}: {reason}\n")
    assert reason in (tmp_path / "ours" / "README.md").read_text()
    ViTImageProcessorPil(size={"height": 14, "width": 14}).save_pretrained(hub)
    assert zoo("import", hub, "-o", tmp_path / "other").err == ""


def test_numbers_are_names_of_classes(tmp_path: Path) -> None:
    """As in the pipeline, which answers with the numbers themselves."""
    hub = edit(save(make(num_channels=3), tmp_path / "hub"), id2label={"0": 10, "1": 2.5, "2": "x"}, label2id=None)
    ViTImageProcessorPil(size={"height": 14, "width": 14}).save_pretrained(hub)
    imported = import_checkpoint(hub, tmp_path / "ours", verify=True)
    assert imported.answers.counts["images to classes"] == 4
    labels: Any = imported.spec.config
    assert labels.labels == ("10", "2.5", "x")


def test_image_scaling_is_converted(tmp_path: Path) -> None:
    """Also when publishing: transformers' processor treats images as ours does."""
    hub = save(make(num_channels=3), tmp_path / "hub")
    processor = ViTImageProcessorPil(
        size={"height": 14, "width": 14}, image_mean=[0.1, 0.2, 0.3], image_std=[0.4, 0.5, 0.6]
    )
    processor.save_pretrained(hub)
    config: Any = import_checkpoint(hub, tmp_path / "ours").spec.config
    assert (config.image_mean, config.image_std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    model = library.create_model("vit-tiny", num_channels=3, image_mean=(0.1, 0.2, 0.3), image_std=(0.4, 0.5, 0.6))
    library.save(model, tmp_path / "made")
    exported = export_checkpoint(tmp_path / "made", tmp_path / "back")
    assert "preprocessor_config.json" in exported.files
    again = ViTImageProcessorPil.from_pretrained(tmp_path / "back")
    picture = torch.randint(0, 256, (3, 9, 11), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).numpy()
    resized = {"size": {"height": 8, "width": 8}}
    one, other = (p(picture, return_tensors="pt", **resized)["pixel_values"] for p in (again, processor))
    assert_close(one, other)


def test_cropping_is_converted(tmp_path: Path) -> None:
    """DeiT's processor resizes images with a bicubic filter and crops them."""
    hub = save(make(DeiTForImageClassification, num_channels=3), tmp_path / "hub")
    side = json.loads((hub / "config.json").read_text())["image_size"]
    processor = DeiTImageProcessorPil(size={"height": 16, "width": 16}, crop_size={"height": side, "width": side})
    processor.save_pretrained(hub)
    config: Any = import_checkpoint(hub, tmp_path / "ours").spec.config
    assert (config.image_resample, config.image_crop) == ("bicubic", side / 16)
    model = library.create_model("vit-tiny", num_channels=3, image_resample="bicubic", image_crop=8 / 11)
    library.save(model, tmp_path / "made")
    export_checkpoint(tmp_path / "made", tmp_path / "back")
    found = DeiTImageProcessorPil.from_pretrained(tmp_path / "back").to_dict()
    wanted = {"size": {"height": 11, "width": 11}, "crop_size": {"height": 8, "width": 8}}
    assert found == {**processor.to_dict(), **wanted}


PROCESSORS = {
    "no scaling": ({"do_rescale": False}, "do_rescale False is not supported, only true"),
    "another scale": ({"rescale_factor": 1 / 127.5}, "rescale_factor 0.00784"),
    "another crop": ({"do_center_crop": True, "size": 16, "crop_size": 9}, "crop_size 9 of size 16 does not fit image"),
    "shortest edge": ({"size": {"shortest_edge": 16}}, "size {'shortest_edge': 16} without do_center_crop is not"),
    "oblong": ({"size": {"height": 14, "width": 16}}, "only squares"),
    "filter": ({"resample": 9}, "resample 9 is not supported"),
    "text for a scale": ({"rescale_factor": "1"}, "rescale_factor '1' is not supported"),
    "fraction for a filter": ({"resample": 1.0}, "resample 1.0 is not supported"),
}


@pytest.mark.parametrize(("changes", "message"), PROCESSORS.values(), ids=PROCESSORS)
def test_other_preprocessing_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    hub = save(make(), tmp_path / "hub")
    (hub / "preprocessor_config.json").write_text(json.dumps(changes))
    with pytest.raises((ArtifactError, UsageError), match=message):
        import_checkpoint(hub, tmp_path / "ours")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "deit, two heads", "deit, pooled"])
def test_imported_model_is_exported_and_verified(tmp_path: Path, name: str) -> None:
    kind, options, _ = KINDS[name]
    import_checkpoint(save(make(kind, **options), tmp_path / "hub"), tmp_path / "ours")
    assert export_model(tmp_path / "ours").passed


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "another head": ({"architectures": ["ViTForMaskedImageModeling"]}, ("ViTForMaskedImageModeling", "ViTModel")),
    "an activation": ({"hidden_act": "sine"}, ("hidden_act 'sine' is not supported", "gelu_new")),
    "two sides": ({"image_size": [14, 18]}, ("image_size must be int, got [14, 18]", "config.json")),
    "a pooler's size": ({"pooler_output_size": 7}, ("pooler_output_size 7 is not supported, only hidden_size 15",)),
    "a pooler's activation": ({"pooler_act": "relu"}, ("pooler_act 'relu' is not supported, only 'tanh'",)),
    "an unknown key": ({"flux": 1}, ("not understood: flux", "--allow-key flux")),
}


@pytest.mark.parametrize(("changes", "fragments"), REFUSED.values(), ids=REFUSED)
def test_unsupported_settings_are_rejected(
    tmp_path: Path, zoo: Zoo, changes: dict[str, Any], fragments: tuple[str, ...]
) -> None:
    hub = edit(save(make(), tmp_path / "hub"), **changes)
    zoo("import", hub, "-o", tmp_path / "ours").failed(2, *fragments)
    assert not (tmp_path / "ours").exists()


def test_unexpected_tensors_are_rejected(tmp_path: Path, zoo: Zoo) -> None:
    hub = save(make(DeiTForMaskedImageModeling), tmp_path / "hub")
    edit(hub, architectures=["DeiTForImageClassification"])
    zoo("import", hub, "-o", tmp_path / "ours").failed(
        3, "missing classifier.weight", "unexpected decoder.0.weight", "unexpected deit.embeddings.mask_token"
    )


def test_settings_unknown_to_transformers_are_rejected(tmp_path: Path) -> None:
    """Distilled models cannot be written as ViT, others not as DeiT."""
    for number, (distilled, wrong) in enumerate(((True, "vit"), (False, "deit"))):
        library.save(library.create_model("vit-tiny", distilled=distilled), tmp_path / str(number))
        with pytest.raises(UsageError, match="no checkpoint layout can represent this vit model"):
            export_checkpoint(tmp_path / str(number), tmp_path / "out", model_type=wrong)
        assert not (tmp_path / "out").exists()
