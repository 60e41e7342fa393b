"""Discovery of what a model computes its attention weights from, for graphs that return queries and keys too."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zoo.artifact import declared_graphs
from zoo.contract import Graph
from zoo.errors import PluginError
from zoo.registry import ModelSpec
from zoo_export.trace import cache
from zoo_export.trace import key as traces

if TYPE_CHECKING:
    from zoo.nn import AttentionScores

__all__ = ["AttentionFacts", "find_attention_inputs"]

AttentionFacts = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""For each graph and each of its attention outputs, the fields of :class:`zoo.contract.AttentionInputs`."""


def find_attention_inputs(spec: ModelSpec, dtype: str, *, cached: bool = True) -> AttentionFacts:
    """Run the graphs of a model on the meta device, and return what scaled dot products compute the weights from.

    Attention of another kind, such as additive attention, is left out.

    Raises :class:`PluginError` if the model cannot be run on the meta device, or no weights are those of dot products.
    """
    key = traces.key(spec, "attention inputs", dtype, {})
    data = cache.read(key) if cached else None
    if data is None:
        inputs = {graph.name: _find(spec, graph, dtype) for graph in declared_graphs(spec) if graph.attentions}
        data = json.dumps(inputs).encode()
        cache.write(key, data)
    facts: AttentionFacts = json.loads(data)
    if not any(facts.values()):
        problem = f"{spec.plugin}: {spec.architecture.name} computes no attention weights as scaled dot products"
        raise PluginError(problem, spec.name, "export without queries and keys")
    return facts


def _find(spec: ModelSpec, graph: Graph, dtype: str) -> dict[str, dict[str, Any]]:
    import torch

    from zoo.models import create
    from zoo.nn import GraphModule, recorded_scores
    from zoo_export.trace.examples import example_sizes, example_tensors

    model = create.build_on_meta(spec, dtype).eval()
    try:
        examples = example_tensors(graph.input_tensors(), example_sizes(spec, graph), dtype, "meta")
        with torch.device("meta"), torch.no_grad(), recorded_scores() as scores:
            GraphModule(model, graph)(*examples)
    except Exception as error:  # a plugin's model may raise any
        problem = f"{spec.plugin}: the attention of graph {graph.name!r} of {spec.name} cannot be recorded ({error})"
        raise PluginError(problem) from error
    return _facts(graph, scores)


def _facts(graph: Graph, scores: Sequence[AttentionScores]) -> dict[str, dict[str, Any]]:
    """Return the facts about dot products, by the name of the weights. A wrong number of weights fails the trace."""
    return {
        tensor.name: {
            "head_size": item.query.shape[-1],
            "num_kv_heads": item.key.shape[1],
            "scale": float(item.scale),
            "softcap": item.softcap,
            "bias_heads": None if item.bias is None else item.bias.shape[1],
            "seen_heads": None if item.seen is None else item.seen.shape[1],
        }
        for tensor, item in zip(graph.attentions, scores, strict=False)
        if item.query is not None and item.key is not None
    }
