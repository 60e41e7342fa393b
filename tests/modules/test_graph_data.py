"""Graphs as plain data."""

from __future__ import annotations

import json
from typing import Any

import pytest

from zoo import Graph, KeyValues, Size, States, attentions, causal_graph, floats, mask, plugins, token_ids
from zoo.modules import graph_data, read_graphs
from zoo.registry import registry

GRAPH: dict[str, Any] = {
    "inputs": [{"name": "x", "dims": ["batch", "length"]}],
    "outputs": [{"name": "y", "dims": ["batch"]}],
}
PAST = {"name": "past_key_values", "num_layers": 2, "num_heads": 2, "head_dim": 4}


def test_graphs_of_all_architectures() -> None:
    """A round trip through JSON gives equal graphs."""
    names = [f"{name}-tiny" for name in plugins.active().architecture_names()]
    found = [registry().resolve(name).windowed_graphs for name in names if name in registry().names()]
    assert len(found) > 20
    for graphs in found:
        assert read_graphs(json.loads(json.dumps(list(map(graph_data, graphs))))) == tuple(graphs)


def test_all_fields() -> None:
    graph = Graph(
        name="decoder",
        method="decode",
        inputs=(token_ids("ids", 9), mask("mask", padding="left"), KeyValues(**{**PAST, "name": "cross"})),
        outputs=(floats("logits", "batch", "sequence", 9),),
        past=(KeyValues(**{**PAST, "windows": (None, 4)}), States(num_layers=1, states=(floats("h", "batch", 3),))),
        attentions=attentions(2, 2),
        causal=True,
    )
    sized = Graph(
        inputs=(floats("x", "images", "(frames + 3) // 4"),),
        outputs=(floats("y", "images"),),
        rows=("images",),
        sizes={"frames": Size(min=4, max=80, multiple_of=2)},
    )
    (decoder, other) = read_graphs(json.loads(json.dumps([graph_data(graph), graph_data(sized)])))
    assert (decoder, other, other.sizes) == (graph, sized, sized.sizes)


def test_the_past_of_one_kind() -> None:
    graph = causal_graph(vocab_size=9, num_layers=1, num_kv_heads=1, head_dim=4)
    assert read_graphs([graph_data(graph)]) == (graph,)


BAD: dict[str, tuple[str, Any]] = {
    "nothing": ("no graph is declared", []),
    "no mapping": ("must have inputs, outputs", ["x"]),
    "no outputs": ("must have inputs, outputs", [{"inputs": []}]),
    "unknown field": ("must have inputs, outputs", [{**GRAPH, "attention_inputs": []}]),
    "wrong type": ("causal must be", [{**GRAPH, "causal": 1}]),
    "unknown dtype": ("dtype of an item of inputs", [{**GRAPH, "inputs": [{"name": "x", "dims": [], "dtype": "str"}]}]),
    "bad dimension": ("bad dimension", [{**GRAPH, "inputs": [{"name": "x", "dims": ["batch", "a * b"]}]}]),
    "deep dimension": ("nested too deeply", [{**GRAPH, "inputs": [{"name": "x", "dims": ["+".join("a" * 9999)]}]}]),
    "many layers": ("num_layers must be at most", [{**GRAPH, "past": {**PAST, "num_layers": 10**9}}]),
    "past": ("past must be tuple", [{**GRAPH, "past": 3}]),
    "a path": ("bad name of graph", [{**GRAPH, "name": "a/b"}]),
    "private method": ("bad method of graph", [{**GRAPH, "method": "_apply"}]),
    "bad tensor name": ("bad name 'a b'", [{**GRAPH, "outputs": [{"name": "a b", "dims": ["batch"]}]}]),
    "one name twice": ("two tensors of graph 'model' are called 'x'", [{**GRAPH, "outputs": GRAPH["inputs"]}]),
    "no rows": ("the first dimension of y", [{**GRAPH, "outputs": [{"name": "y", "dims": [3]}]}]),
    "two graphs of one name": ("two graphs have the same name", [GRAPH, GRAPH]),
    "two graphs of one method": ("two graphs have the same method", [GRAPH, {**GRAPH, "name": "other"}]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_data(case: str) -> None:
    message, data = BAD[case]
    with pytest.raises(ValueError, match=message):
        read_graphs(data)
