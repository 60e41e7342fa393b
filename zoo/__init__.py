"""zoo: transformer architectures as plugins, exported to ONNX and verified against PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zoo.version import __version__ as __version__

if TYPE_CHECKING:
    from zoo import cost
    from zoo.checkpoints.published import create_model
    from zoo.classes import ClassifierConfig, EmbeddingConfig, ImageConfig, ImagePreparation, ProblemType
    from zoo.config import Activation, Config, Initializer, Norm, Settings, shortest_period
    from zoo.contract import (
        Architecture,
        Command,
        Dataset,
        Engine,
        Exporter,
        Graph,
        Importer,
        KeyValues,
        Objective,
        Size,
        States,
        Task,
        TensorSpec,
        Tracker,
        attentions,
        block_ids,
        causal_graph,
        floats,
        mask,
        token_ids,
    )
    from zoo.cost import Cost
    from zoo.errors import ArtifactError, ParityError, PluginError, StoppedError, StorageError, UsageError, ZooError
    from zoo.factories import allow_factories
    from zoo.figures.attention import AttentionAxis, AttentionMap, AttentionRecord, AttentionStep, AttentionVectors
    from zoo.figures.attention_page import AttentionPage, attention_page
    from zoo.hookspecs import ZOO_API, hookimpl
    from zoo.models.adapt import adapt
    from zoo.models.create import list_models
    from zoo.models.persist import load
    from zoo.models.saving import save
    from zoo.tiles import ImageTiling
    from zoo.tokenizers.loading import load_tokenizer
    from zoo.tokenizers.tokenizer import Tokenizer

__all__ = [
    "ZOO_API",
    "Activation",
    "Architecture",
    "ArtifactError",
    "AttentionAxis",
    "AttentionMap",
    "AttentionPage",
    "AttentionRecord",
    "AttentionStep",
    "AttentionVectors",
    "ClassifierConfig",
    "Command",
    "Config",
    "Cost",
    "Dataset",
    "EmbeddingConfig",
    "Engine",
    "Exporter",
    "Graph",
    "ImageConfig",
    "ImagePreparation",
    "ImageTiling",
    "Importer",
    "Initializer",
    "KeyValues",
    "Norm",
    "Objective",
    "ParityError",
    "PluginError",
    "ProblemType",
    "Settings",
    "Size",
    "States",
    "StoppedError",
    "StorageError",
    "Task",
    "TensorSpec",
    "Tokenizer",
    "Tracker",
    "UsageError",
    "ZooError",
    "adapt",
    "allow_factories",
    "attention_page",
    "attentions",
    "block_ids",
    "causal_graph",
    "cost",
    "create_model",
    "floats",
    "hookimpl",
    "list_models",
    "load",
    "load_tokenizer",
    "mask",
    "save",
    "shortest_period",
    "token_ids",
]

_NAMES = {
    "zoo.checkpoints.published": ("create_model",),
    "zoo.classes": ("ClassifierConfig", "EmbeddingConfig", "ImageConfig", "ImagePreparation", "ProblemType"),
    "zoo.config": ("Activation", "Config", "Initializer", "Norm", "Settings", "shortest_period"),
    "zoo.contract": (
        "Architecture", "Command", "Dataset", "Engine", "Exporter", "Graph", "Importer", "KeyValues", "Objective",
        "Size", "States", "Task", "TensorSpec", "Tracker", "attentions", "block_ids", "causal_graph", "floats", "mask",
        "token_ids",
    ),
    "zoo.cost": ("Cost",),
    "zoo.errors": (
        "ArtifactError", "ParityError", "PluginError", "StoppedError", "StorageError", "UsageError", "ZooError",
    ),
    "zoo.factories": ("allow_factories",),
    "zoo.figures.attention": ("AttentionAxis", "AttentionMap", "AttentionRecord", "AttentionStep", "AttentionVectors"),
    "zoo.figures.attention_page": ("AttentionPage", "attention_page"),
    "zoo.hookspecs": ("ZOO_API", "hookimpl"),
    "zoo.models.adapt": ("adapt",),
    "zoo.models.create": ("list_models",),
    "zoo.models.persist": ("load",),
    "zoo.models.saving": ("save",),
    "zoo.tiles": ("ImageTiling",),
    "zoo.tokenizers.loading": ("load_tokenizer",),
    "zoo.tokenizers.tokenizer": ("Tokenizer",),
}  # fmt: skip
"""The public names of each module."""
_HOMES = {name: module for module, names in _NAMES.items() for name in names}


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


def __getattr__(name: str) -> Any:
    """Import modules on first use: describing models never loads torch, and the command can catch signals first."""
    from importlib import import_module

    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if f"zoo.{name}" in _NAMES:
        return import_module(f"zoo.{name}")
    raise AttributeError(f"module 'zoo' has no attribute {name!r}")
