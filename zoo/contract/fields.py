"""The fields of configurations that zoo itself reads, by name, whatever the architecture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from zoo.contract.optional import near_misses

__all__ = ["StandardFields", "misnamed_fields", "standard_fields"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StandardFields:
    """The fields of a configuration that zoo reads; None, or the default here, where a configuration has no such field.

    A configuration declares those that its models have, under these names and with these types.
    """

    max_seq_len: int | None = None
    """The most tokens of an input, past included: the number of positions. None if there is no limit."""
    vocab_size: int | None = None
    """The number of token ids, ``0`` to ``vocab_size - 1``."""
    target_vocab_size: int | None = None
    """The number of token ids of the decoder, if it has a vocabulary of its own."""
    type_vocab_size: int = 0
    """The number of ids of ``token_type_ids``."""
    pad_token_id: int | None = None
    """The token that fills the rows of a batch."""
    bos_token_id: int | None = None
    """The token that starts a text."""
    eos_token_id: int | tuple[int, ...] | None = None
    """The token or tokens that end a text."""
    mask_token_id: int | None = None
    """The token in the place of those to predict, in masked language modelling."""
    image_token_id: int | None = None
    """The token in the place of each position of an image in a text."""
    decoder_start_token_id: int | None = None
    """The first token that a decoder reads."""
    tie_embeddings: bool | None = None
    """Whether the head shares the weight of the embedding."""
    router_aux_loss: float = 0.0
    """The factor of the load-balancing loss of experts in training."""
    num_classes: int | None = None
    """The number of classes of a classification head, or of numbers for regression."""
    labels: tuple[str, ...] = ()
    """The names of the classes, if any."""
    problem_type: str | None = None
    """How logits become answers: see :class:`zoo.ClassifierConfig`."""
    max_detections: int | None = None
    """The largest number of objects that a detector finds in an image."""
    depth_resample: str | None = None
    """How depths are interpolated to the size of the original image."""
    image_mean: tuple[float, ...] | None = None
    """The mean of each channel: see :class:`zoo.ImagePreparation`, as for the following."""
    image_std: tuple[float, ...] | None = None
    """The standard deviation of each channel."""
    image_resample: str | None = None
    """The filter with which images are resized."""
    image_resize: str | None = None
    """Whether images are stretched, or keep their proportions and are cut or padded."""
    image_crop: float | None = None
    """The part of an image that is kept, as a fraction of its shorter side."""
    image_margin: str | None = None
    """How half of a margin with an odd number of pixels is rounded."""
    image_transparency: str | None = None
    """Treatment of the transparent colour of an image: see ``image_transparency`` of :class:`zoo.ImagePreparation`."""


_NAMES = tuple(field.name for field in fields(StandardFields))
_DEFAULTS = StandardFields()
_OTHER_NAMES = {
    "max_seq_len": (
        "context_length", "max_context_length", "max_position_embeddings", "max_positions", "max_sequence_length",
        "model_max_length", "n_ctx", "n_positions",
    ),
    "vocab_size": ("n_vocab", "vocabulary_size"),
    "pad_token_id": ("pad_id", "pad_idx", "pad_index", "pad_token", "padding_id", "padding_idx", "padding_token_id"),
    "eos_token_id": ("eos_id", "eos_idx", "eos_index", "eos_token"),
    "mask_token_id": ("mask_id", "mask_idx", "mask_index", "mask_token"),
    "decoder_start_token_id": ("decoder_start_id", "decoder_start_token"),
    "tie_embeddings": ("tie_weights", "tie_word_embeddings", "tied_embeddings"),
    "num_classes": ("n_classes", "num_labels"),
}  # fmt: skip
"""Names of other libraries for the same. A field with such a name is not read, where it could be meant to be."""
_OTHER_MEANING = frozenset({"image_size"})
"""Names that nearly equal a standard one, ``image_resize``, and mean something else."""


def standard_fields(config: object) -> StandardFields:
    """Return the standard fields of a configuration, with the defaults of the class for those that it lacks.

    >>> from types import SimpleNamespace
    >>> standard_fields(SimpleNamespace(vocab_size=260)).vocab_size
    260
    """
    return StandardFields(**{name: getattr(config, name, getattr(_DEFAULTS, name)) for name in _NAMES})


def misnamed_fields(names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield each field of a configuration that nearly has the name of a standard one which is missing, and that one.

    >>> list(misnamed_fields(("vocab_size", "max_seq_length", "pad_id", "patch_size", "image_size")))
    [('max_seq_length', 'max_seq_len'), ('pad_id', 'pad_token_id')]
    """
    others = {other: name for name, group in _OTHER_NAMES.items() for other in group}
    renamed = {name: others[name] for name in names if name in others and others[name] not in names}
    yield from {**dict(near_misses({*names} - _OTHER_MEANING, _NAMES)), **renamed}.items()
