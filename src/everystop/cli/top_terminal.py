"""The terminal as a screen of its own: only lines that have changed are written, at once, and nothing wraps."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console

from everystop.cli.top_lines import Ink, Line

CLEAR = "\x1b[2J"
WRAP, NO_WRAP = "\x1b[?7h", "\x1b[?7l"


class Terminal:
    """A context in which the terminal shows lines; afterwards it is as it was before."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._ink = Ink(console)
        self._size = (0, 0)
        self._shown: list[str] = []

    @property
    def size(self) -> tuple[int, int]:
        """Width and height now; COLUMNS and LINES win where they are set."""
        size = self._console.size
        return size.width, size.height

    def __enter__(self) -> Self:
        self._console.set_alt_screen(True)
        self._console.show_cursor(False)
        self._write(NO_WRAP)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._write(WRAP)
        self._console.show_cursor(True)
        self._console.set_alt_screen(False)

    def show(self, lines: Sequence[Line]) -> None:
        """Make the screen show these, none of them wider than it. A line is written over what was there, spaces up to
        the last column and all, so that no moment shows it empty.
        """
        width, height = self.size
        parts = []
        if (width, height) != self._size:
            self._size, self._shown = (width, height), []
            parts.append(CLEAR)
        texts = [self._ink.text(line.pad(width)) for line in lines[:height]]
        for row, text in enumerate(texts):
            if row >= len(self._shown) or self._shown[row] != text:
                parts.append(f"\x1b[{row + 1};1H{text}")
        self._shown = texts
        self._write("".join(parts))

    def _write(self, text: str) -> None:
        if text:
            self._console.file.write(text)
            self._console.file.flush()
