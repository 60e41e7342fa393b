"""Every key of a family's configuration at other values: an import equals the original, or is refused in one line.

The originals are small models of transformers, those of ``benchmarks/checkpoints.py``, with one key changed at a time.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

from tests.conftest import ROOT
from zoo.checkpoints import import_checkpoint
from zoo.errors import ArtifactError, UsageError

ACTIVATIONS = ["gelu", "gelu_new", "relu", "silu", "quick_gelu", "gelu_pytorch_tanh", "relu2", "tanh", "mish"]
ROPE = {"rope_theta": 100.0, "original_max_position_embeddings": 20}
ROPES = [
    {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0},
    {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0},
    {"rope_type": "yarn", "factor": 2.0, **ROPE},
    {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ROPE},
    {"rope_type": "default", "rope_theta": 77.0},
    {"rope_type": "default", "rope_theta": 77.0, "partial_rotary_factor": 0.5},
    {"rope_type": "proportional", "rope_theta": 77.0, "partial_rotary_factor": 0.5},
]
TEXTS = ["relative_key", "absolute", "rotary", "alibi", "mean", "none", "layer_norm", "layer", "group", "default"]
UNCHANGED = {
    "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "return_dict",
    "output_hidden_states", "output_attentions", "id2label", "label2id", "use_cache", "is_encoder_decoder",
    "problem_type", "rescale_prenorm_residual",
}  # fmt: skip
"""Keys that do not belong to a family, or that decide on the form of outputs. With the last one, transformers' Mamba-2
scales the weights that it reads, as it should those that it initialises."""
MOST = 150
"""Values of a family that are tried; of more, every second or third is."""


def load_benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("checkpoints", ROOT / "benchmarks" / "checkpoints.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


FAMILIES = load_benchmark().FAMILIES


def literals(hint: Any) -> list[Any]:
    """Return the values that an annotation lists."""
    if typing.get_origin(hint) is typing.Literal:
        return list(typing.get_args(hint))
    return [value for part in typing.get_args(hint) for value in literals(part)]


def others(key: str, value: Any, hint: Any) -> list[Any]:
    """Return other values of a key."""
    listed = [item for item in literals(hint) if item != value]
    if listed:
        return listed
    match value:
        case bool():
            return [not value]
        case int():
            return sorted({value + 1, 2 * value, max(0, value - 1), value // 2, 0, 1} - {value})
        case float():
            return [0.5 * value + 0.1, 10 * value, 0.0]
        case str() if "act" in key.split("_") or "activation" in key:
            return [name for name in ACTIVATIONS if name != value]
        case str():
            return TEXTS
        case list() if value and not isinstance(value[0], dict):
            moved = (value[::-1], value[1:] + value[:1], value[:-1], value[:1] * len(value))
            return [item for item in moved if item != value]
        case None:
            return [True, 2, 3, 0.5, 4]
        case _:
            return []


def changes(values: dict[str, Any], hints: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield keys with other values, one at a time; keys of a section are in a mapping of its name."""
    for key, value in values.items():
        if key.startswith("_") or key in UNCHANGED:
            continue
        if key.endswith("_config") and isinstance(value, dict):
            yield from ({key: inner} for inner in changes(value, {}))
        else:
            found = ROPES if key in ("rope_parameters", "rope_scaling") else others(key, value, hints.get(key))
            yield from ({key: other} for other in found)


def changed_configs(config_class: Any, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return configurations that differ in one key."""
    hints: dict[str, Any] = {}
    with contextlib.suppress(NameError):
        hints = typing.get_type_hints(config_class)
    found = []
    for change in changes(config_class(**config).to_dict(), hints):
        ((key, value),) = change.items()
        is_section = key.endswith("_config") and isinstance(value, dict)
        found.append({**config, key: {**config.get(key, {}), **value} if is_section else value})
    return found


def build(model_class: Any, config: dict[str, Any]) -> Any | None:
    """Return a random model, or None if transformers cannot build it."""
    try:
        torch.manual_seed(0)
        model = model_class(model_class.config_class(**config)).eval()
    except Exception:  # any class of exceptions: these values mean nothing to the original either
        return None
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter.requires_grad_(False), std=0.3)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_is_read_or_refused(tmp_path: Path, family: str) -> None:
    model_class = getattr(transformers, FAMILIES[family].cls)
    equal = 0
    changed = changed_configs(model_class.config_class, FAMILIES[family].config)
    for number, config in enumerate(changed[:: 1 + len(changed) // MOST]):
        hub, ours = tmp_path / f"{number}", tmp_path / f"ours-{number}"
        model = build(model_class, config)
        if model is None:
            continue
        try:
            model.save_pretrained(hub)
        except Exception:  # nor can such a model be saved
            continue
        try:
            compared = import_checkpoint(hub, ours, verify=True).comparison
        except (UsageError, ArtifactError) as error:
            assert "\n" not in str(error), config
            assert not ours.exists(), config
        else:
            assert compared.exact < 1e-9, config
            equal += 1
    assert equal > 10
