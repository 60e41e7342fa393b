"""Checkpoints of ``torch.nn.Transformer``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zoo import ArtifactError
from zoo.checkpoints import Checkpoint, Layout, Rule
from zoo_plugins.transformer.config import TransformerConfig

__all__ = ["TORCH"]

_TASK, _VECTORS = "text2text-generation", "vector-feature-extraction"
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
