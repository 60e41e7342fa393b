"""Constrained decoding: texts that match a JSON schema, a regular expression or a grammar, by llguidance.

V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from zoo.arrays import Array
from zoo.artifact.weights import parse_json
from zoo.errors import MissingPackageError, UsageError, argument
from zoo.limits import CONSTRAINT_CHARACTERS, CONSTRAINT_STEPS
from zoo.tokenizers.library import description, guarded
from zoo.tokenizers.tokenizer import Tokenizer
from zoo_runtime.generation.json_schemas import close_objects
from zoo_runtime.generation.options import CONSTRAINTS, Generation

__all__ = ["SPACE", "Constraint", "Matcher"]

SPACE = r" ?|\n[ \t]{0,32}"
"""Space between the parts of a JSON text: bounded, because models may repeat it without end."""
_TOO_LARGE = ("too big", "too many", "too large", "fuel exhausted")
"""Parts of llguidance's errors about its limits."""
_VOCABULARIES: WeakKeyDictionary[Tokenizer, dict[tuple[int, tuple[int, ...]], Any]] = WeakKeyDictionary()


class Constraint:
    """The constraint of the options, compiled for a tokenizer.

    Args:
        options: options of generation, one of which is a constraint.
        tokenizer: the tokenizer of the generated texts.
        vocabulary: V.
        ends: end tokens.

    Raises:
        MissingPackageError: llguidance is not installed.
        UsageError: the constraint is invalid, not supported or too large, or the bytes of the tokens are not known.
    """

    def __init__(self, options: Generation, tokenizer: Tokenizer, vocabulary: int, ends: Iterable[int]) -> None:
        try:
            import llguidance
        except ImportError as error:
            problem, remedy = "constraints need llguidance", "pip install attention-zoo[constraints]"
            raise MissingPackageError(problem, None, remedy) from error
        kind = next(name for name in CONSTRAINTS if getattr(options, name) is not None)
        value = getattr(options, kind)
        CONSTRAINT_CHARACTERS.check(
            len(value), f"a constraint of {len(value):,} characters", argument(kind), UsageError
        )
        matcher = llguidance.LLMatcher
        if kind == "json_schema":
            schema = _read_schema(value)
            if not options.additional_properties:
                close_objects(schema)
            try:
                grammar = matcher.grammar_from_json_schema(schema, {"whitespace_pattern": SPACE})
            except ValueError as error:  # a number beyond 64 bits
                raise UsageError(f"invalid or not supported ({error})", argument(kind)) from error
        elif kind == "regex":
            grammar = matcher.grammar_from_regex(value)
        else:
            grammar = matcher.grammar_from_lark(value)
        self._ends = frozenset(ends)
        self._may_end = not options.ignore_eos
        tokens = _read_vocabulary(tokenizer, vocabulary, tuple(sorted(self._ends)))
        limits = llguidance.LLParserLimits(initial_lexer_fuel=CONSTRAINT_STEPS.value())
        self._first = matcher(tokens, grammar, log_level=0, limits=limits)
        if reason := self._first.get_error() or _problem_at_first_token(self._first):
            lines = [line.strip() for line in reason.splitlines()]
            line = next((line for line in lines if line.startswith("error: ")), lines[0]).removeprefix("error: ")
            if any(part in line for part in _TOO_LARGE):
                CONSTRAINT_STEPS.refuse(
                    f"the constraint takes too many steps to compile ({line})", argument(kind), UsageError
                )
            raise UsageError(f"invalid or not supported ({line})", argument(kind))

    def start(self) -> Matcher:
        """Return the state at the start of a text. Nothing is compiled again."""
        return Matcher(self._first.deep_copy(), self._ends, self._may_end)


class Matcher:
    """The state of a constraint after a part of a text.

    Args:
        matcher: llguidance's state.
        ends: end tokens.
        may_end: allow them where the text satisfies the constraint; otherwise, it goes on to where nothing may follow.
    """

    def __init__(self, matcher: Any, ends: frozenset[int], may_end: bool) -> None:
        self._matcher = matcher
        self._ends = ends
        self._may_end = may_end

    @property
    def is_complete(self) -> bool:
        """Whether the text satisfies the constraint, and no token may follow."""
        return bool(self._matcher.is_stopped())

    @property
    def problem(self) -> str | None:
        """Why the constraint cannot be followed any more, such as a limit of the parser; None if it can."""
        return str(self._matcher.get_error()).partition("\n")[0] if self._matcher.is_error() else None

    def forbid(self, scores: Array) -> Array:
        """Return scores (V,) with minus infinity for tokens that may not follow. End tokens may if the text may end."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.zeros(len(scores), bool)
        bitmap = np.unpackbits(bits, bitorder="little")[: len(scores)].astype(bool)
        allowed[: len(bitmap)] = bitmap
        ends = [token for token in self._ends if token < len(scores)]
        allowed[ends] = self._may_end and self._matcher.is_accepting()
        return np.where(allowed, scores, -np.inf).astype(scores.dtype)

    def append(self, token: int) -> None:
        """Add a token of the text, which must be allowed and no end token; a limit of the parser sets ``problem``."""
        self._matcher.consume_token(token)

    def copy(self) -> Matcher:
        """Return a state that goes on independently."""
        return Matcher(self._matcher.deep_copy(), self._ends, self._may_end)


def _problem_at_first_token(matcher: Any) -> str:
    """Return the error after one possible first token; empty without one. Most of an expression is compiled for it."""
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    tried = matcher.deep_copy()
    for token in np.flatnonzero(np.unpackbits(bits, bitorder="little"))[:1].tolist():
        tried.consume_token(token)
    return str(tried.get_error())


def _read_schema(text: str) -> dict[str, Any]:
    """Parse a JSON schema; the library checks its content."""
    try:
        schema = parse_json(text.encode())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not JSON ({error})", argument("json_schema")) from error
    if not isinstance(schema, dict):
        raise UsageError(f"not a JSON schema, but {schema!r:.40}", argument("json_schema"))
    return schema


def _read_vocabulary(tokenizer: Tokenizer, vocabulary: int, ends: tuple[int, ...]) -> Any:
    """Return llguidance's table of the tokens' bytes, which takes a while for large vocabularies."""
    import llguidance

    cached = _VOCABULARIES.setdefault(tokenizer, {})
    if (vocabulary, ends) not in cached:
        content = description(tokenizer.backend)
        decoder = content.get("decoder") or {}
        if decoder.get("type") == "Metaspace":
            space = {"type": "Replace", "pattern": {"String": decoder["replacement"]}, "content": " "}
            content["decoder"] = {
                "type": "Sequence",
                "decoders": [space, {"type": "ByteFallback"}, {"type": "Fuse"}],
            }
        count = tokenizer.backend.get_vocab_size(with_added_tokens=True)
        # Without an end token, a special token marks the end; if there is none, the last token is never generated.
        marks = [token for token in ends if token < count] or sorted(tokenizer.special_ids)[:1] or [count - 1]
        size = max(vocabulary, count)
        try:
            with guarded():
                table = llguidance.LLTokenizer(json.dumps(content), n_vocab=size, eos_token=marks)
        except ValueError as error:
            problem = f"the bytes of the tokens are not known, so texts cannot be constrained ({error})"
            raise UsageError(problem, "tokenizer") from error
        cached[vocabulary, ends] = table
    return cached[vocabulary, ends]
