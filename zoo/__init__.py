"""zoo: transformer architectures as plugins, and ONNX models shown to equal them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zoo import cost
from zoo.config import Activation, Config, Settings
from zoo.contract import Architecture, Exporter, Graph, Importer, KeyValues, TensorSpec, mask, real, token_ids
from zoo.cost import Cost
from zoo.errors import ArtifactError, ParityError, PluginError, StorageError, UsageError, ZooError
from zoo.hookspecs import ZOO_API, hookimpl

if TYPE_CHECKING:
    from zoo.models import create_model, list_models, load, save

__version__ = "0.1.0"

__all__ = [
    "ZOO_API",
    "Activation",
    "Architecture",
    "ArtifactError",
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
    "TensorSpec",
    "UsageError",
    "ZooError",
    "cost",
    "create_model",
    "hookimpl",
    "list_models",
    "load",
    "mask",
    "real",
    "save",
    "token_ids",
]

_NEEDS_TORCH = frozenset({"create_model", "list_models", "load", "save"})


def __getattr__(name: str) -> Any:
    """Import what computes only when it is asked for, so that describing models never loads torch."""
    if name in _NEEDS_TORCH:
        from zoo import models

        return getattr(models, name)
    raise AttributeError(f"module 'zoo' has no attribute {name!r}")
