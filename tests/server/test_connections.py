"""Connections that are slow, half closed, pipelined or abandoned, and what they must not cost the others."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import resource
import socket
import time
from typing import Any

import pytest
from tests.server.parrot import DEADLINE_S, ParrotServer, parrot, parse_events, wait_until

from everystop.server import bodies, framing, http, listener
from everystop.server.bodies import MAX_BODY_BYTES
from everystop.server.http import MAX_HEADER_BYTES

COMPLETIONS = "/v1/completions"


def request(headers: bytes = b"", path: str = COMPLETIONS, **fields: Any) -> bytes:
    """The bytes of one POST."""
    body = json.dumps({"prompt": "abc", **fields}).encode()
    start = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n".encode()
    return start + headers + b"\r\n" + body


def read_all(connection: socket.socket) -> bytes:
    """What comes until the other end closes."""
    received = b""
    while chunk := connection.recv(65536):
        received += chunk
    return received


def connect(server: ParrotServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("num_pipelined", [1, 2, 5])
def test_a_client_that_leaves_frees_its_blocks_whatever_it_pipelined(num_pipelined: int, stream: bool) -> None:
    with parrot(max_model_len=1024) as server:
        server.runner.step_s = 0.01
        with connect(server) as connection:
            connection.sendall(request(stream=stream, ignore_eos=True, max_tokens=1000) * num_pipelined)
            wait_until(lambda: server.metric("num_requests_running") == 1)
        wait_until(lambda: server.num_free_blocks == server.num_blocks)
        wait_until(lambda: server.metric("request_success_total", "abort") >= 1)
        assert server.metric("request_success_total", "length") == 0


def receive_at_once(server: ParrotServer, data: bytes) -> None:
    """Have the one connection receive all this in one read, as a loop that was late may."""

    async def receive() -> None:
        [protocol] = server.service._http.server_state.connections
        protocol.data_received(data)

    wait_until(lambda: len(server.service._http.server_state.connections) == 1)
    asyncio.run_coroutine_threadsafe(receive(), server.loop).result()


@pytest.mark.parametrize("before", [b"", request() + request()])
def test_endless_headers_are_refused_however_much_one_read_brings(server: ParrotServer, before: bytes) -> None:
    wait_until(lambda: not server.service._http.server_state.connections)
    with connect(server) as connection:
        receive_at_once(server, before + b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 2 * MAX_HEADER_BYTES)
        answer = read_all(connection)
    assert answer.count(b"HTTP/1.1 200") == before.count(b"POST")
    assert before or answer.startswith(b"HTTP/1.1 431")


def test_a_large_body_and_what_is_pipelined_may_come_in_one_read(server: ParrotServer) -> None:
    wait_until(lambda: not server.service._http.server_state.connections)
    with connect(server) as connection:
        long = request(prompt=[97] * 100_000)
        receive_at_once(server, request() + long + request(b"Connection: close\r\n"))
        answer = read_all(connection)
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200", b"400", b"200"]
    assert b"context_length_exceeded" in answer


def test_pipelined_requests_are_answered_in_order(server: ParrotServer) -> None:
    with connect(server) as connection:
        for prompt in ("one", "two", "three"):
            connection.sendall(request(prompt=prompt))
        connection.sendall(request(b"Connection: close\r\n", prompt="four"))
        answer = read_all(connection).decode()
    places = [answer.index(f'"text":"{prompt}"') for prompt in ("one", "two", "three", "four")]
    assert places == sorted(places)
    assert answer.count("HTTP/1.1 200 OK") == 4


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /health HTTP/1.1\r\nX-Slow: ",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{",
    ],
)
def test_a_request_that_never_arrives_is_not_waited_for(
    sent: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with parrot() as server:
        monkeypatch.setattr(http, "RECEIVE_S", 1.0)  # as long as it may take to connect and send what there is
        began_s = time.monotonic()
        with connect(server) as connection:
            connection.sendall(sent)
            answer = read_all(connection)
        assert time.monotonic() - began_s > 0.9
        assert answer == b"" if not sent else answer.startswith(b"HTTP/1.1 408 ")
        wait_until(lambda: server.service.state.num_open == 0)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_long_answer_is_not_taken_for_a_slow_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "RECEIVE_S", 2.0)
    with parrot() as server:
        server.runner.step_s = 0.1
        status, body = server.complete("a" * 30)
        assert (status, body["choices"][0]["text"]) == (200, "a" * 30)


def test_a_connection_may_rest_between_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "RECEIVE_S", 2.0)
    with parrot() as server, connect(server) as connection:
        for rest_s in (0, 2.5):
            time.sleep(rest_s)
            connection.sendall(request())
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_leaves_in_its_body_is_no_failure_of_ours(
    server: ParrotServer, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(server) as connection:
        connection.sendall(request()[:-3])
        wait_until(lambda: server.service.state.num_open == 1)
    wait_until(lambda: server.service.state.num_open == 0)
    assert not caplog.records


def test_a_body_too_large_does_not_break_the_clients_pipe(server: ParrotServer) -> None:
    status, _, body = server.request("POST", COMPLETIONS, b" " * (MAX_BODY_BYTES + 2**20))
    assert (status, json.loads(body)["error"]["code"]) == (413, "body_too_large")


def test_bodies_on_their_way_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_BODIES_BYTES", 1_000_000)
    half_body = request(user="x" * 450_000)[:-10]
    with parrot() as server:
        with connect(server) as one, connect(server) as other:
            for connection in (one, other):
                connection.sendall(half_body)
            wait_until(lambda: server.service.state.num_open == 2)
            wait_until(lambda: server.complete("a", user="x" * 200_000)[0] == 429)
            status, headers, body = server.request("POST", COMPLETIONS, {"prompt": "a", "user": "x" * 200_000})
            assert (status, headers["retry-after"]) == (429, "1")
            assert "1,000,000 bytes" in json.loads(body)["error"]["message"]
            assert server.complete("a")[0] == 200
        wait_until(lambda: server.complete("a", user="x" * 900_000)[0] == 200)
        assert server.complete("a", user="x" * 900_000)[0] == 200


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate, gzip"])
def test_compressed_bodies_are_refused_by_name(server: ParrotServer, encoding: str) -> None:
    status, _, body = server.request("POST", COMPLETIONS, b"\x1f\x8b", {"content-encoding": encoding})
    assert status == 415
    assert encoding in json.loads(body)["error"]["message"]
    assert server.post(COMPLETIONS, {"prompt": "ab"}, {"content-encoding": "identity"})[0] == 200


H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"


@pytest.mark.parametrize("cut", [0, 1, 20])
def test_an_offered_upgrade_is_passed_over(server: ParrotServer, cut: int) -> None:
    """As RFC 9110 section 7.8 allows; Java's HttpClient offers h2c with each request."""
    with connect(server) as connection:
        for prompt in ("one", "two"):
            data = request(H2C, prompt=prompt)
            connection.sendall(data[: len(data) - cut])
            time.sleep(0.05 if cut else 0)
            connection.sendall(data[len(data) - cut :])
            answer = connection.recv(65536).decode()
            assert answer.startswith("HTTP/1.1 200 ")
            assert f'"text":"{prompt}"' in answer


def test_a_chunked_body_with_an_offered_upgrade(server: ParrotServer) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n" + H2C + b"\r\n"
    with connect(server) as connection:
        connection.sendall(head + b'10\r\n{"prompt": "one"\r\n1\r\n}\r\n0\r\n\r\n' + request(b"Connection: close\r\n"))
        answer = read_all(connection)
    assert answer.count(b"HTTP/1.1 200 ") == 2
    assert b'"text":"one"' in answer


def test_as_many_connections_as_the_system_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    try:
        listener.listen("127.0.0.1", 0).close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Wire:
    """A transport that remembers what was written at once."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:
        assert not self.is_closed
        self.written.append(data)

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed


def test_the_head_of_an_answer_goes_with_what_follows_at_once() -> None:
    async def play() -> None:
        loop = asyncio.get_running_loop()
        wire = Wire()
        joined: Any = framing.JoinedHead(wire, loop)  # type: ignore[arg-type]
        for data in (b"head ", b"first ", b"second "):
            joined.write(data)
        await asyncio.sleep(0)
        assert wire.written == [b"head first ", b"second "]
        wire = Wire()
        joined = framing.JoinedHead(wire, loop)  # type: ignore[arg-type]
        joined.write(b"head ")
        assert not wire.written
        await asyncio.sleep(0)
        joined.write(b"first ")
        assert wire.written == [b"head ", b"first "]
        wire = Wire()
        joined = framing.JoinedHead(wire, loop)  # type: ignore[arg-type]
        joined.write(b"head ")
        joined.close()
        assert (wire.written, joined.is_closing()) == ([b"head "], True)
        wire = Wire()
        joined = framing.JoinedHead(wire, loop)  # type: ignore[arg-type]
        joined.write(b"head ")
        wire.close()
        await asyncio.sleep(0)
        assert not wire.written, "nobody is there any more"

    asyncio.run(play())


@pytest.mark.parametrize("keep_alive", [b"", b"Connection: keep-alive\r\n"])
@pytest.mark.parametrize("stream", [True, False])
def test_http_1_0_gets_no_chunks(server: ParrotServer, stream: bool, keep_alive: bytes) -> None:
    """A stream's body ends with the connection; a whole answer has its length."""
    with connect(server) as connection:
        connection.sendall(request(keep_alive, stream=stream).replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    assert b"transfer-encoding" not in headers
    assert headers[b"connection"] == b"close"
    if stream:
        assert [event["choices"][0]["text"] for event in parse_events(body)[:-1]] == ["a", "b", "c", ""]
    else:
        assert len(body) == int(headers[b"content-length"])
        assert json.loads(body)["choices"][0]["text"] == "abc"
