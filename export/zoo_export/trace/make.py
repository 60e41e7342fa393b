"""Creation of linked ONNX graphs from a model's code, with a cache of traces."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any, Literal

from zoo import memo
from zoo.artifact import ATTENTIONS, PROFILES, ModelDirectory, declared_graphs
from zoo.artifact.weights import StoredTensor
from zoo.config import Settings
from zoo.contract import Graph
from zoo.errors import UsageError, argument, nearest
from zoo.registry import ModelSpec
from zoo_export.graph.file import link
from zoo_export.trace import key as traces

__all__ = ["OPSETS", "PORTABLE", "TRACED", "Options", "link_graphs", "make_graphs", "planned_layout", "unlinked_graphs"]

OPSETS = tuple(range(18, 25))
"""Supported opset versions. torch does not export newer ones."""
TRACED = 23
"""The oldest opset that is traced, and the default. Graphs of older ones are translated from it."""
PORTABLE: Literal["portable"] = "portable"


@dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """How graphs are written."""

    opset: int | None = None
    """Opset version, from 18: 23 by default; the profiles ``cpu`` and ``cuda`` require 24."""
    functions: bool = True
    """Whether repeated modules become ONNX functions, in portable graphs from opset 23 on."""
    attentions: bool = False
    """Whether the graphs also return attention weights."""
    profile: Literal["portable", "cpu", "cuda"] = PORTABLE
    """``portable`` runs anywhere; ``cpu`` and ``cuda`` are optimised for that execution provider."""

    def __post_init__(self) -> None:
        if self.attentions and self.profile != PORTABLE:
            raise UsageError("only portable graphs return attention weights", argument("profile", self.profile))
        if self.profile not in (PORTABLE, *PROFILES):
            raise UsageError(
                f"no profile {self.profile!r}", argument("profile"), nearest(self.profile, (PORTABLE, *PROFILES))
            )
        if self.opset is not None and self.opset not in self._known_opsets:
            what = f"opset {self.opset} is not supported" + (f" in the profile {self.variant}" if self.variant else "")
            raise UsageError(what, argument("opset"), f"choose one of {', '.join(map(str, self._known_opsets))}")

    @property
    def variant(self) -> str:
        """Name of the export variant; empty for the plain export."""
        if self.attentions:
            return ATTENTIONS
        return "" if self.profile == PORTABLE else self.profile

    @property
    def operators(self) -> int:
        """The opset version."""
        return max(TRACED, self._known_opsets[0]) if self.opset is None else self.opset

    @property
    def _known_opsets(self) -> tuple[int, ...]:
        return OPSETS if self.profile == PORTABLE else OPSETS[-1:]

    def facts(self) -> dict[str, Any]:
        """The options that a graph depends on."""
        return {
            "opset": self.operators,
            "functions": self.functions,
            "attentions": self.attentions,
            "profile": self.profile,
        }


def make_graphs(stored: ModelDirectory, options: Options = Options(), *, cached: bool = True) -> dict[str, bytes]:
    """Create all declared graphs by name, linked to the weights but not verified."""
    return link_graphs(stored.spec, stored.dtype, stored.layout, options, cached=cached)


def link_graphs(
    spec: ModelSpec, dtype: str, layout: Mapping[str, StoredTensor], options: Options, *, cached: bool = True
) -> dict[str, bytes]:
    """Create all declared graphs by name, linked to the tensors of a layout."""
    graphs = unlinked_graphs(spec, dtype, options, cached=cached)
    return {name: link(graph, layout) for name, graph in graphs.items()}


def unlinked_graphs(spec: ModelSpec, dtype: str, options: Options, *, cached: bool = True) -> dict[str, bytes]:
    """Create all declared graphs by name, from the cache or by tracing, without links to weights."""
    graphs = declared_graphs(spec, options.variant)
    return {graph.name: _unlinked(spec, graph, dtype, options, cached) for graph in graphs}


def _unlinked(spec: ModelSpec, graph: Graph, dtype: str, options: Options, cached: bool) -> bytes:
    key = traces.key(spec, graph.name, dtype, options.facts())
    data = memo.read(key) if cached else None
    if data is None:
        if options.profile != PORTABLE:
            from zoo_export.graph.profiles import specialise

            plain = Options(opset=options.operators, functions=False)
            data = specialise(_unlinked(spec, graph, dtype, plain, cached), graph, options.profile)
        elif options.operators < TRACED:
            from zoo_export.graph.opset import lower

            plain = Options(functions=False, attentions=options.attentions)
            data = lower(_unlinked(spec, graph, dtype, plain, cached), options.operators)
        else:
            from zoo_export.trace.graph import trace_graph

            data = trace_graph(spec, graph, dtype, opset=options.operators, functions=options.functions)
        memo.write(key, data)
    return data


def planned_layout(spec: ModelSpec, dtype: str) -> dict[str, StoredTensor]:
    """Return the layout of the model's weights as they will be stored, from the cache or the model."""
    key = traces.key(spec, "layout", dtype, {})
    data = memo.read(key)
    if data is None:
        from zoo.models import persist

        layout = persist.plan_layout(spec, dtype)
        memo.write(key, json.dumps({name: astuple(tensor) for name, tensor in layout.items()}).encode())
        return layout
    return {
        name: StoredTensor(file, dtype, tuple(shape), offset, length)
        for name, (file, dtype, shape, offset, length) in json.loads(data).items()
    }
