"""wav2vec 2.0 and HuBERT checkpoints in the hub's layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo import UsageError
from zoo.checkpoints import ACTIVATIONS, Checkpoint, Field, Layout, Rule
from zoo.spectrogram import SAMPLING_RATE
from zoo_plugins.wav2vec2.config import Wav2Vec2Config

__all__ = ["HUBERT", "WAV2VEC2"]

_PREPROCESSOR = "preprocessor_config.json"
_EXTRACTOR = {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "feature_size": 1, "padding_value": 0.0}
_TRAINING = (
    "adapter_kernel_size", "adapter_stride", "apply_spec_augment", "codevector_dim", "contrastive_logits_temperature",
    "ctc_loss_reduction", "ctc_zero_infinity", "diversity_loss_weight", "do_normalize", "feature_layer_norm",
    "freeze_feat_extract_train", "layerdrop", "mask_*", "no_mask_*", "num_adapter_layers", "num_codevector*",
    "num_feat_extract_layers", "num_negatives", "output_hidden_size", "proj_codevector_dim", "tdnn_*",
    "xvector_output_dim",
)  # fmt: skip
"""Keys that matter in training alone, or describe parts that are refused."""


def _rules(name: str) -> tuple[Rule, ...]:
    """Return the rules of a family, given its name of the base model."""
    layer = f"{name}.encoder.layers.*"
    names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}
    return (
        Rule("features.convolutions.*", f"{name}.feature_extractor.conv_layers.*.conv"),
        Rule("features.norms.*", f"{name}.feature_extractor.conv_layers.*.layer_norm"),
        Rule("projection_norm", f"{name}.feature_projection.layer_norm"),
        Rule("projection", f"{name}.feature_projection.projection"),
        Rule("positions.length", f"{name}.encoder.pos_conv_embed.conv.parametrizations.weight.original0"),
        Rule("positions.direction", f"{name}.encoder.pos_conv_embed.conv.parametrizations.weight.original1"),
        Rule("positions.bias", f"{name}.encoder.pos_conv_embed.conv.bias"),
        Rule("norm", f"{name}.encoder.layer_norm"),
        *(Rule(f"blocks.*.attention.{ours}", f"{layer}.attention.{theirs}") for ours, theirs in names.items()),
        Rule("blocks.*.residual_1.norm", f"{layer}.layer_norm"),
        Rule("blocks.*.mlp.up", f"{layer}.feed_forward.intermediate_dense"),
        Rule("blocks.*.mlp.down", f"{layer}.feed_forward.output_dense"),
        Rule("blocks.*.residual_2.norm", f"{layer}.final_layer_norm"),
        Rule("head", "lm_head"),
        Rule("projector", "projector"),
        Rule("classifier", "classifier"),
    )


def _read(checkpoint: Checkpoint, _: dict[str, Any]) -> Mapping[str, Any]:
    """Read how sound is prepared from the description of the feature extractor."""
    said, where = checkpoint.json(_PREPROCESSOR), checkpoint.path / _PREPROCESSOR
    for key, value in _EXTRACTOR.items():
        if said.get(key, value) != value:
            raise UsageError(f"{key} {said[key]!r} is not supported, only {value!r}", where)
    rate = said.get("sampling_rate", SAMPLING_RATE)
    if type(rate) is not int or rate < 1:
        raise UsageError(f"sampling_rate must be a positive number of samples per second, got {rate!r:.40}", where)
    normalize = Wav2Vec2Config.check_field("normalize_sound", said.get("do_normalize", True), where)
    return {"sampling_rate": rate, "normalize_sound": normalize}


def _files(c: Wav2Vec2Config) -> Mapping[str, Any]:
    """Return the description of the feature extractor for transformers."""
    described = {
        **_EXTRACTOR,
        "do_normalize": c.normalize_sound,
        "padding_side": "right",
        "return_attention_mask": c.has_mask,
        "sampling_rate": c.sampling_rate,
    }
    return {_PREPROCESSOR: described}


def _notes(c: Wav2Vec2Config) -> tuple[str, ...]:
    """Return the limit of a norm that spans the sound."""
    if c.has_mask:
        return ()
    return ("without a mask of padding, as the norm of its first convolution spans the sound: the sounds of a batch are"
            " of one length",)  # fmt: skip


def _family(name: str, title: str, *, fields: tuple[Field, ...] = (), **required: Any) -> Layout:
    """Return the layout of a family, given its ``model_type``, and the beginning of the names of its classes.

    ``required`` are keys of config.json with their only supported values.
    """
    return Layout(
        classes={
            f"{title}ForCTC": "ctc-speech-recognition",
            f"{title}ForSequenceClassification": "audio-classification",
        },
        fields=(
            Field("vocab_size", default=32),
            Field("conv_dim", "convolution_sizes", default=Wav2Vec2Config.convolution_sizes),
            Field("conv_kernel", "convolution_kernels", default=Wav2Vec2Config.convolution_kernels),
            Field("conv_stride", "convolution_strides", default=Wav2Vec2Config.convolution_strides),
            Field("conv_bias", "convolution_bias", default=False),
            Field("feat_extract_norm", "convolution_norm", default="group"),
            Field("feat_extract_activation", "convolution_activation", default="gelu", values=ACTIVATIONS),
            Field("hidden_size", default=768),
            Field("num_hidden_layers", "num_layers", default=12),
            Field("num_attention_heads", "num_heads", default=12),
            Field("intermediate_size", default=3072),
            Field("hidden_act", "activation", default="gelu", values=ACTIVATIONS),
            Field("num_conv_pos_embeddings", "position_kernel", default=128),
            Field("num_conv_pos_embedding_groups", "position_groups", default=16),
            Field("do_stable_layer_norm", "norm_first", default=False),
            Field("layer_norm_eps", "norm_eps", default=1e-5),
            Field("classifier_proj_size", "classifier_size", default=256),
            Field("hidden_dropout", "dropout", default=0.1),
            *fields,
        ),
        rules=_rules(name),
        prefix=f"{name}.",
        left_out=(f"{name}.masked_spec_embed", "masked_spec_embed"),
        renamed=(
            (r"pos_conv_embed\.conv\.weight_g$", "pos_conv_embed.conv.parametrizations.weight.original0"),
            (r"pos_conv_embed\.conv\.weight_v$", "pos_conv_embed.conv.parametrizations.weight.original1"),
        ),
        required_values={"use_weighted_layer_sum": False, **required},
        ignored_keys=_TRAINING,
        read_extra=_read,
        files=_files,
        notes=_notes,
        constant={"model_type": name},
        tokenizer="Wav2Vec2CTCTokenizer",
    )


WAV2VEC2 = _family("wav2vec2", "Wav2Vec2", add_adapter=False, adapter_attn_dim=None)
"""``model_type`` wav2vec2."""
HUBERT = _family(
    "hubert",
    "Hubert",
    fields=(Field("feat_proj_layer_norm", "projection_norm", default=True),),
    conv_pos_batch_norm=False,
)
"""``model_type`` hubert."""
