"""Draws the report of a comparison again: `python -m everystop.observe.report DIR`, where DIR holds its report.json."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from everystop.observe.comparison import Comparison, from_json
from everystop.observe.report import write_report


def main(words: list[str] | None = None) -> None:
    """Write the files beside the data."""
    parser = argparse.ArgumentParser(prog="python -m everystop.observe.report", description=__doc__)
    parser.add_argument("folder", metavar="DIR", type=Path, help="what was given to everystop compare as --out")
    folder = parser.parse_args(words).folder
    try:
        comparison = read_comparison(folder / "report.json")
        for path in write_report(comparison, folder):
            print(path)
    except (OSError, ValueError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


def read_comparison(path: Path) -> Comparison:
    """The comparison in a report.json; raises OSError, and ValueError for a file that is none."""
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8"))["comparison"])
    except (KeyError, TypeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is no report of everystop compare: {error!r}") from None


if __name__ == "__main__":
    main()
