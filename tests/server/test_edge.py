"""Requests that their headers keep out have their answers at once, and the connection goes on as if nothing was."""

from __future__ import annotations

import json
import logging
import socket
from typing import Any

import pytest
from tests.server.parrot import ParrotServer, parrot

from everystop.server.auth import KeyGuard
from everystop.server.edge import Edge

VERSION = b"GET /version HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-one\r\n\r\n"


def models(*more: bytes, method: bytes = b"GET") -> bytes:
    """A request without a key."""
    return b"\r\n".join([method + b" /v1/models HTTP/1.1", b"Host: x", *more, b"", b""])


class Wire:
    """A connection whose answers are read one by one."""

    def __init__(self, server: ParrotServer) -> None:
        self._socket = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        self._rest = b""

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def answer(self, *, has_body: bool = True) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the next one."""
        while b"\r\n\r\n" not in self._rest:
            self._more()
        head, _, self._rest = self._rest.partition(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        size = int(headers["content-length"]) if has_body else 0
        while len(self._rest) < size:
            self._more()
        body, self._rest = self._rest[:size], self._rest[size:]
        return int(status.split()[1]), headers, body

    def is_over(self) -> bool:
        """Nothing is left, and nothing comes any more."""
        return not self._rest and not self._socket.recv(1)

    def _more(self) -> None:
        data = self._socket.recv(65536)
        assert data, "the connection has ended"
        self._rest += data


@pytest.fixture(scope="module")
def guarded() -> Any:
    with parrot(api_keys=["sk-one"]) as server:
        yield server


def test_a_connection_goes_on_after_refusals(guarded: ParrotServer) -> None:
    with Wire(guarded) as wire:
        for i in range(3):
            wire.send(models(b"X-Request-Id: job-%d" % i))
            status, headers, body = wire.answer()
            assert (status, headers["x-request-id"], headers["www-authenticate"]) == (401, f"job-{i}", "bearer")
            assert json.loads(body)["error"]["code"] == "invalid_api_key"
            assert "connection" not in headers
        wire.send(VERSION)
        assert wire.answer()[0] == 200


@pytest.mark.parametrize("num_early", [0, 5])
def test_the_body_of_a_refused_request_is_dropped(guarded: ParrotServer, num_early: int) -> None:
    with Wire(guarded) as wire:
        body = b"GET / HTTP/1.1\r\n\r\n"
        wire.send(models(b"Content-Length: %d" % len(body), method=b"POST") + body[:num_early])
        assert wire.answer()[0] == 401
        wire.send(body[num_early:] + VERSION)
        assert wire.answer()[0] == 200


def test_answers_keep_the_order_of_the_requests(guarded: ParrotServer) -> None:
    with Wire(guarded) as wire:
        wire.send(VERSION + models() + VERSION + models() + models())
        assert [wire.answer()[0] for _ in range(5)] == [200, 401, 200, 401, 401]


def test_a_client_that_wants_no_other_answer_gets_none(guarded: ParrotServer) -> None:
    with Wire(guarded) as wire:
        wire.send(models(b"Connection: close"))
        status, headers, _ = wire.answer()
        assert (status, headers["connection"]) == (401, "close")
        assert wire.is_over()


def test_the_answer_to_head_has_no_body(guarded: ParrotServer) -> None:
    with Wire(guarded) as wire:
        wire.send(models(method=b"HEAD"))
        status, headers, _ = wire.answer(has_body=False)
        assert (status, int(headers["content-length"]) > 0) == (401, True)
        wire.send(VERSION)
        assert wire.answer()[0] == 200


@pytest.mark.parametrize("lines", [[b"Connection: upgrade", b"Upgrade: h2c"], [b"Expect: 100-continue"]])
def test_others_are_refused_the_long_way(guarded: ParrotServer, lines: list[bytes]) -> None:
    with Wire(guarded) as wire:
        wire.send(models(b"Content-Length: 2", *lines, method=b"POST"))
        assert wire.answer()[0] == 401


def test_each_is_asked_and_counted_once(guarded: ParrotServer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    refusal = KeyGuard.refusal
    monkeypatch.setattr(
        KeyGuard, "refusal", lambda guard, scope: (asked.append(scope["path"]), refusal(guard, scope))[1]
    )
    counts = guarded.service.state.http

    def seen() -> tuple[int, int, int]:
        found = counts.of("/v1/models", "GET").statuses, counts.of("/version", "GET").statuses
        return found[0][401], found[1][200], counts.errors["Unauthorized"]

    before = seen()
    with Wire(guarded) as wire:
        for request in (models(), VERSION):
            wire.send(request)
            wire.answer()
    assert asked == ["/v1/models", "/version"]
    assert [now - then for now, then in zip(seen(), before, strict=True)] == [1, 1, 1]
    assert counts.num_open == 0


def test_a_guard_that_fails_is_a_500_and_one_line(
    guarded: ParrotServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(guard: KeyGuard, scope: Any) -> None:
        raise ValueError("secret")

    monkeypatch.setattr(KeyGuard, "refusal", fail)
    with Wire(guarded) as wire:
        wire.send(models(b"X-Request-Id: job-9"))
        status, headers, body = wire.answer()
        assert (status, headers["x-request-id"], b"secret" in body) == (500, "job-9", False)
        wire.send(models())
        assert wire.answer()[0] == 500
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert [line.startswith("unforeseen error in request ") for line in lines] == [True, True]


def test_most_are_refused_without_a_task(guarded: ParrotServer, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    real = Edge.__call__

    async def call(edge: Edge, scope: Any, receive: Any, send: Any) -> None:
        called.append(scope["path"])
        await real(edge, scope, receive, send)

    monkeypatch.setattr(Edge, "__call__", call)
    with Wire(guarded) as wire:
        for request in (models(), VERSION):
            wire.send(request)
            wire.answer()
    assert called == ["/version"]
