"""The made parts of pages: each tool knows what stands in them, this module writes them, or says that they are old."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, each line with its end."""
    first, *others = (f"| {' | '.join(cells)} |\n" for cells in (head, *rows))
    return "".join([first, "|" + "---|" * len(head) + "\n", *others])


def refresh(pages: Iterable[Path], filled: Callable[[str], str]) -> int:
    """Write each page as it is to be now, or with `--check` name those that are not so; returns the exit status."""
    is_check, num_stale = "--check" in sys.argv[1:], 0
    for page in pages:
        text = page.read_text(encoding="utf-8")
        new = filled(text)
        if new != text and is_check:
            print(f"{page.name} is out of date")
            num_stale += 1
        elif new != text:
            page.write_text(new, encoding="utf-8")
    return 1 if num_stale else 0
