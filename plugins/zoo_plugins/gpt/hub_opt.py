"""OPT checkpoints in the hub's layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo.checkpoints import ACTIVATIONS, Checkpoint, Field, Layout, Rule
from zoo_plugins.bert.sentence import PROJECTIONS, sentence_encoder
from zoo_plugins.gpt.config import GPTConfig
from zoo_plugins.gpt.hub import DECODER, NO_TOKENS

__all__ = ["OPT"]

_OFFSET = 2
"""Rows of the position embedding before that of the first token."""
_EPS = 1e-5
"""Epsilon of the norms, which config.json does not name."""


def _derive(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    biases = checkpoint.config.get("enable_bias", True)
    return {
        "position_offset": _OFFSET,
        "norm_eps": _EPS,
        "attention_bias": biases,
        "attention_output_bias": biases,
        "mlp_bias": biases,
        **sentence_encoder(checkpoint),
    }


def _restore(c: GPTConfig) -> Mapping[str, Any]:
    return {"enable_bias": c.mlp_bias}


OPT = Layout(
    classes={
        "OPTForCausalLM": "text-generation",
        "OPTForSequenceClassification": "text-classification",
        "OPTModel": "sentence-embedding",
    },
    fields=(
        Field("vocab_size", default=50272),
        Field("max_position_embeddings", "max_seq_len", default=2048),
        Field("hidden_size", default=768),
        Field("word_embed_proj_dim", "embedding_size", default=None),
        Field("num_hidden_layers", "num_layers", default=12),
        Field("num_attention_heads", "num_heads", default=12),
        Field("ffn_dim", "intermediate_size", default=3072),
        Field("activation_function", "activation", default="relu", values=ACTIVATIONS),
        Field("do_layer_norm_before", "norm_first", default=True),
        Field("dropout", default=0.1),
        Field("tie_word_embeddings", "tie_embeddings", default=True),
    ),
    rules=(
        Rule("token_embedding", "model.decoder.embed_tokens"),
        Rule("position_embedding", "model.decoder.embed_positions"),
        Rule("widen", "model.decoder.project_in"),
        Rule("narrow", "model.decoder.project_out"),
        Rule("blocks.*.norm_1", "model.decoder.layers.*.self_attn_layer_norm"),
        *(
            Rule(f"blocks.*.attention.{ours}", f"model.decoder.layers.*.self_attn.{theirs}")
            for ours, theirs in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"), ("output", "out_proj"))
        ),
        Rule("blocks.*.norm_2", "model.decoder.layers.*.final_layer_norm"),
        Rule("blocks.*.mlp.up", "model.decoder.layers.*.fc1"),
        Rule("blocks.*.mlp.down", "model.decoder.layers.*.fc2"),
        Rule("norm", "model.decoder.final_layer_norm"),
        Rule("head", "lm_head"),
        Rule("classifier", "score"),
        PROJECTIONS,
    ),
    prefix="model.",
    **DECODER,
    required_values={"_remove_final_layer_norm": False, "layer_norm_elementwise_affine": True},
    ignored_keys=("activation_dropout", "attention_dropout", "enable_bias", "init_std", "layerdrop", "prefix"),
    read_extra=_derive,
    write_extra=_restore,
    constant={"model_type": "opt", **NO_TOKENS},
    tokenizer="GPT2Tokenizer",
)
"""``model_type`` opt."""
