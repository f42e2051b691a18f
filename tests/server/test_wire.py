"""What is no request, or not quite one: errors in the API's own shape, one answer each, and an orderly end."""

from __future__ import annotations

import json
import logging
import socket
from typing import Any, NamedTuple

import pytest
from tests.server.parrot import DEADLINE_S, ParrotServer, parrot, wait_until
from tests.server.test_connections import connect, read_all, request

from everystop.server import http
from everystop.server.error_codes import CODES
from everystop.server.http import MAX_HEADER_BYTES

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
LONG = b"a" * (MAX_HEADER_BYTES + 1)


@pytest.fixture(autouse=True)
def clients_have_time_to_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sends on when all is over is reset in the end, which a client that stood still may meet."""
    monkeypatch.setattr(http, "LINGER_S", DEADLINE_S)


class Answer(NamedTuple):
    """One HTTP answer, parsed strictly."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


def answers_of(received: bytes) -> list[Answer]:
    """Answers with a length, one after the other, and nothing else."""
    answers = []
    while received:
        head, end, received = received.partition(b"\r\n\r\n")
        assert end
        start, *lines = head.decode("ascii").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        length = int(headers["content-length"])
        answers.append(Answer(int(start.split(" ")[1]), headers, received[:length]))
        assert len(received) >= length
        received = received[length:]
    return answers


def ask(server: ParrotServer, *pieces: bytes) -> list[Answer]:
    """What comes back for these bytes until the server closes; the client does not, and is not reset."""
    with connect(server) as connection:
        for piece in pieces:
            connection.sendall(piece)
        return answers_of(read_all(connection))


NOT_HTTP = {
    "no HTTP": b"hello there\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 50,
    "a header without a name": b"GET /health HTTP/1.1\r\nHost: x\r\n: y\r\n\r\n",
    "a blank in a name": b"GET /health HTTP/1.1\r\nHost: x\r\nX y: z\r\n\r\n",
    "a zero in a header": b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\x00b\r\n\r\n",
    "a target that is none": b"GET http:// HTTP/1.1\r\nHost: x\r\n\r\n",
    "two lengths": POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "one length twice": POST + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
    "two lengths in one": POST + b"Content-Length: 2, 2\r\n\r\n{}",
    "a length and chunks": POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "chunks and a length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "a length with a sign": POST + b"Content-Length: +2\r\n\r\n{}",
    "a length in hexadecimal": POST + b"Content-Length: 0x2\r\n\r\n{}",
    "a length beyond all": POST + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n{}",
    "chunks that are not the last coding": POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n{}",
    "a chunk without a length": CHUNKED + b"x\r\n{}",
    "a chunk of 16 EiB": CHUNKED + b"ffffffffffffffffff\r\n{}",
    "a chunk longer than it says": CHUNKED + b"1\r\n{}\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("name", NOT_HTTP)
def test_what_is_no_http_is_told_so_in_the_shape_of_the_api(server: ParrotServer, name: str) -> None:
    [answer] = ask(server, NOT_HTTP[name])
    assert (answer.status, answer.headers["connection"]) == (400, "close")
    assert answer.headers["content-type"] == "application/json"
    assert (answer.error["code"], answer.error["type"]) == ("invalid_http", "invalid_request_error")
    wait_until(lambda: server.service.state.num_open == 0)


@pytest.mark.parametrize(
    "pieces",
    [
        [b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + LONG + b"\r\n\r\n"],
        [b"GET /health HTTP/1.1\r\nHost: x\r\nX: ", LONG, LONG],
        [b"GET /" + LONG + b" HTTP/1.1\r\n"],
        [b"GET /health HTTP/1.1\r\nHost: x\r\n", *[b"X: y\r\n" * 1000] * 12],
        [CHUNKED + b"1;", LONG, LONG],
        [CHUNKED + b"1\r\n{\r\n0\r\n", *[b"X: y\r\n" * 1000] * 12],
        [CHUNKED + b"1\r\n{\r\n0\r\nX: ", LONG, LONG],
    ],
    ids=["at once", "in pieces", "target", "many", "extension of a chunk", "many trailers", "a long trailer"],
)
def test_headers_that_are_too_large_get_431_and_can_be_read(server: ParrotServer, pieces: list[bytes]) -> None:
    """Though the client goes on to send: a close with something unread would reset the connection."""
    [answer] = ask(server, *pieces, *[LONG] * 8)
    assert (answer.status, answer.error["code"]) == (431, "headers_too_large")
    assert f"{MAX_HEADER_BYTES:,} bytes" in answer.error["message"]
    wait_until(lambda: server.service.state.num_open == 0)


def test_what_is_refused_before_it_is_a_request_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "everystop.server.http")
    with parrot() as server:
        ask(server, b"GET /" + LONG, LONG)
        ask(server, b"nonsense\r\n\r\n")
        ask(server, b"nonsense\r\n\r\n")
        assert server.metric("http_errors_total", 'error="HeadersTooLarge"') == 1
        assert server.metric("http_errors_total", 'error="BrokenHttp"') == 2
    said = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert [f"{MAX_HEADER_BYTES:,} bytes" in line for line in said] == [True, False, False]


@pytest.mark.parametrize("version", [b"HTTP/2.0", b"HTTP/0.9"])
def test_other_versions_of_http_are_not_spoken(server: ParrotServer, version: bytes) -> None:
    [answer] = ask(server, b"GET /health " + version + b"\r\nHost: x\r\n\r\n")
    assert (answer.status, answer.error["code"]) == (505, "http_version_not_supported")


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
@pytest.mark.parametrize("sent", ["head", "body"])
def test_a_slow_request_gets_408_in_the_dialect_of_its_path(
    path: str, sent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n".encode()
    with parrot() as server:
        monkeypatch.setattr(http, "RECEIVE_S", 1.0)  # as long as it may take to connect and send what there is
        [answer] = ask(server, head if sent == "head" else head + b"\r\n{")
        assert (answer.status, answer.headers["connection"]) == (408, "close")
        body = json.loads(answer.body)
        if (path, sent) == ("/generate", "body"):
            assert (set(body), body["error_type"]) == ({"error", "error_type"}, "validation")
        else:
            assert body["error"]["code"] == "receive_timeout"
        wait_until(lambda: server.service.state.num_open == 0)


def test_garbage_behind_a_request_is_not_answered_in_the_middle_of_its_answer(server: ParrotServer) -> None:
    """What stands behind may be anything; the answers that are owed come whole, and the connection ends."""
    for stream in (False, True):
        with connect(server) as connection:
            connection.sendall(request(prompt="one", stream=stream) + request(prompt="two") + b"\x00garbage\r\n\r\n")
            received = read_all(connection)
        assert received.count(b"HTTP/1.1 ") == 2
        assert received.count(b"HTTP/1.1 200 OK") == 2
        assert b"invalid_http" not in received
        assert b'"text":"two"' in received


def test_a_broken_body_behind_a_request_leaves_that_requests_answer_alone(server: ParrotServer) -> None:
    with connect(server) as connection:
        connection.sendall(request(prompt="one") + CHUNKED + b"x\r\n")
        received = read_all(connection)
    [answer] = answers_of(received)
    assert (answer.status, json.loads(answer.body)["choices"][0]["text"]) == (200, "one")
    wait_until(lambda: server.service.state.num_open == 0)


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (b"GET /health HTTP/1.1\r\n", "no Host header"),
        (b"GET http://x/health HTTP/1.1\r\n", "no Host header"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nHost: x\r\n", "2 Host headers"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n", "2 Host headers"),
        (b"GET /health HTTP/1.0\r\nHost: x\r\nHost: y\r\n", "2 Host headers"),
        (b"GET /health HTTP/1.1\r\nHost: x/y\r\n", "not a host"),
    ],
)
def test_a_request_has_one_host(server: ParrotServer, head: bytes, why: str) -> None:
    [answer] = ask(server, head + b"Connection: close\r\n\r\n")
    assert (answer.status, answer.error["code"]) == (400, "invalid_host")
    assert why in answer.error["message"]


def test_http_1_0_needs_no_host(server: ParrotServer) -> None:
    [answer] = ask(server, b"GET /health HTTP/1.0\r\n\r\n")
    assert (answer.status, answer.body) == (200, b'{"status":"ok"}')


def test_trailers_are_no_headers() -> None:
    """Behind the body a request can neither bring its key nor take another name."""
    body = b'{"prompt": "abc", "max_tokens": 2}'
    chunk = b"%x\r\n%b\r\n0\r\n" % (len(body), body)
    head = CHUNKED.replace(b"Host: x\r\n", b"Host: x\r\nConnection: close\r\n")
    with parrot(api_keys=("k",)) as server:
        [answer] = ask(server, head + chunk + b"Authorization: Bearer k\r\n\r\n")
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        head = head.replace(b"Host: x\r\n", b"Host: x\r\nX-Api-Key: k\r\nX-Request-Id: mine\r\n")
        trailers = b"X-Request-Id: other\r\nContent-Type: text/xml\r\nHost: y\r\n\r\n"
        [answer] = ask(server, head + chunk + trailers)
        assert (answer.status, answer.headers["x-request-id"]) == (200, "mine")


def test_an_empty_header_does_not_swallow_the_next(server: ParrotServer) -> None:
    [answer] = ask(server, b"GET /health HTTP/1.1\r\nX-Empty:\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert answer.status == 200


def test_every_code_of_the_protocol_is_listed() -> None:
    assert {"invalid_http", "headers_too_large", "receive_timeout", "http_version_not_supported"} <= set(CODES)


def send_for_ever(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"x" * 65536)


def test_a_connection_that_is_over_ends_though_its_client_sends_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "LINGER_S", 0.2)
    with parrot() as server, connect(server) as connection:
        connection.sendall(b"no HTTP at all\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 400 ")
        with pytest.raises(OSError):
            send_for_ever(connection)
        wait_until(lambda: not server.service._http.server_state.connections)
