"""The attention weights of what a model reads, by layer and head.

H heads, T queries, S keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from zoo.config import Settings
from zoo.contract import TensorSpec, dim_size
from zoo.errors import UsageError
from zoo_export.decoding import decoder_inputs
from zoo_export.runtime.images import ImageRunner, Pixels
from zoo_export.runtime.runner import Answer, TextRunner, Tokens, finite, is_pair, label

if TYPE_CHECKING:
    from zoo_export.runtime.session import Session

__all__ = ["Attentions", "ImageAttentions"]

Array = np.ndarray[Any, Any]
Weights = dict[str, Array]

_SHOWN = 10
"""Queries of a head that are shown to people."""


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(Settings):
    """Which weights are wanted."""

    layers: tuple[int, ...] = ()
    """Numbers of layers, from 0; all by default."""
    heads: tuple[int, ...] = ()
    """Numbers of heads, from 0; all by default."""

    def choose(self, tensors: Sequence[TensorSpec], where: object) -> dict[str, Sequence[int]]:
        """For each output that is wanted, its heads. What is not there is a :class:`UsageError`."""
        if not tensors:
            remedy = f"zoo export {where} --onnx --attentions, then --variant attentions"
            raise UsageError("this export returns no attention weights", where, remedy)
        layers = {tensor.name: int(tensor.name.rpartition(".")[2]) for tensor in tensors}
        heads = {tensor.name: range(int(tensor.dims[1])) for tensor in tensors}
        known = {"layer": set(layers.values()), "head": {head for numbers in heads.values() for head in numbers}}
        for kind, wanted in (("layer", self.layers), ("head", self.heads)):
            if unknown := sorted(set(wanted) - known[kind]):
                raise UsageError(f"no {kind} {unknown[0]}", where, f"there are 0 to {max(known[kind])}")
        return {
            name: [head for head in heads[name] if not self.heads or head in self.heads]
            for name, layer in layers.items()
            if not self.layers or layer in self.layers
        }


class _Chosen:
    """The weights that are wanted of some graphs, and their names."""

    def __init__(self, session: Session, options: AttentionOptions) -> None:
        self.specs = {(graph.name, tensor.name): tensor for graph in session.graphs for tensor in graph.recorded()}
        several = len(session.graphs) > 1
        self.prefixes = {graph.name: f"{graph.name}." if several else "" for graph in session.graphs}
        self.heads = options.choose(list(self.specs.values()), session.path)
        self.dims = {
            f"{self.prefixes[graph]}{name}.{head}": spec.dims
            for (graph, name), spec in self.specs.items()
            for head in self.heads.get(name, ())
        }

    def pick(self, outputs: Mapping[str, Mapping[str, Array]], row: int, sizes: Mapping[str, int]) -> Weights:
        """The weights of one row, (T, S) each, by graph where there are several, layer and head, without padding."""
        picked = {}
        for (graph, name), spec in self.specs.items():
            if name in self.heads and graph in outputs:
                queries, keys = (dim_size(dim, sizes) for dim in spec.dims[2:])
                for head in self.heads[name]:
                    picked[f"{self.prefixes[graph]}{name}.{head}"] = outputs[graph][name][row, head, :queries, :keys]
        return picked


def _checked(items: Sequence[Any], results: Sequence[dict[str, Any]]) -> list[Any]:
    """Results, with an error in the place of those with weights that are no numbers."""
    sums = np.array([[weights.sum() for weights in result["attentions"].values()] for result in results])
    return finite(items, sums, results)


def _strongest(answer: Answer, texts: Callable[[str, int], Sequence[Any]] | None = None) -> Iterator[str]:
    """For each head the key that the first queries give most weight; ``texts`` names what lies along an axis."""
    for name, weights in answer.result["attentions"].items():
        rows = np.asarray(weights)[:_SHOWN]
        queries, keys = (
            texts(name, axis) if texts else range(size) for axis, size in zip((-2, -1), np.shape(weights), strict=True)
        )
        pairs = (f"{queries[row]}>{keys[int(key)]} {rows[row, key]:.2f}" for row, key in enumerate(rows.argmax(-1)))
        yield f"{label(answer)}: {name}  {'  '.join(pairs)}{'  ...' if len(weights) > _SHOWN else ''}"


@dataclass(frozen=True)
class Translated(Tokens):
    """A source, and perhaps a target that a decoder reads."""

    target: Sequence[int] = ()


class Attentions(TextRunner):
    """``attentions``: for each input the weights (T, S) that it is read with, as ``attentions.LAYER.HEAD``.

    A model of two graphs reads a source with ``encoder.attentions.LAYER.HEAD``; of a pair of a source and a target its
    decoder reads the target too, with ``decoder.attentions`` and ``decoder.cross_attentions``, after the token that
    every target begins with.
    """

    options = AttentionOptions
    batch_size = 8
    takes_pairs = True

    def __init__(self, session: Session, chosen: AttentionOptions) -> None:
        super().__init__(session, chosen)
        self.weights = _Chosen(session, chosen)

    def read(self, value: Any, number: int) -> Tokens:
        if len(self.session.graphs) == 1:
            return super().read(value, number)
        source, target = value if is_pair(value) else (value, None)
        item = super().read(source, number)
        if target is None:
            return Translated(number, item.ids, types=item.types)
        first = self.session.option("decoder_start_token_id")
        if first is None:
            what = "the model does not say which token its targets start with"
            raise UsageError(what, self.session.path, "give a source alone")
        target_ids = super().read(target, number).ids
        return Translated(number, item.ids, [first, *target_ids], types=item.types)

    def size(self, item: Tokens) -> int:
        return len(item.ids) + (len(item.target) if isinstance(item, Translated) else 0)

    def fits(self, longest: int, size: int) -> bool:
        return size == longest  # what is shown of an input never depends on padding

    def answer(self, items: Sequence[Tokens]) -> Sequence[Any]:
        results = []
        for item in items:
            sizes = {dim: len(item.ids) for dim in self.graph.dim_names()} | {"past_sequence": 0}
            feeds = self.feed([item])
            outputs = {self.graph.name: self.session.execute(self.graph, feeds)}
            found: dict[str, Any] = {"tokens": len(item.ids), "texts": self._texts(item.ids)}
            if isinstance(item, Translated) and item.target:
                sizes["sequence"] = len(item.target)
                outputs |= self._decode(item, feeds | outputs[self.graph.name])
                found |= {"target_tokens": len(item.target), "target_texts": self._texts(item.target)}
            results.append({**found, "attentions": self.weights.pick(outputs, 0, sizes)})
        return _checked(items, results)

    def _decode(self, item: Translated, known: Mapping[str, Array]) -> dict[str, dict[str, Array]]:
        """The outputs of the graphs after the first, for a target."""
        decoder = self.session.graphs[-1]
        ids_name, mask_name = decoder_inputs(decoder)
        ids = np.array([item.target], np.int64)
        feeds = {**known, ids_name: ids} | ({mask_name: np.ones_like(ids)} if mask_name else {})
        wanted = {tensor.name for tensor in decoder.input_tensors()}
        return {decoder.name: self.session.execute(decoder, {key: feeds[key] for key in wanted & feeds.keys()})}

    def _texts(self, ids: Sequence[int]) -> list[str | None]:
        return [self.decode([token]) for token in ids]

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        for answer in answers:
            yield from _strongest(answer, partial(self._along, answer.result))

    def _along(self, result: Mapping[str, Any], name: str, axis: int) -> Sequence[Any]:
        """What lies along an axis of some weights: the texts of tokens, behind the numbers of what is no token."""
        size, dim = np.shape(result["attentions"][name])[axis], self.weights.dims[name][axis]
        own = isinstance(dim, str) and dim in self.graph.dim_names()
        texts = result["texts"] if own or "target_texts" not in result else result["target_texts"]
        known = [] if isinstance(dim, int) or texts[0] is None else texts
        return [*range(size - len(known)), *known]


class ImageAttentions(ImageRunner):
    """``attentions``: for each image the weights (T, S) that it is read with, as ``attentions.LAYER.HEAD``.

    The first tokens are the special ones, of classes and of distillation; the others are patches, row by row.
    """

    options = AttentionOptions
    batch_size = 8

    def __init__(self, session: Session, chosen: AttentionOptions) -> None:
        super().__init__(session, chosen)
        self.weights = _Chosen(session, chosen)

    def answer(self, items: Sequence[Pixels]) -> Sequence[Any]:
        outputs = {self.graph.name: self.compute(items)}
        results = [{"attentions": self.weights.pick(outputs, row, {})} for row in range(len(items))]
        return _checked(items, results)

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        for answer in answers:
            yield from _strongest(answer)
