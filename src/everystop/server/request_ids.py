"""Gives answers an `x-request-id`, streamed or not: the client's own, else the id that the answer carries; and answers
whatever nobody foresaw, which always gets one.
"""

from __future__ import annotations

import re
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from everystop.core.errors import RequestError
from everystop.server.errors import dialect_of, error_response, failure_response
from everystop.server.http_counts import note_start

MAX_CHARS = 128
HEADER = b"x-request-id"
_GIVEN = re.compile(rb"[!-~]{1,%d}" % MAX_CHARS)


class RequestIds:
    """ASGI middleware; the scope's `given_name` is what the client sent ("" for nothing), and `answer_name` is what
    those behind set; the answer's `status` is left there for whoever keeps account. 400 for an id that is too long or
    not made of printable ASCII characters. Any exception from behind becomes a 500 and one line of the log, which names
    the request; inside an answer it drops the connection.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        given = [value for name, value in scope["headers"] if name == HEADER]
        if given and (len(given) > 1 or _GIVEN.fullmatch(given[0]) is None):
            message = (
                f"the header x-request-id must be one id of 1 to {MAX_CHARS} printable ASCII characters, no blanks"
            )
            error = RequestError(message, code="invalid_request_id")
            await error_response(error, dialect_of(scope))(scope, receive, send)
            return
        scope["given_name"] = given[0].decode("ascii") if given else ""

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                note_start(scope, message["status"], message.get("headers", ()))
                name = scope["given_name"] or scope.get("answer_name", "")
                if name:
                    message = {**message, "headers": [*message.get("headers", ()), (HEADER, name.encode())]}
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except Exception as error:
            await _fail(error, scope, receive, send_named)


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
