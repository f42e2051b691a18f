"""Acceptance cases of security: nobody comes in without a key, and nobody asks for more than he may."""

from __future__ import annotations

import gc
import hmac
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.measuring import least, rss_bytes
from tests.server.parrot import ParrotServer, parrot
from tests.server.test_hostile import probed
from tests.server.test_security import raw, routes, status_of

from everystop.server import auth
from everystop.server.auth import OPEN_PATHS, KeyGuard

KEY = "sk-schlüssel-1"
BEARER = {"authorization": "Bearer " + KEY.encode().decode("latin-1")}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def guarded() -> Iterator[ParrotServer]:
    with parrot(api_keys=("sk-other", KEY)) as server:
        yield server


# --------------------------------------------------------------------- 64: keys

ODD_PATHS = (
    "//v1/models", "/v1/../v1/models", "/v1/models/", "/health/", "//health", "/health/../v1/models", "/HEALTH", "/",
    "/openapi.json", "/v1%2Fmodels", "/health%00", "/health;/v1/models", "/v1/models?x=/health",
    "/health%2f..%2fmetrics", "/health/live/../../metrics", "/nothing",
)  # fmt: skip


def check_ac_64(server: ParrotServer) -> None:
    for method, path in routes(server):
        status, _, body = server.request(method, path)
        if path in OPEN_PATHS:
            assert status in (200, 503)
            assert method == "HEAD" or set(json.loads(body)) == {"status"}, "more than a word without a key"
        elif not path.startswith("/ui") or path in ("/ui/stream", "/ui/past"):  # what the page is made of holds no data
            assert status == 401, f"{method} {path} is answered with {status} without a key"
    for path in ODD_PATHS:
        for method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE"):
            status = server.request(method, path)[0]
            assert status == 401, f"{method} {path} is answered with {status} without a key"
    for host in (b"x/health?", b"x/health#", b"a b", b"x\\health"):
        for path in (b"/v1/models", b"/metrics"):
            lines = b"GET " + path + b" HTTP/1.1\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n"
            status = status_of(raw(server, lines))
            assert status == 400, f"Host {host!r} is answered with {status}"
    for value in (b"Bearer \xff\xfe", b"Bearer sk-othe", b"Bearer sk-other2", b"Bearer", b"Basic sk-other"):
        lines = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: " + value + b"\r\n\r\n"
        assert status_of(raw(server, lines)) == 401, value
    num_compared = 0
    compare = hmac.compare_digest

    def count(one: Any, other: Any) -> bool:
        nonlocal num_compared
        num_compared += 1
        assert len(one) == len(other) == 32, "digests, so that no length shows"
        return compare(one, other)

    hmac.compare_digest = count
    try:
        assert server.get("/v1/models", {"authorization": "Bearer sk-other"})[0] == 200
        assert num_compared == 2, f"{num_compared} of 2 keys compared in constant time"
        assert server.get("/v1/models", BEARER)[0] == 200
    finally:
        hmac.compare_digest = compare


def test_ac_64_every_route_asks_for_a_key(guarded: ParrotServer) -> None:
    check_ac_64(guarded)


def test_mutant_ac_64_only_one_prefix_is_guarded(guarded: ParrotServer, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = KeyGuard.refusal
    monkeypatch.setattr(
        KeyGuard, "refusal", lambda guard, scope: refusal(guard, scope) if scope["path"].startswith("/v1/") else None
    )
    with pytest.raises(AssertionError, match="without a key"):
        check_ac_64(guarded)


def test_mutant_ac_64_the_host_has_a_say(guarded: ParrotServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path is that of a URL made of the Host header and the target, as some frameworks did."""
    refusal = KeyGuard.refusal

    def believe(guard: KeyGuard, scope: Any) -> Any:
        host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
        path = urlsplit(f"http://{host}{scope['path']}").path
        return None if path in OPEN_PATHS else refusal(guard, scope)

    monkeypatch.setattr(KeyGuard, "refusal", believe)
    with pytest.raises(AssertionError, match="Host b'x/health"):
        check_ac_64(guarded)


def test_mutant_ac_64_keys_compared_byte_by_byte(guarded: ParrotServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "hmac", SimpleNamespace(compare_digest=lambda one, other: one == other))
    with pytest.raises(AssertionError, match="0 of 2 keys compared in constant time"):
        check_ac_64(guarded)


# --------------------------------------------------------------------- 65: too much of everything


def excessive_bodies() -> Iterator[tuple[str, str, bytes]]:
    """What is too much, where it is sent, and the body."""
    prompt: dict[str, Any] = {"prompt": "a"}
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
    completions: dict[str, dict[str, Any]] = {
        "n": prompt | {"n": 10**9},
        "n beyond 64 bits": prompt | {"n": 10**30},
        "prompts": {"prompt": ["a"] * 10_000},
        "prompts and n": {"prompt": ["a"] * 1_000, "n": 100},
        "best_of": prompt | {"best_of": 10**6, "n": 10**6},
        "logprobs": prompt | {"logprobs": 10**6},
        "negative logprobs": prompt | {"logprobs": -1},
        "stops": prompt | {"stop": ["s"] * 10**6},
        "biases": prompt | {"logit_bias": {str(i): 1 for i in range(10**6)}},
        "max_tokens": prompt | {"max_tokens": 2**63},
        "a long name": prompt | {"x" * 10**6: 1},
    }
    for what, body in completions.items():
        yield what, COMPLETIONS, json.dumps(body).encode()
    yield "top_logprobs", CHAT, json.dumps(chat | {"logprobs": True, "top_logprobs": 10**6}).encode()
    yield "messages", CHAT, json.dumps({"messages": chat["messages"] * 100_000}).encode()
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        inner = opening * 100_000 + b"1" + closing * 100_000
        yield "nesting", COMPLETIONS, b'{"prompt": "a", "metadata": ' + inner + b"}"
        yield "nesting in messages", CHAT, b'{"messages": ' + inner + b"}"


def check_ac_65(server: ParrotServer) -> None:
    """All of it twice: the memory that the second round takes is what a third one would take, too."""

    def grown_bytes() -> float:
        before = rss_bytes()
        _flood(server)
        for what, path, body in excessive_bodies():
            status = server.request("POST", path, body)[0]
            assert 400 <= status < 500, f"too much of {what} is answered with {status}"
        gc.collect()
        return rss_bytes() - before

    with probed(server) as health:
        grown_bytes()
        assert least(grown_bytes, enough=32 << 20, tries=3) < 32 << 20
    assert set(health) == {200}
    assert server.complete("ok")[1]["choices"][0]["text"] == "ok"


def _flood(server: ParrotServer) -> None:
    """Headers, targets and bodies without end; the connection may be cut instead of answered."""
    long_header = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * (4 << 20) + b"\r\nConnection: close\r\n\r\n"
    many_headers = b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X-Many: a\r\n" * (1 << 17) + b"\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    announced = head + b"Content-Length: %d\r\n\r\n" % 10**9 + b'{"prompt": "'
    chunks = head + b"Transfer-Encoding: chunked\r\n\r\n" + (b"100000\r\n" + b" " * 0x100000 + b"\r\n") * 40
    requests = {"a header": long_header, "headers": many_headers, "a target": b"GET /" + b"a" * (4 << 20)}
    requests |= {"an announced body": announced, "a chunked body": chunks + b"0\r\n\r\n"}
    for what, request in requests.items():
        answer = raw(server, request)
        status = status_of(answer) if answer else 400
        assert 400 <= status < 500, f"too much of {what} is answered with {status}"
    assert status_of(raw(server, announced)) == 413, "an announced body is not refused as too large"


def test_ac_65_too_much_is_refused_and_takes_no_memory(server: ParrotServer) -> None:
    check_ac_65(server)


@pytest.mark.parametrize("bound", ["http.MAX_HEADER_BYTES", "bodies.MAX_BODY_BYTES"])
def test_mutant_ac_65_no_bound(own_server: ParrotServer, monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    monkeypatch.setattr(f"everystop.server.{bound}", 1 << 40)
    with pytest.raises((AssertionError, IndexError)):
        check_ac_65(own_server)
