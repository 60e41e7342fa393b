"""Objects of JSON schemas are closed where the schema does not say, without making it unsatisfiable."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from zoo_runtime import load_session
from zoo_runtime.generation.json_schemas import close_objects

ONE = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
TWO = {"type": "object", "properties": {"b": {"const": 2}}, "required": ["b"]}


def without(schema: Any) -> dict[str, Any]:
    """Return a closed copy of a schema."""
    copy: dict[str, Any] = deepcopy(schema)
    close_objects(copy)
    return copy


CLOSED: dict[str, tuple[dict[str, Any], Any, bool]] = {
    "an object": (ONE, {"a": 1, "x": 1}, False),
    "one inside": ({"properties": {"o": ONE}}, {"o": {"a": 1, "x": 1}}, False),
    "items": ({"type": "array", "items": ONE}, [{"a": 1, "x": 1}], False),
    "first items": ({"prefixItems": [ONE]}, [{"a": 1, "x": 1}], False),
    "a definition": ({"$ref": "#/$defs/A", "$defs": {"A": ONE}}, {"a": 1, "x": 1}, False),
    "an alternative": ({"anyOf": [ONE, TWO]}, {"b": 2, "x": 1}, False),
    "one of": ({"oneOf": [ONE, TWO]}, {"b": 2, "x": 1}, False),
    "properties by pattern": ({"patternProperties": {"^p": ONE}}, {"p": {"a": 1, "x": 1}}, False),
    "patterns beside names": ({**ONE, "patternProperties": {"^x": {}}}, {"a": 1, "x": 1}, True),
    "other properties": ({"additionalProperties": ONE}, {"k": {"a": 1, "x": 1}}, False),
    "one that says so": ({**ONE, "additionalProperties": True}, {"a": 1, "x": 1}, True),
    "one that is named properties": ({"properties": {"properties": {"const": 1}}}, {"properties": 1}, True),
    "no properties": ({"type": "object"}, {"x": 1}, True),
    "a value": ({"const": {"properties": {"a": 1}}}, {"properties": {"a": 1}}, True),
    "parts of a whole": ({"allOf": [ONE, TWO]}, {"a": 1, "b": 2}, True),
    "a part by reference": (
        {"allOf": [{"$ref": "#/$defs/A~1%20"}, TWO], "$defs": {"A/ ": ONE}}, {"a": 1, "b": 2}, True),
    "properties beside alternatives": ({**ONE, "anyOf": [TWO, {"required": ["a"]}]}, {"a": 1, "b": 2}, True),
    "properties beside a reference": ({**ONE, "$ref": "#/$defs/B", "$defs": {"B": TWO}}, {"a": 1, "b": 2}, True),
    "a single part": ({"allOf": [ONE]}, {"a": 1, "x": 1}, False),
    "itself": ({**ONE, "properties": {"a": {"anyOf": [{"$ref": "#"}, {"const": 1}]}}}, {"a": {"a": 1, "x": 1}}, False),
    "a reference to nothing": ({**ONE, "$ref": "#/$defs/A/0/x"}, None, True),
}  # fmt: skip


@pytest.mark.parametrize("name", CLOSED)
def test_objects_are_closed(name: str) -> None:
    schema, value, is_valid = CLOSED[name]
    found = without(schema)
    if value is not None:
        assert jsonschema.Draft202012Validator(found).is_valid(value) == is_valid
        assert jsonschema.Draft202012Validator(schema).is_valid(value)
    assert without(found) == found


def test_texts_have_named_properties_only(exported_model: Callable[..., Path]) -> None:
    """A bias towards another name wins only if the options allow it."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    options = {"json_schema": schema, "max_new_tokens": 60, "temperature": 3.0}
    with load_session(exported_model("gpt-tiny"), unverified=True) as session:
        closed = [session.run("x", **options, seed=seed) for seed in range(20)]
        opened = [session.run("x", **options, seed=seed, additional_properties=True) for seed in range(20)]
    names = [set(json.loads(result["generated"])) for result in closed if result["finish_reason"] != "length"]
    assert names
    assert all(name <= {"a"} for name in names)
    assert any('"' in result["generated"] and '{"a"' not in result["generated"] for result in opened)
