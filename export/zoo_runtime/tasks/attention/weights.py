"""Tasks that return attention weights, by layer and head.

H heads, T queries, S keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from zoo import AttentionVectors
from zoo.arrays import Array
from zoo.artifact import ATTENTIONS
from zoo.config import Settings
from zoo.contract import TensorSpec, dim_size
from zoo.errors import UsageError
from zoo.probe.pipeline import decoder_inputs
from zoo_runtime.running.context import Context
from zoo_runtime.running.inputs import Answer, is_pair, label
from zoo_runtime.running.runner import finite
from zoo_runtime.running.text_runner import TextRunner, Tokens
from zoo_runtime.tasks.images import ImageRunner, Pixels

__all__ = ["AttentionOptions", "Attentions", "ChosenAttentions", "ImageAttentions", "checked", "strongest"]

Weights = dict[str, Array]
Output = tuple[str, str]
"""A graph and one of its outputs."""

_SHOWN = 10
"""Number of queries per head in human-readable output."""


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(Settings):
    """Selects layers and heads, and what is returned of them."""

    layers: tuple[int, ...] = ()
    """Indices of layers, from 0; all by default."""
    heads: tuple[int, ...] = ()
    """Indices of heads, from 0; all by default."""
    queries_keys: bool = False
    """Whether to return queries, keys, biases and hidden keys, too, which the export must contain."""

    def choose(self, specs: Mapping[Output, TensorSpec], where: object) -> dict[Output, Sequence[int]]:
        """Map each selected output to its selected heads. Unknown layers or heads raise :class:`UsageError`."""
        if not specs:
            remedy = f"open the variant {ATTENTIONS}, created by zoo export {where} --onnx --attentions"
            raise UsageError("this export returns no attention weights", where, remedy)
        layers = {output: int(tensor.name.rpartition(".")[2]) for output, tensor in specs.items()}
        heads = {output: range(int(tensor.dims[1])) for output, tensor in specs.items()}
        numbers_of = {"layer": set(layers.values()), "head": {head for numbers in heads.values() for head in numbers}}
        for kind, requested in (("layer", self.layers), ("head", self.heads)):
            if unknown := sorted(set(requested) - numbers_of[kind]):
                raise UsageError(f"no {kind} {unknown[0]}", where, f"there are 0 to {max(numbers_of[kind])}")
        return {
            output: [head for head in heads[output] if not self.heads or head in self.heads]
            for output, layer in layers.items()
            if not self.layers or layer in self.layers
        }


class ChosenAttentions:
    """The selected attention weights of a session's graphs, and their names."""

    def __init__(self, session: Context, options: AttentionOptions) -> None:
        self.specs = {(graph.name, tensor.name): tensor for graph in session.graphs for tensor in graph.recorded()}
        """The attention weights that the graphs return."""
        several = len(session.graphs) > 1
        self.prefixes = {graph.name: f"{graph.name}." if several else "" for graph in session.graphs}
        self.heads = options.choose(self.specs, session.path)
        self.inputs = {
            (graph.name, item.weights.name): item for graph in session.graphs for item in graph.attention_inputs
        }
        if options.queries_keys and not self.inputs:
            command = f"zoo export {session.path} --onnx --attentions --queries-keys --force"
            raise UsageError("this export returns no queries and keys", session.path, command)
        self.dims = {
            f"{self.prefixes[graph]}{name}.{head}": self.specs[graph, name].dims
            for (graph, name), heads in self.heads.items()
            for head in heads
        }

    def pick(self, outputs: Mapping[str, Mapping[str, Array]], row: int, sizes: Mapping[str, int]) -> Weights:
        """Return the weights of one row, (T, S) each, without padding, by layer and head (and graph, if several)."""
        picked = {}
        for (graph, name), heads in self.heads.items():
            if graph in outputs:
                queries, keys = (dim_size(dim, sizes) for dim in self.specs[graph, name].dims[2:])
                for head in heads:
                    picked[f"{self.prefixes[graph]}{name}.{head}"] = outputs[graph][name][row, head, :queries, :keys]
        return picked

    def pick_vectors(
        self, outputs: Mapping[str, Mapping[str, Array]], row: int, sizes: Mapping[str, int]
    ) -> dict[str, AttentionVectors]:
        """Return what the weights of one row are computed from, without padding, by layer (and graph, if several)."""
        picked = {}
        for (graph, name), item in self.inputs.items():
            if graph in outputs and (heads := list(self.heads.get((graph, name), ()))):
                lengths = [dim_size(dim, sizes) for dim in item.weights.dims[2:]]
                group = int(item.weights.dims[1]) // item.num_kv_heads
                key_heads = sorted({head // group for head in heads})
                arrays = outputs[graph]
                bias, seen = (
                    None if tensor is None else _of_heads(arrays[tensor.name][row], heads, *lengths)
                    for tensor in (item.bias, item.seen)
                )
                picked[f"{self.prefixes[graph]}{name}"] = AttentionVectors(
                    queries=arrays[item.query.name][row][heads, : lengths[0]],
                    keys=arrays[item.key.name][row][key_heads, : lengths[1]],
                    key_heads=[key_heads.index(head // group) for head in heads],
                    scale=item.scale,
                    softcap=item.softcap,
                    bias=bias,
                    seen=None if seen is None else seen != 0,
                )
        return picked


def _of_heads(array: Array, heads: Sequence[int], queries: int, keys: int) -> Array:
    """Return the part of some heads and positions of an array, (1 or all heads, T, S); of one head if all are equal."""
    weights = (array if len(array) == 1 else array[heads])[:, :queries, :keys]
    return weights[:1] if (weights == weights[:1]).all() else weights


def checked(items: Sequence[Any], results: Sequence[dict[str, Any]]) -> list[Any]:
    """Replace each result with NaN or infinite weights by an error."""
    sums = np.array([sum(weights.sum() for weights in result["attentions"].values()) for result in results])
    return finite(items, sums, results)


def strongest(answer: Answer, texts: Callable[[str, int], Sequence[Any]] | None = None) -> Iterator[str]:
    """Yield a line per head with the strongest key of each of the first queries.

    Args:
        answer: an answer with attention weights.
        texts: called with the name of the weights and an axis; returns labels for the positions along the axis.
    """
    for name, weights in answer.result["attentions"].items():
        rows = np.asarray(weights)[:_SHOWN]
        queries, keys = (
            texts(name, axis) if texts else range(size) for axis, size in zip((-2, -1), np.shape(weights), strict=True)
        )
        pairs = (f"{queries[row]}>{keys[int(key)]} {rows[row, key]:.2f}" for row, key in enumerate(rows.argmax(-1)))
        yield f"{label(answer)}: {name}  {'  '.join(pairs)}{'  ...' if len(weights) > _SHOWN else ''}"


@dataclass(frozen=True)
class Translated(Tokens):
    """A source, optionally with a target for the decoder."""

    target: Sequence[int] = ()


class Attentions(TextRunner):
    """``attentions``: the attention weights (T, S) of each input, as ``attentions.LAYER.HEAD``.

    For an encoder-decoder the names are ``encoder.attentions.LAYER.HEAD``. If the input is a pair of a source and a
    target, there are also ``decoder.attentions`` and ``decoder.cross_attentions``, for the target preceded by the
    decoder's start token. For a model of texts and images, they are ``text.attentions.LAYER.HEAD``.
    """

    options = AttentionOptions
    variant = ATTENTIONS
    batch_size = 8
    takes_pairs = True

    def __init__(self, session: Context, chosen: AttentionOptions) -> None:
        super().__init__(session, chosen)
        self.weights = ChosenAttentions(session, chosen)
        self.decodes = len(session.graphs) > 1 and session.graphs[-1].past is not None
        """Whether the model is an encoder-decoder."""

    def read(self, value: Any, number: int) -> Tokens:
        if not self.decodes:
            return super().read(value, number)
        source, target = value if is_pair(value) else (value, None)
        item = super().read(source, number)
        if target is None:
            return Translated(number, item.ids, types=item.types)
        first = self.session.option("decoder_start_token_id")
        if first is None:
            problem = "the model has no decoder_start_token_id"
            raise UsageError(problem, self.session.path, "give a source alone")
        target_ids = super().read(target, number).ids
        return Translated(number, item.ids, [first, *target_ids], types=item.types)

    def size(self, item: Tokens) -> int:
        return len(item.ids) + (len(item.target) if isinstance(item, Translated) else 0)

    def fits(self, longest: int, size: int) -> bool:
        return size == longest  # no padding, so that the weights do not depend on the batch

    def answer(self, items: Sequence[Tokens]) -> Sequence[Any]:
        results = []
        for item in items:
            sizes = {dim: len(item.ids) for dim in self.graph.dim_names()} | {"past_sequence": 0}
            feeds = self.feed([item])
            outputs = {self.graph.name: self.session.execute(self.graph, feeds)}
            read = feeds[self.ids_input.name][0].tolist()  # with the padding that some models read
            result: dict[str, Any] = {"tokens": len(item.ids), "texts": self._texts(read)}
            if isinstance(item, Translated) and item.target:
                sizes["sequence"] = len(item.target)
                outputs |= self._decode(item, feeds | outputs[self.graph.name])
                result |= {"target_tokens": len(item.target), "target_texts": self._texts(item.target)}
            result["attentions"] = self.weights.pick(outputs, 0, sizes)
            if self.chosen.queries_keys:
                result["vectors"] = self.weights.pick_vectors(outputs, 0, sizes)
            results.append(result)
        return checked(items, results)

    def _decode(self, item: Translated, states: Mapping[str, Array]) -> dict[str, dict[str, Array]]:
        """Run the decoder on a target; return its outputs by graph name."""
        decoder = self.session.graphs[-1]
        ids_name, mask_name = decoder_inputs(decoder)
        ids = np.array([item.target], np.int64)
        feeds = {**states, ids_name: ids} | ({mask_name: np.ones_like(ids)} if mask_name else {})
        names = {tensor.name for tensor in decoder.input_tensors()}
        return {decoder.name: self.session.execute(decoder, {key: feeds[key] for key in names & feeds.keys()})}

    def _texts(self, ids: Sequence[int]) -> list[str | None]:
        return [self.decode([token]) for token in ids]

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        for answer in answers:
            yield from strongest(answer, partial(self._along, answer.result))

    def _along(self, result: Mapping[str, Any], name: str, axis: int) -> Sequence[Any]:
        """Label the positions along an axis: tokens by their texts, preceding non-token positions by numbers."""
        size = np.shape(result["attentions"][name])[axis]
        kind = self.tokens_along(name, axis)
        texts = result.get({"source": "texts", "target": "target_texts"}.get(str(kind), ""), [None])
        pieces = [] if texts[0] is None else texts
        return [*range(size - len(pieces)), *pieces]

    def tokens_along(self, name: str, axis: int) -> Literal["source", "target"] | None:
        """Return whose tokens are the last positions along an axis of the weights ``name``; None if none are."""
        dim = self.weights.dims[name][axis]
        if isinstance(dim, int):
            return "source" if dim == self.inputs.length else None
        return "target" if self.decodes and dim not in self.graph.dim_names() else "source"


class ImageAttentions(ImageRunner):
    """``attentions``: the attention weights (T, S) of each image, as ``attentions.LAYER.HEAD``.

    The special tokens (class, distillation) come first, then the patches, row by row.
    """

    options = AttentionOptions
    variant = ATTENTIONS
    batch_size = 8

    def __init__(self, session: Context, chosen: AttentionOptions) -> None:
        super().__init__(session, chosen)
        self.weights = ChosenAttentions(session, chosen)

    def answer(self, items: Sequence[Pixels]) -> Sequence[Any]:
        outputs = {self.graph.name: self.compute(items)}
        results: list[dict[str, Any]] = [
            {"attentions": self.weights.pick(outputs, row, {})} for row in range(len(items))
        ]
        if self.chosen.queries_keys:
            for row, result in enumerate(results):
                result["vectors"] = self.weights.pick_vectors(outputs, row, {})
        return checked(items, results)

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        for answer in answers:
            yield from strongest(answer)
