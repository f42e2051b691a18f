"""Writes the table of acceptance cases into docs/reliability.md, from the list that the tests are checked against.

    python -m tools.acceptance_table            # writes
    python -m tools.acceptance_table --check    # exits with 1 if the page is out of date

The table stands between two comments, which nobody sees who reads the page.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.acceptance.cases import CASES
from tools.pages import markdown_table, refresh

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reliability.md"
BEGIN, END = "<!--acceptance cases-->", "<!--/acceptance cases-->"


def table() -> str:
    """The cases as a table; what has no mutant has an empty cell."""
    head = ("case", "what is done", "what is asserted", "broken variants that it catches")
    return markdown_table(head, ((case.name, case.does, case.asserts, "; ".join(case.mutants)) for case in CASES))


def with_table(page: str) -> str:
    """The page with the table as it is now; raises ValueError where it has no place for one."""
    place = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if len(place.findall(page)) != 1:
        raise ValueError(f"the page needs {BEGIN} and {END}, once each")
    return place.sub(lambda _: f"{BEGIN}\n{table()}{END}", page)


if __name__ == "__main__":
    sys.exit(refresh([PAGE], with_table))
