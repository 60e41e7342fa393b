"""GPT-J and CodeGen checkpoints in the hub's layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo import UsageError
from zoo.checkpoints import ACTIVATIONS, Checkpoint, Field, Layout, Rule, paired_rows
from zoo_plugins.bert.sentence import PROJECTIONS, sentence_encoder
from zoo_plugins.llama.hub_shared import COMMON, NO_TOKENS, classes_of, paired_rules
from zoo_plugins.neox.config import NeoXConfig
from zoo_plugins.neox.hub_shared import refuse_other

__all__ = ["CODEGEN", "GPTJ"]

_BLOCKS = 4
"""Number of parts of CodeGen's queries, values and keys, one for each core of the original training."""


def _derive(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    if values["rotary_dim"] is None:
        raise UsageError("rotary_dim None is not supported", checkpoint.config_file)
    refuse_other(checkpoint, tie_word_embeddings=False, rotary=True, scale_attn_weights=True)
    inner = values["intermediate_size"]
    return {
        "intermediate_size": 4 * values["hidden_size"] if inner is None else inner,
        "attention_bias": False,
        "attention_output_bias": False,
        "shared_norm": True,
        "head_bias": True,
        **sentence_encoder(checkpoint),
    }


def _derive_codegen(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    heads = NeoXConfig.check_field("num_heads", values["num_heads"], checkpoint.config_file)
    if heads % _BLOCKS:
        raise UsageError(f"n_head {heads} is not divisible by {_BLOCKS}", checkpoint.config_file)
    return _derive(checkpoint, values)


def _restore(c: NeoXConfig) -> Mapping[str, Any]:
    return {"embd_pdrop": c.residual_dropout, "tie_word_embeddings": c.tie_embeddings}


def _rows(c: NeoXConfig) -> tuple[int, ...]:
    """Return the order of CodeGen's rows: each part has the queries, values and keys of its heads."""
    heads = paired_rows(c.num_heads // _BLOCKS, c.key_size, c.turned_size)
    width = len(heads)
    part = [*heads, *range(width, 2 * width), *(2 * width + row for row in heads)]
    return tuple(3 * width * number + row for number in range(_BLOCKS) for row in part)


_FIELDS = (
    Field("n_positions", "max_seq_len", default=2048),
    Field("n_embd", "hidden_size"),
    Field("n_layer", "num_layers"),
    Field("n_head", "num_heads"),
    Field("n_inner", "intermediate_size", default=None),
    Field("rotary_dim", default=64),
    Field("activation_function", "activation", default="gelu_new", values=ACTIVATIONS),
    Field("layer_norm_epsilon", "norm_eps", default=1e-5),
    Field("attn_pdrop", "dropout", default=0.0),
    Field("resid_pdrop", "residual_dropout", default=0.0),
)
_RULES = (
    Rule("token_embedding", "transformer.wte"),
    Rule("blocks.*.norm_1", "transformer.h.*.ln_1"),
    Rule("blocks.*.attention.output", "transformer.h.*.attn.out_proj"),
    Rule("blocks.*.mlp.up", "transformer.h.*.mlp.fc_in"),
    Rule("blocks.*.mlp.down", "transformer.h.*.mlp.fc_out"),
    Rule("norm", "transformer.ln_f"),
    Rule("head", "lm_head"),
    Rule("classifier", "score"),
    PROJECTIONS,
)
_COMMON: dict[str, Any] = {
    **COMMON,
    "prefix": "transformer.",
    "ignored_tensors": (r".*\.attn\.((masked_)?bias|causal_mask)",),
    "notes": None,
}


GPTJ = Layout(
    classes=classes_of("GPTJ"),
    fields=(Field("vocab_size"), *_FIELDS),
    rules=lambda c: (
        *_RULES,
        *paired_rules(c, "transformer.h.*.attn"),
        Rule("blocks.*.attention.value", "transformer.h.*.attn.v_proj"),
    ),
    ignored_keys=("tie_word_embeddings", "rotary", "scale_attn_weights"),
    read_extra=_derive,
    write_extra=_restore,
    constant={"model_type": "gptj", **NO_TOKENS},
    tokenizer="GPT2Tokenizer",
    **_COMMON,
)
"""``model_type`` gptj."""

CODEGEN = Layout(
    classes=classes_of("CodeGen", classifier=False),
    fields=(Field("vocab_size", default=50400), *_FIELDS),
    rules=lambda c: (
        *_RULES,
        Rule(
            ("blocks.*.attention.query", "blocks.*.attention.value", "blocks.*.attention.key"),
            "transformer.h.*.attn.qkv_proj",
            interleaved=_BLOCKS,
            row_order=_rows(c),
        ),
    ),
    ignored_keys=("tie_word_embeddings", "rotary", "scale_attn_weights", "n_ctx"),
    read_extra=_derive_codegen,
    write_extra=_restore,
    constant={"model_type": "codegen", **NO_TOKENS},
    tokenizer="GPT2Tokenizer",
    **_COMMON,
)
"""``model_type`` codegen."""
