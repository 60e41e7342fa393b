"""Calls of a model through its declared graphs, with flat, named tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from zoo.contract import AttentionInputs, Graph, KeyValues, States, TensorSpec
from zoo.nn.cache import Cache, LayerStates
from zoo.nn.recording import AttentionScores, recorded_attentions, recorded_scores

__all__ = ["GraphModule", "call_graph"]


class _TensorNames:
    """The names of the tensors of a graph's items. ``torch.compile`` cannot trace the parser of their dimensions."""

    def __init__(self, graph: Graph) -> None:
        items = [item for item in (*graph.inputs, *graph.outputs, *graph.pasts) if not isinstance(item, TensorSpec)]
        self.tensors = {item.name: [tensor.name for tensor in item.tensors()] for item in items}
        self.presents = {past.name: [tensor.name for tensor in past.present_tensors()] for past in graph.pasts}


def call_graph(
    model: nn.Module,
    graph: Graph,
    feeds: Mapping[str, Tensor],
    *,
    hooks: bool = False,
) -> dict[str, Tensor]:
    """Run ``graph`` of ``model`` on tensors named as declared, and return every declared output by name.

    With ``hooks``, ``forward`` is called as users call it, through the model itself, which runs the model's own hooks.

    Raises :class:`ValueError` when the model records a different number of attention weights than the graph declares,
    or stores other states.
    """
    return _call(model, graph, feeds, _TensorNames(graph), hooks=hooks)


def _call(
    model: nn.Module, graph: Graph, feeds: Mapping[str, Tensor], names: _TensorNames, *, hooks: bool = False
) -> dict[str, Tensor]:
    length = _past_length(graph, feeds) if graph.has_windows else None
    arguments = {item.name: _gather(item, feeds, names) for item in graph.inputs}
    arguments |= {item.name: _gather(item, feeds, names, length) for item in graph.pasts}
    pasts = {item.name: arguments[item.name] for item in graph.pasts}
    recorded = graph.recorded()
    with ExitStack() as stack:
        scores = stack.enter_context(recorded_scores()) if graph.attention_inputs else []
        weights = stack.enter_context(recorded_attentions()) if recorded and not graph.attention_inputs else []
        function = model if hooks and graph.method == "forward" else getattr(model, graph.method)
        result = function(**arguments)
    if isinstance(result, Tensor):
        result = {graph.outputs[0].name: result}
    if not isinstance(result, Mapping):
        problem = f"{graph.method} of {type(model).__qualname__} returns a value of type {type(result).__qualname__}"
        raise TypeError(f"{problem}: return a tensor, or a dictionary of the outputs of graph {graph.name!r}")
    weights = weights or [item.weights for item in scores]
    if len(weights) != len(recorded):
        raise ValueError(f"graph {graph.name!r} declares {len(recorded)} attention outputs but computes {len(weights)}")
    result = {**result, **{tensor.name: weight for tensor, weight in zip(recorded, weights, strict=True)}}
    computed = dict(zip([tensor.name for tensor in recorded], scores, strict=False))
    for inputs in graph.attention_inputs:
        result |= _attention_inputs(graph, inputs, computed[inputs.weights.name])
    outputs: dict[str, Tensor] = {}
    for item in graph.outputs:
        outputs |= _scatter(item, names.tensors.get(item.name, [item.name]), result[item.name])
    for past in graph.pasts:
        outputs |= _scatter(past, names.presents[past.name], pasts[past.name])
    return outputs


def _attention_inputs(graph: Graph, declared: AttentionInputs, scores: AttentionScores) -> dict[str, Tensor]:
    """Return the tensors that attention weights are computed from, by name."""
    result = {}
    for part in ("query", "key", "bias", "seen"):
        tensor, value = getattr(declared, part), getattr(scores, part)
        if (tensor is None) != (value is None):
            verb = "computes" if tensor is None else "does not compute"
            raise ValueError(f"graph {graph.name!r} {verb} the {part} of {declared.weights.name}")
        if tensor is not None:
            result[tensor.name] = value.clone()  # keys of a memory may be an input of the graph
    return result


def _past_length(graph: Graph, feeds: Mapping[str, Tensor]) -> int:
    """Return the number of tokens in the past, which layers with a window do not tell."""
    sizes = {
        dim: feeds[tensor.name].shape[axis]
        for tensor in graph.input_tensors()
        for axis, dim in enumerate(tensor.dims)
        if dim in (graph.past_length, graph.total_length, "sequence")
    }
    past = sizes.get(str(graph.past_length))
    return sizes[graph.total_length] - sizes["sequence"] if past is None else past


def _gather(
    item: TensorSpec | KeyValues | States, feeds: Mapping[str, Tensor], names: _TensorNames, length: int | None = None
) -> Any:
    """Return the argument for an input: a tensor, a cache after ``length`` tokens, or the states of every layer."""
    if isinstance(item, TensorSpec):
        return feeds[item.name]
    tensors = [feeds[name] for name in names.tensors[item.name]]
    if isinstance(item, KeyValues):
        return Cache(zip(tensors[::2], tensors[1::2], strict=True), windows=item.windows, length=length)
    states, count = [tensor.name for tensor in item.states], len(item.states)
    return [
        LayerStates(zip(states, tensors[start : start + count], strict=True)) for start in range(0, len(tensors), count)
    ]


def _scatter(item: TensorSpec | KeyValues | States, names: Sequence[str], value: Any) -> dict[str, Tensor]:
    """Return the tensors of an output by name."""
    if isinstance(item, TensorSpec):
        tensors = [value]
    elif isinstance(item, KeyValues):
        tensors = [tensor for pair in value.pairs() for tensor in pair]
    else:
        states = [state.name for state in item.states]
        for number, layer in enumerate(value):
            if sorted(layer) != sorted(states):
                raise ValueError(f"layer {number} stores states {sorted(layer)}, but {item.name} declares {states}")
        tensors = [layer[state] for layer in value for state in states]
    return dict(zip(names, tensors, strict=True))


class GraphModule(nn.Module):
    """One graph of a model as a module with positional tensors, for tracing."""

    def __init__(self, model: nn.Module, graph: Graph) -> None:
        super().__init__()
        self.model = model
        self.graph = graph
        self._names = _TensorNames(graph)
        self._inputs = [tensor.name for tensor in graph.input_tensors()]
        self._outputs = [tensor.name for tensor in graph.output_tensors()]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Take the input tensors and return the output tensors, both in declaration order."""
        feeds = dict(zip(self._inputs, tensors, strict=True))
        outputs = _call(self.model, self.graph, feeds, self._names)
        return tuple(outputs[name] for name in self._outputs)
