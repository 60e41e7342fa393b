"""The passes of each variant: how its graphs are made from graphs that are traced.

This module imports onnx-ir, and is itself imported only if a graph is not cached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import onnx_ir as ir

from zoo.artifact import OPENVINO, SERVING, WEB
from zoo.contract import Graph
from zoo_export.graph.flatten import flatten
from zoo_export.graph.opset import expand_attention, lower
from zoo_export.graph.profiles import specialise
from zoo_export.graph.static import fix
from zoo_export.trace.options import PORTABLE, TRACED, Options
from zoo_export.trace.sizes import ServingSizes

__all__ = ["Derivation", "Pass", "derivation_of"]

Pass = Callable[[ir.Model], ir.Model]
"""A rewrite of a graph. It may change its argument, and returns the result."""


@dataclass(frozen=True)
class Derivation:
    """How a graph is made from another one of the same model."""

    source: Options
    """The options of the graph to start from."""
    passes: Sequence[Pass]
    """The rewrites of that graph, in order."""

    def make(self, model: ir.Model) -> ir.Model:
        """Run the passes."""
        for step in self.passes:  # not ir.passes.Sequential, which hides the errors of passes behind its own
            model = step(model)
        return model


def derivation_of(options: Options, graph: Graph, serving: ServingSizes | None = None) -> Derivation | None:
    """Return how a graph with these options is made, or None if it is traced.

    Args:
        options: the options.
        graph: the declared graph.
        serving: the sizes of the graph in the profile ``serving``.
    """
    return _DERIVATIONS[options.profile](options, graph, serving)


def _portable(options: Options, graph: Graph, serving: ServingSizes | None) -> Derivation | None:
    if options.fix:  # first, so that a graph of an older opset is fixed after its translation
        return Derivation(replace(options, fix={}, functions=False), [partial(fix, sizes=options.fix)])
    if options.operators < TRACED:
        return Derivation(replace(options, opset=None, functions=False), [partial(lower, opset=options.operators)])
    return None


def _optimised(options: Options, graph: Graph, serving: ServingSizes | None) -> Derivation:
    return Derivation(_flat(options), [partial(specialise, declared=graph, profile=options.profile)])


def _serving(options: Options, graph: Graph, serving: ServingSizes | None) -> Derivation:
    from zoo_export.graph.any_rows import free_rows
    from zoo_export.graph.grouped import group_attention  # late: both open sessions of ONNX Runtime
    from zoo_export.graph.serving import serve

    assert serving is not None
    sizes, own = serving.export, serving.own

    def make(model: ir.Model, rows: int | None = None) -> ir.Model:
        fixed = dict(own) if rows is None else {**own, "batch": rows}
        served = serve(model, declared=graph, sizes=sizes, own_sizes=fixed)
        return group_attention(served) if options.uses_contrib and graph.pasts else served

    if "batch" in own:
        return Derivation(_flat(options), [flatten, make])
    return Derivation(_flat(options), [flatten, partial(free_rows, make=make, rows=sizes["batch"])])


def _web(options: Options, graph: Graph, serving: ServingSizes | None) -> Derivation:
    return Derivation(_flat(options), [flatten, partial(expand_attention, profile=WEB)])


def _flat(options: Options) -> Options:
    """The options of portable graphs without functions, whose pasts have all tokens."""
    return Options(opset=options.operators, functions=False, windows=False)


_DERIVATIONS: Mapping[str, Callable[[Options, Graph, ServingSizes | None], Derivation | None]] = {
    PORTABLE: _portable,
    "cpu": _optimised,
    "cuda": _optimised,
    OPENVINO: _optimised,
    SERVING: _serving,
    WEB: _web,
}
