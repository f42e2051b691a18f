"""The report of a comparison in a real browser, opened from a file."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.browser.watched import Watched
from tests.observe.report_runs import make_comparison, mixed

from everystop.observe.comparison import Comparison
from everystop.observe.report.curves import MEASURES, quantiles
from everystop.observe.report.page import render_page
from everystop.observe.report.pictures import draw_all

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.browser

Open = Callable[..., Watched]
SLOTS = "#slots svg.wide"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a report of 24 requests, two repeats."""
    path: Path = tmp_path_factory.mktemp("report") / "report.html"
    comparison = make_comparison(mixed(24, 25))
    path.write_text(render_page(comparison, draw_all(comparison)), encoding="utf-8")
    return path.as_uri()


def bars_of(watched: Watched, index: int) -> Any:
    return watched.page.locator(f'{SLOTS} .r[data-r="{index}"] path')


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_opens_without_a_network_and_everybody_can_use_it(
    open_page: Open, report: str, width: int, scheme: str
) -> None:
    watched = open_page(report, width=width, scheme=scheme)
    assert watched.axe() == []
    assert watched.page.evaluate("document.documentElement.scrollWidth") == width
    assert watched.urls == [report]
    kind = "wide" if width > 800 else "narrow"
    assert watched.page.locator(f"svg.{kind}:visible").count() == 7
    assert watched.page.locator("svg:visible").count() == 7
    page = {"light": "rgb(255, 255, 255)", "dark": "rgb(17, 20, 24)"}[scheme]
    shown = watched.page.locator(f"#slots svg.{kind} path").first.evaluate("e => getComputedStyle(e).fill")
    assert shown == page


WORDS_PX = """() => {
  const sizes = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility() || element.closest("script, style")) continue;
    const size = parseFloat(getComputedStyle(element).fontSize);
    const turn = element instanceof SVGElement ? element.getScreenCTM() : null;
    sizes.push([turn ? size * Math.hypot(turn.a, turn.b) : size, walker.currentNode.data.trim()]);
  }
  return sizes.sort((a, b) => a[0] - b[0]);
}"""


@pytest.mark.parametrize("width", [320, 390, 801, 1000, 1120, 1170, 1184, 1280])
def test_no_words_are_smaller_than_12_pixels(open_page: Open, report: str, width: int) -> None:
    """Where a picture has not that much room it can be moved sideways, and the page cannot."""
    watched = open_page(report, width=width)
    smallest, words = watched.page.evaluate(WORDS_PX)[0]
    assert smallest >= 11.99, words
    assert watched.page.evaluate("document.documentElement.scrollWidth") == width


def test_without_javascript_all_is_there_but_the_buttons(open_page: Open, report: str) -> None:
    watched = open_page(report, java_script_enabled=False)
    assert watched.page.locator("svg:visible").count() == 7
    assert watched.page.locator("#requests tbody tr").count() == 24
    assert watched.page.get_by_role("button").count() == 0
    watched.page.locator("#occupancy summary").click()
    assert watched.page.locator("#occupancy table").is_visible()


def test_pointing_at_a_request_describes_it_and_a_click_keeps_it(open_page: Open, report: str) -> None:
    watched = open_page(report)
    bars_of(watched, 9).first.hover()
    assert watched.text("#tip").startswith("request 9 (short):")
    assert "static: " in watched.text("#now")
    bars_of(watched, 9).first.click()
    assert watched.page.locator("#requests tr.on").get_attribute("data-r") == "9"
    assert "request 9" in watched.text("#says")
    assert watched.page.locator('#lengths svg.wide .on[data-r="9"]').count() == 1
    assert watched.address.endswith("#r=9")
    watched.page.keyboard.press("Escape")
    assert watched.page.locator(".on").count() == 0
    assert watched.address == report


def test_a_request_can_be_chosen_with_the_keyboard_alone(open_page: Open, report: str) -> None:
    watched = open_page(report)
    button = watched.page.locator('#requests tr[data-r="3"] button')
    button.focus()
    watched.page.keyboard.press("Enter")
    assert button.get_attribute("aria-pressed") == "true"
    assert watched.page.locator("svg.has-on").count() >= 4


def test_dragging_shows_a_part_of_the_run_in_all_pictures_over_time(open_page: Open, report: str) -> None:
    watched = open_page(report)
    page = watched.page
    page.locator(SLOTS).scroll_into_view_if_needed()
    box = page.locator(SLOTS).bounding_box()
    page.mouse.move(box["x"] + 300, box["y"] + 200)
    page.mouse.down()
    page.mouse.move(box["x"] + 600, box["y"] + 200, steps=3)
    page.mouse.up()
    assert "#t=" in watched.address
    address = watched.address
    for name in ("slots", "occupancy", "tokens"):
        assert page.locator(f"#{name} svg.wide text.tick").count() >= 2
        scale = page.locator(f"#{name} svg.wide .moves").first.evaluate("e => e.transform.baseVal[0].matrix.a")
        assert scale == pytest.approx(1060 / 300, rel=0.02)
    text = page.locator(f"{SLOTS} .moves text").first
    assert text.evaluate("e => Math.abs(e.getCTM().a - e.getCTM().d) < 0.01")  # words are not stretched
    page.get_by_role("button", name="Whole run").click()
    assert page.locator("svg text.tick").count() == 0
    assert watched.address == report
    again = open_page(address)
    assert again.page.locator("#tokens svg.wide text.tick").count() >= 2


def test_buttons_move_the_time_and_play_runs_to_the_end(open_page: Open, report: str) -> None:
    watched = open_page(report)
    page = watched.page
    for _ in range(2):
        page.get_by_role("button", name="Zoom in").click()
    page.get_by_role("button", name="Later").click()
    assert "#t=" in watched.address
    page.locator("#speed").select_option("8")
    page.get_by_role("button", name="Play").click()
    page.locator(f"{SLOTS} .cursor[visibility=visible]").wait_for(state="attached")  # from the next frame on
    page.get_by_role("button", name="Play").wait_for()  # it was named Stop while it ran
    assert "tokens out" in watched.text("#now")


def test_tables_and_dumbbells_sort(open_page: Open, report: str) -> None:
    watched = open_page(report)
    page = watched.page
    head = page.locator("#requests th", has_text="output tokens")
    head.get_by_role("button").click()
    cells = [int(text) for text in page.locator("#requests tbody td:nth-child(5)").all_inner_texts()]
    assert cells == sorted(cells)
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    page.locator("#winners select").select_option("order of arrival")
    labels = [int(text) for text in page.locator("#winners svg.wide .tick-y text").all_text_contents()]
    assert labels == sorted(labels)
    tops = [
        page.locator(f'#winners svg.wide .r[data-r="{index}"]').first.bounding_box()["y"]
        for index in (labels[0], labels[-1])
    ]
    assert tops[0] < tops[1]


@pytest.mark.parametrize(("width", "kind"), [(1280, "wide"), (390, "narrow")])
def test_each_distribution_has_a_tick_at_p99_whose_words_stand_apart(
    open_page: Open, report: str, width: int, kind: str
) -> None:
    page = open_page(report, width=width).page
    ticks = page.locator(f"#durations svg.{kind} .tick-y text")
    assert ticks.all_text_contents() == ["0", "p50", "p95", "p99"] * 4
    lower, upper = (ticks.nth(i).bounding_box() for i in (2, 3))
    assert upper["y"] + 0.8 * upper["height"] <= lower["y"] + 0.2 * lower["height"]


AXES = """(svg, index) => {
    const [across, up] = [...svg.querySelectorAll(".axis")].slice(2 * index, 2 * index + 2);
    const clip = up.querySelector(".tick-y path").getAttribute("clip-path");
    const places = elements => [...elements].map(each => Number(each.getAttribute("x")));
    const ticks = [...across.querySelectorAll("text.tick")];
    return {
        marks: places(svg.querySelectorAll(`g[clip-path="${clip}"] use`)),
        ticks: places(ticks),
        values: ticks.map(tick => Number(tick.textContent)),
        title: [...across.children].find(each => each.localName === "text" && !ticks.includes(each)).textContent,
    };
}"""


def marks_s(axes: dict[str, Any], of: Callable[[float], float], back: Callable[[float], float]) -> list[float]:
    """What the marks stand at, by the first and the last tick; `of` makes values even, and `back` undoes it."""
    (x0, *_, x1), (low, *_, high) = axes["ticks"], map(of, axes["values"])
    return [back(low + (x - x0) / (x1 - x0) * (high - low)) for x in axes["marks"]]


def test_axes_of_durations_can_be_turned_into_log_and_linear_ones_and_back(open_page: Open, report: str) -> None:
    comparison = make_comparison(mixed(24, 25))
    wanted = [
        [value for policy in comparison.policies for value in quantiles(each_s(comparison, policy, i)).values()]
        for i in range(2)
    ]
    page = open_page(report).page
    svg = page.locator("#durations svg.wide")
    drawn = svg.evaluate("svg => svg.outerHTML")
    choice = page.get_by_label("axes of durations")
    choice.select_option("linear")
    axes = svg.evaluate(AXES, 0)
    assert axes["title"] == "from sending to the first token, s"
    assert marks_s(axes, float, float) == pytest.approx(wanted[0], rel=0.02, abs=0.004)
    choice.select_option("log")
    axes = svg.evaluate(AXES, 1)
    assert axes["title"] == "gap between tokens, s (log scale)"
    assert marks_s(axes, math.log, math.exp) == pytest.approx(wanted[1], rel=0.05)
    assert svg.evaluate(AXES, 0)["ticks"] == []
    choice.select_option("as they fit")
    assert svg.evaluate("svg => svg.outerHTML") == drawn


def each_s(comparison: Comparison, policy: str, measure: int) -> list[float]:
    return [value for run in comparison.runs_of(policy) for value in MEASURES[measure].values(run)]


def test_the_line_of_what_is_demanded_goes_with_the_axis(open_page: Open, tmp_path: Path) -> None:
    comparison = make_comparison(mixed(24, 25))
    comparison = replace(comparison, settings={**comparison.settings, "slo_ttft_ms": 900.0})
    path = tmp_path / "report.html"
    path.write_text(render_page(comparison, draw_all(comparison)), encoding="utf-8")
    watched = open_page(path.as_uri())
    page = watched.page
    words = page.locator("#durations svg.wide text", has_text="SLO 900 ms")
    frame = page.locator("#durations svg.wide").bounding_box()
    before = words.bounding_box()
    page.get_by_label("axes of durations").select_option("linear")
    after = words.bounding_box()
    assert after["x"] < before["x"] - 20
    assert frame["x"] < after["x"]
    assert after["x"] + after["width"] < frame["x"] + frame["width"] / 2
    assert watched.axe() == []
