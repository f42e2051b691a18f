"""Writes the table of acceptance cases into docs/reliability.md, from the list that the tests are checked against.

    python -m tools.acceptance_table            # writes
    python -m tools.acceptance_table --check    # exits with 1 if the page is out of date

The table stands between two comments, which nobody sees who reads the page.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.acceptance.cases import CASES, Case

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reliability.md"
BEGIN, END = "<!--acceptance cases-->", "<!--/acceptance cases-->"


def table() -> str:
    """The cases as a table; what has no mutant has an empty cell."""
    rows = ["| case | what is done | what is asserted | broken variants that it catches |", "|---|---|---|---|"]
    return "\n".join([*rows, *map(_row, CASES)])


def _row(case: Case) -> str:
    return f"| {case.name} | {case.does} | {case.asserts} | {'; '.join(case.mutants)} |"


def with_table(page: str) -> str:
    """The page with the table as it is now; raises ValueError where it has no place for one."""
    place = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if len(place.findall(page)) != 1:
        raise ValueError(f"the page needs {BEGIN} and {END}, once each")
    return place.sub(lambda _: f"{BEGIN}\n{table()}\n{END}", page)


def main() -> int:
    """Write, or check; returns the exit status."""
    page = PAGE.read_text(encoding="utf-8")
    new = with_table(page)
    if "--check" in sys.argv[1:]:
        return int(new != page)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
