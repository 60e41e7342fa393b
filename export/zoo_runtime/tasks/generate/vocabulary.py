"""Tokens that a model can generate, and those that end a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo.contract import dim_size
from zoo.errors import UsageError
from zoo_runtime.running.context import Context
from zoo_runtime.running.runner import require_outputs

__all__ = ["check_tokens", "end_tokens", "vocabulary_of"]


_TOKENS = (
    "stop_token_ids", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id",
)  # fmt: skip
"""Options that contain tokens."""


def vocabulary_of(session: Context) -> int:
    """Return the number of tokens that the model can generate."""
    logits = next(tensor for tensor in session.graphs[-1].output_tensors() if tensor.name == "logits")
    return dim_size(logits.dims[-1], {})


def end_tokens(session: Context) -> tuple[int, ...]:
    """Return the model's end tokens that it can generate: a smaller vocabulary may lack those of a preset."""
    end = session.option("eos_token_id")
    ends = () if end is None else end if isinstance(end, tuple) else (end,)
    vocabulary = vocabulary_of(session)
    return tuple(token for token in ends if 0 <= token < vocabulary)


def check_tokens(options: Mapping[str, Any], session: Context, where: object) -> None:
    """Raise :class:`UsageError` if an option contains a token outside the vocabulary."""
    decoder = session.graphs[-1]
    require_outputs(decoder, ("logits",), session.path)
    vocabulary = vocabulary_of(session)
    for name in _TOKENS:
        value = options.get(name)
        for token in value if isinstance(value, tuple) else () if value is None else (value,):
            if not 0 <= token < vocabulary:
                raise UsageError(f"{name} contains {token}, outside the vocabulary of {vocabulary}", where)
