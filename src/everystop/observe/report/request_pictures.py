"""Request by request: who won and who lost, and how that hangs together with the length of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from everystop.observe.comparison import Comparison
from everystop.observe.report.curves import thinned
from everystop.observe.report.drawing import SMALL, colour_of, dress, log_ticks, matplotlib, owned, size_px, text_px
from everystop.observe.report.grammar import LIGHT, Theme, strokes
from everystop.words import in_time

SAME = 1.02  # a smaller change than this is none
MAX_ROWS = 150
MAX_DOTS = 800
NEAR_TICKS = (0.25, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 4)
FAR_TICKS = tuple(float(f"{factor}e{power}") for power in range(-4, 5) for factor in (1, 2, 5))


@dataclass(frozen=True, slots=True)
class Change:
    """One request under two policies: the medians over repeats of its time from sending to its end."""

    index: int
    group: str
    num_prompt_tokens: int
    num_output_tokens: int
    sent_s: float
    before_s: float
    after_s: float

    @property
    def speed_up(self) -> float:
        """How many times sooner it ended."""
        return self.before_s / self.after_s


def changes(comparison: Comparison, policy: str) -> list[Change]:
    """Every request that ended well under the baseline and under `policy`, in the order of the workload."""
    before, after = (_e2e(comparison, name) for name in (comparison.policies[0], policy))
    lines = {line.index: line for run in comparison.runs_of(policy) for line in run.good}
    result = []
    for index in sorted(before.keys() & after.keys()):
        line, was, now = lines[index], median(before[index]), median(after[index])
        if was > 0 and now > 0:
            result.append(
                Change(index, line.group, line.num_prompt_tokens, line.num_output_tokens, line.sent_s, was, now)
            )
    return result


def _e2e(comparison: Comparison, policy: str) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for run in comparison.runs_of(policy):
        for line in run.good:
            found.setdefault(line.index, []).append(line.e2e_s)
    return found


def tally(found: Sequence[Change]) -> tuple[int, int, int]:
    """How many ended sooner, later, and within 2 % of the same."""
    sooner = sum(change.speed_up > SAME for change in found)
    later = sum(change.speed_up < 1 / SAME for change in found)
    return sooner, later, len(found) - sooner - later


def shown_rows(found: Sequence[Change]) -> list[Change]:
    """The changes from the greatest gain to the greatest loss; of many an even choice, both ends among them."""
    ranked = sorted(found, key=lambda change: (-change.speed_up, change.index))
    points = thinned([(float(i), 0.0) for i in range(len(ranked))], MAX_ROWS)
    return [ranked[int(i)] for i, _ in points]


def dumbbells(found: Sequence[Change], names: tuple[str, str], axes: Any, theme: Theme = LIGHT) -> None:
    """For each request a line from its time under the first policy to that under the second."""
    first, second = (strokes(names)[name] for name in names)
    rows = shown_rows(found)
    dress(axes, theme, x="seconds from sending to the end", grid="x")
    axes.set_ylim(len(rows), -1)
    longest = max(max(change.before_s, change.after_s) for change in rows)
    axes.set_xlim(0, longest * 1.04)
    axes.xaxis.set_major_locator(matplotlib("ticker").MaxNLocator(max(2, int(size_px(axes)[0] / 75))))
    row_px = size_px(axes)[1] / (len(rows) + 1)
    dot = max(2.5, min(7.0, row_px * 0.55))
    for y, change in enumerate(rows):
        is_loss = change.after_s > change.before_s
        [bar] = axes.plot(
            [change.before_s, change.after_s],
            [y, y],
            color=theme.ink if is_loss else theme.faint,
            lw=1.6 if is_loss else 1.0,
        )
        owned(bar, theme, change.index)
        for at_s, stroke in ((change.before_s, first), (change.after_s, second)):
            mark = {"marker": stroke.marker, "ms": dot, "mfc": colour_of(stroke, theme), "mec": theme.page, "mew": 0.6}
            [point] = axes.plot([at_s], [y], ls="none", zorder=3, **mark)
            owned(point, theme, change.index)
    _row_names(rows, row_px, axes, theme)


def _row_names(rows: Sequence[Change], row_px: float, axes: Any, theme: Theme) -> None:
    step = max(1, -int(-12.5 // row_px))
    shown = range(0, len(rows), step)
    axes.set_yticks(list(shown), [f"{rows[y].index}" for y in shown])
    axes.set_ylabel("request", color=theme.faint, fontsize=SMALL)
    axes.tick_params(axis="y", length=0)


def speed_up_by_length(found: Sequence[Change], names: tuple[str, str], axes: Any, theme: Theme = LIGHT) -> None:
    """How many times sooner each request ended, against how long its answer was; losers lie below the line at 1."""
    first, second = (strokes(names)[name] for name in names)
    ticker = matplotlib("ticker")
    lengths = [change.num_output_tokens for change in found]
    is_log = max(lengths) > 20 * max(min(lengths), 1)
    dress(
        axes,
        theme,
        x="output tokens" + (" (log scale)" if is_log else ""),
        y="times sooner (log scale)",
        grid="y",
    )
    axes.set_yscale("log")
    if is_log:
        axes.set_xscale("log")
        ticks = log_ticks(max(min(lengths), 1), max(lengths), size_px(axes)[0])
        axes.xaxis.set_major_locator(ticker.FixedLocator(ticks))
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
    else:
        axes.xaxis.set_major_locator(ticker.MaxNLocator(max(2, int(size_px(axes)[0] / 75)), integer=True))
    far = max(max(change.speed_up, 1 / change.speed_up) for change in found) ** 1.15
    top = max(max(change.speed_up for change in found) ** 1.15, 1.25)
    bottom = min(min(change.speed_up for change in found) ** 1.15, 0.8)
    axes.set_ylim(bottom, top)
    factors = [factor for factor in (NEAR_TICKS if far < 4 else FAR_TICKS) if bottom <= factor <= top]
    axes.set_yticks(factors, [f"{factor:g}×" for factor in factors])
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.axhline(1.0, color=theme.ink, lw=1.4)
    for change in found[:: -(-len(found) // MAX_DOTS)]:
        stroke = second if change.speed_up >= 1 else first
        [point] = axes.plot(
            [change.num_output_tokens],
            [change.speed_up],
            marker=stroke.marker,
            ms=7,
            mfc=colour_of(stroke, theme),
            mec=theme.outline,
            mew=0.8,
            ls="none",
            alpha=0.85,
        )
        owned(point, theme, change.index)
    _sides(names, axes, theme)


def _sides(names: tuple[str, str], axes: Any, theme: Theme) -> None:
    """Which side of the line is whose."""
    width = size_px(axes)[0]
    for at, name, va in ((0.985, names[1], "top"), (0.015, names[0], "bottom")):
        words = f"sooner under {name}"
        if text_px(words) < width:
            axes.text(0.99, at, words, color=theme.faint, fontsize=SMALL, ha="right", va=va, transform=axes.transAxes)


def extremes(found: Sequence[Change]) -> str:
    """A sentence on the two ends."""
    ranked = sorted(found, key=lambda change: change.speed_up)
    said = [f"request {ranked[-1].index} {_verb(ranked[-1])} most ({_span(ranked[-1])})"]
    if len(ranked) > 1:
        least = "most" if ranked[0].speed_up < 1 < ranked[-1].speed_up else "least"
        said.append(f"request {ranked[0].index} {_verb(ranked[0])} {least} ({_span(ranked[0])})")
    return ", ".join(said).capitalize() + "."


def _verb(change: Change) -> str:
    return "lost" if change.speed_up < 1 else "gained"


def _span(change: Change) -> str:
    return f"{in_time(change.before_s)} to {in_time(change.after_s)}"
