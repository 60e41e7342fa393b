"""Checkpoints of BART, Blenderbot, mBART, M2M100, Marian and Pegasus in the hub's layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from zoo import UsageError
from zoo.checkpoints import ACTIVATIONS, Checkpoint, Field, Layout, Rule
from zoo_plugins.transformer.config import TransformerConfig
from zoo_plugins.transformer.tokens import mbart50_tokens, mbart_tokens

__all__ = ["BART", "BLENDERBOT", "M2M100", "MARIAN", "MBART", "PEGASUS"]

_TASK = "text2text-generation"
_PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}
_TABLES = {
    "encoder_embedding.token": "model.encoder.embed_tokens",
    "decoder_embedding.token": "model.decoder.embed_tokens",
    "head": "lm_head",
}


def _rules(c: TransformerConfig) -> Sequence[Rule]:
    attentions = {
        "encoder.*.attention": "model.encoder.layers.*.self_attn",
        "decoder.*.attention": "model.decoder.layers.*.self_attn",
        "decoder.*.cross": "model.decoder.layers.*.encoder_attn",
    }
    parts = {
        "residual_1.norm": "self_attn_layer_norm",
        "mlp.up": "fc1",
        "mlp.down": "fc2",
    }
    return (
        *([Rule("encoder_embedding.token", "model.shared")] if c.share_embeddings else []),
        Rule("head.bias", "final_logits_bias", leading_axes=1),
        Rule("pooler", "classification_head.dense"),
        Rule("classifier", "classification_head.out_proj"),
        *(Rule(f"{ours}.weight", f"{theirs}.weight") for ours, theirs in _TABLES.items()),
        *(
            Rule(f"{ours}.{part}", f"{theirs}.{name}")
            for ours, theirs in attentions.items()
            for part, name in _PROJECTIONS.items()
        ),
        *(
            Rule(f"{side}.*.{part}", f"model.{side}.layers.*.{name}")
            for side in ("encoder", "decoder")
            for part, name in parts.items()
        ),
        Rule("encoder.*.residual_2.norm", "model.encoder.layers.*.final_layer_norm"),
        Rule("decoder.*.residual_2.norm", "model.decoder.layers.*.encoder_attn_layer_norm"),
        Rule("decoder.*.residual_3.norm", "model.decoder.layers.*.final_layer_norm"),
        *(
            Rule(f"{side}{ours}", f"model.{side}.{theirs}")
            for side in ("encoder", "decoder")
            for ours, theirs in (
                ("_embedding.position", "embed_positions"),
                ("_embedding.norm", "layernorm_embedding"),
                ("_norm", "layer_norm"),
            )
        ),
    )


def _ignored(c: TransformerConfig) -> Sequence[str]:
    """Version tensors, sinusoids, and the shared embedding if nothing is tied to it."""
    positions = () if c.positions == "learned" else (r"(model\.)?(encoder|decoder)\.embed_positions\.weights?",)
    shared = () if c.share_embeddings else (r"model\.shared\.weight",)
    bias = () if c.task == _TASK else ("final_logits_bias",)
    return (r"(model\.)?(encoder|decoder)\.version", *positions, *shared, *bias)


_SIZE_FIELDS = {
    "max_position_embeddings": "max_seq_len",
    "d_model": "hidden_size",
    "encoder_layers": "num_layers",
    "decoder_layers": "num_decoder_layers",
    "encoder_attention_heads": "num_heads",
    "decoder_attention_heads": "num_decoder_heads",
    "encoder_ffn_dim": "intermediate_size",
    "decoder_ffn_dim": "decoder_intermediate_size",
}
_SIZES = {
    "max_position_embeddings": 1024, "d_model": 1024, "encoder_layers": 12, "decoder_layers": 12,
    "encoder_attention_heads": 16, "decoder_attention_heads": 16, "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096,
}  # fmt: skip
"""Defaults of BART."""


def _family(
    name: str,
    classes: Sequence[str],
    fixed: Mapping[str, Any],
    *,
    tokens: Mapping[str, int | None],
    required_values: Mapping[str, Any],
    tokenizer: str,
    classifier: str | None = None,
    activation: str = "gelu",
    scaled: bool = False,
    sizes: Mapping[str, int] = _SIZES,
) -> Layout:
    """The layout of one family.

    Args:
        name: ``model_type``.
        classes: classes that write its checkpoints: the model with its head, then the base model if it has one.
        fixed: zoo's fields that its implementation hard-codes.
        tokens: special tokens that the implementation uses if config.json does not name any.
        required_values: keys of old config.json files that current implementations ignore, and their only values.
        tokenizer: class of the tokenizer.
        classifier: class of the model with a classification head, if there is one.
        activation: default of ``activation_function``.
        scaled: default of ``scale_embedding``.
        sizes: defaults of the sizes, by the checkpoint's key; those of BART if not given.
    """
    from_padding = fixed["positions"] == "sinusoidal-tensor2tensor"  # counted from the number of the padding token
    fixed = {"norm_eps": 1e-5, "attention_bias": True, **fixed}

    def derive(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
        hub, files = checkpoint.config, checkpoint.tensors
        # All three tables are tied, or none; with Marian's two vocabularies, the head is tied to the second.
        apart = any(f"{prefix}encoder.embed_tokens.weight" in files for prefix in ("model.", ""))
        unstated = classifier is not None and not hub.keys() & {"id2label", "num_labels"}
        share = hub.get("share_encoder_decoder_embeddings", True) and (values["tie_embeddings"] or not apart)
        pad = hub.get("pad_token_id", tokens["pad_token_id"])
        if from_padding and (not isinstance(pad, int) or pad < 0):
            raise UsageError(f"pad_token_id {pad!r} does not say where positions begin", checkpoint.config_file)
        return {
            **fixed,
            **({"position_offset": pad + 1} if from_padding else {}),
            **({"num_classes": 3} if unstated else {}),  # unlike other families
            **{key: hub.get(key, token) for key, token in tokens.items()},
            "share_embeddings": share,
            "target_vocab_size": hub.get("decoder_vocab_size"),
            "head_bias": values["task"] == _TASK and "final_logits_bias" in files,
        }

    def restore(c: TransformerConfig) -> Mapping[str, Any]:
        if c.share_embeddings and not c.tie_embeddings:
            raise UsageError("share_embeddings without tie_embeddings cannot be represented in this format")
        pair = {"decoder_vocab_size": c.target_vocab_size, "share_encoder_decoder_embeddings": c.share_embeddings}
        # Write tokens that are None too: the implementation replaces missing keys by its defaults.
        return {key: getattr(c, key) for key in tokens} | (pair if name == "marian" else {})

    return Layout(
        classes={**dict.fromkeys(classes, _TASK), **({classifier: "text-classification"} if classifier else {})},
        aliases=classes[1:],
        fields=(
            Field("vocab_size"),
            *(Field(theirs, ours, default=sizes[theirs]) for theirs, ours in _SIZE_FIELDS.items()),
            Field("activation_function", "activation", default=activation, values=ACTIVATIONS),
            Field("scale_embedding", "scale_embeddings", default=scaled),
            Field("dropout", default=0.1),
            Field("tie_word_embeddings", "tie_embeddings", default=True),
        ),
        rules=_rules,
        prefix="model.",
        ignored_tensors=_ignored,
        required_values={"is_decoder": False, **required_values},
        ignored_keys=(
            "*_layerdrop", "activation_dropout", "attention_dropout", "classif_dropout", "classifier_dropout",
            "decoder_vocab_size", "do_blenderbot_90_layernorm", "extra_layer_norm", "extra_pos_embeddings",
            "force_bos_token_to_be_generated", "init_std", "num_hidden_layers", "share_encoder_decoder_embeddings",
        ),
        read_extra=derive,
        write_extra=restore,
        positions_skip_padding=from_padding,
        tokenizer=tokenizer,
        constant={"model_type": name, "is_encoder_decoder": True},
    )  # fmt: skip


_LEARNED = {"positions": "learned", "position_offset": 2, "embedding_norm": True}
BART = _family(
    "bart",
    ("BartForConditionalGeneration", "BartModel"),
    {**_LEARNED, "norm_first": False, "final_norm": False},
    tokens={"decoder_start_token_id": 2, "eos_token_id": 2, "pad_token_id": 1},
    tokenizer="RobertaTokenizer",
    required_values={"normalize_before": False, "add_final_layer_norm": False, "static_position_embeddings": False},
    classifier="BartForSequenceClassification",
)
"""``model_type`` bart."""
MBART = replace(
    _family(
        "mbart",
        ("MBartForConditionalGeneration",),
        {**_LEARNED, "norm_first": True, "final_norm": True},
        tokens={"decoder_start_token_id": None, "eos_token_id": 2, "pad_token_id": 1},
        tokenizer="MBartTokenizer",
        required_values={"normalize_before": True, "add_final_layer_norm": True, "static_position_embeddings": False},
    ),
    sentencepiece={"MBartTokenizer": mbart_tokens, "MBart50Tokenizer": mbart50_tokens},
)
"""``model_type`` mbart."""
M2M100 = _family(
    "m2m_100",
    ("M2M100ForConditionalGeneration", "M2M100Model"),
    {"positions": "sinusoidal-tensor2tensor", "embedding_norm": False, "norm_first": True, "final_norm": True},
    tokens={"decoder_start_token_id": 2, "eos_token_id": 2, "pad_token_id": 1},
    tokenizer="M2M100Tokenizer",
    required_values={},
    activation="relu",
    scaled=True,
)
"""``model_type`` m2m_100: M2M100 and NLLB-200."""
MARIAN = _family(
    "marian",
    ("MarianMTModel",),
    {
        "positions": "sinusoidal-halves",
        "position_offset": 0,
        "embedding_norm": False,
        "norm_first": False,
        "final_norm": False,
    },
    tokens={"decoder_start_token_id": 58100, "eos_token_id": 0, "pad_token_id": 58100},
    tokenizer="MarianTokenizer",
    required_values={"normalize_before": False, "add_final_layer_norm": False, "static_position_embeddings": True},
)
"""``model_type`` marian."""
PEGASUS = _family(
    "pegasus",
    ("PegasusForConditionalGeneration", "PegasusModel"),
    {"positions": "sinusoidal-halves", "embedding_norm": False, "norm_first": True, "final_norm": True},
    tokens={"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0},
    tokenizer="PegasusTokenizer",
    required_values={"normalize_before": True, "add_final_layer_norm": True, "static_position_embeddings": True,
                     "normalize_embedding": False, "add_bias_logits": False},
)  # fmt: skip
"""``model_type`` pegasus."""
BLENDERBOT = _family(
    "blenderbot",
    ("BlenderbotForConditionalGeneration", "BlenderbotModel"),
    {"positions": "learned", "embedding_norm": False, "norm_first": True, "final_norm": True},
    tokens={"decoder_start_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    tokenizer="BlenderbotTokenizer",
    required_values={"normalize_before": True, "add_final_layer_norm": True, "static_position_embeddings": False,
                     "normalize_embedding": False, "layernorm_variant": "prelayernorm"},
    sizes={"max_position_embeddings": 128, "d_model": 2560, "encoder_layers": 2, "decoder_layers": 24,
           "encoder_attention_heads": 32, "decoder_attention_heads": 32, "encoder_ffn_dim": 10240,
           "decoder_ffn_dim": 10240},
)  # fmt: skip
"""``model_type`` blenderbot. The smaller models of the type blenderbot-small normalise embeddings otherwise."""
