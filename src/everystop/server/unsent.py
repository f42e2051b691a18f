"""What is kept for a client and not yet written; large answers are written in pieces, as their clients take them."""

from __future__ import annotations

from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

PIECE_BYTES = 1 << 20


def _nothing() -> int:
    return 0


class Unsent:
    """The bytes that wait for one client behind those that its connection has: `growing` counts what is generated
    meanwhile, and `num_rest` is what is left of an answer that is whole, and grows no more.
    """

    def __init__(self) -> None:
        self.growing: Callable[[], int] = _nothing
        self.num_rest = 0


def unsent_of(scope: Scope) -> Unsent:
    """The account of a request's connection; one that nobody looks at where there is no connection."""
    unsent: Unsent = scope.get("unsent") or Unsent()
    return unsent


async def send_body(scope: Scope, send: Send, body: bytes) -> None:
    """The whole body of an answer whose head has been sent."""
    unsent = unsent_of(scope)
    for start in range(0, max(len(body), 1), PIECE_BYTES):
        piece = body[start : start + PIECE_BYTES]
        unsent.num_rest = len(body) - start
        is_last = start + len(piece) == len(body)
        await send({"type": "http.response.body", "body": piece, "more_body": not is_last})
    unsent.num_rest = 0


class WholeResponse(Response):
    """A response that may be large."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send_body(scope, send, bytes(self.body))
