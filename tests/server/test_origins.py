"""What a page in somebody's browser can make a server without keys do: nothing, unless it is the server's own."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from tests.server.parrot import ParrotServer, parrot

from everystop.server.origins import OriginGuard, host_name

BODY = {"prompt": "a"}


@pytest.fixture(scope="module")
def allowing() -> Iterator[ParrotServer]:
    with parrot(allowed_host=("LLM.example.",)) as server:
        yield server


def post(server: ParrotServer, **headers: str) -> tuple[int, str | None]:
    """Status and code of an error, if it is one."""
    status, body = server.post("/v1/completions", BODY, headers)
    return status, body.get("error", {}).get("code")


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:8000",
        "127.0.0.1:1",
        "[::1]:8000",
        "::1",
        "llama",
        "llama:80",
        "a.localhost",
        "10.1.2.3",
        "",
    ],
)
def test_names_of_this_machine_are_served(server: ParrotServer, host: str) -> None:
    assert post(server, host=host) == (200, None)


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "evil.example.", "a.b",
     "notlocalhost.com", "1.2.3", "127.0.0.1.:80.evil.example"],
)  # fmt: skip
def test_a_name_that_somebody_registered_is_refused(server: ParrotServer, host: str) -> None:
    """DNS rebinding: the name of the page means 127.0.0.1 now."""
    assert post(server, host=host)[0] in (400, 403)
    for path in ("/v1/models", "/metrics", "/ui/stream", "/ui/past", "/ui", "/v1/requests/x"):
        status, body = server.get(path, {"host": host})
        assert status in (400, 403)
        assert json.loads(body)["error"]["code"] in ("host_not_allowed", "invalid_host")


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "https://localhost:3000", "null", "http://127.0.0.1", "chrome-extension://abc", "x", ""],
)
@pytest.mark.parametrize("kind", ["text/plain", "application/json", "application/x-www-form-urlencoded"])
def test_a_page_of_another_origin_makes_nobody_work(server: ParrotServer, origin: str, kind: str) -> None:
    answer = post(server, host=f"127.0.0.1:{server.port}", origin=origin, **{"content-type": kind})
    assert answer == (403, "origin_not_allowed")


def test_the_servers_own_pages_may_ask(server: ParrotServer) -> None:
    for name in ("127.0.0.1", "localhost"):
        authority = f"{name}:{server.port}"
        assert post(server, host=authority, origin=f"http://{authority}") == (200, None)
        assert post(server, host=authority, origin=f"https://{authority.upper()}") == (200, None)


def test_an_allowed_host_is_served(allowing: ParrotServer) -> None:
    for host in ("llm.example", "LLM.EXAMPLE:443", "llm.example."):
        assert post(allowing, host=host, origin=f"https://{host}") == (200, None)
    assert post(allowing, host="127.0.0.1:8000", origin="https://llm.example:8443") == (200, None)
    assert post(allowing, host="other.example") == (403, "host_not_allowed")
    assert post(allowing, host="xllm.example") == (403, "host_not_allowed")


def test_with_keys_any_host_and_page_may_ask_that_has_one() -> None:
    with parrot(api_keys=("sk-1",)) as server:
        headers = {"host": "llm.example", "origin": "http://elsewhere.example"}
        assert post(server, **headers) == (401, "invalid_api_key")
        assert post(server, **headers, **{"x-api-key": "sk-1"}) == (200, None)


@pytest.mark.parametrize(
    ("authority", "host"),
    [("a:8", "a"), ("[::1]:8", "::1"), ("[::1]", "::1"), ("::1", "::1"), ("A.b.", "a.b"), ("", ""), ("a:b:c", "a:b:c")],
)
def test_hosts_are_told_from_ports(authority: str, host: str) -> None:
    assert host_name(authority) == host


def passes(host: bytes, server: tuple[str, int | None], *, allowed: tuple[str, ...] = (), is_loopback: bool) -> bool:
    scope = {"type": "http", "path": "/", "server": server, "headers": [(b"host", host)]}
    return OriginGuard(allowed, is_loopback=is_loopback).refusal(scope) is None


def test_a_unix_socket_takes_any_host() -> None:
    """No browser opens one, and a proxy in front passes on the name by which it is called itself."""
    assert passes(b"llm.example", ("/run/everystop.sock", None), is_loopback=True)
    assert not passes(b"llm.example", ("127.0.0.1", 8000), is_loopback=True)


def test_beyond_this_machine_any_host_is_taken_until_one_is_allowed() -> None:
    """A container listens on all its addresses, and may all the same be published on one machine alone."""
    outside = ("172.17.0.2", 8000)
    assert passes(b"rebound.example", outside, is_loopback=False)
    allowed = ("localhost",)
    assert not passes(b"rebound.example", outside, allowed=allowed, is_loopback=False)
    for host in (b"localhost:8000", b"127.0.0.1:8000", b"everystop:8000"):
        assert passes(host, outside, allowed=allowed, is_loopback=False)
