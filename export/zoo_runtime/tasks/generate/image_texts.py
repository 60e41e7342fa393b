"""Text after a prompt with an image: answers to questions about it, captions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from zoo.arrays import Array
from zoo.contract import Graph
from zoo.errors import ArtifactError, UsageError, Wording, argument
from zoo.tokenizers.image_chats import ImageChat, chat_ids
from zoo.tokenizers.image_places import NO_IMAGE, ImagePlaces, count_features
from zoo.tokenizers.inputs import Side, TextInputs, padded
from zoo.tokenizers.prompt_text import PromptText
from zoo_runtime.generation.options import Generation
from zoo_runtime.generation.stepper import Stepper, check_tokens
from zoo_runtime.running.context import Context, internals
from zoo_runtime.running.inputs import are_ids
from zoo_runtime.running.text_runner import Tokens, chosen_adapters
from zoo_runtime.tasks.generate.tasks import Continue
from zoo_runtime.tasks.images import image_input, require_allowed, sample_images

__all__ = ["ImageTextToText"]


@dataclass(frozen=True)
class ImagePrompt(Tokens):
    """A prompt and its image, if it has one."""

    pixels: Array | None = field(kw_only=True, repr=False, compare=False)
    """(tiles, channels, height, width); one tile of an image that is not cut."""
    indices: list[int] = field(kw_only=True, repr=False)
    """For each token, the number of the image's feature in its place, from 1, or 0."""
    blocks: list[int] = field(kw_only=True, repr=False)
    """For each token, 1 if it sees the others with a 1, later ones included, or 0."""


class ImageTextToText(Continue):
    """Continues a prompt with an image, or answers a chat with one.

    An input is a :class:`zoo_runtime.Pair` of an image, as :class:`zoo.images.ImageReader` reads it, and a prompt; or
    a prompt alone. A prompt is a text or token ids, and has the model's token for an image once. In a session with
    ``chat``, it is a pair of an image and a text of the user, or a list of messages: see :class:`ImageChat`.
    """

    image_chats = True
    can_truncate = False

    def __init__(self, session: Context, chosen: Generation) -> None:
        super().__init__(session, chosen)
        image, self.images = image_input(session)
        if len(session.graphs) != 3 or session.graphs[0] is not image:
            raise UsageError("the model has no graphs for an image, embeddings and a decoder of these", session.path)
        self.encoder, self.embedder, _ = session.graphs
        self.inputs = TextInputs([self.embedder], session.config, session.path)
        self.places = ImagePlaces.of(session.config, count_features(session.graphs), session.path)
        self.written = PromptText.of(session.config)
        self.blocks = next((tensor.name for tensor in session.graphs[2].input_tensors() if tensor.is_blocks), None)
        if self.text_limit() is not None:  # which would count an image as one token, and might cut it off
            remedy = Wording("leave out truncate=True", "leave out --truncate")
            raise UsageError("prompts with images are not truncated", session.path, remedy)
        if chosen.draft is not None:
            raise UsageError("no model drafts texts about images", session.path, argument("draft", text="leave out {}"))

    @property
    def graph(self) -> Graph:
        """The graph that reads tokens."""
        return self.session.graphs[1]

    def gather(self, texts: Sequence[str]) -> list[Any]:
        """Return the texts of a command line, each a prompt. Raises :class:`UsageError` for the name of a file."""
        if (file := next(filter(_is_file, texts), None)) is not None:
            raise UsageError("a file in the place of a prompt", file, "give --pair IMAGE PROMPT")
        return list(texts)

    def samples(self) -> Sequence[Any]:
        """Return prompts of token ids, each with an image but the last."""
        random = np.random.default_rng(0)
        image_tokens = self.places.token, self.places.prompt_token
        free = [token for token in range(self.ids_input.upper or 1) if token not in image_tokens]
        texts = [random.choice(free, size=size).tolist() for size in (1, 6, 4, 9, 5)]
        prompts = [[*ids[:1], self.places.prompt_token, *ids[1:]] for ids in texts[:-1]]
        return [*zip(sample_images(self.images), prompts, strict=False), texts[-1]]

    def read(self, value: Any, number: int) -> ImagePrompt:
        where, pixels, columns = f"input {number}", None, 1
        if (template := internals(self.session).chat) is not None:
            chat = ImageChat.of(value, where)
            prompt = template.render(chat.messages, where=where)
            self.check_lengths(number, prompt)
            ids = chat_ids(prompt, template, self.tokenizer, self.written, where)
            value = ids if chat.image is None else (chat.image, ids)
        if isinstance(value, list | tuple) and len(value) == 2 and not are_ids(value):
            image, value = value
            tiles, columns = self.images.read_grid(image, where)
            require_allowed(self.encoder, tiles[0], where)
            pixels = self.images.normalize(tiles)
        if isinstance(value, str) and self.written is not None and (pixels is not None or self.written.place in value):
            if pixels is None:
                raise ArtifactError(NO_IMAGE, where, "give both")
            self.check_lengths(number, value)
            ids = self.written.encode(value, self.tokenizer, where)
        elif isinstance(value, str):
            ids = self.encode(number, value).ids
        elif are_ids(value):
            ids = [int(token) for token in value]
        else:
            what = f"expected a prompt, or a pair of an image and a prompt, got {type(value).__name__}"
            raise ArtifactError(what, where)
        count = 0 if pixels is None else self.images.count_parts(pixels)
        ids, indices = self.places.expand(ids, tiles=count, columns=columns, where=where)
        features, seeing = self.places.count * count, self.session.option("token_blocks")
        is_whole = not features or indices.index(features) - indices.index(1) == features - 1
        if (self.images.is_free or seeing == "image") and not is_whole:
            raise ArtifactError("the tokens of the image are not side by side", where)
        if self.session.option("grid_positions") and any(indices[-1:]):
            # transformers' generate counts on from the last row and column, which is not what the model has learnt
            raise ArtifactError("the prompt ends with its image", where, "write on, as the model's examples do")
        whole = pixels is not None and seeing == "prompt"
        blocks = [int(whole or index > 0) for index in indices]
        item = ImagePrompt(number, ids, pixels=pixels, indices=indices, blocks=blocks)
        self._check(item)
        return item

    def feed(self, items: Sequence[Tokens], *, left: bool = False) -> dict[str, Array]:
        """Return the inputs of the embedder, the blocks and the grids; the graph of images computes the features.

        Tokens after those of a prompt are generated ones, which see earlier tokens alone.
        """
        prompts = [item for item in items if isinstance(item, ImagePrompt)]
        side: Side = "left" if left else "right"
        more = [[0] * (len(item.ids) - len(item.indices)) for item in prompts]
        feeds = {
            "input_ids": padded([item.ids for item in prompts], side, self.inputs.pad_id),
            "image_indices": padded([item.indices + zeros for item, zeros in zip(prompts, more, strict=True)], side),
            "attention_mask": padded([[1] * len(item.ids) for item in prompts], side),
        }
        if self.blocks:
            feeds[self.blocks] = padded([item.blocks + zeros for item, zeros in zip(prompts, more, strict=True)], side)
        if any(tensor.name == "image_grid" for tensor in self.session.graphs[-1].input_tensors()):
            feeds["image_grid"] = self._grids(prompts)
        return feeds | {"image_features": self._features(prompts)} | chosen_adapters(self.session, items)

    def _features(self, prompts: Sequence[ImagePrompt]) -> Array:
        """Return the features of the images of prompts, (B, N, E), zeros after those of fewer, or of no image."""
        images = [prompt.pixels.astype(self.session.dtype) for prompt in prompts if prompt.pixels is not None]
        if not images:
            return self._no_features(len(prompts))
        if self.images.is_free:  # of different sizes
            found = [self._encode(image) for image in images]
        else:
            step = max(len(prompts), *map(len, images))  # which bounds the memory of a batch of images with many tiles
            tiles = np.concatenate(images)
            parts = np.concatenate([self._encode(tiles[n : n + step]) for n in range(0, len(tiles), step)])
            found = np.split(parts, np.cumsum([len(image) for image in images])[:-1])
        rows = [part.reshape(-1, part.shape[-1]) for part in found]
        features = np.zeros((len(prompts), max(map(len, rows)), rows[0].shape[1]), self.session.dtype)
        with_images = [number for number, prompt in enumerate(prompts) if prompt.pixels is not None]
        for number, row in zip(with_images, rows, strict=True):
            features[number, : len(row)] = row
        return features

    def _encode(self, pixels: Array) -> Array:
        """Return the features of images of one size, or of tiles."""
        graph = self.encoder
        (spec,), (made,) = graph.input_tensors(), graph.output_tensors()
        found: Array = self.session.execute(graph, {spec.name: pixels})[made.name]
        return found

    def _grids(self, prompts: Sequence[ImagePrompt]) -> Array:
        """Return the number of tokens before each image, and the rows and columns of its features, (B, 3); else 0."""
        grids = np.zeros((len(prompts), 3), np.int64)
        for number, prompt in enumerate(prompts):
            if prompt.pixels is not None:
                sides = (side // self.images.multiple for side in prompt.pixels.shape[2:])
                grids[number] = [prompt.indices.index(1), *sides]
        return grids

    def start(self, items: Sequence[Tokens]) -> tuple[Sequence[Tokens], Stepper, Array, Array]:
        feeds = self.feed(items, left=True)
        first = self._embed(feeds)
        (made,) = self.encoder.output_tensors()  # given, the stepper runs no graph but the decoder
        given = {name: feeds[name] for name in (self.blocks, "image_grid") if name in feeds}
        stepper = self.session.stepper({**given, made.name: feeds["image_features"], "inputs_embeds": first})
        return items, _Embedding(self, stepper, first), feeds["input_ids"], feeds["attention_mask"]

    def embed(self, ids: Array) -> Array:
        """Return the embeddings of token ids, (B, T), none of which stands for an image: (B, T, H)."""
        feeds = {
            "input_ids": ids.astype(np.int64),
            "image_indices": np.zeros(ids.shape, np.int64),
            "image_features": self._no_features(len(ids)),
            "attention_mask": np.ones(ids.shape, np.int64),
        }
        return self._embed(feeds)

    def _no_features(self, rows: int) -> Array:
        tensor = self.encoder.output_tensors()[0]
        sizes = {"batch": rows, **{name: size.multiple_of for name, size in self.encoder.sizes.items()}}
        features = np.zeros(tensor.shape(sizes), self.session.dtype)
        return features.reshape(rows, -1, features.shape[-1])

    def _embed(self, feeds: dict[str, Array]) -> Array:
        graph = self.embedder
        inputs = {tensor.name: feeds[tensor.name] for tensor in graph.input_tensors()}
        return internals(self.session).executor()(graph, inputs)[graph.output_tensors()[0].name]


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long for a name, or with a character that none has
        return False


class _Embedding:
    """A stepper on token ids, whose embeddings a stepper of the decoder reads.

    Args:
        task: computes embeddings.
        stepper: on the decoder.
        first: the embeddings of the first step, (B, T, H), which may have an image.
    """

    def __init__(self, task: ImageTextToText, stepper: Stepper, first: Array) -> None:
        self._task, self._stepper = task, stepper
        self._first: Array | None = first

    @property
    def rows(self) -> int:
        """B."""
        return self._stepper.rows

    @property
    def length(self) -> int:
        """Number of positions in the past."""
        return self._stepper.length

    @property
    def room(self) -> int | None:
        """Number of positions that still fit."""
        return self._stepper.room

    @property
    def can_roll_back(self) -> bool:
        """Whether the past can be shortened."""
        return self._stepper.can_roll_back

    def step(self, tokens: Array, mask: Array | None = None, *, every: bool = False) -> Array:
        """Read tokens, (B, T), and return logits: see :meth:`zoo_runtime.Stepper.step`."""
        spec, where = self._task.ids_input, f"graph {self._task.graph.name}"
        tokens = check_tokens(tokens, self.rows, name=spec.name, width=None, upper=spec.upper, where=where)
        first, self._first = self._first, None
        return self._stepper.step(self._task.embed(tokens) if first is None else first, mask, every=every)

    def take(self, rows: Array) -> None:
        """Continue with the given rows."""
        self._stepper.take(rows)

    def roll_back(self, count: int) -> None:
        """Forget the last positions."""
        self._stepper.roll_back(count)

    def save(self) -> Any:
        """Return the past."""
        return self._stepper.save()

    def restore(self, saved: Any) -> None:
        """Return to a past."""
        self._stepper.restore(saved)

    def close(self) -> None:
        """Release the past."""
        self._stepper.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
