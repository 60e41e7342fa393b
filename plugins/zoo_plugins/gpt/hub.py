"""GPT-1, GPT-2 and GPT-Neo checkpoints in the hub's layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo import UsageError, shortest_period
from zoo.checkpoints import ACTIVATIONS, Checkpoint, Field, Layout, Rule
from zoo_plugins.bert.sentence import PROJECTIONS, sentence_encoder, sentence_files
from zoo_plugins.gpt.config import GPTConfig

__all__ = ["DECODER", "GPT1", "GPT2", "GPT_NEO", "NO_TOKENS"]

DECODER: dict[str, Any] = {
    "headless_tasks": ("sentence-embedding",),
    "outputs": {"sentence_embedding": ""},  # not compared: the originals have no such output
    "files": sentence_files,
}
"""What the layouts of causal decoders have in common."""
_WINDOW = 256
"""Default window size of GPT-Neo."""


NO_TOKENS = {"bos_token_id": None, "eos_token_id": None}
"""Always written, because the original classes have other defaults."""

_BLOCKS = (
    Rule("blocks.*.norm_1", "transformer.h.*.ln_1"),
    Rule(
        ("blocks.*.attention.query", "blocks.*.attention.key", "blocks.*.attention.value"),
        "transformer.h.*.attn.c_attn",
        transposed=True,
    ),
    Rule("blocks.*.attention.output", "transformer.h.*.attn.c_proj", transposed=True),
    Rule("blocks.*.norm_2", "transformer.h.*.ln_2"),
    Rule("blocks.*.mlp.up", "transformer.h.*.mlp.c_fc", transposed=True),
    Rule("blocks.*.mlp.down", "transformer.h.*.mlp.c_proj", transposed=True),
)
"""The blocks of GPT-1 and GPT-2."""

# The exporter reads its config.json back, and rejects settings that this layout cannot express.


def _restore_dropout(c: GPTConfig) -> Mapping[str, Any]:
    return {"embd_pdrop": c.dropout, "attn_pdrop": c.dropout}


GPT2 = Layout(
    classes={
        "GPT2LMHeadModel": "text-generation",
        "GPT2Model": ("text-generation", "sentence-embedding"),
        "GPT2ForSequenceClassification": "text-classification",
    },
    aliases=("GPT2Model",),
    fields=(
        Field("vocab_size"),
        Field("n_positions", "max_seq_len", default=1024),
        Field("n_embd", "hidden_size"),
        Field("n_layer", "num_layers"),
        Field("n_head", "num_heads"),
        Field("n_inner", "intermediate_size", default=None),
        Field("activation_function", "activation", default="gelu_new", values=ACTIVATIONS),
        Field("scale_attn_weights", "attention_scale", default=True, values={True: None, False: 1.0}),
        Field("layer_norm_epsilon", "norm_eps", default=1e-5),
        Field("resid_pdrop", "dropout", default=0.1),
        Field("tie_word_embeddings", "tie_embeddings", default=True),
    ),
    rules=(
        Rule("token_embedding", "transformer.wte"),
        Rule("position_embedding", "transformer.wpe"),
        *_BLOCKS,
        Rule("norm", "transformer.ln_f"),
        Rule("head", "lm_head"),
        Rule("classifier", "score"),
        PROJECTIONS,
    ),
    prefix="transformer.",
    **DECODER,
    ignored_tensors=(r".*\.attn\.(masked_)?bias",),
    required_values={
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
    },
    ignored_keys=("n_ctx",),
    read_extra=lambda checkpoint, values: sentence_encoder(checkpoint),
    write_extra=_restore_dropout,
    constant={"model_type": "gpt2", **NO_TOKENS},
    tokenizer="GPT2Tokenizer",
)
"""``model_type`` gpt2. Files of the base model are read as having a head tied to the embedding."""


GPT1 = Layout(
    classes={
        "OpenAIGPTLMHeadModel": "text-generation",
        "OpenAIGPTModel": ("text-generation", "sentence-embedding"),
        "OpenAIGPTForSequenceClassification": "text-classification",
    },
    aliases=("OpenAIGPTModel",),
    fields=(
        Field("vocab_size", default=40478),
        Field("n_positions", "max_seq_len", default=512),
        Field("n_embd", "hidden_size", default=768),
        Field("n_layer", "num_layers", default=12),
        Field("n_head", "num_heads", default=12),
        Field(
            "afn",
            "activation",
            default="gelu",
            values={"gelu": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"},
        ),
        Field("layer_norm_epsilon", "norm_eps", default=1e-5),
        Field("resid_pdrop", "dropout", default=0.1),
        Field("tie_word_embeddings", "tie_embeddings", default=True),
    ),
    rules=(
        Rule("token_embedding", "transformer.tokens_embed"),
        Rule("position_embedding", "transformer.positions_embed"),
        *_BLOCKS,
        Rule("head", "lm_head"),
        Rule("classifier", "score"),
        PROJECTIONS,
    ),
    prefix="transformer.",
    **DECODER,
    ignored_tensors=(r".*\.attn\.bias", r".*position_ids"),
    ignored_keys=("n_ctx", "n_special", "predict_special_tokens"),
    read_extra=lambda checkpoint, values: {"norm_first": False, **sentence_encoder(checkpoint)},
    write_extra=_restore_dropout,
    constant={"model_type": "openai-gpt", **NO_TOKENS},
    tokenizer="OpenAIGPTTokenizer",
)
"""``model_type`` openai-gpt. Its blocks normalise after each sub-layer, and there is no norm at the end."""


def _derive_gpt_neo(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    """Read the local layers. ``attention_types`` is a list of pairs: kinds of layers, and their number of repeats."""
    hub, where = checkpoint.config, checkpoint.config_file
    types, window = hub.get("attention_types") or [[["global", "local"], 12]], hub.get("window_size", _WINDOW)
    try:
        total = sum(len(kinds) * count for kinds, count in types)
        if total != values["num_layers"]:
            raise UsageError(f"attention_types has {total} layers, but num_layers is {values['num_layers']}", where)
        GPTConfig.check_field("num_layers", total, where)
        layers = [kind for kinds, count in types for _ in range(count) for kind in kinds]
        windows = tuple({"global": 0, "local": window}[kind] for kind in layers)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"attention_types {types!r} does not list layers", where, 'write [[["global", "local"], 12]]'
        ) from error
    if (told := hub.get("attention_layers", layers)) != layers:
        raise UsageError(f"attention_layers {told!r} differs from attention_types {types!r}", where)
    if type(window) is not int or window < 1:
        raise UsageError(f"window_size must be positive, got {window!r}", where)
    sizes = {"attention_bias": False, "attention_scale": 1.0, "sliding_windows": windows}
    return {**sizes, **sentence_encoder(checkpoint)}


def _restore_gpt_neo(c: GPTConfig) -> Mapping[str, Any]:
    windows = [c.window(layer) for layer in range(c.num_layers)]
    layers = ["global" if window is None else "local" for window in windows]
    kinds = list(shortest_period(layers))
    whole = c.num_layers % len(kinds) == 0
    return {
        "attention_types": [[kinds, c.num_layers // len(kinds)]] if whole else [[layers, 1]],
        "attention_layers": layers,
        "window_size": max(filter(None, windows), default=_WINDOW),
        "embed_dropout": c.dropout,
        "attention_dropout": c.dropout,
    }


GPT_NEO = Layout(
    classes={
        "GPTNeoForCausalLM": "text-generation",
        "GPTNeoModel": ("text-generation", "sentence-embedding"),
        "GPTNeoForSequenceClassification": "text-classification",
    },
    aliases=("GPTNeoModel",),
    fields=(
        Field("vocab_size"),
        Field("max_position_embeddings", "max_seq_len", default=2048),
        Field("hidden_size"),
        Field("num_layers"),
        Field("num_heads"),
        Field("intermediate_size", default=None),
        Field("activation_function", "activation", default="gelu_new", values=ACTIVATIONS),
        Field("layer_norm_epsilon", "norm_eps", default=1e-5),
        Field("resid_dropout", "dropout", default=0.0),
        Field("tie_word_embeddings", "tie_embeddings", default=True),
    ),
    rules=(
        Rule("token_embedding", "transformer.wte"),
        Rule("position_embedding", "transformer.wpe"),
        Rule("blocks.*.norm_1", "transformer.h.*.ln_1"),
        Rule("blocks.*.attention.query", "transformer.h.*.attn.attention.q_proj"),
        Rule("blocks.*.attention.key", "transformer.h.*.attn.attention.k_proj"),
        Rule("blocks.*.attention.value", "transformer.h.*.attn.attention.v_proj"),
        Rule("blocks.*.attention.output", "transformer.h.*.attn.attention.out_proj"),
        Rule("blocks.*.norm_2", "transformer.h.*.ln_2"),
        Rule("blocks.*.mlp.up", "transformer.h.*.mlp.c_fc"),
        Rule("blocks.*.mlp.down", "transformer.h.*.mlp.c_proj"),
        Rule("norm", "transformer.ln_f"),
        Rule("head", "lm_head"),
        Rule("classifier", "score"),
        PROJECTIONS,
    ),
    prefix="transformer.",
    **DECODER,
    ignored_tensors=(r".*\.attn\.attention\.(masked_)?bias",),
    # read_extra handles the first three; attention_layers is attention_types expanded.
    ignored_keys=("attention_types", "window_size", "attention_layers", "attention_dropout", "embed_dropout",
           "classifier_dropout", "summary_*"),
    read_extra=_derive_gpt_neo,
    write_extra=_restore_gpt_neo,
    constant={"model_type": "gpt_neo", **NO_TOKENS},
    tokenizer="GPT2Tokenizer",
)  # fmt: skip
"""``model_type`` gpt_neo."""
