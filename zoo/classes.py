"""Configurations of classifiers, sentence encoders and image models, and how logits become answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Self

from zoo.config import Config
from zoo.cost import Cost, linear

__all__ = [
    "MANY_SIZES",
    "ClassifierConfig",
    "EmbeddingConfig",
    "ImageConfig",
    "ImagePreparation",
    "ProblemType",
    "class_names",
    "default_names",
    "problem_of",
    "sides_of",
]

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
"""How logits become answers: by a softmax over the classes, by a sigmoid for each class, or as they are. The values are
those of transformers' ``problem_type``."""


def problem_of(problem: ProblemType | None, num_classes: int) -> ProblemType:
    """Return the problem type of a head with this many classes, with the default of transformers' losses for None.

    The default is regression for one class, and a single label for several.

    Raises:
        ValueError: a single label of one class: its probability would always be 1.

    >>> problem_of(None, 3), problem_of(None, 1)
    ('single_label_classification', 'regression')
    """
    if num_classes == 1 and problem == "single_label_classification":
        what = "problem_type 'single_label_classification' needs at least 2 classes, but num_classes is 1"
        raise ValueError(f"{what}: choose 'multi_label_classification' for a probability, 'regression' for a number")
    return problem or ("regression" if num_classes == 1 else "single_label_classification")


def class_names(labels: Sequence[str] | None, num_classes: int, problem: ProblemType | None) -> tuple[str, ...]:
    """Return the names of classes: their labels, or without any their numbers.

    A single sigmoid is the probability of class 1, as in data with the labels 0 and 1.

    >>> class_names((), 2, None), class_names((), 1, "multi_label_classification"), class_names((), 1, "regression")
    (('0', '1'), ('1',), ('0',))
    """
    if labels:
        return tuple(labels)
    first = int(num_classes == 1 and problem == "multi_label_classification")
    return tuple(str(first + number) for number in range(num_classes))


def default_names(num_classes: int) -> tuple[str, ...]:
    """Return the names that transformers gives to classes without names: ``LABEL_0``, ``LABEL_1``, ..."""
    return tuple(f"LABEL_{number}" for number in range(num_classes))


MANY_SIZES = ("edges", "fit", "round_down", "area")
"""Values of ``image_resize`` with which images keep, or nearly keep, their proportions, and have many sizes."""


@dataclass(frozen=True, kw_only=True)
class ImagePreparation(Config):
    """How images of any proportions are prepared: see ``zoo.images.ImageReader``."""

    image_size: int | tuple[int, ...] = 224
    """Height and width of the images, in pixels; one number for squares."""
    num_channels: int = 3
    """Channels of the images, 3 for RGB."""
    image_mean: tuple[float, ...] | None = None
    """Mean subtracted from each channel, for pixels in [0, 1]; 0.5 by default."""
    image_std: tuple[float, ...] | None = None
    """Standard deviation that each channel is then divided by; 0.5 by default."""
    image_resample: Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"] = "bilinear"
    """Filter with which images are resized."""
    image_resize: Literal["stretch", "shortest_edge", "pad", "turn_and_pad", "edges", "fit", "round_down", "area"] = (
        "stretch"
    )
    """How images become of this size: see ``zoo.images.ImageReader``. With ``edges``, the numbers of
    ``image_size`` are those of the shortest and the longest edge; with ``area``, the smallest and largest numbers of
    pixels."""
    image_crop: float = 1.0
    """Sides of the model's image in the centre of a resized one, as a fraction of that image's shorter ones. The
    image is resized to ``image_size`` / ``image_crop`` pixels, rounded down, and its margin is cut off."""
    image_margin: Literal["down", "even"] = "down"
    """How half of a margin with an odd number of pixels is rounded: down, as in transformers, or to the even number, as
    in torchvision."""
    image_transparency: Literal["ignored", "white"] = "ignored"
    """Whether a colour that an image declares transparent, as palettes do, is kept (``ignored``) or replaced by white,
    as with ``do_convert_rgb`` of transformers. An opacity per pixel is ignored."""

    @property
    def sides(self) -> tuple[int, int]:
        """The two numbers of ``image_size``."""
        return sides_of(self.image_size)

    @property
    def has_many_sizes(self) -> bool:
        """Whether images keep their proportions, or nearly, and have many sizes."""
        return self.image_resize in MANY_SIZES

    def check_images(self) -> None:
        """Set the defaults of mean and deviation, and raise ``ValueError`` if the fields contradict each other."""
        self.require_positive("num_channels")
        if min(sides_of(self.image_size)) <= 0:
            raise ValueError(f"image_size must be positive, got {self.image_size}")
        self.default("image_mean", (0.5,) * self.num_channels)
        self.default("image_std", (0.5,) * self.num_channels)
        for name in ("image_mean", "image_std"):
            values = getattr(self, name)
            if len(values) != self.num_channels:
                raise ValueError(f"{name} {values} has {len(values)} numbers for num_channels {self.num_channels}")
        if not 0 < self.image_crop <= 1:
            raise ValueError(f"image_crop must lie in (0, 1], got {self.image_crop}")
        if min(self.image_std or ()) <= 0:
            raise ValueError(f"image_std must be positive, got {self.image_std}")
        if self.image_resize in ("pad", "turn_and_pad") and self.image_crop != 1:
            raise ValueError(f"image_resize {self.image_resize!r} crops nothing, but image_crop is {self.image_crop}")


def sides_of(image_size: int | tuple[int, ...]) -> tuple[int, int]:
    """Return height and width. Raises ``ValueError`` unless there are one or two numbers.

    >>> sides_of(224), sides_of((2560, 1920))
    ((224, 224), (2560, 1920))
    """
    sides = (image_size, image_size) if isinstance(image_size, int) else image_size
    if len(sides) != 2:
        raise ValueError(f"image_size must be one number, or height and width, got {image_size}")
    return sides


@dataclass(frozen=True, kw_only=True)
class ImageConfig(ImagePreparation):
    """Base class of configurations of models that read square images, which ``zoo.images.ImageReader`` prepares.

    ``__post_init__`` of a subclass calls :meth:`check_images`.
    """

    image_size: int = 224
    """Height and width of the images, in pixels."""
    image_resize: Literal["stretch", "shortest_edge"] = "stretch"
    """Whether images are stretched to a square, or keep their proportions and lose what is outside the central one."""


_CLASSES = ("num_classes", "labels", "problem_type")


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig(Config):
    """Base class of configurations whose models may have a classification head.

    ``__post_init__`` of a subclass calls :meth:`check_classes`.
    """

    head_fields: ClassVar[tuple[str, ...]] = ("task", *_CLASSES)
    replaced_modules: ClassVar[tuple[str, ...]] = ("classifier",)
    num_classes: int = 2
    """Number of classes, or of numbers for regression."""
    labels: tuple[str, ...] = ()
    """Names of the classes, if any."""
    problem_type: ProblemType | None = None
    """How logits become answers: by a softmax for a single label, by sigmoids for several labels (or one probability),
    or as they are for regression. By default a single label, or regression if there is only one class. None for a model
    without a classification head."""

    def check_classes(self, *, head: bool) -> None:
        """Set the default of ``problem_type``, and raise ``ValueError`` if the fields contradict each other.

        Args:
            head: whether the configured model has a classification head.
        """
        self.require_positive("num_classes")
        if self.labels and len(self.labels) != self.num_classes:
            raise ValueError(f"{len(self.labels)} labels for num_classes {self.num_classes}")
        if head:
            self.default("problem_type", problem_of(self.problem_type, self.num_classes))

    def with_task(self, task: str, values: Mapping[str, Any] | None = None, where: object = None) -> Self:
        """Return this configuration for a task; see :meth:`zoo.Config.with_task`.

        Another task does not inherit the classes of a classification head. The number of classes follows the labels.
        """
        changes = dict(values or {})
        if changes.get("labels"):
            changes.setdefault("num_classes", len(changes["labels"]))
        if task != self.task and self.problem_type is not None:
            changes = {field.name: field.default for field in fields(self) if field.name in _CLASSES} | changes
        elif changes.get("num_classes", self.num_classes) != self.num_classes:
            changes = {"labels": (), "problem_type": None} | changes
        return super().with_task(task, changes, where)


_PROJECTION = ("projection_sizes", "projection_activation", "projection_bias", "normalize_first")


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig(ClassifierConfig):
    """Base class of configurations whose models may have the head :class:`zoo.nn.EmbeddingHead`.

    ``__post_init__`` of a subclass also calls :meth:`check_embedding`.
    """

    head_fields: ClassVar[tuple[str, ...]] = (*ClassifierConfig.head_fields, "pooling", "normalize", *_PROJECTION)
    pooling: Literal["cls", "mean", "max", "last", "mean_sqrt_len", "weighted_mean"] = "mean"
    """Pooling of sentence embeddings: see :func:`zoo.nn.pool`."""
    normalize: bool = True
    """Whether sentence embeddings are scaled to unit length."""
    projection_sizes: tuple[int, ...] = ()
    """Widths of the dense layers between the pooling of sentence embeddings and their normalisation, in order."""
    projection_activation: Literal["tanh", "identity", "relu", "gelu", "silu"] = "tanh"
    """Activation of each of these layers."""
    projection_bias: bool = True
    """Whether these layers have biases."""
    normalize_first: bool = False
    """Whether pooled vectors are scaled to unit length before these layers."""

    def check_embedding(self) -> None:
        """Raise ``ValueError`` if the fields contradict each other."""
        if any(size < 1 for size in self.projection_sizes):
            raise ValueError(f"projection_sizes must be positive, got {self.projection_sizes}")
        if self.projection_sizes and self.task != "sentence-embedding":
            values = f"projection_sizes is {self.projection_sizes} and the task is {self.task!r}"
            raise ValueError(f"projection_sizes is for the task 'sentence-embedding', but {values}")
        if self.normalize_first and not self.projection_sizes:
            raise ValueError("normalize_first needs projection_sizes, got none")

    def with_task(self, task: str, values: Mapping[str, Any] | None = None, where: object = None) -> Self:
        """Return this configuration for a task; see :meth:`zoo.Config.with_task`. Other tasks have no projections."""
        changes = dict(values or {})
        if task != self.task:
            changes = {field.name: field.default for field in fields(self) if field.name in _PROJECTION} | changes
        return super().with_task(task, changes, where)

    def vector_size(self, width: int) -> int:
        """Return the width of sentence embeddings, given that of the pooled states."""
        return self.projection_sizes[-1] if self.projection_sizes else width

    def projection_cost(self, width: int) -> Cost:
        """Return the cost of the projections, which run once per text: parameters only."""
        sizes = (width, *self.projection_sizes)
        layers = zip(sizes, self.projection_sizes, strict=False)
        return Cost(sum(linear(*layer, bias=self.projection_bias).parameters for layer in layers))
