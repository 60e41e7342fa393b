"""Configuration of a module that a user's own code builds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from zoo import Config, Cost, Graph, UsageError, floats, mask, token_ids
from zoo.modules import check_reference, graph_data, read_graphs

__all__ = ["EXAMPLE", "OwnModuleConfig"]

EXAMPLE = "zoo_plugins.own_module.example:MeanScorer"
"""The factory of the defaults, whose code is zoo's."""
_GRAPH = Graph(inputs=(token_ids("input_ids", 64), mask("mask")), outputs=(floats("score", "batch"),))


@dataclass(frozen=True, kw_only=True)
class OwnModuleConfig(Config):
    """The factory of a module, its arguments, and the graphs that its user declared, as data.

    ``zoo.save`` and ``zoo_export.export_module`` write it. The defaults are those of a small module of this plugin.
    """

    task: Literal["tensors"] = "tensors"
    """Tensors in, tensors out."""
    factory: str | None = EXAMPLE
    """The function or class, ``module:attribute``, that returns the module; None if the module was given as an
    object."""
    arguments: dict[str, Any] = field(default_factory=dict, hash=False)
    """Its keyword arguments."""
    declared: tuple[dict[str, Any], ...] = field(default_factory=lambda: (graph_data(_GRAPH),), hash=False)
    """The graphs, as :func:`zoo.modules.graph_data` writes them; none of a module that was saved without them."""
    num_parameters: int = 1041
    """Number of parameters."""

    def __post_init__(self) -> None:
        if self.declares_graphs:
            read_graphs(self.declared)
        self.require_positive("num_parameters")
        if self.factory is not None:
            try:
                check_reference(self.factory)
            except UsageError as error:
                raise ValueError(str(error)) from error

    @property
    def outside_code(self) -> str | None:
        """The factory, unless it is this plugin's own; empty for a module that was given as an object."""
        if self.factory is None:
            return ""
        return None if self.factory == EXAMPLE else self.factory

    @property
    def declares_graphs(self) -> bool:
        """Whether graphs were given when the module was saved."""
        return bool(self.declared)

    def graphs(self) -> tuple[Graph, ...]:
        """Return the declared graphs. Raises :class:`zoo.UsageError` for a module that was saved without them."""
        if not self.declares_graphs:
            remedy = "save it again with zoo.save(..., graphs=zoo_export.infer_graph(...))"
            raise UsageError("declares no graph, which this needs", f"the module of {self.factory}", remedy)
        return read_graphs(self.declared)

    def cost(self) -> Cost:
        """Return the number of parameters. FLOPs are not counted."""
        return Cost(self.num_parameters)
