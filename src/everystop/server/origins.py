"""Keeps the pages that somebody's browser shows from using a server without keys.

A browser sends what any page tells it to, also to a server that only this machine can reach. Two ways are closed. A
page of another origin says so in the header Origin, and is refused: it may not even make the server work. A page whose
own name was made to mean this machine (DNS rebinding) is of the same origin, but its name is in the header Host: on a
loopback address, or where hosts are allowed by name, other names are only taken if nobody can register them.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from starlette.types import Scope

from everystop.server.errors import Forbidden

_AUTHORITY = re.compile(r"(\[[^\]]*\]|[^:]*)(?::\d*)?")


class OriginGuard:
    """A guard of the edge of servers without keys: 403 for a request that a page of another origin sent, and, where
    `is_loopback` or there are allowed hosts, for one that is not addressed to localhost, a name without dots, an
    address, or an allowed host.
    """

    def __init__(self, allowed_hosts: Iterable[str], is_loopback: bool) -> None:
        self._allowed = frozenset(host.lower().rstrip(".") for host in allowed_hosts)
        self._knows_its_names = is_loopback or bool(self._allowed)

    def refusal(self, scope: Scope) -> Forbidden | None:
        """The error that is the answer; None lets the request in."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
        for value in (value.decode("latin-1") for name, value in headers if name == b"origin"):
            authority = value.partition("://")[2].lower()
            if [authority] != [host.lower() for host in hosts] and host_name(authority) not in self._allowed:
                return Forbidden(
                    "a page of another origin sent this request, and pages of others may not use this server; open "
                    "the server's own pages, or start it with --allowed-host for the name of yours",
                    code="origin_not_allowed",
                )
        _, port = scope.get("server") or ("", None)
        is_checked = self._knows_its_names and port is not None  # no browser opens a UNIX socket
        if is_checked and not all(self._is_own(host_name(host)) for host in hosts):
            return Forbidden(
                "the Host header names a host that is not this machine; without keys only localhost and addresses are "
                "served: start with --api-key, or with --allowed-host for that name",
                code="host_not_allowed",
            )
        return None

    def _is_own(self, name: str) -> bool:
        """Nobody but this machine's owner decides what the name means."""
        return "." not in name or name.endswith(".localhost") or name in self._allowed or _is_address(name)


def host_name(authority: str) -> str:
    """The host of `host:port`, in lower case; an IPv6 address without its brackets.

    Example: "[::1]:8000" gives "::1", and "Example.org." gives "example.org".
    """
    match = _AUTHORITY.fullmatch(authority)
    host = match[1] if match is not None else authority
    return host.strip("[]").lower().rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True
