"""A third-party image model, against the paper's equation in numpy, its table 1, and timm if installed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

import zoo as library
from zoo.checkpoints import export_checkpoint, import_checkpoint
from zoo.models.count import parameter_count
from zoo.models.create import build_on_meta
from zoo.registry import registry
from zoo_runtime import load_session

Zoo = Callable[..., Any]
Array = np.ndarray[Any, Any]
SIZES: dict[str, Any] = {
    "image_size": 12, "patch_size": 4, "num_channels": 2, "hidden_size": 10, "num_layers": 2,
    "token_intermediate_size": 7, "intermediate_size": 13, "num_classes": 5,
}  # fmt: skip
TABLE_1 = {
    "mixer-s32": (8, 32, 49, 512, 2048, 256, 19),
    "mixer-s16": (8, 16, 196, 512, 2048, 256, 18),
    "mixer-b32": (12, 32, 49, 768, 3072, 384, 60),
    "mixer-b16": (12, 16, 196, 768, 3072, 384, 59),
    "mixer-l32": (24, 32, 49, 1024, 4096, 512, 206),
    "mixer-l16": (24, 16, 196, 1024, 4096, 512, 207),
    "mixer-h14": (32, 14, 256, 1280, 5120, 640, 431),
}
"""Layers, patch size, S, C, D_C, D_S and millions of parameters (Tolstikhin et al. 2021), without the head."""
NAMES = {
    "patch.": "stem.proj.", "norm_1.": "norm1.", "norm_2.": "norm2.", "mix_patches.up.": "mlp_tokens.fc1.",
    "mix_patches.down.": "mlp_tokens.fc2.", "mix_channels.up.": "mlp_channels.fc1.",
    "mix_channels.down.": "mlp_channels.fc2.",
}  # fmt: skip


@pytest.fixture(autouse=True)
def plugin(third_party: Callable[[str], None]) -> None:
    third_party("mixer")


def make(**options: Any) -> Any:
    """Build a small model with random weights."""
    model = library.create_model("mixer-tiny", **{**SIZES, **options})
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4, generator=generator)
    return model.requires_grad_(False)


def images(batch: int = 3) -> Tensor:
    return torch.randn(batch, 2, 12, 12, generator=torch.Generator().manual_seed(1))


def paper(model: Any, image: Array) -> Array:
    """Compute the logits of one image (channels, height, width) by equation 1: column by column, then row by row."""
    c = model.config
    arrays = {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}

    def linear(name: str, x: Array) -> Any:
        return arrays[f"{name}.weight"].reshape(-1, x.size) @ x + arrays[f"{name}.bias"]

    def mlp(name: str, x: Array) -> Any:
        inner = [value / 2 * (1 + math.erf(value / math.sqrt(2))) for value in linear(f"{name}.up", x)]
        return linear(f"{name}.down", np.array(inner))

    def norm(name: str, rows: list[Array]) -> list[Array]:
        spread = [math.sqrt(((row - row.mean()) ** 2).mean() + c.norm_eps) for row in rows]
        weight, bias = arrays[f"{name}.weight"], arrays[f"{name}.bias"]
        return [(row - row.mean()) / by * weight + bias for row, by in zip(rows, spread, strict=True)]

    size, side = c.patch_size, c.image_size // c.patch_size
    corners = [(y * size, x * size) for y in range(side) for x in range(side)]
    rows = [linear("patch", image[:, y : y + size, x : x + size].reshape(-1)) for y, x in corners]
    for layer in range(c.num_layers):
        name = f"blocks.{layer}"
        normed = norm(f"{name}.norm_1", rows)
        for channel in range(c.hidden_size):
            mixed = mlp(f"{name}.mix_patches", np.array([row[channel] for row in normed]))
            for row, value in zip(rows, mixed, strict=True):
                row[channel] += value
        rows = [row + mlp(f"{name}.mix_channels", x) for row, x in zip(rows, norm(f"{name}.norm_2", rows), strict=True)]
    return np.asarray(linear("head", sum(norm("norm", rows)) / len(rows)))


def test_outputs_equal_the_papers_equation() -> None:
    model, pixels = make().double(), images().double()
    wanted = np.stack([paper(model, image) for image in pixels.numpy()])
    assert_close(model(pixels).numpy(), wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", TABLE_1)
def test_sizes_equal_the_papers_table(name: str) -> None:
    spec = registry().resolve(name)
    c: Any = spec.config
    sizes = c.num_layers, c.patch_size, c.num_patches, c.hidden_size, c.intermediate_size, c.token_intermediate_size
    model = build_on_meta(spec)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    head = sum(parameter.numel() for parameter in model.head.parameters())
    assert (*sizes, round((parameters - head) / 1e6)) == TABLE_1[name]
    assert spec.cost is not None
    assert spec.cost.parameters == parameters


def test_flops_equal_torch_counter() -> None:
    spec = registry().resolve("mixer-tiny", values=SIZES)
    with FlopCounterMode(display=False) as counter:
        make()(images(1))
    assert spec.cost is not None
    head = 2 * SIZES["hidden_size"] * SIZES["num_classes"]
    assert counter.get_total_flops() == spec.cost.flops * 9 + head


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["patch_size=5"], "image_size 32 is not divisible by patch_size 5"),
        (["image_mean=[0.5]"], "image_mean (0.5,) has 1 numbers for num_channels 3"),
        (["image_std=[0.5, 0.0, 0.5]"], "image_std must be positive, got (0.5, 0.0, 0.5)"),
        (["labels=['cat']"], "there are 1 labels for num_classes 10"),
        (["num_layers=0"], "num_layers must be positive, got 0"),
    ],
)
def test_invalid_settings_are_rejected(zoo: Zoo, settings: list[str], message: str) -> None:
    zoo("show", "mixer-tiny", *(part for text in settings for part in ("--set", text))).failed(2, message)


@pytest.mark.slow
def test_model_is_exported_verified_and_run(zoo: Zoo) -> None:
    labels = [f"class {number}" for number in range(10)]
    assert zoo("export", "mixer-tiny", "--onnx", "--set", f"labels={json.dumps(labels)}").status == 0
    assert zoo("verify", "mixer-tiny", "--json").json["verified"] is True
    pixels = np.random.default_rng(0).random((4, 32, 32, 3), dtype=np.float32)
    with load_session("mixer-tiny") as session:
        results = session.run(list(pixels))
    normalised = torch.from_numpy(pixels).permute(0, 3, 1, 2) * 2 - 1
    wanted = library.load("mixer-tiny")(normalised).softmax(-1).detach()
    for result, row in zip(results, wanted, strict=True):
        assert result["probabilities"] == pytest.approx(row.numpy(), abs=1e-6)
    assert [result["label"] for result in results] == [labels[int(row.argmax())] for row in wanted]


STANDARD: dict[str, Any] = {
    "image_size": 64, "patch_size": 32, "num_channels": 2, "hidden_size": 512, "num_layers": 8,
    "token_intermediate_size": 7, "intermediate_size": 13, "num_classes": 5,
}  # fmt: skip
"""Sizes for which timm has a name, and sizes that can be configured."""


def timm_folder(folder: Path, **changes: Any) -> Path:
    """Write a checkpoint in timm's layout, and our model with the same weights."""
    model = make(**STANDARD)
    library.save(model, folder.with_name("wanted"))
    tensors = {}
    for name, tensor in model.state_dict().items():
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        tensors[name] = tensor.contiguous()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    said = {
        "architecture": "mixer_s32_224", "num_classes": 5, "num_features": 512, "global_pool": "avg",
        "model_args": {"img_size": 64, "in_chans": 2, "mlp_ratio": [7.5 / 512, 13.5 / 512]},
        "pretrained_cfg": {"num_classes": 5, "input_size": [2, 64, 64], "mean": [0.1, 0.2], "std": [0.3, 0.4]},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**said, **changes}))
    return folder


def test_timm_checkpoint_round_trip(tmp_path: Path) -> None:
    hub = timm_folder(tmp_path / "timm")
    imported = import_checkpoint(hub, tmp_path / "ours", model_type="timm-mixer", verify=False)
    found = imported.spec.config.to_dict()
    wanted = {**STANDARD, "norm_eps": 1e-6, "image_mean": (0.1, 0.2), "image_std": (0.3, 0.4), "activation": "gelu"}
    assert {key: found[key] for key in wanted} == wanted
    one, other = (library.load(tmp_path / name).state_dict() for name in ("ours", "wanted"))
    assert_close(one, other, rtol=0, atol=0)
    export_checkpoint(tmp_path / "ours", tmp_path / "back", verify=False)
    first, second = (load_file(folder / "model.safetensors") for folder in (hub, tmp_path / "back"))
    assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "gmixer_12_224"}, "not supported (gmixer_12_224)"),
        ({"model_args": {"stem_norm": True}}, "not supported (mixer_s32_224, stem_norm)"),
        ({"global_pool": ""}, "global_pool '' is not supported, only 'avg'"),
        ({"flux": 1}, "not understood: flux"),
    ],
)
def test_other_mixers_are_rejected(tmp_path: Path, zoo: Zoo, changes: dict[str, Any], message: str) -> None:
    hub = timm_folder(tmp_path / "timm", **changes)
    zoo("import", hub, "--model-type", "timm-mixer", "-o", "ours").failed(2, message)
    assert not Path("ours").exists()


def test_model_without_classifier_is_rejected(tmp_path: Path, zoo: Zoo) -> None:
    hub = timm_folder(tmp_path / "timm")
    tensors = load_file(hub / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if "head" not in name}, hub / "model.safetensors")
    zoo("import", hub, "--model-type", "timm-mixer", "-o", "ours").failed(3, "head.weight is missing or invalid")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"activation": "relu"}, "hidden_size 512, relu and norm_eps 1e-06"),
        ({"norm_eps": 1e-3}, "gelu and norm_eps 0.001"),
        ({"num_layers": 3}, "timm has no mixer with patch_size 32, num_layers 3, hidden_size 512"),
    ],
)
def test_settings_unknown_to_timm_are_rejected(zoo: Zoo, settings: dict[str, Any], message: str) -> None:
    library.save(library.create_model("mixer-tiny", **{**STANDARD, **settings}), "ours")
    zoo("publish", "./ours", "out", "--layout", "hub").failed(2, message)


@pytest.mark.usefixtures("timm")
def test_outputs_equal_timm(tmp_path: Path) -> None:
    """For timm's own files and for published checkpoints."""
    imported = import_checkpoint(
        timm_folder(tmp_path / "timm"), tmp_path / "ours", model_type="timm-mixer", verify=True
    )
    assert imported.comparison.exact < 1e-14
    assert export_checkpoint(tmp_path / "ours", tmp_path / "back", verify=True).comparison.exact < 1e-14


@pytest.mark.parametrize("name", ["mixer_s32_224", "mixer_b16_224"])
def test_standard_sizes_equal_those_of_timm(timm: Any, name: str) -> None:
    with torch.device("meta"):
        theirs = timm.create_model(name)
    spec = registry().resolve(f"mixer-{name.split('_')[1]}")
    assert parameter_count(spec) == sum(parameter.numel() for parameter in theirs.parameters())
