"""TLS before HTTP: takes connections and leads each through its handshake, in bounds of number and time, so that one
which never ends is a connection like any other; knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial

from everystop.server.room import ConnectionRoom

HANDSHAKE_S = 15.0
PAUSE_S = 0.5  # after a connection could not be taken
logger = logging.getLogger(__name__)


class Handshake:
    """A connection that cannot ask yet; `is_beyond` says that there was no room for it when it came, and `is_over` that
    it goes on as the connection of a protocol, which counts in its place.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.is_beyond = False
        self.is_over = False
        self.task: asyncio.Task[None] | None = None

    def leave(self, *, at_once: bool) -> None:
        """End it; nobody can be told anything before there is a key."""
        assert self.task is not None
        self.task.cancel()

    def cut(self) -> None:
        """End the connection, whoever holds it by now."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


class Handshakes:
    """All that are on their way. `make_protocol` makes what speaks on a connection when it is safe. Asyncio thread
    only.
    """

    def __init__(
        self, context: ssl.SSLContext, room: ConnectionRoom, make_protocol: Callable[[Handshake], asyncio.BaseProtocol]
    ) -> None:
        self._context = context
        self._room = room
        self._make_protocol = make_protocol
        self._accepting: list[asyncio.Task[None]] = []
        self._open: set[Handshake] = set()

    def listen(self, sock: socket.socket) -> None:
        """Take what comes to a listening socket, until `close`."""
        self._accepting.append(asyncio.get_running_loop().create_task(self._accept(sock)))

    def close(self) -> None:
        """Take no more, and end all handshakes."""
        for task in self._accepting:
            task.cancel()
        for handshake in self._open:
            handshake.leave(at_once=True)

    async def _accept(self, sock: socket.socket) -> None:
        """One a turn of the loop, so that each makes its own room before the next is taken."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(sock)
            except OSError as error:  # it has gone again, or there are no descriptors
                logger.warning("a connection could not be taken: %s", error.strerror or error)
                await asyncio.sleep(PAUSE_S)
            else:
                self._begin(connection)

    def _begin(self, connection: socket.socket) -> None:
        handshake, room = Handshake(connection), self._room
        handshake.is_beyond = not room.enter(handshake)
        if handshake.is_beyond and not room.has_time:
            room.exit(handshake)
            connection.close()
            return
        self._open.add(handshake)
        handshake.task = asyncio.get_running_loop().create_task(self._shake(handshake))
        handshake.task.add_done_callback(partial(self._end, handshake))

    async def _shake(self, handshake: Handshake) -> None:
        await asyncio.get_running_loop().connect_accepted_socket(
            partial(self._make_protocol, handshake),
            handshake.sock,
            ssl=self._context,
            ssl_handshake_timeout=HANDSHAKE_S,
        )

    def _end(self, handshake: Handshake, task: asyncio.Task[None]) -> None:
        """Called whatever became of it; one that was cancelled may not even have begun."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, OSError):
            logger.debug("a TLS handshake failed: %s", error)
        elif error is not None:
            logger.error("a TLS handshake failed for no fault of the client's", exc_info=error)
        if task.cancelled() or error is not None:
            handshake.cut()
        self._open.discard(handshake)
        if not handshake.is_over:
            self._room.exit(handshake)
