"""Clients that take their answers slowly, or not at all: bounded in memory, cut off in time, and nobody else waits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.server.parrot import DEADLINE_S, ParrotServer, parrot, wait_until

from everystop.server import http, unsent

BODY = {"prompt": "abcdefgh", "ignore_eos": True, "stream": True, "logprobs": 5, "max_tokens": 20_000}


@pytest.fixture
def server() -> Iterator[ParrotServer]:
    """Keeps little for anybody in the system's own buffers."""
    with parrot(max_model_len=30_000, num_blocks=8192) as running:
        running._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        yield running


@contextlib.contextmanager
def reader(server: ParrotServer, **fields: Any) -> Iterator[socket.socket]:
    """A connection whose request has been sent, and on which nothing has been read."""
    connection = socket.socket()
    connection.settimeout(60)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    body = json.dumps({**BODY, **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with connection:
        connection.sendall(head + body)
        wait_until(lambda: bool(server.scheduler.requests) or server.engine._next_id > 0)
        yield connection


def is_over(server: ParrotServer) -> bool:
    return not server.scheduler.requests and server.service.state.num_open == 0


def drain(connection: socket.socket) -> bytes:
    """What can still be read before the connection ends, or is reset."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while chunk := connection.recv(65536):
            received += chunk
    return received


def test_a_client_that_reads_nothing_is_cut_off(
    server: ParrotServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http, "SEND_S", 0.3)
    caplog.set_level(logging.INFO, "everystop.server.http")
    server.runner.step_s = 0.0005  # else all tokens are computed before the client is late
    with reader(server) as connection:
        assert server.complete("ok")[1]["choices"][0]["text"] == "ok", "nobody else waits for it"
        wait_until(lambda: is_over(server))
        assert server.num_free_blocks == server.num_blocks
        assert server.service.state.board.aborted == {"SlowReader": 1}
        assert any("took nothing of its answer for 0.3 s" in record.message for record in caplog.records)
        assert b"[DONE]" not in drain(connection)
    assert server.complete("ok")[1]["choices"][0]["text"] == "ok"


def test_a_whole_answer_that_nobody_takes_is_dropped(server: ParrotServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it is in the buffers when the request ends; the connection goes all the same."""
    monkeypatch.setattr(http, "SEND_S", 0.3)
    with reader(server, stream=False, max_tokens=3000):
        wait_until(lambda: is_over(server))
        wait_until(lambda: not server.service._http.server_state.connections)


def test_a_slow_client_is_not_cut_off_as_long_as_it_takes_something(
    server: ParrotServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server looks at it only after it has taken something, as often as that leaves something to be taken."""
    monkeypatch.setattr(http, "SEND_S", 3600.0)
    num_looks = 0

    async def look() -> None:
        nonlocal num_looks
        for protocol in server.service._http.server_state.connections:
            assert isinstance(protocol, http.BoundedHttpProtocol)
            if protocol._stall is not None and protocol.transport.get_write_buffer_size() < protocol._num_left:
                protocol._stall.cancel()
                protocol._look_at_reader()
                num_looks += 1

    server.runner.step_s = 0.0
    with reader(server, max_tokens=800) as connection:
        wait_until(lambda: any(each.flow.write_paused for each in server.service._http.server_state.connections))
        received = b""
        while b"[DONE]" not in received:
            chunk = connection.recv(2048)
            assert chunk, "cut off"
            received += chunk
            asyncio.run_coroutine_threadsafe(look(), server.loop).result()
    assert num_looks > 1
    assert not server.service.state.board.aborted


def test_what_a_slow_client_adds_is_delivery_and_all_causes_sum_to_the_whole(server: ParrotServer) -> None:
    """The engine is done before the client has taken a byte."""
    with reader(server, max_tokens=800) as connection:
        wait_until(lambda: any(each.flow.write_paused for each in server.service._http.server_state.connections))
        wait_until(lambda: not server.scheduler.requests)
        history = server.service.state.history
        [client] = history.clients.values()
        begun_ns = time.monotonic_ns()
        assert client.delivered_ns is None
        drain_until(connection, b"[DONE]")
        wait_until(lambda: is_over(server))
    status, body = server.get(f"/v1/requests/{client.name}/explain")
    told = json.loads(body)
    ns = {each["cause"]: each["ns"] for each in told["causes"]}
    finish = history.trails[client.first_request_id].finish
    assert status == 200
    assert finish is not None
    assert client.delivered_ns is not None
    assert finish.num_output_tokens == 800
    assert finish.now_ns < begun_ns < client.delivered_ns
    assert ns["delivery"] == client.delivered_ns - finish.now_ns
    assert sum(ns.values()) == told["e2e_ns"] == client.delivered_ns - client.received_ns


def test_memory_for_one_reader_is_bounded_before_its_time_is_up(
    server: ParrotServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "MAX_UNSENT_BYTES", 1 << 20)
    server.runner.step_s = 0.0005  # else all tokens may be computed before anybody looks
    with reader(server), reader(server, max_tokens=10):
        wait_until(lambda: server.service.state.board.aborted == {"SlowReader": 1})
        wait_until(lambda: is_over(server))


def test_a_whole_answer_may_be_larger_than_what_a_stream_may_leave_untaken(
    server: ParrotServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It grows no more: its reader may take its time, unless all together leave too much."""
    monkeypatch.setattr(http, "MAX_UNSENT_BYTES", 200_000)
    monkeypatch.setattr(unsent, "PIECE_BYTES", 50_000)
    with reader(server, stream=False, max_tokens=10_000) as connection:
        wait_until(lambda: not server.scheduler.requests)
        wait_until(lambda: any(each.flow.write_paused for each in server.service._http.server_state.connections))
        looked = threading.Event()
        server.loop.call_soon_threadsafe(lambda: (server.service._http.cut_off_laggards(), looked.set()))
        assert looked.wait(DEADLINE_S)
        head, _, body = drain_until(connection, b'"usage"').partition(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        assert length > 500_000
        while len(body) < length:
            body += connection.recv(1 << 20)
        assert json.loads(body)["usage"]["completion_tokens"] == 10_000
    monkeypatch.setattr(http, "MAX_UNSENT_BYTES_IN_ALL", 200_000)
    with reader(server, stream=False, max_tokens=10_000):
        wait_until(lambda: not server.scheduler.requests)
        wait_until(lambda: not server.service._http.server_state.connections)


def test_memory_for_all_readers_is_bounded_and_the_furthest_behind_goes(
    server: ParrotServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "MAX_UNSENT_BYTES_IN_ALL", 1 << 20)
    server.runner.step_s = 0.0005  # else all tokens may be computed before anybody looks
    with reader(server, n=2), reader(server):
        aborted = server.service.state.board.aborted
        wait_until(lambda: aborted["SlowReader"] > 0)
        first = aborted["SlowReader"]
        assert first in (2, 3), "the one with two choices is further behind"
        wait_until(lambda: is_over(server))


def test_a_reader_that_keeps_up_is_never_behind(server: ParrotServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is never more than 300 steps behind, of a thousand."""
    monkeypatch.setattr(http, "MAX_UNSENT_BYTES", 600_000)  # half of what two times a thousand tokens take
    may_step = threading.Semaphore(300)
    server.runner.before_step = lambda plan: may_step.acquire(timeout=60) and None
    line = b""
    with contextlib.closing(server.connect()) as connection:
        connection.request("POST", "/v1/completions", json.dumps({**BODY, "max_tokens": 1000, "n": 2}))
        answer = connection.getresponse()
        while line != b"data: [DONE]\n":
            line = answer.readline()
            assert line, "cut off"
            if b'"index":0' in line:
                may_step.release()
    assert not server.service.state.board.aborted


def test_a_time_that_runs_out_in_a_stuck_answer_frees_the_engine_at_once(server: ParrotServer) -> None:
    server.runner.step_s = 0.001  # else all tokens may be computed before the time is up
    with reader(server, timeout=3, max_tokens=20_000) as connection:
        wait_until(lambda: server.service.state.board.aborted == {"TimedOut": 1})
        wait_until(lambda: server.metric("request_success_total", '"abort"') == 1)
        assert not server.scheduler.requests
        received = drain_until(connection, b"[DONE]")
        assert b"request_timeout" in received, "and whoever reads at last is told"


def drain_until(connection: socket.socket, mark: bytes) -> bytes:
    received = b""
    while mark not in received:
        chunk = connection.recv(1 << 20)
        assert chunk, received[-200:]
        received += chunk
    return received


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_system_watches_for_peers_that_have_vanished(family: socket.AddressFamily) -> None:
    """Accepted sockets have what the listening one has."""
    with socket.socket(family) as listening:
        http.watch_peers(listening)
        listening.bind(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0))
        listening.listen()
        with socket.create_connection(listening.getsockname()[:2]) as _, listening.accept()[0] as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
    with socket.socket(socket.AF_UNIX) as local:
        http.watch_peers(local)
