"""`Home`: the folder where fetched models and built caches are kept, its locks, and the hashes it remembers.

    EVERYSTOP_HOME (default $XDG_CACHE_HOME/everystop, else ~/.cache/everystop)
    ├── models/      fetched model files
    ├── weights/     packed weights
    ├── tokenizers/  built tokenizers
    ├── crashes/     crash files of servers
    ├── stamps/      hashes of files, with the size and times they were taken at
    └── locks/

Everything is written to a temporary name and renamed, so a reader sees a whole file or none.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_CHUNK_BYTES = 1 << 20


class Home:
    """The cache folder of one user; methods that write raise OSError where the folder cannot be written."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @staticmethod
    def from_environment(environment: Mapping[str, str] = os.environ) -> Home:
        """The folder that EVERYSTOP_HOME names, or the one in the user's cache folder."""
        if chosen := environment.get("EVERYSTOP_HOME"):
            return Home(Path(chosen).expanduser().absolute())
        base = environment.get("XDG_CACHE_HOME")
        cache = Path(base) if base and os.path.isabs(base) else Path("~/.cache").expanduser()
        return Home(cache / "everystop")

    def folder(self, name: str) -> Path:
        """The sub-folder `name`, made where it is missing."""
        path = self.root / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def crash_folder(self, chosen: str | None) -> Path:
        """Where crash files go: to the folder that an operator has `chosen`, or else here; it may be missing."""
        return self.root / "crashes" if chosen is None else Path(chosen).expanduser()

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Hold the lock `name` against every other thread and process; freed by the kernel if this one dies."""
        with open(self._lock_path(name), "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def try_lock(self, name: str) -> Iterator[bool]:
        """As `lock`, but without waiting: whether it could be had."""
        with open(self._lock_path(name), "ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def _lock_path(self, name: str) -> Path:
        return self.folder("locks") / re.sub(r"[^\w.-]", "_", name)

    def sha256(self, path: Path) -> str:
        """The SHA-256 of a file in hex; remembered while size, times and inode are those it was taken at."""
        stamp = _read_json(self._stamp_path(path))
        known = stamp.get("sha256")
        if isinstance(known, str) and stamp.get("state") == _file_state(path):
            return known
        digest = file_sha256(path)
        self.record(path, digest)
        return digest

    def is_unchanged(self, path: Path, digest: str) -> bool:
        """Whether `digest` was recorded for the file as it is now, since the machine last started.

        A crash of the machine can leave a renamed file with the right size and times but without its data.
        """
        stamp = _read_json(self._stamp_path(path))
        return stamp == {"path": str(path), "boot": _boot_id(), "state": _file_state(path), "sha256": digest}

    def record(self, path: Path, digest: str) -> None:
        """Remember `digest` for the file as it is now; does nothing where the folder cannot be written."""
        stamp = {"path": str(path), "boot": _boot_id(), "state": _file_state(path), "sha256": digest}
        with contextlib.suppress(OSError):
            self.folder("stamps")
            write_atomically(self._stamp_path(path), json.dumps(stamp).encode())

    def _stamp_path(self, path: Path) -> Path:
        name = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:32]
        return self.root / "stamps" / f"{name}.json"


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file in hex, from its bytes."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to a temporary name beside `path` and rename it."""
    temporary = temporary_name(path)
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def temporary_name(path: Path) -> Path:
    """A name beside `path` that no other thread or process uses."""
    return path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")


def _file_state(path: Path) -> list[int]:
    """What changes when a file is altered, replaced, truncated or copied over, even where its mtime is put back."""
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]


def _boot_id() -> str:
    """Changes whenever the machine starts; empty where the kernel does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
