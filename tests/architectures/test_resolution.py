"""Position embeddings of adapted models against transformers, explicit formulas, and invariances."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close
from transformers import DeiTForImageClassificationWithTeacher, DeiTModel, ViTForImageClassification, ViTModel

import zoo as library
from tests.architectures.test_vit import FEATURES, images, make, transformers_twin
from zoo.checkpoints import export_checkpoint, import_checkpoint
from zoo.models.tensors import stored_tensors
from zoo.nn import resize_grid
from zoo_export import export_model
from zoo_plugins.vit.config import ViTConfig
from zoo_plugins.vit.model import ViT
from zoo_runtime import load_session

Zoo = Callable[..., Any]


def resized(ours: ViT, image_size: int) -> ViT:
    """Adapt the weights to another image size as ``zoo adapt`` does, in float64."""
    config = ViTConfig.from_dict({**ours.config.to_dict(), "image_size": image_size})
    larger = ViT(config).double().eval().requires_grad_(False)
    position = larger.adapt_tensor("embeddings.position", ours.embeddings.position, ours.config)
    assert position is not None
    larger.load_state_dict({**ours.state_dict(), "embeddings.position": position})
    return larger


@pytest.mark.parametrize("image_size", [4, 8, 12, 15, 16, 20, 40])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"distilled": True},
        {**FEATURES, "pooler": True},
        {**FEATURES, "distilled": True},
        {"image_size": 4, "num_channels": 1},
    ],
    ids=["vit", "deit", "features", "deit, features", "one patch"],
)
def test_equals_transformers_at_another_resolution(options: dict[str, Any], image_size: int) -> None:
    """With one and two special tokens; smaller, larger and equal grids, and images with an ignored margin."""
    ours = make(**options)
    larger = resized(ours, image_size)
    pixels = images(larger.config)
    actual, expected = larger(pixels), transformers_twin(ours)(pixels, interpolate_pos_encoding=True)
    for name, value in actual.items():
        assert_close(value, expected[name], atol=1e-10, rtol=0)


def keys(t: float, a: float = -0.75) -> float:
    """The cubic convolution kernel (Keys 1981, equation 15)."""
    t = abs(t)
    if t <= 1:
        return (a + 2) * t**3 - (a + 3) * t**2 + 1
    return a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a if t < 2 else 0.0


def by_hand(grid: np.ndarray[Any, Any], side: int, a: float = -0.75) -> np.ndarray[Any, Any]:
    """(before, before, E) -> (side, side, E): pixel centres are at half-integers, and borders are replicated."""
    before = len(grid)
    weights = np.zeros((side, before))
    for row in range(side):
        centre = (row + 0.5) * before / side - 0.5
        for tap in range(math.floor(centre) - 1, math.floor(centre) + 3):
            weights[row, min(max(tap, 0), before - 1)] += keys(centre - tap, a)
    return np.einsum("ri,cj,ije->rce", weights, weights, grid)


@settings(deadline=None, max_examples=40)
@given(before=st.integers(1, 15), side=st.integers(1, 25))
def test_interpolation_equals_explicit_formula(before: int, side: int) -> None:
    """From any number of patches to any other."""
    grid = np.random.default_rng(0).normal(size=(before, before, 3))
    found = resize_grid(torch.tensor(grid).reshape(1, -1, 3), side)
    np.testing.assert_allclose(found.reshape(side, side, 3), by_hand(grid, side), atol=1e-12)


def test_timm_interpolation_differs() -> None:
    """timm interpolates with a = -0.5 and antialiasing, so its results differ for larger and smaller grids."""
    grid = torch.randn(1, 49, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for side in (4, 12):
        image = grid.unflatten(1, (7, 7)).movedim(-1, 1)
        smooth = F.interpolate(image, (side, side), mode="bicubic", align_corners=False, antialias=True)
        difference = (smooth.flatten(2).transpose(1, 2) - resize_grid(grid, side)).std() / grid.std()
        assert 0.02 < difference < 1
    larger = F.interpolate(grid.unflatten(1, (7, 7)).movedim(-1, 1), (12, 12), mode="bicubic", antialias=True)
    wanted = by_hand(grid.reshape(7, 7, 8).numpy(), 12, a=-0.5)
    inside = slice(3, -3)  # timm ignores pixels beyond the border instead of replicating them
    np.testing.assert_allclose(larger[0].movedim(0, -1)[inside, inside], wanted[inside, inside], atol=1e-12)


def test_constant_grids_and_equal_sizes_are_unchanged() -> None:
    """The weights of each new position sum to 1; at the old positions they are a one and three zeros."""
    flat = torch.full((1, 9, 4), 0.7, dtype=torch.float64)
    for side in (1, 2, 3, 7):
        assert_close(resize_grid(flat, side), torch.full((1, side * side, 4), 0.7, dtype=torch.float64))
    grid = torch.randn(1, 9, 4)
    assert torch.equal(resize_grid(grid, 3), grid)


# Model directories.


def build(zoo: Zoo, name: str, *settings: str, dtype: str = "float32") -> Path:
    """Build a model directory, named like the preset, with random weights."""
    options = [word for setting in settings for word in ("--set", setting)]
    assert zoo("build", name, "-o", "raw", "--dtype", dtype, "--force", *options).status == 0
    model = library.load("raw")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return library.save(model, name, tokenizer="bytes" if hasattr(model.config, "vocab_size") else None)


def tensors(folder: Path | str) -> dict[str, torch.Tensor]:
    return stored_tensors(library.load(folder))[0]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("distilled", [False, True])
def test_adapted_directory_changes_only_positions(zoo: Zoo, dtype: str, distilled: bool) -> None:
    """One tensor is interpolated in float64 and rounded once; all others are unchanged, bit for bit."""
    build(zoo, "vit-tiny", f"distilled={str(distilled).lower()}", dtype=dtype)
    result = zoo("adapt", "vit-tiny", "--set", "image_size=12", "-o", "larger")
    special = 2 if distilled else 1
    shapes = f"(1, {16 + special}, 64) became (1, {36 + special}, 64)"
    assert (result.status, result.err) == (0, "")
    assert result.out.splitlines()[1:] == [f"embeddings.position: {shapes}"]
    before, after = tensors("vit-tiny"), tensors("larger")
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        assert tensor.dtype == getattr(torch, dtype)
        if name != "embeddings.position":
            assert torch.equal(tensor, before[name]), name
    old, new = before["embeddings.position"], after["embeddings.position"]
    assert torch.equal(new[:, :special], old[:, :special])
    grid = old[0, special:].double().reshape(4, 4, 64).detach().numpy()
    wanted = torch.tensor(by_hand(grid, 6)).reshape(36, 64)
    assert_close(new[0, special:].double(), wanted, atol=1e-15, rtol=torch.finfo(new.dtype).eps)


@pytest.mark.parametrize("image_size", [8, 9])
def test_equal_grid_gives_the_same_file(zoo: Zoo, image_size: int) -> None:
    """9 pixels give as many patches as 8: the margin is ignored."""
    build(zoo, "vit-tiny")
    zoo("adapt", "vit-tiny", "--set", f"image_size={image_size}", "-o", "same")
    assert Path("same/model.safetensors").read_bytes() == Path("vit-tiny/model.safetensors").read_bytes()
    assert library.load("same").config.image_size == image_size


def test_enlarging_and_shrinking_is_lossy(zoo: Zoo) -> None:
    """A larger grid preserves most of a smooth one; nothing stronger holds."""
    build(zoo, "vit-tiny")
    library.adapt("vit-tiny", "larger", image_size=16)
    library.adapt("larger", "back", image_size=8)
    before, after = (tensors(folder)["embeddings.position"] for folder in ("vit-tiny", "back"))
    assert before.shape == after.shape
    assert not torch.equal(before, after)


@pytest.mark.slow
def test_adapted_model_is_exported_and_run(zoo: Zoo) -> None:
    """The export passes its check, and images of the new size give the same answers as the torch model."""
    build(zoo, "vit-tiny", "distilled=true")
    library.adapt("vit-tiny", "larger", image_size=12)
    assert export_model(Path("larger")).passed
    library.adapt("larger", "again", image_size=14)
    assert {path.name for path in Path("again").iterdir()} == {
        "README.md", "config.json", "manifest.json", "model.safetensors",
    }  # fmt: skip
    image = np.random.default_rng(0).integers(0, 256, (12, 12), np.uint8)
    with torch.inference_mode():
        pixels = torch.tensor((image / 255 - 0.5) / 0.5, dtype=torch.float32)[None, None]
        wanted = library.load("larger")(pixels)["logits"].softmax(-1)[0]
    with load_session("larger") as session:
        np.testing.assert_allclose(session.run(image)["probabilities"], wanted.numpy(), atol=1e-5)


@pytest.mark.parametrize(
    "kind", [ViTForImageClassification, ViTModel, DeiTModel, DeiTForImageClassificationWithTeacher]
)
def test_imported_checkpoint_at_another_resolution(tmp_path: Path, kind: Any) -> None:
    """Imported, adapted and exported, the model equals transformers' with interpolated positions."""
    config = kind.config_class(
        image_size=12, patch_size=4, hidden_size=15, num_hidden_layers=2, num_attention_heads=3, intermediate_size=22,
        num_labels=3, attn_implementation="sdpa",
    )  # fmt: skip
    theirs = kind(config).eval().requires_grad_(False)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    theirs.save_pretrained(tmp_path / "hub")
    sizes = {"size": {"height": 16, "width": 16}, "crop_size": 12, "resample": 3, "do_normalize": True}
    (tmp_path / "hub/preprocessor_config.json").write_text(json.dumps(sizes))
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    library.adapt(tmp_path / "ours", tmp_path / "larger", image_size=20)
    export_checkpoint(tmp_path / "larger", tmp_path / "back")
    again = kind.from_pretrained(tmp_path / "back", attn_implementation="sdpa").eval()
    pixels = torch.randn(2, 3, 20, 20)
    with torch.inference_mode():
        found, wanted = again(pixels), theirs(pixels, interpolate_pos_encoding=True)
    for name in wanted:
        assert_close(found[name], wanted[name], atol=1e-5, rtol=1e-5)
    written = json.loads((tmp_path / "back/preprocessor_config.json").read_text())
    assert written == {**sizes, "size": {"height": 26, "width": 26}, "crop_size": 20}  # 16 x 20 / 12, rounded down


REFUSED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "another patch": (("patch_size=4",), ("embeddings.patch.weight has shape (64, 1, 2, 2), not (64, 1, 4, 4)",)),
    "another width": (("hidden_size=32", "image_size=12"), ("embeddings.position has shape (1, 17, 64)", "norm.bias")),
    "classes": (
        ("num_classes=7", "image_size=16"),
        ("head.weight has shape (10, 64), not (7, 64); head.bias has shape (10,), not (7,): vit-tiny",),
    ),
    "another token": (("distilled=true",), ("distillation_token would be new", "(1, 17, 64), not (1, 18, 64)")),
    "as many tokens": (("distilled=true", "distillation_head=true"), ("distillation_head.weight would be new",)),
    "fewer layers": (("num_layers=1",), ("blocks.1.norm_1.weight would be lost",)),
    "more layers": (("num_layers=3",), ("blocks.2.norm_1.weight would be new",)),
    "two sides": (("image_size=[8, 12]",), ("image_size must be int, got [8, 12]",)),
    "no patch": (("image_size=1",), ("patch_size 2 is larger than image_size 1: vit-tiny",)),
    "an unknown key": (("image_siz=12",), ("unknown key 'image_siz'", "did you mean 'image_size'")),
}


@pytest.mark.parametrize(("settings", "fragments"), REFUSED.values(), ids=REFUSED)
def test_invalid_image_settings_are_rejected(zoo: Zoo, settings: tuple[str, ...], fragments: tuple[str, ...]) -> None:
    build(zoo, "vit-tiny")
    options = [word for setting in settings for word in ("--set", setting)]
    zoo("adapt", "vit-tiny", *options, "-o", "new").failed(2, *fragments)
    assert not Path("new").exists()


# Learned positions of texts.

TEXTS = {
    "gpt": ("gpt-tiny", (), ("position_embedding.weight",)),
    "bert": ("bert-tiny", (), ("embeddings.position.weight",)),
    "roberta": ("bert-tiny", ("skip_padding=true", "pad_token_id=3"), ("embeddings.position.weight",)),
    "bart": (
        "transformer-tiny",
        ("positions=learned", "position_offset=2"),
        ("encoder_embedding.position.weight", "decoder_embedding.position.weight"),
    ),
}


def outputs(folder: str, ids: torch.Tensor) -> list[torch.Tensor]:
    model = library.load(folder)
    with torch.inference_mode():
        found = model(ids, ids) if model.config.task == "text2text-generation" else model(ids)
    return list(found.values()) if isinstance(found, dict) else [found]


@pytest.mark.parametrize("name", TEXTS)
def test_outputs_for_shorter_texts_are_unchanged(zoo: Zoo, name: str) -> None:
    """Rows that shorter texts never read are dropped; everything else is unchanged, bit for bit."""
    preset, settings, positions = TEXTS[name]
    build(zoo, preset, *settings)
    result = zoo("adapt", preset, "--set", "max_seq_len=20", "-o", "short", "--json").json
    assert result["settings"] == {"max_seq_len": {"before": 128, "now": 20}}
    assert tuple(result["tensors"]) == positions
    for shapes in result["tensors"].values():
        assert shapes["before"][0] - shapes["now"][0] == 108
    ids = torch.randint(4, 256, (2, 20), generator=torch.Generator().manual_seed(0))
    for before, after in zip(outputs(preset, ids), outputs("short", ids), strict=True):
        assert torch.equal(before, after)
    assert Path("short/tokenizer.json").read_bytes() == Path(preset, "tokenizer.json").read_bytes()


@pytest.mark.parametrize("name", TEXTS)
def test_extending_learned_positions_is_rejected(zoo: Zoo, name: str) -> None:
    preset, settings, positions = TEXTS[name]
    build(zoo, preset, *settings)
    reasons = [f"{tensor} has shape" for tensor in positions]
    zoo("adapt", preset, "--set", "max_seq_len=130", "-o", "long").failed(2, *reasons, "cannot extend")


def test_changing_padding_rows_is_rejected(zoo: Zoo) -> None:
    """Padding rows come first, so the table would be cut at the wrong end."""
    build(zoo, "bert-tiny", "skip_padding=true", "pad_token_id=3")
    zoo("adapt", "bert-tiny", "--set", "pad_token_id=5", "--set", "max_seq_len=20", "-o", "new").failed(
        2, "embeddings.position.weight has shape (132, 64), not (26, 64): bert-tiny"
    )


def test_computed_positions_can_be_extended(zoo: Zoo) -> None:
    """Rotations and sinusoids are computed: no stored tensor would change."""
    for preset in ("llama-tiny", "transformer-tiny"):
        build(zoo, preset)
        result = zoo("adapt", preset, "--set", "max_seq_len=500", "-o", f"long-{preset}", "--json").json
        assert result["tensors"] == {}
        assert library.load(f"long-{preset}").config.max_seq_len == 500
