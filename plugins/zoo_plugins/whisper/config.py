"""Configuration, graphs and cost of Whisper."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Literal

from zoo import Activation, Config, Cost, Graph, KeyValues, Size, attentions, cost, floats, mask, token_ids
from zoo.spectrogram import HOP, WINDOW

__all__ = ["ATTENTION_BIASES", "WhisperConfig"]

ATTENTION_BIASES = (True, False, True)
"""Whether the query, key and value projections have biases. The output projection has one."""
_STRIDE = 2
"""Frames per position of the encoder."""


@dataclass(frozen=True, kw_only=True)
class WhisperConfig(Config):
    """Configuration of Whisper. The defaults are the tiny multilingual model, with 38M parameters."""

    task: Literal["speech-recognition"] = "speech-recognition"
    """Text for sound, transcribed or translated."""
    input: Literal["waveform", "features"] = "waveform"
    """Input of the encoder's graph: samples, of which it computes the log-mel spectrogram, or the spectrogram."""
    vocab_size: int = 51865
    """Size of the vocabulary."""
    max_seq_len: int = 448
    """Longest text, with the tokens of the prompt."""
    max_source_positions: int = 1500
    """Positions of the encoder, one for every 20 ms. Shorter sound is padded with silence to this length."""
    num_mel_bins: int = 80
    """Mel bins of the spectrogram; 128 since large-v3."""
    hidden_size: int = 384
    """Width of encoder and decoder."""
    num_layers: int = 4
    """Encoder blocks."""
    num_decoder_layers: int | None = None
    """Decoder blocks; ``num_layers`` by default."""
    num_heads: int = 6
    """Heads of each attention in the encoder."""
    num_decoder_heads: int | None = None
    """Heads of each attention in the decoder; ``num_heads`` by default."""
    intermediate_size: int | None = None
    """Hidden width of the encoder's feed-forward networks; 4 x ``hidden_size`` by default."""
    decoder_intermediate_size: int | None = None
    """Hidden width of the decoder's; ``intermediate_size`` by default."""
    activation: Activation = "gelu"
    """Activation of the feed-forward networks. That of the convolutions is always the exact GELU."""
    norm_eps: float = 1e-5
    """Added to the variance in LayerNorm."""
    tie_embeddings: bool = True
    """Whether the head shares the token embedding."""
    dropout: float = 0.0
    """Dropout on embeddings, attention weights and sub-layers, during training."""
    decoder_start_token_id: int = 50258
    """First token of every text, ``<|startoftranscript|>``."""
    bos_token_id: int | None = 50257
    """The end token; the decoder begins with ``decoder_start_token_id``."""
    eos_token_id: int | tuple[int, ...] | None = 50257
    """Token that ends a text."""
    pad_token_id: int | None = 50257
    """Token that pads the rows of a batch. Outputs do not depend on masked tokens."""

    def __post_init__(self) -> None:
        self.default("intermediate_size", 4 * self.hidden_size)
        for name, source in (
            ("num_decoder_layers", "num_layers"),
            ("num_decoder_heads", "num_heads"),
            ("decoder_intermediate_size", "intermediate_size"),
        ):
            self.default(name, getattr(self, source))
        self.require_positive(
            "vocab_size", "max_seq_len", "max_source_positions", "num_mel_bins", "hidden_size", "num_layers",
            "num_decoder_layers", "num_heads", "num_decoder_heads", "intermediate_size", "decoder_intermediate_size",
            "norm_eps",
        )  # fmt: skip
        self.require_divisible("hidden_size", "num_heads")
        self.require_divisible("hidden_size", "num_decoder_heads")
        self.require_probability("dropout")
        if self.hidden_size % 2 or self.hidden_size < 4:
            raise ValueError(f"sinusoidal positions need an even hidden_size of at least 4, got {self.hidden_size}")
        if not 0 <= self.decoder_start_token_id < self.vocab_size:
            raise ValueError(
                f"decoder_start_token_id {self.decoder_start_token_id} lies outside vocab_size {self.vocab_size}"
            )

    @property
    def max_samples(self) -> int:
        """Samples of the longest sound, 30 seconds in published models."""
        return self.max_source_positions * _STRIDE * HOP

    def _key_values(self, name: str, length: str) -> KeyValues:
        heads = self.num_decoder_heads or self.num_heads
        return KeyValues(
            name=name,
            num_layers=self.num_decoder_layers or self.num_layers,
            num_heads=heads,
            head_dim=self.hidden_size // heads,
            length=length,
        )

    def graphs(self) -> tuple[Graph, ...]:
        """Declare an encoder that also projects the keys and values for cross-attention, and a decoder."""
        unit = _STRIDE * (HOP if self.input == "waveform" else 1)
        sound = Size(min=unit, max=unit * self.max_source_positions, multiple_of=unit)
        if self.input == "waveform":
            free, method, tensor = "samples", "encode", floats("waveform", "batch", "samples")
        else:
            free, method = "frames", "encode_features"
            tensor = floats("input_features", "batch", self.num_mel_bins, "frames")
        positions = f"{free} // {unit}"
        encoder = Graph(
            name="encoder",
            method=method,
            inputs=(tensor,),
            outputs=(
                floats("last_hidden_state", "batch", positions, self.hidden_size),
                self._key_values("cross_key_values", positions),
            ),
            attentions=attentions(self.num_layers, self.num_heads, queries=positions, keys=positions),
            causal=False,
            sizes={free: sound},
        )
        layers, heads = self.num_decoder_layers or self.num_layers, self.num_decoder_heads or self.num_heads
        self_attentions = attentions(layers, heads, keys="past_sequence + sequence")
        crossing = attentions(layers, heads, keys=positions, name="cross_attentions")
        decoder = Graph(
            name="decoder",
            method="decode",
            inputs=(
                token_ids("decoder_input_ids", self.vocab_size),
                mask("decoder_attention_mask", length="past_sequence + sequence"),
                self._key_values("cross_key_values", positions),
            ),
            outputs=(floats("logits", "batch", "sequence", self.vocab_size),),
            past=self._key_values("past_key_values", "past_sequence"),
            attentions=tuple(chain.from_iterable(zip(self_attentions, crossing, strict=True))),
            sizes={free: sound},
        )
        return encoder, decoder

    def cost(self) -> Cost:
        """Return the closed-form cost; FLOPs are for one position of the encoder and one token of a text."""
        hidden, frequencies = self.hidden_size, WINDOW // 2 + 1
        norm = cost.layer_norm(hidden)
        convolutions = cost.convolution(self.num_mel_bins, hidden, 3)
        convolutions += Cost(0, convolutions.flops) + cost.convolution(hidden, hidden, 3)  # the first for two frames
        spectrum = cost.linear(WINDOW, 2 * frequencies) + cost.linear(frequencies, self.num_mel_bins)
        encoder = self._attention(self.num_heads, self.max_source_positions)
        encoder += cost.feed_forward(hidden, self.intermediate_size or 0) + 2 * norm
        heads = self.num_decoder_heads or self.num_heads
        decoder = self._attention(heads, self.max_seq_len) + self._attention(heads, self.max_source_positions)
        decoder += cost.feed_forward(hidden, self.decoder_intermediate_size or 0) + 3 * norm
        total = Cost(0, _STRIDE * spectrum.flops) if self.input == "waveform" else Cost()
        total += convolutions + cost.embedding(self.max_source_positions, hidden)
        total += self.num_layers * encoder + norm
        total += cost.embedding(self.vocab_size, hidden) + cost.embedding(self.max_seq_len, hidden)
        total += (self.num_decoder_layers or self.num_layers) * decoder + norm
        return total + cost.head(hidden, self.vocab_size, tied=self.tie_embeddings)

    def _attention(self, heads: int, context: int) -> Cost:
        return cost.attention(
            self.hidden_size, heads, head_dim=self.hidden_size // heads, context=context, bias=ATTENTION_BIASES
        )
