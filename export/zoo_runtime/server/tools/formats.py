"""The forms in which published models write calls of functions, one record each.

Sources: the chat templates of Hermes 2 Pro and Qwen, Llama 3.1 and 3.2, Mistral 7B v0.3 and Mistral Small 3.2,
FunctionGemma and Gemma 4.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from zoo_runtime.server.tools.json_text import (
    MalformedError,
    UnfinishedError,
    after_space,
    elements,
    members,
    object_end,
    value_end,
)
from zoo_runtime.server.tools.notation import read_notation
from zoo_runtime.server.tools.notation_grammar import notation_grammar

__all__ = ["FORMATS", "Call", "JsonCalls", "NamedCalls", "NotationCalls", "ToolFormat", "find_format"]

_NAME = r"[a-zA-Z0-9_-]+"


@dataclass(frozen=True)
class Call:
    """A call, or the part of it that is known."""

    name: str
    arguments: str
    """A JSON object."""


@dataclass(frozen=True, kw_only=True)
class ToolFormat(ABC):
    """How calls are written in a text: ``opening``, one call or several, ``closing``."""

    name: str
    marks: tuple[tuple[str, ...], ...]
    """A chat template is of this form if it has all parts of one of these tuples."""
    foreign: tuple[str, ...] = ()
    """Parts that only templates of other forms have."""
    opening: str
    """Mark before calls; empty if there is none."""
    closing: str = ""
    """Mark after calls, which is left out."""
    begin: str = ""
    """Text before calls, as it is written."""
    end: str = ""
    """Text after calls, as it is written."""
    separator: str = ""
    """Text between two calls; empty if each call has its own ``begin`` and ``end``."""
    gap: str = ""
    """Text between two calls that have their own ``begin`` and ``end``."""
    joint: str = ""
    """Characters that may stand between two calls, besides white space."""
    id_length: int = 24
    """Letters and digits of the id of a call."""
    id_prefix: str = "call_"

    @property
    def texts(self) -> tuple[str, ...]:
        """Marks that can be special tokens of a tokenizer."""
        return tuple(text for text in (self.opening, self.closing) if text)

    @property
    def openings(self) -> tuple[str, ...]:
        """Texts with which calls begin."""
        return (self.opening,)

    def fits(self, template: str) -> bool:
        """Return whether the calls in a chat template are of this form."""
        has_marks = any(all(mark in template for mark in marks) for marks in self.marks)
        return has_marks and not any(mark in template for mark in self.foreign)

    @abstractmethod
    def read(self, text: str, opening: str) -> tuple[list[Call], int]:
        """Return the calls at the start of a text that begins with ``opening``, and the place after them.

        Raises:
            MalformedError: whatever follows, it is no call.
            UnfinishedError: more text is needed.
        """

    def begun(self, text: str) -> list[Call]:
        """Return calls whose name is known, with their arguments so far. The text is known to become valid."""
        return []

    @abstractmethod
    def pieces(self, name: str) -> tuple[str, str]:
        """Return the texts before and after the arguments of a call."""

    def arguments(self, schema: Mapping[str, Any], written: Callable[[str], str]) -> str:
        """Return the expression of arguments that fit a schema, in llguidance's variant of Lark.

        Args:
            schema: the schema, of an object.
            written: returns the expression of a text.

        Raises :class:`zoo.UsageError` if the schema cannot be expressed.
        """
        separators = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        return f"%json {json.dumps({**schema, 'x-guidance': separators})}"


@dataclass(frozen=True, kw_only=True)
class JsonCalls(ToolFormat):
    """Each call is an object, ``{"name": ..., "arguments": {...}}``."""

    key: str = "arguments"
    """Name of the arguments as the model writes it; ``arguments`` and ``parameters`` are both read."""
    listed: bool = False
    """Whether calls stand in a list."""
    optional: str = ""
    """A mark that may precede calls without ``opening``."""

    @property
    def texts(self) -> tuple[str, ...]:
        return (*super().texts, *((self.optional,) if self.optional else ()))

    @property
    def openings(self) -> tuple[str, ...]:
        return (self.opening,) if self.opening else tuple(text for text in (self.optional, "{") if text)

    def read(self, text: str, opening: str) -> tuple[list[Call], int]:
        start = after_space(text, 0 if opening == "{" else len(opening))
        if start == len(text):
            raise UnfinishedError
        if text[start] not in ("[{" if self.listed else "{"):
            raise MalformedError
        end = value_end(text, start)
        places = list(elements(text, start)) if text[start] == "[" else [start]
        calls = [self._call(text, place) for place in places]
        found = [call for call in calls if call is not None]
        if not found or len(found) < len(calls):
            raise MalformedError(end)
        return found, end

    def _call(self, text: str, start: int) -> Call | None:
        """Return the call that is an element; None if it is another value."""
        if text[start] != "{":
            return None
        found = members(text, start)
        places = [found[key] for key in ("arguments", "parameters") if key in found]
        if "name" not in found or len(places) != 1:
            return None
        name = json.loads(text[slice(*found["name"])])
        arguments = text[slice(*places[0])]
        if arguments.startswith('"'):  # written as a text, as some models do
            arguments = json.loads(arguments)
        return Call(name, arguments) if isinstance(name, str) and _is_object(arguments) else None

    def begun(self, text: str) -> list[Call]:
        head = re.compile(r'\{\s*"name"\s*:\s*"(' + _NAME + r')"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
        return _begun(text, head)

    def pieces(self, name: str) -> tuple[str, str]:
        return f'{{"name": {json.dumps(name)}, "{self.key}": ', "}"


@dataclass(frozen=True, kw_only=True)
class NamedCalls(ToolFormat):
    """The name of a function stands before its arguments in JSON, after a mark of its own."""

    between: str
    """Mark between the name and the arguments, which is written; it need not be there."""
    identifier: str
    """Mark before an identifier of the call, which may stand between the two."""

    @property
    def texts(self) -> tuple[str, ...]:
        return (*super().texts, self.between, self.identifier)

    @property
    def _head(self) -> re.Pattern[str]:
        identifier, between = re.escape(self.identifier), re.escape(self.between)
        return re.compile(
            rf"{re.escape(self.opening)}\s*({_NAME})\s*(?:{identifier}\w+)?\s*(?:{between})?\s*(?=\{{)"
        )  # fmt: skip

    def read(self, text: str, opening: str) -> tuple[list[Call], int]:
        brace = text.find("{", len(opening))
        head = text[len(opening) : brace if brace >= 0 else len(text)]
        if not re.fullmatch(rf"[\s\w\-{re.escape(self.identifier + self.between)}]*", head, re.ASCII):
            raise MalformedError
        if brace < 0:
            raise UnfinishedError
        match = self._head.match(text)
        if match is None or match.end() != brace:
            raise MalformedError
        end = value_end(text, brace)
        return [Call(match[1], text[brace:end])], end

    def begun(self, text: str) -> list[Call]:
        return _begun(text, self._head)

    def pieces(self, name: str) -> tuple[str, str]:
        return name + self.between, ""


@dataclass(frozen=True, kw_only=True)
class NotationCalls(ToolFormat):
    """``call:NAME{...}``, with arguments in a notation of its own."""

    quote: str
    """Mark before and after texts."""

    @property
    def texts(self) -> tuple[str, ...]:
        return (*super().texts, self.quote)

    def read(self, text: str, opening: str) -> tuple[list[Call], int]:
        brace = text.find("{", len(opening))
        head = text[len(opening) : brace if brace >= 0 else len(text)]
        if not ("call:".startswith(head) or re.fullmatch(rf"call:({_NAME})?", head)):
            raise MalformedError
        if brace < 0:
            raise UnfinishedError
        arguments, end = read_notation(text, brace, self.quote)
        return [Call(head.removeprefix("call:"), json.dumps(arguments, ensure_ascii=False))], end

    def pieces(self, name: str) -> tuple[str, str]:
        return f"call:{name}", ""

    def arguments(self, schema: Mapping[str, Any], written: Callable[[str], str]) -> str:
        return notation_grammar(schema, written(self.quote))


def _begun(text: str, head: re.Pattern[str]) -> list[Call]:
    found: list[Call] = []
    place = 0
    while (match := head.search(text, place)) is not None:
        end = object_end(text, match.end())
        found.append(Call(match[1], text[match.end() : end]))
        if end is None:
            break
        place = end
    return found


def _is_object(text: str) -> bool:
    try:
        return after_space(text, value_end(text, start := after_space(text, 0))) == len(text) and text[start] == "{"
    except (MalformedError, UnfinishedError):
        return False


_HERMES = JsonCalls(
    name="hermes",
    marks=(("<tool_call>", "arguments"),),
    foreign=("<function=", "<arg_key>"),
    opening="<tool_call>", closing="</tool_call>", begin="<tool_call>\n", end="\n</tool_call>", gap="\n",
)  # fmt: skip
_LLAMA = JsonCalls(
    name="llama",
    marks=(("<|python_tag|>",), ('{"name": function name, "parameters":',)),
    opening="", optional="<|python_tag|>", key="parameters", separator="; ", joint=";",
)  # fmt: skip
_MISTRAL = JsonCalls(
    name="mistral",
    marks=(("[TOOL_CALLS]",),), foreign=("[ARGS]",),
    opening="[TOOL_CALLS]", listed=True, begin="[TOOL_CALLS] [", end="]", separator=", ", id_prefix="", id_length=9,
)  # fmt: skip
_MISTRAL_NAMED = NamedCalls(
    name="mistral-named",
    marks=(("[TOOL_CALLS]", "[ARGS]"),),
    opening="[TOOL_CALLS]", begin="[TOOL_CALLS]", between="[ARGS]", identifier="[CALL_ID]", id_prefix="", id_length=9,
)  # fmt: skip
_FUNCTION_GEMMA = NotationCalls(
    name="functiongemma",
    marks=(("<start_function_call>",),),
    opening="<start_function_call>", closing="<end_function_call>",
    begin="<start_function_call>", end="<end_function_call>", quote="<escape>",
)  # fmt: skip
_GEMMA = NotationCalls(
    name="gemma4",
    marks=(("<|tool_call>",),),
    opening="<|tool_call>", closing="<tool_call|>",
    begin="<|tool_call>", end="<tool_call|>", quote='<|"|>',
)  # fmt: skip
_JSON = JsonCalls(name="json", marks=(), opening="", separator="\n", joint=";,")

FORMATS: Mapping[str, ToolFormat] = {
    one.name: one for one in (_HERMES, _LLAMA, _MISTRAL, _MISTRAL_NAMED, _FUNCTION_GEMMA, _GEMMA, _JSON)
}
"""The forms by name. No template is recognised as ``json``."""


def find_format(template: str, forms: Collection[ToolFormat] = tuple(FORMATS.values())) -> ToolFormat | None:
    """Return the form of the calls in a chat template; None if it is not recognised."""
    return next((one for one in forms if one.fits(template)), None)
