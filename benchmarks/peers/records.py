"""The file of runs: one JSON object a line, appended as each run ends, so that an interruption loses at most one."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.peers.peer import PeerError

Record = dict[str, Any]

NEEDED = ("kind", "name", "peer", "setting", "turn", "figures")


def append(path: Path, record: Record) -> None:
    """One more run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def read(path: Path) -> list[Record]:
    """All runs in their order; a last line that was cut off is left out. Raises PeerError for any other damage."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise PeerError(
            f"{path}: cannot be read: {error.strerror}; run python -m benchmarks.peers run first"
        ) from error
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            if number == len(lines):
                break
            raise PeerError(f"{path}, line {number}: is no JSON") from None
        if not isinstance(record, dict) or any(key not in record for key in NEEDED):
            raise PeerError(f"{path}, line {number}: is no record of a run; it needs {', '.join(NEEDED)}")
        records.append(record)
    return records


def is_good(record: Record) -> bool:
    """Every request of the run ended well and as long as it was asked for."""
    figures = record["figures"]
    return figures["errors"] == 0 and figures["exact_usage"] == figures["requests"]


def best_setting(records: Iterable[Record], peer: str, workload: str) -> str | None:
    """The setting with the highest median of output tokens a second on a workload; None where none was run.

    Where the workload itself was run in one setting at most, the one that was run in most settings speaks for it.
    """
    rates: dict[str, dict[str, list[float]]] = {}
    for record in records:
        if record["kind"] == "workload" and record["peer"] == peer and is_good(record):
            of_setting = rates.setdefault(record["name"], {}).setdefault(record["setting"], [])
            of_setting.append(record["figures"]["output_tok_s"])
    if not rates:
        return None
    widest = max(rates, key=lambda name: (len(rates[name]), name == "chat"))
    found = rates[workload if len(rates.get(workload, ())) > 1 else widest]
    return max(found, key=lambda setting: statistics.median(found[setting]))
