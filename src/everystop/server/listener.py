"""The listening socket; taken before anything large is imported, so that a taken port is found at once."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import resource
import socket

from everystop.core.errors import ConfigError


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; raises ConfigError when the address cannot be had, such as for a port that is taken."""
    _allow_many_connections()
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error.strerror or error}; choose another --host") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(2048)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host} is taken; stop what uses it or choose another --port") from None
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another --host or --port"
        ) from None
    return sock


def is_loopback(sock: socket.socket) -> bool:
    """Only this machine can reach what listens there."""
    return ipaddress.ip_address(sock.getsockname()[0].partition("%")[0]).is_loopback


def _allow_many_connections() -> None:
    """Raise the soft limit of open files, often 1,024, to the hard one: each client takes one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
