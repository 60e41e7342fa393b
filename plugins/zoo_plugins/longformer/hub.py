"""Longformer checkpoints in the hub's layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zoo import UsageError
from zoo.checkpoints import Checkpoint, Rule
from zoo_plugins.bert.hub import ROBERTA, derive_roberta, roberta_rules
from zoo_plugins.bert.hub_shared import ONLY, POSITION_IDS, classes_of, unread_bias
from zoo_plugins.longformer.config import LongformerConfig

__all__ = ["LONGFORMER"]

_SELF = "longformer.encoder.layer.*.attention.self"
_PARTS = ("query", "key", "value")


def _rules(c: LongformerConfig) -> Sequence[Rule]:
    return (
        *roberta_rules(c, "longformer"),
        *(Rule(f"blocks.*.attention.global_{part}", f"{_SELF}.{part}_global") for part in _PARTS),
    )


def _ignored(c: LongformerConfig) -> Sequence[str]:
    """Positions, an unused pooler beside a classifier, and the projections of global tokens if there are none."""
    unused = () if c.global_tokens else (r"longformer\.encoder\.layer\.\d+\.attention\.self\.\w+_global\..*",)
    return (POSITION_IDS, r"longformer\.pooler\..*", *unread_bias(c, "lm_head"), *unused)


def _derive(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    windows = checkpoint.config.get("attention_window", 512)
    window = windows[0] if isinstance(windows, list) and len(set(map(str, windows))) == 1 else windows
    if not isinstance(window, int):
        what = f"attention_window must be the same in all layers, got {windows!r}"
        raise UsageError(what, checkpoint.config_file)
    return {"attention_window": window, **derive_roberta(checkpoint, values)}


def _restore(c: LongformerConfig) -> Mapping[str, Any]:
    return {"max_position_embeddings": c.position_rows, "attention_window": [c.attention_window] * c.num_layers}


def _original(checkpoint: Checkpoint, c: LongformerConfig) -> nn.Module:
    """Load transformers' model, and have it treat the first tokens as global."""
    import transformers

    name = LONGFORMER.class_of(c, (checkpoint.config.get("architectures") or [None])[0])
    model: nn.Module = getattr(transformers, str(name)).from_pretrained(checkpoint.path, local_files_only=True)

    def mark(_: nn.Module, args: Any, inputs: dict[str, Any]) -> Any:
        first = torch.zeros_like(inputs["input_ids"])
        first[:, : c.global_tokens] = 1
        return args, {**inputs, "global_attention_mask": first}

    model.register_forward_pre_hook(mark, with_kwargs=True)
    return model.eval()


_CLASSES = {name: task for name, task in classes_of("Longformer").items() if task != "question-answering"}
LONGFORMER = replace(
    ROBERTA,
    classes=_CLASSES,  # questions have as many global tokens as they are long
    rules=_rules,
    prefix="longformer.",
    ignored_tensors=_ignored,
    required_values={**ONLY, "attention_mode": "longformer", "ignore_attention_mask": False, "onnx_export": False},
    ignored_keys=(*ROBERTA.ignored_keys, "attention_window"),
    read_extra=_derive,
    write_extra=_restore,
    constant={"model_type": "longformer"},
    tokenizer="RobertaTokenizer",
    original=_original,
)
"""``model_type`` longformer. transformers marks the first token as global for classes of texts only; here it is for all
tasks, unless ``global_tokens`` is set to 0."""
