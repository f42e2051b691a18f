"""What the pictures of several claims share: sheets with one or two panels, lines with marks, and words in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from everystop.observe.report.drawing import SMALL, TITLE, colour_of, dress, matplotlib
from everystop.observe.report.grammar import KNOWN_STROKES, Stroke, Theme
from everystop.observe.report.sheets import Entry, Sheet, legend_height

WIDTH, PANEL_HEIGHT = 840.0, 280.0  # as wide as a page shows it, so that texts keep their size
LEFT, GAP, RIGHT = 66.0, 84.0, 16.0
HEAD, PANEL_TITLE, AXIS, FOOT = 44.0, 22.0, 46.0, 12.0
PLAIN = Stroke("#0072B2", "-", "o")
OTHER = Stroke("#B33C00", (0, (5, 2)), "s")


def one_panel(
    theme: Theme, title: str, entries: Sequence[Entry] = (), *, height: float = PANEL_HEIGHT
) -> tuple[Sheet, Any]:
    """A sheet with a title, axes over its width and a legend."""
    sheet, (axes,) = panels(theme, title, 1, entries, height=height, head=HEAD)
    return sheet, axes


def two_panels(
    theme: Theme, title: str, entries: Sequence[Entry] = (), *, height: float = PANEL_HEIGHT, gap: float = GAP
) -> tuple[Sheet, tuple[Any, Any]]:
    """A sheet with a title, two axes beside each other, which may have titles of their own, and a legend."""
    sheet, (left, right) = panels(theme, title, 2, entries, height=height, gap=gap)
    return sheet, (left, right)


def panels(
    theme: Theme,
    title: str,
    num: int,
    entries: Sequence[Entry] = (),
    *,
    height: float = PANEL_HEIGHT,
    gap: float = GAP,
    head: float = HEAD + PANEL_TITLE,
) -> tuple[Sheet, list[Any]]:
    """So many axes beside each other; all in pixels."""
    foot = AXIS + (legend_height(entries, WIDTH - 24) + FOOT if entries else 4.0)
    sheet = Sheet(WIDTH, head + height + foot, theme)
    sheet.words(12, 10, title, is_bold=True, size=TITLE)
    width = (WIDTH - LEFT - RIGHT - gap * (num - 1)) / num
    found = [sheet.axes(LEFT + i * (width + gap), head, width, height) for i in range(num)]
    if entries:
        sheet.legend(entries, 12, head + height + AXIS + 4)
    return sheet, found


def frame(axes: Any, theme: Theme, *, title: str = "", x: str = "", y: str = "", grid: str = "") -> None:
    """As `dress`, and numbers on the axes with their thousands set apart."""
    dress(axes, theme, title=title, x=x, y=y, grid=grid)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(matplotlib("ticker").FuncFormatter(lambda value, _: f"{value:,g}"))


def line_chart(
    axes: Any,
    theme: Theme,
    xs: Sequence[float],
    lines: Mapping[str, Sequence[float]],
    *,
    x: str,
    y: str,
    title: str = "",
    is_log: bool = False,
) -> None:
    """Lines with a mark at each point; policies look as in all pictures. With `is_log` x doubles from tick to tick."""
    frame(axes, theme, title=title, x=x, y=y, grid="y")
    for name, ys in lines.items():
        draw_line(axes, theme, xs, ys, KNOWN_STROKES.get(name, PLAIN))
    if is_log:
        log_ticks(axes, xs)


def draw_line(axes: Any, theme: Theme, xs: Sequence[float], ys: Sequence[float], stroke: Stroke, **style: Any) -> None:
    """One line with a mark at each point; `style` is matplotlib's."""
    colour = colour_of(stroke, theme)
    marks = {"marker": stroke.marker or None, "ms": 6, "mfc": colour, "mec": theme.page, "mew": 1.0}
    axes.plot(xs, ys, color=colour, ls=stroke.dashes, lw=2, zorder=4, **marks, **style)


def draw_marks(axes: Any, theme: Theme, xs: Sequence[float], ys: Sequence[float], stroke: Stroke) -> None:
    """Marks without a line: what was measured beside what was simulated."""
    colour = colour_of(stroke, theme)
    axes.plot(xs, ys, ls="none", marker=stroke.marker, ms=7.5, mfc=colour, mec=theme.page, mew=1.0, zorder=5)


def log_ticks(axes: Any, xs: Sequence[float]) -> None:
    """A logarithmic x axis with a tick at each of these, written out."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(xs), [f"{each:,g}" for each in xs])
    axes.xaxis.set_minor_locator(matplotlib("ticker").NullLocator())


def note(axes: Any, theme: Theme, x: float, y: float, text: str, **style: Any) -> None:
    """Words at a point of the axes, on a patch of the page so that lines do not run through them."""
    box = {"facecolor": theme.page, "edgecolor": "none", "pad": 1.5, "alpha": 0.85}
    axes.text(x, y, text, **{"color": theme.ink, "fontsize": SMALL, "va": "center", "bbox": box, "zorder": 6, **style})


def threshold(axes: Any, theme: Theme, at: float, text: str, *, x: float = 0.99) -> None:
    """A horizontal line that decides, with its name at the right."""
    axes.axhline(at, color=theme.ink, ls=(0, (1, 2)), lw=1.4, zorder=3)
    style = {"ha": "right", "va": "bottom", "transform": axes.get_yaxis_transform()}
    axes.text(x, at, text, color=theme.ink, fontsize=SMALL, zorder=6, **style)


def without_marks(stroke: Stroke) -> Stroke:
    """The line alone."""
    return Stroke(stroke.colour, stroke.dashes, "")


def legend_line(label: str, stroke: Stroke) -> Entry:
    """A line in a legend."""
    return Entry(label, stroke=stroke)


def legend_mark(label: str, stroke: Stroke) -> Entry:
    """A mark in a legend."""
    return Entry(label, stroke=Stroke(stroke.colour, "none", stroke.marker))
