"""Turns generations away that the queue has no room for, and those that are never taken, when their headers have come:
before they are routed, before their bodies are waited for.
"""

from __future__ import annotations

import time
from collections.abc import Set

from starlette.types import Scope

from everystop.core.errors import RequestError
from everystop.server.bodies import check_headers
from everystop.server.errors import Overloaded
from everystop.server.http_counts import announced_bytes
from everystop.server.state import Phase, ServerState


class Doorman:
    """A guard of the edge, the last, since whoever is not let in need not know how full it is; at `paths` answers are
    generated.
    """

    def __init__(self, state: ServerState, paths: Set[str]) -> None:
        self._state = state
        self._paths = paths

    def refusal(self, scope: Scope) -> Exception | None:
        """The error that is the answer; None lets the request in."""
        if scope["path"] in self._paths and scope["method"] == "POST" and self._state.phase is Phase.READY:
            try:
                check_headers(scope["headers"])
                self._state.board.queue.check_bytes(announced_bytes(scope["headers"]) or 0, time.monotonic_ns())
            except (Overloaded, RequestError) as error:
                return error
        return None
