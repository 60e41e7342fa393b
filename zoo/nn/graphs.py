"""Calls of a model through its declared graphs, with flat, named tensors."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from zoo.contract import Graph, KeyValues
from zoo.nn.cache import Cache
from zoo.nn.recording import recorded_attentions

__all__ = ["GraphModule", "call_graph"]


def call_graph(
    model: nn.Module, graph: Graph, feeds: Mapping[str, Tensor], *, hooks: bool = False
) -> dict[str, Tensor]:
    """Run ``graph`` of ``model`` on tensors named as declared, and return every declared output by name.

    With ``hooks``, ``forward`` is called as users call it, through the model itself, which runs the model's own hooks.

    Raises :class:`ValueError` when the model records a different number of attention weights than the graph declares.
    """
    arguments: dict[str, Any] = {
        item.name: _gather(item, feeds) if isinstance(item, KeyValues) else feeds[item.name] for item in graph.inputs
    }
    past = _gather(graph.past, feeds) if graph.past else None
    if graph.past is not None:
        arguments[graph.past.name] = past
    recorded = graph.recorded()
    with ExitStack() as stack:
        weights = stack.enter_context(recorded_attentions()) if recorded else []
        function = model if hooks and graph.method == "forward" else getattr(model, graph.method)
        result = function(**arguments)
    if isinstance(result, Tensor):
        result = {graph.outputs[0].name: result}
    if len(weights) != len(recorded):
        raise ValueError(f"graph {graph.name!r} declares {len(recorded)} attention outputs but computes {len(weights)}")
    result = {**result, **{tensor.name: weight for tensor, weight in zip(recorded, weights, strict=True)}}
    outputs: dict[str, Tensor] = {}
    for item in graph.outputs:
        outputs |= (
            _scatter(item.name, result[item.name]) if isinstance(item, KeyValues) else {item.name: result[item.name]}
        )
    return outputs | (_scatter("present", past) if past is not None else {})


def _gather(item: KeyValues, feeds: Mapping[str, Tensor]) -> Cache:
    return Cache((feeds[f"{item.name}.{n}.key"], feeds[f"{item.name}.{n}.value"]) for n in range(item.num_layers))


def _scatter(name: str, cache: Cache) -> dict[str, Tensor]:
    return {
        f"{name}.{layer}.{part}": tensor
        for layer, pair in enumerate(cache.pairs())
        for part, tensor in zip(("key", "value"), pair, strict=True)
    }


class GraphModule(nn.Module):
    """One graph of a model as a module with positional tensors, for tracing."""

    def __init__(self, model: nn.Module, graph: Graph) -> None:
        super().__init__()
        self.model = model
        self.graph = graph
        # Specifications are made here because torch.compile cannot trace the parser of their dimensions.
        self._inputs = [tensor.name for tensor in graph.input_tensors()]
        self._outputs = [tensor.name for tensor in graph.output_tensors()]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Take the input tensors and return the output tensors, both in declaration order."""
        outputs = call_graph(self.model, self.graph, dict(zip(self._inputs, tensors, strict=True)))
        return tuple(outputs[name] for name in self._outputs)
