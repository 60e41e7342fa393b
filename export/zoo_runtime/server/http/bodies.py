"""Bodies of requests: declarations from which both their checks and the OpenAPI document are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import jiter
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails

from zoo_runtime.server.request_error import RequestError

__all__ = ["UNSUPPORTED", "Body", "BodyPart", "parse_object"]

_CODES = {"missing": "missing_field", "extra_forbidden": "unknown_field"}
UNSUPPORTED = "Not supported"
"""Beginning of the docstring of a field that has a single valid value."""
_TYPE_ERRORS = ("_type", "_parsing", "_attributes_type")


def parse_object(data: bytes) -> dict[str, Any]:
    """Parse a body.

    Raises :class:`RequestError` unless it is a JSON object of Unicode texts and finite numbers without duplicate names.
    """
    try:
        value = jiter.from_json(data, allow_inf_nan=False, cache_mode="none", catch_duplicate_keys=True)
    except ValueError as error:
        raise RequestError(400, f"the body is not valid JSON ({error})", "invalid_json") from error
    if not isinstance(value, dict):
        raise RequestError(400, f"the body must be a JSON object, got {type(value).__name__}", "invalid_json")
    return value


class BodyPart(BaseModel):
    """An object in a body. Unknown fields and conversions between types are errors."""

    model_config = ConfigDict(
        allow_inf_nan=False, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _stop_at_first_unknown(cls, value: Any) -> Any:
        """Leave out all unknown fields but the first: each would be an error, and there can be very many."""
        if cls.model_config.get("extra") == "forbid" and isinstance(value, dict):
            names = {field.alias or name for name, field in cls.model_fields.items()}
            unknown = [name for name in value if name not in names]
            value = {name: content for name, content in value.items() if name in names or name == unknown[0]}
        return value


class Body(BodyPart):
    """The fields of a request. A field that is null is not set."""

    @classmethod
    def read(cls, data: bytes) -> Self:
        """Parse a body. Raises :class:`RequestError` for an unknown, missing or wrong field."""
        return cls.check(parse_object(data))

    @classmethod
    def check(cls, fields: dict[str, Any]) -> Self:
        """Check the fields of a body. Raises :class:`RequestError` as :meth:`read` does."""
        try:
            return cls.model_validate({name: value for name, value in fields.items() if value is not None})
        except ValidationError as error:
            errors = error.errors(include_url=False, include_context=False, include_input=False)
            refusal = _as_request_error(errors, fields)
            declared = cls.model_fields.get(refusal.param or "")
            if declared is not None and (declared.description or "").startswith(UNSUPPORTED):
                remedy = str(declared.description).removeprefix(UNSUPPORTED).replace("``", "'").rstrip(".")
                refusal.message = f"{refusal.param} is not supported{remedy}"
            raise refusal from error


def _as_request_error(errors: Sequence[ErrorDetails], fields: dict[str, Any]) -> RequestError:
    """Return the error of the first field that is wrong. There are several errors for one of several types."""
    param = _param(errors[0])
    of_field = [error for error in errors if _param(error) == param]
    kinds = {error["type"] for error in of_field}
    code = _CODES.get(of_field[0]["type"])
    if code is None:
        code = "invalid_type" if all(kind.endswith(_TYPE_ERRORS) for kind in kinds) else "invalid_value"
    if code in _CODES.values():
        path = ".".join(map(str, _path(of_field[0]["loc"], fields)))
        problem = f"the field {path!r} is missing" if code == "missing_field" else f"unknown field {path!r}"
        return RequestError(400, problem[:200], code, param)
    reasons = dict.fromkeys(error["msg"].removeprefix("Value error, ") for error in of_field)
    prefix = f"{param}: " if param else ""
    return RequestError(400, prefix + "; or: ".join(reasons), code, param)


def _path(loc: Sequence[str | int], fields: Any) -> Sequence[str | int]:
    """Return the path to a field in a body. pydantic also names the member of a union that it has tried."""
    for left_out in (len(loc), *range(1, len(loc) - 1)):
        path = [*loc[:left_out], *loc[left_out + 1 :]]
        place = fields
        for step in path[:-1]:
            exists = isinstance(place, dict) or (isinstance(place, list) and isinstance(step, int))
            place = place.get(step) if isinstance(place, dict) else place[step] if exists else None
        if isinstance(place, dict):
            return path
    return loc


def _param(error: ErrorDetails) -> str | None:
    """Return the field in which an error lies, with the place of an element of a list of objects."""
    name, *rest = map(str, error["loc"][:2]) if error["loc"] else [None]
    is_place = len(error["loc"]) > 1 and isinstance(error["loc"][1], int)
    return None if name is None else f"{name}[{rest[0]}]" if is_place else name[:100]
