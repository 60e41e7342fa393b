"""The OpenAPI document, made from the declarations of the routes and their bodies."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from zoo.version import __version__
from zoo_runtime.server.http.operations import Operation
from zoo_runtime.server.http.responses import as_json

__all__ = ["document", "document_operation"]

_REFERENCE = "#/components/schemas/{model}"
_ERRORS = {"/v1": "Error", "/v2": "InferenceError"}
"""Schemas of errors, by the beginning of a path."""
_SCHEMAS: Mapping[str, Any] = {
    "Error": {
        "type": "object",
        "properties": {
            "error": {
                "type": "object",
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
                "required": ["message", "type", "param", "code"],
                "additionalProperties": False,
            }
        },
        "required": ["error"],
        "additionalProperties": False,
    },
    "InferenceError": {
        "type": "object",
        "properties": {"error": {"type": "string"}},
        "required": ["error"],
        "additionalProperties": False,
    },
}


def document(operations: Sequence[Operation]) -> dict[str, Any]:
    """Return the OpenAPI document, of version 3.1, of operations."""
    bodies = list(dict.fromkeys(operation.body for operation in operations if operation.body is not None))
    references, components = models_json_schema([(body, "validation") for body in bodies], ref_template=_REFERENCE)
    by_body = {body: reference for (body, _), reference in references.items()}
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        reference = by_body[operation.body] if operation.body is not None else None
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(operation, reference)
    schemas = {**components.get("$defs", {}), **_SCHEMAS}
    security = {"key": {"type": "http", "scheme": "bearer", "description": "Needed if the server has a key."}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "zoo serve", "version": __version__, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": security},
    }


def document_operation(operations: Sequence[Operation]) -> Operation:
    """Return the route of the document, which describes the others."""
    content = document(operations)

    async def show(request: Request) -> Response:
        return as_json(content)

    return Operation(method="GET", path="/openapi.json", handler=show, summary="This document.", public=True)


def _described(operation: Operation, reference: Any) -> dict[str, Any]:
    answers = operation.answers or {"application/json": {"type": "object"}}
    error = _ERRORS.get(operation.path[:3], "Error")
    operation_object: dict[str, Any] = {
        "operationId": _identifier(operation),
        "summary": operation.summary,
        "responses": {
            "200": {
                "description": "The answer.",
                "content": {kind: {"schema": dict(schema)} for kind, schema in answers.items()},
            },
            "default": {
                "description": "An error.",
                "content": {"application/json": {"schema": {"$ref": _REFERENCE.format(model=error)}}},
            },
        },
    }
    if operation.path.endswith(("/readyz", "/ready", "/health")):
        operation_object["responses"]["503"] = operation_object["responses"]["200"] | {"description": "Not ready."}
    names = re.findall(r"\{(\w+)\}", operation.path)
    if names:
        operation_object["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if reference is not None:
        content: dict[str, Any] = {"application/json": {"schema": reference}}
        if operation.binary:
            content["application/octet-stream"] = {}
        operation_object["requestBody"] = {"required": True, "content": content}
    if not operation.public:
        operation_object["security"] = [{}, {"key": []}]
    return operation_object


def _identifier(operation: Operation) -> str:
    words = re.findall(r"\w+", operation.path)
    return "_".join([operation.method.lower(), *words])
