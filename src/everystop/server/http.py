"""The HTTP edge: bounds on what a client may send and how long it may take, and uvicorn without its signal handling."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterator

import httptools
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from everystop.server.errors import BodyEncoded, BodyTooLarge, ClientGone, Overloaded
from everystop.server.http_counts import announced_bytes

MAX_HEADER_BYTES = 64 * 1024
MAX_BODY_BYTES = 32 * 1024 * 1024
MAX_BODIES_BYTES = 16 * MAX_BODY_BYTES
MAX_PIPELINED = 16
KEEP_ALIVE_S = 65
RECEIVE_S = 60.0
SEND_S = 30.0
logger = logging.getLogger(__name__)
_CLOSE = b"connection: close\r\ncontent-length: 0\r\n\r\n"
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\n" + _CLOSE
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\n" + _CLOSE


class Bodies:
    """Counts the bytes of all bodies that are being received or prepared: memory that nobody has been admitted for."""

    def __init__(self) -> None:
        self._num_bytes = 0

    @contextlib.contextmanager
    def room(self) -> Iterator[Callable[[int], None]]:
        """A function that takes room for more bytes of one body; all of it is given back in the end.

        It raises Overloaded where there is none.
        """
        num_taken = 0

        def take(num_bytes: int) -> None:
            nonlocal num_taken
            if self._num_bytes + num_bytes > MAX_BODIES_BYTES:
                raise Overloaded(
                    f"bodies of more than {MAX_BODIES_BYTES:,} bytes are being received; try again later",
                    retry_after_s=1,
                )
            self._num_bytes += num_bytes
            num_taken += num_bytes

        try:
            yield take
        finally:
            self._num_bytes -= num_taken


async def read_body(request: Request, take_room: Callable[[int], None]) -> bytes:
    """The whole body; raises BodyTooLarge as soon as it is known to be too large, BodyEncoded, ClientGone.

    `take_room` is told of each piece.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("identity", ""):
        raise BodyEncoded(f"content-encoding {encoding[:60]!r} is not supported; send the body as it is")
    if (announced_bytes(request.scope["headers"]) or 0) > MAX_BODY_BYTES:
        raise _body_too_large()
    body = bytearray()
    try:
        async for chunk in request.stream():
            take_room(len(chunk))
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise _body_too_large()
    except ClientDisconnect:
        raise ClientGone from None
    return bytes(body)


def _body_too_large() -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {MAX_BODY_BYTES:,} bytes; send less at once")


class _UnframedSend:
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


class _LastSend:
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


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with an end to headers and to waiting for a request.

    A client that leaves is noticed by all of its pipelined requests, not by the last alone. Upgrades are passed over,
    body and all: httptools would drop the body of a request that offers one. HTTP/1.0 clients get no chunks. A client
    that takes nothing for `SEND_S`, while something waits for it, is cut off; `is_slow` in its scopes tells so. `abort`
    in a scope drops the connection at once, with all that its client has not taken, and `has_left` tells whether
    it has ended.
    """

    _header_bytes = 0
    _in_headers = True
    _has_begun = False
    _has_large_headers = False
    _passes_over = False
    _deadline: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    _num_left = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._open_cycles: list[RequestResponseCycle] = []
        self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell all requests of this connection."""
        self._end_deadline()
        self._end_stall()
        for cycle in self._open_cycles:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count bytes as long as no header block has ended in them."""
        self._unset_keepalive_if_required()
        if self._in_headers:
            self._header_bytes += len(data)
        try:
            while data:
                data = self._feed(data)
        except httptools.HttpParserError:
            if not self._has_large_headers:
                self.send_400_response("Invalid HTTP request received.")
        is_large = self._has_large_headers or (self._in_headers and self._header_bytes > MAX_HEADER_BYTES)
        if is_large and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def _feed(self, data: bytes) -> bytes:
        """Parse; returns what is left behind the headers of a request that offers an upgrade."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._pass_over_upgrade()
            rest: bytes = data[offer.args[0] :]
            return rest
        return b""

    def _pass_over_upgrade(self) -> None:
        """Go on with a parser that has read the same headers but the offer, and expects the body."""
        framing = [pair for pair in self.headers if pair[0] in (b"content-length", b"transfer-encoding")]
        lines = b"".join(b"%s: %s\r\n" % pair for pair in framing)
        self.parser = httptools.HttpRequestParser(self)
        self._passes_over = True
        try:
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + lines + b"\r\n")
        finally:
            self._passes_over = False

    def on_message_begin(self) -> None:
        """A new request begins."""
        if self._passes_over:
            return
        self._in_headers, self._header_bytes, self._has_begun = True, 0, True
        if self._deadline is None:
            self._start_deadline()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A part of the target."""
        if not self._passes_over:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        if not self._passes_over:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The header block has ended."""
        if self._passes_over:
            return
        self._in_headers = False
        if sum(len(name) + len(value) for name, value in self.headers) + len(self.url) > MAX_HEADER_BYTES:
            self._has_large_headers = True  # the whole block came in one piece
            raise ValueError("the headers are too large")  # which stops the parser
        self.scope["abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]
        self.scope["has_left"] = self.transport.is_closing  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()
        self.cycle.transport = JoinedHead(self.transport, self.loop)  # type: ignore[assignment]
        self._open_cycles.append(self.cycle)
        if self.scope["http_version"] == "1.0":
            self.cycle.send = _UnframedSend(self.cycle)  # type: ignore[method-assign]
        elif self.expect_100_continue:
            self.cycle.send = _LastSend(self.cycle)  # type: ignore[method-assign]
        if len(self._open_cycles) > MAX_PIPELINED:
            self.transport.close()
        elif self.pipeline:
            self.flow.resume_reading()  # else nobody would see the client leave

    def on_message_complete(self) -> None:
        """The body has ended: what comes next is a header block again."""
        if self.parser.should_upgrade():
            return
        self._in_headers, self._header_bytes = True, 0
        self._end_deadline()
        self.cycle.scope["received_ns"] = time.monotonic_ns()  # type: ignore[typeddict-unknown-key]
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """One answer has been given."""
        self._open_cycles = [cycle for cycle in self._open_cycles if not cycle.response_complete]
        super().on_response_complete()

    def pause_writing(self) -> None:
        """More waits for the client than is kept for it without asking when it will take some."""
        super().pause_writing()
        self._end_stall()
        self._start_stall()

    def resume_writing(self) -> None:
        """It has taken most of it."""
        self._end_stall()
        super().resume_writing()

    def _start_stall(self) -> None:
        self._num_left = self.transport.get_write_buffer_size()
        self._stall = self.loop.call_later(SEND_S, self._look_at_reader)

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _look_at_reader(self) -> None:
        """Cut off a client that has taken nothing; one that is only slow gets the same time again."""
        if self.transport.get_write_buffer_size() < self._num_left:
            self._start_stall()
            return
        logger.info("a client took nothing of its answer for %g s and was cut off", SEND_S)
        for cycle in self._open_cycles:
            cycle.scope["is_slow"] = True  # type: ignore[typeddict-unknown-key]
        self.transport.abort()

    def _start_deadline(self) -> None:
        self._deadline = self.loop.call_later(RECEIVE_S, self._give_up)

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        """The request has not arrived in time; one that stands behind another may have to wait for that one."""
        if len(self._open_cycles) > (0 if self._in_headers else 1):
            self._start_deadline()
            return
        if self._has_begun and not any(cycle.response_started for cycle in self._open_cycles):
            self.transport.write(_TOO_SLOW)
        self.transport.close()


def watch_peers(sock: socket.socket) -> None:
    """Have the system end connections, accepted by this socket, whose peer has vanished without a word: after `SEND_S`
    with something to send it, after a minute without.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 30),
        ("TCP_KEEPINTVL", 10),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", round(SEND_S * 1000)),
    ):
        if hasattr(socket, name):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class HttpServer(uvicorn.Server):
    """uvicorn on a given socket; signals are left to the caller, who sets `should_exit`. It speaks HTTPS where there is
    a `tls` context.
    """

    def __init__(self, app: ASGIApp, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedHttpProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # nobody here believes them
                ssl_context_factory=None if tls is None else lambda config, default: tls,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=2,
            )
        )

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn does, over sockets that notice a peer which has vanished."""
        for sock in sockets or ():
            watch_peers(sock)
        await super().serve(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install nothing."""
        yield
