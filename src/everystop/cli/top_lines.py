"""Lines of a terminal as pieces of styled text, and the small charts that are made of characters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from rich.cells import cell_len, set_cell_size
from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style

EIGHTHS = " ▁▂▃▄▅▆▇█"
ELLIPSIS = "…"
_SYSTEMS = {"standard": ColorSystem.STANDARD, "256": ColorSystem.EIGHT_BIT, "truecolor": ColorSystem.TRUECOLOR}


class Line:
    """One line; what comes from a server loses characters that a terminal would obey."""

    __slots__ = ("pieces", "width")

    def __init__(self, text: str = "", style: str = "") -> None:
        self.pieces: list[tuple[str, str]] = []
        self.width = 0
        self.add(text, style)

    def add(self, text: str, style: str = "") -> Line:
        """Put text at the end; `style` is one of rich's, "" for none."""
        if not text.isprintable():
            text = "".join(character if character.isprintable() else "\ufffd" for character in text)
        if text:
            self.pieces.append((text, style))
            self.width += cell_len(text)
        return self

    def extend(self, other: Line) -> Line:
        """Put another line at the end."""
        self.pieces += other.pieces
        self.width += other.width
        return self

    def pad(self, width: int) -> Line:
        """Fill up with spaces to that width, where it is not wider already."""
        return self.add(" " * (width - self.width))

    def cut(self, width: int) -> Line:
        """The same, at most so wide; what has been cut ends in an ellipsis."""
        if self.width <= width:
            return self
        line = Line()
        for text, style in self.pieces:
            if line.width + cell_len(text) >= width:
                return line.add(set_cell_size(text, max(0, width - 1 - line.width)) + ELLIPSIS * (width > 0), style)
            line.add(text, style)
        return line

    @property
    def plain(self) -> str:
        """Its text."""
        return "".join(text for text, _ in self.pieces)


class Ink:
    """Turns lines into what a terminal is sent: with its colours, without any (NO_COLOR, no terminal)."""

    def __init__(self, console: Console) -> None:
        self._system = _SYSTEMS.get(console.color_system or "")
        self._has_colours = not console.no_color
        self._wraps: dict[str, tuple[str, str]] = {"": ("", "")}

    def text(self, line: Line) -> str:
        """The line with escape sequences, without its end."""
        parts = []
        for text, style in line.pieces:
            begin, end = self._wraps.get(style) or self._wrap(style)
            parts.append(f"{begin}{text}{end}")
        return "".join(parts)

    def _wrap(self, style: str) -> tuple[str, str]:
        begin = end = ""
        if self._system is not None:
            parsed = Style.parse(style)
            rendered = (parsed if self._has_colours else parsed.without_color).render("|", color_system=self._system)
            begin, _, end = rendered.partition("|")
        self._wraps[style] = (begin, end)
        return begin, end


def drawn(kinds: Iterable[str], marks: Mapping[str, tuple[str, str]]) -> Line:
    """One character for each kind, by its (character, style)."""
    line = Line()
    for kind, run in groupby(kinds):
        mark, style = marks[kind]
        line.add(mark * sum(1 for _ in run), style)
    return line


def sparkline(values: Sequence[float | None], top: float) -> str:
    """A character for each value, as high as its share of `top`; a space for None, the lowest mark for 0."""
    return "".join(" " if value is None else EIGHTHS[_eighths(value, top)] for value in values)


def _eighths(value: float, top: float) -> int:
    return 1 if top <= 0 else max(1, min(8, round(8 * value / top)))


def shares(nums: Sequence[int], width: int) -> list[int]:
    """How many of `width` characters each number gets: its share, and at least one where it is not 0.

    Example: (1, 60, 39) in 10 characters: 1, 6, 3.
    """
    total = sum(nums)
    if total == 0 or width <= 0:
        return [0] * len(nums)
    given = [max(1, num * width // total) if num else 0 for num in nums]
    for _ in range(abs(width - sum(given))):
        most = max(range(len(nums)), key=lambda i: (nums[i] / total - given[i] / width, -i))
        least = max(range(len(nums)), key=lambda i: given[i])
        if sum(given) < width:
            given[most] += 1
        else:
            given[least] -= 1
    return given


def stacked(parts: Sequence[tuple[str, float]], num_rows: int) -> list[str]:
    """A column of `num_rows` characters from the bottom up: the kind in each, "" above the last.

    Each part has the height at which it ends, in rows, and gets at least one row where there is room; the last ones
    have their rows first.
    """
    ends, last = list[int](), 0
    for _, height in parts:
        last = max(last + 1, round(height))
        ends.append(last)
    limit = num_rows
    for i in reversed(range(len(ends))):
        ends[i] = max(0, min(ends[i], limit))
        limit = ends[i] - 1
    rows, begin = [""] * num_rows, 0
    for (kind, _), end in zip(parts, ends, strict=True):
        rows[begin:end] = [kind] * (end - begin)
        begin = max(begin, end)
    return rows
