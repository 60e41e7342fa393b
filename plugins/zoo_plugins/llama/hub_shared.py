"""Parts shared by the checkpoint layouts of Llama and its relatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zoo import UsageError
from zoo.checkpoints import Checkpoint, Field, Rule, paired_rows
from zoo_plugins.bert.sentence import PROJECTIONS, sentence_encoder
from zoo_plugins.gpt.hub import DECODER, NO_TOKENS
from zoo_plugins.llama.config import LlamaConfig
from zoo_plugins.llama.hub_rope import read_frequencies, rope_notes, write_frequencies, write_rope

__all__ = [
    "ATTENTION_RULES",
    "BLOCK_RULES",
    "COMMON",
    "LOCAL",
    "MLP_RULES",
    "NO_TOKENS",
    "check_kinds",
    "classes_of",
    "fields_of",
    "kinds_of_layers",
    "paired_rules",
    "read_expert_layers",
    "read_rope_by_kind",
    "read_windows",
    "write_expert_layers",
    "write_rope_by_kind",
    "write_windows",
]

ATTENTION_RULES = tuple(
    Rule(f"blocks.*.attention.{ours}", f"model.layers.*.self_attn.{theirs}")
    for ours, theirs in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"))
)
MLP_RULES = (
    Rule("blocks.*.mlp.gate", "model.layers.*.mlp.gate_proj"),
    Rule("blocks.*.mlp.up", "model.layers.*.mlp.up_proj"),
)
BLOCK_RULES = (
    Rule("token_embedding", "model.embed_tokens"),
    Rule("blocks.*.norm_1", "model.layers.*.input_layernorm"),
    Rule("blocks.*.attention.output", "model.layers.*.self_attn.o_proj"),
    Rule("blocks.*.attention.query_norm", "model.layers.*.self_attn.q_norm"),
    Rule("blocks.*.attention.key_norm", "model.layers.*.self_attn.k_norm"),
    Rule("blocks.*.mlp.down", "model.layers.*.mlp.down_proj"),
    Rule("norm", "model.norm"),
    Rule("head", "lm_head"),
    Rule("classifier", "score"),
    PROJECTIONS,
)
"""Rules that all families share."""
COMMON: dict[str, Any] = {
    **DECODER,
    "prefix": "model.",
    "ignored_tensors": (r".*\.rotary_emb\.inv_freq",),
    "notes": rope_notes,
}
LOCAL, _FULL = "sliding_attention", "full_attention"


def classes_of(name: str, *, classifier: bool = True) -> dict[str, str]:
    """Return the original classes of a family and their tasks in zoo, given whether one of them is a classifier."""
    return {
        f"{name}ForCausalLM": "text-generation",
        **({f"{name}ForSequenceClassification": "text-classification"} if classifier else {}),
        f"{name}Model": "sentence-embedding",
    }


def paired_rules(c: LlamaConfig, module: str) -> tuple[Rule, ...]:
    """Return the rules of queries and keys whose rotated pairs are neighbours, given the name of their module."""
    heads = (("query", "q_proj", c.num_heads), ("key", "k_proj", c.num_kv_heads or c.num_heads))
    return tuple(
        Rule(
            f"blocks.*.attention.{ours}", f"{module}.{theirs}", row_order=paired_rows(count, c.key_size, c.turned_size)
        )
        for ours, theirs, count in heads
    )


def fields_of(*, eps: float = 1e-6, dropout: float = 0.0) -> Sequence[Field]:
    """Return the fields of config.json that all families share, with the defaults of a family."""
    return (
        Field("vocab_size"),
        Field("hidden_size"),
        Field("num_hidden_layers", "num_layers"),
        Field("num_attention_heads", "num_heads"),
        Field("intermediate_size"),
        Field("rms_norm_eps", "norm_eps", default=eps),
        Field("attention_dropout", "dropout", default=dropout),
    )


def check_kinds(kinds: object, num_layers: object, known: tuple[str, str], where: object) -> list[str]:
    """Return ``layer_types``. Raises :class:`UsageError` unless it has one of two kinds for each layer."""
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        problem = f"layer_types must name {num_layers} layers, each {' or '.join(known)}, got {kinds!r}"
        raise UsageError(problem, where)
    return kinds


def read_windows(kinds: object, window: object, values: Mapping[str, Any], where: object) -> dict[str, Any]:
    """Return ``sliding_windows``, given the kinds of the layers and the window of the local ones."""
    layers = check_kinds(kinds, values["num_layers"], (_FULL, LOCAL), where)
    if window is None and LOCAL in layers:
        raise UsageError(f"layer_types has {LOCAL}, but there is no sliding_window", where)
    return {"sliding_windows": tuple(window if kind == LOCAL else 0 for kind in layers)}


def write_windows(c: LlamaConfig) -> dict[str, Any]:
    """Invert :func:`read_windows`."""
    windows = [c.window(layer) for layer in range(c.num_layers)]
    return {
        "sliding_window": max(filter(None, windows), default=None),
        "layer_types": kinds_of_layers([window is not None for window in windows]),
    }


def kinds_of_layers(local: Sequence[bool]) -> list[str]:
    """Return ``layer_types``, given which layers have a window."""
    return [LOCAL if item else _FULL for item in local]


def read_rope_by_kind(
    checkpoint: Checkpoint, values: Mapping[str, Any], *, theta: float, local_theta: object
) -> dict[str, Any]:
    """Read the rotary positions of layers without and with a window, and the files of a sentence encoder.

    transformers 5 has a mapping for each kind of layer; ``theta`` and ``local_theta`` are the bases that it may leave
    out. Layers with a window cannot be scaled.
    """
    hub, where = checkpoint.config, checkpoint.config_file
    both = hub.get("rope_parameters") or {}
    if not isinstance(both, dict):
        raise UsageError(f"rope_parameters must be a mapping, got {both!r}", where)
    if unknown := both.keys() - {_FULL, LOCAL}:
        problem = f"rope_parameters must have {_FULL} and {LOCAL}, got {', '.join(sorted(unknown))}"
        raise UsageError(problem, where)
    local = read_frequencies(both.get(LOCAL) or {}, where, theta=local_theta)
    if local["rope_scaling"] != "none":
        raise UsageError(f"rope_parameters of {LOCAL} have a rope_type, which is not supported", where)
    fields = read_frequencies(
        hub.get("rope_scaling") or both.get(_FULL) or {},
        where,
        theta=hub.get("rope_theta", theta),
        length=hub.get("max_position_embeddings", values["max_seq_len"]),
        original=hub.get("original_max_position_embeddings"),
    )
    if fields.get("rope_truncate") is False:
        raise UsageError(f"truncate False is not supported beside {LOCAL}: transformers ignores it there", where)
    return {**fields, **sentence_encoder(checkpoint), "local_rope_theta": local["rope_theta"]}


def write_rope_by_kind(c: LlamaConfig) -> dict[str, Any]:
    """Invert :func:`read_rope_by_kind`."""
    local = {"rope_type": "default", "rope_theta": c.local_rope_theta or c.rope_theta}
    return {**write_rope(c), "rope_parameters": {_FULL: write_frequencies(c), LOCAL: local}}


def read_expert_layers(checkpoint: Checkpoint, num_layers: int) -> tuple[bool, ...]:
    """Return which layers have experts: every ``decoder_sparse_step``-th, except those in ``mlp_only_layers``."""
    hub, where = checkpoint.config, checkpoint.config_file
    period, dense = hub.get("decoder_sparse_step", 1), hub.get("mlp_only_layers") or []
    if type(period) is not int or period < 1:
        raise UsageError(f"decoder_sparse_step must be positive, got {period!r}", where)
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise UsageError(f"mlp_only_layers must be a list of numbers of layers, got {dense!r}", where)
    return tuple((layer + 1) % period == 0 and layer not in dense for layer in range(num_layers))


def write_expert_layers(experts: Sequence[bool]) -> dict[str, Any]:
    """Invert :func:`read_expert_layers`."""
    return {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, has_experts in enumerate(experts) if not has_experts],
    }
