"""The pages of the API say what the server reads."""

from __future__ import annotations

import pytest
from tools.api_fields import PAGES, TABLE, TABLES, filled, words

from everystop.server.fields import Effect
from everystop.server.openai_fields import CHAT_FIELDS, COMPLETION_FIELDS


def test_the_tables_are_those_of_the_rows() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert filled(text) == text, "run python -m tools.api_fields"


def test_every_field_stands_on_the_page_with_its_effect() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    shown = {(table, Effect(effect)): text for _, table, effect, text, _ in TABLE.findall(pages)}
    for table, rows in TABLES.items():
        for name, row in rows.items():
            assert f"\n| `{name}` |" in shown[table, row.effect], name
    names = {name for table in ("both", "chat", "completions") for name in TABLES[table]}
    assert names == CHAT_FIELDS.keys() | COMPLETION_FIELDS.keys()


def test_every_field_that_does_something_says_what() -> None:
    silent = {
        name
        for rows in TABLES.values()
        for name, row in rows.items()
        if row.effect is not Effect.NO_EFFECT and not row.schema.get("description")
    }
    assert not silent


def test_an_unknown_table_is_an_error() -> None:
    with pytest.raises(KeyError):
        filled("<!--fields gone honoured-->\n<!--/-->")
    with pytest.raises(ValueError):
        filled("<!--fields chat ignored-->\n<!--/-->")


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "integer", "minimum": 0, "maximum": 2**31 - 1}, "whole number 0 to 2^31 - 1"),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1}, "whole number -2^63 to 2^64 - 1"),
        ({"type": "number", "minimum": 0.5, "maximum": 2.0}, "number 0.5 to 2"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1.0}, "number above 0, at most 1"),
        ({"enum": ["auto", None]}, '`"auto"` or `null`'),
        ({"enum": []}, "nothing"),
        ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}, "text, or list: text"),
        ({}, "anything"),
    ],
)
def test_schemas_in_words(schema: dict[str, object], text: str) -> None:
    assert words(schema) == text
