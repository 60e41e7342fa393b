"""Plain vision transformers of timm: a handwritten layout, and timm itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import zoo as library
from zoo.checkpoints import export_checkpoint, import_checkpoint
from zoo.errors import UsageError

Zoo = Callable[..., Any]
FEATURES = {"task": "image-feature-extraction"}

pytestmark = pytest.mark.usefixtures("operators")


def randomise(model: nn.Module) -> None:
    """Randomise all tensors, including norms and biases."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    model.eval().requires_grad_(False)


def edit(folder: Path, **changes: Any) -> None:
    """Change values in a checkpoint's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def images(batch: int = 3) -> Tensor:
    return torch.randn(batch, 2, 14, 14, generator=torch.Generator().manual_seed(1))


def timm_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return our tensors under timm's names, with queries, keys and values fused."""
    simple = {
        "embeddings.class_token": "cls_token", "embeddings.distillation_token": "dist_token",
        "embeddings.position": "pos_embed", "embeddings.patch.": "patch_embed.proj.", "norm_1.": "norm1.",
        "norm_2.": "norm2.", "attention.output.": "attn.proj.", "mlp.up.": "mlp.fc1.", "mlp.down.": "mlp.fc2.",
        "distillation_head.": "head_dist.",
    }  # fmt: skip
    ours, tensors = dict(model.state_dict()), {}
    for name in list(ours):
        if ".attention.query." in name:
            parts = [ours.pop(name.replace("query", part)) for part in ("query", "key", "value")]
            tensors[name.replace("attention.query", "attn.qkv")] = torch.cat(parts)
    for name, tensor in ours.items():
        for one, other in simple.items():
            name = name.replace(one, other)
        tensors[name] = tensor.contiguous()
    return tensors


TIMM = {
    "image_size": 14,
    "patch_size": 4,
    "num_channels": 2,
    "hidden_size": 24,
    "num_layers": 3,
    "num_heads": 3,
    "intermediate_size": 23,
    "num_classes": 5,
}


SQUASHED = {"crop_mode": "squash", "crop_pct": 1.0}
"""How transformers can prepare images, too."""


def timm_folder(folder: Path, config: dict[str, Any] | None = None, **options: Any) -> tuple[Path, nn.Module]:
    """Write a checkpoint in timm's layout, and our model with the same weights."""
    model = library.create_model("vit-tiny", **{**TIMM, **options})
    randomise(model)
    folder.mkdir()
    save_file(timm_tensors(model), folder / "model.safetensors")
    said = {
        "architecture": "vit_base_patch16_224", "num_classes": 5, "num_features": 24, "global_pool": "token",
        "model_args": {"num_heads": 3, "embed_dim": 24},
        "pretrained_cfg": {"input_size": [2, 14, 14], "mean": [0.1, 0.2], "std": [0.3, 0.4], **SQUASHED},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**said, **(config or {})}))
    return folder, model


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"distilled": True},
        {"attention_bias": False},
        FEATURES,
        {**FEATURES, "distilled": True},
    ],
    ids=str,
)
def test_timm_checkpoint_round_trip(tmp_path: Path, options: dict[str, Any]) -> None:
    hub, model = timm_folder(tmp_path / "timm", **options)
    imported = import_checkpoint(hub, tmp_path / "ours", verify=False)
    config: Any = imported.spec.config
    wanted = {**TIMM, "norm_eps": 1e-6, "image_mean": (0.1, 0.2), "image_std": (0.3, 0.4), **options}
    wanted |= {"num_classes": 1000} if options.get("task") else {}
    assert {key: value for key, value in config.to_dict().items() if key in wanted} == wanted
    found, expected = library.load(tmp_path / "ours")(images()), model(images())
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    exported = export_checkpoint(tmp_path / "ours", tmp_path / "back", verify=False)
    assert exported.model_type == "timm"
    first, second = (load_file(folder / "model.safetensors") for folder in (hub, tmp_path / "back"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    kind = "deit" if options.get("distilled") else "vit"
    hub_kind = export_checkpoint(tmp_path / "ours", tmp_path / "other", model_type=kind, verify=True)
    assert hub_kind.comparison.exact < 1e-14


def test_number_of_heads_comes_from_arguments_name_or_user(tmp_path: Path, zoo: Zoo) -> None:
    """The number of heads does not follow from tensors."""
    silent = {"model_args": {}}
    hub, _ = timm_folder(tmp_path / "odd", silent)
    zoo("import", hub, "-o", tmp_path / "ours").failed(
        2, "the number of heads of vit_base_patch16_224 with width 24 is not known", "set num_heads"
    )
    done = zoo("import", hub, "-o", tmp_path / "ours", "--set", "num_heads=4", "--no-verify")
    assert done.status == 0, done.err
    chosen: Any = library.load(tmp_path / "ours")
    assert chosen.config.num_heads == 4
    sizes = {"hidden_size": 192, "num_layers": 1, "intermediate_size": 8, "num_heads": 3}
    for number, name in enumerate(("vit_tiny_patch16_224.augreg_in21k", "deit_tiny_distilled_patch16_224")):
        hub, _ = timm_folder(tmp_path / f"tiny {number}", {**silent, "architecture": name}, **sizes)
        config: Any = import_checkpoint(hub, tmp_path / str(number), verify=False).spec.config
        assert config.num_heads == 3


TIMM_REFUSED: dict[str, tuple[dict[str, Any], Callable[[dict[str, Tensor]], object], int, tuple[str, ...]]] = {
    "another pooling": ({"global_pool": "avg"}, len, 2, ("global_pool 'avg' is not supported, only 'token'",)),
    "an argument": (
        {"model_args": {"num_heads": 3, "init_values": 1e-5}},
        len,
        2,
        ("model_args.init_values 1e-05 is not supported",),
    ),
    "an unknown argument": ({"model_args": {"num_heads": 3, "flux": True}}, len, 2, ("model_args.flux True",)),
    "an activation": (
        {"model_args": {"num_heads": 3, "act_layer": "quick_gelu"}},
        len,
        2,
        ("model_args.act_layer 'quick_gelu' is not supported", "known: gelu"),
    ),
    "layer scale": (
        {},
        lambda t: t.update({"blocks.0.ls1.gamma": torch.ones(24)}),
        3,
        ("unexpected blocks.0.ls1.gamma",),
    ),
    "no class token": ({}, lambda t: t.pop("cls_token"), 3, ("missing cls_token",)),
    "no position of the class token": (
        {},
        lambda t: t.update(pos_embed=torch.ones(1, 9, 24)),
        2,
        ("patches of 4 x 4 with 9 positions are not those of a square image",),
    ),
    "no convolution": (
        {},
        lambda t: t.update({"patch_embed.proj.weight": torch.ones(24, 32)}),
        3,
        ("not a plain vision transformer: patch_embed.proj.weight is of shape (24, 32)",),
    ),
    "no blocks": (
        {},
        lambda t: t.pop("blocks.0.mlp.fc1.weight"),
        3,
        ("not a plain vision transformer: blocks.0.mlp.fc1.weight is missing",),
    ),
    "one head of two": (
        {},
        lambda t: t.update(dist_token=torch.ones(1, 1, 24), pos_embed=torch.ones(1, 11, 24)),
        3,
        ("only one of dist_token and head_dist.weight is present",),
    ),
}


@pytest.mark.parametrize(("config", "change", "status", "fragments"), TIMM_REFUSED.values(), ids=TIMM_REFUSED)
def test_other_vision_transformers_are_rejected(
    tmp_path: Path, zoo: Zoo, config: dict[str, Any], change: Any, status: int, fragments: tuple[str, ...]
) -> None:
    hub, _ = timm_folder(tmp_path / "timm", config)

    def changed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        change(tensors)
        return tensors

    path = hub / "model.safetensors"
    save_file(changed(load_file(path)), path)
    zoo("import", hub, "-o", tmp_path / "ours").failed(status, *fragments)
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        ({"norm_eps": 1e-5}, "norm_eps"),
        ({**FEATURES, "pooler": True}, "no rule for tensor pooler"),
        ({"distilled": True, "distillation_head": False}, "without its head"),
    ],
)
def test_settings_unknown_to_timm_are_rejected(tmp_path: Path, options: dict[str, Any], fragment: str) -> None:
    library.save(library.create_model("vit-tiny", **options), tmp_path / "ours")
    with pytest.raises(UsageError, match=fragment):
        export_checkpoint(tmp_path / "ours", tmp_path / "out", model_type="timm")


def test_preparation_of_images_is_read_and_written(tmp_path: Path) -> None:
    """With a margin that transformers would round in another way, which its layouts do not represent."""
    stated = {"input_size": [2, 14, 14], "mean": [0.1, 0.2], "std": [0.3, 0.4], "interpolation": "bicubic"}
    hub, _ = timm_folder(tmp_path / "timm", {"pretrained_cfg": {**stated, "crop_pct": 0.9}})
    config: Any = import_checkpoint(hub, tmp_path / "ours", verify=False).spec.config
    assert (config.image_resample, config.image_resize, config.image_crop) == ("bicubic", "shortest_edge", 0.9)
    assert export_checkpoint(tmp_path / "ours", tmp_path / "back", verify=False).model_type == "timm"
    written = json.loads((tmp_path / "back" / "config.json").read_text())["pretrained_cfg"]
    assert written.items() >= {**stated, "crop_pct": 0.9, "crop_mode": "center"}.items()
    with pytest.raises(UsageError, match="image_margin"):
        export_checkpoint(tmp_path / "ours", tmp_path / "other", model_type="vit")


def test_labels_of_timm_are_read(tmp_path: Path) -> None:
    hub, _ = timm_folder(tmp_path / "timm", {"label_names": ["a", "b", "c", "d", "e"]})
    config: Any = import_checkpoint(hub, tmp_path / "ours", verify=False).spec.config
    assert config.labels == ("a", "b", "c", "d", "e")
    edit(hub, label_names=["a"])
    with pytest.raises(UsageError, match="1 labels for num_classes 5"):
        import_checkpoint(hub, tmp_path / "other", verify=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("vit_base_patch16_224", {}),
        ("vit_base_patch16_224", {"num_classes": 0, "qkv_bias": False}),
        ("deit_base_distilled_patch16_224", {"act_layer": "relu"}),
        ("deit_base_distilled_patch16_224", {"num_classes": 0}),
    ],
)
def test_outputs_equal_timm(timm: Any, tmp_path: Path, name: str, arguments: dict[str, Any]) -> None:
    """A model saved by timm is imported, and timm loads the published checkpoint."""
    from timm.models._hub import save_for_hf

    sizes = {"img_size": 14, "patch_size": 4, "in_chans": 2, "embed_dim": 15, "depth": 2, "num_heads": 3}
    theirs = timm.create_model(name, **{**sizes, "mlp_ratio": 22 / 15, "num_classes": 3, **arguments})
    randomise(theirs)
    save_for_hf(theirs, tmp_path / "timm", safe_serialization=True)
    imported = import_checkpoint(tmp_path / "timm", tmp_path / "ours", verify=True)
    assert imported.comparison.against == f"{type(theirs).__name__} of timm"
    assert imported.comparison.exact < 1e-14
    exported = export_checkpoint(tmp_path / "ours", tmp_path / "back", model_type="timm", verify=True)
    assert exported.comparison.exact < 1e-14
    again = timm.create_model(f"local-dir:{tmp_path / 'back'}", pretrained=True).eval()
    with torch.inference_mode():
        assert torch.equal(again(images()), theirs(images()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch32_224", "deit_tiny_distilled_patch16_224"])
def test_number_of_heads_follows_from_timm_names(timm: Any, tmp_path: Path, name: str) -> None:
    """For files written before arguments were stored."""
    from timm.models._hub import save_for_hf

    theirs = timm.create_model(name, depth=1, num_classes=4)
    save_for_hf(theirs, tmp_path / "timm", safe_serialization=True)
    edit(tmp_path / "timm", model_args=None)
    config: Any = import_checkpoint(tmp_path / "timm", tmp_path / "ours", verify=False).spec.config
    assert config.num_heads == theirs.blocks[0].attn.num_heads
