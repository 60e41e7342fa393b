"""Conversion of a checkpoint's generation_config.json to options of :class:`Generation`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zoo.artifact.generation_config import DEFAULTS, chosen_values
from zoo.artifact.weights import load_json
from zoo.errors import UsageError
from zoo_runtime.generation.options import NEW_TOKENS, Generation

__all__ = ["read_generation_config", "without_contradictions"]

_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_FOREIGN_SAMPLING = {"epsilon_cutoff", "eta_cutoff", "top_h", "typical_p"}
_SHARED = (
    "max_new_tokens", "min_new_tokens", "min_length", "repetition_penalty", "no_repeat_ngram_size", "suppress_tokens",
    "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "num_beams", "length_penalty",
    "early_stopping", "renormalize_logits",
)  # fmt: skip
"""Keys with the same name and meaning in :class:`Generation`."""


def read_generation_config(path: Path, *, causal: bool, ends: Sequence[int]) -> tuple[dict[str, Any], set[str]]:
    """Return the options that a file sets, and its keys that are not supported.

    Sampling options are ignored unless ``do_sample`` is true. For a causal model, ``max_length`` only shortens texts
    (``max_new_tokens`` keeps its default), because it is often simply the model's number of positions.

    Args:
        path: path of generation_config.json.
        causal: whether the model continues prompts, whose tokens then count towards lengths.
        ends: end tokens, which bad words do not suppress.

    Raises:
        UsageError: a value is invalid.
    """
    stored = {key: value for key, value in load_json(path).items() if value is not None}
    lost = chosen_values(stored).keys() - {*_SHARED, *_SAMPLING, *_FOREIGN_SAMPLING, "do_sample", "max_length"}
    if stored.get("early_stopping") == "never":
        lost.add("early_stopping")
        del stored["early_stopping"]
    if isinstance(forced := stored.get("forced_eos_token_id"), list):
        stored["forced_eos_token_id"] = forced[0] if len(forced) == 1 else None
        lost |= {"forced_eos_token_id"} if len(forced) > 1 else set()
    options = {key: Generation.check_field(key, stored[key], path) for key in _SHARED if key in stored}
    if "sequence_bias" in stored:
        options["logit_bias"] = Generation.check_field(
            "logit_bias", _sequence_bias(stored["sequence_bias"], path), path
        )
        lost.discard("sequence_bias")
    words = stored.get("bad_words_ids", [])
    if not isinstance(words, list) or not all(isinstance(word, list) and word for word in words):
        raise UsageError(f"bad_words_ids must be lists of token ids, got {words!r}", path)
    if all(len(word) == 1 for word in words):
        lost.discard("bad_words_ids")
    if banned := [word[0] for word in words if len(word) == 1 and word[0] not in ends]:
        options["suppress_tokens"] = (*options.get("suppress_tokens", ()), *banned)
    if "min_new_tokens" in options:
        options.pop("min_length", None)
    if "max_length" in stored and "max_new_tokens" not in options:
        longest = Generation.check_field("max_length", stored["max_length"], path)
        options |= {"max_length": longest, "max_new_tokens": NEW_TOKENS} if causal else {"max_new_tokens": longest - 1}
    samples = stored.get("do_sample", False)
    if not isinstance(samples, bool):
        raise UsageError(f"do_sample must be bool, got {samples!r}", path)
    if samples and options.get("num_beams", 1) > 1:
        lost.add("do_sample")
    elif samples:
        lost |= chosen_values(stored).keys() & _FOREIGN_SAMPLING
        options |= {key: stored.get(key, DEFAULTS[key]) for key in _SAMPLING}
        options["top_k"] = options["top_k"] or None  # 0 means no limit
    Generation.from_dict(options, path)
    return options, lost


def _sequence_bias(pairs: Any, path: Path) -> dict[tuple[int, ...], float]:
    try:
        return {tuple(map(int, ids)): float(value) for ids, value in pairs}
    except (TypeError, ValueError) as error:
        raise UsageError(f"sequence_bias must be pairs of token ids and a number, got {pairs!r:.60}", path) from error


def without_contradictions(stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a file that do not contradict the given ones."""
    dropped = set(given)
    if given.get("temperature") == 0 or given.get("num_beams", 1) > 1:
        dropped.update(_SAMPLING)
    if given.get("temperature") or given.get("stop"):
        dropped.add("num_beams")
    for pair in ({"max_length", "max_new_tokens"}, {"min_length", "min_new_tokens"}):
        dropped |= pair if pair & given.keys() else set()
    return {key: value for key, value in stored.items() if key not in dropped}
