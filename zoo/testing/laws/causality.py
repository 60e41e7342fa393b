"""The check of which tokens an output depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zoo.contract import Graph
from zoo.testing.check import Inapplicable, fail
from zoo.testing.laws.changes import LONG, along, token_inputs
from zoo.testing.subject import Subject

__all__ = ["causality"]


def causality(subject: Subject) -> None:
    """A graph is causal if, and only if, it is declared so.

    In a causal graph, one with a past or with ``causal=True``, later tokens never change earlier outputs, and some
    earlier token changes a later output. With ``causal=False``, some later token changes an earlier output, or no token
    changes the output of another, as in a model that treats each position by itself. A causal model that sees later
    tokens has excellent training loss, but cannot generate text.

    With ``zoo.block_ids``, this holds for tokens in no block; a token of a block changes the outputs of the one before
    it in the block, and none before the block.

    Mask with ``zoo.nn.build_mask(causal=True)``, or correct the declaration.
    """
    checked = False
    for graph in subject.graphs:
        for length in _lengths_of_outputs(graph):
            if graph.pasts or graph.causal is not None:
                _check_order(subject, graph, length)
                checked = True
    if not checked:
        raise Inapplicable("no graph with an output along a length is declared causal or not causal")


def _lengths_of_outputs(graph: Graph) -> list[str]:
    from zoo.testing.compute import outputs_of

    names = {
        dim for tensor in outputs_of(graph) for dim in tensor.dims if isinstance(dim, str) and dim not in graph.rows
    }
    return ["sequence"] if graph.pasts and "sequence" in names else sorted(names & set(graph.dim_names()))


def _check_order(subject: Subject, graph: Graph, length: str) -> None:
    from zoo.testing.compute import LENGTH, TOLERANCE, executor, make_inputs, run

    execute = executor(subject.exact)
    looked_ahead = looked_back = 0.0
    for tokens in (LENGTH, LONG):
        feeds = _in_blocks(graph, make_inputs(subject, length=tokens, other=min(tokens, subject.longest)), 0)
        size = max((feeds[tensor.name].shape[axis] for tensor, axis in token_inputs(subject, length, feeds)), default=1)
        if size < 2:
            raise Inapplicable("inputs have only one token")
        reference = run(execute, subject.graphs, feeds)[graph.name]
        for place in range(1, size) if size <= LENGTH else (size // 2, size - 1):
            early, late = slice(place), slice(place, None)
            for_later = run(execute, subject.graphs, _changed(subject, length, feeds, late))[graph.name]
            for_earlier = run(execute, subject.graphs, _changed(subject, length, feeds, early))[graph.name]
            looked_ahead = max(looked_ahead, _moved(graph, length, early, reference, for_later))
            looked_back = max(looked_back, _moved(graph, length, late, reference, for_earlier))
    where = f"graph {graph.name!r}, along {length}"
    if graph.causal is False:
        if looked_ahead <= TOLERANCE < looked_back:
            happened = "only earlier tokens change later ones"
            fail(f"in {where}, a later token changes an earlier output, as causal=False declares", happened)
        return
    if looked_ahead > TOLERANCE:
        happened = f"an earlier output changes by {looked_ahead:.2g} of the largest value"
        fail(f"in {where}, no later token changes an earlier output", happened)
    if looked_back <= TOLERANCE:
        fail(f"in {where}, an earlier token changes a later output", "none does: tokens are independent")
    _check_blocks(subject, graph, length)


def _check_blocks(subject: Subject, graph: Graph, length: str) -> None:
    """Check that a token in a block changes the output before it, and that no token changes those before its block."""
    from zoo.testing.compute import TOLERANCE, executor, make_inputs, run

    blocks = [tensor for tensor in graph.input_tensors() if tensor.is_blocks]
    if not blocks:
        return
    execute, inputs, where = executor(subject.exact), make_inputs(subject), f"graph {graph.name!r}, along {length}"
    size, last = inputs[blocks[0].name].shape[1], (blocks[0].upper or 2) - 1
    patterns = [[1] * size, [0, 1, 1], [0, 1, 1, last, last], [0, last, last, 1, 1]]
    for pattern in patterns if last > 1 else patterns[:2]:
        numbers = [*pattern, *[0] * size][:size]
        feeds = _in_blocks(graph, inputs, numbers)
        reference = run(execute, subject.graphs, feeds)[graph.name]
        for place in range(1, size):
            later = _in_blocks(graph, _changed(subject, length, feeds, slice(place, place + 1)), numbers)
            found = run(execute, subject.graphs, later)[graph.name]
            first = place
            while first and numbers[first - 1] == numbers[place] > 0:
                first -= 1
            situation = f"in {where}, with blocks {numbers}, "
            if first and (moved := _moved(graph, length, slice(first), reference, found)) > TOLERANCE:
                happened = f"token {place} changes one by {moved:.2g} of the largest value"
                fail(f"{situation}no token changes an output before its block", happened)
            if first < place and _moved(graph, length, slice(place - 1, place), reference, found) <= TOLERANCE:
                happened = f"token {place} does not: the block has no effect"
                fail(f"{situation}a token of a block changes the output before it", happened)


def _in_blocks(graph: Graph, feeds: Mapping[str, Any], numbers: int | Sequence[int]) -> dict[str, Any]:
    """Return the inputs with the tokens in these blocks, (T) or all in one; in none if its number is 0."""
    import numpy as np

    names = {tensor.name for tensor in graph.input_tensors() if tensor.is_blocks}
    return {
        name: np.broadcast_to(np.asarray(numbers, value.dtype), value.shape).copy() if name in names else value
        for name, value in feeds.items()
    }


def _changed(subject: Subject, length: str, feeds: Mapping[str, Any], place: slice) -> dict[str, Any]:
    """Return the inputs with other tokens in a slice of a length."""
    import numpy as np

    from zoo.testing.compute import change

    rng = np.random.default_rng(3)
    result = dict(feeds)
    for tensor, axis in token_inputs(subject, length, feeds):
        where = (*(slice(None),) * axis, place)
        result[tensor.name] = result[tensor.name].copy()
        result[tensor.name][where] = change(tensor, feeds[tensor.name][where], rng)
    return result


def _moved(graph: Graph, length: str, place: slice, reference: Mapping[str, Any], results: Mapping[str, Any]) -> float:
    """Return the largest distance between outputs in a slice of a length."""
    from zoo.testing.compute import distance, outputs_of

    return max(
        distance(*(along(tensor, length, place, values[tensor.name]) for values in (reference, results)))
        for tensor in outputs_of(graph)
        if length in tensor.dims
    )
