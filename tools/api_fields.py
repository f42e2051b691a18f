"""Fills the tables of fields into the pages of the API, from the rows by which the server reads them.

    python -m tools.api_fields            # writes
    python -m tools.api_fields --check    # says which page is out of date, and exits with 1 if one is

A table stands between two comments, which nobody sees who reads a page: `<!--fields chat honoured-->` and `<!--/-->`.
The first word is a table of `TABLES`, the rest an effect. `<!--error codes-->` is the table of all codes.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.pages import markdown_table, refresh

from everystop.server.error_codes import CODES
from everystop.server.fields import Effect, Field
from everystop.server.openai_fields import CHAT_FIELDS, COMMON_FIELDS, COMPLETION_FIELDS, STREAM_OPTION_FIELDS
from everystop.server.tgi import GENERATE_PARAMETERS

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = (DOCS / "api.md", DOCS / "tgi.md")
CODES_TABLE = re.compile(r"(<!--error codes-->\n)(.*?)(<!--/-->)", re.DOTALL)
TABLE = re.compile(r"(<!--fields (\w+) ([\w ]+)-->\n)(.*?)(<!--/-->)", re.DOTALL)


def _own(table: Mapping[str, Field]) -> dict[str, Field]:
    """The rows that are not those of both routes."""
    return {name: row for name, row in table.items() if COMMON_FIELDS.get(name) is not row}


TABLES: dict[str, Mapping[str, Field]] = {
    "both": COMMON_FIELDS,
    "chat": _own(CHAT_FIELDS),
    "completions": _own(COMPLETION_FIELDS),
    "stream_options": STREAM_OPTION_FIELDS,
    "tgi": GENERATE_PARAMETERS,
}
TITLES = {Effect.HONOURED: "what it does", Effect.NO_EFFECT: "remark", Effect.NEUTRAL_ONLY: "why no other"}


def words(schema: Mapping[str, Any]) -> str:
    """What a schema takes, in a few words."""
    if "enum" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema["enum"]) or "nothing"
    if "anyOf" in schema:
        return ", or ".join(words(one) for one in schema["anyOf"])
    kind = schema.get("type")
    if kind in ("integer", "number"):
        name = "whole number" if kind == "integer" else "number"
        if "exclusiveMinimum" in schema:
            return f"{name} above {_bound(schema['exclusiveMinimum'])}, at most {_bound(schema['maximum'])}"
        return f"{name} {_bound(schema['minimum'])} to {_bound(schema['maximum'])}" if "minimum" in schema else name
    if kind == "boolean":
        return "`true` or `false`"
    if kind == "string":
        return f"text of at most {schema['maxLength']:,} characters" if "maxLength" in schema else "text"
    if kind == "array":
        most = f" of at most {schema['maxItems']:,}" if "maxItems" in schema else ""
        items = schema["items"]
        return f"list{most}" + (f": {words(items)}" if items.get("type") != "object" else " objects")
    if kind == "object":
        return f"object of at most {schema['maxProperties']:,} entries" if "maxProperties" in schema else "object"
    return "anything"


def _bound(value: float) -> str:
    """A number as one writes it; the great powers of two by name."""
    for exponent in (31, 63, 64):
        for near, sign in ((2**exponent, ""), (-(2**exponent), "-")):
            if value in (near, near - 1):
                return f"{sign}2^{exponent}" + (" - 1" if value == near - 1 else "")
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def table_of(rows: Mapping[str, Field], effect: Effect) -> str:
    """The rows of one effect as a table in Markdown, by name."""
    lines = [
        (f"`{name}`", words(row.schema), row.schema.get("description", ""))
        for name, row in sorted(rows.items())
        if row.effect is effect
    ]
    return markdown_table(("field", "takes", TITLES[effect]), lines)


def codes_table() -> str:
    """The codes of errors, by status, as a table in Markdown."""
    lines = ["| status | `code` | when |", "|---|---|---|"]
    for code, meaning in sorted(CODES.items(), key=lambda item: item[1].status):
        lines.append(f"| {meaning.status} | `{code}` | {meaning.when} |")
    return "\n".join(lines) + "\n"


def filled(page: str) -> str:
    """The page with all its tables as they are now; raises KeyError or ValueError for one that there is not."""

    def fill(found: re.Match[str]) -> str:
        begin, table, effect, _, end = found.groups()
        return begin + table_of(TABLES[table], Effect(effect)) + end

    page = CODES_TABLE.sub(lambda found: found[1] + codes_table() + found[3], page)
    return TABLE.sub(fill, page)


if __name__ == "__main__":
    sys.exit(refresh(PAGES, filled))
