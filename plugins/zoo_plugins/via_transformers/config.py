"""Configuration of models of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from zoo import Graph
from zoo_plugins.via_transformers.fields import ClassFields
from zoo_plugins.via_transformers.graphs import graphs_of

__all__ = ["ViaTransformersConfig"]


@dataclass(frozen=True, kw_only=True)
class ViaTransformersConfig(ClassFields):
    """Configuration of a model of transformers, whose class and configuration determine the other fields.

    ``zoo import`` reads them off with a call on the meta device.
    """

    def graphs(self) -> tuple[Graph, ...]:
        """Declare one graph, or the encoder and the decoder of an encoder-decoder."""
        return graphs_of(self)

    def with_task(self, task: str, values: Mapping[str, Any] | None = None, where: object = None) -> Self:
        """Return this configuration for a task, with the class for it; see :meth:`zoo.Config.with_task`."""
        if task == self.task:
            return super().with_task(task, values, where)
        from zoo_plugins.via_transformers.facts import inspect_model
        from zoo_plugins.via_transformers.originals import class_for

        changes = {**(values or {}), "model_class": class_for(self.original, task)}
        moved = super().with_task(task, {**changes, "num_kv_heads": 1, "head_dim": 1}, where)  # inspected next
        return super().with_task(task, {**changes, **inspect_model(moved)}, where)
