"""Turns generations away that the queue has no room for, and those that are never taken, when their headers have come:
before they are routed, before their bodies are waited for.
"""

from __future__ import annotations

import time
from collections.abc import Set

from starlette.types import ASGIApp, Receive, Scope, Send

from everystop.core.errors import RequestError
from everystop.server.bodies import check_headers
from everystop.server.errors import Overloaded, dialect_of, error_response
from everystop.server.http_counts import announced_bytes
from everystop.server.state import Phase, ServerState


class Doorman:
    """ASGI middleware, to be put behind whatever asks who is there; at `paths` answers are generated."""

    def __init__(self, app: ASGIApp, state: ServerState, paths: Set[str]) -> None:
        self._app = app
        self._state = state
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in self._paths and scope["method"] == "POST" and self._state.phase is Phase.READY:
            try:
                check_headers(scope["headers"])
                self._state.board.queue.check_bytes(announced_bytes(scope["headers"]) or 0, time.monotonic_ns())
            except (Overloaded, RequestError) as error:
                await error_response(error, dialect_of(scope))(scope, receive, send)
                return
        await self._app(scope, receive, send)
