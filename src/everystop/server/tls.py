"""The TLS side of the listening socket: a certificate and its key, TLS 1.2 or later, checked before anything loads."""

from __future__ import annotations

import ssl

from everystop.core.errors import ConfigError


class _KeyIsEncrypted(Exception):
    """OpenSSL has asked for a passphrase."""


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
    return context


def _refuse_passphrase() -> str:
    raise _KeyIsEncrypted
