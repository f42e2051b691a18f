"""Writes the tables of options in docs/operations.md from `Config`.

python -m tools.flag_table            # writes
python -m tools.flag_table --check    # exits with 1 if the page is out of date
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from tools.pages import markdown_table, refresh

from everystop.cli import settings
from everystop.config.setting import GROUPS

PAGE = Path(__file__).parent.parent / "docs" / "operations.md"
BEGIN, END = "<!-- options: written by python -m tools.flag_table -->", "<!-- end of options -->"


def tables() -> str:
    """One table a group, in the order of the help."""

    def fields_of(group: str) -> list[dataclasses.Field[Any]]:
        return [field for field in settings.flag_fields() if field.metadata["group"] == group]

    return "\n".join(
        f"**{group}**\n\n" + markdown_table(("option", "what it does"), map(_row, fields_of(group))) for group in GROUPS
    )


def _row(field: dataclasses.Field[Any]) -> tuple[str, str]:
    flag, choices = field.metadata["flag"], field.metadata["choices"]
    if isinstance(field.default, bool):
        value = ""
    elif choices:
        value = " " + "\\|".join(choices)
    else:
        value = f" {field.metadata['metavar'] or settings.metavar(flag, field.metadata['parse'])}"
    text = settings.help_text(field).replace("%%", "%").replace("|", "\\|")
    return f"`{flag}{value}`", text


def with_tables(text: str) -> str:
    """The page's text with the tables as they are now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


if __name__ == "__main__":
    sys.exit(refresh([PAGE], with_tables))
