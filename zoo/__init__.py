"""zoo: transformer architectures as plugins, exported to ONNX and verified against PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zoo import cost
from zoo.classes import ClassifierConfig, EmbeddingConfig, ImageConfig, ProblemType
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
    causal_graph,
    floats,
    mask,
    token_ids,
)
from zoo.cost import Cost
from zoo.errors import ArtifactError, ParityError, PluginError, StorageError, UsageError, ZooError
from zoo.hookspecs import ZOO_API, hookimpl
from zoo.version import __version__ as __version__

if TYPE_CHECKING:
    from zoo.checkpoints.published import create_model
    from zoo.figures.attention import AttentionAxis, AttentionMap, AttentionRecord, AttentionStep, AttentionVectors
    from zoo.figures.attention_page import AttentionPage, attention_page
    from zoo.models.adapt import adapt
    from zoo.models.create import list_models
    from zoo.models.persist import load, save
    from zoo.tokenizers.tokenizer import Tokenizer, load_tokenizer

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
    "StorageError",
    "Task",
    "TensorSpec",
    "Tokenizer",
    "Tracker",
    "UsageError",
    "ZooError",
    "adapt",
    "attention_page",
    "attentions",
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

_HOMES = {
    "AttentionAxis": "zoo.figures.attention",
    "AttentionMap": "zoo.figures.attention",
    "AttentionPage": "zoo.figures.attention_page",
    "AttentionRecord": "zoo.figures.attention",
    "AttentionStep": "zoo.figures.attention",
    "AttentionVectors": "zoo.figures.attention",
    "Tokenizer": "zoo.tokenizers.tokenizer",
    "adapt": "zoo.models.adapt",
    "attention_page": "zoo.figures.attention_page",
    "create_model": "zoo.checkpoints.published",
    "list_models": "zoo.models.create",
    "load": "zoo.models.persist",
    "load_tokenizer": "zoo.tokenizers.tokenizer",
    "save": "zoo.models.persist",
}


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


def __getattr__(name: str) -> Any:
    """Import on first use the modules that need torch or tokenizers, so that describing models never loads them."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'zoo' has no attribute {name!r}")
