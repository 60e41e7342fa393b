"""Attention weights with the names of their positions, for :func:`zoo.attention_page`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from math import exp
from pathlib import Path
from typing import Any

import numpy as np

from zoo import AttentionAxis, AttentionMap, AttentionRecord, AttentionStep
from zoo.arrays import Array
from zoo.errors import UsageError, ZooError
from zoo.images import white_of
from zoo_runtime.running.inputs import Pair
from zoo_runtime.running.loading import load_session
from zoo_runtime.running.runner import Runner
from zoo_runtime.running.session import Session
from zoo_runtime.running.text_runner import Tokens
from zoo_runtime.tasks.attention.weights import Attentions, ImageAttentions

__all__ = ["CANDIDATES", "attention_maps", "only_answer", "record_image", "record_image_text", "record_text", "step_of"]

FindAxis = Callable[[str, int, int], AttentionAxis]

CANDIDATES = 5
"""Number of likeliest tokens per generated token."""
_MOST_SPECIAL = 16
"""Most positions before the patches of an image: class, distillation and register tokens."""


@dataclass(frozen=True)
class _Generated:
    """A text and its continuation, or a source and its target."""

    value: Any
    steps: tuple[AttentionStep, ...]
    start: int
    """Number of tokens of the prompt."""


def record_text(
    directory: Path,
    inputs: Sequence[Any],
    *,
    generate: int,
    layers: Sequence[int],
    heads: Sequence[int],
    unverified: bool,
    queries_keys: bool = False,
) -> AttentionRecord:
    """Return the attention weights of a text, a pair of texts, or a source and its target.

    Generated tokens continue the text, or are the target of a source, and are read in one call: by causality, the
    weights of a token are those of the step that chose the next one.
    """
    with load_session(directory, task="attentions", unverified=unverified) as session:
        runner = session.runner(layers=tuple(layers), heads=tuple(heads), queries_keys=queries_keys)
        assert isinstance(runner, Attentions)
        runner.can_truncate = False
        several = runner.decodes
        value = Pair(*inputs) if len(inputs) == 2 else inputs[0]
        generated = _generate(session, runner, value, generate) if generate else None
        item = runner.read(value if generated is None else generated.value, 1)
        result = only_answer(runner, item)
        source = _parts(item, generated if not several else None)
        targets = result.get("target_texts", ())
        tokens = {
            "source": _axis(result["texts"], *source, () if several or generated is None else generated.steps),
            "target": _axis(
                targets,
                [None, *[0] * (len(targets) - 1)] if targets else (),  # the start token is special
                (),
                generated.steps if several and generated is not None else (),
            ),
        }
        axes: dict[tuple[str | None, int], AttentionAxis] = {}

        def axis(name: str, place: int, size: int) -> AttentionAxis:
            """Return the axis of that size, with its tokens at the end."""
            kind = runner.tokens_along(name, place)
            if (kind, size) not in axes:
                axes[kind, size] = _extended(tokens[kind] if kind else AttentionAxis(labels=()), size)
            return axes[kind, size]

        return _record(session, attention_maps(result, axis))


def record_image(
    directory: Path,
    inputs: Sequence[Any],
    *,
    generate: int,
    layers: Sequence[int],
    heads: Sequence[int],
    unverified: bool,
    queries_keys: bool = False,
) -> AttentionRecord:
    """Return the attention weights of an image: a file, its bytes, a Pillow image or an array."""
    if len(inputs) != 1 or generate:
        raise UsageError("an image has no second input and generates nothing", directory, "give one image")
    with load_session(directory, task="image-attentions", unverified=unverified) as session:
        options = {"layers": tuple(layers), "heads": tuple(heads), "queries_keys": queries_keys}
        return _record(session, _image_maps(session, inputs[0], options))


def record_image_text(
    directory: Path,
    inputs: Sequence[Any],
    *,
    generate: int,
    layers: Sequence[int],
    heads: Sequence[int],
    unverified: bool,
    queries_keys: bool = False,
) -> AttentionRecord:
    """Return the attention weights of an image and, with a second input, of a text, each in its own encoder."""
    if generate:
        raise UsageError("the model generates no text", directory, "leave out the number of tokens to generate")
    with load_session(directory, task="image-attentions", unverified=unverified) as session:
        options = {"layers": tuple(layers), "heads": tuple(heads), "queries_keys": queries_keys}
        texts = [_text_maps(session, text, options) for text in inputs[1:]]
        return _record(session, [*_image_maps(session, inputs[0], options), *chain.from_iterable(texts)])


def _image_maps(session: Session, image: Any, options: Mapping[str, Any]) -> list[AttentionMap]:
    """Return the attention weights of an image."""
    runner = session.runner("image-attentions", **options)
    assert isinstance(runner, ImageAttentions)
    pixels = runner.images.read(image, "input 1")
    result = only_answer(runner, runner.read(pixels, 1))

    @cache
    def axis(size: int) -> AttentionAxis:
        return _image_axis(session, size, pixels)

    return attention_maps(result, lambda name, place, size: axis(size))


def _text_maps(session: Session, text: Any, options: Mapping[str, Any]) -> list[AttentionMap]:
    """Return the attention weights of the text that belongs to an image."""
    runner = session.runner("attentions", **options)
    assert isinstance(runner, Attentions)
    runner.can_truncate = False
    item = runner.read(text, 2)
    result = only_answer(runner, item)
    parts, names = _parts(item, None)
    padding = len(result["texts"]) - len(item.ids)
    axis = _axis(result["texts"], [*(parts or [0] * len(item.ids)), *[None] * padding], names, ())
    return attention_maps(result, lambda name, place, size: axis)


def _record(session: Session, maps: Sequence[AttentionMap]) -> AttentionRecord:
    """Return the record of some maps."""
    several = len(session.graphs) > 1
    declared = {
        f"{graph.name}.{tensor.name}" if several else tensor.name: int(tensor.dims[1])
        for graph in session.graphs
        for tensor in graph.recorded()
    }
    complete = all(len(item.heads) == declared[item.name] for item in maps)
    layers = None if several else session.option("num_layers")
    return AttentionRecord(maps=maps, rollout=complete and (layers is None or len(maps) >= layers))


def attention_maps(result: Mapping[str, Any], axis: FindAxis) -> list[AttentionMap]:
    """Group the weights of a result by layer. ``axis`` is called with a name, a place and a size."""
    weights = result["attentions"]
    vectors = result.get("vectors", {})
    heads: dict[str, list[int]] = {}
    for name in weights:
        layer, _, head = name.rpartition(".")
        heads.setdefault(layer, []).append(int(head))
    maps = []
    for layer, numbers in heads.items():
        stacked = np.stack([weights[f"{layer}.{head}"] for head in numbers])
        first = f"{layer}.{numbers[0]}"
        queries, keys = (axis(first, place, stacked.shape[place]) for place in (-2, -1))
        layer_vectors = vectors.get(layer)
        maps.append(
            AttentionMap(name=layer, weights=stacked, heads=numbers, queries=queries, keys=keys, vectors=layer_vectors)
        )
    return maps


def only_answer(runner: Runner[Any], item: Any) -> dict[str, Any]:
    """Return the answer to one item, or raise its error."""
    (result,) = runner.answer([item])
    if isinstance(result, ZooError):
        raise result
    return result


def _generate(session: Session, runner: Attentions, value: Any, count: int) -> _Generated:
    """Generate greedily, and return the input with the new tokens."""
    several = len(session.graphs) > 1
    if session.graphs[-1].past is None or isinstance(value, Pair):
        problem = "only a single text can be continued" if isinstance(value, Pair) else "the model generates no text"
        raise UsageError(problem, session.path, "leave out the number of tokens to generate")
    item = runner.read(value, 1)
    result = session.run(
        item.ids,
        task=session.stored.spec.task,
        max_new_tokens=count,
        temperature=0.0,
        num_beams=1,
        logprobs=CANDIDATES,
    )
    first = 0 if several else len(item.ids) - 1
    steps = tuple(step_of(step, first + number) for number, step in enumerate(result["logprobs"]))
    new = list(result["generated_ids"])
    start = session.option("decoder_start_token_id")
    ids: Any = Pair(item.ids, new) if several else [*item.ids, *new]
    if several and start is None:
        raise UsageError("the model has no decoder_start_token_id", session.path)
    return _Generated(ids, steps, len(item.ids))


def step_of(step: Mapping[str, Any], query: int) -> AttentionStep:
    """Return the step that the output at ``query`` chose, given its entry in ``logprobs``."""
    return AttentionStep(query=query, token=_text(step), candidates=[_candidate(one) for one in step["top"]])


def _text(token: Mapping[str, Any]) -> str:
    """Return the text of a token, or its number."""
    return str(token["token"] if token["text"] is None else token["text"])


def _candidate(token: Mapping[str, Any]) -> tuple[str, float]:
    return _text(token), exp(token["log_probability"])


def _parts(item: Tokens, generated: _Generated | None) -> tuple[Sequence[int | None], Sequence[str]]:
    """Return the part of each token, None for special ones, and the names of the parts."""
    if generated is not None:
        count = len(item.ids)
        return [0] * generated.start + [1] * (count - generated.start), ("prompt", "generated")
    names = ("A", "B")
    if item.encoding is not None:
        special = item.encoding.special_tokens_mask
        return [
            None if mark else number for number, mark in zip(item.encoding.sequence_ids, special, strict=True)
        ], names
    return list(item.types), names


def _axis(
    texts: Sequence[str | None], parts: Sequence[int | None], names: Sequence[str], steps: Sequence[AttentionStep]
) -> AttentionAxis:
    """Return the axis of tokens, which are numbered if the model has no tokenizer."""
    labels = [str(place) if text is None else text for place, text in enumerate(texts)]
    return AttentionAxis(labels=labels, parts=parts, part_names=names, steps=steps)


def _extended(axis: AttentionAxis, size: int) -> AttentionAxis:
    """Return an axis of ``size`` positions: numbered ones, such as memories, and then those of ``axis``."""
    extra = size - len(axis.labels)
    if not extra:
        return axis
    parts = [*[None] * extra, *(axis.parts or [0] * len(axis.labels))]
    labels = [*map(str, range(extra)), *axis.labels]
    return AttentionAxis(labels=labels, parts=parts, part_names=axis.part_names)


def _image_axis(session: Session, size: int, pixels: Array) -> AttentionAxis:
    """Return the axis of an image's tokens: special ones, then patches, if it has that many."""
    patch = session.option("patch_size")
    rows, columns = (pixels.shape[0] // patch, pixels.shape[1] // patch) if patch else (0, 0)
    special = size - rows * columns
    if not (rows and 0 <= special <= _MOST_SPECIAL):
        return AttentionAxis(labels=[str(place) for place in range(size)])
    names = [f"token {place}" for place in range(special)]
    names += [f"row {row}, column {column}" for row in range(rows) for column in range(columns)]
    parts = [*[None] * special, *[0] * (rows * columns)]
    return AttentionAxis(labels=names, parts=parts, grid=(special, rows, columns), image=_shown(pixels))


def _shown(pixels: Array) -> Array | None:
    """Return an image, (height, width, channels), as grey or RGB in uint8; None for other numbers of channels."""
    eight = np.rint(pixels * (255 / white_of(pixels))).astype(np.uint8)
    channels = eight.shape[2]
    return eight[..., 0] if channels == 1 else eight[..., :3] if channels in (3, 4) else None
