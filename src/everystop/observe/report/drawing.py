"""What all pictures share: axes in a theme's colours, sizes in pixels, and names on what a page may point at.

Figures are laid out at 72 dots an inch, so that a point is a pixel of the inline picture.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from everystop.core.errors import EverystopError
from everystop.observe.report.grammar import INK_STROKE, INLINE, Stroke, Theme

TEXT, SMALL, TITLE = 13.0, 12.0, 14.0  # pixels
CHARACTER = 0.64  # width of a digit, in heights
MAX_TICKS = 9
TICK_PX = 44.0  # pixels that the label of a tick on a log axis needs


class PictureError(EverystopError):
    """matplotlib is not installed."""


def matplotlib(module: str = "") -> Any:
    """A module of matplotlib, which is loaded when something is drawn; raises PictureError without it."""
    try:
        return importlib.import_module(f"matplotlib.{module}" if module else "matplotlib")
    except ImportError:
        raise PictureError(
            "no picture was drawn, because matplotlib is not installed; install everystop[pictures], or matplotlib"
        ) from None


def dress(axes: Any, theme: Theme, *, title: str = "", x: str = "", y: str = "", grid: str = "") -> None:
    """Colours, labels and no more lines than needed; `grid` names the axis whose grid is drawn, if any."""
    axes.set_facecolor(theme.page)
    if title:
        axes.set_title(title, color=theme.ink, fontsize=TITLE, loc="left", fontweight="bold")
    axes.set_xlabel(x, color=theme.faint, fontsize=SMALL)
    axes.set_ylabel(y, color=theme.faint, fontsize=SMALL)
    axes.tick_params(colors=theme.faint, labelsize=SMALL, length=3, width=0.8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("bottom", "left"):
        axes.spines[side].set_color(theme.faint)
    axes.set_axisbelow(True)
    if grid:
        axes.grid(axis=grid, color=theme.grid, lw=0.8)


def size_px(axes: Any) -> tuple[float, float]:
    """Width and height of the axes in pixels of the picture."""
    box = axes.get_position()
    width, height = axes.figure.get_size_inches()
    return float(box.width * width * 72), float(box.height * height * 72)


def text_px(text: str, size: float = SMALL) -> float:
    """About how wide a text is."""
    return len(text) * CHARACTER * size


def colour_of(stroke: Stroke, theme: Theme) -> str:
    """A stroke's colour in a theme."""
    return theme.ink if stroke.colour == INK_STROKE else stroke.colour


def movable(artist: Any, theme: Theme, request: int | None = None) -> Any:
    """Name what moves with the time axis on a page, and whose it is; files of their own need no names."""
    if theme is INLINE:
        artist.set_gid("move" if request is None else f"move.r{request}")
    return artist


def owned(artist: Any, theme: Theme, request: int) -> Any:
    """Name what belongs to a request and stays where it is."""
    if theme is INLINE:
        artist.set_gid(f"still.r{request}")
    return artist


def nice_step(span: float, num: int = MAX_TICKS) -> float:
    """The distance between at most about `num` ticks: 1, 2 or 5 times a power of ten. Example: 47 over 9 gives 10."""
    if span <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(span / num))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power * num >= span)


def log_ticks(low: float, high: float, width: float) -> list[float]:
    """Round values of a log axis from `low` to `high` that is so many pixels long, at least two: powers of ten, or 1, 2
    and 5 times these where there are few and their labels have room, or even steps where even those are too far apart.

    Example: 0.003 to 0.2 on 400 pixels gives 0.005, 0.01, 0.02, 0.05, 0.1, 0.2.
    """
    decades = math.log10(high / low)
    tens = [10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    fine = [tick for ten in tens for factor in (1, 2, 5) if low <= (tick := float(f"{factor * ten:.3g}")) <= high]
    powers = [ten for ten in tens if low <= ten <= high]
    if len(powers) < 2 or (len(powers) < 4 and width * math.log10(2) / decades >= TICK_PX):
        if len(fine) > 1:
            return fine
        step = nice_step(high - low, 4)
        return [float(f"{i * step:.6g}") for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return powers[:: max(1, math.ceil(len(powers) * TICK_PX / width))]


def time_axis(axes: Any, theme: Theme, end_s: float) -> None:
    """Seconds from the start of the run, with as many ticks as there is room for."""
    axes.set_xlim(0, end_s)
    step = nice_step(end_s, max(2, int(size_px(axes)[0] / 70)))
    axes.set_xticks([i * step for i in range(int(end_s / step + 1e-9) + 1)])
    axes.set_xlabel("seconds from the start of the run", color=theme.faint, fontsize=SMALL)


def step_area(
    axes: Any, theme: Theme, points: Sequence[tuple[float, float, float]], *, colour: str, outline: str = "none"
) -> None:
    """Fill between two step curves; `points` are (x, lower, upper), and each pair holds until the next x.

    One plain shape, which a page can stretch.
    """
    xs, lower, upper = [], [], []
    for (x, low, high), (following, _, _) in pairwise([*points, points[-1]]):
        xs += [x, following]
        lower += [low, low]
        upper += [high, high]
    [shape] = axes.fill(xs + xs[::-1], upper + lower[::-1], facecolor=colour, edgecolor=outline, lw=0.8)
    movable(shape, theme)
