"""The fields of models of transformers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from zoo import Cost, EmbeddingConfig, ImagePreparation, ImageTiling
from zoo.spectrogram import SAMPLING_RATE, SpectrogramKind
from zoo_plugins.via_transformers.known import TOKEN_BLOCKS

IMAGE_OUTPUTS: Mapping[str, tuple[str, ...]] = {
    "image-classification": ("logits",),
    "image-feature-extraction": ("last_hidden_state", "pooler_output"),
    "object-detection": ("logits", "pred_boxes"),
    "semantic-segmentation": ("logits",),
    "depth-estimation": ("predicted_depth",),
}
"""Tasks of classes that read images, and neither read nor write texts, with the outputs that these may have."""
IMAGE_TASKS = tuple(IMAGE_OUTPUTS)
DENSE_TASKS = ("object-detection", "semantic-segmentation", "depth-estimation")
"""Tasks whose answers image processors compute from the outputs."""
IMAGE_TEXT_TASKS = ("image-text-to-text", "zero-shot-image-classification")
"""Tasks of classes that read images and texts."""
READS_IMAGES = (*IMAGE_TASKS, "image-to-text", *IMAGE_TEXT_TASKS)
"""Tasks of classes that read images."""
SOUND_TASKS = ("ctc-speech-recognition", "audio-classification")
"""Tasks of classes that read sound. The others read texts."""
ENCODER_DECODER_TASKS = ("text2text-generation", "image-to-text")
"""Tasks of classes with an encoder, and a decoder that writes texts."""
GENERATION_TASKS = ("text-generation", *ENCODER_DECODER_TASKS, "image-text-to-text")
"""Tasks of classes that keep keys and values of earlier tokens."""
_CLASSIFIED = (
    "text-classification", "token-classification", "image-classification", "semantic-segmentation",
    "audio-classification",
)  # fmt: skip
_GPT_NEOX = {
    "model_type": "gpt_neox", "vocab_size": 260, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 256, "max_position_embeddings": 128,
}  # fmt: skip
_COUNT = re.compile(r"(n_|num_)(\w+_)?(layers?|layer)|(n_layers?)|(\w+_)?layers")
"""Keys of original configurations that count layers."""


@dataclass(frozen=True, kw_only=True)
class ClassFields(EmbeddingConfig):
    """The content of an original config.json, the class, and what its graphs need.

    The defaults are a small GPT-NeoX.
    """

    head_fields: ClassVar[tuple[str, ...]] = (
        *EmbeddingConfig.head_fields, "model_class", "attention", "type_vocab_size", "counts_positions", "computed",
        "num_kv_heads", "head_dim", "value_head_dim", "key_layers", "state_layers", "state_sizes", "num_parameters",
        "flops_per_token", "attention_layers", "num_heads", "num_patches", "output_sizes", "min_image_size",
        "max_detections", "depth_resample", "image_processor", "image_token_id", "image_prompt_id", "image_before",
        "image_after", "image_place", "image_text", "prompt_end", "prompt_special_tokens",
        "image_before_tiles", "image_before_thumbnail", "image_tiling", "min_tiles", "max_tiles", "image_longest_edge",
        "min_samples", "min_positions", "samples_per_position", "prompt_replaces_start", "embedding_size", "pad_texts",
        "label_probabilities", "grid_positions", "image_layers",
    )  # fmt: skip
    task: Literal[
        "feature-extraction",
        "sentence-embedding",
        "fill-mask",
        "text-classification",
        "token-classification",
        "question-answering",
        "multiple-choice",
        "text-generation",
        "text2text-generation",
        "image-to-text",
        "image-text-to-text",
        "image-classification",
        "image-feature-extraction",
        "object-detection",
        "semantic-segmentation",
        "depth-estimation",
        "zero-shot-image-classification",
        "ctc-speech-recognition",
        "audio-classification",
    ] = "text-generation"
    """Task, which determines the class."""
    model_class: str = "GPTNeoXForCausalLM"
    """The class in transformers."""
    original: dict[str, Any] = field(default_factory=lambda: dict(_GPT_NEOX), hash=False)
    """The original configuration, config.json, without what other fields hold."""
    attention: Literal["zoo", "eager"] = "zoo"
    """The implementation of attention: :func:`zoo.nn.scaled_dot_product_attention`, or the class's own if it has no
    interface for others."""
    vocab_size: int | None = 260
    """Size of the vocabulary; None for a class that reads images, or gives classes of sound."""
    type_vocab_size: int = 0
    """Number of segment types; 0 if the class takes none. With one type, graphs have no such input."""
    max_seq_len: int | None = 128
    """Maximum input length, in tokens; None for no limit."""
    hidden_size: int | None = 64
    """Width of the last hidden states, of the encoder if there is one; None for an image model that does not say."""
    counts_positions: bool = True
    """Whether a decoder takes positions, which are counted without padding; otherwise it computes them itself. False
    for other tasks, whose padding is on the right."""
    reads_padding: str = ""
    """Why the answers of a class for a text or a sound depend on its padding, if they do by design. Graphs then have no
    mask, and the texts or sounds of a batch are of one length."""
    computed: tuple[str, ...] = ("gpt_neox.rotary_emb.inv_freq",)
    """Tensors that the class computes at construction and does not store in its checkpoints, such as the frequencies of
    rotary positions; ``*`` stands for the number of a layer."""
    num_layers: int | None = 2
    """Number of layers, of the decoder if there is an encoder. None for an image model that does not say."""
    num_kv_heads: int | None = 4
    """Key-value heads of a layer, in text generation; None if no layer has any."""
    head_dim: int | None = 16
    """Width of a key, in text generation."""
    value_head_dim: int | None = None
    """Width of a value; ``head_dim`` by default."""
    key_layers: tuple[int, ...] | None = None
    """The layers with keys and values, in text generation, counted from 0; None for all layers."""
    state_layers: tuple[int, ...] = ()
    """The layers with states of a fixed size: the last inputs of a convolution, the state of a recurrence."""
    state_sizes: dict[str, Any] = field(default_factory=dict, hash=False)
    """The states of such a layer by name, each with its sizes after the batch."""
    num_parameters: int = 133_376
    """Number of parameters."""
    flops_per_token: int = 295_424
    """Forward FLOPs per token of a text of ``max_seq_len`` tokens, with its share of the source, or per position of a
    second of sound, or for an image."""
    attention_layers: int = 2
    """Number of layers whose attention weights can be recorded."""
    num_heads: int = 4
    """Heads of these layers."""
    num_patches: int | None = None
    """Positions of an image in these layers, or in the states of an encoder, with those of special tokens. In a text,
    the number of its tokens."""
    embedding_size: int | None = None
    """Width of the vectors of images and texts, of a class that compares them."""
    pad_texts: bool = False
    """Whether the texts of such a class are padded to ``max_seq_len`` tokens, which are all read."""
    label_probabilities: Literal["softmax", "sigmoid"] = "softmax"
    """How the logits of an image become probabilities of labels: all together, or each on its own."""
    image_token_id: int | None = None
    """Token in the place of each position of an image in a text."""
    grid_positions: bool = False
    """Whether the features of an image have positions by row and column in its text, as those of Qwen2-VL have."""
    image_layers: int = 0
    """Number of first layers of the decoder after which further features of an image are added, as in Qwen3-VL."""
    image_prompt_id: int | None = None
    """Token of a prompt in whose place those of the image are; ``image_token_id`` by default."""
    image_before: tuple[int, ...] = ()
    """Tokens before those of an image."""
    image_after: tuple[int, ...] = ()
    """Tokens after those of an image."""
    image_place: str | None = None
    """Text that stands for an image in a prompt, in whose place there is ``image_text`` before the prompt is encoded;
    None if the tokens of an image are put among those of the prompt."""
    image_text: str | None = None
    """Text that replaces ``image_place``; its image token is repeated for each feature of the image."""
    prompt_end: str = ""
    """Text after such a prompt."""
    prompt_special_tokens: bool = True
    """Whether the tokenizer puts special tokens around such a prompt."""
    image_before_tiles: tuple[tuple[int, ...], ...] = ()
    """Tokens before those of each tile but the last, in place of ``image_before``, if there are several; of an image
    of the most rows and columns for ``longest_edge``."""
    image_before_thumbnail: tuple[int, ...] = ()
    """Tokens before those of the last of several tiles, which is the whole image."""
    output_sizes: dict[str, Any] = field(default_factory=dict, hash=False)
    """The outputs for images but those of a classifier, each with its sizes after the batch; ``height`` and ``width``
    are those of the image."""
    max_detections: int | None = None
    """Objects that a detector finds: see :func:`zoo.detection.find_objects`, also for its ``problem_type``."""
    depth_resample: Literal["bilinear", "bicubic", "bilinear_corners"] | None = None
    """How depths are interpolated to the size of the original image: see :func:`zoo.interpolation.interpolate`."""
    image_processor: str | None = None
    """The class in transformers that turns outputs into answers, which publishing names."""
    image_size: int | tuple[int, ...] | None = None
    """Height and width of images, in pixels, one number for squares; None for a class that reads texts."""
    num_channels: int | None = None
    """Channels of images, 3 for RGB."""
    image_mean: tuple[float, ...] | None = None
    """Mean that is subtracted from each channel: see :class:`zoo.ImagePreparation`, as for the following."""
    image_std: tuple[float, ...] | None = None
    """Standard deviation that each channel is divided by."""
    image_resample: Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"] | None = None
    """Filter with which images are resized."""
    image_resize: (
        Literal["stretch", "shortest_edge", "pad", "turn_and_pad", "edges", "fit", "round_down", "area"] | None
    ) = None
    """Whether images are stretched, or keep their proportions and are cut or padded, or have many sizes."""
    image_multiple: int | None = None
    """The number of which the sides of images are multiples that have many sizes."""
    min_image_size: int = 1
    """Sides of the smallest image that a class reads, in pixels, if images have many sizes."""
    image_crop: float | None = None
    """Part of a resized image that is kept, as a fraction of its shorter side."""
    image_margin: Literal["down", "even"] | None = None
    """How half of a margin with an odd number of pixels is rounded."""
    image_transparency: Literal["ignored", "white"] | None = None
    """Treatment of the transparent colour of an image: see ``image_transparency`` of :class:`zoo.ImagePreparation`."""
    image_tiling: Literal["aspect_ratio", "longest_edge"] | None = None
    """How images in texts are cut into tiles of ``image_size``, before the whole image as a last tile: see
    :class:`zoo.ImageTiling`; None if they are not cut."""
    min_tiles: int | None = None
    """Smallest number of tiles, without the last."""
    max_tiles: int | None = None
    """Largest number of tiles, without the last."""
    image_longest_edge: int | None = None
    """Pixels of the longer side of an image before it is cut by ``longest_edge``."""
    spectrogram: SpectrogramKind | None = None
    """The spectrogram that a class for sound reads: see ``zoo.audio.Spectrogram``; None for one that reads samples."""
    num_mel_bins: int | None = None
    """Its mel bins."""
    num_frames: int | None = None
    """Its frames, of 10 ms each."""
    feature_mean: float = 0.0
    """Mean that is subtracted from it."""
    feature_std: float = 1.0
    """Standard deviation that it is then divided by."""
    sampling_rate: int | None = None
    """Samples per second of sound; None for a class that reads none."""
    normalize_sound: bool = False
    """Whether the samples of a sound are scaled to zero mean and unit variance."""
    min_samples: int | None = None
    """Samples of the shortest sound."""
    min_positions: int = 1
    """Positions of the shortest sound."""
    samples_per_position: int | None = None
    """Samples that a sound has more for each further position."""
    bos_token_id: int | None = None
    """Token that begins a text."""
    eos_token_id: int | tuple[int, ...] | None = None
    """Tokens that end a text."""
    pad_token_id: int | None = None
    """Token that pads shorter texts; the mask excludes it. In speech recognition, the blank of CTC."""
    decoder_start_token_id: int | None = None
    """First token of every target of an encoder-decoder."""
    prompt_replaces_start: bool = False
    """Whether a prompt of the decoder takes the place of ``decoder_start_token_id``, as in Donut. Others follow it."""
    mask_token_id: int | None = None
    """Token in the place of those to predict, in masked language modelling."""

    def __post_init__(self) -> None:
        self.check_classes(head=self.task in _CLASSIFIED)
        self.check_embedding()
        if self.task == "object-detection":  # a softmax over one class and that of no object is possible
            self.default("problem_type", "single_label_classification")
        if self.task in GENERATION_TASKS and self.num_key_layers and not (self.num_kv_heads and self.head_dim):
            raise ValueError(f"{self.task} needs num_kv_heads and head_dim")
        if self.image_resize == "area":
            if self.task != "image-text-to-text":
                raise ValueError(f"image_resize 'area' is for the task 'image-text-to-text', not {self.task}")
        elif self.has_free_images and self.task not in DENSE_TASKS:
            raise ValueError(f"image_resize {self.image_resize!r} is for answers per object or pixel, not {self.task}")
        if self.tiling is not None:
            images = self.images()
            if self.task != "image-text-to-text" or (images.image_resize, images.image_crop) != ("stretch", 1):
                raise ValueError("image_tiling is for the task 'image-text-to-text', and images that are stretched")
        if self.task in READS_IMAGES:
            for name, value in self.images().to_dict().items():
                self.default(name, value)
        if self.task in SOUND_TASKS:
            self.default("sampling_rate", SAMPLING_RATE)
            self.require_positive("sampling_rate", "min_samples", "min_positions", "samples_per_position")
            self.require_positive("num_mel_bins", "num_frames", "feature_std")
            if self.spectrogram and not (self.num_mel_bins and self.num_frames):
                raise ValueError("spectrogram needs num_mel_bins and num_frames")
        elif self.task not in IMAGE_TASKS and not (self.vocab_size and self.hidden_size and self.num_layers):
            raise ValueError(f"{self.task} needs vocab_size, hidden_size and num_layers")
        self.require_positive("vocab_size", "max_seq_len", "hidden_size", "num_layers", "num_kv_heads", "head_dim")
        if not isinstance(self.original.get("model_type"), str):
            raise ValueError("original has no model_type")
        for key, value in _counts(self.original):
            self.check_field("num_layers", value, f"original.{key}")

    @property
    def num_key_layers(self) -> int:
        """Number of layers with keys and values."""
        return (self.num_layers or 0) if self.key_layers is None else len(self.key_layers)

    @property
    def video_token_id(self) -> int | None:
        """The token in the place of a video, which is not supported, in a prompt; None if the class has none."""
        names = ("video_token_id", "video_token_index")
        return next((value for name in names if isinstance(value := self.original.get(name), int)), None)

    @property
    def token_blocks(self) -> Literal["image", "prompt"] | None:
        """The tokens of a prompt with an image that see each other, later ones included; None if all are causal."""
        return TOKEN_BLOCKS.get(self.original["model_type"]) if self.task == "image-text-to-text" else None

    def images(self) -> ImagePreparation:
        """Return how images are prepared. Raises ``ValueError`` if the fields contradict each other."""
        names = (item.name for item in fields(ImagePreparation))
        images = ImagePreparation(**{name: value for name in names if (value := getattr(self, name)) is not None})
        images.check_images()
        return images

    @property
    def has_free_images(self) -> bool:
        """Whether images have many sizes."""
        return self.images().has_many_sizes

    @property
    def tiling(self) -> ImageTiling | None:
        """How images are cut into tiles; None if they are not."""
        return ImageTiling.of(lambda name: getattr(self, name))

    @property
    def image_sides(self) -> tuple[int, int]:
        """Height and width of images, in pixels; of one that is as large as the preparation allows if any may be.

        With ``area``, it is a square, whose features also fit in a text.
        """
        if self.image_size is None or self.image_resize != "area":
            return (0, 0) if self.image_size is None else self.images().sides
        multiple = self.image_multiple or 1
        features = self.images().sides[1] // multiple**2
        side = multiple * max(1, math.isqrt(min(features, self.max_seq_len or features)))
        return side, side

    def cost(self) -> Cost:
        """Return what was counted when the class was inspected."""
        return Cost(self.num_parameters, self.flops_per_token)


def _counts(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield the numbers of layers in a configuration and its sections."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _counts(value, f"{prefix}{key}.")
        elif type(value) is int and _COUNT.fullmatch(key):
            yield f"{prefix}{key}", value
