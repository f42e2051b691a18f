"""`everystop trace RECORD`: a recorded run as a file for viewers of traces."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from everystop.cli import settings
from everystop.core.errors import ConfigError


def add_parser(commands: Any) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "trace",
        help="draw a recorded run for ui.perfetto.dev",
        description="Write a run recorded with `everystop serve --record` as a trace for ui.perfetto.dev: who was in "
        "which slot, what each step computed, who waited and why.",
        formatter_class=settings.HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("record", metavar="RECORD", type=settings.path, help="what --record has written")
    parser.add_argument(
        "-o",
        "--out",
        metavar="FILE",
        type=settings.path,
        help="file to write (default: beside the record, as .pftrace or .json)",
    )
    parser.add_argument("--json", action="store_true", help="write Chrome's JSON format, for other viewers")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Draw, and say what was written."""
    from everystop.observe.trace.chrome import chrome_chunks
    from everystop.observe.trace.perfetto import perfetto_chunks
    from everystop.observe.trace.picture import picture_of
    from everystop.sim.replay import history_of_record

    history = history_of_record(arguments.record)
    path = arguments.out or default_path(arguments.record, "json" if arguments.json else "pftrace")
    if path.is_dir():
        raise ConfigError(f"--out {path} is a folder; name a file")
    if path.exists() and path.samefile(arguments.record):
        raise ConfigError(f"--out {path} is the record itself; name another file")
    picture = picture_of(history)
    num_bytes = write(path, chrome_chunks(picture) if arguments.json else perfetto_chunks(picture))
    num_requests = sum(trail.arrival is not None for trail in history.trails.values())
    print(f"{path}: {len(history.steps):,} steps, {num_requests:,} requests, {num_bytes:,} bytes", file=sys.stderr)
    return 0


def default_path(record: Path, kind: str) -> Path:
    """The record's name with another ending: run.gz and run.json.gz give run.pftrace."""
    stem = record.name.removesuffix(".gz").removesuffix(".json")
    return record.with_name(f"{stem}.{kind}")


def write(path: Path, chunks: Iterator[bytes]) -> int:
    """Write all of it or leave no file behind; returns the number of bytes. Raises ConfigError."""
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            num_bytes = sum(map(file.write, chunks))
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}; name another file by --out") from error
    return num_bytes
