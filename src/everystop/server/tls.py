"""The TLS side of the listening socket: a certificate and its key, TLS 1.2 or later, checked before anything loads and
read again when their files change.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable

from everystop.core.errors import ConfigError

LOOK_S = 5.0


class _KeyIsEncrypted(Exception):
    """OpenSSL has asked for a passphrase."""


class Certificate:
    """What `--ssl-certfile` and `--ssl-keyfile` name; raises ConfigError as `server_context` does.

    The socket is opened with `context`, which hands every new connection the newest pair that could be used, so
    connections that are open, and a listener, never notice a change.
    """

    def __init__(self, certfile: str, keyfile: str, *, look_s: float = LOOK_S) -> None:
        self._certfile, self._keyfile, self._look_s = certfile, keyfile, look_s
        self._tried = self._seen = self._stamps()
        self._newest = self.context = server_context(certfile, keyfile)
        self.context.sni_callback = self._hand_over

    async def watch(self, say: Callable[[str], None]) -> None:
        """Look at the files until cancelled; `say` gets one line for each change that is taken in, or cannot be."""
        while True:
            await asyncio.sleep(self._look_s)
            news = await asyncio.to_thread(self.refresh)
            if news is not None:
                say(news)

    def refresh(self) -> str | None:
        """Read files that differ from those last tried and have not changed since the last look: a pair that is being
        replaced is left alone until then. Returns what an operator should know of it.
        """
        stamps = self._stamps()
        is_settled, self._seen = stamps == self._seen, stamps
        if stamps == self._tried or not is_settled:
            return None
        self._tried = stamps
        try:
            self._newest = server_context(self._certfile, self._keyfile)
        except ConfigError as error:
            return f"{error}; new connections get the certificate that was read before"
        return f"new connections get the certificate that {self._certfile} now holds"

    def _hand_over(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Called by OpenSSL at each handshake, also where the client names no server."""
        connection.context = self._newest

    def _stamps(self) -> list[tuple[int, ...] | None]:
        return [_stamp(path) for path in (self._certfile, self._keyfile)]


def _stamp(path: str) -> tuple[int, ...] | None:
    """What changes when a file is written or, as behind a symbolic link, another one takes its place."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def server_context(certfile: str, keyfile: str) -> ssl.SSLContext:
    """What `--ssl-certfile` and `--ssl-keyfile` describe; raises ConfigError that names the file and what is wrong."""
    for flag, path in (("--ssl-certfile", certfile), ("--ssl-keyfile", keyfile)):
        try:
            open(path, "rb").close()
        except OSError as error:
            raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certfile, keyfile, _refuse_passphrase)
    except _KeyIsEncrypted:
        raise ConfigError(
            f"--ssl-keyfile {keyfile} is encrypted, and nobody is there to type a passphrase; decrypt it with "
            f"`openssl pkey -in {keyfile} -out FILE` and protect the file"
        ) from None
    except ssl.SSLError as error:
        reason = "they do not match" if error.reason == "KEY_VALUES_MISMATCH" else "one of them is no PEM file"
        raise ConfigError(
            f"--ssl-certfile {certfile} and --ssl-keyfile {keyfile} cannot be used: {reason} ({error.reason or error})"
        ) from None
    except OSError as error:  # one of them has gone since
        raise ConfigError(
            f"--ssl-certfile {certfile} and --ssl-keyfile {keyfile} cannot be read: {error.strerror or error}"
        ) from None
    return context


def _refuse_passphrase() -> str:
    raise _KeyIsEncrypted
