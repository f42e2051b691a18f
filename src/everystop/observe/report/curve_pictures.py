"""Curves over time (slots at work, tokens so far) and over requests (how durations are spread)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from everystop.observe.comparison import Run
from everystop.observe.report.curves import (
    Measure,
    Points,
    area,
    averaged,
    quantiles,
    slots_at_work,
    spread,
    thinned,
    tokens_so_far,
)
from everystop.observe.report.drawing import (
    SMALL,
    TEXT,
    TITLE,
    colour_of,
    dress,
    log_ticks,
    matplotlib,
    movable,
    nice_step,
    size_px,
    step_area,
    text_px,
    time_axis,
)
from everystop.observe.report.grammar import LIGHT, Stroke, Theme, strokes
from everystop.words import in_time, significant

MAX_POINTS = 500
NUM_MARKS = 9
NOTHING_S = 1e-3  # the range of an axis where all is 0
QUANTILE_LINE, QUANTILE_PX = 18.0, 97.0  # pixels: height of a line, width of a quantile
LOG_SPAN = 30.0  # a wider range than this is drawn on a log scale
HEADROOM = 1.2


def occupancy(runs: Sequence[Run], axes: Any, theme: Theme = LIGHT, *, end_s: float | None = None) -> None:
    """How many slots do useful work over time, and the area between the first and the last run while the last one
    lasts, in slot-seconds: the work that it has done sooner. Runs need a history.
    """
    end_s = end_s or max(run.duration_s for run in runs)
    dress(axes, theme, y="slots at work", grid="y")
    time_axis(axes, theme, end_s)
    most = max(run.max_num_seqs for run in runs)
    axes.set_ylim(0, most * HEADROOM)
    step = max(1, round(nice_step(most, 5)))
    axes.set_yticks(range(0, most + 1, step))
    bin_s = 3.0 * end_s / size_px(axes)[0]
    whole = {run.policy: slots_at_work(run) for run in runs}
    curves = {policy: averaged(points, bin_s) for policy, points in whole.items()}
    if len(runs) > 1:
        _between(runs, whole, curves, axes, theme)
    styles = strokes(tuple(run.policy for run in runs))
    for run in runs:
        _line(axes, curves[run.policy], styles[run.policy], theme, step=True)
    _key(axes, [run.policy for run in runs], theme)


def _between(
    runs: Sequence[Run], whole: Mapping[str, Points], curves: Mapping[str, Points], axes: Any, theme: Theme
) -> None:
    """Fill what lies between the first and the last curve, and say how much it is."""
    first, second = runs[0], runs[-1]
    end_s = whole[second.policy][-1][0]
    ahead = area(whole[second.policy], 0, end_s) - area(whole[first.policy], 0, end_s)
    times = sorted({x for points in curves.values() for x, _ in points if x <= end_s})
    lower, upper = curves[first.policy], curves[second.policy]
    shape = [(at_s, area_value(lower, at_s), area_value(upper, at_s)) for at_s in times]
    step_area(axes, theme, shape, colour=theme.grid)
    side = "more" if ahead >= 0 else "fewer"
    words = f"{significant(abs(ahead))} slot-seconds {side} under {second.policy}"
    end = f"by its end at {in_time(end_s)}"
    words += (" " if text_px(words + end) < size_px(axes)[0] else "\n") + end
    axes.text(0.01, 0.985, words, color=theme.ink, fontsize=SMALL, ha="left", va="top", transform=axes.transAxes)


def area_value(points: Points, at_s: float) -> float:
    """The value of a step curve at a time."""
    value = 0.0
    for x, y in points:
        if x > at_s:
            break
        value = y
    return value


def cumulative_tokens(runs: Sequence[Run], axes: Any, theme: Theme = LIGHT, *, end_s: float | None = None) -> None:
    """Output tokens so far over time; the horizontal gap is the time saved, marked at the end and half way."""
    end_s = end_s or max(run.duration_s for run in runs)
    dress(axes, theme, y="output tokens", grid="y")
    time_axis(axes, theme, end_s)
    styles = strokes(tuple(run.policy for run in runs))
    curves = {run.policy: tokens_so_far(run) for run in runs}
    most = max((points[-1][1] for points in curves.values()), default=0.0)
    axes.set_ylim(0, max(most, 1.0) * HEADROOM)
    if len(runs) > 1:
        for share in (0.5, 1.0):
            _gap(curves[runs[0].policy], curves[runs[-1].policy], share * most, axes, theme)
    for run in runs:
        _line(axes, thinned(curves[run.policy], MAX_POINTS), styles[run.policy], theme, step=True)
    _key(axes, [run.policy for run in runs], theme)


def _gap(first: Points, second: Points, level: float, axes: Any, theme: Theme) -> None:
    """A double arrow between the times at which both have reached the level, with its length."""
    times = [x for points in (first, second) if (x := _reached(points, level)) is not None]
    if len(times) < 2 or abs(times[0] - times[1]) < 0.02 * axes.get_xlim()[1]:
        return
    early_s, late_s = sorted(times)
    arrow = {"arrowstyle": "<->", "color": theme.ink, "lw": 1.3, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (early_s, level), (late_s, level), arrowprops=arrow, zorder=5)
    near_right = late_s > 0.9 * axes.get_xlim()[1]
    style = {
        "color": theme.ink,
        "fontsize": SMALL,
        "ha": "right" if near_right else "center",
        "va": "bottom",
        "zorder": 6,
    }
    axes.annotate(
        f"{in_time(late_s - early_s)} {'sooner' if times[1] < times[0] else 'later'}",
        (late_s if near_right else (late_s + early_s) / 2, level),
        (0, 6),
        textcoords="offset points",
        bbox={"facecolor": theme.page, "edgecolor": "none", "pad": 1.0},
        **style,
    )


def _reached(points: Points, level: float) -> float | None:
    """When the curve first comes to the level, to half a token."""
    return next((x for x, y in points if y >= level - 0.5), None) if level > 0 else None


def distribution(
    runs: Mapping[str, Sequence[Run]],
    measure: Measure,
    axes: Any,
    theme: Theme = LIGHT,
    *,
    demand_s: float | None = None,
) -> bool:
    """The share of requests (of gaps, for ITL) with at most that duration, all repeats of a policy together, with marks
    at p50, p95 and p99, and a line at what is demanded; a log scale where the values span more than 30 times. False
    where there is nothing to draw.
    """
    values = {policy: [v for run in of_policy for v in measure.values(run)] for policy, of_policy in runs.items()}
    values = {policy: found for policy, found in values.items() if found}
    if not values:
        return False
    limits = [] if demand_s is None else [demand_s]
    low = min([*limits, *(min(found) for found in values.values())])
    high = max([*limits, *(max(found) for found in values.values())])
    is_log = low > 0 and high / low > LOG_SPAN
    scale = " (log scale)" if is_log else ""
    dress(axes, theme, x=f"{measure.meaning}, s{scale}", grid="y")
    pad = 8 + quantiles_px(list(values), size_px(axes)[0])
    axes.set_title(measure.label, color=theme.ink, fontsize=TITLE, loc="left", fontweight="bold", pad=pad)
    if is_log:
        axes.set_xscale("log")
        axes.set_xlim(low / 1.15, high * 1.15)
    else:
        axes.set_xlim(0, high * 1.06 or NOTHING_S)
    _plain_ticks(axes, is_log)
    axes.set_ylim(0, 1.04)
    axes.set_yticks([0.0, 0.5, 0.95], ["0", "p50", "p95"])
    styles = strokes(tuple(runs))
    for policy, found in values.items():
        _spread(axes, found, styles[policy], theme)
    if demand_s is not None:
        _demand(axes, demand_s, theme)
    _table_of_quantiles(axes, {policy: quantiles(found) for policy, found in values.items()}, styles, theme)
    return True


def _plain_ticks(axes: Any, is_log: bool) -> None:
    ticker = matplotlib("ticker")
    width = size_px(axes)[0]
    if is_log:
        low, high = axes.get_xlim()
        axes.xaxis.set_major_locator(ticker.FixedLocator(log_ticks(low, high, width)))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        axes.xaxis.set_major_locator(ticker.MaxNLocator(max(2, int(width / 75))))


def _spread(axes: Any, values: Sequence[float], stroke: Stroke, theme: Theme) -> None:
    """One policy's curve with a mark at each quantile."""
    points = thinned(spread(values), MAX_POINTS)
    colour = colour_of(stroke, theme)
    xs, ys = [points[0][0], *(x for x, _ in points)], [0.0, *(y for _, y in points)]
    axes.step(xs, ys, where="post", color=colour, lw=2.0, ls=stroke.dashes)
    for percent, value in quantiles(values).items():
        axes.plot(
            [value],
            [percent / 100],
            marker=stroke.marker,
            ms=7,
            mfc=colour,
            mec=theme.page,
            mew=1.0,
            ls="none",
            zorder=4,
        )


def _demand(axes: Any, demand_s: float, theme: Theme) -> None:
    """A dotted line at what is demanded, with its name beside it where there is more room."""
    axes.axvline(demand_s, color=theme.ink, ls=(0, (1, 2)), lw=1.4, zorder=3)
    is_right = axes.transAxes.inverted().transform(axes.transData.transform((demand_s, 0.0)))[0] > 0.5
    axes.annotate(
        f"SLO {in_time(demand_s)}",
        (demand_s, 0.03),
        (-5 if is_right else 5, 0),
        textcoords="offset points",
        color=theme.ink,
        fontsize=SMALL,
        ha="right" if is_right else "left",
        va="bottom",
        bbox={"facecolor": theme.page, "edgecolor": "none", "pad": 1.0},
        zorder=6,
    )


def quantiles_px(policies: Sequence[str], width: float) -> float:
    """How high the lines between a distribution's title and its curves are, where the curves are so wide."""
    return QUANTILE_LINE * len(policies) * (2 if _is_tight(policies, width) else 1)


def _is_tight(policies: Sequence[str], width: float) -> bool:
    return max(map(_name_px, policies)) + 3 * QUANTILE_PX > width


def _name_px(policy: str) -> float:
    return text_px(policy) + 30


def _table_of_quantiles(
    axes: Any, found: Mapping[str, Mapping[int, float]], styles: Mapping[str, Stroke], theme: Theme
) -> None:
    """A line for each policy between the title and the curves, or two where there is little room."""
    width, height = size_px(axes)
    is_tight = _is_tight(list(found), width)
    first = 0.0 if is_tight else max(map(_name_px, found))
    y = 4.0
    for policy, of_policy in reversed(list(found.items())):
        cells = [(first + i * QUANTILE_PX, y, f"p{p} {in_time(v)}") for i, (p, v) in enumerate(of_policy.items())]
        y += QUANTILE_LINE if is_tight else 0.0
        cells.append((0.0, y, f"{styles[policy].glyph} {policy}"))
        y += QUANTILE_LINE
        for x, above, words in cells:
            style = {"color": theme.ink, "fontsize": SMALL, "va": "bottom", "transform": axes.transAxes}
            axes.text(x / width, 1 + above / height, words, **style)


def _line(axes: Any, points: Points, stroke: Stroke, theme: Theme, *, step: bool) -> None:
    colour = colour_of(stroke, theme)
    [line] = axes.plot(
        [x for x, _ in points],
        [y for _, y in points],
        drawstyle="steps-post" if step else "default",
        color=colour,
        lw=2.0,
        ls=stroke.dashes,
        marker=stroke.marker,
        ms=6,
        mec=theme.page,
        mew=0.8,
        markevery=max(1, len(points) // NUM_MARKS),
    )
    movable(line, theme)


def _key(axes: Any, policies: Sequence[str], theme: Theme) -> None:
    """Which line is whose, above the axes on the right, each with its dashes and its mark."""
    styles = strokes(tuple(policies))
    line = matplotlib("lines").Line2D
    handles = [
        line([], [], color=colour_of(s, theme), ls=s.dashes, marker=s.marker, lw=2, ms=6, mec=theme.page, label=policy)
        for policy, s in styles.items()
    ]
    axes.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(handles),
        frameon=False,
        fontsize=TEXT,
        labelcolor=theme.ink,
        handlelength=3.2,
        borderaxespad=0.2,
    )
