"""The pictures: which there are, that they can be read, and that they go into a page whole."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.observe.report_runs import make_comparison, mixed

from everystop.observe.comparison import Comparison, Run
from everystop.observe.report.drawing import colour_of, log_ticks, nice_step
from everystop.observe.report.grammar import DARK, INLINE, INLINE_NAMES, LIGHT, LOOKS, strokes
from everystop.observe.report.inline_svg import inline_svg
from everystop.observe.report.pictures import (
    ENDINGS,
    NARROW,
    draw_all,
    pictures,
    remove_files,
    twin_slot_chart,
    write_files,
)
from everystop.observe.report.remarks import caption
from everystop.observe.report.request_pictures import changes, shown_rows, tally
from everystop.observe.report.sheets import drawing_style
from everystop.observe.report.shown import shown_runs
from everystop.observe.report.slot_picture import lanes_of, slot_chart
from everystop.observe.report.use_picture import slot_shares
from everystop.words import in_time

pytest.importorskip("matplotlib")
MIN_TEXT = 12.0


def without_history(comparison: Comparison) -> Comparison:
    runs = tuple(replace(run, history=None, max_num_seqs=0, start_ns=0) for run in comparison.runs)
    return replace(comparison, runs=runs)


def names(comparison: Comparison) -> list[str]:
    return [picture.name for picture in pictures(comparison)]


@pytest.fixture(scope="module")
def pair() -> Comparison:
    return make_comparison(mixed(24, 25))


@pytest.fixture(scope="module")
def three() -> Comparison:
    return make_comparison(mixed(10, 25), ("static", "static-padded", "shortest"), num_repeats=1)


def test_what_cannot_be_known_is_not_drawn(pair: Comparison, three: Comparison) -> None:
    assert names(pair) == ["slots", "occupancy", "tokens", "durations", "winners", "lengths", "slot-time"]
    assert names(without_history(pair)) == ["tokens", "durations", "winners", "lengths"]
    assert names(three)[4:] == [
        "winners-static-padded",
        "lengths-static-padded",
        "winners-shortest",
        "lengths-shortest",
        "slot-time",
    ]
    alone = make_comparison(mixed(5), ("continuous",), num_repeats=1)
    assert names(alone) == ["slots", "occupancy", "tokens", "durations", "slot-time"]


@pytest.mark.parametrize("width", ["wide", "narrow"])
def test_all_words_are_large_enough_and_on_the_sheet(pair: Comparison, three: Comparison, width: str) -> None:
    for comparison in (pair, three):
        with drawing_style():
            for picture in pictures(comparison):
                sheet = picture.draw(LIGHT, picture.width if width == "wide" else NARROW)
                sheet.figure.canvas.draw()
                assert_readable(picture.name, sheet.figure)


@pytest.mark.parametrize("width", ["wide", "narrow"])
@pytest.mark.parametrize(("ttft_ms", "itl_ms"), [(500.0, 1.0), (0.5, 100_000.0), (None, 40.0)])
def test_what_is_demanded_is_marked_among_the_durations(
    pair: Comparison, ttft_ms: float | None, itl_ms: float, width: str
) -> None:
    from matplotlib.text import Text

    demanding = replace(pair, settings=dict(pair.settings) | {"slo_ttft_ms": ttft_ms, "slo_itl_ms": itl_ms})
    [picture] = [each for each in pictures(demanding) if each.name == "durations"]
    with drawing_style():
        sheet = picture.draw(LIGHT, picture.width if width == "wide" else NARROW)
        sheet.figure.canvas.draw()
        assert_readable(picture.name, sheet.figure)
    said = [text.get_text() for text in sheet.figure.findobj(Text) if text.get_text().startswith("SLO ")]
    assert said == [f"SLO {in_time(ms / 1e3)}" for ms in (ttft_ms, itl_ms) if ms is not None]
    assert "A dotted line is what was demanded (SLO)." in caption(demanding, "durations")


def assert_readable(name: str, figure: object) -> None:
    from matplotlib.text import Text

    whole = figure.bbox  # type: ignore[attr-defined]
    for text in figure.findobj(Text):  # type: ignore[attr-defined]
        if not text.get_text().strip() or not text.get_visible():
            continue
        assert text.get_fontsize() >= MIN_TEXT, (name, text)
        if text.get_clip_on():
            continue
        box = text.get_window_extent()
        inside = box.x0 >= -2 and box.y0 >= -2 and box.x1 <= whole.x1 + 2 and box.y1 <= whole.y1 + 2
        assert inside, (name, text.get_text(), box)


def test_the_same_comparison_gives_the_same_files(tmp_path: Path) -> None:
    small = make_comparison(mixed(3), num_repeats=1)
    written = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        drawings = [drawing for drawing in draw_all(small) if drawing.picture.name in ("slots", "lengths")]
        written.append({path.name: path.read_bytes() for path in write_files(drawings, folder)})
    first, second = written
    assert first == second
    assert sorted(first) == sorted(
        f"{name}{suffix}" for name in ("slots", "lengths") for suffix in (".svg", ".png", "-dark.svg", "-dark.png")
    )
    for name, content in first.items():
        if name.endswith(".svg"):
            ElementTree.fromstring(content)
            assert b"#fe0" not in content.lower()
        else:
            assert content.startswith(b"\x89PNG")


def test_files_of_an_older_comparison_are_known_by_their_names(
    pair: Comparison, three: Comparison, tmp_path: Path
) -> None:
    """Also those that a comparison of other policies made; what anybody else has put there stays."""
    made = {f"{name}{ending}" for comparison in (pair, three) for name in names(comparison) for ending in ENDINGS}
    theirs = {"notes.txt", "slots.txt", "slots-old.png", "winners-mine.png", "hero.svg"}
    for name in made | theirs:
        (tmp_path / name).touch()
    (tmp_path / "slots.png").unlink()
    (tmp_path / "slots.png").mkdir()
    remove_files(tmp_path, ("static", "static-padded", "shortest"))
    assert {path.name for path in tmp_path.iterdir()} == theirs | {"slots.png"}


def test_a_picture_in_a_page_follows_its_colours_and_keeps_its_words(pair: Comparison) -> None:
    with drawing_style():
        for picture in pictures(pair):
            document = picture.draw(INLINE, picture.width).as_svg()
            inline = inline_svg(
                document, name=picture.name, label='a "label" <b>', css_class="picture", colours=INLINE_NAMES
            )
            assert "#fe0" not in inline.lower()
            assert "var(--ink)" in inline
            assert 'aria-label="a &quot;label&quot; &lt;b&gt;"' in inline
            root = ElementTree.fromstring(inline.replace(" href=", " data-href="))
            assert words_of(root) == words_of(ElementTree.fromstring(document))
            ids = Counter(element.get("id") for element in root.iter() if element.get("id"))
            assert set(ids.values()) <= {1}
            referred = set(re.findall(r'url\(#([^)]+)\)|data-href="#([^"]+)"', ElementTree.tostring(root, "unicode")))
            assert {a or b for a, b in referred} == set(ids)
            assert len(inline) < len(document)


def words_of(root: ElementTree.Element) -> list[str]:
    return ["".join(element.itertext()) for element in root.iter() if element.tag.endswith("text")]


def test_who_waits_is_drawn_to_the_scale_of_the_fullest_waiting_room(pair: Comparison) -> None:
    from matplotlib.figure import Figure
    from matplotlib.patches import Polygon

    run = shown_runs(pair)[0]
    lanes = lanes_of(run)
    heights = []
    for max_waiting in (0, 2 * lanes.most_waiting):
        axes = Figure(figsize=(12, 4)).add_subplot()
        slot_chart(run, axes, LIGHT, lanes=lanes, max_waiting=max_waiting)
        [room] = [patch for patch in axes.patches if isinstance(patch, Polygon)]
        ys = room.get_xy()[:, 1]
        heights.append(max(ys) - min(ys))
    assert heights[0] == pytest.approx(2 * heights[1])


def test_what_belongs_to_a_request_can_be_found_in_the_page(pair: Comparison) -> None:
    with drawing_style():
        sheet = twin_slot_chart(shown_runs(pair), INLINE)
        inline = inline_svg(sheet.as_svg(), name="slots", label="", css_class="", colours=INLINE_NAMES)
    found = Counter(int(index) for index in re.findall(r'class="move r" data-r="(\d+)"', inline))
    assert found.keys() == set(range(24))
    assert min(found.values()) >= 2
    assert inline.count('class="axis"') == 4
    assert 'class="moves"' in inline


def test_a_dumbbell_is_drawn_for_the_extremes_and_evenly_between(pair: Comparison) -> None:
    found = changes(pair, "continuous")
    assert [change.index for change in found] == list(range(24))
    assert sum(tally(found)) == 24
    many = [replace(found[i % 24], index=i, before_s=1.0 + i) for i in range(1000)]
    rows = shown_rows(many)
    assert len(rows) == 150
    assert rows[0].speed_up == max(change.speed_up for change in many)
    assert rows[-1].speed_up == min(change.speed_up for change in many)


def test_slot_time_adds_up(pair: Comparison) -> None:
    for policy in pair.policies:
        shares = slot_shares(pair.runs_of(policy))
        assert sum(shares.values()) == pytest.approx(1)
    assert slot_shares(pair.runs_of("static"))["held"] > 0
    assert slot_shares(pair.runs_of("continuous"))["held"] == 0
    assert slot_shares(without_history(pair).runs) == {}


def test_policies_differ_by_more_than_colour() -> None:
    policies = ("static", "continuous", "static-padded", "fair", "shortest", "deadline", "priority", "thrifty")
    found = strokes(policies)
    assert (found["static"].colour, found["static"].marker) == ("#B33C00", "s")
    assert (found["continuous"].colour, found["continuous"].marker) == ("#0072B2", "o")
    assert len({(stroke.dashes, stroke.marker) for stroke in found.values()}) == len(policies)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda theme: theme.name)
def test_words_and_outlines_stand_out(theme: object) -> None:
    assert isinstance(theme, type(LIGHT))
    assert contrast(theme.ink, theme.page) >= 7
    assert contrast(theme.faint, theme.page) >= 4.5
    assert contrast(theme.outline, theme.page) >= 3
    for policy_stroke in strokes(("static", "continuous", "fair")).values():
        assert contrast(colour_of(policy_stroke, theme), theme.page) >= 3
    hatched: Sequence[str] = [look.fill or "" for look in LOOKS.values() if look.hatch]
    assert all(contrast(fill, "#FFFFFF") >= 4.5 for fill in hatched)


def test_steps_of_axes_are_round() -> None:
    assert [nice_step(47, 9), nice_step(0.82, 9), nice_step(0)] == [10, 0.1, 1]


@pytest.mark.parametrize("width", [200.0, 290.0, 500.0])
@pytest.mark.parametrize("low", [1.1e-4, 2.3e-3, 0.0095, 0.99, 3.0])
@pytest.mark.parametrize("times", [1.05, 1.9, 5.0, 31.0, 90.0, 1e3, 1e6])
def test_a_log_axis_has_two_round_ticks_at_least_and_room_between(low: float, times: float, width: float) -> None:
    ticks = log_ticks(low, low * times, width)
    assert len(ticks) >= 2
    assert all(low <= tick <= low * times for tick in ticks)
    gaps = [width * math.log10(b / a) / math.log10(times) for a, b in pairwise(ticks)]
    assert min(gaps) >= 28


def test_ticks_of_a_log_axis_are_finer_where_the_range_is_short() -> None:
    assert log_ticks(0.003, 0.2, 400) == [0.005, 0.01, 0.02, 0.05, 0.1, 0.2]
    assert log_ticks(0.001, 100, 400) == [0.001, 0.01, 0.1, 1, 10, 100]


def test_log_axes_of_durations_are_labelled(pair: Comparison) -> None:
    """Gaps of 9 ms to 320 ms, as under a long prompt, have but one power of ten among them."""
    gap_s = (0.009, 0.32)

    def stretched(run: Run) -> Run:
        lines = tuple(
            replace(line, token_s=(line.sent_s, line.sent_s + gap_s[0], line.sent_s + sum(gap_s)))
            for line in run.requests
        )
        return replace(run, requests=lines)

    wide = replace(pair, runs=tuple(map(stretched, pair.runs)))
    [picture] = [each for each in pictures(wide) if each.name == "durations"]
    with drawing_style():
        for width in (picture.width, NARROW):
            sheet = picture.draw(LIGHT, width)
            sheet.figure.canvas.draw()
            logs = [axes for axes in sheet.figure.axes if axes.get_xscale() == "log"]
            assert logs
            for axes in logs:
                shown = [tick.get_text() for tick in axes.get_xticklabels() if tick.get_text()]
                assert len(shown) >= 2, shown
