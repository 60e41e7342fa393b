"""T5 and mT5 checkpoints in the hub's layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from zoo import UsageError
from zoo.checkpoints import ACTIVATIONS, Checkpoint, Field, Layout, PieceTokens, Rule
from zoo_plugins.bert.sentence import PROJECTIONS, sentence_encoder, sentence_files
from zoo_plugins.t5.config import T5Config

__all__ = ["MT5", "T5"]

_PREFIX = "transformer."
"""Prefix of the base model in classifiers; other classes have none."""
_BARE = ("text2text-generation", "feature-extraction", "sentence-embedding")
_ATTENTION = (("query", "q"), ("key", "k"), ("value", "v"), ("output", "o"))


def _derive_with(projection: str, *, may_scale: bool) -> Callable[[Checkpoint, dict[str, Any]], Mapping[str, Any]]:
    """Return a ``read_extra`` function for a family with this default ``feed_forward_proj``."""

    def derive(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
        hub, said = checkpoint.config, checkpoint.config.get("feed_forward_proj", projection)
        gate, _, activation = str(said).rpartition("-")
        if gate == "gated" and activation == "gelu":
            activation = "gelu_new"  # the meaning of "gated-gelu" since version 1.1
        activation = str(hub.get("dense_act_fn", activation))
        if gate not in ("", "gated") or activation not in ACTIVATIONS:
            what = f"feed_forward_proj {said!r} with {activation!r} is not supported"
            raise UsageError(what, checkpoint.config_file, f"known: {', '.join(ACTIVATIONS)}")
        # Version 1.1 sets tie_word_embeddings to false to mean an unscaled head; the tensors show whether it is tied.
        called_tied = hub.get("tie_word_embeddings") is not False
        return {
            "activation": ACTIVATIONS[activation],
            "gated": hub.get("is_gated_act", gate == "gated"),
            "tie_embeddings": _has_no_head(checkpoint) if values["task"] == "text2text-generation" else called_tied,
            "scale_head": may_scale and hub.get("scale_decoder_outputs", called_tied),
            **sentence_encoder(checkpoint),
        }

    return derive


def _has_no_head(checkpoint: Checkpoint) -> bool:
    """Whether the head is tied to the embedding: absent from the file, or equal to it."""
    head, shared = (checkpoint.tensors.get(name) for name in ("lm_head.weight", "shared.weight"))
    if head is None or shared is None or head.shape != shared.shape:
        return head is None
    return head.read().equal(shared.read())


def _restore_mt5(c: T5Config) -> Mapping[str, Any]:
    activation = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == c.activation)
    name = "gelu" if c.gated and activation == "gelu_new" else activation
    return {
        "feed_forward_proj": f"gated-{name}" if c.gated else name,
        "dense_act_fn": activation,
        "is_gated_act": c.gated,
        "is_encoder_decoder": c.has_decoder,
        "tie_word_embeddings": c.tie_embeddings,
    }


def _restore(c: T5Config) -> Mapping[str, Any]:
    return {**_restore_mt5(c), "scale_decoder_outputs": c.scale_head}


def _rules(c: T5Config) -> Sequence[Rule]:
    up = (("gate", "wi_0"), ("up", "wi_1")) if c.gated else (("up", "wi"),)
    feed_forward = (*up, ("down", "wo"))
    base = (
        Rule("token_embedding", "shared"),
        Rule("token_embedding", "encoder.embed_tokens"),
        Rule("token_embedding", "decoder.embed_tokens"),
        *(
            Rule(f"{stack}_positions.table", f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias")
            for stack in ("encoder", "decoder")
        ),
        *(
            Rule(f"{ours}.{mine}", f"{theirs}.{its}")
            for ours, theirs, parts in (
                ("encoder.*.attention", "encoder.block.*.layer.0.SelfAttention", _ATTENTION),
                ("encoder.*.mlp", "encoder.block.*.layer.1.DenseReluDense", feed_forward),
                ("decoder.*.attention", "decoder.block.*.layer.0.SelfAttention", _ATTENTION),
                ("decoder.*.cross", "decoder.block.*.layer.1.EncDecAttention", _ATTENTION),
                ("decoder.*.mlp", "decoder.block.*.layer.2.DenseReluDense", feed_forward),
            )
            for mine, its in parts
        ),
        *(Rule(f"encoder.*.norm_{n + 1}", f"encoder.block.*.layer.{n}.layer_norm") for n in range(2)),
        *(Rule(f"decoder.*.norm_{n + 1}", f"decoder.block.*.layer.{n}.layer_norm") for n in range(3)),
        Rule("encoder_norm", "encoder.final_layer_norm"),
        Rule("decoder_norm", "decoder.final_layer_norm"),
    )
    return (
        *(replace(rule, theirs=_PREFIX + rule.theirs) for rule in base),
        Rule("head", "lm_head"),
        Rule("pooler", "classification_head.dense"),
        Rule("classifier", "classification_head.out_proj"),
        PROJECTIONS,
    )


def _tokens(settings: Mapping[str, Any]) -> PieceTokens:
    """Return the numbering of tokens: masked spans, last first, follow the pieces."""
    count = settings.get("extra_ids", 100)
    if not isinstance(count, int) or count < 0:
        raise UsageError(f"extra_ids must be a number of tokens, got {count!r}", "tokenizer_config.json")
    return PieceTokens(
        last=tuple(f"<extra_id_{number}>" for number in reversed(range(count))),
        single="$A </s>",
        pair="$A </s> $B </s>",
        roles={"eos": "</s>", "unk": "<unk>", "pad": "<pad>"},
    )


T5 = Layout(
    classes={
        "T5ForConditionalGeneration": "text2text-generation",
        "T5WithLMHeadModel": "text2text-generation",
        "T5EncoderModel": ("feature-extraction", "sentence-embedding"),
        "T5ForSequenceClassification": "text-classification",
    },
    prefix=_PREFIX,
    headless_tasks=_BARE,
    outputs={"sentence_embedding": ""},
    files=sentence_files,
    aliases=("T5WithLMHeadModel",),
    fields=(
        Field("vocab_size"),
        Field("n_positions", "max_seq_len", default=512),
        Field("d_model", "hidden_size"),
        Field("d_kv", "head_dim"),
        Field("d_ff", "intermediate_size"),
        Field("num_layers"),
        Field("num_decoder_layers", default=None),
        Field("num_heads"),
        Field("relative_attention_num_buckets", "relative_buckets", default=32),
        Field("relative_attention_max_distance", "relative_max_distance", default=128),
        Field("layer_norm_epsilon", "norm_eps", default=1e-6),
        Field("dropout_rate", "dropout", default=0.1),
        Field("pad_token_id", default=0),
        Field("eos_token_id", default=1),
    ),
    rules=_rules,
    ignored_tensors=(r"(transformer\.)?decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
    required_values={"is_decoder": False},
    ignored_keys=(
        "classifier_dropout", "dense_act_fn", "feed_forward_proj", "initializer_factor", "is_gated_act",
        "scale_decoder_outputs", "tie_word_embeddings",
    ),
    read_extra=_derive_with("relu", may_scale=True),
    write_extra=_restore,
    sentencepiece={"T5Tokenizer": _tokens},
    constant={"model_type": "t5"},
    tokenizer="T5Tokenizer",
)  # fmt: skip
"""``model_type`` t5: versions 1.0 and 1.1, and models trained from them."""

MT5 = replace(
    T5,
    classes={
        "MT5ForConditionalGeneration": "text2text-generation",
        "MT5EncoderModel": ("feature-extraction", "sentence-embedding"),
        "MT5ForSequenceClassification": "text-classification",
    },
    read_extra=_derive_with("gated-gelu", may_scale=False),
    write_extra=_restore_mt5,
    sentencepiece={"T5Tokenizer": _tokens, "MT5Tokenizer": _tokens},
    constant={"model_type": "mt5"},
    tokenizer="T5Tokenizer",
)
"""``model_type`` mt5, whose head is never scaled."""
