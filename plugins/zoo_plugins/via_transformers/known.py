"""The model types of transformers. This module does not import torch."""

from __future__ import annotations

from typing import Literal

__all__ = ["FIRST_POSITION", "PADS_TEXTS", "READS_PADDING", "TOKEN_BLOCKS", "UNSUPPORTED", "is_known"]

READS_PADDING = {
    "convbert": "its convolutions read the neighbours of a token",
    "data2vec-audio": "the convolutions of its positions read padding",
    "fnet": "its Fourier transform mixes all columns of a row",
    "mobilebert": "the embedding of a token includes those of its neighbours",
    "nystromformer": "its landmarks are means over parts of the row",
    **dict.fromkeys(("sew", "sew-d"), "it pools neighbouring positions"),
}
"""Model types whose answers depend on padding by design, and why."""
PADS_TEXTS = ("siglip",)
"""Model types that compare images with texts, and read texts padded to the greatest length, without a mask."""
TOKEN_BLOCKS: dict[str, Literal["image", "prompt"]] = {
    **dict.fromkeys(("gemma3", "shieldgemma2"), "image"),
    "paligemma": "prompt",
}
"""Model types that read a text with an image, whose tokens of the image, or of the whole prompt, see each other."""
FIRST_POSITION = {"paligemma": 1}
"""Model types whose decoders count positions from another number than 0."""
UNSUPPORTED = {
    "fsmt": "its decoder has no causal mask in a call with a cache, and so reads one token at a time",
    **dict.fromkeys(("glm46v", "glm4v", "glm4v_moe"), "its encoder interpolates positions image by image"),
    "git": "with a cache, its mask has an image before the text",
    "idefics2": "images of many sizes are padded, with masks of pixels",
    "ovis2": "features of the image are also embeddings of some tokens around it",
}
"""Model types that cannot be called as graphs are, and why."""


def is_known(model_type: str) -> bool:
    """Return whether transformers has configurations of a model type. Raises ``ImportError`` if it is not installed."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING
