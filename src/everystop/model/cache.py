"""What lies in the cache folder, and how to remove it while servers run.

A file that a server has mapped stays with it after it is removed here; one that is being written is left alone, for
whoever writes it holds its lock.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from everystop.model.home import Home
from everystop.model.pull import EMBEDDED
from everystop.model.weight_file import WeightFileUnusable, read_key

KINDS = {"models": "model", "weights": "weights", "tokenizers": "tokenizer", "crashes": "crash file"}
LEFTOVER = "leftover"


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing in the cache: its `name` in its kind, what it is in words, and the locks of those who write it."""

    name: str
    kind: str
    detail: str
    path: Path
    num_bytes: int
    modified_s: float
    locks: tuple[str, ...] = ()


class EntryBusy(Exception):
    """Another process is writing it."""


def list_entries(home: Home) -> list[Entry]:
    """All there is, by kind and name; bookkeeping of a few bytes (hashes, locks) is left out."""
    found = [entry for folder, kind in KINDS.items() for entry in _entries_in(home, folder, kind)]
    found += [entry for path in _leftovers(home) if (entry := _entry(path, LEFTOVER, "of a pull that ended early"))]
    order = [*KINDS.values(), LEFTOVER]
    return sorted(found, key=lambda entry: (order.index(entry.kind), entry.name))


def remove_entry(entry: Entry, home: Home) -> None:
    """Remove it; raises EntryBusy while somebody writes it, OSError where it cannot be removed."""
    with contextlib.ExitStack() as stack:
        for lock in entry.locks:
            if not stack.enter_context(home.try_lock(lock)):
                raise EntryBusy
        if entry.path.is_dir():
            shutil.rmtree(entry.path)
        else:
            entry.path.unlink(missing_ok=True)


def _entries_in(home: Home, folder: str, kind: str) -> Iterator[Entry]:
    for path in sorted(_files(home.root / folder)):
        if path.name.endswith(".tmp"):
            entry = _entry(path, LEFTOVER, "of a process that ended early, or is at work", _locks_of(path))
        else:
            entry = _entry(path, kind, _detail(path, kind), _locks_of(path))
        if entry is not None:
            yield entry


def _entry(path: Path, kind: str, detail: str, locks: tuple[str, ...] = ()) -> Entry | None:
    """None for what has just been removed by somebody else."""
    try:
        status = path.stat()
        num_bytes = status.st_size if not path.is_dir() else sum(one.stat().st_size for one in _files(path, deep=True))
    except OSError:
        return None
    if path.name.startswith(".pull-"):
        locks = (f"pull-{path.name.removeprefix('.pull-').rpartition('-')[0]}",)
    return Entry(path.name, kind, detail, path, num_bytes, status.st_mtime, locks)


def _files(folder: Path, *, deep: bool = False) -> list[Path]:
    try:
        return [path for path in (folder.rglob("*") if deep else folder.iterdir()) if path.is_file()]
    except OSError:
        return []


def _leftovers(home: Home) -> list[Path]:
    return sorted(home.root.glob(".pull-*")) if home.root.is_dir() else []


def _locks_of(path: Path) -> tuple[str, ...]:
    """The names of the locks that are held while a file of that name, or its temporary one, is written."""
    name = path.name
    if name.startswith(".") and name.endswith(".tmp"):  # .NAME.PID.RANDOM.tmp
        name = name[1:].rsplit(".", 3)[0]
    if path.parent.name == "models":
        return tuple(f"pull-{model}" for model, embedded in EMBEDDED.items() if embedded.file_name == name)
    return (name,) if path.parent.name == "weights" else ()


def _detail(path: Path, kind: str) -> str:
    if kind == "model":
        names = [name for name, embedded in EMBEDDED.items() if embedded.file_name == path.name]
        return f"serve it as {names[0]}" if names else ""
    if kind == "weights":
        return _weights_detail(path)
    return ""


def _weights_detail(path: Path) -> str:
    """Of which model, arithmetic and kernels."""
    try:
        with open(path, "rb") as file:
            key = read_key(file.fileno())
    except (OSError, ValueError, WeightFileUnusable, json.JSONDecodeError):
        return "damaged"
    names = [name for name, embedded in EMBEDDED.items() if embedded.sha256 == key.get("model")]
    model = names[0] if names else f"model {key.get('model', '?')[:12]}"
    return f"{model}, {key.get('dtype', '?')}, {key.get('layout', '?')}, version {key.get('version', '?')}"
