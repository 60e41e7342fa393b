"""Checkpoints of BART, mBART, M2M100 and Marian in the hub's layout, and of ``torch.nn.Transformer``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from zoo import ArtifactError, UsageError
from zoo.checkpoints import ACTIVATIONS, Checkpoint, Field, Layout, Rule
from zoo_plugins.transformer.config import TransformerConfig
from zoo_plugins.transformer.tokens import mbart50_tokens, mbart_tokens

__all__ = ["BART", "M2M100", "MARIAN", "MBART", "TORCH"]

_TASK, _VECTORS = "text2text-generation", "vector-feature-extraction"
_PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}
_TABLES = {
    "encoder_embedding.token": "model.encoder.embed_tokens",
    "decoder_embedding.token": "model.decoder.embed_tokens",
    "head": "lm_head",
}

# BART, mBART, M2M100 and Marian.


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
    positions = () if c.positions == "learned" else (r"model\.(encoder|decoder)\.embed_positions\.weights?",)
    shared = () if c.share_embeddings else (r"model\.shared\.weight",)
    bias = () if c.task == _TASK else ("final_logits_bias",)
    return (r"(model\.)?(encoder|decoder)\.version", *positions, *shared, *bias)


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
            Field("max_position_embeddings", "max_seq_len", default=1024),
            Field("d_model", "hidden_size", default=1024),
            Field("encoder_layers", "num_layers", default=12),
            Field("decoder_layers", "num_decoder_layers", default=12),
            Field("encoder_attention_heads", "num_heads", default=16),
            Field("decoder_attention_heads", "num_decoder_heads", default=16),
            Field("encoder_ffn_dim", "intermediate_size", default=4096),
            Field("decoder_ffn_dim", "decoder_intermediate_size", default=4096),
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
            "decoder_vocab_size", "extra_pos_embeddings", "force_bos_token_to_be_generated", "init_std",
            "num_hidden_layers", "share_encoder_decoder_embeddings",
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

# torch.nn.Transformer.

_SOURCE, _TARGET, _HEAD = "src_tok_emb.embedding.weight", "tgt_tok_emb.embedding.weight", "generator.weight"
_SINUSOIDS, _POSITIONS = "positional_encoding.pos_embedding", "src_pos_emb.weight"


def _torch_rules(_: TransformerConfig) -> Sequence[Rule]:
    attentions = {
        "encoder.*.attention": "transformer.encoder.layers.*.self_attn",
        "decoder.*.attention": "transformer.decoder.layers.*.self_attn",
        "decoder.*.cross": "transformer.decoder.layers.*.multihead_attn",
    }
    parts = {
        "mlp.up": "linear1",
        "mlp.down": "linear2",
        **{f"residual_{number}.norm": f"norm{number}" for number in (1, 2, 3)},
    }
    return (
        Rule("encoder_embedding.token.weight", _SOURCE),
        Rule("decoder_embedding.token.weight", _TARGET),
        Rule("encoder_embedding.position", "src_pos_emb"),
        Rule("decoder_embedding.position", "tgt_pos_emb"),
        Rule("head", "generator"),
        *(
            Rule(tuple(f"{ours}.{part}.{kind}" for part in ("query", "key", "value")), f"{theirs}.in_proj_{kind}")
            for ours, theirs in attentions.items()
            for kind in ("weight", "bias")
        ),
        *(Rule(f"{ours}.output", f"{theirs}.out_proj") for ours, theirs in attentions.items()),
        *(
            Rule(f"{side}.*.{ours}", f"transformer.{side}.layers.*.{theirs}")
            for side in ("encoder", "decoder")
            for ours, theirs in parts.items()
        ),
        *(Rule(f"{side}_norm", f"transformer.{side}.norm") for side in ("encoder", "decoder")),
    )


def _torch_derive(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    """Derive settings from the presence and shapes of tensors."""
    tensors = {_torch_name(name): tensor for name, tensor in checkpoint.tensors.items()}

    if any(name.startswith("transformer.encoder.layers.0.multihead_attn.") for name in tensors):
        remedy = "save it as the decoder of a torch.nn.Transformer"
        raise ArtifactError("a torch.nn.TransformerDecoder alone has no encoder", checkpoint.where, remedy)

    def shape(name: str) -> tuple[int, ...]:
        if name not in tensors:
            raise ArtifactError(f"missing {name}", checkpoint.where)
        return tensors[name].shape

    def same(first: str, second: str) -> bool:
        return shape(first) == shape(second) and torch.equal(tensors[first].read(), tensors[second].read())

    def layers(side: str) -> int:
        matches = (re.match(rf"transformer\.{side}\.layers\.(\d+)\.", name) for name in tensors)
        return 1 + max((int(match[1]) for match in matches if match), default=-1)

    layer, last = "transformer.encoder.layers.0", "transformer.decoder.layers.0"
    trunk = {
        "num_layers": layers("encoder"),
        "num_decoder_layers": layers("decoder"),
        "intermediate_size": shape(f"{layer}.linear1.weight")[0],
        "attention_bias": f"{layer}.self_attn.in_proj_bias" in tensors,
        "mlp_bias": f"{layer}.linear1.bias" in tensors,
        "norm_bias": f"{layer}.norm1.bias" in tensors,
        "final_norm": "transformer.encoder.norm.weight" in tensors,
    }
    if trunk["num_decoder_layers"]:
        trunk["decoder_intermediate_size"] = shape(f"{last}.linear1.weight")[0]
    if not tensors.keys() & {_SOURCE, _TARGET, _HEAD}:
        return values | trunk | {
            "task": _VECTORS,
            "vocab_size": 0,
            "hidden_size": shape(f"{layer}.linear1.weight")[1],
            "decoder_start_token_id": None,
        }  # fmt: skip
    (vocab_size, hidden_size), target_vocab_size = shape(_SOURCE), shape(_TARGET)[0]
    learned = _POSITIONS in tensors
    table = _POSITIONS if learned else _SINUSOIDS
    return values | trunk | {
        "vocab_size": vocab_size,
        "target_vocab_size": target_vocab_size,
        "hidden_size": hidden_size,
        "head_bias": "generator.bias" in tensors,
        "positions": "learned" if learned else "sinusoidal",
        "share_embeddings": same(_SOURCE, _TARGET),
        "tie_embeddings": _HEAD not in tensors or same(_HEAD, _TARGET),
        **({"max_seq_len": max(tensors[table].shape[:-1])} if table in tensors else {}),
    }  # fmt: skip


_TORCH_RENAMED = (
    (r"^(module|model)\.", ""),
    (r"^(encoder|decoder)\.", r"transformer.\1."),
    (r"^(layers|norm)\.", r"transformer.encoder.\1."),
    (r"^(src|tgt)_tok_emb\.weight$", r"\1_tok_emb.embedding.weight"),
)


def _torch_name(name: str) -> str:
    for pattern, replacement in _TORCH_RENAMED:
        name = re.sub(pattern, replacement, name)
    return name


TORCH = Layout(
    classes={"Transformer": (_TASK, _VECTORS)},
    fields=(),
    required_settings=("num_heads",),
    rules=_torch_rules,
    renamed=_TORCH_RENAMED,
    ignored_tensors=(r"positional_encoding\..*",),
    read_extra=_torch_derive,
)
"""A state dict of a ``torch.nn.Transformer``, or of a module that calls it ``transformer``.

By itself, or as a ``torch.nn.TransformerEncoder``, it becomes a model of vectors, with the task
``vector-feature-extraction``. Other parts have their usual names: ``src_tok_emb`` and ``tgt_tok_emb``, embeddings or
modules that hold one called ``embedding``, and ``generator``, the projection to the vocabulary. Positions are
sinusoids, or the tables ``src_pos_emb`` and ``tgt_pos_emb``. Settings that do not follow from tensors are given with
``--set``: ``num_heads`` always; ``norm_first``, ``activation``, ``norm_eps``, ``scale_embeddings``, ``max_seq_len`` and
the special tokens where they differ from the defaults of :class:`TransformerConfig`. The decoder is causal, whatever
mask the module was called with.
"""
