"""A small decoder that is exported with two adapters in the layout of PEFT."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from zoo.artifact import ModelDirectory
from zoo_export.export import export_variant
from zoo_export.variants.adapters.recipe import WithAdapters

SETTINGS = ("hidden_size=16", "num_heads=2", "num_layers=2", "max_seq_len=16")


def write_peft(folder: Path, base: Path, layers: Sequence[str], *, rank: int, alpha: float, seed: int) -> Path:
    """Write random adapters of dense layers with zoo's names."""
    layout = ModelDirectory.open(base).layout
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in layers:
        outputs, inputs = layout[f"{layer}.weight"].shape
        for end, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            values = torch.randn(shape, generator=generator) * shape[1] ** -0.5
            tensors[f"base_model.model.{layer}.lora_{end}.weight"] = values
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(layers), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def change_a_weight(file: Path) -> None:
    """Change the last number of a file a little."""
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


@pytest.fixture(scope="session")
def adapted_model(exported_build: Callable[..., Path]) -> Path:
    """A model with the adapters ``first``, of all blocks, and ``second``, of a few layers, in the folders beside it."""
    base = exported_build("gpt-tiny", *SETTINGS, noise=True, gain=6.0)
    names = ("attention.query", "attention.key", "attention.value", "attention.output", "mlp.up", "mlp.down")
    every = [f"blocks.{number}.{name}" for number in (0, 1) for name in names]
    first = write_peft(base.parent / "first", base, every, rank=3, alpha=13, seed=1)
    few = ["blocks.0.mlp.up", "blocks.1.attention.query", "blocks.1.mlp.down"]
    second = write_peft(base.parent / "second", base, few, rank=5, alpha=31, seed=2)
    export_variant(base, WithAdapters(adapters={"first": first, "second": second}, lora_files=True))
    return base


@pytest.fixture
def adapted_copy(adapted_model: Path, tmp_path: Path) -> Path:
    """A copy of the model and of its adapters, to be modified."""
    return Path(shutil.copytree(adapted_model.parent, tmp_path / "copy")) / adapted_model.name
