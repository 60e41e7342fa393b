"""BLOOM and MPT checkpoints in the hub's layout: decoders with linear biases of scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from zoo.checkpoints import Checkpoint, Field, Layout, Rule
from zoo_plugins.bert.sentence import PROJECTIONS, sentence_encoder
from zoo_plugins.llama.hub_shared import COMMON, NO_TOKENS, classes_of
from zoo_plugins.neox.config import NeoXConfig
from zoo_plugins.neox.hub_shared import QKV, read_sizes, refuse_other

__all__ = ["BLOOM", "MPT"]

_OLD_NAMES = {"n_embed": "hidden_size", "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}
_COMMON: dict[str, Any] = {**COMMON, "prefix": "transformer.", "ignored_tensors": (), "notes": None}


class _Bloom(Layout):
    """The layout of BLOOM, whose class has a gelu of its own."""

    def prepare_original(self, original: nn.Module) -> None:
        """Replace the gelu by torch's: its square root of 2 / pi has 8 digits, which float64 would show."""
        for module in original.modules():
            if hasattr(module, "gelu_impl"):
                module.gelu_impl = nn.GELU("tanh")


def _derive_bloom(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    refuse_other(checkpoint, apply_residual_connection_post_layernorm=False, n_inner=None, slow_but_exact=False)
    sizes = read_sizes(checkpoint, values, _OLD_NAMES)
    return {
        **sizes,
        "intermediate_size": 4 * sizes["hidden_size"],
        "activation": "gelu_tanh",
        "parallel": False,
        "positions": "alibi",
        "embedding_norm": True,
        **sentence_encoder(checkpoint),
    }


BLOOM = _Bloom(
    classes=classes_of("Bloom"),
    fields=(
        Field("vocab_size", default=250880),
        Field("seq_length", "max_seq_len", default=2048),
        Field("hidden_size", default=64),
        Field("n_layer", "num_layers", default=2),
        Field("n_head", "num_heads", default=8),
        Field("layer_norm_epsilon", "norm_eps", default=1e-5),
        Field("attention_dropout", "dropout", default=0.0),
        Field("hidden_dropout", "residual_dropout", default=0.0),
        Field("tie_word_embeddings", "tie_embeddings", default=True),
    ),
    rules=lambda c: (
        Rule("token_embedding", "transformer.word_embeddings"),
        Rule("embedding_norm", "transformer.word_embeddings_layernorm"),
        Rule("blocks.*.norm_1", "transformer.h.*.input_layernorm"),
        Rule(QKV, "transformer.h.*.self_attention.query_key_value", interleaved=c.num_heads),
        Rule("blocks.*.attention.output", "transformer.h.*.self_attention.dense"),
        Rule("blocks.*.norm_2", "transformer.h.*.post_attention_layernorm"),
        Rule("blocks.*.mlp.up", "transformer.h.*.mlp.dense_h_to_4h"),
        Rule("blocks.*.mlp.down", "transformer.h.*.mlp.dense_4h_to_h"),
        Rule("norm", "transformer.ln_f"),
        Rule("head", "lm_head"),
        Rule("classifier", "score"),
        PROJECTIONS,
    ),
    ignored_keys=(
        *_OLD_NAMES,
        "apply_residual_connection_post_layernorm",
        "attention_softmax_in_fp32",
        "bias_dropout_fusion",
        "masked_softmax_fusion",
        "n_inner",
        "offset_alibi",
        "skip_bias_add",
        "skip_bias_add_qkv",
        "slow_but_exact",
    ),
    read_extra=_derive_bloom,
    constant={"model_type": "bloom", **NO_TOKENS},
    **_COMMON,
)
"""``model_type`` bloom, also used by BLOOMZ."""

_ATTENTION = "attn_config"
"""The section of MPT's settings of attention."""
_SUPPORTED = {"expansion_ratio": 4, "logit_scale": None, "no_bias": True, "norm_type": "low_precision_layernorm"}
_SUPPORTED_ATTENTION = {
    "alibi": True,
    "alibi_bias_max": 8,
    "attn_type": "multihead_attention",
    "attn_uses_sequence_id": False,
    "clip_qkv": None,
    "prefix_lm": False,
    "qk_ln": False,
}
"""Settings that transformers ignores at other values, ``clip_qkv`` excepted, and MosaicML's own code does not."""


def _derive_mpt(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    refuse_other(checkpoint, **_SUPPORTED)
    refuse_other(checkpoint, MPT.section(checkpoint, _ATTENTION), **_SUPPORTED_ATTENTION)
    return {
        "intermediate_size": 4 * NeoXConfig.check_field("hidden_size", values["hidden_size"], checkpoint.config_file),
        "residual_dropout": values["dropout"],
        "attention_bias": False,
        "attention_output_bias": False,
        "mlp_bias": False,
        "norm_bias": False,
        "parallel": False,
        "positions": "alibi",
        **sentence_encoder(checkpoint),
    }


MPT = Layout(
    classes={**classes_of("Mpt"), "MPTForCausalLM": "text-generation"},
    aliases=("MPTForCausalLM",),
    fields=(
        Field("vocab_size", default=50368),
        Field("max_seq_len", default=2048),
        Field("d_model", "hidden_size", default=2048),
        Field("n_layers", "num_layers", default=24),
        Field("n_heads", "num_heads", default=16),
        Field("layer_norm_epsilon", "norm_eps", default=1e-5),
        Field("tie_word_embeddings", "tie_embeddings", default=True),
    ),
    sections={
        _ATTENTION: (
            Field("attn_pdrop", "dropout", default=0.0),
            Field("softmax_scale", "attention_scale", default=None),
        )
    },
    rules=(
        Rule("token_embedding", "transformer.wte"),
        Rule("blocks.*.norm_1", "transformer.blocks.*.norm_1"),
        Rule(QKV, "transformer.blocks.*.attn.Wqkv"),
        Rule("blocks.*.attention.output", "transformer.blocks.*.attn.out_proj"),
        Rule("blocks.*.norm_2", "transformer.blocks.*.norm_2"),
        Rule("blocks.*.mlp.up", "transformer.blocks.*.ffn.up_proj"),
        Rule("blocks.*.mlp.down", "transformer.blocks.*.ffn.down_proj"),
        Rule("norm", "transformer.norm_f"),
        Rule("head", "lm_head"),
        Rule("classifier", "score"),
        PROJECTIONS,
    ),
    ignored_keys=(
        *_SUPPORTED,
        *_SUPPORTED_ATTENTION,
        "attn_impl",
        "embedding_fraction",
        "init_config",
        "init_device",
        "learned_pos_emb",
        "verbose",
    ),
    read_extra=_derive_mpt,
    # transformers has this probability as an integer
    write_extra=lambda c: {_ATTENTION: {"attn_pdrop": c.dropout or 0}},
    constant={"model_type": "mpt", **NO_TOKENS},
    tokenizer="GPTNeoXTokenizer",
    **_COMMON,
)
"""``model_type`` mpt."""
