"""Which pictures a comparison has, how each is laid out on its sheet, and their files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from everystop.observe.comparison import Comparison, Run
from everystop.observe.goodput import demands_s
from everystop.observe.report.curve_pictures import NOTHING_S, cumulative_tokens, distribution, occupancy, quantiles_px
from everystop.observe.report.curves import MEASURES
from everystop.observe.report.drawing import SMALL, TITLE, text_px
from everystop.observe.report.grammar import (
    DARK,
    END_MARKS,
    FINISHED,
    INK_STROKE,
    INLINE,
    LIGHT,
    LOOKS,
    Stroke,
    Theme,
    strokes,
)
from everystop.observe.report.lanes import Lanes
from everystop.observe.report.request_pictures import Change, changes, dumbbells, shown_rows, speed_up_by_length
from everystop.observe.report.sheets import Entry, Scale, Sheet, Timed, drawing_style, legend_height
from everystop.observe.report.shown import shown_runs
from everystop.observe.report.slot_picture import MIN_PX, end_line, lanes_of, rows_above, slot_chart
from everystop.observe.report.use_picture import USE_LOOKS, slot_shares, slot_time, wasted_share
from everystop.words import in_time, percent

WIDE, HALF, NARROW = 1120.0, 548.0, 350.0
TOP, FOOT = 4.0, 12.0  # pixels: the space above and below everything
LEFT, RIGHT, AXIS = 46.0, 14.0, 44.0

MAX_STRETCHES = 3_000
ROW_PX = 25.0
END_STROKE = Stroke(INK_STROKE, (0, (4, 2)), "")

WHOLE = ("slots", "occupancy", "tokens", "durations", "slot-time")
BY_POLICY = ("winners", "lengths")
ENDINGS = (".svg", ".png", f"-{DARK.name}.svg", f"-{DARK.name}.png")

Draw = Callable[[Theme, float], Sheet]


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture: `draw(theme, width)` lays it out on a new sheet of that width."""

    name: str
    title: str
    width: float
    draw: Draw

    @property
    def is_half(self) -> bool:
        """Two of its kind fit beside each other."""
        return self.width < WIDE


def pictures(comparison: Comparison) -> list[Picture]:
    """The pictures that can be drawn of a comparison: without histories there are fewer, and none where nothing was
    served, since who failed sooner has gained nothing.
    """
    return list(_pictures(comparison))


def _pictures(comparison: Comparison) -> Iterator[Picture]:
    runs = shown_runs(comparison)
    if not runs or not comparison.served:
        return
    has_history = all(run.history is not None for run in runs)
    if has_history:
        yield Picture("slots", "Batch slots over time", WIDE, _slots(runs))
        yield Picture("occupancy", "Slots at work", HALF, _over_time(runs, occupancy))
    yield Picture("tokens", "Output tokens so far", HALF, _over_time(runs, cumulative_tokens))
    yield Picture("durations", "How durations are spread", WIDE, _distributions(comparison))
    for policy in comparison.policies[1:]:
        if found := changes(comparison, policy):
            names = (comparison.policies[0], policy)
            suffix = "" if len(comparison.policies) == 2 else f"-{policy}"
            yield Picture(
                f"winners{suffix}", f"Who won and who lost: {names[0]} to {policy}", HALF, _winners(found, names)
            )
            yield Picture(f"lengths{suffix}", f"Gain by length of answer: {policy}", HALF, _lengths(found, names))
    if has_history:
        yield Picture("slot-time", "Where slot time went", WIDE, _slot_time(comparison))


@dataclass(frozen=True, slots=True)
class Drawing:
    """A picture drawn for a page, wide and narrow, in colours that the page or a theme replaces; `timed` and `scales`
    are those of the two sheets, and `notes` is what a reader must be told.
    """

    picture: Picture
    documents: tuple[str, str]
    timed: tuple[Timed | None, Timed | None]
    scales: tuple[list[Scale], list[Scale]]
    notes: tuple[str, ...]


def draw_all(comparison: Comparison) -> list[Drawing]:
    """All pictures of a comparison. Raises PictureError without matplotlib."""
    with drawing_style():
        return [_drawing(picture) for picture in pictures(comparison)]


def _drawing(picture: Picture) -> Drawing:
    wide, narrow = (picture.draw(INLINE, width) for width in (picture.width, NARROW))
    both = (wide.timed, narrow.timed), (wide.scales, narrow.scales)
    return Drawing(picture, (wide.as_svg(), narrow.as_svg()), *both, tuple(wide.notes))


def write_files(drawings: Sequence[Drawing], folder: Path) -> list[Path]:
    """Each picture as SVG and PNG, light and dark; returns the files."""
    paths = []
    with drawing_style():
        for drawing in drawings:
            for theme in (LIGHT, DARK):
                stem = drawing.picture.name if theme is LIGHT else f"{drawing.picture.name}-{theme.name}"
                paths += [folder / f"{stem}.svg", folder / f"{stem}.png"]
                paths[-2].write_text(recoloured(drawing.documents[0], theme), encoding="utf-8")
                drawing.picture.draw(theme, drawing.picture.width).write_png(paths[-1])
    return paths


def remove_files(folder: Path, policies: Iterable[str]) -> None:
    """Remove the pictures that a comparison of some of these policies may have left there, and nothing else."""
    by_policy = [f"{name}-{policy}" for name in BY_POLICY for policy in policies]
    for name in (*WHOLE, *BY_POLICY, *by_policy):
        for ending in ENDINGS:
            path = folder / f"{name}{ending}"
            if path.is_file() or path.is_symlink():
                path.unlink()


def recoloured(document: str, theme: Theme) -> str:
    """A document drawn for a page as a file of its own in a theme, without the page's marks."""
    for name in ("page", "ink", "faint", "grid", "outline"):
        document = document.replace(getattr(INLINE, name).lower(), getattr(theme, name).lower())
    return _MARK.sub("", document)


_MARK = re.compile(r' id="(?:move|still)[^"]*"')


def _slots(runs: Sequence[Run]) -> Draw:
    all_lanes = [lanes_of(run) for run in runs]

    def draw(theme: Theme, width: float) -> Sheet:
        return twin_slot_chart(runs, theme, width=width, all_lanes=all_lanes)

    return draw


def twin_slot_chart(
    runs: Sequence[Run],
    theme: Theme,
    *,
    width: float = WIDE,
    row_px: float = ROW_PX,
    all_lanes: Sequence[Lanes] | None = None,
) -> Sheet:
    """Slot charts of runs of one workload, one above the other on one time axis and one scale of who waits, with a line
    through all of them where the last one ends; a slot is at most `row_px` high. Runs need a history.
    """
    all_lanes = all_lanes or [lanes_of(run) for run in runs]
    row = max(5.0, min(row_px if width > HALF else 19.0, 560 / max(1, *(lanes.num_slots for lanes in all_lanes))))
    heights = [row * (max(lanes.num_slots, 1) + rows_above(lanes)) for lanes in all_lanes]
    end_s = 1.015 * max(run.seconds(lanes.end_ns) for run, lanes in zip(runs, all_lanes, strict=True)) or NOTHING_S
    entries = _slot_entries(all_lanes, finest_ns=1e9 * end_s * MIN_PX / (width - LEFT - RIGHT))
    if len(runs) > 1:
        entries.append(Entry(f"{runs[-1].policy} is done", stroke=END_STROKE))
    name_height = 40.0 if width > HALF else 54.0
    whole = TOP + sum(heights) + (name_height + AXIS + 8) * len(runs) + legend_height(entries, width - 12) + FOOT
    sheet = Sheet(width, whole, theme, timed=Timed(LEFT, width - LEFT - RIGHT, end_s))
    top, finest_s, last_s = TOP, 0.0, runs[-1].seconds(all_lanes[-1].end_ns)
    most, max_waiting = MAX_STRETCHES // len(runs), max(lanes.most_waiting for lanes in all_lanes)
    for run, lanes, height in zip(runs, all_lanes, heights, strict=True):
        _run_name(run, runs, sheet, top)
        axes = sheet.axes(LEFT, top + name_height, width - LEFT - RIGHT, height)
        shown_s = slot_chart(run, axes, theme, lanes=lanes, end_s=end_s, most=most, max_waiting=max_waiting)
        finest_s = max(finest_s, shown_s)
        if len(runs) > 1:
            end_line(axes, last_s, _end_words(run, runs, run.seconds(lanes.end_ns) - last_s), theme)
        top += name_height + height + AXIS + 8
    sheet.legend(entries, 12, top)
    sheet.notes.append(f"Whatever is shorter than {in_time(finest_s)} is joined with its neighbour.")
    return sheet


def _end_words(run: Run, runs: Sequence[Run], gap_s: float) -> str:
    """What the line says at another run: how much sooner or later the last one was done."""
    if run is runs[-1] or gap_s == 0:
        return ""
    return f"{runs[-1].policy} is done {in_time(abs(gap_s))} {'sooner' if gap_s > 0 else 'later'}"


def _run_name(run: Run, runs: Sequence[Run], sheet: Sheet, top: float) -> None:
    """The policy and what became of the run, on one line, or on two where the sheet is narrow."""
    glyph = strokes(tuple(each.policy for each in runs))[run.policy].glyph
    name = f"{glyph} {run.policy}"
    sheet.words(12, top, name, is_bold=True, size=TITLE)
    words = f"done after {in_time(run.duration_s)}; {percent(wasted_share([run]))} of slot time held or padded"
    if sheet.width > HALF:
        sheet.words(12 + 1.12 * text_px(name, TITLE) + 14, top + 1, words)
    else:
        sheet.words(12, top + 20, words, size=SMALL)


def _slot_entries(all_lanes: Sequence[Lanes], finest_ns: float) -> list[Entry]:
    """What occurs, and is not too short to be seen."""
    stretches = (stretch for lanes in all_lanes for stretch in lanes.stretches)
    uses = {stretch.use for stretch in stretches if stretch.end_ns - stretch.start_ns >= finest_ns}
    reasons = {end.reason for lanes in all_lanes for end in lanes.ends}
    entries = [Entry(look.label, look) for use, look in LOOKS.items() if use in uses]
    entries.append(Entry("finished", marker=FINISHED))
    return entries + [Entry(word, marker=mark) for reason, (word, mark) in END_MARKS.items() if reason in reasons]


def _over_time(runs: Sequence[Run], curve: Callable[..., None]) -> Draw:
    def draw(theme: Theme, width: float) -> Sheet:
        left = 58.0
        end_s = 1.015 * max(run.duration_s for run in runs) or NOTHING_S
        sheet = Sheet(width, 30 + 230 + AXIS + FOOT, theme, timed=Timed(left, width - left - RIGHT, end_s))
        curve(runs, sheet.axes(left, 30, width - left - RIGHT, 230), theme, end_s=end_s)
        return sheet

    return draw


def _distributions(comparison: Comparison) -> Draw:
    runs = {policy: comparison.runs_of(policy) for policy in comparison.policies}
    measures = [m for m in MEASURES if any(m.values(run) for of_policy in runs.values() for run in of_policy)]
    demands = demands_s(comparison.settings)

    def draw(theme: Theme, width: float) -> Sheet:
        columns = 2 if width > HALF else 1
        entries = [Entry(policy, stroke=stroke) for policy, stroke in strokes(comparison.policies).items()]
        cell_width = (width - 12 * (columns - 1)) / columns
        above = 30.0 + quantiles_px(list(runs), cell_width - LEFT - RIGHT)
        cell_height = above + 200 + AXIS + 14
        rows = -(-len(measures) // columns)
        legend = legend_height(entries, width - 12)
        sheet = Sheet(width, rows * cell_height + legend + FOOT, theme)
        for i, measure in enumerate(measures):
            left = (i % columns) * (cell_width + 12) + LEFT
            axes = sheet.axes(left, (i // columns) * cell_height + above, cell_width - LEFT - RIGHT, 200)
            if distribution(runs, measure, axes, theme, demand_s=demands.get(measure.key)):
                low_s, high_s = axes.get_xlim()
                is_log = axes.get_xscale() == "log"
                sheet.scales.append(Scale(left, cell_width - LEFT - RIGHT, low_s, high_s, is_log))
        sheet.legend(entries, 12, rows * cell_height)
        return sheet

    return draw


def _winners(found: Sequence[Change], names: tuple[str, str]) -> Draw:
    def draw(theme: Theme, width: float) -> Sheet:
        entries = [Entry(name, stroke=stroke) for name, stroke in strokes(names).items()]
        num = len(shown_rows(found))
        height = min(max(18.0 * (num + 1), 120.0), 720.0)
        sheet = Sheet(width, 28 + height + AXIS + FOOT, theme)
        sheet.legend(entries, 54, 2)
        dumbbells(found, names, sheet.axes(54, 28, width - 54 - RIGHT, height), theme)
        return sheet

    return draw


def _lengths(found: Sequence[Change], names: tuple[str, str]) -> Draw:
    def draw(theme: Theme, width: float) -> Sheet:
        height = min(max(18.0 * (len(found) + 1), 240.0), 420.0)
        sheet = Sheet(width, 12 + height + AXIS + FOOT, theme)
        axes = sheet.axes(66, 12, width - 66 - RIGHT, height)
        speed_up_by_length(found, names, axes, theme)
        return sheet

    return draw


def _slot_time(comparison: Comparison) -> Draw:
    shares = {policy: slot_shares(runs) for policy in comparison.policies if (runs := comparison.runs_of(policy))}
    used = {use for of_policy in shares.values() for use, share in of_policy.items() if share > 0}
    entries = [Entry(look.label, look) for use, look in USE_LOOKS.items() if use in used]

    def draw(theme: Theme, width: float) -> Sheet:
        height = 66.0 * len(shares)
        sheet = Sheet(width, height + AXIS + legend_height(entries, width - 12) + FOOT, theme)
        slot_time(shares, sheet.axes(14, 0, width - 44, height), theme)
        sheet.legend(entries, 12, height + AXIS)
        return sheet

    return draw
