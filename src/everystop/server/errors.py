"""Maps every error to the wire, once: HTTP status, the error object of the client's dialect, `Retry-After`."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from enum import StrEnum
from http import HTTPStatus
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from everystop.core.errors import (
    ChatTemplateError,
    ChatTemplateMissing,
    Draining,
    EngineDead,
    EverystopError,
    RequestError,
)
from everystop.server.http_counts import LEFT, note_start
from everystop.server.paths import TGI_PATHS

logger = logging.getLogger(__name__)

Headers = Sequence[tuple[bytes, bytes]]

_MAX_PATH_CHARS = 100


class BodyTooLarge(RequestError):
    """The body exceeds the limit (HTTP 413)."""


class BodyEncoded(RequestError):
    """The body is compressed, or otherwise encoded (HTTP 415)."""


class BodyNotJson(RequestError):
    """The body says that it is something else than JSON in UTF-8 (HTTP 415)."""


class BrokenHttp(RequestError):
    """What has come is no HTTP request, or one whose end cannot be known (HTTP 400)."""


class HeadersTooLarge(RequestError):
    """Target and headers, or what stands behind or between the pieces of a body, exceed the limit (HTTP 431)."""


class ReceivedTooSlowly(RequestError):
    """The request was not there in time (HTTP 408)."""


class HttpVersionUnknown(RequestError):
    """A version of HTTP that is not spoken here (HTTP 505)."""


class TooManyConnections(RequestError):
    """As many connections have requests as there may be connections (HTTP 503)."""


class ModelUnknown(RequestError):
    """The request names a model that is not served here (HTTP 404)."""


class RequestUnknown(RequestError):
    """No request of that id is remembered, or none that the caller may see (HTTP 404)."""


class Unauthorized(RequestError):
    """No valid API key came with the request (HTTP 401)."""


class Forbidden(RequestError):
    """The request comes from where none is taken from, such as another site's page, or asks for what only an
    administrator may have (HTTP 403).
    """


class NoEstimate(RequestError):
    """How long a request would have taken otherwise cannot be told, as things are (HTTP 409)."""


class Overloaded(EverystopError):
    """There is no room for one more (HTTP 429); `retry_after_s` says when there should be, `code` where."""

    def __init__(self, message: str, retry_after_s: int, code: str | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.code = code


class Loading(EverystopError):
    """The weights are still being loaded (HTTP 503)."""


class GenerationFailed(EverystopError):
    """The engine gave up one request, such as for non-finite logits (HTTP 500)."""


class TimedOut(EverystopError):
    """The request has taken as long as it may, whoever set the time (HTTP 504)."""

    def __init__(self, limit_s: float, *, is_own: bool) -> None:
        whose = "its own timeout" if is_own else "--max-request-seconds"
        super().__init__(
            f"the request was not finished within {limit_s:g} s ({whose}) and has been ended; ask for fewer tokens, or "
            f"{'send a longer timeout' if is_own else 'raise --max-request-seconds'}"
        )


class EstimateTooSlow(EverystopError):
    """The record is too long to be simulated in the time there is for it (HTTP 504)."""


class ClientGone(Exception):
    """The client closed its connection; nobody is left to answer."""


class SlowReader(ClientGone):
    """The client takes its answer too slowly, or not at all; its connection has been cut off."""


class Dialect(StrEnum):
    """Whose error objects a client reads: OpenAI's, or those of Hugging Face's TGI."""

    OPENAI = "openai"
    TGI = "tgi"


def dialect_of(scope: Scope) -> Dialect:
    """What the path speaks, unless the body has told (`dialect` in the scope)."""
    told: Dialect | None = scope.get("dialect")
    return told or (Dialect.TGI if scope["path"] in TGI_PATHS else Dialect.OPENAI)


class Wire(NamedTuple):
    """How one kind of error looks on the wire; `code` where the error itself has none."""

    status: int
    kind: str
    code: str
    retry_after_s: int | None = None


_INVALID = "invalid_request_error"
_UNFORESEEN = Wire(500, "server_error", "server_error")
_WIRE: dict[type, Wire] = {
    RequestError: Wire(400, _INVALID, "invalid_value"),
    ChatTemplateMissing: Wire(400, _INVALID, "chat_template_missing"),
    ChatTemplateError: Wire(400, _INVALID, "chat_template_error"),
    BrokenHttp: Wire(400, _INVALID, "invalid_http"),
    Unauthorized: Wire(401, "authentication_error", "invalid_api_key"),
    Forbidden: Wire(403, "permission_error", "origin_not_allowed"),
    ModelUnknown: Wire(404, _INVALID, "model_not_found"),
    RequestUnknown: Wire(404, _INVALID, "request_not_found"),
    ReceivedTooSlowly: Wire(408, _INVALID, "receive_timeout"),
    NoEstimate: Wire(409, _INVALID, "no_estimate"),
    BodyTooLarge: Wire(413, _INVALID, "body_too_large"),
    BodyEncoded: Wire(415, _INVALID, "unsupported_content_encoding"),
    BodyNotJson: Wire(415, _INVALID, "unsupported_content_type"),
    HeadersTooLarge: Wire(431, _INVALID, "headers_too_large"),
    Overloaded: Wire(429, "rate_limit_error", "queue_full", 1),
    ClientGone: Wire(LEFT, "client_gone", "client_gone"),  # which nobody sees but whoever counts
    GenerationFailed: Wire(500, "server_error", "generation_failed"),
    TooManyConnections: Wire(503, "service_unavailable", "too_many_connections", 1),
    Loading: Wire(503, "service_unavailable", "loading", 1),
    Draining: Wire(503, "service_unavailable", "draining", 5),
    EngineDead: Wire(503, "service_unavailable", "engine_failed", 30),
    TimedOut: Wire(504, "timeout_error", "request_timeout"),
    EstimateTooSlow: Wire(504, "timeout_error", "estimate_timeout"),
    HttpVersionUnknown: Wire(505, _INVALID, "http_version_not_supported"),
}
# TGI's word by HTTP status; it says 422 where OpenAI says 400, and 424 where the engine gave up.
_TGI_STATUS = {400: 422, 500: 424}
_TGI_TYPES = {
    401: "authentication",
    403: "permission",
    424: "generation",
    429: "overloaded",
    500: "unknown",
    503: "unhealthy",
    504: "timeout",
}


def error_object(error: Exception, dialect: Dialect = Dialect.OPENAI) -> dict[str, Any]:
    """OpenAI's `{"error": {…}}`, or TGI's; the text of an unforeseen exception stays in the log."""
    wire = _wire(error)
    known = isinstance(error, EverystopError)
    message = str(error) if known else "internal error; the server's log has the details"
    if dialect is Dialect.TGI:
        return _tgi_object(message, _status(wire, dialect))
    return _openai_object(message, wire.kind, code_of(error), getattr(error, "param", None))


def code_of(error: Exception) -> str:
    """The error's code on the wire: one of `error_codes.CODES`."""
    return getattr(error, "code", None) or _wire(error).code


class ErrorResponse(Response):
    """An error's answer, which leaves its code in the scope as `error_code`, its name as `error`, for whoever keeps
    account.
    """

    def __init__(self, content: bytes, status: int, headers: Headers, *, code: str, name: str) -> None:
        self.status_code, self.body, self.background = status, content, None
        self.raw_headers = [*headers, (b"content-length", b"%d" % len(content)), (b"content-type", b"application/json")]
        self._code = code
        self._name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.note(scope)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body})

    def note(self, scope: Scope) -> None:
        """Leave in the scope what is left there when it is sent."""
        scope["error_code"], scope["error"] = self._code, self._name
        note_start(scope, self.status_code, self.raw_headers)

    def as_bytes(self, *more: tuple[bytes, bytes]) -> bytes:
        """All of it as it goes over the wire, with more headers."""
        lines = [b"HTTP/1.1 %d %b" % (self.status_code, HTTPStatus(self.status_code).phrase.encode())]
        lines += [b"%b: %b" % header for header in (*self.raw_headers, *more)]
        return b"\r\n".join([*lines, b"", bytes(self.body)])


def _openai_object(message: str, kind: str, code: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _tgi_object(message: str, status: int) -> dict[str, Any]:
    return {"error": message, "error_type": _TGI_TYPES.get(status, "validation")}


def _status(wire: Wire, dialect: Dialect) -> int:
    """The HTTP status of an error in a dialect."""
    if dialect is Dialect.OPENAI or wire is _UNFORESEEN:
        return wire.status
    return _TGI_STATUS.get(wire.status, wire.status)


def error_response(error: Exception, dialect: Dialect = Dialect.OPENAI) -> ErrorResponse:
    """The HTTP answer to an error that came before the response began."""
    wire = _wire(error)
    headers = []
    retry_after_s = getattr(error, "retry_after_s", wire.retry_after_s)
    if retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % retry_after_s))
    if isinstance(error, Unauthorized):
        headers.append((b"www-authenticate", b"Bearer"))
    return _reply(_status(wire, dialect), error_object(error, dialect), headers, code_of(error), type(error).__name__)


def failure_response(error: Exception, scope: Scope) -> Response:
    """As `error_response` in the request's dialect; what nobody foresaw goes to the log too."""
    if not isinstance(error, EverystopError | ClientGone):
        log_unforeseen(error, scope)
    return error_response(error, dialect_of(scope))


def log_unforeseen(error: Exception, scope: Scope) -> None:
    """The one line about it, by the ids that the client may know the request by."""
    names = [name for key in ("answer_name", "given_name") if (name := scope.get(key))]
    logger.error(
        "unforeseen error in request %s", " ".join([*names[:1], *(f"({name})" for name in names[1:])]), exc_info=error
    )


async def handle_error(request: Request, error: Exception) -> Response:
    """Starlette's hook for `failure_response`."""
    return failure_response(error, request.scope)


async def handle_http_exception(request: Request, error: Exception) -> Response:
    """404 and 405, raised by the router; the message says what is served instead."""
    assert isinstance(error, HTTPException)
    message, headers = error.detail, []
    if error.status_code == 404:
        message = f"{request.scope['path'][:_MAX_PATH_CHARS]} is not served here; these paths are: {_served(request)}"
    elif error.status_code == 405:
        methods = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        headers.append((b"allow", methods.encode()))
        message = f"{request.scope['path'][:_MAX_PATH_CHARS]} takes {methods} only"
    code = HTTPStatus(error.status_code).name.lower()
    if dialect_of(request.scope) is Dialect.TGI:
        return _reply(error.status_code, _tgi_object(message, error.status_code), headers, code, code)
    body = _openai_object(message, "invalid_request_error", code)
    return _reply(error.status_code, body, headers, code, code)


def _served(request: Request) -> str:
    """The paths of the API, in the order of the routes; files of the dashboard are left out."""
    paths = [route.path.replace(":path}", "}") for route in request.app.routes]
    return ", ".join(dict.fromkeys(path for path in paths if not path.startswith("/ui/")))


def _reply(status: int, body: dict[str, Any], headers: Headers, code: str, name: str) -> ErrorResponse:
    return ErrorResponse(json.dumps(body).encode(), status, headers, code=code, name=name)


def _wire(error: Exception) -> Wire:
    return next((_WIRE[kind] for kind in type(error).__mro__ if kind in _WIRE), _UNFORESEEN)
