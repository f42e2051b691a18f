"""Where requests come in and answers go out: names each request, turns it away or hands it on, and keeps account of it.

One callable, not a layer for each of these: under overload nine requests of ten get no further, and what a refusal
costs is taken from those who are served.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from everystop.core.errors import RequestError
from everystop.server.errors import ErrorResponse, dialect_of, error_response, failure_response
from everystop.server.http_counts import LEFT, Handlers, HttpCounts, note_start
from everystop.server.request_ids import HEADER, given_name
from everystop.server.request_log import Refusal, refusal_of

FAILED = 500


class Guard(Protocol):
    """Who keeps requests out by their headers."""

    def refusal(self, scope: Scope) -> Exception | None:
        """The error that is the answer; None lets the request in."""


class Edge:
    """The outermost ASGI application, around `app`, whose `routes` and files (`is_file`) give requests their names in
    the `counts`.

    The `guards` are asked in turn, and the first error is the answer. The answer's `x-request-id` is the client's own,
    else the id that the answer carries (`answer_name` in the scope). Any exception from `app` becomes a 500 and one
    line of the log, which names the request; inside an answer it drops the connection. `refused` hears of each answer
    of 400 or more that belongs to no noted request.

    The scope's `wire` is the connection itself, for an answer that has begun; `given_name` is what the client calls the
    request, "" for nothing; `status`, `content_length`, `error` and `error_code` are left there by whoever answers.
    """

    def __init__(
        self,
        app: ASGIApp,
        counts: HttpCounts,
        routes: Sequence[BaseRoute],
        is_file: Callable[[str], bool],
        guards: Sequence[Guard] = (),
        refused: Callable[[Refusal], None] = lambda refusal: None,
    ) -> None:
        self.routes = routes
        self._app = app
        self._counts = counts
        self._handlers = Handlers(routes, is_file)
        self._guards = tuple(guards)
        self._refused = refused

    def turn_away(self, scope: Scope) -> ErrorResponse | None:
        """The answer to a request that its headers keep out, which whoever asks must give; None lets it in, and the
        guards are not asked again, unless they failed.
        """
        start_ns = time.monotonic_ns()
        try:
            error = self._refusal(scope)
        except Exception:
            return None
        if error is None:
            scope["is_let_in"] = True
            return None
        answer = error_response(error, dialect_of(scope))
        answer.note(scope)
        if scope["given_name"]:
            answer.raw_headers.append((HEADER, scope["given_name"].encode()))
        self._end(scope, answer.status_code, start_ns)
        return answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        start_ns, status = time.monotonic_ns(), LEFT
        scope["app"], scope["wire"] = self, send
        self._counts.num_open += 1
        try:
            await self._answer(scope, receive, send)
        except BaseException:
            status = FAILED
            raise
        finally:
            self._counts.num_open -= 1
            self._end(scope, scope.get("status", status), start_ns)

    def _end(self, scope: Scope, status: int, start_ns: int) -> None:
        self._counts.note(self._handlers.name(scope), scope, status, time.monotonic_ns() - start_ns)
        if status >= 400 and "answered_client" not in scope:
            self._refused(refusal_of(scope, status))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = message.get("headers", ())
                note_start(scope, message["status"], headers)
                name = scope["given_name"] or scope.get("answer_name", "")
                if name:
                    message = {**message, "headers": [*headers, (HEADER, name.encode())]}
            await send(message)

        try:
            error = None if "is_let_in" in scope else self._refusal(scope)
            if error is None:
                await self._app(scope, receive, send_named)
            else:
                await error_response(error, dialect_of(scope))(scope, receive, send_named)
        except Exception as unforeseen:
            await _fail(unforeseen, scope, receive, send_named)

    def _refusal(self, scope: Scope) -> Exception | None:
        scope["given_name"] = ""
        try:
            scope["given_name"] = given_name(scope["headers"])
            for guard in self._guards:
                error = guard.refusal(scope)
                if error is not None:
                    return error
        except RequestError as error:
            return error
        return None


async def _fail(error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
    if not scope["given_name"]:
        scope.setdefault("answer_name", f"req-{secrets.token_hex(12)}")
    response = failure_response(error, scope)
    if "status" not in scope:
        await response(scope, receive, send)
        return
    scope["abort"]()
    while (await receive())["type"] != "http.disconnect":
        pass
