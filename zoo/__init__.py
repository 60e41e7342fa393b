"""zoo: transformer architectures as plugins, exported to ONNX and verified against PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zoo import cost
from zoo.classes import ClassifierConfig, ProblemType
from zoo.config import Activation, Config, Initializer, Norm, Settings, shortest_period
from zoo.contract import (
    Architecture,
    Command,
    Dataset,
    Exporter,
    Graph,
    Importer,
    KeyValues,
    Objective,
    Size,
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
    from zoo.models.adapt import adapt
    from zoo.models.create import list_models
    from zoo.models.persist import load, save

__all__ = [
    "ZOO_API",
    "Activation",
    "Architecture",
    "ArtifactError",
    "ClassifierConfig",
    "Command",
    "Config",
    "Cost",
    "Dataset",
    "Exporter",
    "Graph",
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
    "StorageError",
    "Task",
    "TensorSpec",
    "Tracker",
    "UsageError",
    "ZooError",
    "adapt",
    "attentions",
    "causal_graph",
    "cost",
    "create_model",
    "floats",
    "hookimpl",
    "list_models",
    "load",
    "mask",
    "save",
    "shortest_period",
    "token_ids",
]

_HOMES = {
    "adapt": "zoo.models.adapt",
    "create_model": "zoo.checkpoints.published",
    "list_models": "zoo.models.create",
    "load": "zoo.models.persist",
    "save": "zoo.models.persist",
}


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


def __getattr__(name: str) -> Any:
    """Import the modules that need torch on first use, so that describing models never loads it."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'zoo' has no attribute {name!r}")
