"""Clients that open TLS connections and never finish the handshake, and what they must leave to others."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import pytest
from tests.server.parrot import DEADLINE_S, ParrotServer, wait_until
from tests.server.parrot_process import ParrotProcess
from tests.server.test_tls import CERT, KEY, TlsParrot

from everystop.server import handshakes
from everystop.server.tls import Certificate

NUM_FILES = 120
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
RECORD = b"\x16\x03\x01\x02\x00"  # the head of a record of 512 bytes, as a ClientHello may have


class TlsProcess(ParrotProcess):
    """A parrot in a process, asked over TLS."""

    def connect(self) -> http.client.HTTPConnection:
        context = ssl.create_default_context(cafile=CERT)
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=DEADLINE_S, context=context)


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)


def connect_tls(port: int) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=CERT)
    return context.wrap_socket(connect(port), server_hostname="localhost")


@contextlib.contextmanager
def unfinished(port: int, num: int, sent: bytes = b"") -> Iterator[list[socket.socket]]:
    """So many connections, on each of which this much of a handshake was sent."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(connect(port)) for _ in range(num)]
        for one in made:
            with contextlib.suppress(OSError):  # it has made room for a later one
                one.sendall(sent)
        yield made


def is_cut(one: socket.socket) -> bool:
    """The other end has closed it, and nothing came; waits for that."""
    try:
        return one.recv(65536) == b""
    except ConnectionError:
        return True


def is_open(one: socket.socket) -> bool:
    one.setblocking(False)
    try:
        return one.recv(65536) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


@pytest.mark.parametrize("sent", [b"", RECORD], ids=["silent", "begun"])
def test_unfinished_handshakes_make_room_for_requests(sent: bytes) -> None:
    """Twice as many as there are descriptors."""
    with TlsProcess(max_files=NUM_FILES, tls=[CERT, KEY]) as server, unfinished(server.port, 2 * NUM_FILES, sent):
        for _ in range(3):
            assert server.get("/health/live")[0] == 200
            assert server.complete("ab")[1]["choices"][0]["text"] == "ab"
        metrics = server.get("/metrics")[1].decode().splitlines()
        [num_open] = [float(line.split()[1]) for line in metrics if line.startswith("process_open_fds ")]
        assert num_open <= NUM_FILES - NUM_FILES // 8


@pytest.fixture
def small() -> Iterator[ParrotServer]:
    """A server that has room for three connections."""
    with TlsParrot(tls=Certificate(CERT, KEY)) as server:
        room = server.service._http.config.room
        wait_until(lambda: room.num == 0)
        room.max_num = 3
        yield server


def test_a_handshake_counts_and_the_longest_without_a_request_goes(small: ParrotServer) -> None:
    room = small.service._http.config.room
    with small.held(), unfinished(small.port, 1) as [first], closing(connect_tls(small.port)) as kept:
        wait_until(lambda: room.num == 3)
        with unfinished(small.port, 1) as [second]:
            assert is_cut(first)
            kept.sendall(HEALTH)
            assert kept.recv(65536).startswith(b"HTTP/1.1 200")
            assert small.get("/health")[0] == 200
            assert is_cut(second), "it has been without a request for longer than the one that has just been answered"
            kept.sendall(HEALTH)
            assert kept.recv(65536).startswith(b"HTTP/1.1 200")
        assert len(small.scheduler.requests) == 1
    wait_until(lambda: room.num == 0)


def test_where_all_have_requests_one_more_is_told_so_inside_tls(small: ParrotServer) -> None:
    room = small.service._http.config.room
    with small.held(), small.held(), small.held():
        for _ in range(5):
            status, headers, body = small.request("GET", "/health")
            assert (status, json.loads(body)["error"]["code"]) == (503, "too_many_connections")
            assert headers["connection"] == "close"
        assert len(small.scheduler.requests) == 3
        room.max_refused = 2
        wait_until(lambda: room.num == 3)
        with unfinished(small.port, 2) as waiting:
            wait_until(lambda: room.num == 5)
            with unfinished(small.port, 3) as more:
                assert all(map(is_cut, more))
            assert all(map(is_open, waiting))
    wait_until(lambda: room.num == 0)
    assert small.get("/health")[0] == 200


def test_one_that_had_no_room_is_taken_where_there_is_some_at_the_end_of_its_handshake(small: ParrotServer) -> None:
    room = small.service._http.config.room
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(small.held())
        with small.held(), unfinished(small.port, 1) as [late]:
            wait_until(lambda: room.num == 4)
            raw = stack.enter_context(late.dup())
            raw.settimeout(DEADLINE_S)
        wait_until(lambda: room.num == 3)
        with ssl.create_default_context(cafile=CERT).wrap_socket(raw, server_hostname="localhost") as one:
            one.sendall(HEALTH)
            assert one.recv(65536).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("sent", [b"", RECORD])
def test_a_handshake_that_never_ends_is_cut_off(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshakes, "HANDSHAKE_S", 1.0)
    with TlsParrot(tls=Certificate(CERT, KEY)) as server:
        began_s = time.monotonic()
        with unfinished(server.port, 3, sent) as made:
            assert all(map(is_cut, made))
        assert time.monotonic() - began_s > 0.9
        wait_until(lambda: server.service._http.config.room.num == 0)


@pytest.mark.parametrize("sent", [b"", RECORD, HEALTH, b"\x16\x03\x01\xff\xff" + b"a" * 70_000])
def test_handshakes_that_fail_give_their_places_back(
    sent: bytes, small: ParrotServer, caplog: pytest.LogCaptureFixture
) -> None:
    room = small.service._http.config.room
    for _ in range(4):
        with unfinished(small.port, 3, sent):
            pass
    wait_until(lambda: room.num == 0)
    assert small.get("/health")[0] == 200
    assert not caplog.records


def test_the_end_of_the_server_ends_handshakes() -> None:
    with contextlib.ExitStack() as stack:
        with TlsParrot(tls=Certificate(CERT, KEY)) as server:
            room = server.service._http.config.room
            [one] = stack.enter_context(unfinished(server.port, 1, RECORD))
            wait_until(lambda: room.num == 1)
        assert is_cut(one)
        assert server.join() == 0
        with pytest.raises(ConnectionRefusedError):
            connect(server.port)


def test_a_burst_is_answered_whole() -> None:
    with TlsParrot(tls=Certificate(CERT, KEY)) as server, contextlib.ExitStack() as stack:
        raw = [stack.enter_context(connect(server.port)) for _ in range(60)]
        wrap = partial(ssl.create_default_context(cafile=CERT).wrap_socket, server_hostname="localhost")
        for one in [stack.enter_context(wrap(each)) for each in reversed(raw)]:
            one.sendall(HEALTH)
            assert one.recv(65536).startswith(b"HTTP/1.1 200")
