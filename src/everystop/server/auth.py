"""Lets nobody in without a key where keys are set, on any path but `/health` and its like and the dashboard's own
files; the Host header has no say in it, but there must be one.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Mapping

from starlette.types import Scope

from everystop.core.errors import RequestError
from everystop.keys import KeyHash, digest_of
from everystop.server.errors import Unauthorized
from everystop.server.paths import OPEN_PATHS
from everystop.server.visibility import Caller

KEY_HEADERS = (b"authorization", b"x-api-key", b"api-key")
_HOST = re.compile(rb"[A-Za-z0-9._~\-\[\]:%]*")
_HOW = "send it as 'Authorization: Bearer KEY', or in the header x-api-key or api-key"


class KeyGuard:
    """A guard of the edge: 401 without a valid key, 400 for a Host header that is no host, or is not one.

    A key comes in one header, as `Authorization: Bearer KEY`, `x-api-key: KEY` or `api-key: KEY`; of two, none is
    believed. `callers` says whose a key is; the scope's `caller` tells those behind. `is_open` knows the paths that
    need no key beside `OPEN_PATHS`.
    """

    def __init__(self, callers: Mapping[KeyHash, Caller], is_open: Callable[[str], bool] = lambda path: False) -> None:
        self._is_open = is_open
        self._digests = [key.digest for key in callers]
        self._callers = list(callers.values())

    def refusal(self, scope: Scope) -> Exception | None:
        """The error that is the answer; None lets the request in."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        if error := _check_host(headers, scope["http_version"]):
            return error
        if not self._digests or scope["path"] in OPEN_PATHS or self._is_open(scope["path"]):
            return None
        given = [(name, value) for name, value in headers if name in KEY_HEADERS]
        if len(given) > 1:
            return Unauthorized(f"{len(given)} keys came with the request; send one: {_HOW}")
        caller = self._caller_of(*given[0]) if given else None
        if caller is not None:
            scope["caller"] = caller
            return None
        return Unauthorized(f"a valid API key is needed: {_HOW}")

    def _caller_of(self, name: bytes, value: bytes) -> Caller | None:
        """Whose key it is, None if it is nobody's.

        Digests are compared, all of them and in constant time: neither length nor position of a key shows.
        """
        scheme, key = b"bearer", value
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
        digest = digest_of(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != b"bearer" or not any(matches):
            return None
        return self._callers[matches.index(True)]


def _check_host(headers: list[tuple[bytes, bytes]], http_version: str) -> RequestError | None:
    """The error for anything but one host (RFC 9112, section 3.2); HTTP/1.0 knows none."""
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1:
        return RequestError(f"{len(hosts)} Host headers came with the request; send one", code="invalid_host")
    if not hosts and http_version != "1.0":
        return RequestError("no Host header came with the request; send the name of this server", code="invalid_host")
    if hosts and _HOST.fullmatch(hosts[0]) is None:
        return RequestError("the Host header is not a host", code="invalid_host")
    return None
