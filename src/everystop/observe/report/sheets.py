"""Sheets that pictures are laid out on, in pixels from the top left, and written from: PNG, SVG, or into a page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from everystop.observe.report.drawing import SMALL, TEXT, colour_of, matplotlib, text_px
from everystop.observe.report.grammar import Look, Stroke, Theme

PNG_DPI = 144
SWATCH, LEGEND_LINE = 26.0, 21.0
STYLE = {
    "svg.hashsalt": "everystop",
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "hatch.linewidth": 0.9,
    "path.simplify": True,
}


@contextmanager
def drawing_style() -> Iterator[None]:
    """Whatever is drawn and written within looks the same everywhere; raises PictureError without matplotlib."""
    with matplotlib().rc_context(STYLE):
        yield


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a legend: a state's look, or the end mark if there is none; or a policy's stroke."""

    label: str
    look: Look | None = None
    stroke: Stroke | None = None
    marker: str = ""


class Timed(NamedTuple):
    """Where a sheet's time axes lie, in pixels, and the time at their right end; they begin at 0."""

    left: float
    width: float
    end_s: float


class Scale(NamedTuple):
    """Where axes of durations lie, in pixels, and what is at their ends, in seconds."""

    left: float
    width: float
    low_s: float
    high_s: float
    is_log: bool


@dataclass(slots=True)
class Sheet:
    """A figure of a size in pixels; `timed` is where its time axes lie, `scales` where its axes of durations do;
    `notes` is what a reader must be told about how it was drawn.
    """

    width: float
    height: float
    theme: Theme
    timed: Timed | None = None
    scales: list[Scale] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figure: Any = None
    _page: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.figure = matplotlib("figure").Figure(
            figsize=(self.width / 72, self.height / 72), facecolor=self.theme.page
        )
        self._page = self.figure.add_axes((0, 0, 1, 1))
        self._page.set_axis_off()
        self._page.set_xlim(0, self.width)
        self._page.set_ylim(self.height, 0)

    def axes(self, left: float, top: float, width: float, height: float) -> Any:
        """New axes in that box."""
        box = (left / self.width, 1 - (top + height) / self.height, width / self.width, height / self.height)
        return self.figure.add_axes(box)

    def words(self, left: float, top: float, text: str, *, is_bold: bool = False, size: float = TEXT) -> None:
        """A line of text that begins there."""
        weight = "bold" if is_bold else "normal"
        self._page.text(left, top, text, color=self.theme.ink, fontsize=size, va="top", fontweight=weight)

    def legend(self, entries: Sequence[Entry], left: float, top: float) -> None:
        """Entries from left to right, on as many lines as they need."""
        for entry, x, line in flow(entries, self.width - left):
            y = top + line * LEGEND_LINE + LEGEND_LINE / 2
            self._entry(entry, left + x, y)
            self._page.text(
                left + x + SWATCH + 6, y, entry.label, color=self.theme.ink, fontsize=SMALL, va="center", ha="left"
            )

    def _entry(self, entry: Entry, x: float, y: float) -> None:
        if entry.look is not None:
            height = 14 * entry.look.height
            patch = matplotlib("patches").Rectangle(
                (x, y - height / 2),
                SWATCH,
                height,
                facecolor=entry.look.fill or "none",
                edgecolor=self.theme.outline,
                lw=0.8,
                hatch=entry.look.hatch or None,
                hatchcolor=entry.look.hatch_colour,
            )
            self._page.add_patch(patch)
        elif entry.stroke is not None:
            colour = colour_of(entry.stroke, self.theme)
            style = {"color": colour, "ls": entry.stroke.dashes, "lw": 2}
            self._page.plot([x, x + SWATCH], [y, y], **style)
            if entry.stroke.marker:
                self._mark(x + SWATCH / 2, y, entry.stroke.marker, colour)
        else:
            self._mark(x + SWATCH / 2, y, entry.marker, self.theme.ink)

    def _mark(self, x: float, y: float, marker: str, colour: str) -> None:
        edge = colour if marker == "x" or "$" in marker else self.theme.page
        self._page.plot([x], [y], marker=marker, ms=6.5, mfc=colour, mec=edge, mew=1.0, ls="none")

    def as_svg(self) -> str:
        """The sheet as an SVG document; the same drawing gives the same bytes under one version of matplotlib."""
        target = BytesIO()
        self.figure.savefig(target, format="svg", dpi=72, facecolor=self.theme.page, metadata=_NO_DATE)
        return _PATH.sub(_rounded, target.getvalue().decode("utf-8"))

    def write_png(self, path: Path) -> None:
        """The sheet as pixels, two for each of its own in either direction."""
        self.figure.savefig(path, format="png", dpi=PNG_DPI, facecolor=self.theme.page, metadata={"Software": None})


_PATH = re.compile(r' d="[^"]*"')
_FINE = re.compile(r"\d+\.\d{3,}")


def _rounded(path: re.Match[str]) -> str:
    """A path whose numbers have two digits after the point."""
    return _FINE.sub(lambda number: f"{float(number[0]):.2f}", path[0])


_NO_DATE = {"Date": None, "Creator": None}


def flow(entries: Sequence[Entry], width: float) -> Iterator[tuple[Entry, float, int]]:
    """Each entry with its place: pixels from the left, and the line it is on."""
    x, line = 0.0, 0
    for entry in entries:
        needed = SWATCH + 6 + text_px(entry.label) + 16
        if x > 0 and x + needed - 16 > width:
            x, line = 0.0, line + 1
        yield entry, x, line
        x += needed


def legend_height(entries: Sequence[Entry], width: float) -> float:
    """How high a legend of that width gets."""
    return LEGEND_LINE * (1 + max((line for _, _, line in flow(entries, width)), default=-1))
