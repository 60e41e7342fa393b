"""ESM checkpoints in the hub's layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zoo import Config, UsageError
from zoo.checkpoints import Checkpoint, Field, Layout, Rule, SourceTensor
from zoo_plugins.bert.hub_shared import (
    BASE,
    OLD_NORMS,
    OUTPUTS,
    POSITION_IDS,
    classes_of,
    has_tensor,
    skipped_positions,
)
from zoo_plugins.bert.sentence import PROJECTIONS, sentence_encoder, sentence_files
from zoo_plugins.esm.config import ESMConfig

__all__ = ["ESM"]

_LAYER = "esm.encoder.layer.*"
_KINDS = {"rotary": "rotary", "absolute": "learned"}
_ROWS = 1026
"""The original's default of max_position_embeddings."""
_FREQUENCIES = "rotary_embeddings.inv_freq"
"""A table of frequencies in files: of the encoder, or of each layer in old ones."""


def _frequencies(theta: float, head_dim: int, *, half: bool) -> Tensor:
    """Return the rotary frequencies, (D / 2,), in radians per position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    exact = 1.0 / theta**exponents
    return exact.half().float() if half else exact


def _is_half(checkpoint: Checkpoint, values: Mapping[str, Any]) -> bool:
    """Return whether the frequencies of a file are rounded to float16.

    Raises :class:`UsageError` for frequencies that follow from neither precision.
    """
    where = checkpoint.config_file
    hidden, heads = (ESMConfig.check_field(name, values[name], where) for name in ("hidden_size", "num_heads"))
    theta = ESMConfig.check_field("rope_theta", values["rope_theta"], where)
    name = next((name for name in checkpoint.tensors if name.endswith(_FREQUENCIES)), None)
    if name is None or heads < 1:
        return False
    stored = checkpoint.tensors[name].read().float()
    for half in (False, True):
        wanted = _frequencies(theta, hidden // heads, half=half)
        if stored.shape == wanted.shape and torch.allclose(stored, wanted, rtol=1e-6, atol=0):
            return half
    raise UsageError(f"{name} is not supported", where, f"known: the frequencies of rope_theta {theta}")


def _derive(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    hub, where = checkpoint.config, checkpoint.config_file
    learned = values["positions"] == "learned"
    if learned and hub.get("pad_token_id") is None:
        raise UsageError("pad_token_id is missing, which positions skip", where)
    dropped = hub.get("mask_token_id") if hub.get("token_dropout") else None
    if hub.get("token_dropout") and dropped is None:
        raise UsageError("token_dropout needs a mask_token_id", where)
    if dropped is not None and dropped == hub.get("pad_token_id"):
        raise UsageError(f"mask_token_id and pad_token_id are both {dropped}, which token_dropout tells apart", where)
    if learned:
        length = skipped_positions(checkpoint, default_rows=_ROWS)["max_seq_len"]
    else:
        length = hub.get("max_position_embeddings", _ROWS)
    return {
        "max_seq_len": length,
        "rope_float16": not learned and _is_half(checkpoint, values),
        "embedding_norm": bool(hub.get("emb_layer_norm_before")),
        "dropped_token_id": dropped,
        "pooler": values["task"] == "text-classification" or has_tensor(checkpoint, "pooler.dense.weight"),
        **sentence_encoder(checkpoint),
    }


def _restore(c: ESMConfig) -> Mapping[str, Any]:
    return {
        "max_position_embeddings": c.position_rows or c.max_seq_len,
        "emb_layer_norm_before": c.embedding_norm,
        "token_dropout": c.dropped_token_id is not None,
        "mask_token_id": c.mask_token_id if c.dropped_token_id is None else c.dropped_token_id,
    }


def _rules(c: ESMConfig) -> Sequence[Rule]:
    parts = ("query", "key", "value")
    texts = c.task == "text-classification"
    return (
        Rule("embeddings.token", "esm.embeddings.word_embeddings"),
        Rule("embeddings.position", "esm.embeddings.position_embeddings"),
        Rule("embeddings.norm", "esm.embeddings.layer_norm"),
        *(Rule(f"blocks.*.attention.{part}", f"{_LAYER}.attention.self.{part}") for part in parts),
        Rule("blocks.*.attention.output", f"{_LAYER}.attention.output.dense"),
        Rule("blocks.*.norm_1", f"{_LAYER}.attention.LayerNorm"),
        Rule("blocks.*.mlp.up", f"{_LAYER}.intermediate.dense"),
        Rule("blocks.*.mlp.down", f"{_LAYER}.output.dense"),
        Rule("blocks.*.norm_2", f"{_LAYER}.LayerNorm"),
        Rule("norm", "esm.encoder.emb_layer_norm_after"),
        Rule("pooler", "classifier.dense" if texts else "esm.pooler.dense"),
        Rule("masked_lm.dense", "lm_head.dense"),
        Rule("masked_lm.norm", "lm_head.layer_norm"),
        Rule("masked_lm.decoder.bias", "lm_head.bias"),
        Rule("masked_lm.decoder", "lm_head.decoder"),
        Rule("classifier", "classifier.out_proj" if texts else "classifier"),
        PROJECTIONS,
    )


def _ignored(c: ESMConfig) -> Sequence[str]:
    """Frequencies, which are read apart, positions that rotary models do not have, and an unused pooler."""
    unused = (r"(esm\.)?embeddings\.position_embeddings\..*",) if c.positions == "rotary" else ()
    return (POSITION_IDS, r".*rotary_embeddings\.inv_freq", r"(esm\.)?pooler\..*", *unused)


@dataclass(frozen=True, kw_only=True)
class _ESMLayout(Layout):
    """A layout whose files contain the frequencies of rotary positions."""

    def divided(self, tensors: Mapping[str, SourceTensor], config: Config) -> Mapping[str, SourceTensor]:
        """Return the tensors of the model with the frequencies."""
        assert isinstance(config, ESMConfig)
        if config.positions != "rotary":
            return tensors
        read = partial(_frequencies, config.rope_theta, config.head_dim, half=config.rope_float16)
        name = self.written_name(f"esm.{_FREQUENCIES}", config)
        return {**tensors, name: SourceTensor((config.head_dim // 2,), torch.float32, read)}


ESM = _ESMLayout(
    classes={name: task for name, task in classes_of("Esm").items() if task != "question-answering"},
    fields=(
        Field("vocab_size"),
        Field("hidden_size", default=768),
        Field("num_hidden_layers", "num_layers", default=12),
        Field("num_attention_heads", "num_heads", default=12),
        Field("intermediate_size", default=3072),
        Field("layer_norm_eps", "norm_eps", default=1e-12),
        Field("position_embedding_type", "positions", default="absolute", values=_KINDS),
        Field("rope_theta", default=10000.0),
        Field("hidden_dropout_prob", "dropout", default=0.1),
        Field("tie_word_embeddings", "tie_embeddings", default=True),
    ),
    rules=_rules,
    prefix="esm.",
    headless_tasks=BASE,
    ignored_tensors=_ignored,
    renamed=OLD_NORMS,
    left_out=("esm.contact_head.*", "contact_head.*"),
    required_values={"is_decoder": False, "add_cross_attention": False, "is_folding_model": False},
    ignored_keys=(
        "max_position_embeddings",
        "emb_layer_norm_before",
        "token_dropout",
        "esmfold_config",
        "vocab_list",
        "hidden_act",  # in published files; the original always uses GELU
    ),
    read_extra=_derive,
    write_extra=_restore,
    files=sentence_files,
    constant={"model_type": "esm"},
    tokenizer="EsmTokenizer",
    outputs=OUTPUTS,
)
"""``model_type`` esm. The head that predicts contacts from attention weights is left out."""
