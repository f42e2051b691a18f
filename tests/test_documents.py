"""The documents name things that exist."""

from __future__ import annotations

import re
from pathlib import Path

from tools.flag_table import PAGE, with_tables

ROOT = Path(__file__).parent.parent


def test_the_life_of_a_request_is_short_and_names_files_that_exist() -> None:
    text = (ROOT / "docs" / "request-life.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    named = re.findall(r"`((?:src|csrc)/[\w/]+\.(?:py|cpp|hpp))`", text)
    assert len(set(named)) >= 14
    missing = [name for name in named if not (ROOT / name).is_file()]
    assert not missing


def test_links_between_documents_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_tables_of_options_are_those_of_the_configuration() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_tables(text) == text, "run python -m tools.flag_table"
