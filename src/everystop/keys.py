"""API keys, of which nothing but hashes is kept: in memory, in errors, in what is printed of a configuration.

A key is random text that nobody can guess; so its plain SHA-256 gives nothing away, and no slow hash is needed. A file
of keys (`--api-key-file`) has one a line, by itself or as its hash, with the name of a tenant before it or without:

    # lines like this one, and empty ones, are passed over
    sk-3f0c9a…
    sha256:9b74c9897bac770ffc029102a200c5de…
    gold: sha256:5994471abb01112afcc18159f6cc74b4…
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from everystop.core.errors import ConfigError

HASH_PREFIX = "sha256:"
_HASH = re.compile(HASH_PREFIX + r"([0-9a-fA-F]{64})")
_NAME = r"[^\s:#](?:[^:]*[^\s:])?"  # of a tenant; what begins with # is a remark
_LINE = re.compile(rf"(?:(?P<name>{_NAME}):\s+)?(?P<key>\S+)")


@dataclass(frozen=True, slots=True, repr=False)
class KeyHash:
    """A key, of which only its SHA-256 is known; printing one shows nothing."""

    digest: bytes

    def __repr__(self) -> str:
        return "KeyHash(…)"


@dataclass(frozen=True, slots=True)
class NamedKey:
    """One line of a file of keys: whose key it is ("" for no tenant), and the key."""

    name: str
    key: KeyHash


def hash_key(text: str) -> KeyHash:
    """The hash of a key, or the hash that `sha256:HEX` already is; raises ConfigError, which does not repeat the text.

    Never to be called with what a client sends: the hash of a key would be a key.
    """
    if not text or text.strip() != text:
        raise ConfigError("a key is empty or has blanks at its ends; give the key itself")
    if not text.lower().startswith(HASH_PREFIX):
        return KeyHash(digest_of(text.encode("utf-8", "surrogateescape")))
    match = _HASH.fullmatch(HASH_PREFIX + text[len(HASH_PREFIX) :])
    if match is None:
        raise ConfigError(f"what begins with {HASH_PREFIX} must be the hash of a key: 64 hexadecimal digits follow")
    return KeyHash(bytes.fromhex(match[1]))


def digest_of(key: bytes) -> bytes:
    """The SHA-256 of a key as a client sends it."""
    return hashlib.sha256(key).digest()


def hashed(keys: Iterable[KeyHash | str], source: str) -> tuple[KeyHash, ...]:
    """All keys as hashes; raises ConfigError that names the source."""
    try:
        return tuple(key if isinstance(key, KeyHash) else hash_key(key) for key in keys)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def read_key_file(path: str) -> tuple[NamedKey, ...]:
    """The keys in a file; raises ConfigError that names the file and the line, and shows nothing of its text."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"--api-key-file {path} cannot be read: {reason}") from None
    numbered = ((number, line.strip()) for number, line in enumerate(lines, 1))
    keys = [_read_line(path, number, line) for number, line in numbered if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"--api-key-file {path} holds no key, so nobody could come in; add one, or leave it out")
    return tuple(keys)


def _read_line(path: str, number: int, line: str) -> NamedKey:
    match = _LINE.fullmatch(line)
    if match is None:
        raise ConfigError(
            f"--api-key-file {path}, line {number}: must be a key without blanks, or its hash, or a tenant's name, a "
            "colon, a blank, and one of them"
        )
    [key] = hashed([match["key"]], f"--api-key-file {path}, line {number}")
    return NamedKey(match["name"] or "", key)


def key_line(name: str, key: KeyHash) -> str:
    """The line of a file of keys for a tenant's key, or with "" for nobody's; raises ConfigError for other names."""
    if name and (re.fullmatch(_NAME, name) is None or len(name.splitlines()) > 1):
        raise ConfigError(
            f"the tenant's name is {name!r}; it must be one line without a colon, blanks at its ends, or # at its start"
        )
    return (f"{name}: " if name else "") + HASH_PREFIX + key.digest.hex()


def exposure(path: str) -> str | None:
    """A warning about a file of secrets that others on this machine may read; None where they may not."""
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if not mode & 0o044:
        return None
    return f"{path} holds secrets and can be read by other users (mode {mode:04o}); chmod 600 {path}"
