"""Maps every error to the wire, once: HTTP status, OpenAI's error object, `Retry-After`."""

from __future__ import annotations

import json
import logging
from http import HTTPStatus
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from everystop.core.errors import Draining, EngineDead, EverystopError, RequestError

logger = logging.getLogger(__name__)


class BodyTooLarge(RequestError):
    """The body exceeds the limit (HTTP 413)."""


class BodyEncoded(RequestError):
    """The body is compressed, or otherwise encoded (HTTP 415)."""


class ModelUnknown(RequestError):
    """The request names a model that is not served here (HTTP 404)."""


class RequestUnknown(RequestError):
    """No request of that id is remembered, or none that the caller may see (HTTP 404)."""


class Unauthorized(RequestError):
    """No valid API key came with the request (HTTP 401)."""


class Forbidden(RequestError):
    """The request comes from where none is taken from, such as another site's page (HTTP 403)."""


class Overloaded(EverystopError):
    """The queue is full (HTTP 429); `retry_after_s` says when it should have moved, `code` whose queue it is."""

    def __init__(self, message: str, retry_after_s: int, code: str | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.code = code


class Loading(EverystopError):
    """The weights are still being loaded (HTTP 503)."""


class GenerationFailed(EverystopError):
    """The engine gave up one request, such as for non-finite logits (HTTP 500)."""


class ClientGone(Exception):
    """The client closed its connection; nobody is left to answer."""


class Wire(NamedTuple):
    """How one kind of error looks on the wire."""

    status: int
    kind: str
    code: str | None = None
    retry_after_s: int | None = None


_UNFORESEEN = Wire(500, "server_error")
_WIRE: dict[type, Wire] = {
    RequestError: Wire(400, "invalid_request_error"),
    Unauthorized: Wire(401, "authentication_error", "invalid_api_key"),
    Forbidden: Wire(403, "permission_error"),
    ModelUnknown: Wire(404, "invalid_request_error", "model_not_found"),
    RequestUnknown: Wire(404, "invalid_request_error", "request_not_found"),
    BodyTooLarge: Wire(413, "invalid_request_error", "body_too_large"),
    BodyEncoded: Wire(415, "invalid_request_error", "unsupported_content_encoding"),
    Overloaded: Wire(429, "rate_limit_error", "queue_full", 1),
    GenerationFailed: Wire(500, "server_error", "generation_failed"),
    Loading: Wire(503, "service_unavailable", "loading", 1),
    Draining: Wire(503, "service_unavailable", "draining", 5),
    EngineDead: Wire(503, "service_unavailable", "engine_failed", 30),
}


def error_object(error: Exception) -> dict[str, Any]:
    """OpenAI's `{"error": {…}}`; the text of an unforeseen exception stays in the log."""
    wire = _wire(error)
    known = isinstance(error, EverystopError)
    return {
        "error": {
            "message": str(error) if known else "internal error; the server's log has the details",
            "type": wire.kind,
            "param": getattr(error, "param", None),
            "code": getattr(error, "code", None) or wire.code,
        }
    }


def error_response(error: Exception) -> Response:
    """The HTTP answer to an error that came before the response began."""
    wire = _wire(error)
    headers = {}
    retry_after_s = getattr(error, "retry_after_s", wire.retry_after_s)
    if retry_after_s is not None:
        headers["retry-after"] = str(retry_after_s)
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    return _reply(wire.status, error_object(error), headers)


def failure_response(error: Exception) -> Response:
    """As `error_response`; what nobody foresaw goes to the log too."""
    if not isinstance(error, EverystopError | ClientGone):
        logger.error("unforeseen error in a request", exc_info=error)
    return error_response(error)


async def handle_error(_request: Request, error: Exception) -> Response:
    """Starlette's hook for `failure_response`."""
    return failure_response(error)


async def handle_http_exception(_request: Request, error: Exception) -> Response:
    """404 and 405, raised by the router, in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    message = {404: "no such path", 405: "this path does not take that method"}.get(error.status_code, error.detail)
    code = HTTPStatus(error.status_code).name.lower()
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    return _reply(error.status_code, body, dict(error.headers or {}))


def _reply(status: int, body: dict[str, Any], headers: dict[str, str]) -> Response:
    return Response(json.dumps(body), status, headers, media_type="application/json")


def _wire(error: Exception) -> Wire:
    return next((_WIRE[kind] for kind in type(error).__mro__ if kind in _WIRE), _UNFORESEEN)
