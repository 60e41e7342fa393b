"""JSON schemas whose objects have no properties but those that are named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

__all__ = ["close_objects"]

_BY_NAME = ("$defs", "definitions", "properties", "patternProperties")
"""Keywords whose values are schemas by name."""
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems")
"""Keywords whose values are lists of schemas."""
_SINGLE = ("additionalProperties", "items")
"""Keywords whose value is a schema."""
_SAME_OBJECT = ("allOf", "anyOf", "oneOf")
"""Keywords whose schemas describe the same value as the schema that has them."""


def close_objects(schema: dict[str, Any]) -> None:
    """Set ``additionalProperties`` to false, in place, in every object schema that has ``properties`` and does not say.

    OpenAI's strict mode requires it of schemas. Objects that several schemas describe together stay open, since each
    would forbid the properties that the others name: the parts of an ``allOf``, and ``properties`` beside ``anyOf``,
    ``oneOf``, ``allOf`` or ``$ref``.
    """
    kept: set[int] = set()
    for part in _schemas(schema):
        described = [name for name in (*_SAME_OBJECT, "$ref", "properties") if name in part]
        if len(described) > 1 or len(_list(part.get("allOf"))) > 1:
            _keep_open(part, schema, kept)
    for part in _schemas(schema):
        if isinstance(part.get("properties"), dict) and id(part) not in kept:
            part.setdefault("additionalProperties", False)


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and those inside it."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict):
            continue
        yield part
        for name in _BY_NAME:
            if isinstance(part.get(name), dict):
                waiting += part[name].values()
        for name in _LISTED:
            waiting += _list(part.get(name))
        waiting += [part[name] for name in _SINGLE if name in part]


def _keep_open(schema: Any, root: dict[str, Any], kept: set[int]) -> None:
    """Add a schema, and those that describe the same value, to those that stay open."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict) and id(part) not in kept:
            kept.add(id(part))
            for name in _SAME_OBJECT:
                waiting += _list(part.get(name))
            waiting.append(_target(part.get("$ref"), root))


def _target(reference: Any, root: dict[str, Any]) -> Any:
    """Return the schema to which a reference in the same document points; None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for step in unquote(reference[1:]).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isascii() and name.isdigit() and int(name[:9]) < len(found):
            found = found[int(name[:9])]
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
