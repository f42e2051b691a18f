"""The listening socket; taken before anything large is imported, so that a taken port is found at once."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import resource
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from everystop.core.errors import ConfigError

BACKLOG = 2048
RESERVED_FILES = 256  # for all but clients: the model, records, logs, and connections on their way in or out
MAX_CONNECTIONS = 1 << 20
UDS_UMASK = 0o117  # the socket's owner and group may connect


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
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host} is taken; stop what uses it or choose another --port") from None
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another --host or --port"
        ) from None
    return sock


@contextlib.contextmanager
def listen_at_path(path: str) -> Iterator[socket.socket]:
    """A listening UNIX socket, whose file its owner and group may use, and which is removed in the end.

    What a dead server left there is replaced. Raises ConfigError for a path that another one serves, that is no socket,
    or where none can be made.
    """
    _allow_many_connections()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if check_path(path):
            Path(path).unlink(missing_ok=True)
        umask = os.umask(UDS_UMASK)
        try:
            sock.bind(path)
        finally:
            os.umask(umask)
        sock.listen(BACKLOG)
        sock.setblocking(False)
        inode = os.stat(path).st_ino
    except OSError as error:
        sock.close()
        raise _cannot_listen(path, error.strerror or str(error)) from None
    except ConfigError:
        sock.close()
        raise
    try:
        with sock:
            yield sock
    finally:
        with contextlib.suppress(OSError):  # somebody may have removed it, or put another there
            if os.stat(path).st_ino == inode:
                os.unlink(path)


def check_path(path: str) -> bool:
    """Whether a dead server left its socket there, which `listen_at_path` replaces; changes nothing. Raises ConfigError
    where that one would.
    """
    folder = Path(path).absolute().parent
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _cannot_listen(path, f"{folder} is no folder that can be written")
    try:
        return _is_stale(Path(path))
    except OSError as error:
        raise _cannot_listen(path, error.strerror or str(error)) from None


def _cannot_listen(path: str, reason: str) -> ConfigError:
    return ConfigError(f"cannot listen at {path}: {reason}; choose another --uds")


def _is_stale(path: Path) -> bool:
    """Whether a socket lies there that nobody serves any more; raises ConfigError for anything else that does, and
    OSError for what can be no path of a socket.
    """
    is_there = os.path.lexists(path)
    if is_there and not stat.S_ISSOCK(path.stat(follow_symlinks=False).st_mode):
        raise ConfigError(f"{path} is there and is no socket; remove it or choose another --uds")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            return False
        except ConnectionRefusedError:
            return True
        except OSError as error:  # a full backlog, or no right to connect: somebody may be there
            if not is_there:
                raise
            raise ConfigError(f"{path} cannot be taken over: {error.strerror or error}; choose another --uds") from None
    raise ConfigError(f"{path} is served by a running server; stop it or choose another --uds")


def is_loopback(sock: socket.socket) -> bool:
    """Only this machine can reach what listens there."""
    if sock.family == socket.AF_UNIX:
        return True
    return ipaddress.ip_address(sock.getsockname()[0].partition("%")[0]).is_loopback


def url_of(sock: socket.socket, host: str, *, scheme: str = "http") -> str:
    """Where clients find what listens there, as the configuration calls the host; `unix:PATH` for a UNIX socket."""
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return f"unix:{name}"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{name[1]}"


def _allow_many_connections() -> None:
    """Raise the soft limit of open files, often 1,024, to the hard one: each client takes one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def max_connections() -> int:
    """How many clients may be connected at once, as the limit on open files says; a quarter of a small one is kept."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, soft - min(RESERVED_FILES, soft // 4))
