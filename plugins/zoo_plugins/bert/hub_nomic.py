"""Nomic BERT checkpoints in the hub's layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zoo import UsageError
from zoo.checkpoints import Checkpoint, Field, Layout, Rule
from zoo_plugins.bert.config import BERTConfig
from zoo_plugins.bert.hub_shared import (
    BASE,
    OUTPUTS,
    POSITION_IDS,
    classes_of,
    decoder_rules,
    embedding_rules,
    fields_of,
    has_tensor,
    require_types,
    unread_bias,
    with_defaults,
)
from zoo_plugins.bert.sentence import sentence_encoder, sentence_files

__all__ = ["NOMIC_BERT"]

_LAYER = "nomic_bert.encoder.layers.*"
_OLD_SIZES = {
    "n_embd": "hidden_size", "n_head": "num_heads", "n_inner": "intermediate_size", "n_layer": "num_layers",
    "max_trained_positions": "max_seq_len", "layer_norm_epsilon": "norm_eps", "resid_pdrop": "dropout",
}  # fmt: skip
"""Keys of the files that Nomic's own code wrote, and zoo's fields."""
_OLD_VALUES: dict[str, tuple[Any, ...]] = {
    "activation_function": ("swiglu",), "causal": (False,), "mlp_fc1_bias": (False,), "mlp_fc2_bias": (False,),
    "parallel_block": (False,), "parallel_block_tied_norm": (False,), "prenorm": (False,), "qkv_proj_bias": (False,),
    "rotary_emb_fraction": (1.0,), "rotary_emb_interleaved": (False,), "rotary_emb_scale_base": (None,),
    "rotary_scaling_factor": (None,), "scale_attn_by_inverse_layer_idx": (False,), "scale_attn_weights": (True,),
    "use_rms_norm": (False, None), "num_experts": (0, None), "moe_every_n_layers": (0, -1, None),
}  # fmt: skip
"""Keys of these files that select other models, and the values that this one has."""


def _theta(checkpoint: Checkpoint) -> Any:
    """Return the base of the rotary frequencies, from the key of transformers 5, of transformers 4 or of Nomic."""
    hub, where = checkpoint.config, checkpoint.config_file
    said = hub.get("rope_parameters") or {}
    if not isinstance(said, dict) or said.get("rope_type", "default") != "default":
        raise UsageError(f"rope_parameters {said!r} are not supported", where, "known: rope_type default")
    names = ("rope_theta", "rotary_emb_base", "default_theta")
    return said.get("rope_theta", next((hub[name] for name in names if name in hub), 1000.0))


def _derive(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    hub, where = checkpoint.config, checkpoint.config_file
    wrong = [f"{key} {hub[key]!r}" for key, known in _OLD_VALUES.items() if key in hub and hub[key] not in known]
    if wrong:
        raise UsageError(f"{', '.join(wrong)} is not supported", where)
    sizes = {ours: hub[theirs] for theirs, ours in _OLD_SIZES.items() if theirs in hub}
    final = {**values, **sizes}
    require_types(checkpoint, final)
    hidden, heads = (BERTConfig.check_field(name, final[name], where) for name in ("hidden_size", "num_heads"))
    if hub.get("head_dim") not in (None, hidden / heads):
        known = "known: hidden_size / num_attention_heads"
        raise UsageError(f"head_dim {hub['head_dim']!r} is not supported", where, known)
    return {
        **sizes,
        "positions": "rotary",
        "rope_theta": _theta(checkpoint),
        "attention_bias": False,
        "gated": True,
        "mlp_bias": False,
        "pooler": values["task"] == "text-classification" or has_tensor(checkpoint, "pooler.dense.weight"),
        **sentence_encoder(checkpoint),
    }


def _restore(c: BERTConfig) -> Mapping[str, Any]:
    return {
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
        "head_dim": c.hidden_size // c.num_heads,
    }


def _rules(c: BERTConfig) -> Sequence[Rule]:
    projections = ("query", "key", "value")
    return (
        Rule("embeddings.norm", "nomic_bert.emb_ln"),
        *embedding_rules("nomic_bert"),
        Rule(tuple(f"blocks.*.attention.{part}" for part in projections), f"{_LAYER}.attn.Wqkv"),
        *(Rule(f"blocks.*.attention.{part}", f"{_LAYER}.attn.{part[0]}_proj") for part in projections),
        Rule("blocks.*.attention.output", f"{_LAYER}.attn.out_proj"),
        Rule("blocks.*.norm_1", f"{_LAYER}.norm1"),
        Rule("blocks.*.mlp.up", f"{_LAYER}.mlp.fc11"),
        Rule("blocks.*.mlp.gate", f"{_LAYER}.mlp.fc12"),
        Rule("blocks.*.mlp.down", f"{_LAYER}.mlp.fc2"),
        Rule("blocks.*.norm_2", f"{_LAYER}.norm2"),
        Rule("pooler", "nomic_bert.pooler.dense"),
        Rule("masked_lm.dense", "cls.predictions.transform.dense"),
        Rule("masked_lm.norm", "cls.predictions.transform.layer_norm"),
        *decoder_rules(c, "cls.predictions"),
        Rule("classifier", "classifier"),
    )


_UNUSED = (
    *_OLD_SIZES, *_OLD_VALUES, "rope_parameters", "rope_theta", "rotary_emb_base", "default_theta", "head_dim",
    "n_positions", "dense_seq_output", "fused_bias_fc", "fused_dropout_add_ln", "last_layer_subset",
    "pad_vocab_size_multiple", "reorder_and_upcast_attn", "use_flash_attn", "use_xentropy",
)  # fmt: skip
_SIZES = {
    "vocab_size": 30528, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "hidden_dropout_prob": 0.0,
}  # fmt: skip
NOMIC_BERT = Layout(
    classes={name: task for name, task in classes_of("NomicBert").items() if task != "question-answering"},
    fields=(
        *with_defaults(fields_of(activation="silu"), **_SIZES),
        Field("max_position_embeddings", "max_seq_len", default=2048),
    ),
    rules=_rules,
    prefix="nomic_bert.",
    headless_tasks=BASE,
    ignored_tensors=lambda c: (POSITION_IDS, *unread_bias(c, "cls.predictions")),
    renamed=(
        (r"(^|\.)layers\.", r"\1encoder.layers."),
        (r"encoder\.encoder\.", "encoder."),
        (r"\.self_attn\.o_proj\.", ".attn.out_proj."),
        (r"\.self_attn\.", ".attn."),
        (r"\.mlp\.up_proj\.", ".mlp.fc11."),
        (r"\.mlp\.gate_proj\.", ".mlp.fc12."),
        (r"\.mlp\.down_proj\.", ".mlp.fc2."),
        (r"\.post_attention_layernorm\.", ".norm1."),
        (r"\.post_mlp_layernorm\.", ".norm2."),
    ),
    ignored_keys=_UNUSED,
    read_extra=_derive,
    write_extra=_restore,
    files=sentence_files,
    constant={"model_type": "nomic_bert"},
    tokenizer="BertTokenizer",
    outputs=OUTPUTS,
)
"""``model_type`` nomic_bert. Files have the tensors of Nomic's own code, which transformers writes too, or those of its
class."""
