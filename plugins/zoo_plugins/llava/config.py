"""Configuration, graphs and cost of LLaVA."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from zoo import Activation, Cost, Graph, ImageConfig, attentions, cost, floats, mask, token_ids
from zoo_plugins.llama.config import LlamaConfig

__all__ = ["LlavaConfig"]

_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)
"""Mean and standard deviation of the channels of CLIP's training images."""


@dataclass(frozen=True, kw_only=True)
class LlavaConfig(LlamaConfig, ImageConfig):
    """Configuration of LLaVA: that of its decoder, and of an image encoder. The defaults are LLaVA 1.5 7B."""

    task: Literal["image-text-to-text"] = "image-text-to-text"  # type: ignore[assignment]
    """Logits of the next token of a text with an image."""
    vocab_size: int = 32064
    """Vocabulary size."""
    image_token_id: int = 32000
    """Token in the place of each feature of an image in a text."""
    image_size: int = 336
    """Height and width of the images, in pixels."""
    patch_size: int = 14
    """Height and width of a patch, in pixels. A right or bottom margin smaller than a patch is ignored."""
    patch_bias: bool = False
    """Whether the projection of patches has a bias (SigLIP)."""
    image_hidden_size: int = 1024
    """Width of the image encoder."""
    image_num_layers: int = 24
    """Number of its blocks."""
    image_num_heads: int = 16
    """Heads per block."""
    image_intermediate_size: int = 4096
    """Hidden width of its feed-forward networks."""
    image_activation: Activation = "gelu_sigmoid"
    """Activation of its feed-forward networks."""
    image_norm_eps: float = 1e-5
    """Added to the variance in its norms."""
    image_class_token: bool = True
    """Whether a learned token precedes the patches; SigLIP has none."""
    image_pre_norm: bool = True
    """Whether patches are normalised before the first block; those of SigLIP are not."""
    image_feature_layers: tuple[int, ...] = (-2,)
    """Blocks after which the features of an image are read, side by side: 0 for the embeddings, n for the n-th block,
    -1 for the last, -2 for the one before it."""
    image_class_feature: bool = False
    """Whether the class token has a feature beside those of the patches."""
    projector_activation: Activation = "gelu"
    """Activation between the two layers that project features to ``hidden_size``."""
    projector_bias: bool = True
    """Whether these layers have biases."""
    image_resample: Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"] = "bicubic"
    """Filter with which images are resized."""
    image_resize: Literal["stretch", "shortest_edge"] = "shortest_edge"
    """Whether images are stretched to a square, or keep their proportions and lose what is outside the central one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_channels == len(_MEAN):
            self.default("image_mean", _MEAN)
            self.default("image_std", _STD)
        self.check_images()
        self.require_positive(
            "patch_size", "image_hidden_size", "image_num_layers", "image_num_heads", "image_intermediate_size",
            "image_norm_eps",
        )  # fmt: skip
        self.require_divisible("image_hidden_size", "image_num_heads")
        if self.patch_size > self.image_size:
            raise ValueError(f"patch_size {self.patch_size} is larger than image_size {self.image_size}")
        if self.image_class_feature and not self.image_class_token:
            raise ValueError("image_class_feature needs image_class_token")
        if not 0 <= self.image_token_id < self.vocab_size:
            raise ValueError(f"image_token_id {self.image_token_id} lies outside vocab_size {self.vocab_size}")
        layers, count = self.image_feature_layers, self.image_num_layers
        if not layers or not -count - 1 <= min(layers) <= max(layers) <= count:
            what = f"image_feature_layers must be numbers from {-count - 1} to {count}"
            raise ValueError(f"{what} for image_num_layers {count}, got {layers}")
        if self.num_features >= self.max_seq_len:
            what = f"an image of {self.num_features} tokens leaves no room for a text in max_seq_len {self.max_seq_len}"
            raise ValueError(what)

    @property
    def predicts_tokens(self) -> bool:
        """Whether the model has logits of the next token."""
        return True

    @property
    def text(self) -> LlamaConfig:
        """The configuration of the decoder alone."""
        values = {field.name: getattr(self, field.name) for field in fields(LlamaConfig)}
        return LlamaConfig(**{**values, "task": "text-generation"})

    @property
    def num_patches(self) -> int:
        """Patches per image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_image_tokens(self) -> int:
        """Positions in the image encoder: the patches, and the class token if there is one."""
        return self.num_patches + self.image_class_token

    @property
    def num_features(self) -> int:
        """Features of an image, each in the place of a token."""
        return self.num_patches + self.image_class_feature

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """``image_feature_layers``, counted from 0."""
        return tuple(layer % (self.image_num_layers + 1) for layer in self.image_feature_layers)

    def graphs(self) -> tuple[Graph, ...]:
        """Declare a graph for an image, one for the embeddings of a text with it, and a decoder that reads these.

        The embeddings are a graph of their own, so that the decoder may read a text with an image in any number of
        calls.
        """
        (decoder,) = super().graphs()
        tokens, count = self.num_image_tokens, self.num_features
        features = floats("image_features", "batch", count, self.hidden_size)
        embeddings = floats("inputs_embeds", "batch", "sequence", self.hidden_size)
        encoder = Graph(
            name="encoder",
            method="encode_image",
            inputs=(floats("pixel_values", "batch", self.num_channels, self.image_size, self.image_size),),
            outputs=(features,),
            attentions=attentions(max(self.feature_layers), self.image_num_heads, queries=tokens, keys=tokens),
        )
        ids = token_ids("input_ids", self.vocab_size), token_ids("image_indices", count + 1)
        embedder = Graph(
            name="embedder",
            method="embed_with_image",
            inputs=(*ids, features, mask("attention_mask")),
            outputs=(embeddings,),
        )
        reads = embeddings, *decoder.inputs[1:]
        return encoder, embedder, replace(decoder, name="decoder", method="decode_embeddings", inputs=reads)

    def cost(self) -> Cost:
        """Return the closed-form parameters. FLOPs are for one token of the decoder, without the image encoder."""
        width, tokens = self.image_hidden_size, self.num_image_tokens
        block = (
            2 * cost.layer_norm(width)
            + cost.attention(width, self.image_num_heads, head_dim=width // self.image_num_heads, context=tokens)
            + cost.feed_forward(width, self.image_intermediate_size)
        )
        image = (
            cost.linear(self.num_channels * self.patch_size**2, width, bias=self.patch_bias)
            + cost.embedding(tokens + self.image_class_token, width)
            + self.image_num_layers * block
            + (1 + self.image_pre_norm) * cost.layer_norm(width)
            + cost.linear(width * len(self.image_feature_layers), self.hidden_size, bias=self.projector_bias)
            + cost.linear(self.hidden_size, self.hidden_size, bias=self.projector_bias)
        )
        return super().cost() + Cost(image.parameters)
