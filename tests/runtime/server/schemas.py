"""Random values that fit a JSON schema, for the part of the language in which the server declares its bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
"""Any value."""
KNOWN = {"$ref", "additionalProperties", "anyOf", "const", "default", "description", "discriminator", "enum",
         "exclusiveMinimum", "items", "maxItems", "maxProperties", "maximum", "minItems", "minLength", "minimum",
         "oneOf", "pattern", "patternProperties", "properties", "required", "title", "type"}  # fmt: skip


def values(schema: Mapping[str, Any], document: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Return values that fit a schema of a document."""
    assert schema.keys() <= KNOWN, schema.keys() - KNOWN
    if "$ref" in schema:
        return st.deferred(lambda: values(resolved(schema, document), document))
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    for name in ("anyOf", "oneOf"):
        if name in schema:
            return st.one_of([values(part, document) for part in schema[name]])
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    match schema.get("type"):
        case None:
            return JSON
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer":
            return st.integers(low, high if high is not None else 2**65)
        case "number":
            strict = "exclusiveMinimum" in schema
            return st.floats(low, high, exclude_min=strict, allow_nan=False, allow_infinity=False)
        case "string":
            text = st.text(min_size=schema.get("minLength", 0), max_size=12)
            return st.from_regex(schema["pattern"], fullmatch=True) if "pattern" in schema else text
        case "array":
            return st.lists(values(schema.get("items", {}), document), min_size=schema.get("minItems", 0), max_size=3)
        case "object":
            return objects(schema, document)
    raise AssertionError(schema)


def objects(schema: Mapping[str, Any], document: Mapping[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return objects that fit a schema, with few of their optional fields."""
    known = schema.get("properties", {})
    if known:
        needed = schema.get("required", [])
        optional = st.lists(st.sampled_from([name for name in known if name not in needed] or needed), max_size=3)
        return optional.flatmap(
            lambda names: st.fixed_dictionaries({name: values(known[name], document) for name in {*needed, *names}})
        )
    pattern, content = next(iter(schema.get("patternProperties", {}).items()), ("", {}))
    return st.dictionaries(st.from_regex(pattern, fullmatch=True), values(content, document), max_size=3)


def resolved(schema: Mapping[str, Any], document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema to which a reference points."""
    found: Any = document
    for name in schema["$ref"].removeprefix("#/").split("/"):
        found = found[name]
    return found
