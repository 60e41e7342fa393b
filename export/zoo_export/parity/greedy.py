"""Greedy decoding with a cache, for any executor of a declared graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo.contract import Graph
from zoo.probe.inputs import Feeds, Point, empty_past, make_feeds, next_past
from zoo.probe.pipeline import Executor, decoder_inputs, token_input

__all__ = ["greedy", "greedy_agreement", "greedy_tokens"]

_ROWS, _PROMPT, _NEW, _SEED = 2, 5, 8, 1


def greedy(execute: Executor, graph: Graph, known: Feeds, ids: Array, mask: Array) -> Iterator[Array]:
    """Yield the logits (batch, vocabulary) of each next token, continuing with the most likely one.

    Args:
        execute: runs ``graph``, a decoder with a cache.
        graph: the declaration of the decoder.
        known: inputs that are the same at every step, and the blocks of the prompt's tokens; later ones are in none.
        ids: (batch, length), the prompt.
        mask: (batch, length), 1 for a token of the prompt.
    """
    ids_name, mask_name = decoder_inputs(graph)
    past = empty_past(graph, len(ids), execute.dtype)
    names = {tensor.name for tensor in graph.input_tensors()}
    constant = {name: value for name, value in known.items() if name in names}
    blocks = [tensor.name for tensor in graph.input_tensors() if tensor.is_blocks]
    while True:
        new_mask = mask if graph.past_length else mask[:, -ids.shape[1] :]
        outputs = execute(graph, constant | {ids_name: ids} | ({mask_name: new_mask} if mask_name else {}) | past)
        last = outputs["logits"][:, -1]
        yield last
        ids = last.argmax(-1)[:, None].astype(np.int64)
        constant |= {name: np.zeros_like(ids) for name in blocks}
        past, mask = next_past(graph, outputs), np.pad(mask, ((0, 0), (0, 1)), constant_values=1)


def greedy_agreement(
    reference: Executor,
    tokens: Mapping[str, Array],
    graphs: Sequence[Graph],
    margins: Mapping[str, float],
    longest: int = _PROMPT + _NEW,
    fixed: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, dict[str, Any]]:
    """Compare a few tokens decoded from a left-padded batch by the reference and by executors.

    A row is compared up to the first step at which the two best logits differ by the level's margin or less: either
    token is a correct choice there.

    Args:
        reference: runs the graphs in float64.
        tokens: what :func:`greedy_tokens` returns, by level; empty for a model that does not decode token ids.
        graphs: the declared graphs.
        margins: the margin of each level.
        longest: the largest number of tokens of prompt and continuation.
        fixed: sizes of dimensions that have only one.
    """
    if not tokens:
        return {}
    wanted, gaps = _decode(reference, graphs, longest, fixed)
    new, rows = wanted.shape
    agreement = {}
    for level, decoded in tokens.items():
        settled = np.cumsum(gaps <= margins[level], axis=0) == 0
        differs = (wanted != decoded) & settled
        agreed = int(np.argmax(differs.any(1))) if differs.any() else new
        agreement[level] = {"passed": not differs.any(), "rows": rows, "tokens": new, "agreed": agreed,
                        "compared": int(settled.sum())}  # fmt: skip
    return agreement


def greedy_tokens(
    execute: Executor,
    graphs: Sequence[Graph],
    longest: int = _PROMPT + _NEW,
    fixed: Mapping[str, int] = MappingProxyType({}),
) -> Array | None:
    """Return the tokens that :func:`greedy_agreement` compares, (step, batch); None if a model decodes none."""
    return _decode(execute, graphs, longest, fixed)[0] if _decodes(graphs) else None


def _decodes(graphs: Sequence[Graph]) -> bool:
    """Whether the last graph is a decoder of token ids."""
    decoder = graphs[-1]
    has_logits = any(tensor.name == "logits" for tensor in decoder.output_tensors())
    return bool(decoder.pasts) and has_logits and token_input(decoder) is not None


def _decode(execute: Executor, graphs: Sequence[Graph], longest: int, fixed: Mapping[str, int]) -> tuple[Array, Array]:
    """Return the tokens (step, batch) of a greedy continuation, and how far the best logit is from the second."""
    prompt = min(_PROMPT, -(-longest // 2))
    new = min(_NEW, longest - prompt + 1)  # the last token is not an input
    feeds = make_feeds(graphs, Point(fixed.get("batch", _ROWS), prompt, 0, "left"), _SEED, longest)
    tensors = dict(feeds)
    for graph in graphs[:-1]:
        tensors |= execute(graph, {tensor.name: tensors[tensor.name] for tensor in graph.input_tensors()})
    ids, mask = decoder_inputs(graphs[-1])
    first = feeds[mask] if mask else np.ones_like(feeds[ids])
    steps = greedy(execute, graphs[-1], tensors, feeds[ids], first)
    found = [next(steps).astype(np.float64) for _ in range(new)]
    best = [np.sort(np.partition(logits, -2, axis=-1)[:, -2:], axis=-1) for logits in found]
    return np.stack([logits.argmax(-1) for logits in found]), np.stack([two[:, 1] - two[:, 0] for two in best])
