"""The HTTP protocol and its server on uvicorn: bounds in bytes and in time for whatever a connection may send, or leave
untaken; knows nothing of what is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import httptools
import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from everystop.core.errors import RequestError
from everystop.server.beat import Beat
from everystop.server.errors import (
    BrokenHttp,
    Dialect,
    ErrorResponse,
    HeadersTooLarge,
    HttpVersionUnknown,
    ReceivedTooSlowly,
    TooManyConnections,
    dialect_of,
    error_response,
)
from everystop.server.framing import JoinedHead, LastSend, UnframedSend
from everystop.server.handshakes import Handshake, Handshakes
from everystop.server.listener import max_connections
from everystop.server.room import ConnectionRoom
from everystop.server.unsent import Unsent, unsent_of

MAX_HEADER_BYTES = 64 * 1024
PIECE_BYTES = 16 * 1024  # are parsed before what has come is counted; a read may bring more than all bounds
MAX_PIPELINED = 16
MAX_UNSENT_BYTES = 16 * 1024 * 1024  # that wait for one reader
MAX_UNSENT_BYTES_IN_ALL = 256 * 1024 * 1024
KEEP_ALIVE_S = 65
RECEIVE_S = 60.0
SEND_S = 30.0
LINGER_S = 2.0
VERSIONS = ("1.1", "1.0")
CLOSE = (b"connection", b"close")
logger = logging.getLogger(__name__)

TurnAway = Callable[[Scope], ErrorResponse | None]
NoteRefused = Callable[[RequestError], None]


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with an end to headers and to waiting for a request.

    What is no request is answered in the API's own shape, and ends the connection; so does whatever would stand behind
    an end that nobody can know. Trailers are dropped (RFC 9110, section 6.5.1). A client that leaves is noticed by all
    of its pipelined requests, not by the last alone. Upgrades are passed over, body and all: httptools would drop the
    body of a request that offers one. HTTP/1.0 clients get no chunks. A client that takes nothing for `SEND_S`, while
    something waits for it, is cut off; `is_slow` in its scopes tells so. `abort` in a scope drops the connection at
    once, with all that its client has not taken, and `has_left` tells whether it has ended; `unsent` is the
    account of what is kept for the client by whoever answers. Where there are as many connections as there may be, a
    new one takes the place of the one that has been without a request for longest; where all have one, it is refused.
    Over TLS `handshake` is the one that has led here.
    """

    config: HttpConfig
    handshake: Handshake | None = None
    _num_unplaced = 0  # bytes since the last that belonged to something
    _in_headers = True
    _has_begun = False
    _passes_over = False
    _is_over = False
    _deadline: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    _num_left = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._open_cycles: list[RequestResponseCycle] = []
        self._start_deadline()
        if self._has_room():
            return
        if self.config.room.has_time:
            self._refuse(
                TooManyConnections(
                    f"{self.config.room.num - 1:,} connections have requests, and no more are taken; try again"
                )
            )
        else:
            self.transport.abort()

    def _has_room(self) -> bool:
        """A connection that comes from its handshake counts already, and has its place, unless there was none then."""
        room, handshake = self.config.room, self.handshake
        if handshake is None:
            return room.enter(self)
        handshake.is_over = True
        room.work(handshake)
        if handshake.is_beyond:
            return room.settle(self)
        room.rest(self)
        return True

    def leave(self, *, at_once: bool) -> None:
        """Make room for others."""
        (self.transport.abort if at_once else self.transport.close)()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell all requests of this connection."""
        self._end_deadline()
        self._end_stall()
        self.config.room.exit(self)
        for cycle in self._open_cycles:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse; what still comes when all is over is read, and dropped, lest the last answer be lost."""
        self._unset_keepalive_if_required()
        rest = memoryview(data)
        while rest and not self._is_over:
            self._take_piece(rest[:PIECE_BYTES])
            rest = rest[PIECE_BYTES:]

    def _take_piece(self, data: memoryview) -> None:
        self._num_unplaced += len(data)
        try:
            while data:
                data = self._feed(data)
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(cause if isinstance(cause, RequestError) else BrokenHttp("what came is no valid HTTP request"))
        else:
            if self._num_unplaced > MAX_HEADER_BYTES:
                self._refuse(_headers_too_large())

    def _feed(self, data: memoryview) -> memoryview:
        """Parse; returns what is left behind the headers of a request that offers an upgrade."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._pass_over_upgrade()
            return data[offer.args[0] :]
        return data[:0]

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

    def _refuse(self, error: RequestError) -> None:
        """The connection is over: answers that are owed are given, and if none is, this error is the last one."""
        self._is_over = True
        self._end_deadline()
        owed = self._open_cycles
        broken = owed[-1] if owed and owed[-1].more_body and not owed[-1].response_started else None
        dialect = Dialect.OPENAI if broken is None else dialect_of(broken.scope)  # type: ignore[arg-type]
        if broken is not None:
            self._forget_last()
        if owed:
            owed[-1].keep_alive = False
        elif broken is not None or self._in_headers:
            logger.info("what a client sent was refused: %s", error)
            self.config.note_refused(error)
            self._say_last(error_response(error, dialect).as_bytes(CLOSE))
        else:
            self.transport.close()  # in the body of a request that has its answer

    def _forget_last(self) -> None:
        """The last request will not come whole."""
        cycle = self._open_cycles.pop()
        if self.pipeline and self.pipeline[0][0] is cycle:
            self.pipeline.popleft()
        cycle.disconnected = True
        cycle.message_event.set()

    def _say_last(self, answer: bytes) -> None:
        """Write, and close when the client has had time to read it: a close with something unread resets the connection
        (RFC 9112, section 9.6).
        """
        self.transport.write(answer)
        if not self.transport.can_write_eof():
            self.transport.close()
            return
        self.transport.write_eof()
        self.flow.resume_reading()
        self._deadline = self.loop.call_later(LINGER_S, self.transport.close)

    def on_message_begin(self) -> None:
        """A new request begins."""
        if self._passes_over:
            return
        self._in_headers, self._num_unplaced, self._has_begun = True, 0, True
        if self._deadline is None:
            self._start_deadline()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A part of the target."""
        if not self._passes_over:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; a trailer comes too late to be one."""
        if self._in_headers and not self._passes_over:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The header block has ended; what is raised here stops the parser."""
        if self._passes_over:
            return
        if sum(len(name) + len(value) for name, value in self.headers) + len(self.url) > MAX_HEADER_BYTES:
            raise _headers_too_large()  # the whole block came in one piece
        version = self.parser.get_http_version()
        if version not in VERSIONS:
            raise HttpVersionUnknown(f"HTTP/{version} is not spoken here; send HTTP/1.1")
        self.scope["abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]
        self.scope["has_left"] = self.transport.is_closing  # type: ignore[typeddict-unknown-key]
        self.scope["unsent"] = Unsent()  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()
        self._in_headers, self._num_unplaced = False, 0
        self.cycle.transport = JoinedHead(self.transport, self.loop)  # type: ignore[assignment]
        self._open_cycles.append(self.cycle)
        self.config.room.work(self)
        if version == "1.0":
            self.cycle.send = UnframedSend(self.cycle)  # type: ignore[method-assign]
        elif self.expect_100_continue:
            self.cycle.send = LastSend(self.cycle)  # type: ignore[method-assign]
        if len(self._open_cycles) > MAX_PIPELINED:
            self.transport.close()
        elif self.pipeline:
            self.flow.resume_reading()  # else nobody would see the client leave
        else:
            self._begin(self.cycle, version)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Start, but for a request whose headers are just complete: `_begin` does."""
        if cycle in self._open_cycles:
            super()._start_asgi_task(cycle, app)

    def _begin(self, cycle: RequestResponseCycle, version: str) -> None:
        """Start to answer. A request that is turned away by its headers, as most are under overload, has its answer at
        once: without a task, which would cost twice as much.
        """
        scope = cast(Scope, cycle.scope)
        has_body = version == "1.1" and scope["method"] != "HEAD"
        is_plain = has_body and not (self.expect_100_continue or self.parser.should_upgrade() or self.flow.write_paused)
        answer = self.config.turn_away(scope) if is_plain else None
        if answer is None:
            super()._start_asgi_task(cycle, self.app)
            return
        cycle.response_started = cycle.response_complete = True
        self.transport.write(answer.as_bytes(*(() if cycle.keep_alive else (CLOSE,))))
        if not cycle.keep_alive:
            self.transport.close()
        self.on_response_complete()
        if not self.transport.is_closing():
            self.config.beat.leave(self.flow)

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._num_unplaced = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The body has ended: what comes next is a header block again."""
        if self.parser.should_upgrade():
            return
        self._in_headers, self._num_unplaced = True, 0
        self._end_deadline()
        self.cycle.scope["received_ns"] = time.monotonic_ns()  # type: ignore[typeddict-unknown-key]
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """One answer has been given."""
        self._open_cycles = [cycle for cycle in self._open_cycles if not cycle.response_complete]
        if not self._open_cycles and not self.transport.is_closing():
            self.config.room.rest(self)
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
        self.cut_off(f"took nothing of its answer for {SEND_S:g} s")

    def unsent_bytes(self) -> tuple[int, int]:
        """What waits for a client that takes too little: that of an answer which still grows, and all."""
        if not self.flow.write_paused or self.transport.is_closing():
            return 0, 0
        accounts = [unsent_of(cycle.scope) for cycle in self._open_cycles]  # type: ignore[arg-type]
        num_growing = self.transport.get_write_buffer_size() + sum(each.growing() for each in accounts)
        return num_growing, num_growing + sum(each.num_rest for each in accounts)

    def cut_off(self, why: str) -> None:
        """Drop the connection of a client that `why` says what it did."""
        logger.info("a client %s and was cut off", why)
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
        elif self._has_begun and not any(cycle.response_started for cycle in self._open_cycles):
            self._refuse(ReceivedTooSlowly(f"the request was not there after {RECEIVE_S:g} s; send it faster"))
        else:
            self.transport.close()


def _headers_too_large() -> HeadersTooLarge:
    return HeadersTooLarge(f"target and headers are larger than {MAX_HEADER_BYTES:,} bytes; send less of them")


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


class HttpConfig(uvicorn.Config):
    """What all connections share: uvicorn's settings, who turns requests away by their headers, whom they tell of what
    they refuse, and how many there may be.
    """

    def __init__(self, app: ASGIApp, turn_away: TurnAway, note_refused: NoteRefused, **options: Any) -> None:
        super().__init__(app, **options)
        self.turn_away = turn_away
        self.note_refused = note_refused
        self.room = ConnectionRoom(max_connections())
        self.beat = Beat()


class HttpServer(uvicorn.Server):
    """uvicorn on a given socket; signals are left to the caller, who sets `should_exit`. It speaks HTTPS where there is
    a `tls` context. `turn_away` gives the answer to a request that `app` would refuse by its headers, and keeps account
    of it; `note_refused` hears of each error that answers what never became a request.
    """

    config: HttpConfig

    def __init__(
        self, app: ASGIApp, turn_away: TurnAway, note_refused: NoteRefused, tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(
            HttpConfig(
                app,
                turn_away,
                note_refused,
                http=BoundedHttpProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # nobody here believes them
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=2,
            )
        )
        self._handshakes = None if tls is None else Handshakes(tls, self.config.room, self._make_protocol)

    def _make_protocol(self, handshake: Handshake) -> BoundedHttpProtocol:
        protocol = BoundedHttpProtocol(self.config, self.server_state, self.lifespan.state)
        protocol.handshake = handshake
        return protocol

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn does, over sockets that notice a peer which has vanished."""
        for sock in sockets or ():
            watch_peers(sock)
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn does, but for TLS, whose handshakes it does not count."""
        await super().startup(sockets if self._handshakes is None else [])
        if self._handshakes is not None:
            for sock in sockets or ():
                self._handshakes.listen(sock)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn does."""
        if self._handshakes is not None:
            self._handshakes.close()
        await super().shutdown(sockets)

    def cut_off_laggards(self) -> None:
        """Cut off whoever leaves too much untaken, and of those who do so together the furthest behind first."""
        connections = cast("set[BoundedHttpProtocol]", self.server_state.connections)
        behind = {each: each.unsent_bytes() for each in connections if each.flow.write_paused}
        total = sum(num_all for _, num_all in behind.values())
        for connection, (num_growing, num_all) in sorted(behind.items(), key=lambda item: -item[1][1]):
            if num_growing > MAX_UNSENT_BYTES or total > MAX_UNSENT_BYTES_IN_ALL:
                total -= num_all
                connection.cut_off(f"was {num_all:,} bytes behind with taking its answer")

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install nothing."""
        yield
