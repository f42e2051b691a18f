"""Which pictures a comparison has, how each is laid out on its sheet, and their files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from everystop.observe.comparison import Comparison, Run
from everystop.observe.report.curve_pictures import QUANTILE_LINE, cumulative_tokens, distribution, occupancy
from everystop.observe.report.curves import MEASURES
from everystop.observe.report.drawing import SMALL, TITLE, text_px
from everystop.observe.report.grammar import DARK, INK_STROKE, LIGHT, LOOKS, Stroke, Theme, Use, strokes
from everystop.observe.report.request_pictures import Change, changes, dumbbells, shown_rows, speed_up_by_length
from everystop.observe.report.sheets import Entry, Sheet, drawing_style, legend_height
from everystop.observe.report.shown import shown_runs
from everystop.observe.report.slot_picture import end_line, lanes_of, rows_above, slot_chart
from everystop.observe.report.use_picture import USE_LOOKS, slot_shares, slot_time, wasted_share
from everystop.observe.report.words import in_time, percent

WIDE, HALF, NARROW = 1120.0, 548.0, 350.0
HEAD, FOOT = 34.0, 12.0  # pixels: the title of a file that stands alone, the space below everything
LEFT, RIGHT, AXIS = 46.0, 14.0, 44.0

MAX_STRETCHES = 3_000
END_STROKE = Stroke(INK_STROKE, (0, (4, 2)), "")

Draw = Callable[[Theme, float, bool], Sheet]


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture: `draw(theme, width, has_title)` lays it out on a new sheet of that width."""

    name: str
    title: str
    width: float
    draw: Draw

    @property
    def is_half(self) -> bool:
        """Two of its kind fit beside each other."""
        return self.width < WIDE


def pictures(comparison: Comparison) -> list[Picture]:
    """The pictures that can be drawn of a comparison: without histories there are fewer."""
    return list(_pictures(comparison))


def _pictures(comparison: Comparison) -> Iterator[Picture]:
    runs = shown_runs(comparison)
    if not runs:
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


def draw_files(comparison: Comparison, folder: Path) -> list[Path]:
    """Each picture as PNG and SVG, light and dark; returns the files. Raises PictureError without matplotlib."""
    paths = []
    with drawing_style():
        for picture in pictures(comparison):
            for theme in (LIGHT, DARK):
                sheet = picture.draw(theme, picture.width, True)
                stem = picture.name if theme is LIGHT else f"{picture.name}-{theme.name}"
                paths += [folder / f"{stem}.svg", folder / f"{stem}.png"]
                paths[-2].write_text(sheet.as_svg(), encoding="utf-8")
                sheet.write_png(paths[-1])
    return paths


def _slots(runs: Sequence[Run]) -> Draw:
    def draw(theme: Theme, width: float, has_title: bool) -> Sheet:
        return twin_slot_chart(runs, theme, width=width, title="Batch slots over time" if has_title else "")

    return draw


def twin_slot_chart(runs: Sequence[Run], theme: Theme, *, width: float = WIDE, title: str = "") -> Sheet:
    """Slot charts of runs of one workload, one above the other on one time axis, with a line through all of them where
    the last one ends. Runs need a history.
    """
    all_lanes = [lanes_of(run) for run in runs]
    row = max(5.0, min(25.0 if width > HALF else 19.0, 560 / max(lanes.num_slots for lanes in all_lanes)))
    heights = [row * (lanes.num_slots + rows_above(lanes)) for lanes in all_lanes]
    uses = {stretch.use for lanes in all_lanes for stretch in lanes.stretches}
    reasons = {end.reason for lanes in all_lanes for end in lanes.ends}
    entries = _slot_entries(uses, reasons)
    if len(runs) > 1:
        entries.append(Entry(f"{runs[-1].policy} is done", stroke=END_STROKE))
    head = HEAD if title else 4.0
    name_height = 40.0 if width > HALF else 54.0
    whole = head + sum(heights) + (name_height + AXIS + 8) * len(runs) + legend_height(entries, width - 12) + FOOT
    end_s = 1.015 * max(run.seconds(lanes.end_ns) for run, lanes in zip(runs, all_lanes, strict=True))
    sheet = Sheet(width, whole, theme, timed=(LEFT, width - LEFT - RIGHT, end_s))
    if title:
        sheet.title(title)
    top, finest_s, last_s = head, 0.0, runs[-1].seconds(all_lanes[-1].end_ns)
    for run, lanes, height in zip(runs, all_lanes, heights, strict=True):
        _run_name(run, runs, sheet, top)
        axes = sheet.axes(LEFT, top + name_height, width - LEFT - RIGHT, height)
        finest_s = max(finest_s, slot_chart(run, axes, theme, end_s=end_s, most=MAX_STRETCHES // len(runs)))
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


def _slot_entries(uses: set[Use], reasons: set[str]) -> list[Entry]:
    entries = [Entry(look.label, look) for use, look in LOOKS.items() if use in uses]
    entries.append(Entry("finished", marker="o"))
    if "error" in reasons:
        entries.append(Entry("failed", marker="x"))
    return entries


def _over_time(runs: Sequence[Run], curve: Callable[..., None]) -> Draw:
    def draw(theme: Theme, width: float, has_title: bool) -> Sheet:
        head = HEAD if has_title else 0.0
        left = 58.0
        end_s = 1.015 * max(run.duration_s for run in runs)
        sheet = Sheet(width, head + 30 + 230 + AXIS + FOOT, theme, timed=(left, width - left - RIGHT, end_s))
        if has_title:
            sheet.title("Slots at work" if curve is occupancy else "Output tokens so far")
        curve(runs, sheet.axes(left, head + 30, width - left - RIGHT, 230), theme, end_s=end_s)
        return sheet

    return draw


def _distributions(comparison: Comparison) -> Draw:
    runs = {policy: comparison.runs_of(policy) for policy in comparison.policies}
    measures = [m for m in MEASURES if any(m.values(run) for of_policy in runs.values() for run in of_policy)]

    def draw(theme: Theme, width: float, has_title: bool) -> Sheet:
        columns = 2 if width > HALF else 1
        head = HEAD if has_title else 0.0
        entries = [Entry(policy, stroke=stroke) for policy, stroke in strokes(comparison.policies).items()]
        cell_width = (width - 12 * (columns - 1)) / columns
        above = 30.0 + QUANTILE_LINE * len(runs)
        cell_height = above + 200 + AXIS + 14
        rows = -(-len(measures) // columns)
        legend = legend_height(entries, width - 12)
        sheet = Sheet(width, head + rows * cell_height + legend + FOOT, theme)
        if has_title:
            sheet.title("How durations are spread over requests")
        for i, measure in enumerate(measures):
            left = (i % columns) * (cell_width + 12) + LEFT
            axes = sheet.axes(left, head + (i // columns) * cell_height + above, cell_width - LEFT - RIGHT, 200)
            distribution(runs, measure, axes, theme)
        sheet.legend(entries, 12, head + rows * cell_height)
        return sheet

    return draw


def _winners(found: Sequence[Change], names: tuple[str, str]) -> Draw:
    def draw(theme: Theme, width: float, has_title: bool) -> Sheet:
        head = HEAD if has_title else 0.0
        entries = [Entry(name, stroke=stroke) for name, stroke in strokes(names).items()]
        num = len(shown_rows(found))
        height = min(max(18.0 * (num + 1), 120.0), 720.0)
        sheet = Sheet(width, head + 28 + height + AXIS + FOOT, theme)
        if has_title:
            sheet.title(f"Who won and who lost: from {names[0]} to {names[1]}")
        sheet.legend(entries, 54, head + 2)
        dumbbells(found, names, sheet.axes(54, head + 28, width - 54 - RIGHT, height), theme)
        return sheet

    return draw


def _lengths(found: Sequence[Change], names: tuple[str, str]) -> Draw:
    def draw(theme: Theme, width: float, has_title: bool) -> Sheet:
        head = HEAD if has_title else 0.0
        height = min(max(18.0 * (len(found) + 1), 240.0), 420.0)
        sheet = Sheet(width, head + 12 + height + AXIS + FOOT, theme)
        if has_title:
            sheet.title("Speed-up against the length of the answer")
        axes = sheet.axes(66, head + 12, width - 66 - RIGHT, height)
        speed_up_by_length(found, names, axes, theme)
        return sheet

    return draw


def _slot_time(comparison: Comparison) -> Draw:
    shares = {policy: slot_shares(runs) for policy in comparison.policies if (runs := comparison.runs_of(policy))}
    used = {use for of_policy in shares.values() for use, share in of_policy.items() if share > 0}
    entries = [Entry(look.label, look) for use, look in USE_LOOKS.items() if use in used]

    def draw(theme: Theme, width: float, has_title: bool) -> Sheet:
        head = HEAD if has_title else 0.0
        height = 66.0 * len(shares)
        sheet = Sheet(width, head + height + AXIS + legend_height(entries, width - 12) + FOOT, theme)
        if has_title:
            sheet.title("Where the time of the slots went")
        slot_time(shares, sheet.axes(14, head, width - 44, height), theme)
        sheet.legend(entries, 12, head + height + AXIS)
        return sheet

    return draw
