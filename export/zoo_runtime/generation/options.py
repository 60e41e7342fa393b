"""Options of text generation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zoo.config import Settings
from zoo.errors import UsageError
from zoo.limits import BEAMS
from zoo_runtime.generation.bias import bias_settings, read_bias

__all__ = [
    "CONSTRAINTS", "MOST_DRAFTED", "MOST_PENALTY", "MOST_SUBTRACTED", "NEW_TOKENS", "NOT_NEGATIVE", "POSITIVE", "SEEDS",
    "Generation",
]  # fmt: skip

CONSTRAINTS = ("json_schema", "regex", "grammar")
"""Options that constrain texts; at most one is set."""
MOST_DRAFTED = 1024
"""Largest number of tokens that are drafted at once: a step computes logits for all of them."""
MOST_PENALTY = 1000.0
"""Largest ``repetition_penalty``, and inverse of the smallest: logits stay finite in float32."""
MOST_SUBTRACTED = 2.0
"""Largest absolute value of ``presence_penalty`` and ``frequency_penalty``, as in OpenAI's API."""
SEEDS = (-(2**63), 2**64 - 1)
"""Smallest and largest random seed: integers of 64 bits, with or without a sign."""
NEW_TOKENS = 32
"""Default number of new tokens."""
POSITIVE = ("max_new_tokens", "max_length", "repetition_penalty", "top_k", "top_p", "num_beams", "draft_tokens")
"""Options that must be positive, if they are set."""
NOT_NEGATIVE = ("temperature", "min_new_tokens", "min_length", "no_repeat_ngram_size", "prompt_lookup")
"""Options that must not be negative."""


@dataclass(frozen=True, kw_only=True)
class Generation(Settings):
    """Options of text generation, with the usual names and meanings. They apply in the order below."""

    max_new_tokens: int | None = None
    """Maximum new tokens, also limited by the model's positions. By default ``max_length`` if set, else 32."""
    max_length: int | None = None
    """Maximum length, including the prompt (or the decoder's start token)."""
    min_new_tokens: int = 0
    """Minimum new tokens before an end token."""
    min_length: int = 0
    """Minimum length before an end token, including the prompt (or the decoder's start token)."""
    logit_bias: tuple[str, ...] = ()
    """Values that are added to logits, each ``TOKEN=VALUE`` with a token id or a text; in Python also a dictionary.
    The value of several ids, ``1,2=VALUE``, or of a text of several tokens, is added to the last after the others."""
    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies negative ones, of tokens already in the text (Keskar et al. 2019)."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the new text has, in [-2, 2]. The prompt does not count."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token for each time that the new text has it, in [-2, 2]."""
    no_repeat_ngram_size: int = 0
    """Forbid repeating n-grams of this size (Paulus et al. 2018). 0 allows repetition."""
    suppress_tokens: tuple[int, ...] = ()
    """Tokens that are never chosen, unless forced."""
    begin_suppress_tokens: tuple[int, ...] = ()
    """Tokens that are not chosen as the first new token, or as the one after ``forced_bos_token_id``."""
    forced_bos_token_id: int | None = None
    """Token forced at the second position, if the text so far has one token: the first token of a target."""
    forced_eos_token_id: int | None = None
    """Token forced at the last position, when the maximum length is reached."""
    temperature: float = 0.0
    """Divides logits before sampling. 0 takes the likeliest token each time."""
    top_k: int | None = None
    """Sample from the k likeliest tokens (Fan et al. 2018)."""
    top_p: float | None = None
    """Sample from the likeliest tokens that together have this probability (Holtzman et al. 2020)."""
    min_p: float | None = None
    """Sample from tokens with at least this fraction of the likeliest one's probability (Nguyen et al. 2024)."""
    seed: int = 0
    """Random seed for sampling. A text depends on the seed, the prompt and the input's number, never on its batch."""
    num_beams: int = 1
    """Number of beams; above 1, use beam search."""
    length_penalty: float = 1.0
    """A beam's score is its log-probability divided by its length to this power (Wu et al. 2016)."""
    early_stopping: bool = False
    """End as soon as there are ``num_beams`` finished texts, even if better ones could follow."""
    renormalize_logits: bool = False
    """Renormalise the probabilities that score beams after applying penalties."""
    stop: tuple[str, ...] = ()
    """Stop strings: the text ends before the first of them."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a text, in addition to the model's end tokens."""
    ignore_eos: bool = False
    """Go on after the model's end tokens, which are still forbidden before ``min_new_tokens``."""
    json_schema: str | None = None
    """JSON schema of the text, as JSON, or as a dictionary in Python."""
    additional_properties: bool = False
    """Allow objects of the schema to have properties that it does not name, where it does not say whether they may."""
    regex: str | None = None
    """Regular expression that the whole text matches, in the syntax of Rust's regex crate."""
    grammar: str | None = None
    """Context-free grammar of the text, in llguidance's variant of Lark."""
    shown_tokens: tuple[str, ...] = ()
    """Special tokens that stay in the text, such as ``<tool_call>``; others are left out."""
    prompt_lookup: int = 0
    """Draft this many tokens from the last place in the text where its last tokens also occur (Saxena 2023)."""
    draft: str | None = None
    """Directory of a smaller exported model with the same tokenizer, which drafts tokens (Leviathan et al. 2023)."""
    draft_tokens: int = 4
    """Number of tokens that the smaller model drafts at a time."""
    logprobs: int | None = None
    """Add to results the log-probability of each new token, and of this many likeliest ones in its place."""

    @classmethod
    def check_field(cls, key: str, value: Any, where: object = None) -> Any:
        """Return ``value`` converted for the field ``key``; dictionaries are accepted where their text is stored."""
        if key == "json_schema" and isinstance(value, Mapping):
            value = json.dumps(value)
        if key == "logit_bias" and isinstance(value, Mapping):
            try:
                value = bias_settings(value)
            except ValueError as error:
                raise UsageError(str(error), where) from error
        return super().check_field(key, value, where)

    def __post_init__(self) -> None:
        self.default("max_new_tokens", NEW_TOKENS if self.max_length is None else self.max_length)
        self.require_positive(*POSITIVE)
        self._check_ranges()
        self._check_sampling()
        self._check_beams()
        read_bias(self.logit_bias)
        constraints = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(constraints) > 1:
            raise ValueError(f"texts can have one constraint only, got {' and '.join(constraints)}")
        if self.draft is not None and self.prompt_lookup:
            raise ValueError(f"tokens are drafted in one way only: prompt_lookup is {self.prompt_lookup}, draft is set")
        if "" in self.stop:
            raise ValueError("a stop string must not be empty")

    def _check_ranges(self) -> None:
        for name in NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if (self.logprobs or 0) < 0:
            raise ValueError(f"logprobs must not be negative, got {self.logprobs}")
        for name in ("prompt_lookup", "draft_tokens"):
            if getattr(self, name) > MOST_DRAFTED:
                raise ValueError(f"{name} must be at most {MOST_DRAFTED}, got {getattr(self, name)}")
        if not 1 / MOST_PENALTY <= self.repetition_penalty <= MOST_PENALTY:
            bounds = f"[{1 / MOST_PENALTY:g}, {MOST_PENALTY:g}]"
            raise ValueError(f"repetition_penalty must lie in {bounds}, got {self.repetition_penalty}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name)) <= MOST_SUBTRACTED:
                bounds = f"[-{MOST_SUBTRACTED:g}, {MOST_SUBTRACTED:g}]"
                raise ValueError(f"{name} must lie in {bounds}, got {getattr(self, name)}")
        if not SEEDS[0] <= self.seed <= SEEDS[1]:
            raise ValueError(f"seed must be an integer of 64 bits, got {self.seed}")
        if abs(self.length_penalty) > 100:
            raise ValueError(f"length_penalty must lie in [-100, 100], got {self.length_penalty}")
        for name in ("top_p", "min_p"):
            if not 0 <= (getattr(self, name) or 0) <= 1:
                raise ValueError(f"{name} must lie in [0, 1], got {getattr(self, name)}")

    def _check_sampling(self) -> None:
        if self.temperature:
            return
        for name in ("top_k", "top_p", "min_p"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} requires sampling, but temperature is 0: set a temperature")

    def _check_beams(self) -> None:
        if self.num_beams > BEAMS.value():
            raise ValueError(f"num_beams must be at most {BEAMS.value()}, got {self.num_beams} ({BEAMS.remedy})")
        if self.num_beams == 1:
            return
        if self.temperature:
            raise ValueError(
                f"beam search cannot sample: num_beams is {self.num_beams}, temperature is {self.temperature}"
            )
        if self.stop:
            raise ValueError("beam search does not support stop strings: num_beams is above 1 and stop is set")
        if self.draft is not None or self.prompt_lookup:
            raise ValueError("beam search cannot use drafts: num_beams is above 1, draft or prompt_lookup is set")
