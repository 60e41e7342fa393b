"""Tasks of models that embed images and texts into one space: vectors of images, and labels by similarity.

N images, M labels, D embedding size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo.config import Settings
from zoo.errors import ArtifactError, UsageError
from zoo.plots import Distribution
from zoo_runtime.running.batching import batches
from zoo_runtime.running.context import Context
from zoo_runtime.running.inputs import Answer, label
from zoo_runtime.running.runner import finite
from zoo_runtime.running.text_runner import Tokens
from zoo_runtime.tasks.classification import distribution_of, show_classes, sigmoid, softmax
from zoo_runtime.tasks.encoders import Embed, EmbedOptions, shown_vector
from zoo_runtime.tasks.images import ImageRunner, Pixels
from zoo_runtime.tasks.label_texts import read_labels, text_of_label

__all__ = ["ImageEmbedding", "ZeroShotImageOptions", "ZeroShotImages"]

_IMAGE, _TEXT, _LOGITS = "image_embeds", "text_embeds", "logits_per_image"


class ImageEmbedding(ImageRunner):
    """``embedding``, the vector of an image, in the space of the vectors of texts."""

    needs = (_IMAGE,)

    def answer(self, items: Sequence[Pixels]) -> Sequence[Any]:
        vectors = self.compute(items)[_IMAGE]
        return finite(items, vectors, [{"embedding": vector} for vector in vectors])

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        for answer in answers:
            vector = answer.result["embedding"]
            yield f"{label(answer)}: {len(vector)} numbers {shown_vector(vector)}"


@dataclass(frozen=True, kw_only=True)
class ZeroShotImageOptions(Settings):
    """Options of zero-shot image classification, with the names of transformers' pipeline."""

    labels: tuple[str, ...] = ()
    """The classes, as they fit into the template. Required."""
    hypothesis_template: str = "This is a photo of {}."
    """The text that is compared with images, with {} for the label."""


class ZeroShotImages(ImageRunner):
    """``classes``: the probability of each label for an image (Radford et al. 2021, section 3.1).

    The logit of a label is the similarity of the image to a text with the label. Probabilities are a softmax over the
    labels, or a sigmoid for each, as ``label_probabilities`` of the configuration says. The texts are embedded once.
    """

    options = ZeroShotImageOptions
    sample_options = MappingProxyType({"labels": ("wet", "tea", "a")})
    needs = (_IMAGE,)

    def __init__(self, session: Context, chosen: ZeroShotImageOptions) -> None:
        super().__init__(session, chosen)
        self.labels = read_labels(chosen.labels, chosen.hypothesis_template, "zero-shot-image-classification")
        graphs = [graph for graph in session.graphs if {item.name for item in graph.inputs} == {_IMAGE, _TEXT}]
        if not graphs:
            raise UsageError(f"the model has no graph that compares {_IMAGE} with {_TEXT}", session.path)
        self.comparison = graphs[0]
        self.texts = Embed(session, EmbedOptions())
        self.items = [self._read_label(name) for name in self.labels]

    def _read_label(self, name: str) -> Tokens:
        try:
            return self.texts.read(text_of_label(self.chosen.hypothesis_template, name), 1)
        except ArtifactError as error:
            raise UsageError(f"the label {name!r} cannot be read ({error.what})", self.session.path) from error

    @property
    def truncated(self) -> str | None:
        """The number of truncated texts in words, for a warning; None if it is 0."""
        return self.texts.truncated

    @cached_property
    def vectors(self) -> Array:
        """The vectors of the labels, (M, D)."""
        sizes = [(place, len(item.ids)) for place, item in enumerate(self.items)]
        vectors: dict[int, Array] = {}
        for batch in batches(sizes, self.batch_size, self.texts.fits):
            rows = self.texts.compute([self.items[place] for place in batch])[_TEXT]
            vectors |= dict(zip(batch, rows, strict=True))
        return np.stack([vectors[place] for place in range(len(self.items))])

    def answer(self, items: Sequence[Pixels]) -> Sequence[Any]:
        feeds = {_IMAGE: self.compute(items)[_IMAGE], _TEXT: self.vectors}
        logits = self.session.execute(self.comparison, feeds)[_LOGITS].astype(np.float32)  # (N, M)
        function = sigmoid if self.session.option("label_probabilities") == "sigmoid" else softmax
        return finite(items, logits, [self._result(function(row)) for row in logits])

    def _result(self, chances: Array) -> dict[str, Any]:
        order = np.argsort(-chances, kind="stable").tolist()
        classes = [{"label": self.labels[at], "probability": float(chances[at])} for at in order]
        return {"label": classes[0]["label"], "classes": classes}

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        yield from map(show_classes, answers)

    def distributions(self, answer: Answer) -> Sequence[Distribution]:
        return [distribution_of(answer, exclusive=self.session.option("label_probabilities") != "sigmoid")]
