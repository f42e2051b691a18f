"""Clients that take all connections there may be, and what they must leave to others."""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import socket
from collections.abc import Iterator
from functools import partial

import pytest
from tests.server.parrot import DEADLINE_S, ParrotServer, parrot, wait_until
from tests.server.parrot_process import ParrotProcess

from everystop.server import http, listener

NUM_FILES = 120
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@contextlib.contextmanager
def connected(port: int, num: int, sent: bytes = b"") -> Iterator[list[socket.socket]]:
    """So many connections, on each of which this was sent."""
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(num):
            made.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60)))
            if sent:
                made[-1].sendall(sent)
        yield made


@pytest.mark.parametrize("sent", [b"", HEALTH, HEALTH[:9]], ids=["silent", "kept alive", "trickling"])
def test_connections_without_a_request_make_room_for_requests(sent: bytes) -> None:
    """Twice as many as there are descriptors."""
    with ParrotProcess(max_files=NUM_FILES) as server, connected(server.port, 2 * NUM_FILES, sent) as idle:
        for _ in range(3):
            assert server.get("/health/live")[0] == 200
            assert server.complete("ab")[1]["choices"][0]["text"] == "ab"
        metrics = server.get("/metrics")[1].decode().splitlines()
        [num_open] = [float(line.split()[1]) for line in metrics if line.startswith("process_open_fds ")]
        assert num_open <= NUM_FILES - NUM_FILES // 8
        idle[-1].sendall(HEALTH[len(sent) :] if len(sent) < len(HEALTH) else HEALTH)
        assert idle[-1].recv(65536).startswith(b"HTTP/1.1 200")
        assert idle[0].recv(65536)[:12] in (b"", b"HTTP/1.1 200")


def test_a_burst_on_a_full_server_is_answered_whole() -> None:
    """More at once than there are descriptors kept: each makes its own room before the next is taken."""
    with ParrotProcess(max_files=NUM_FILES) as server, connected(server.port, NUM_FILES, HEALTH):
        wait_until(lambda: server.get("/health")[0] == 200)
        server.signal(signal.SIGSTOP)
        with connected(server.port, 100, HEALTH) as burst:
            server.signal(signal.SIGCONT)
            assert all(one.recv(65536).startswith(b"HTTP/1.1 200") for one in burst)


def shut(connection: socket.socket) -> bool:
    """The other end has closed it, and nothing came."""
    try:
        return connection.recv(65536) == b""
    except ConnectionError:
        return True


@pytest.fixture
def small() -> Iterator[ParrotServer]:
    """A server that has room for three connections."""
    with parrot() as server:
        wait_until(lambda: not server.service._http.server_state.connections)
        server.service._http.config.room.max_num = 3
        yield server


def test_the_longest_idle_one_goes_and_those_with_a_request_stay(small: ParrotServer) -> None:
    with small.held(), connected(small.port, 2, HEALTH) as (first, second):
        for one in (first, second):
            assert one.recv(65536).startswith(b"HTTP/1.1 200")
        first.sendall(HEALTH)
        assert first.recv(65536).startswith(b"HTTP/1.1 200")
        assert small.get("/health")[0] == 200
        assert shut(second)
        first.sendall(HEALTH)
        assert first.recv(65536).startswith(b"HTTP/1.1 200")
        assert len(small.scheduler.requests) == 1


def test_where_all_have_requests_one_more_is_told_so_and_costs_no_place(small: ParrotServer) -> None:
    with small.held(), small.held(), small.held():
        for _ in range(20):
            status, headers, body = small.request("GET", "/health")
            assert (status, json.loads(body)["error"]["code"]) == (503, "too_many_connections")
            assert (headers["connection"], headers["retry-after"]) == ("close", "1")
        assert len(small.scheduler.requests) == 3
    wait_until(lambda: not small.service._http.server_state.connections)
    assert small.get("/health")[0] == 200
    assert small.metric("http_errors_total", "TooManyConnections") == 20


def test_refused_ones_are_dropped_without_a_word_where_they_are_too_many(
    small: ParrotServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "LINGER_S", DEADLINE_S)  # else who has been told may be gone, and make room
    small.service._http.config.room.max_refused = 2
    with (
        small.held(),
        small.held(),
        small.held(),
        connected(small.port, 2) as told,
        connected(small.port, 5) as dropped,
    ):
        assert all(one.recv(65536).startswith(b"HTTP/1.1 503") for one in told)
        assert all(map(shut, dropped))
    wait_until(lambda: not small.service._http.server_state.connections)
    assert small.get("/health")[0] == 200


def test_answers_that_nobody_takes_keep_no_places() -> None:
    """A connection that is closed goes when its last answer has been taken, which a client may put off."""
    body = json.dumps({"prompt": "abc", "ignore_eos": True, "logprobs": 5, "max_tokens": 400})
    asked = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(parrot(max_model_len=2048, num_blocks=1024))
        server._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        http = server.service._http
        wait_until(lambda: not http.server_state.connections)
        http.config.room.max_num, http.config.room.max_refused = 3, 2
        before = http.server_state.total_requests

        def has_answered(num: int) -> bool:
            return http.server_state.total_requests == before + num

        for num in range(1, 11):
            one = stack.enter_context(socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.connect(("127.0.0.1", server.port))
            one.sendall(asked)
            wait_until(partial(has_answered, num))
        wait_until(lambda: len(http.server_state.connections) <= 3 + 2, 5.0)
        assert server.get("/health")[0] == 200


def test_a_part_of_the_descriptors_is_kept_for_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, num in ((120, 90), (1024, 768), (20_000, 19_744), (resource.RLIM_INFINITY, 1 << 20)):
        monkeypatch.setattr(resource, "getrlimit", lambda which, soft=soft: (soft, soft))
        assert listener.max_connections() == num
