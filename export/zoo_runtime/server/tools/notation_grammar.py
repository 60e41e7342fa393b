"""JSON schemas as grammars of arguments in the notation of FunctionGemma and Gemma 4."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from zoo.errors import UsageError

__all__ = ["notation_grammar"]

_IGNORED = {"title", "description", "default", "examples", "$schema", "additionalProperties", "format"}
_PLAIN = {
    "integer": r"/-?(0|[1-9][0-9]{0,17})/",
    "number": r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?/",
    "boolean": '("true" | "false")',
    "null": '"null"',
}
_DEPTH = 32


def notation_grammar(schema: Mapping[str, Any], quote: str) -> str:
    """Return an expression, in llguidance's variant of Lark, of the values that fit a schema.

    Args:
        schema: a schema with ``type``, ``properties``, ``required``, ``items``, ``enum``, ``const`` and ``anyOf``.
        quote: the expression of the mark around texts.

    Raises :class:`UsageError` for other keywords.
    """
    return _value(schema, quote, 0)


def _value(schema: Any, quote: str, depth: int) -> str:
    if not isinstance(schema, Mapping) or depth > _DEPTH:
        raise UsageError("this form of calls has no such schema" if depth <= _DEPTH else "schema nested too deeply")
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return f"({' | '.join(_written(value, quote) for value in values)})"
    if "anyOf" in schema:
        return f"({' | '.join(_value(part, quote, depth + 1) for part in schema['anyOf'])})"
    kind = schema.get("type")
    known = {"object": {"properties", "required"}, "array": {"items"}}.get(kind if isinstance(kind, str) else "", set())
    if unknown := schema.keys() - _IGNORED - known - {"type"}:
        raise UsageError(f"the form of calls of this model does not support {min(unknown)!r} in a schema")
    match kind:
        case [*kinds]:
            return f"({' | '.join(_value({**schema, 'type': one}, quote, depth + 1) for one in kinds)})"
        case "string":
            return f"{quote} /[^<]*/ {quote}"
        case "array":
            item = _value(schema.get("items", {"type": "string"}), quote, depth + 1)
            return f'"[" ({item} ("," {item})*)? "]"'
        case "object":
            properties, needed = schema.get("properties", {}), schema.get("required", [])
            pairs = {
                name: f"{json.dumps(name + ':')} {_value(properties[name], quote, depth + 1)}" for name in properties
            }
            return f'"{{" {_members(pairs, needed)} "}}"'
        case str() if kind in _PLAIN:
            return _PLAIN[kind]
    raise UsageError(f"the form of calls of this model does not support the type {kind!r} in a schema")


def _members(pairs: Mapping[str, str], needed: Sequence[str]) -> str:
    """Return the expression of members of an object, those that are needed first."""
    first = [pairs[name] for name in pairs if name in needed]
    others = [pairs[name] for name in pairs if name not in needed]
    if first:
        return ' "," '.join(first) + "".join(f' ("," {pair})?' for pair in others)
    chains = [pair + "".join(f' ("," {later})?' for later in others[place + 1 :]) for place, pair in enumerate(others)]
    return f"({' | '.join(chains)})?" if chains else ""


def _written(value: Any, quote: str) -> str:
    match value:
        case str():
            return f"{quote} {json.dumps(value, ensure_ascii=False)} {quote}" if value else f"{quote} {quote}"
        case bool() | int() | float() | None:
            return json.dumps(json.dumps(value))
    raise UsageError(f"the form of calls of this model does not support {value!r:.40} in a schema")
