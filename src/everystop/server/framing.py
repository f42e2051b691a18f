"""How an answer goes onto its connection: head and first bytes together, without chunks for HTTP/1.0, and as the last
one where the client may not have sent its body; knows nothing of what is answered.
"""

from __future__ import annotations

import asyncio

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class JoinedHead:
    """The transport of one answer: its head waits for what is written in the same turn of the loop, so that an answer
    in one piece costs one system call, and whoever reads it wakes once.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""
        self._has_begun = False

    def write(self, data: bytes) -> None:
        """Send, or keep what is written first until the next call of anything."""
        if not self._has_begun:
            self._has_begun, self._head = True, data
            self._loop.call_soon(self._flush)
        elif self._head:
            head, self._head = self._head, b""
            self._transport.write(head + data)
        else:
            self._transport.write(data)

    def _flush(self) -> None:
        head, self._head = self._head, b""
        if head and not self._transport.is_closing():
            self._transport.write(head)

    def close(self) -> None:
        """Send what waits, and no more."""
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:
        """As the transport says."""
        return self._transport.is_closing()


class UnframedSend:
    """`send` for HTTP/1.0 clients, who know no chunks: a body of unknown length ends where the connection does."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._has_length = True

    async def __call__(self, message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start":
            self._has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not self._has_length:
                self._cycle.chunked_encoding = False
        elif message["type"] == "http.response.body" and not self._has_length:
            self._cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)


class LastSend:
    """`send` for a client that waits to be told to send its body (RFC 9110, section 10.1.1). If it is answered instead,
    nobody can know whether the body follows, so the connection ends with that answer.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send

    async def __call__(self, message: ASGISendEvent) -> None:
        if self._cycle.waiting_for_100_continue:
            self._cycle.keep_alive = False
        await self._send(message)
