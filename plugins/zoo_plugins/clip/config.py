"""Configuration, graphs and cost of CLIP and SigLIP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from zoo import Activation, Cost, Graph, ImageConfig, TensorSpec, attentions, cost, floats, mask, token_ids

__all__ = ["CLIPConfig", "contrastive_graphs"]

_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)
"""Mean and standard deviation of the channels of CLIP's training images."""


@dataclass(frozen=True, kw_only=True)
class CLIPConfig(ImageConfig):
    """Configuration of CLIP and SigLIP. The defaults are CLIP's ViT-B/32."""

    task: Literal["zero-shot-image-classification"] = "zero-shot-image-classification"
    """Whether an image has a label is judged by the similarity of two vectors."""
    embedding_size: int = 512
    """Width of the vectors of images and texts."""
    vocab_size: int = 49408
    """Number of token ids."""
    max_seq_len: int = 77
    """Number of text positions."""
    text_hidden_size: int = 512
    """Width of the text encoder."""
    text_num_layers: int = 12
    """Number of blocks of the text encoder."""
    text_num_heads: int = 8
    """Heads per block of the text encoder."""
    text_intermediate_size: int | None = None
    """Hidden width of its feed-forward networks; 4 x ``text_hidden_size`` by default."""
    causal: bool = True
    """Whether a token of a text sees only the tokens before it."""
    pad_texts: bool = False
    """Whether every text is padded to ``max_seq_len`` tokens, which are all read. Otherwise padding is masked."""
    text_pooling: Literal["end", "largest", "last"] = "end"
    """The token whose state represents a text: the first ``end_token_id``; the first of the largest ids, which is the
    end token if that is the last of the vocabulary; or the last token."""
    end_token_id: int | None = None
    """Id of the token that ends a text, for ``text_pooling`` end; by default the last of the vocabulary."""
    pad_token_id: int | None = 1
    """Id that pads texts. None is for a model that masks padding."""
    text_head_bias: bool = False
    """Whether the projection of a text to ``embedding_size`` has a bias."""
    patch_size: int = 32
    """Height and width of a patch, in pixels. A right or bottom margin smaller than a patch is ignored."""
    patch_bias: bool = False
    """Whether the projection of patches has a bias."""
    image_hidden_size: int = 768
    """Width of the image encoder."""
    image_num_layers: int = 12
    """Number of blocks of the image encoder."""
    image_num_heads: int = 12
    """Heads per block of the image encoder."""
    image_intermediate_size: int | None = None
    """Hidden width of its feed-forward networks; 4 x ``image_hidden_size`` by default."""
    pre_norm: bool = True
    """Whether patches are normalised before the first block."""
    image_pooling: Literal["class", "attention"] = "class"
    """Representation of an image: the state of a class token, or the attention of a learned query to the patches,
    followed by a feed-forward network (Zhai et al. 2022, section 3.4)."""
    image_head: bool = True
    """Whether the vector of an image is projected to ``embedding_size``."""
    activation: Activation = "gelu_sigmoid"
    """Activation of all feed-forward networks."""
    norm_eps: float = 1e-5
    """Added to the variance in LayerNorm."""
    dropout: float = 0.0
    """Dropout on attention weights, during training."""
    logit_bias: bool = False
    """Whether a learned number is added to all logits (Zhai et al. 2023, section 3.2)."""
    label_probabilities: Literal["softmax", "sigmoid"] = "softmax"
    """How the logits of an image become probabilities of labels: all together, or each on its own."""
    image_resample: Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"] = "bicubic"
    """Filter with which images are resized."""
    image_resize: Literal["stretch", "shortest_edge"] = "shortest_edge"
    """Whether images are stretched to a square, or keep their proportions and lose what is outside the central one."""

    def __post_init__(self) -> None:
        self.default("text_intermediate_size", 4 * self.text_hidden_size)
        self.default("image_intermediate_size", 4 * self.image_hidden_size)
        if self.num_channels == len(_MEAN):
            self.default("image_mean", _MEAN)
            self.default("image_std", _STD)
        self.require_positive(
            "embedding_size", "vocab_size", "max_seq_len", "text_hidden_size", "text_num_layers", "text_num_heads",
            "text_intermediate_size", "patch_size", "image_hidden_size", "image_num_layers", "image_num_heads",
            "image_intermediate_size", "norm_eps",
        )  # fmt: skip
        self.check_images()
        self.require_probability("dropout")
        self.require_divisible("text_hidden_size", "text_num_heads")
        self.require_divisible("image_hidden_size", "image_num_heads")
        if self.patch_size > self.image_size:
            raise ValueError(f"patch_size {self.patch_size} is larger than image_size {self.image_size}")
        if self.text_pooling == "end":
            self.default("end_token_id", self.vocab_size - 1)
        elif self.end_token_id is not None:
            raise ValueError(f"end_token_id is for text_pooling 'end', but that is {self.text_pooling!r}")
        for name in ("end_token_id", "pad_token_id"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < self.vocab_size:
                raise ValueError(f"{name} {value} lies outside vocab_size {self.vocab_size}")
        if self.pad_texts and self.pad_token_id is None:
            raise ValueError("pad_texts needs pad_token_id, but it is None")
        if not self.image_head and self.embedding_size != self.image_hidden_size:
            what = f"embedding_size {self.embedding_size} and image_hidden_size {self.image_hidden_size}"
            raise ValueError(f"without image_head, {what} must be equal")

    @property
    def num_patches(self) -> int:
        """Patches per image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_image_tokens(self) -> int:
        """Patches per image, and the class token if there is one."""
        return self.num_patches + (self.image_pooling == "class")

    def graphs(self) -> tuple[Graph, ...]:
        """Declare three graphs: the vectors of texts, those of images, and the logits of all pairs."""
        length = self.max_seq_len if self.pad_texts else "sequence"
        ids = token_ids("input_ids", self.vocab_size, length=length, rows="texts")
        padding = () if self.pad_texts else (mask("attention_mask", padding="right", rows="texts"),)
        return contrastive_graphs(
            (ids, *padding),
            floats("pixel_values", "images", self.num_channels, self.image_size, self.image_size),
            self.embedding_size,
            text_attentions=attentions(
                self.text_num_layers, self.text_num_heads, queries=length, keys=length, rows="texts"
            ),
            image_attentions=self._image_attentions(),
        )

    def _image_attentions(self) -> tuple[TensorSpec, ...]:
        """Declare the attention weights of the blocks, and of the pooling if it is attention."""
        heads, tokens, patches = self.image_num_heads, self.num_image_tokens, self.num_patches
        blocks = attentions(self.image_num_layers, heads, queries=tokens, keys=tokens, rows="images")
        if self.image_pooling == "class":
            return blocks
        return *blocks, *attentions(1, heads, queries=1, keys=patches, name="cross_attentions", rows="images")

    def cost(self) -> Cost:
        """Return the closed-form parameters. FLOPs are for one token of a text and one patch, excluding the heads."""
        text, image = self.text_hidden_size, self.image_hidden_size
        patch = cost.linear(self.num_channels * self.patch_size**2, image, bias=self.patch_bias)
        heads = (
            cost.linear(text, self.embedding_size, bias=self.text_head_bias),
            *([cost.linear(image, self.embedding_size, bias=False)] if self.image_head else []),
            *([self._pooling_cost()] if self.image_pooling == "attention" else []),
        )
        return (
            cost.embedding(self.vocab_size + self.max_seq_len, text)
            + self.text_num_layers
            * _block_cost(text, self.text_num_heads, self.text_intermediate_size or 0, self.max_seq_len)
            + cost.layer_norm(text)
            + patch
            + cost.embedding(self.num_image_tokens + (self.image_pooling == "class"), image)
            + self.image_num_layers
            * _block_cost(image, self.image_num_heads, self.image_intermediate_size or 0, self.num_image_tokens)
            + (2 if self.pre_norm else 1) * cost.layer_norm(image)
            + Cost(sum(head.parameters for head in heads) + 1 + self.logit_bias)
        )

    def _pooling_cost(self) -> Cost:
        width, heads = self.image_hidden_size, self.image_num_heads
        block = _block_cost(width, heads, self.image_intermediate_size or 0, self.num_patches)
        return Cost(block.parameters - cost.layer_norm(width).parameters + width)


def contrastive_graphs(
    texts: Sequence[TensorSpec],
    pixels: TensorSpec,
    size: int,
    *,
    text_attentions: tuple[TensorSpec, ...] = (),
    image_attentions: tuple[TensorSpec, ...] = (),
) -> tuple[Graph, ...]:
    """Return three graphs: the vectors of texts, those of images, and the logits of all pairs.

    Args:
        texts: the inputs of the first graph, with the rows ``texts``.
        pixels: the input of the second, with the rows ``images``.
        size: width of the vectors.
        text_attentions: the attention weights of the first graph.
        image_attentions: those of the second.
    """
    text_embeds, image_embeds = (floats(f"{name}_embeds", f"{name}s", size) for name in ("text", "image"))
    return (
        Graph(
            name="text",
            method="embed_texts",
            inputs=tuple(texts),
            outputs=(text_embeds,),
            attentions=text_attentions,
            rows=("texts",),
        ),
        Graph(
            name="image",
            method="embed_images",
            inputs=(pixels,),
            outputs=(image_embeds,),
            attentions=image_attentions,
            rows=("images",),
        ),
        Graph(
            name="similarity",
            method="compare",
            inputs=(image_embeds, text_embeds),
            outputs=(floats("logits_per_image", "images", "texts"),),
            rows=("images", "texts"),
        ),
    )


def _block_cost(width: int, heads: int, intermediate: int, context: int) -> Cost:
    attention = cost.attention(width, heads, head_dim=width // heads, context=context)
    return 2 * cost.layer_norm(width) + attention + cost.feed_forward(width, intermediate)
