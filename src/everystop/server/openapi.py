"""The OpenAPI description of the server, made from its routes, the tables of fields and the table of operations."""

from __future__ import annotations

import mimetypes
import re
from collections.abc import Iterator, Sequence
from typing import Any

from starlette.routing import BaseRoute, Route

from everystop import __version__
from everystop.server import answer_schemas as answers
from everystop.server.answer_schemas import Schema
from everystop.server.errors import Dialect
from everystop.server.operations import JSON, OPERATIONS, REQUEST_ID, WHY, Operation, Tag
from everystop.server.paths import OPEN_PATHS, PATHS, TGI_PATHS

ABOUT = """\
An LLM inference server. Fields that are null are absent; unknown fields are refused by name. Every answer to a
generation carries its id in the header x-request-id, which a client may set. Headers over 64 KiB get 431, requests that
do not arrive within a minute 408, what is no HTTP 400 or 505: errors in OpenAI's shape, and the connection ends."""


def describe(routes: Sequence[BaseRoute], *, has_keys: bool) -> dict[str, Any]:
    """OpenAPI 3.1 of all `routes`; with `has_keys` every path but the open ones asks for one.

    Raises KeyError for a route that `OPERATIONS` does not know.
    """
    paths: dict[str, dict[str, Any]] = {}
    for method, path, operation in operations_of(routes):
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, operation, has_keys=has_keys)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Everystop", "version": __version__, "description": ABOUT},
        "servers": [{"url": "/"}],
        "tags": [{"name": tag.value} for tag in Tag],
        "paths": paths,
        "components": {
            "schemas": {"Error": answers.ERROR, "TgiError": answers.TGI_ERROR},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                "api-key": {"type": "apiKey", "in": "header", "name": "api-key"},
            },
        },
    }


def operations_of(routes: Sequence[BaseRoute]) -> Iterator[tuple[str, str, Operation]]:
    """Method, path and description of each route; HEAD is as GET."""
    for route in routes:
        assert isinstance(route, Route), "all that is served are plain routes"
        path = route.path.replace(":path}", "}")
        for method in sorted((route.methods or set()) - {"HEAD"}):
            yield method, path, OPERATIONS[method, path] if (method, path) in OPERATIONS else _file(path)


def _file(path: str) -> Operation:
    """A file of the dashboard; raises KeyError for any other path."""
    if path != "/ui" and not path.startswith("/ui/"):
        raise KeyError(path)
    kind = mimetypes.guess_type(path)[0] or "text/html"
    return Operation(
        tag=Tag.DASHBOARD,
        summary="A file of the dashboard",
        answer={kind: {}},
        other_answers={304: "The client has it"},
        parameters=REQUEST_ID if "{id}" in path else {},
    )


def _operation(method: str, path: str, operation: Operation, *, has_keys: bool) -> dict[str, Any]:
    is_file = (method, path) not in OPERATIONS
    needs_key = has_keys and not (is_file or path in OPEN_PATHS)
    described: dict[str, Any] = {
        "operationId": _name(method, path),
        "tags": [operation.tag.value],
        "summary": operation.summary,
        "responses": _responses(operation, _dialects(path), 401 if needs_key else None if has_keys else 403),
    }
    in_path: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "description": about, "schema": {"type": "string"}}
        for name, about in operation.parameters.items()
    ]
    in_query: list[dict[str, Any]] = [
        {"name": name, "in": "query", "required": one.is_required, "description": one.about, "schema": one.schema}
        for name, one in operation.query.items()
    ]
    if in_path or in_query:
        described["parameters"] = in_path + in_query
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": operation.body}}}
    if needs_key:
        described["security"] = [{"key": []}, {"x-api-key": []}, {"api-key": []}]
    return described


def _name(method: str, path: str) -> str:
    """Such as get_v1_models_name; a path that ends with a slash has a name of its own."""
    words = re.findall(r"\w+", path + "root" if path.endswith("/") else path)
    return "_".join([method.lower(), *words])


def _dialects(path: str) -> list[Dialect]:
    """Whose errors a path may answer with."""
    if path in TGI_PATHS:
        return [Dialect.TGI]
    may_be_tgi = any(each.may_be_tgi for each in PATHS if each.name == path)
    return [Dialect.OPENAI, Dialect.TGI] if may_be_tgi else [Dialect.OPENAI]


def _responses(operation: Operation, dialects: Sequence[Dialect], guard: int | None) -> dict[str, Any]:
    """By status; `guard` is the one for who may not come in, where somebody keeps the door."""
    statuses = {400, 500, *operation.errors, *(() if guard is None else (guard,))}
    responses: dict[str, Any] = {
        "200": {"description": "Success", "content": {kind: {"schema": s} for kind, s in operation.answer.items()}}
    }
    for status in sorted(statuses):
        responses[str(status)] = _error(status, dialects)
    for status, why in operation.other_answers.items():
        content = {"content": {JSON: {"schema": answers.HEALTH}}} if status >= 400 else {}
        responses[str(status)] = {"description": why, **content}
    return responses


def _error(status: int, dialects: Sequence[Dialect]) -> dict[str, Any]:
    names = {Dialect.OPENAI: "Error", Dialect.TGI: "TgiError"}
    schemas: list[Schema] = [{"$ref": f"#/components/schemas/{names[dialect]}"} for dialect in dialects]
    error: dict[str, Any] = {
        "description": WHY[status],
        "content": {JSON: {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}},
    }
    if status in (429, 503):
        about = "seconds until it is worth another try"
        error["headers"] = {"Retry-After": {"description": about, "schema": {"type": "integer", "minimum": 0}}}
    return error
