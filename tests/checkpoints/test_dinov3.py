"""DINOv3 checkpoints in the hub's layout, from random transformers models."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.architectures.originals import save_random
from tests.rows import each_row
from zoo.checkpoints import Checkpoint, export_checkpoint, import_checkpoint
from zoo.checkpoints.configuration import find_layout, read_configuration
from zoo.errors import UsageError
from zoo.models.count import parameter_count
from zoo.registry import registry
from zoo_plugins.vit.config import ViTConfig

SIZES: dict[str, Any] = {
    "image_size": 30, "patch_size": 7, "num_channels": 2, "hidden_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 3, "intermediate_size": 20, "hidden_act": "relu", "layer_norm_eps": 1e-3,
    "rope_theta": 20.0, "layerscale_value": 0.5, "num_register_tokens": 3,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "registers": SIZES,
    "gated": {**SIZES, "use_gated_mlp": True, "hidden_act": "silu"},
    "no registers, biases": {**SIZES, "num_register_tokens": 0, "key_bias": True},
    "no biases": {**SIZES, "query_bias": False, "value_bias": False},
}


def save(config: dict[str, Any], folder: Path) -> Any:
    return save_random("DINOv3ViTModel", transformers.DINOv3ViTConfig(**config), folder)


@pytest.mark.parametrize("name", MODELS)
def test_checkpoint_is_imported_and_published(tmp_path: Path, name: str) -> None:
    """Outputs equal the original's; every tensor but that of masked patches survives bit for bit."""
    theirs = save(MODELS[name], tmp_path / "hub")
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=True)
    assert imported.spec.architecture.name == "vit"
    assert imported.comparison.exact < 1e-13
    config: Any = imported.spec.config
    assert (config.positions, config.rope_theta, config.num_registers) == (
        "rotary", 20.0, MODELS[name]["num_register_tokens"],
    )  # fmt: skip
    assert parameter_count(imported.spec) == sum(item.numel() for item in theirs.parameters()) - SIZES["hidden_size"]
    published = export_checkpoint(tmp_path / "ours", tmp_path / "back", model_type="dinov3_vit", verify=True)
    assert published.model_type == "dinov3_vit"
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("hub", "back"))
    empty = set() if config.num_registers else {"embeddings.register_tokens"}
    assert before.keys() - after.keys() == {"embeddings.mask_token", *empty}
    assert all(torch.equal(tensor, before[key]) for key, tensor in after.items())
    again = type(theirs).from_pretrained(tmp_path / "back").eval()
    pixels = torch.randn(2, 2, 30, 30)
    with torch.inference_mode():
        assert torch.equal(again(pixels)[0], theirs(pixels)[0])


def test_names_in_memory_are_read(tmp_path: Path) -> None:
    """Files may have the names of the modules of transformers 5."""
    save(SIZES, tmp_path / "hub")
    file = tmp_path / "hub/model.safetensors"
    tensors = {f"model.{key}" if key.startswith("layer.") else key: value for key, value in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    assert import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=True).comparison.exact < 1e-13


@pytest.mark.slow
def test_random_configurations(tmp_path: Path) -> None:
    """Imported models of DINOv3, and of DINOv2 with registers, equal the originals."""
    draw = random.Random(0)
    for number in range(12):
        heads, patch = draw.randint(1, 4), draw.randint(2, 6)
        config = {
            "image_size": draw.randint(patch, 25), "patch_size": patch, "num_channels": draw.randint(1, 3),
            "num_attention_heads": heads, "hidden_size": 4 * draw.randint(1, 3) * heads,
            "num_hidden_layers": draw.randint(1, 3), "hidden_act": draw.choice(["gelu", "relu", "silu"]),
            "layer_norm_eps": 10 ** -draw.randint(2, 6), "num_register_tokens": draw.randint(0, 4),
            "layerscale_value": 0.5,
        }  # fmt: skip
        hub = tmp_path / str(number)
        if draw.random() < 0.6:
            names = ("query_bias", "key_bias", "value_bias", "use_gated_mlp")
            config |= {name: draw.random() < 0.5 for name in names}
            config |= {"intermediate_size": draw.randint(3, 30), "rope_theta": draw.choice([3.0, 100.0, 1000.0])}
            save(config, hub / "hub")
        else:
            config |= {"mlp_ratio": draw.randint(1, 4), "qkv_bias": draw.random() < 0.5}
            config |= {"use_swiglu_ffn": draw.random() < 0.5}
            kind = draw.choice(["Dinov2WithRegistersModel", "Dinov2WithRegistersForImageClassification"])
            save_random(kind, transformers.Dinov2WithRegistersConfig(**config), hub / "hub")
        assert import_checkpoint(hub / "hub", hub / "ours", verify=True).comparison.exact < 1e-12, config


@each_row(("model_type", "kind"), [("dinov2_with_registers", "Dinov2WithRegisters"), ("dinov3_vit", "DINOv3ViT")])
def test_defaults_equal_those_of_the_original(tmp_path: Path, model_type: str, kind: str) -> None:
    layout, original = find_layout(model_type, None)[2], getattr(transformers, f"{kind}Config")()

    def read(content: dict[str, Any]) -> Any:
        (tmp_path / "config.json").write_text(json.dumps(content))
        return read_configuration(layout, Checkpoint(tmp_path, planned={}), ViTConfig)

    assert read({"model_type": model_type}) == read({**original.to_dict(), "architectures": None})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"proj_bias": False}, "proj_bias False is not supported, only True"),
        ({"mlp_bias": False}, "mlp_bias False is not supported, only True"),
        ({"hidden_size": 18}, "a head of 6 elements, not a multiple of 4"),
        ({"query_bias": 1}, "attention_bias must be"),
        ({"rope_scaling": {"factor": 2}}, "not understood: rope_scaling"),
    ],
    ids=str,
)
def test_unsupported_configurations_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save(SIZES, tmp_path / "hub")
    path = tmp_path / "hub/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(UsageError, match=message):
        import_checkpoint(tmp_path / "hub", tmp_path / "ours")


@each_row(
    ("model_type", "settings", "message"),
    [
        ("vit", ["positions=rotary"], "ViT and DeiT have learned positions, but positions is 'rotary'"),
        ("deit", ["positions=rotary"], "ViT and DeiT have learned positions, but positions is 'rotary'"),
        ("vit", ["attention_bias=true,false,true"], "qkv_bias cannot represent attention_bias"),
        ("dinov2", ["positions=rotary"], "DINOv2 has learned positions, but positions is 'rotary'"),
        ("dinov3_vit", ["task=image-feature-extraction"], "DINOv3 has rotary positions, but positions is 'learned'"),
        ("timm", ["positions=rotary"], "positions 'rotary' with attention_bias True cannot be represented"),
    ],
)
def test_other_layouts_refuse_what_they_lack(model_type: str, settings: list[str], message: str) -> None:
    layout, config = find_layout(model_type, None)[2], registry().resolve("vit-tiny", settings).config
    with pytest.raises(UsageError, match=message):
        layout.write_config(config, None)
