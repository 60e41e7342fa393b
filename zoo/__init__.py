"""zoo: transformer architectures as plugins, and ONNX models shown to equal them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zoo import cost
from zoo.config import Activation, Config, Settings
from zoo.contract import (
    Architecture,
    Command,
    Exporter,
    Graph,
    Importer,
    KeyValues,
    Task,
    TensorSpec,
    attentions,
    causal_graph,
    mask,
    real,
    token_ids,
)
from zoo.cost import Cost
from zoo.errors import ArtifactError, ParityError, PluginError, StorageError, UsageError, ZooError
from zoo.hookspecs import ZOO_API, hookimpl

if TYPE_CHECKING:
    from zoo_export.runtime import load_session

    from zoo.adapting import adapt
    from zoo.models import create_model, list_models, load, save

__version__ = "0.1.0"

__all__ = [
    "ZOO_API",
    "Activation",
    "Architecture",
    "ArtifactError",
    "Command",
    "Config",
    "Cost",
    "Exporter",
    "Graph",
    "Importer",
    "KeyValues",
    "ParityError",
    "PluginError",
    "Settings",
    "StorageError",
    "Task",
    "TensorSpec",
    "UsageError",
    "ZooError",
    "adapt",
    "attentions",
    "causal_graph",
    "cost",
    "create_model",
    "hookimpl",
    "list_models",
    "load",
    "load_session",
    "mask",
    "real",
    "save",
    "token_ids",
]

_HOMES = dict.fromkeys(("create_model", "list_models", "load", "save"), "zoo.models")
_HOMES["adapt"] = "zoo.adapting"
_HOMES["load_session"] = "zoo_export.runtime"


def __getattr__(name: str) -> Any:
    """Import what computes only when it is asked for, so that describing models never loads torch."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'zoo' has no attribute {name!r}")
