"""Creation of linked ONNX graphs from a model's code, with a cache of traces."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from zoo.artifact import ATTENTION_INPUTS, PREFILL, SERVING, ModelDirectory, declared_graphs
from zoo.artifact.weights import StoredTensor
from zoo.contract import Graph, Size, rows_of, sizes_of, standard_fields
from zoo.errors import UsageError, argument, nearest
from zoo.registry import ModelSpec
from zoo.system import computing_apart, native_threads
from zoo_export.graph.file import dump, load, parse, serialize
from zoo_export.graph.join import join
from zoo_export.graph.links import link
from zoo_export.trace import cache
from zoo_export.trace import key as traces
from zoo_export.trace.options import OPSETS, PORTABLE, TRACED, Options
from zoo_export.trace.sizes import ServingSizes, serving_sizes

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

__all__ = [
    "OPSETS",
    "PORTABLE",
    "TRACED",
    "Options",
    "attention_facts",
    "graphs_of",
    "link_graphs",
    "link_models",
    "linked",
    "make_graphs",
    "planned_layout",
    "tracing_apart",
    "unlinked_graphs",
]


def attention_facts(spec: ModelSpec, dtype: str, options: Options, *, cached: bool = True) -> dict[str, Any]:
    """Return the entry of the evidence about what attention weights are computed from, if the graphs return that."""
    if not options.queries_keys:
        return {}
    from zoo_export.trace.attentions import find_attention_inputs

    return {ATTENTION_INPUTS: find_attention_inputs(spec, dtype, cached=cached)}


def graphs_of(spec: ModelSpec, dtype: str, options: Options, *, cached: bool = True) -> tuple[Graph, ...]:
    """Return the graphs of a model with the outputs that the options ask for."""
    facts = attention_facts(spec, dtype, options, cached=cached)
    return declared_graphs(
        spec, options.variant, windows=options.limits_past, attention_inputs=facts.get(ATTENTION_INPUTS)
    )


def make_graphs(stored: ModelDirectory, options: Options = Options(), *, cached: bool = True) -> dict[str, bytes]:
    """Create all declared graphs by name, linked to the weights but not verified."""
    return link_graphs(stored.spec, stored.dtype, stored.layout, options, cached=cached)


def link_models(
    spec: ModelSpec, dtype: str, layout: Mapping[str, StoredTensor], options: Options, *, joined: bool = True
) -> dict[str, ir.Model]:
    """Create all declared graphs by name, linked to the tensors of a layout, for further passes.

    Without ``joined``, each initialiser is one stored tensor in the profile ``cpu``, too.
    """
    import onnx_ir as ir

    join_them = joined and _is_joined(dtype, options)
    graphs = unlinked_graphs(spec, dtype, options)
    return {name: ir.from_proto(_link(graph, layout, join_them)) for name, graph in graphs.items()}


@contextmanager
def tracing_apart(stored: ModelDirectory, options: Options = Options()) -> Iterator[Callable[[], dict[str, bytes]]]:
    """Trace in a process of its own while the block runs. Yields a function that is :func:`make_graphs`.

    What PyTorch's exporter imports and leaves behind takes as much memory as PyTorch itself. This process traces where
    PyTorch was imported before, whose threads a forked process would lack, or if the other fails. What both processes
    need is imported once, before the fork.
    """

    def trace() -> bytes:
        graphs = unlinked_graphs(stored.spec, stored.dtype, options)
        texts = {name: base64.b64encode(graph).decode() for name, graph in graphs.items()}
        return json.dumps({"graphs": texts, "helped": cache.was_helped()}).encode()

    if _imported() or _starts_threads(_import_shared):
        yield lambda: make_graphs(stored, options)
        return
    with computing_apart(trace) as result:

        def answered() -> dict[str, bytes]:
            data = result()
            if data is None:
                return make_graphs(stored, options)
            answer = json.loads(data)
            cache.note_help(answer["helped"])
            graphs = {name: base64.b64decode(text) for name, text in answer["graphs"].items()}
            return linked(graphs, stored.dtype, stored.layout, options)

        yield answered


def _imported() -> bool:
    """Whether this process has imported PyTorch."""
    return "torch" in sys.modules


def _import_shared() -> None:
    """Import what both a trace and a comparison need: PyTorch, and libraries for ONNX graphs."""
    import torch  # noqa: F401

    import zoo_export.graph.rewriting  # noqa: F401


def _starts_threads(function: Callable[[], None]) -> bool:
    """Call a function, and return whether it has started threads, native ones included."""
    import numpy as np  # noqa: F401  # its threads end before a fork

    before = native_threads()
    function()
    return native_threads() > before


def link_graphs(
    spec: ModelSpec, dtype: str, layout: Mapping[str, StoredTensor], options: Options, *, cached: bool = True
) -> dict[str, bytes]:
    """Create all declared graphs by name, linked to the tensors of a layout."""
    return linked(unlinked_graphs(spec, dtype, options, cached=cached), dtype, layout, options)


def linked(
    graphs: Mapping[str, bytes], dtype: str, layout: Mapping[str, StoredTensor], options: Options
) -> dict[str, bytes]:
    """Return unlinked graphs, by name, linked to the tensors of a layout."""
    return {name: serialize(_link(graph, layout, _is_joined(dtype, options))) for name, graph in graphs.items()}


def _is_joined(dtype: str, options: Options) -> bool:
    """Whether products with sibling weights become one: a gain that was measured for float32 on the CPU alone."""
    return options.profile == "cpu" and dtype == "float32"


def _link(graph: bytes, layout: Mapping[str, StoredTensor], joined: bool) -> onnx.ModelProto:
    """Parse a graph, join its products if asked for, and link it to the tensors of a layout."""
    model = parse(graph)
    if joined:
        join(model, layout)
    link(model, layout)
    return model


def unlinked_graphs(spec: ModelSpec, dtype: str, options: Options, *, cached: bool = True) -> dict[str, bytes]:
    """Create all declared graphs by name, from the cache or by tracing, without links to weights."""
    graphs = graphs_of(spec, dtype, options, cached=cached)
    maker = _Maker(spec, dtype, cached)
    if options.profile == SERVING:
        return _serving_graphs(maker, graphs, options)
    _check_fixed(spec, options.fix)
    return {graph.name: maker.graph(graph, options) for graph in graphs}


def _serving_graphs(maker: _Maker, graphs: Sequence[Graph], options: Options) -> dict[str, bytes]:
    """Create the graphs of the profile ``serving``.

    The decoder reads one token of each row. The other graphs, and ``prefill`` with several tokens, read one row, so
    that adding a text to a batch costs no more than its own tokens.
    """
    sizes = serving_sizes(maker.spec, options.fix)
    one_row = ServingSizes(sizes, {"batch": 1})
    one_token = ServingSizes(sizes, {"sequence": 1})
    files = {
        graph.name: maker.serving(graph.name, graph, options, one_token if graph.pasts else one_row) for graph in graphs
    }
    decoder = next(graph for graph in graphs if graph.pasts)
    return files | {PREFILL: maker.serving(PREFILL, decoder, options, one_row)}


class _Maker:
    """Makes the graphs of one model, or takes them from the cache.

    Args:
        spec: the model.
        dtype: the dtype of its weights.
        cached: whether graphs may come from the cache.
    """

    def __init__(self, spec: ModelSpec, dtype: str, cached: bool) -> None:
        self.spec = spec
        self._dtype = dtype
        self._cached = cached

    def graph(self, graph: Graph, options: Options) -> bytes:
        """Return a graph."""
        return self._stored(graph.name, options.facts(), lambda: self._make(graph, options))

    def serving(self, name: str, graph: Graph, options: Options, sizes: ServingSizes) -> bytes:
        """Return a graph of the profile ``serving``, of which several may be made from one declared graph."""
        facts = options.facts() | {"sizes": sizes.export, "own": sizes.own}
        return self._stored(name, facts, lambda: self._make(graph, options, sizes))

    def _stored(self, name: str, facts: Mapping[str, Any], make: Callable[[], ir.Model]) -> bytes:
        key = traces.key(self.spec, name, self._dtype, facts)
        data = cache.read(key) if self._cached else None
        if data is None:
            data = dump(make())
            cache.write(key, data)
        return data

    def _make(self, graph: Graph, options: Options, sizes: ServingSizes | None = None) -> ir.Model:
        from zoo_export.trace.passes import derivation_of  # late: a graph from the cache needs no onnx-ir

        derivation = derivation_of(options, graph, sizes)
        if derivation is None:
            from zoo_export.trace.graph import trace_graph  # late: only this needs PyTorch

            return trace_graph(self.spec, graph, self._dtype, opset=options.operators, functions=options.functions)
        # From bytes even if the source was traced a moment ago: a result must not depend on what was cached.
        return derivation.make(load(self.graph(graph, derivation.source)))


def _check_fixed(spec: ModelSpec, sizes: Mapping[str, int]) -> None:
    """Raise :class:`UsageError` for a dimension that cannot be fixed to this size."""
    free, rows = {name for graph in spec.graphs for name in graph.dim_names()}, rows_of(spec.graphs)
    for name, size in sizes.items():
        if name not in free:
            raise UsageError(f"{spec.name} has no free dimension {name!r}", argument("fix"), nearest(name, free))
        if name not in rows and any(graph.pasts for graph in spec.graphs):
            problem = f"{name} cannot be fixed: the calls that generate a text differ in length"
            raise UsageError(problem, argument("fix"), "fix batch alone")
        declared = sizes_of(spec.graphs).get(name, Size())
        if not declared.allows(size):
            raise UsageError(f"{name} must be {declared}", argument("fix", f"{name}={size}"))
        positions = standard_fields(spec.config).max_seq_len
        if name not in rows and positions is not None and size > positions:
            raise UsageError(f"the model has {positions} positions", argument("fix", f"{name}={size}"))


def planned_layout(spec: ModelSpec, dtype: str) -> dict[str, StoredTensor]:
    """Return the layout of the model's weights as they will be stored, from the cache or the model."""
    key = traces.key(spec, "layout", dtype, {})
    data = cache.read(key)
    if data is None:
        from zoo.models import persist

        layout = persist.plan_layout(spec, dtype)
        cache.write(key, json.dumps({name: astuple(tensor) for name, tensor in layout.items()}).encode())
        return layout
    return {
        name: StoredTensor(file, dtype, tuple(shape), offset, length)
        for name, (file, dtype, shape, offset, length) in json.loads(data).items()
    }
