"""The segments (token types) of texts: whether the original passes them to the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer, processors

from zoo.tokenizers.library import description

__all__ = ["SEGMENTED", "passes_segments", "without_segments"]

SEGMENTED = (
    "BertTokenizer", "CanineTokenizer", "DebertaTokenizer", "DebertaV2Tokenizer", "DPRQuestionEncoderTokenizer",
    "ElectraTokenizer", "FNetTokenizer", "LayoutLMv2Tokenizer", "LxmertTokenizer", "MarkupLMTokenizer",
    "MobileBertTokenizer", "TapasTokenizer",
)  # fmt: skip
"""The classes of transformers that pass segments to a model if ``model_input_names`` is not stated."""


def passes_segments(settings: Mapping[str, Any], name: str) -> bool:
    """Return whether transformers passes segments to a model; otherwise, the model reads zeros.

    Args:
        settings: the content of tokenizer_config.json.
        name: the class that reads it.
    """
    stated = settings.get("model_input_names")
    return "token_type_ids" in stated if isinstance(stated, list) else name in SEGMENTED


def without_segments(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer that gives the segment 0 to both texts of a pair."""
    content = description(tokenizer)
    processor = content["post_processor"]
    parts = [processor] if processor is None or processor["type"] != "Sequence" else processor["processors"]
    untyped = [_untyped(part) for part in parts]
    if all(part["type"] == "ByteLevel" for part in untyped):  # which keeps the segments that the library gives
        untyped.append(_untyped(None))
    processor = untyped[0] if len(untyped) == 1 else {"type": "Sequence", "processors": untyped}
    return Tokenizer.from_str(json.dumps({**content, "post_processor": processor}))


def _untyped(processor: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return a post-processor other than a sequence, which gives the type 0 to both texts of a pair."""
    if processor is None:
        return _state(processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:0", special_tokens=[]))
    kind = processor["type"]
    if kind == "BertProcessing":
        (first, _), (last, _) = processor["cls"], processor["sep"]
        single, pair = f"{first} $A {last}", f"{first} $A {last} $B {last}"
        return _state(processors.TemplateProcessing(single, pair, [tuple(processor["cls"]), tuple(processor["sep"])]))
    if kind != "TemplateProcessing":
        return processor
    pieces = {
        part: [{name: {**piece, "type_id": 0} for name, piece in item.items()} for item in processor[part]]
        for part in ("single", "pair")
    }
    return {**processor, **pieces}


def _state(processor: Any) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(processor.__getstate__())
    return state
