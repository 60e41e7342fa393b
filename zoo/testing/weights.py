"""The check of attention weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from zoo.contract import TensorSpec, dim_names, is_quotient
from zoo.testing.check import Inapplicable, fail
from zoo.testing.subject import Subject

__all__ = ["attention_weights"]


def attention_weights(subject: Subject) -> None:
    """The declared attention weights are valid, and recording them does not change outputs.

    Weights have the declared shape and are not negative, those of a query sum to 1, or to 0 if it sees no key, and
    padding has weight 0. Recorded queries, keys and biases give the weights. People inspect attention weights to
    understand a model's outputs.

    Compute attention with ``zoo.nn``, which records it, or pass your own weights to ``zoo.nn.record_attention``, with
    ``zoo.nn.AttentionScores`` if they are scaled dot products; declare ``zoo.attentions`` in the order of computation.
    """
    import numpy as np

    from zoo.testing.compute import check_equal, check_shapes, counting, executor, make_inputs, masks, run
    from zoo.testing.laws import padded, sides

    if not any(graph.attentions for graph in subject.graphs):
        raise Inapplicable("no graph declares attention weights")
    feeds = make_inputs(subject)
    padded_sides = [(mask, length, side) for mask, length in masks(subject.graphs) for side in sides(mask)]
    execute, asked = executor(subject.exact), tuple(graph.with_attentions() for graph in subject.graphs)
    for mask, length, side in [(None, "", "no"), *padded_sides]:
        inputs = {**feeds, mask.name: padded(feeds[mask.name], side)} if mask else feeds
        plain = run(execute, subject.graphs, inputs)
        try:
            results = run(execute, asked, inputs)
        except ValueError as error:
            fail("a graph computes the attention weights that it declares", str(error))
        expected, situation = "recording weights does not change outputs", f"with {side} padding"
        check_equal(subject.graphs, plain, results, expected, situation, counting(inputs))
        tensors = dict(inputs)
        for graph in asked:
            check_shapes(graph, tensors, results[graph.name], "weights have the declared shape", situation)
            tensors |= results[graph.name]
            for tensor in graph.recorded():
                tokens = np.ones((1, 1)) if mask is None else inputs[mask.name]
                _check_rows(tensor, length, tokens, results[graph.name][tensor.name], situation)
        _check_scores(partial(run, execute, subject.graphs, inputs), situation)


def _check_scores(compute: Callable[[], object], situation: str) -> None:
    """Check that the scores that are recorded during a computation give the weights."""
    from zoo.nn import attention_weights, recorded_scores
    from zoo.testing.compute import TOLERANCE

    with recorded_scores() as recorded:
        compute()
    for number, item in enumerate(recorded):
        if item.query is None or item.key is None:
            continue
        seen = None if item.seen is None else item.seen.bool()
        weights = attention_weights(
            item.query, item.key, mask=seen, bias=item.bias, scale=item.scale, softcap=item.softcap
        )
        off = float((weights - item.weights).abs().max())
        if not off <= TOLERANCE:
            happened = f"{situation}, those of attention {number} are off by {off:.3g}"
            fail("recorded queries, keys and biases give the weights", happened)


def _check_rows(tensor: TensorSpec, length: str, tokens: Any, weights: Any, situation: str) -> None:
    """Check the weights of queries that are not padding; ``tokens`` is the mask of ``length``."""
    import numpy as np

    from zoo.testing.compute import TOLERANCE

    queries, keys = (length in dim_names(dim) and not is_quotient(dim) for dim in tensor.dims[2:])
    where = f"{situation}, in {tensor.name}"
    rows = np.broadcast_to(tokens[:, None, :] != 0 if queries else True, weights.shape[:3])
    sums = weights.sum(-1)[rows]
    if not (weights[rows] >= -TOLERANCE).all():
        fail("no weight is negative", f"{where}, one is {weights[rows].min():.3g}")
    off = np.minimum(np.abs(sums - 1), np.abs(sums))
    if not (off <= TOLERANCE).all():
        fail("the weights of a query sum to 1 or 0", f"{where}, they sum to {sums[off.argmax()]:.6g}")
    if keys and tokens.shape[1] > 1:
        on_padding = np.abs(weights[..., -tokens.shape[1] :]) * (rows[..., None] & (tokens[:, None, None] == 0))
        if on_padding.max(initial=0.0) > 0:
            fail("padding has no weight", f"{where}, it has {on_padding.max():.3g}")
