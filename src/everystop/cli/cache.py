"""`everystop cache ls|rm`: what lies in the cache folder, and room for something else."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from everystop.core.errors import ConfigError

if TYPE_CHECKING:
    from everystop.model.cache import Entry
    from everystop.model.home import Home

MIN_PREFIX = 4
AGES = ((86_400, "d"), (3_600, "h"), (60, "min"))


def add_parser(commands: Any) -> None:
    """Describe the command and its two words."""
    parser = commands.add_parser(
        "cache",
        help="list or remove what is kept in the cache",
        description="List or remove fetched models, packed weights, built tokenizers and crash files "
        "(EVERYSTOP_HOME, by default ~/.cache/everystop). Servers that run keep what they have opened.",
        allow_abbrev=False,
    )
    words = parser.add_subparsers(title="what to do", metavar="ls | rm", required=True)
    listing = words.add_parser("ls", help="list all, with sizes and ages", allow_abbrev=False)
    listing.add_argument("--json", action="store_true", help="print JSON; sizes in bytes, ages in seconds")
    listing.set_defaults(run=run_list)
    removing = words.add_parser("rm", help="remove some, or all", allow_abbrev=False)
    removing.add_argument(
        "names",
        metavar="NAME",
        nargs="*",
        help="a name that ls shows, or its first letters; an embedded model's own name stands for all that was made of "
        "it",
    )
    removing.add_argument("--all", action="store_true", help="remove everything that ls lists")
    removing.set_defaults(run=run_remove)


def run_list(arguments: argparse.Namespace) -> int:
    """Print a table, or JSON."""
    home, entries = _entries()
    now_s = time.time()  # files carry times of that clock; an age may be off where it was set
    if arguments.json:
        print(json.dumps({"home": str(home.root), "entries": [_as_data(entry, now_s) for entry in entries]}))
        return 0
    rows = [(_size(one.num_bytes), _age(now_s - one.modified_s), one.kind, one.name, one.detail) for one in entries]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    for size, age, kind, name, detail in rows:
        print(
            f"{size:>{widths[0]}}  {age:>{widths[1]}}  {kind:<{widths[2]}}  {name}{f'  ({detail})' if detail else ''}"
        )
    print(f"{_size(sum(entry.num_bytes for entry in entries))} in {home.root}")
    return 0


def run_remove(arguments: argparse.Namespace) -> int:
    """Remove what is named; 1 if something could not be removed."""
    from everystop.model.cache import EntryBusy, remove_entry

    if bool(arguments.names) == arguments.all:
        raise ConfigError("name what to remove as `everystop cache ls` shows it, or give --all instead")
    home, entries = _entries()
    chosen = entries if arguments.all else _choose(arguments.names, entries)
    num_bytes, status = 0, 0
    for entry in chosen:
        try:
            remove_entry(entry, home)
        except EntryBusy:
            print(f"everystop: {entry.name} is being written by another process; try again later", file=sys.stderr)
            status = 1
        except OSError as error:
            print(f"everystop: {entry.name} cannot be removed: {error.strerror or error}", file=sys.stderr)
            status = 1
        else:
            print(f"removed {entry.kind} {entry.name}, {_size(entry.num_bytes)}")
            num_bytes += entry.num_bytes
    print(f"{_size(num_bytes)} are free again in {home.root}, once no server has them open")
    return status


def _entries() -> tuple[Home, list[Entry]]:
    from everystop.model.cache import list_entries
    from everystop.model.home import Home

    home = Home.from_environment()
    return home, list_entries(home)


def _choose(names: list[str], entries: list[Entry]) -> list[Entry]:
    """The entries that the names mean; raises ConfigError for one that means none, or several of one kind."""
    from everystop.model.pull import EMBEDDED

    chosen: dict[Entry, None] = {}
    for name in names:
        if "/" in name or name in ("", ".", ".."):
            raise ConfigError(f"{name!r} is a path; give a name that `everystop cache ls` shows")
        if name in EMBEDDED:
            model = EMBEDDED[name]
            made = (model.file_name, model.sha256[:32])
            found = [one for one in entries if one.name.startswith(made) or one.detail.startswith(f"{name},")]
        else:
            found = [one for one in entries if one.name == name] or _by_prefix(name, entries)
        if not found:
            raise ConfigError(f"{_why_none(name, entries)}; `everystop cache ls` lists what there is")
        chosen |= dict.fromkeys(found)
    return list(chosen)


def _why_none(name: str, entries: list[Entry]) -> str:
    num_longer = sum(entry.name.startswith(name) for entry in entries)
    if not num_longer:
        return f"there is no {name!r} in the cache"
    begins = f"{num_longer} names begin" if num_longer > 1 else "one name begins"
    return f"{begins} with {name!r}; give at least {MIN_PREFIX} letters of it"


def _by_prefix(name: str, entries: list[Entry]) -> list[Entry]:
    found = [entry for entry in entries if len(name) >= MIN_PREFIX and entry.name.startswith(name)]
    if len(found) > 1:
        raise ConfigError(f"{name!r} begins the names of {len(found)} entries; give more letters")
    return found


def _as_data(entry: Entry, now_s: float) -> dict[str, Any]:
    return {
        "name": entry.name,
        "kind": entry.kind,
        "detail": entry.detail,
        "bytes": entry.num_bytes,
        "age_s": max(0, round(now_s - entry.modified_s)),
    }


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


def _age(seconds: float) -> str:
    for unit_s, unit in AGES:
        if seconds >= unit_s:
            return f"{seconds // unit_s:.0f} {unit}"
    return "now"
