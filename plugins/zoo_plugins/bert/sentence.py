"""Directories of sentence-transformers: an encoder's checkpoint plus pooling, dense layers and normalisation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zoo import ArtifactError, EmbeddingConfig, UsageError
from zoo.checkpoints import Checkpoint, Rule

__all__ = ["PROJECTIONS", "sentence_encoder", "sentence_files"]

PROJECTIONS = Rule("embedding_head.projections.*", "Dense.*.linear")
"""The tensors of the dense layers."""
_POOLING = {
    "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len", "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}  # fmt: skip
_NEWER_POOLING = {
    "mean": "mean", "cls": "cls", "max": "max", "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean", "lasttoken": "last",
}  # fmt: skip
"""Values of ``pooling_mode``, which recent versions write instead."""
_ACTIVATIONS = {
    "torch.nn.modules.activation.Tanh": "tanh", "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.ReLU": "relu", "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.SiLU": "silu",
}  # fmt: skip
_MODULES = ("Transformer", "Pooling", "Dense", "Normalize")
_ORDER = re.compile("(Transformer )?Pooling (Normalize )?(Dense )*(Normalize )*")
_VECTOR = (None, "sentence_embedding")
"""What dense layers and normalisation read and write."""


def sentence_encoder(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return task, pooling, dense layers and normalisation of a sentence-transformers directory; empty for others.

    Raises :class:`UsageError` for unsupported modules and settings.
    """
    folders = [module.folder for module in checkpoint.modules if module.kind == "Pooling" and module.folder]
    where = checkpoint.path / next(iter(folders), "1_Pooling") / "config.json"
    pooling = checkpoint.json(str(where.relative_to(checkpoint.path)))
    if not pooling:
        return {}
    modules = checkpoint.path / "modules.json"
    kinds = [module.kind for module in checkpoint.modules]
    if not kinds:
        raise ArtifactError("not a list of modules of sentence-transformers", modules)
    if unknown := [kind for kind in kinds if kind not in _MODULES]:
        raise UsageError(f"the module {unknown[0]} is not supported", modules, f"known: {', '.join(_MODULES)}")
    if not _ORDER.fullmatch("".join(f"{kind} " for kind in kinds)):
        remedy = "known: Pooling, Normalize, Dense, Normalize"
        raise UsageError(f"the order of the modules {', '.join(kinds)} is not supported", modules, remedy)
    for module in checkpoint.modules:
        if module.kind == "Normalize" and module.folder:
            _require_vectors(checkpoint.json(f"{module.folder}/config.json"), checkpoint.path / module.folder)
    return {
        "task": "sentence-embedding",
        "pooling": _pooling(pooling, where),
        "normalize": kinds[-1] == "Normalize",
        **(_projections(checkpoint) if "Dense" in kinds else {}),
        "normalize_first": "Dense" in kinds and "Normalize" in kinds[: kinds.index("Dense")],
    }


def sentence_files(c: EmbeddingConfig) -> Mapping[str, Any]:
    """Return the files that describe a sentence encoder to sentence-transformers; none for other tasks.

    The configuration also has the field ``hidden_size``.
    """
    if c.task != "sentence-embedding":
        return {}
    width: int = c.hidden_size  # type: ignore[attr-defined]
    dense = ["Dense"] * len(c.projection_sizes)
    kinds = ["Transformer", "Pooling", *["Normalize"] * c.normalize_first, *dense, *["Normalize"] * c.normalize]
    paths = ["" if kind == "Transformer" else f"{number}_{kind}" for number, kind in enumerate(kinds)]
    activation = next(theirs for theirs, ours in _ACTIVATIONS.items() if ours == c.projection_activation)
    sizes = zip((width, *c.projection_sizes), c.projection_sizes, strict=False)
    layers = zip([path for path, kind in zip(paths, kinds, strict=True) if kind == "Dense"], sizes, strict=True)
    return {
        "modules.json": [
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for number, (path, kind) in enumerate(zip(paths, kinds, strict=True))
        ],
        "1_Pooling/config.json": {
            "word_embedding_dimension": width,
            **{mode: c.pooling == ours for mode, ours in _POOLING.items()},
        },
        **{
            f"{path}/config.json": {
                "in_features": inputs,
                "out_features": outputs,
                "bias": c.projection_bias,
                "activation_function": activation,
            }
            for path, (inputs, outputs) in layers
        },
    }


def _pooling(said: Mapping[str, Any], where: Path) -> str:
    if said.get("include_prompt", True) is not True:
        what = "include_prompt false is not supported: the graph pools all tokens"
        raise UsageError(what, where, "set it to true if texts have no prompt")
    newer = said.get("pooling_mode")
    if newer is not None:
        if not isinstance(newer, str) or newer not in _NEWER_POOLING:
            raise UsageError(f"pooling_mode {newer!r} is not supported", where, f"known: {', '.join(_NEWER_POOLING)}")
        return _NEWER_POOLING[newer]
    modes = [key for key, value in said.items() if key.startswith("pooling_mode_") and value is True]
    if len(modes) != 1 or modes[0] not in _POOLING:
        raise UsageError(f"pooling {', '.join(modes)} is not supported", where, f"known: {', '.join(_POOLING)}")
    return _POOLING[modes[0]]


def _projections(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the widths of the dense layers, their activation and whether they have biases."""
    sizes, activations, biases = [], [], []
    for folder in checkpoint.dense_folders:
        where, said = checkpoint.path / folder / "config.json", checkpoint.json(f"{folder}/config.json")
        _require_vectors(said, where)
        if said.get("use_residual", False) is not False:
            raise UsageError("use_residual true is not supported", where)
        name = said.get("activation_function", "torch.nn.modules.activation.Tanh")
        if not isinstance(name, str) or name not in _ACTIVATIONS:
            raise UsageError(
                f"activation_function {name!r} is not supported", where, f"known: {', '.join(_ACTIVATIONS)}"
            )
        if "out_features" not in said:
            raise UsageError("out_features is missing", where)
        sizes.append(said["out_features"])
        activations.append(_ACTIVATIONS[name])
        biases.append(said.get("bias", True))
    for name, values in (("activation_function", activations), ("bias", biases)):
        if any(value != values[0] for value in values):
            what = f"dense layers that differ in {name} are not supported: {', '.join(map(str, values))}"
            raise UsageError(what, checkpoint.path / "modules.json")
    return {"projection_sizes": sizes, "projection_activation": activations[0], "projection_bias": biases[0]}


def _require_vectors(said: Mapping[str, Any], where: Path) -> None:
    """Raise :class:`UsageError` if a module reads or writes anything but the vectors of texts."""
    for key in ("module_input_name", "module_output_name"):
        if said.get(key) not in _VECTOR:
            raise UsageError(f"{key} {said[key]!r} is not supported", where, f"known: {_VECTOR[1]}")
