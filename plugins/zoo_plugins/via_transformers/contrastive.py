"""Classes of transformers that embed images and texts into one space, as graphs for each and for their comparison.

N images, M texts, C channels, I image size, T tokens of a text, D embedding size.
"""

from __future__ import annotations

from inspect import Parameter, signature
from typing import Any

from torch import Tensor

from zoo import UsageError
from zoo.nn import normalize
from zoo_plugins.via_transformers.fields import ClassFields
from zoo_plugins.via_transformers.known import PADS_TEXTS
from zoo_plugins.via_transformers.replaced import whole_images, without_branches

__all__ = [
    "compare",
    "contrastive_facts",
    "embed_images",
    "embed_texts",
    "end_of_text",
    "require_contrastive",
]

_LEGACY_END = 2
_LARGEST_IDS = ("clip_text_model", "clipseg_text_model", "groupvit_text_model")
"""Model types in which that ``eos_token_id`` stands for the largest id of a text."""
_METHODS = ("get_text_features", "get_image_features")
_OPTIONAL = (
    "attention_mask", "bool_masked_pos", "input_ids", "inputs_embeds", "interpolate_pos_encoding", "output_attentions",
    "output_hidden_states", "output_segmentation", "pixel_values", "position_ids", "return_dict", "return_loss", "self",
    "token_type_ids",
)  # fmt: skip
"""Arguments of a class that graphs have, or that may be left out."""
_REMEDY = "of models that compare images with texts, those with a vector of each image and of each text are supported"


def require_contrastive(cls: Any) -> None:
    """Raise :class:`UsageError` unless a class embeds texts, and whole images of one size, apart from each other."""
    if absent := [name for name in _METHODS if not hasattr(cls, name)]:
        raise UsageError(f"{cls.__name__} has no {' and no '.join(absent)}", None, _REMEDY)
    taken = signature(cls.forward).parameters
    others = [name for name, item in taken.items() if name not in _OPTIONAL and item.kind != Parameter.VAR_KEYWORD]
    if others:
        raise UsageError(f"{cls.__name__} reads {', '.join(others)} beside pixel_values", None, _REMEDY)


def contrastive_facts(c: ClassFields) -> dict[str, Any]:
    """Return how a class reads texts, and what becomes of its logits, as fields of its configuration.

    As in the pipeline of transformers, SigLIP gives each label a probability of its own.
    """
    reads_padding = c.original["model_type"] in PADS_TEXTS
    return {"pad_texts": reads_padding, "label_probabilities": "sigmoid" if reads_padding else "softmax"}


def end_of_text(described: Any) -> int | None:
    """Return the token whose state represents a text in CLIP and its kin, given a configuration of transformers."""
    texts = described.get_text_config()
    end = getattr(texts, "eos_token_id", None)
    is_legacy = end == _LEGACY_END and texts.model_type in _LARGEST_IDS
    return texts.vocab_size - 1 if is_legacy else end


def embed_texts(
    original: Any, input_ids: Tensor, attention_mask: Tensor | None, token_type_ids: Tensor | None
) -> Tensor:
    """Return vectors of length 1, (M, D).

    Args:
        original: the class.
        input_ids: (M, T).
        attention_mask: (M, T), 1 for a token and 0 for padding; None if the class reads padding.
        token_type_ids: (M, T), the segment of each token; None if the class takes none.
    """
    options: dict[str, Any] = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
    if attention_mask is not None:
        # CLIP takes the state of the first end token, or of the first of the largest ids: none is in the padding.
        input_ids = input_ids.where(attention_mask == 1, input_ids[:, :1])
        options["attention_mask"] = attention_mask
    with without_branches(original.text_model):
        return normalize(_vectors(original, original.get_text_features(input_ids=input_ids, **options)))


def embed_images(original: Any, pixel_values: Tensor) -> Tensor:
    """Return vectors of length 1, (N, C, I, I) -> (N, D)."""
    with whole_images(original.vision_model):
        return normalize(_vectors(original, original.get_image_features(pixel_values=pixel_values)))


def compare(original: Any, image_embeds: Tensor, text_embeds: Tensor) -> Tensor:
    """Return the logits of all pairs, (N, D) and (M, D) -> (N, M).

    They are cosines, times the exponential of ``logit_scale`` or divided by ``temperature``, plus any ``logit_bias``.
    AIMv2 limits the exponent.
    """
    cosines = image_embeds @ text_embeds.T
    if hasattr(original, "temperature"):
        return cosines / original.temperature
    scale = original.logit_scale
    if hasattr(original, "max_log_logit_scale"):
        scale = scale.clamp(0.0, original.max_log_logit_scale)
    logits = cosines * scale.exp()
    return logits + original.logit_bias if hasattr(original, "logit_bias") else logits


def _vectors(original: Any, found: Any) -> Tensor:
    """Return the vectors among the outputs of a class. Raises :class:`UsageError` if there are none."""
    vectors: Tensor | None = found.pooler_output
    if vectors is None:  # of SigLIP without a head
        raise UsageError(f"{type(original).__name__} pools no vectors", None, _REMEDY)
    return vectors
