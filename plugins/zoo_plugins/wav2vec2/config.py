"""Configuration, graph and cost of wav2vec 2.0 and HuBERT."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from zoo import Activation, ClassifierConfig, Cost, Graph, Size, attentions, cost, floats, mask
from zoo.spectrogram import SAMPLING_RATE


@dataclass(frozen=True, kw_only=True)
class Wav2Vec2Config(ClassifierConfig):
    """Configuration of wav2vec 2.0 and HuBERT. The defaults are the base model of wav2vec 2.0."""

    replaced_modules: ClassVar[tuple[str, ...]] = ("head", "projector", "classifier")
    task: Literal["ctc-speech-recognition", "audio-classification"] = "ctc-speech-recognition"
    """Logits of a token at each position, or of the classes of a sound."""
    vocab_size: int = 32
    """Number of tokens, the blank included."""
    sampling_rate: int = SAMPLING_RATE
    """Samples per second of sound."""
    normalize_sound: bool = True
    """Whether the samples of a sound are scaled to zero mean and unit variance."""
    convolution_sizes: tuple[int, ...] = (512, 512, 512, 512, 512, 512, 512)
    """Channels after each convolution of the samples."""
    convolution_kernels: tuple[int, ...] = (10, 3, 3, 3, 3, 2, 2)
    """Size of the kernel of each."""
    convolution_strides: tuple[int, ...] = (5, 2, 2, 2, 2, 2, 2)
    """Stride of each."""
    convolution_bias: bool = False
    """Whether they have biases."""
    convolution_norm: Literal["group", "layer"] = "group"
    """Norms of the convolutions: each channel over the whole sound, after the first alone, or the channels of each
    position, after all. The first depends on the length of a sound, so it allows no padding."""
    convolution_activation: Activation = "gelu"
    """Activation of these convolutions and of that of the positions."""
    projection_norm: bool = True
    """Whether the channels are normalised before their projection to ``hidden_size``."""
    hidden_size: int = 768
    """Width of the encoder."""
    num_layers: int = 12
    """Number of blocks."""
    num_heads: int = 12
    """Heads per block."""
    intermediate_size: int = 3072
    """Hidden width of the feed-forward network."""
    activation: Activation = "gelu"
    """Activation of the feed-forward network."""
    position_kernel: int = 128
    """Size of the kernel of the convolution that encodes positions."""
    position_groups: int = 16
    """Groups of its channels."""
    norm_first: bool = False
    """Whether to normalise before each sub-layer and once at the end, instead of after each and once at the beginning
    (the large models)."""
    norm_eps: float = 1e-5
    """Added to the variance in LayerNorm."""
    classifier_size: int = 256
    """Width of the projection that audio-classification averages over the positions."""
    dropout: float = 0.1
    """Dropout on features, attention weights and residuals, during training."""
    pad_token_id: int | None = 0
    """The blank of CTC."""

    def __post_init__(self) -> None:
        self.check_classes(head=self.task == "audio-classification")
        self.require_positive(
            "vocab_size", "sampling_rate", "hidden_size", "num_layers", "num_heads", "intermediate_size",
            "position_kernel", "position_groups", "norm_eps", "classifier_size",
        )  # fmt: skip
        self.require_probability("dropout")
        self.require_divisible("hidden_size", "num_heads")
        self.require_divisible("hidden_size", "position_groups")
        lists = ("convolution_sizes", "convolution_kernels", "convolution_strides")
        lengths = [len(getattr(self, name)) for name in lists]
        if not lengths[0] or len(set(lengths)) > 1:
            raise ValueError(f"{', '.join(lists)} must have as many numbers as each other, got {lengths}")
        for name in lists:
            if min(getattr(self, name)) < 1:
                raise ValueError(f"{name} must be positive numbers, got {getattr(self, name)}")
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(f"pad_token_id {self.pad_token_id} lies outside vocab_size {self.vocab_size}")

    @property
    def has_mask(self) -> bool:
        """Whether sounds of different lengths may share a batch."""
        return self.convolution_norm == "layer"

    @property
    def step(self) -> int:
        """Samples that a sound has more for each further position."""
        return math.prod(self.convolution_strides)

    @property
    def min_samples(self) -> int:
        """Samples of the shortest sound, which has one position."""
        samples = 1
        for kernel, stride in zip(reversed(self.convolution_kernels), reversed(self.convolution_strides), strict=True):
            samples = (samples - 1) * stride + kernel
        return samples

    def graphs(self) -> tuple[Graph, ...]:
        """Declare one graph for samples, whose convolutions make a position of several samples."""
        unused = self.min_samples - self.step
        positions = f"(samples {'-' if unused > 0 else '+'} {abs(unused)}) // {self.step}"
        logits = {
            "ctc-speech-recognition": floats("logits", "batch", positions, self.vocab_size),
            "audio-classification": floats("logits", "batch", self.num_classes),
        }
        masks = (mask("attention_mask", length="samples", padding="right"),) if self.has_mask else ()
        return (
            Graph(
                inputs=(floats("input_values", "batch", "samples"), *masks),
                outputs=(logits[self.task],),
                attentions=attentions(self.num_layers, self.num_heads, queries=positions, keys=positions),
                causal=False,
                sizes={"samples": Size(min=self.min_samples)},
            ),
        )

    def cost(self) -> Cost:
        """Return the closed-form cost, per position, with attention to one second of sound."""
        hidden, last = self.hidden_size, self.convolution_sizes[-1]
        context = max(1, (self.sampling_rate - self.min_samples) // self.step + 1)
        block = (
            2 * cost.layer_norm(hidden)
            + cost.attention(hidden, self.num_heads, head_dim=hidden // self.num_heads, context=context)
            + cost.feed_forward(hidden, self.intermediate_size)
        )
        positions = cost.convolution(hidden, hidden, self.position_kernel, groups=self.position_groups)
        positions += Cost(self.position_kernel)  # of the weight norm
        total = self._convolution_cost() + (cost.layer_norm(last) if self.projection_norm else Cost())
        total += cost.linear(last, hidden) + positions + cost.layer_norm(hidden) + self.num_layers * block
        if self.task == "ctc-speech-recognition":
            return total + cost.linear(hidden, self.vocab_size)
        classifier = cost.linear(self.classifier_size, self.num_classes).parameters  # once per sound
        return total + cost.linear(hidden, self.classifier_size) + Cost(classifier)

    def _convolution_cost(self) -> Cost:
        """Return the cost of the convolutions of the samples, of which the first run several times per position."""
        total, inputs, runs = Cost(), 1, self.step
        sizes = zip(self.convolution_sizes, self.convolution_kernels, self.convolution_strides, strict=True)
        for layer, (outputs, kernel, stride) in enumerate(sizes):
            runs //= stride
            convolution = cost.convolution(inputs, outputs, kernel, bias=self.convolution_bias)
            total += Cost(convolution.parameters, runs * convolution.flops)
            if self.convolution_norm == "layer" or not layer:
                total += cost.layer_norm(outputs)
            inputs = outputs
        return total
