"""The module itself, as something that runs a declared graph on arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from zoo.contract import Graph
from zoo.nn import call_graph
from zoo_export.grid import Feeds
from zoo_export.pipeline import Arrays

__all__ = ["TorchExecutor"]


class TorchExecutor:
    """Runs graphs by calling the unmodified module, in whatever dtype it has."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.real = next(model.parameters()).dtype
        self.dtype: np.dtype[Any] = torch.empty(0, dtype=self.real).numpy().dtype

    def __call__(self, graph: Graph, feeds: Feeds) -> Arrays:
        tensors = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in feeds.items()}
        tensors = {
            name: tensor.to(self.real) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()
        }
        with torch.inference_mode():
            return {name: tensor.numpy() for name, tensor in call_graph(self.model, graph, tensors).items()}
