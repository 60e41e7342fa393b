"""Creation of linked ONNX graphs from a model's code, with a cache of traces."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from typing import Any, Literal, Self

from zoo.artifact import ATTENTION_INPUTS, ATTENTIONS, PREFILL, PROFILES, SERVING, WEB, ModelDirectory, declared_graphs
from zoo.artifact.weights import StoredTensor
from zoo.config import Settings
from zoo.contract import Graph, Size, rows_of, sizes_of, standard_fields
from zoo.errors import UsageError, argument, nearest
from zoo.registry import ModelSpec
from zoo.system import computing_apart
from zoo_export.graph.file import link, parse, serialize
from zoo_export.graph.join import join
from zoo_export.trace import cache
from zoo_export.trace import key as traces
from zoo_export.trace.sizes import serving_sizes

__all__ = [
    "OPSETS",
    "PORTABLE",
    "TRACED",
    "Options",
    "attention_facts",
    "graphs_of",
    "link_graphs",
    "make_graphs",
    "planned_layout",
    "tracing_apart",
    "unlinked_graphs",
]

OPSETS = tuple(range(18, 25))
"""Supported opset versions. torch does not export newer ones."""
TRACED = 23
"""The oldest opset that is traced, and the default. Graphs of older ones are translated from it."""
PORTABLE: Literal["portable"] = "portable"
_NAMES = (PORTABLE, *PROFILES, SERVING, WEB)


@dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """How graphs are written."""

    opset: int | None = None
    """Opset version, from 18: 23 by default. The profile ``web`` requires 23, and all others but ``portable`` 24."""
    functions: bool = True
    """Whether repeated modules become ONNX functions, in portable graphs from opset 23 on."""
    attentions: bool = False
    """Whether the graphs also return attention weights."""
    queries_keys: bool = False
    """Whether they also return what attention weights are computed from: queries, keys, biases and hidden keys."""
    windows: bool = True
    """Whether a layer with a window keeps the keys and values of its last positions alone, in portable graphs. Without,
    and in graphs of other profiles and those with attention weights, it keeps those of all positions."""
    contrib: bool = True
    """Whether attention is ONNX Runtime's GroupQueryAttention where that computes the same, in the profile ``serving``
    for the CPU. It reads a row's own tokens, and not the whole capacity. It has no kernel for float32 on CUDA."""
    fix: tuple[str, ...] = ()
    """Free dimensions to give a fixed size, as ``batch=1``. Such graphs are compared and run at this size only. In the
    profile ``serving``, all are fixed, by default as ``zoo_export.trace.sizes.serving_sizes`` says."""
    profile: Literal["portable", "cpu", "cuda", "serving", "web"] = PORTABLE
    """``portable`` runs anywhere; ``cpu`` and ``cuda`` are optimised for that execution provider; ``serving`` has fixed
    sizes, and rows with pasts of their own (``zoo_export.graph.serving``); ``web`` is ``portable`` with attention in
    operators that have WebGPU kernels in onnxruntime-web."""

    def __post_init__(self) -> None:
        if self.attentions and self.profile != PORTABLE:
            raise UsageError("only portable graphs return attention weights", argument("profile", self.profile))
        if self.queries_keys and not self.attentions:
            raise UsageError("queries and keys are returned with attention weights", argument("queries_keys"))
        if self.profile not in _NAMES:
            raise UsageError(f"no profile {self.profile!r}", argument("profile"), nearest(self.profile, _NAMES))
        for name, size in self.fixed.items():
            if size < 1:
                raise UsageError(f"the size of {name} must be positive, got {size}", argument("fix"))
        if self.fix and self.profile in (*PROFILES, WEB):
            what = "graphs of this profile cannot have fixed dimensions"
            raise UsageError(what, argument("profile", self.profile), f"choose {PORTABLE} or {SERVING}")
        if self.opset is not None and self.opset not in self._known_opsets:
            what = f"opset {self.opset} is not supported" + (f" in the profile {self.variant}" if self.variant else "")
            raise UsageError(what, argument("opset"), f"choose one of {', '.join(map(str, self._known_opsets))}")

    @classmethod
    def of_variant(cls, variant: str) -> Self:
        """Return the options that a variant requires."""
        profile = variant if variant in _NAMES else PORTABLE
        return cls.from_dict({"attentions": variant == ATTENTIONS, "profile": profile})

    @property
    def variant(self) -> str:
        """Name of the export variant; empty for the plain export."""
        if self.attentions:
            return ATTENTIONS
        return "" if self.profile == PORTABLE else self.profile

    @property
    def fixed(self) -> dict[str, int]:
        """The sizes of fixed dimensions, by name."""
        sizes = {}
        for text in self.fix:
            name, _, size = text.partition("=")
            if not size.isdecimal() or name in sizes:
                what = f"{name} is fixed twice" if name in sizes else f"{text!r} is not NAME=SIZE"
                raise UsageError(what, argument("fix"))
            sizes[name] = int(size)
        return sizes

    @property
    def operators(self) -> int:
        """The opset version."""
        return max(TRACED, self._known_opsets[0]) if self.opset is None else self.opset

    @property
    def _known_opsets(self) -> tuple[int, ...]:
        if self.profile == WEB:
            return (TRACED,)
        return OPSETS if self.profile == PORTABLE else OPSETS[-1:]

    @property
    def uses_contrib(self) -> bool:
        """Whether graphs may have operators of ONNX Runtime."""
        return self.contrib and self.profile == SERVING

    @property
    def limits_past(self) -> bool:
        """Whether windows limit the past: an option that has no effect where the graphs do not support it."""
        return self.windows and not self.variant

    @classmethod
    def of_export(cls, evidence: Mapping[str, Any]) -> Self:
        """Return the options of an export, given its evidence, which says what the defaults of its version were.

        Raises :class:`UsageError` for evidence without valid options.
        """
        stored = evidence.get("options")
        if not isinstance(stored, dict):
            raise UsageError(f"options must be an object, got {stored!r:.80}")
        return cls.from_dict({"windows": False, "contrib": False, **stored})

    def facts(self) -> dict[str, Any]:
        """The options that a graph depends on."""
        return {
            "opset": self.operators,
            "functions": self.functions,
            "attentions": self.attentions,
            "profile": self.profile,
            **({"queries_keys": True} if self.queries_keys else {}),
            **({"fix": list(self.fix)} if self.fix else {}),
            **({"windows": True} if self.limits_past else {}),
            **({"contrib": True} if self.uses_contrib else {}),
        }


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


@contextmanager
def tracing_apart(stored: ModelDirectory, options: Options = Options()) -> Iterator[Callable[[], dict[str, bytes]]]:
    """Trace in a process of its own while the block runs. Yields a function that is :func:`make_graphs`.

    What PyTorch's exporter imports and leaves behind takes as much memory as PyTorch itself. This process traces where
    PyTorch is imported already, whose threads a forked process lacks, or if the other fails.
    """

    def trace() -> bytes:
        made = unlinked_graphs(stored.spec, stored.dtype, options)
        texts = {name: base64.b64encode(graph).decode() for name, graph in made.items()}
        return json.dumps({"graphs": texts, "helped": cache.was_helped()}).encode()

    if _imported():
        yield lambda: make_graphs(stored, options)
        return
    with computing_apart(trace) as result:

        def graphs() -> dict[str, bytes]:
            data = result()
            if data is None:
                return make_graphs(stored, options)
            found = json.loads(data)
            cache.note_help(found["helped"])
            made = {name: base64.b64decode(text) for name, text in found["graphs"].items()}
            return _linked(made, stored.dtype, stored.layout, options)

        yield graphs


def _imported() -> bool:
    """Whether this process has imported PyTorch."""
    return "torch" in sys.modules


def link_graphs(
    spec: ModelSpec, dtype: str, layout: Mapping[str, StoredTensor], options: Options, *, cached: bool = True
) -> dict[str, bytes]:
    """Create all declared graphs by name, linked to the tensors of a layout."""
    return _linked(unlinked_graphs(spec, dtype, options, cached=cached), dtype, layout, options)


def _linked(
    graphs: Mapping[str, bytes], dtype: str, layout: Mapping[str, StoredTensor], options: Options
) -> dict[str, bytes]:
    if options.profile == "cpu" and dtype == "float32":
        graphs = {name: _joined(graph, layout) for name, graph in graphs.items()}
    return {name: link(graph, layout) for name, graph in graphs.items()}


def _joined(graph: bytes, layout: Mapping[str, StoredTensor]) -> bytes:
    model = parse(graph)
    join(model, layout)
    return serialize(model)


def unlinked_graphs(spec: ModelSpec, dtype: str, options: Options, *, cached: bool = True) -> dict[str, bytes]:
    """Create all declared graphs by name, from the cache or by tracing, without links to weights."""
    graphs = graphs_of(spec, dtype, options, cached=cached)
    if options.profile == SERVING:
        return _serving_graphs(spec, graphs, dtype, options, cached)
    _check_fixed(spec, options.fixed)
    return {graph.name: _unlinked(spec, graph, dtype, options, cached) for graph in graphs}


def _serving_graphs(
    spec: ModelSpec, graphs: Sequence[Graph], dtype: str, options: Options, cached: bool
) -> dict[str, bytes]:
    """Create the graphs of the profile ``serving``.

    The decoder reads one token of each row. The other graphs, and ``prefill`` with several tokens, read one row, so
    that adding a text to a batch costs no more than its own tokens.
    """
    sizes = serving_sizes(spec, options.fixed)
    wanted = {graph.name: (graph, {"sequence": 1} if graph.pasts else {"batch": 1}) for graph in graphs}
    wanted[PREFILL] = next(graph for graph in graphs if graph.pasts), {"batch": 1}
    made = {}
    for name, (graph, own) in wanted.items():
        key = traces.key(spec, name, dtype, options.facts() | {"sizes": sizes, "own": own})
        data = cache.read(key) if cached else None
        if data is None:
            from zoo_export.graph.serving import serve

            plain = Options(opset=options.operators, functions=False, windows=False)
            data = serve(_unlinked(spec, graph, dtype, plain, cached), graph, sizes, own, contrib=options.uses_contrib)
            cache.write(key, data)
        made[name] = data
    return made


def _check_fixed(spec: ModelSpec, sizes: Mapping[str, int]) -> None:
    """Raise :class:`UsageError` for a dimension that cannot be fixed to this size."""
    free, rows = {name for graph in spec.graphs for name in graph.dim_names()}, rows_of(spec.graphs)
    for name, size in sizes.items():
        if name not in free:
            raise UsageError(f"{spec.name} has no free dimension {name!r}", argument("fix"), nearest(name, free))
        if name not in rows and any(graph.pasts for graph in spec.graphs):
            what = f"{name} cannot be fixed: the calls that generate a text differ in length"
            raise UsageError(what, argument("fix"), "fix batch alone")
        declared = sizes_of(spec.graphs).get(name, Size())
        if not declared.allows(size):
            raise UsageError(f"{name} must be {declared}", argument("fix", f"{name}={size}"))
        positions = standard_fields(spec.config).max_seq_len
        if name not in rows and positions is not None and size > positions:
            raise UsageError(f"the model has {positions} positions", argument("fix", f"{name}={size}"))


def _unlinked(spec: ModelSpec, graph: Graph, dtype: str, options: Options, cached: bool) -> bytes:
    key = traces.key(spec, graph.name, dtype, options.facts())
    data = cache.read(key) if cached else None
    if data is None:
        if options.fix:
            from zoo_export.graph.static import fix

            plain = replace(options, fix=(), functions=False)
            data = fix(_unlinked(spec, graph, dtype, plain, cached), options.fixed)
        elif options.profile in PROFILES:
            from zoo_export.graph.profiles import specialise

            plain = Options(opset=options.operators, functions=False, windows=False)
            data = specialise(_unlinked(spec, graph, dtype, plain, cached), graph, options.profile)
        elif options.profile == WEB:
            from zoo_export.graph.opset import expand_attention

            plain = Options(opset=options.operators, functions=False, windows=False)
            data = expand_attention(_unlinked(spec, graph, dtype, plain, cached), WEB)
        elif options.operators < TRACED:
            from zoo_export.graph.opset import lower

            plain = replace(options, opset=None, functions=False)
            data = lower(_unlinked(spec, graph, dtype, plain, cached), options.operators)
        else:
            from zoo_export.trace.graph import trace_graph

            data = trace_graph(spec, graph, dtype, opset=options.operators, functions=options.functions)
        cache.write(key, data)
    return data


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
