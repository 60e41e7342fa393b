"""Whisper checkpoints in the hub's layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zoo import UsageError
from zoo.audio import DECADES, FLOOR, HOP, SAMPLING_RATE, WINDOW
from zoo.checkpoints import ACTIVATIONS, Checkpoint, Field, Layout, Rule
from zoo_plugins.whisper.config import WhisperConfig

__all__ = ["WHISPER"]

_PREPROCESSOR = "preprocessor_config.json"
_PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}
_ATTENTIONS = {
    "encoder.*.attention": "model.encoder.layers.*.self_attn",
    "decoder.*.attention": "model.decoder.layers.*.self_attn",
    "decoder.*.cross": "model.decoder.layers.*.encoder_attn",
}
_PARTS = {
    "encoder.*.norm_1": "model.encoder.layers.*.self_attn_layer_norm",
    "encoder.*.norm_2": "model.encoder.layers.*.final_layer_norm",
    "encoder.*.mlp.up": "model.encoder.layers.*.fc1",
    "encoder.*.mlp.down": "model.encoder.layers.*.fc2",
    "decoder.*.norm_1": "model.decoder.layers.*.self_attn_layer_norm",
    "decoder.*.norm_2": "model.decoder.layers.*.encoder_attn_layer_norm",
    "decoder.*.norm_3": "model.decoder.layers.*.final_layer_norm",
    "decoder.*.mlp.up": "model.decoder.layers.*.fc1",
    "decoder.*.mlp.down": "model.decoder.layers.*.fc2",
    "convolution_1": "model.encoder.conv1",
    "convolution_2": "model.encoder.conv2",
    "encoder_positions": "model.encoder.embed_positions",
    "encoder_norm": "model.encoder.layer_norm",
    "token_embedding": "model.decoder.embed_tokens",
    "decoder_positions": "model.decoder.embed_positions",
    "decoder_norm": "model.decoder.layer_norm",
    "head": "proj_out",
}


def _check_features(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    """Raise :class:`UsageError` if the checkpoint's feature extractor computes other features than the graph."""
    said = checkpoint.json(_PREPROCESSOR)
    required = {
        "feature_size": values["num_mel_bins"],
        "sampling_rate": SAMPLING_RATE,
        "n_fft": WINDOW,
        "hop_length": HOP,
        "dither": 0.0,
        "do_normalize": False,
        "padding_value": 0.0,
    }
    for key, value in required.items():
        if said.get(key, value) != value:
            what = f"{key} {said[key]!r} is not supported, only {value!r}"
            raise UsageError(what, checkpoint.path / _PREPROCESSOR)
    return {}


def _preprocessor(c: WhisperConfig) -> Mapping[str, Any]:
    """Return the description of the features for transformers."""
    seconds, rest = divmod(c.max_samples, SAMPLING_RATE)
    return {
        _PREPROCESSOR: {
            "feature_extractor_type": "WhisperFeatureExtractor",
            "processor_class": "WhisperProcessor",
            "chunk_length": c.max_samples / SAMPLING_RATE if rest else seconds,
            "feature_size": c.num_mel_bins,
            "hop_length": HOP,
            "n_fft": WINDOW,
            "padding_side": "right",
            "padding_value": 0.0,
            "return_attention_mask": False,
            "sampling_rate": SAMPLING_RATE,
        }
    }


def _original(checkpoint: Checkpoint, config: WhisperConfig) -> nn.Module:
    """Return the model of transformers, which computes features of a waveform with ``torch.stft``.

    It takes sound of the full length only, so its table of positions is cut to that of each input.
    """
    from transformers import WhisperForConditionalGeneration
    from transformers.audio_utils import mel_filter_bank

    model: Any = WhisperForConditionalGeneration.from_pretrained(
        checkpoint.path, attn_implementation="eager", local_files_only=True
    )
    filters = torch.from_numpy(
        mel_filter_bank(
            1 + WINDOW // 2, config.num_mel_bins, 0.0, SAMPLING_RATE / 2, SAMPLING_RATE, norm="slaney",
            mel_scale="slaney",
        )
    )  # fmt: skip

    def features(waveform: torch.Tensor) -> torch.Tensor:
        real = torch.promote_types(waveform.dtype, torch.float32)
        window = torch.hann_window(WINDOW, dtype=torch.float64).to(real)
        spectrum = torch.stft(waveform.to(real), WINDOW, HOP, window=window, return_complex=True)
        log = (filters.to(real).T @ spectrum[..., :-1].abs() ** 2).clamp(min=FLOOR).log10()
        return ((log.maximum(log.amax((1, 2), keepdim=True) - DECADES) + 4) / 4).to(waveform.dtype)

    def prepare(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        waveform = kwargs.pop("waveform", None)
        if waveform is not None:
            kwargs["input_features"] = features(waveform)
        positions = kwargs["input_features"].shape[-1] // 2
        encoder = model.model.encoder
        encoder.config.max_source_positions = encoder.embed_positions.num_embeddings = positions
        return args, kwargs

    model.register_forward_pre_hook(prepare, with_kwargs=True)
    return model


WHISPER = Layout(
    classes={"WhisperForConditionalGeneration": "speech-recognition", "WhisperModel": "speech-recognition"},
    aliases=("WhisperModel",),
    fields=(
        Field("vocab_size", default=51865),
        Field("num_mel_bins", default=80),
        Field("d_model", "hidden_size", default=384),
        Field("encoder_layers", "num_layers", default=4),
        Field("decoder_layers", "num_decoder_layers", default=4),
        Field("encoder_attention_heads", "num_heads", default=6),
        Field("decoder_attention_heads", "num_decoder_heads", default=6),
        Field("encoder_ffn_dim", "intermediate_size", default=1536),
        Field("decoder_ffn_dim", "decoder_intermediate_size", default=1536),
        Field("max_source_positions", default=1500),
        Field("max_target_positions", "max_seq_len", default=448),
        Field("activation_function", "activation", default="gelu", values=ACTIVATIONS),
        Field("dropout", default=0.0),
        Field("tie_word_embeddings", "tie_embeddings", default=True),
    ),
    rules=(
        *(Rule(ours, theirs) for ours, theirs in _PARTS.items()),
        *(
            Rule(f"{ours}.{part}", f"{theirs}.{name}")
            for ours, theirs in _ATTENTIONS.items()
            for part, name in _PROJECTIONS.items()
        ),
    ),
    prefix="model.",
    required_values={"scale_embedding": False},
    ignored_keys=(
        "*_layerdrop", "activation_dropout", "apply_spec_augment", "attention_dropout", "classifier_proj_size",
        "init_std", "lang_ids", "mask_feature_*", "mask_time_*", "median_filter_width", "num_hidden_layers",
        "use_weighted_layer_sum",
    ),
    read_extra=_check_features,
    files=_preprocessor,
    original=_original,
    constant={"model_type": "whisper", "is_encoder_decoder": True},
    tokenizer="WhisperTokenizer",
)  # fmt: skip
"""``model_type`` whisper."""
