"""Keys, odd paths, and bounds on what a client may send."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator

import pytest
from tests.server.parrot import ParrotServer, parrot

from everystop.server.errors import TGI_PATHS
from everystop.server.http import MAX_BODY_BYTES, MAX_HEADER_BYTES

KEY = "sk-schlüssel-1"
BEARER = {"authorization": "Bearer " + KEY.encode().decode("latin-1")}


@pytest.fixture(scope="module")
def guarded() -> Iterator[ParrotServer]:
    with parrot(api_keys=("sk-other", KEY)) as server:
        yield server


def raw(server: ParrotServer, request: bytes) -> bytes:
    """Everything that comes back for these bytes until the connection ends, or stays silent for a while."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        received = b""
        try:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            while chunk := connection.recv(65536):
                received += chunk
        except OSError:
            pass
        return received


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def routes(server: ParrotServer) -> list[tuple[str, str]]:
    """The app's own table of routes."""
    app = server.service._http.config.app
    found = [(method, route.path) for route in app.routes for method in route.methods]
    assert ("POST", "/v1/chat/completions") in found
    return [(method, re.sub(r"\{\w+:path\}", "parrot", path)) for method, path in found]


def test_every_route_but_health_and_the_pages_needs_a_key(guarded: ParrotServer) -> None:
    for method, path in routes(guarded):
        status, headers, body = guarded.request(method, path)
        if path == "/health" or (path.startswith("/ui") and path != "/ui/stream"):  # files that hold no data
            assert status == 200
        else:
            assert status == 401, path
            assert headers["www-authenticate"] == "Bearer"
            if method != "HEAD":
                refusal = json.loads(body)
                code = refusal["error_type"] if path in TGI_PATHS else refusal["error"]["code"]
                assert code in ("invalid_api_key", "authentication")


@pytest.mark.parametrize(
    "path",
    ["//v1/models", "/v1/../v1/models", "/v1/models/", "/health/", "//health", "/health/../v1/models", "/HEALTH", "/",
     "/docs", "/openapi.json", "/v1%2Fmodels", "/health%00", "/health;/v1/models", "/v1/models?x=/health",
     "/health%2f..%2fmetrics"],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "PUT"])
def test_odd_paths_and_methods_need_a_key(guarded: ParrotServer, method: str, path: str) -> None:
    assert guarded.request(method, path)[0] == 401


@pytest.mark.parametrize("host", [b"x/health?", b"x/health", b"a b", b"evil.example/health#", b"x\\health"])
@pytest.mark.parametrize("path", [b"/v1/models", b"/health"])
def test_a_host_header_opens_nothing(guarded: ParrotServer, host: bytes, path: bytes) -> None:
    answer = raw(guarded, b"GET " + path + b" HTTP/1.1\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n")
    assert status_of(answer) == 400


def test_absolute_targets_need_a_key(guarded: ParrotServer) -> None:
    answer = raw(guarded, b"GET http://x/health/v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert status_of(answer) == 401


@pytest.mark.parametrize(
    "value",
    [b"", b"Bearer", b"Bearer ", b"Bearer sk", b"Bearer sk-othe", b"Bearer sk-other2", b"Basic sk-other", b"sk-other",
     b"Bearer \xff\xfe", b"Bearer sk-other sk-other", b"Bearer SK-OTHER"],
)  # fmt: skip
def test_wrong_keys_are_refused(guarded: ParrotServer, value: bytes) -> None:
    request = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: " + value + b"\r\n\r\n"
    assert status_of(raw(guarded, request)) == 401


def test_two_keys_in_one_request_are_refused(guarded: ParrotServer) -> None:
    header = b"Authorization: Bearer sk-other\r\n"
    request = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + header + header + b"\r\n"
    assert status_of(raw(guarded, request)) == 401


def test_right_keys_are_taken_bytes_and_all(guarded: ParrotServer) -> None:
    for headers in (BEARER, {"authorization": "bearer sk-other"}):
        assert guarded.get("/v1/models", headers=headers)[0] == 200
        assert guarded.post("/v1/completions", {"prompt": "a"}, headers)[0] == 200
        assert guarded.get("/nothing", headers=headers)[0] == 404


def test_keys_are_compared_in_constant_time(guarded: ParrotServer, monkeypatch: pytest.MonkeyPatch) -> None:
    import hmac

    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", compare)
    assert guarded.get("/v1/models", {"authorization": "Bearer sk-other"})[0] == 200
    assert len(compared) == 2, "all keys, also after a match"
    assert {len(side) for pair in compared for side in pair} == {32}, "digests, so that lengths do not show"


def test_errors_of_the_router_have_openais_shape(server: ParrotServer) -> None:
    for method, path, expected in (("GET", "/nothing", 404), ("GET", "/v1/completions", 405), ("POST", "/health", 405)):
        status, headers, body = server.request(method, path)
        assert status == expected
        assert headers["content-type"] == "application/json"
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
        if status == 405:
            assert "allow" in headers


def test_an_unforeseen_failure_says_nothing_of_the_inside(
    server: ParrotServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*args: object) -> None:
        raise ValueError("secret at 0x7f001234")

    monkeypatch.setattr(server.service.state.board, "open", explode)
    status, body = server.complete("a")
    assert status == 500
    assert body["error"]["type"] == "server_error"
    assert "secret" not in json.dumps(body)


def test_a_body_too_large_is_refused_before_it_is_read(server: ParrotServer) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % 10**9
    answer = raw(server, head + b'{"prompt": "')
    assert status_of(answer) == 413
    assert b"body_too_large" in answer


def test_a_chunked_body_too_large_is_refused_on_the_way(server: ParrotServer) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    answer = raw(server, head + chunk * (MAX_BODY_BYTES // 0x100000 + 2))
    assert answer == b"" or status_of(answer) == 413
    assert server.get("/health")[0] == 200


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * (1 << 20),
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X-Many: a\r\n" * (1 << 16),
        b"GET /" + b"a" * (1 << 20),
    ],
)
def test_headers_without_end_are_cut_off(server: ParrotServer, head: bytes) -> None:
    answer = raw(server, head)
    assert answer == b"" or status_of(answer) in (400, 431)
    assert server.get("/health")[0] == 200


def test_headers_within_the_bound_are_taken(server: ParrotServer) -> None:
    assert server.get("/health", {"x-long": "a" * (MAX_HEADER_BYTES // 2)})[0] == 200


def test_large_bodies_within_the_bound_are_taken(server: ParrotServer) -> None:
    status, body = server.complete("a", user="x" * 5_000_000)
    assert status == 200
    status, body = server.complete("a", metadata=[[1] * 10] * 100_000)
    assert status == 200
    assert body["choices"][0]["text"] == "a"


def test_metrics_and_health_show_no_prompt(server: ParrotServer) -> None:
    server.complete("a very private prompt")
    assert b"private" not in server.get("/metrics")[1]
    assert b"private" not in server.get("/health")[1]
