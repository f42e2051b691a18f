"""The slot chart: one row a batch slot, time to the right, and above it how many requests wait."""

from __future__ import annotations

import math
from typing import Any

from everystop.observe.comparison import Run
from everystop.observe.report.drawing import (
    SMALL,
    TEXT,
    dress,
    matplotlib,
    movable,
    nice_step,
    size_px,
    step_area,
    text_px,
    time_axis,
)
from everystop.observe.report.grammar import END_MARKS, FINISHED, LIGHT, LOOKS, Theme, Use
from everystop.observe.report.lanes import Lanes, Stretch, joined, read_lanes

STRIP, GAP, BRACKET = 2.2, 0.7, 0.9  # rows: the waiting room, the space below it, the bracket of a batch
NOTCH = 0.3  # of the height of a slow step
CHUNK_PX = 4.0  # narrower chunks are not told apart
MIN_PX = 0.8  # what is shorter is joined with its neighbour
MAX_STRETCHES = 3_000
LABEL_ROW_PX = 14.0
WAITING_PX = 190.0  # the words on the waiting room
NAMED = {Use.HELD: "held", Use.PADDING: "padding"}


def slot_chart(
    run: Run,
    axes: Any,
    theme: Theme = LIGHT,
    *,
    lanes: Lanes | None = None,
    end_s: float | None = None,
    most: int = MAX_STRETCHES,
    max_waiting: int = 0,
) -> float:
    """Draw a run's slots into matplotlib axes, from 0 to `end_s`, in at most so many pieces; returns how many seconds
    the finest detail lasts. `lanes` are the run's own, where they have been read before; the strip above the slots has
    room for `max_waiting` requests, and for as many as wait here.

    Raises ValueError for a run without a history.
    """
    lanes = lanes or lanes_of(run)
    end_s = end_s or run.duration_s
    dress(axes, theme)
    axes.set_ylim(max(lanes.num_slots, 1), -rows_above(lanes))
    time_axis(axes, theme, end_s)
    chart = _Chart(run, lanes, axes, theme, end_s, max_waiting)
    chart.draw(most)
    return chart.resolution_s


def lanes_of(run: Run) -> Lanes:
    """The slots of a run that has a history."""
    if run.history is None:
        raise ValueError(f"the run under {run.policy} has no history: what its slots did is not known")
    return read_lanes(run.history, run.start_ns)


def rows_above(lanes: Lanes) -> float:
    """How many rows high the part above the slots is."""
    return STRIP + GAP + (BRACKET if lanes.batches else 0.0)


class _Chart:
    """One chart being drawn."""

    def __init__(self, run: Run, lanes: Lanes, axes: Any, theme: Theme, end_s: float, max_waiting: int) -> None:
        self._run, self._lanes, self._axes, self._theme = run, lanes, axes, theme
        self._max_waiting = max_waiting
        width, height = size_px(axes)
        self._px_per_s = width / end_s
        self._row_px = height / (max(lanes.num_slots, 1) + rows_above(lanes))
        self._index_of = {line.request_id: line.index for line in run.requests if line.request_id is not None}
        self._patches = matplotlib("patches")
        self._named: set[int] = set()
        self.resolution_s = MIN_PX / self._px_per_s

    def draw(self, most: int) -> None:
        """Everything, in the order in which it lies."""
        stretches = self._fitting(most)
        for stretch in stretches:
            self._stretch(stretch)
        self._chunks(stretches)
        self._ends(most)
        self._waiting_room()
        self._brackets()
        self._slot_names()

    def _fitting(self, most: int) -> list[Stretch]:
        """Stretches no finer than can be seen, and no more than a page should hold."""
        while True:
            stretches = joined(self._lanes.stretches, round(self.resolution_s * 1e9))
            if len(stretches) <= most:
                return stretches
            self.resolution_s *= 1.5

    def _stretch(self, stretch: Stretch) -> None:
        look = LOOKS[stretch.use]
        start_s, end_s = self._run.seconds(stretch.start_ns), self._run.seconds(stretch.end_ns)
        width_px = (end_s - start_s) * self._px_per_s
        top, height = self._box(stretch)
        outline = self._theme.outline if width_px > 2 and self._row_px >= 5 else "none"
        patch = self._patches.Rectangle(
            (start_s, top),
            end_s - start_s,
            height,
            facecolor=look.fill or "none",
            edgecolor=outline,
            lw=0.8 if width_px > 5 else 0.4,
            hatch=look.hatch or None,
            hatchcolor=look.hatch_colour,
        )
        index = self._index_of.get(stretch.request_id)
        self._axes.add_patch(movable(patch, self._theme, index))
        self._cached(stretch)
        self._name(stretch, index, start_s, width_px)

    def _box(self, stretch: Stretch) -> tuple[float, float]:
        """Top and height of a stretch, in rows; a slow step has a notch above."""
        height = LOOKS[stretch.use].height if self._row_px >= 5 else 1.0
        top = stretch.slot + 0.5 - height / 2
        return (top + height * NOTCH, height * (1 - NOTCH)) if stretch.use is Use.SLOW else (top, height)

    def _chunks(self, stretches: list[Stretch]) -> None:
        """Ticks between the chunks of prompts that are wide enough to tell apart, as one line with gaps."""
        xs: list[float] = []
        ys: list[float] = []
        for stretch in stretches:
            width_px = (self._run.seconds(stretch.end_ns) - self._run.seconds(stretch.start_ns)) * self._px_per_s
            if width_px < CHUNK_PX * (1 + len(stretch.ticks)):
                continue
            top, height = self._box(stretch)
            for at_ns in stretch.ticks:
                xs += [self._run.seconds(at_ns)] * 2 + [math.nan]
                ys += [top, top + height, math.nan]
        if xs:
            [ticks] = self._axes.plot(xs, ys, color="#333333", lw=0.8)
            movable(ticks, self._theme)

    def _cached(self, stretch: Stretch) -> None:
        """Dots over the share of a prompt that came from the cache."""
        if stretch.cached_share <= 0:
            return
        top, height = self._box(stretch)
        start_s, end_s = self._run.seconds(stretch.start_ns), self._run.seconds(stretch.end_ns)
        share = height * stretch.cached_share
        style = {"facecolor": "none", "hatch": "..", "hatchcolor": "#1A1A1A", "lw": 0}
        dots = self._patches.Rectangle((start_s, top + height - share), end_s - start_s, share, **style)
        self._axes.add_patch(movable(dots, self._theme))

    def _name(self, stretch: Stretch, index: int | None, start_s: float, width_px: float) -> None:
        """The request's number on its decode, the word on waste, where there is room."""
        if self._row_px < LABEL_ROW_PX or stretch.use not in (Use.DECODE, *NAMED):
            return
        words = NAMED.get(stretch.use) or ("" if index is None or index in self._named else f"{index}")
        if not words or text_px(words) + 14 > width_px:
            return
        if index is not None and stretch.use is Use.DECODE:
            self._named.add(index)
        box = None
        if stretch.use in NAMED:
            box = {"facecolor": LOOKS[stretch.use].fill, "edgecolor": "none", "pad": 1.5}
        at_s = start_s + (width_px / 2 if stretch.use in NAMED else 5) / self._px_per_s
        text = self._axes.text(
            at_s,
            stretch.slot + 0.52,
            words,
            color="#FFFFFF",
            fontsize=SMALL,
            va="center",
            ha="center" if stretch.use in NAMED else "left",
            bbox=box,
            clip_on=True,
        )
        movable(text, self._theme, index)

    def _ends(self, most: int) -> None:
        """A mark where a request left: ● finished, ✕ failed, ⊘ cancelled."""
        if self._row_px < 5 or len(self._lanes.ends) > most / 4:
            return
        size, ink = min(6.5, self._row_px * 0.38), self._theme.ink
        for end in self._lanes.ends:
            _, kind = END_MARKS.get(end.reason, ("finished", FINISHED))
            is_usual = kind == FINISHED
            style = {"ms": size if is_usual else size * 1.4, "mfc": ink, "mec": self._theme.page if is_usual else ink}
            at = ([self._run.seconds(end.at_ns)], [end.slot + 0.5])
            [mark] = self._axes.plot(*at, marker=kind, mew=1.0, ls="none", clip_on=False, zorder=4, **style)
            movable(mark, self._theme, self._index_of.get(end.request_id))

    def _waiting_room(self) -> None:
        """How many wait, as a hollow grey step line above the slots, and the most there were."""
        levels, most = self._lanes.waiting, self._lanes.most_waiting
        bottom = -GAP - (BRACKET if self._lanes.batches else 0.0)
        faint = self._theme.faint
        words = f"waiting: at most {most:,}" if most else "nobody waits"
        self._axes.text(
            0.004, bottom - STRIP * 1.0, words, color=faint, fontsize=SMALL, va="bottom", transform=self._sideways()
        )
        if not most:
            return
        points = _thinned([(self._run.seconds(level.at_ns), level.value) for level in levels], self.resolution_s)
        points.append((self._run.seconds(self._lanes.end_ns), points[-1][1]))
        scale = STRIP * 0.92 / max(most, self._max_waiting)
        shape = [(x, bottom, bottom - scale * y) for x, y in points]
        step_area(self._axes, self._theme, shape, colour=self._theme.grid, outline=self._theme.outline)

    def _sideways(self) -> Any:
        """Positions as a share of the width, and in rows."""
        return self._axes.get_yaxis_transform()

    def _brackets(self) -> None:
        """A bracket over each batch: until its end nobody else boards."""
        for number, (start_ns, end_ns) in enumerate(self._lanes.batches, 1):
            start_s, end_s = self._run.seconds(start_ns), self._run.seconds(end_ns)
            top, foot = -0.62, -0.12
            [line] = self._axes.plot(
                [start_s, start_s, end_s, end_s], [foot, top, top, foot], color=self._theme.ink, lw=1.2, clip_on=False
            )
            movable(line, self._theme)
            words = f"batch {number}"
            width_px = (end_s - start_s) * self._px_per_s
            if text_px(words) + 10 > width_px or self._row_px < LABEL_ROW_PX:
                continue
            text = self._axes.text(
                (start_s + end_s) / 2,
                top,
                words,
                color=self._theme.ink,
                fontsize=SMALL,
                ha="center",
                va="center",
                bbox={"facecolor": self._theme.page, "edgecolor": "none", "pad": 1.5},
            )
            movable(text, self._theme)

    def _slot_names(self) -> None:
        num = max(self._lanes.num_slots, 1)
        step = max(1, round(nice_step(num, max(2, int(num * self._row_px / 18)))))
        shown = list(range(0, num, step))
        self._axes.set_yticks([slot + 0.5 for slot in shown], [str(slot) for slot in shown])
        self._axes.tick_params(axis="y", length=0)
        self._axes.spines["left"].set_visible(False)
        self._axes.set_ylabel("slot", color=self._theme.faint, fontsize=SMALL)


def end_line(axes: Any, at_s: float, words: str, theme: Theme) -> None:
    """A line through the whole chart, and what it means."""
    line = axes.axvline(at_s, color=theme.ink, lw=1.6, ls=(0, (4, 2)), zorder=5)
    movable(line, theme)
    is_late = at_s > sum(axes.get_xlim()) / 2
    room_px = at_s / axes.get_xlim()[1] * size_px(axes)[0]
    room_px = room_px - WAITING_PX if is_late else size_px(axes)[0] - room_px
    if (
        not words
        or text_px(words, TEXT) > room_px
        or (not is_late and at_s / axes.get_xlim()[1] * size_px(axes)[0] < WAITING_PX)
    ):
        return
    style = {"color": theme.ink, "fontsize": TEXT, "ha": "right" if is_late else "left", "va": "bottom"}
    place = axes.get_xaxis_transform()
    movable(axes.text(at_s, 1.0, f"{words} " if is_late else f" {words}", transform=place, **style), theme)


def _thinned(points: list[tuple[float, int]], resolution: float) -> list[tuple[float, int]]:
    """At most two points within a resolution: the highest and the last."""
    kept: list[tuple[float, int]] = []
    for point in points:
        if len(kept) > 1 and point[0] - kept[-2][0] < resolution:
            kept[-2] = (kept[-2][0], max(kept[-2][1], kept[-1][1]))
            kept[-1] = point
        else:
            kept.append(point)
    return kept
