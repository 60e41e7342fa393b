"""The tasks that zoo brings along."""

from __future__ import annotations

import io
import os
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from zoo.artifact import LOOP
from zoo.config import Settings
from zoo.errors import ArtifactError, UsageError
from zoo_export.pipeline import Arrays
from zoo_export.runtime.decoder import Decoder, device_of
from zoo_export.runtime.generation import Choices, Continuation, Generation, continue_rows, search_beams
from zoo_export.runtime.runner import Answer, Runner, TextRunner, Tokens, finite, label
from zoo_export.runtime.text import GrowingText, continuation, printable

__all__ = [
    "Continue",
    "Embed",
    "Features",
    "FillMask",
    "ImageClassification",
    "TextClassification",
    "Translate",
]

Array = np.ndarray[Any, Any]


class Features(TextRunner):
    """``last_hidden_state``, (tokens, hidden) for each input."""

    def answer(self, items: Sequence[Tokens]) -> Sequence[Any]:
        hidden = self.compute(items)["last_hidden_state"]
        results = [{"tokens": len(item.ids), "last_hidden_state": rows[: len(item.ids)]}
                   for item, rows in zip(items, hidden, strict=True)]  # fmt: skip
        return finite(items, hidden, results)

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        for answer in answers:
            states = answer.result["last_hidden_state"]
            yield f"{label(answer)}: {len(states)} tokens x {len(states[0])}, the first {_start(states[0])}"


@dataclass(frozen=True, kw_only=True)
class EmbedOptions(Settings):
    """Of an encoder that does not say itself how its tokens become one vector."""

    pooling: Literal["mean", "cls"] = "mean"
    """The mean over the tokens, or the first of them."""
    normalize: bool = True
    """Whether the vector has unit length."""


class Embed(TextRunner):
    """``embedding``, one vector for each input: the graph's own, or pooled from its hidden states."""

    options = EmbedOptions

    def __init__(self, session: Any, chosen: EmbedOptions) -> None:
        super().__init__(session, chosen)
        self.own = any(tensor.name == "sentence_embedding" for tensor in self.graph.output_tensors())
        if self.own and chosen != EmbedOptions():
            raise UsageError("the model's own pooling is part of its graph", session.path, "leave out the options")

    def answer(self, items: Sequence[Tokens]) -> Sequence[Any]:
        outputs = self.compute(items)
        vectors = outputs["sentence_embedding"] if self.own else self._pool(items, outputs["last_hidden_state"])
        results = [{"tokens": len(item.ids), "embedding": vector} for item, vector in zip(items, vectors, strict=True)]
        return finite(items, vectors, results)

    def _pool(self, items: Sequence[Tokens], hidden: Array) -> Array:
        hidden = hidden.astype(np.float32)
        if self.chosen.pooling == "cls":
            vectors = hidden[:, 0]
        else:
            vectors = np.stack([rows[: len(item.ids)].mean(0) for item, rows in zip(items, hidden, strict=True)])
        if self.chosen.normalize:
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
        return vectors

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        """With the cosines between the inputs."""
        vectors = np.stack([answer.result["embedding"] for answer in answers]).astype(np.float64)
        vectors /= np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
        for answer, vector in zip(answers, vectors, strict=True):
            values = answer.result["embedding"]
            cosines = " ".join(f"{value:.4f}" for value in vectors @ vector)
            yield f"{label(answer)}: {len(values)} numbers {_start(values)}  cosines {cosines}"


class TextClassification(TextRunner):
    """``probabilities`` of the classes."""

    def answer(self, items: Sequence[Tokens]) -> Sequence[Any]:
        logits = self.compute(items)["logits"]
        results = [
            {"tokens": len(item.ids), "probabilities": row} for item, row in zip(items, softmax(logits), strict=True)
        ]
        return finite(items, logits, results)

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        return map(_classes, answers)


@dataclass(frozen=True, kw_only=True)
class FillMaskOptions(Settings):
    """What is told of each mask."""

    top_k: int = 5
    """Tokens, the likeliest first."""

    def __post_init__(self) -> None:
        self.require_positive("top_k")


class FillMask(TextRunner):
    """``masks``: for each mask token of an input, what it may stand for."""

    options = FillMaskOptions

    def __init__(self, session: Any, chosen: FillMaskOptions) -> None:
        super().__init__(session, chosen)
        self.target = session.option("mask_token_id")
        if self.target is None:
            what = "the model does not say which token is its mask"
            raise UsageError(what, session.path, "set mask_token_id when building")

    def read(self, value: Any, number: int) -> Tokens:
        item = super().read(value, number)
        if self.target not in item.ids:
            mask = self.decode([self.target])
            remedy = f"write {mask}" if mask else f"use token {self.target}"
            raise ArtifactError("has no mask to fill", f"input {number}", remedy)
        return item

    def answer(self, items: Sequence[Tokens]) -> Sequence[Any]:
        logits = self.compute(items)["logits"]
        return finite(items, logits, [self._fill(item, row) for item, row in zip(items, logits, strict=True)])

    def _fill(self, item: Tokens, logits: Array) -> dict[str, Any]:
        masks = []
        for place in (place for place, token in enumerate(item.ids) if token == self.target):
            chances = softmax(logits[place])
            best = np.argsort(-chances, kind="stable")[: self.chosen.top_k].tolist()
            masks.append(
                [{"token": token, "text": self.decode([token]), "probability": float(chances[token])} for token in best]
            )
        return {"tokens": len(item.ids), "masks": masks}

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        for answer in answers:
            for filled in answer.result["masks"]:
                choices = (
                    f"{item['text'] if item['text'] is not None else item['token']!r} {item['probability']:.4f}"
                    for item in filled
                )
                yield f"{label(answer)}: " + "  ".join(choices)


class _Generate(TextRunner):
    """``generated``, a text, and ``generated_ids``: what :class:`Generation` says.

    ``finish_reason`` is ``end`` for an end token, ``stop`` for a stop string or token, ``length`` otherwise. The ids
    are all that were generated, an end token included; the text ends before it, and before a stop string.
    """

    options = Generation
    batch_size = 8

    def __init__(self, session: Any, chosen: Generation) -> None:
        super().__init__(session, chosen)
        end = session.option("eos_token_id")
        self.ends = frozenset() if end is None else frozenset((end,))
        self.choose = Choices(chosen, self.ends)
        self.in_one_graph = session.export.variant == LOOP
        if self.in_one_graph and chosen != Generation(max_new_tokens=chosen.max_new_tokens):
            raise UsageError("the graph generates greedily", session.path, "choose another variant to choose options")
        if chosen.stop and session.tokenizer is None:
            raise UsageError("stop texts need a tokenizer", session.path, "give stop_token_ids")

    def answer(self, items: Sequence[Tokens]) -> Sequence[Any]:
        fitting = [item for item in items if self.room(item) > 0]
        results = {item.number: self._result(item, [], "length") for item in items if item not in fitting}
        if fitting and self.in_one_graph:
            results |= self._run_loop(fitting)
        elif fitting and self.chosen.num_beams > 1:
            results |= self._search(fitting)
        elif fitting:
            results |= self._continue(fitting)
        return [results[item.number] for item in items]

    def _continue(self, items: Sequence[Tokens]) -> dict[int, Any]:
        texts = [self._text(item) if self.chosen.stop else None for item in items]
        rows = [self._row(item, text) for item, text in zip(items, texts, strict=True)]
        for _ in continue_rows(*self.start(items), rows, self.choose):
            pass
        return {
            item.number: row.error or self._result(item, row.ids, row.finish, text)
            for item, row, text in zip(items, rows, texts, strict=True)
        }

    def _search(self, items: Sequence[Tokens]) -> dict[int, Any]:
        results: dict[int, Any] = {}
        known = {item.number: item for item in items}
        for row, beams in search_beams(*self.start(items), [self._row(item) for item in items], self.choose):
            item = known[row.number]
            texts = [{**self._result(item, beam.ids, self._reason(beam.ids)), "score": beam.score} for beam in beams]
            results[row.number] = row.error or {**texts[0], "beams": texts[1:]}
        return results

    def stream(self, item: Tokens) -> Iterator[str]:
        """The text, piece by piece."""
        if self.session.tokenizer is None:
            raise UsageError("streaming needs a tokenizer", self.session.path, "attach one with --tokenizer FILE")
        if self.in_one_graph or self.chosen.num_beams > 1:
            what = "one graph for all of generation" if self.in_one_graph else "beam search"
            raise UsageError(f"{what} has nothing to stream before its end", self.session.path)
        return self._pieces(item) if self.room(item) > 0 else iter(())

    def _pieces(self, item: Tokens) -> Iterator[str]:
        text = self._text(item)
        row = self._row(item, text)
        for _ in continue_rows(*self.start([item]), [row], self.choose):
            yield text.new()
        if row.error is not None:
            raise row.error
        yield text.rest()

    def lead(self, text: str) -> str:
        """What is shown before what is generated from a text."""
        return ""

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        for answer in answers:
            lead = self.lead(answer.input) if isinstance(answer.input, str) else ""
            yield printable(lead + _shown(answer.result))

    @abstractmethod
    def room(self, item: Tokens) -> int:
        """Tokens that can follow an input."""

    @abstractmethod
    def start(self, items: Sequence[Tokens]) -> tuple[Decoder, Array, Array]:
        """A decoder, and the ids and the mask of its first call."""

    @abstractmethod
    def prompt(self, item: Tokens) -> list[int]:
        """The tokens that what is generated continues."""

    def _row(self, item: Tokens, text: GrowingText | None = None) -> Continuation:
        grow = text.append if text is not None else None
        return Continuation(item.number, self.prompt(item), self.room(item), self.chosen, self.ends, grow)

    def _text(self, item: Tokens) -> GrowingText:
        return GrowingText(self.session.tokenizer, self.prompt(item), self.chosen.stop)

    def _reason(self, ids: Sequence[int]) -> str:
        if ids[-1] in self.ends:
            return "end"
        return "stop" if ids[-1] in self.chosen.stop_token_ids else "length"

    def _result(
        self, item: Tokens, ids: list[int], reason: str | None, text: GrowingText | None = None
    ) -> dict[str, Any]:
        shown: str | None = None
        if text is not None:
            shown = text.text()
            reason = "stop" if text.stopped else reason
        elif self.session.tokenizer is not None:
            shown = continuation(self.session.tokenizer, self.prompt(item), ids if reason == "length" else ids[:-1])
        return {"tokens": len(item.ids), "generated_ids": ids, "generated": shown, "finish_reason": reason}

    def _run_loop(self, items: Sequence[Tokens]) -> dict[int, Any]:
        """What greedy decoding chooses, from one graph."""
        from zoo_export.loop import plan_loop, run_loop

        feeds = self.feed(items, left=len(self.session.graphs) == 1)
        inputs = {name: feeds[name] for name in plan_loop(self.session.stored.spec).inputs}
        chosen = run_loop(self.session.sessions[LOOP], inputs, self.chosen.max_new_tokens).tolist()
        results = {}
        for item, ids in zip(items, chosen, strict=True):
            stops = [place for place, token in enumerate(ids) if token in self.ends]
            reason = "end" if stops else "length"
            results[item.number] = self._result(item, ids[: stops[0] + 1] if stops else ids, reason)
        return results


class Continue(_Generate):
    """Continues a prompt."""

    def room(self, item: Tokens) -> int:
        longest = self.session.option("max_seq_len")
        return self.chosen.max_new_tokens if longest is None else longest - len(item.ids)

    def fits(self, longest: int, size: int) -> bool:
        """Padding takes positions: a shorter prompt joins a longer one where there are enough for both."""
        positions = self.session.option("max_seq_len")
        return size == longest or positions is None or longest + self.chosen.max_new_tokens <= positions

    def prompt(self, item: Tokens) -> list[int]:
        return item.ids

    def start(self, items: Sequence[Tokens]) -> tuple[Decoder, Array, Array]:
        feeds = self.feed(items, left=True)
        session = self.session.sessions[self.graph.name]
        ids = feeds["input_ids"]
        mask = next((feeds[tensor.name] for tensor in self.graph.input_tensors() if tensor.is_mask), np.ones_like(ids))
        return Decoder(session, self.graph, {}, len(items), self.session.dtype), ids, mask

    def lead(self, text: str) -> str:
        return text


class Translate(_Generate):
    """Generates the target of a source: the encoder runs once, the decoder token by token."""

    def room(self, item: Tokens) -> int:
        longest = self.session.option("max_seq_len")
        return self.chosen.max_new_tokens if longest is None else longest - 1

    def prompt(self, item: Tokens) -> list[int]:
        return [self.session.option("decoder_start_token_id") or 0]

    def start(self, items: Sequence[Tokens]) -> tuple[Decoder, Array, Array]:
        *encoders, graph = self.session.graphs
        sessions, known = self.session.sessions, self._feed_values(items)
        for encoder in encoders:
            session = sessions[encoder.name]
            binding = session.io_binding()
            for item in session.get_inputs():
                binding.bind_ortvalue_input(item.name, known[item.name])
            names = [item.name for item in session.get_outputs()]
            for name in names:
                binding.bind_output(name, device_of(session))
            session.run_with_iobinding(binding)
            known |= dict(zip(names, binding.get_outputs(), strict=True))
        ids = np.array([self.prompt(item) for item in items], np.int64)
        return Decoder(sessions[graph.name], graph, known, len(items), self.session.dtype), ids, np.ones_like(ids)

    def _feed_values(self, items: Sequence[Tokens]) -> dict[str, Any]:
        import onnxruntime as ort

        feeds: Arrays = self.feed(items)
        return {name: ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array)) for name, array in feeds.items()}


@dataclass(frozen=True)
class Pixels:
    """An image as an array."""

    number: int
    values: Array
    """(channels, height, width)"""


class ImageClassification(Runner[Pixels]):
    """``probabilities`` of the classes, from files or arrays.

    A file, or its bytes, is resized to the model's size (bilinear), and becomes grey or RGB by the number of channels.
    An array, (height, width) or (height, width, channels), has that size already; integers are of 0 to 255, real
    numbers of 0 to 1. Then the configuration's ``image_mean`` is taken away and the rest divided by its ``image_std``,
    both 0.5 where it has none (Dosovitskiy et al. 2021).
    """

    def __init__(self, session: Any, chosen: Any) -> None:
        super().__init__(session, chosen)
        self.graph = session.graphs[0]
        self.input = self.graph.input_tensors()[0]
        if len(self.input.dims) != 4 or len(self.graph.input_tensors()) > 1:
            raise UsageError("the model's graph does not take images alone", session.path)
        size = session.option("image_size")
        sizes = {dim: size for dim in self.input.dims if isinstance(dim, str)}
        _, self.channels, self.height, self.width = self.input.shape(sizes)
        mean, std = (session.option(name) for name in ("image_mean", "image_std"))
        self.mean, self.std = (
            np.broadcast_to(np.float32(0.5 if value is None else value), self.channels)[:, None, None]
            for value in (mean, std)
        )

    def read(self, value: Any, number: int) -> Pixels:
        where = f"input {number}"
        array = value if isinstance(value, np.ndarray) else self._load(value, where)
        if array.ndim == 2:
            array = array[..., None]
        wanted = (self.height, self.width, self.channels)
        if array.shape != wanted:
            raise ArtifactError(f"has shape {array.shape}, the model takes {wanted}", where, "resize it")
        scale = np.float32(1 if np.issubdtype(array.dtype, np.floating) else 1 / 255)
        values = (array.transpose(2, 0, 1).astype(np.float32) * scale - self.mean) / self.std
        if not np.isfinite(values).all():
            raise ArtifactError("has pixels that are no finite numbers", where)
        return Pixels(number, values)

    def _load(self, value: Any, where: str) -> Array:
        try:
            from PIL import Image
        except ImportError as error:
            raise UsageError("image files need Pillow", None, "pip install attention-zoo[images]") from error
        if not isinstance(value, str | bytes | os.PathLike):
            raise ArtifactError(f"neither a file nor an array, but {type(value).__name__}", where)
        mode = {1: "L", 3: "RGB", 4: "RGBA"}.get(self.channels)
        if mode is None:
            raise UsageError(f"no image file has {self.channels} channels", self.session.path, "give arrays")
        try:
            with Image.open(io.BytesIO(value) if isinstance(value, bytes) else value) as image:
                sized = image.convert(mode).resize((self.width, self.height), Image.Resampling.BILINEAR)
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            raise ArtifactError(f"cannot be read as an image ({error})", where) from error
        return np.asarray(sized)

    def answer(self, items: Sequence[Pixels]) -> Sequence[Any]:
        batch = np.stack([item.values for item in items])
        logits = self.session.execute(self.graph, {self.input.name: batch})["logits"]
        return finite(items, logits, [{"probabilities": row} for row in softmax(logits)])

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        return map(_classes, answers)


def _classes(answer: Answer) -> str:
    chances = (f"{place}: {value:.4f}" for place, value in enumerate(answer.result["probabilities"]))
    return f"{label(answer)}: " + "  ".join(chances)


def softmax(logits: Array) -> Array:
    """Probabilities along the last dimension, in float64."""
    with np.errstate(invalid="ignore"):  # whoever calls looks for what is not finite
        weights = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    result: Array = weights / weights.sum(-1, keepdims=True)
    return result


def _shown(result: dict[str, Any]) -> str:
    text: str | None = result["generated"]
    return text if text is not None else ",".join(map(str, result["generated_ids"]))


def _start(vector: Sequence[float]) -> str:
    return f"[{' '.join(f'{value:.5f}' for value in vector[:4])} ...]"
