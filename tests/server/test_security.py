"""Keys, odd paths, and bounds on what a client may send."""

from __future__ import annotations

import gc
import hashlib
import json
import re
import socket
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from urllib.parse import unquote

import pytest
from tests.server.parrot import ParrotServer, parrot

from everystop.server.auth import OPEN_PATHS
from everystop.server.bodies import MAX_BODY_BYTES
from everystop.server.errors import TGI_PATHS
from everystop.server.http import MAX_HEADER_BYTES
from everystop.tenants import Tenant, Tenants

KEY = "sk-schlüssel-1"
BEARER = {"authorization": "Bearer " + KEY.encode().decode("latin-1")}


@pytest.fixture(scope="module")
def guarded() -> Iterator[ParrotServer]:
    with parrot(api_keys=("sk-other", KEY)) as server:
        yield server


def raw(server: ParrotServer, request: bytes) -> bytes:
    """Everything that comes back for these bytes until the connection ends, or stays silent for a while."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
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
    """Whatever route is added, it is found here, and asks for a key unless somebody changes this test."""
    found = routes(guarded)
    assert len(found) > 20
    for method, path in found:
        status, headers, body = guarded.request(method, path)
        if path in OPEN_PATHS or (
            path.startswith("/ui") and path not in ("/ui/stream", "/ui/past")
        ):  # files that hold no data
            assert status == 200, path
        else:
            assert status == 401, path
            assert headers["www-authenticate"] == "Bearer"
            if method != "HEAD":
                error = json.loads(body)["error"]
                assert "a valid API key is needed" in (error if path in TGI_PATHS else error["message"])


def test_what_is_open_says_next_to_nothing(guarded: ParrotServer) -> None:
    assert {"/health"} <= {path for _, path in routes(guarded)} & OPEN_PATHS
    for method, path in routes(guarded):
        if path in OPEN_PATHS and method == "GET":
            assert set(json.loads(guarded.get(path)[1])) == {"status"}


ODD_PATHS = [
    "//v1/models", "/v1/../v1/models", "/v1/models/", "/health/", "//health", "/health/../v1/models", "/HEALTH", "/",
    "/docs", "/openapi.json", "/v1%2Fmodels", "/health%00", "/health;/v1/models", "/v1/models?x=/health",
    "/health%2f..%2fmetrics", "/health/live/", "/health//live", "/health/live/../../metrics", "/health/ready%20",
    "/ui/../metrics", "/ui/..%2fmetrics", "/ui/stream", "/ui/past", "/ui//stream", "/ui/stream/",
    "/ui/app.js/../../v1/models",
    "/ui%2fstream", "/invocations", "/v1/models/%2e%2e/%2e%2e/etc/passwd", "/%2e%2e/v1/models", "/metrics#/health",
]  # fmt: skip


@pytest.mark.parametrize("path", ODD_PATHS)
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "PROPFIND"])
def test_odd_paths_and_methods_need_a_key(guarded: ParrotServer, method: str, path: str) -> None:
    assert guarded.request(method, path)[0] == 401


@pytest.mark.parametrize("spelling", [str, str.upper, lambda path: path.replace("v1", "%761"), lambda path: path + "/"])
def test_every_route_however_it_is_spelt_needs_a_key(guarded: ParrotServer, spelling: Callable[[str], str]) -> None:
    for method in ("GET", "HEAD", "POST", "OPTIONS"):
        for path in {spelling(path) for _, path in routes(guarded)}:
            if unquote(path) not in OPEN_PATHS and not (
                path.startswith("/ui") and path not in ("/ui/stream", "/ui/past")
            ):
                assert guarded.request(method, path)[0] == 401, (method, path)


@pytest.mark.parametrize("host", [b"x/health?", b"x/health", b"a b", b"evil.example/health#", b"x\\health"])
@pytest.mark.parametrize("path", [b"/v1/models", b"/health"])
def test_a_host_header_opens_nothing(guarded: ParrotServer, host: bytes, path: bytes) -> None:
    answer = raw(guarded, b"GET " + path + b" HTTP/1.1\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n")
    assert status_of(answer) == 400


@pytest.mark.parametrize(
    "target",
    [b"http://x/health/v1/models", b"http://x/v1/models", b"http://health/v1/models", b"http://x/health/../metrics"],
)
def test_absolute_targets_need_a_key(guarded: ParrotServer, target: bytes) -> None:
    answer = raw(guarded, b"GET " + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert status_of(answer) in (400, 401)


@pytest.mark.parametrize("target", [b"/health\xff", b"*", b"health", b"http:/health", b"/health HTTP/1.1\r\nX: y"])
def test_targets_that_are_no_path_open_nothing(guarded: ParrotServer, target: bytes) -> None:
    answer = raw(guarded, b"OPTIONS " + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert answer == b"" or status_of(answer) in (400, 401, 404, 405)
    assert b"parrot" not in answer


@pytest.mark.parametrize(
    "value",
    [b"", b"Bearer", b"Bearer ", b"Bearer sk", b"Bearer sk-othe", b"Bearer sk-other2", b"Basic sk-other", b"sk-other",
     b"Bearer \xff\xfe", b"Bearer sk-other sk-other", b"Bearer SK-OTHER"],
)  # fmt: skip
def test_wrong_keys_are_refused(guarded: ParrotServer, value: bytes) -> None:
    request = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: " + value + b"\r\n\r\n"
    assert status_of(raw(guarded, request)) == 401


GOOD = {"authorization": "Bearer sk-other", "x-api-key": "sk-other", "api-key": "sk-other"}


@pytest.mark.parametrize("name", GOOD)
def test_a_key_is_taken_from_each_header(guarded: ParrotServer, name: str) -> None:
    assert guarded.get("/v1/models", {name: GOOD[name]})[0] == 200
    assert guarded.get("/v1/models", {name: GOOD[name] + "x"})[0] == 401
    assert guarded.get("/v1/models", {name: ""})[0] == 401


@pytest.mark.parametrize("value", [b"Bearer sk-other", b"\xff\xfe", b"sk-other, sk-other", "sk-ſchlüssel-1".encode()])
@pytest.mark.parametrize("name", [b"x-api-key", b"api-key", b"X-API-KEY"])
def test_wrong_keys_in_a_header_of_their_own_are_refused(guarded: ParrotServer, name: bytes, value: bytes) -> None:
    request = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + name + b": " + value + b"\r\n\r\n"
    assert status_of(raw(guarded, request)) == 401


@pytest.mark.parametrize("first", GOOD)
@pytest.mark.parametrize("second", GOOD)
def test_two_keys_in_one_request_are_refused(guarded: ParrotServer, first: str, second: str) -> None:
    lines = "".join(f"{name}: {GOOD[name]}\r\n" for name in (first, second)).encode()
    answer = raw(guarded, b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + lines + b"\r\n")
    assert status_of(answer) == 401
    assert b"2 keys came with the request" in answer


@pytest.mark.parametrize("place", ["/v1/models?api_key=sk-other", "/v1/models?key=sk-other", "/v1/models"])
def test_a_key_is_taken_from_nowhere_else(guarded: ParrotServer, place: str) -> None:
    assert guarded.get(place, {"cookie": "api_key=sk-other", "proxy-authorization": "Bearer sk-other"})[0] == 401


def test_a_hash_lets_its_key_in_and_is_none_itself() -> None:
    hashes = tuple(f"sha256:{hashlib.sha256(key).hexdigest()}" for key in (b"sk-1", b"sk-root"))
    with parrot(api_keys=hashes[:1], admin_keys=hashes[1:]) as server:
        assert server.get("/v1/models", {"x-api-key": "sk-1"})[0] == 200
        assert server.get("/v1/models", {"x-api-key": "sk-root"})[0] == 200
        for digest in hashes:
            assert server.get("/v1/models", {"x-api-key": digest})[0] == 401
            assert server.get("/v1/models", {"x-api-key": digest.removeprefix("sha256:")})[0] == 401


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of other modules' objects, which the search looks at
def test_no_plain_key_is_kept_in_memory() -> None:
    """Of all that the collector knows of the running server, nothing holds the key's text."""
    key = "sk-" + "plain-" * 3 + "text"
    with parrot(
        api_keys=(key,), admin_keys=(key + "2",), tenants=Tenants(by_name={"a": Tenant(keys=(key + "3",))})
    ) as server:
        assert server.get("/v1/models", {"x-api-key": key})[0] == 200
        app = server.service._http.config.app
        waiting, seen = [app, server.service.state], set()
        while waiting:
            item = waiting.pop()
            if id(item) in seen or isinstance(item, (ModuleType, FrameType, type)):
                continue
            seen.add(id(item))
            assert not (isinstance(item, (str, bytes)) and key in str(item))
            waiting.extend(gc.get_referents(item))
        assert len(seen) > 1000


def test_a_web_page_gets_no_leave_to_read(server: ParrotServer, guarded: ParrotServer) -> None:
    """CORS is off: no preflight is answered, and no header lets a page of another origin read."""
    asks = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    for method, path in (("OPTIONS", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/health")):
        for one in (server, guarded):
            status, headers, _ = one.request(method, path, headers=asks)
            assert status != 204
            assert status >= 400 or path == "/health"
            assert not [name for name in headers if name.startswith("access-control-")]
    for path in ("/v1/models", "/v1/completions", "/metrics", "/health"):
        assert server.request("OPTIONS", path)[0] == 405


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


@pytest.mark.parametrize("num_bytes", [66_000, 140_000, 200_000])
def test_large_headers_that_are_whole_are_refused_as_well(server: ParrotServer, num_bytes: int) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * num_bytes + b"\r\nConnection: close\r\n\r\n"
    answer = raw(server, head)
    assert answer == b"" or status_of(answer) == 431
    assert server.get("/health")[0] == 200


def test_headers_within_the_bound_are_taken(server: ParrotServer) -> None:
    assert server.get("/health", {"x-long": "a" * (MAX_HEADER_BYTES // 2)})[0] == 200


def test_large_bodies_within_the_bound_are_taken(server: ParrotServer) -> None:
    status, body = server.complete("a", user="x" * 5_000_000)
    assert status == 200
    status, body = server.complete("a", metadata=[[1] * 10] * 80_000)
    assert status == 200
    assert body["choices"][0]["text"] == "a"


def test_metrics_and_health_show_no_prompt(server: ParrotServer) -> None:
    server.complete("a very private prompt")
    assert b"private" not in server.get("/metrics")[1]
    assert b"private" not in server.get("/health")[1]
