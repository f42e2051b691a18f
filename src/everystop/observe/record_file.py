"""The file of a record: only its owner can read it, and the records of earlier runs stay beside it."""

from __future__ import annotations

import errno
import gzip
import os
import stat
import zlib
from itertools import islice
from pathlib import Path
from typing import TextIO

MAX_OLD_RECORDS = 5
MAX_IDLE_LINES = 10_000  # are looked at
_HEADER, _SCHEDULE = '{"everystop_record":', '["schedule",'


def open_record(path: Path) -> TextIO:
    """A record to be written anew; raises OSError. One that is there becomes FILE.1, the one before FILE.2, and so on
    up to FILE.5, which is given up; but one without any request is written over, so that starts which served nobody
    push out no record of a run. What is no regular file, such as a pipe, is written to as it is.
    """
    if path.is_file() and path.stat().st_size and not _is_idle(path):
        path = path.resolve()  # behind a link the file is moved, and the link goes on pointing at the newest
        _move_aside(path)
    create_private(path)
    return gzip.open(path, "wt", compresslevel=4, encoding="ascii")


def check_record(path: Path) -> None:
    """Raise OSError where `open_record` would, as far as can be told without a change; makes and moves nothing."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        _check_folder(path.resolve().parent)
        return
    if stat.S_ISDIR(mode):
        raise _error(errno.EISDIR)
    if stat.S_ISREG(mode) and path.stat().st_size and not _is_idle(path):
        _check_folder(path.resolve().parent)
    elif not os.access(path, os.W_OK):
        raise _error(errno.EACCES)


def _check_folder(folder: Path) -> None:
    folder.stat()  # raises what opening a file in it would
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _error(errno.EACCES)


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def create_private(path: Path) -> None:
    """Have a file that its owner alone can read; one that is there keeps its rights. Raises OSError."""
    if not path.exists():
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))


def _is_idle(path: Path) -> bool:
    """Whether it is a whole record of a server that had no request; False where that would take long to say."""
    try:
        with gzip.open(path, "rt", encoding="ascii") as file:
            if file.read(len(_HEADER)) != _HEADER:
                return False
            _, *lines = islice(file, MAX_IDLE_LINES + 2)
    except (OSError, EOFError, ValueError, zlib.error):  # no record, or one that was cut off
        return False
    return len(lines) <= MAX_IDLE_LINES and all(line.startswith(_SCHEDULE) for line in lines)


def _move_aside(path: Path) -> None:
    old = [path.with_name(f"{path.name}.{number}") for number in range(1, MAX_OLD_RECORDS + 1)]
    num_kept = next((i for i, each in enumerate(old) if not each.exists()), MAX_OLD_RECORDS - 1)
    for i in range(num_kept, 0, -1):
        old[i - 1].replace(old[i])
    path.replace(old[0])
