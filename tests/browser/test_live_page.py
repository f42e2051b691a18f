from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image, ImageChops
from tests.browser.explanations import explanation
from tests.browser.fake_server import FakeServer, fake_server
from tests.browser.schedule import Run
from tests.browser.watched import LOOKS, Watched
from tests.observe.report_runs import make_comparison, mixed
from tests.observe.trace.decoded import Decoded

from everystop.observe.trace.picture import picture_of

pytestmark = pytest.mark.browser

Open = Callable[..., Watched]
DECODE, PREFILL, SLOW = "0,114,178", "230,159,0", "86,180,233"
PANELS = {"light": (255, 255, 255), "dark": (23, 27, 33)}
SVG = "http://www.w3.org/2000/svg"
MOMENT = r"\d{4}-\d\d-\d\dT\d{6}Z"


@pytest.fixture(autouse=True)  # so it begins before the pages, and ends after they are closed
def server() -> Iterator[FakeServer]:
    with fake_server() as running:
        yield running


@pytest.fixture
def run(server: FakeServer) -> Run:
    run = Run()
    server.first = [run.full()]
    return run


def live(open_page: Open, server: FakeServer, **options: Any) -> Watched:
    watched = open_page(f"{server.url}/ui", **options)
    watched.wait_for_text("#connection", "live")
    watched.wait_for_text("#tiles", "p99")
    watched.wait_for_drawings()
    return watched


def test_every_panel_shows_what_the_stream_says(open_page: Open, server: FakeServer, run: Run) -> None:
    watched = live(open_page, server, height=2200)
    page = watched.page
    assert watched.text("#policy") == "continuous"
    assert "made-up · version 0.1.0" in watched.text("#server")
    assert "the oldest for" in watched.text("#verdict")
    for text in ("8 of 8", "143", "310 ms", "p95 2.40 s", "p99 96.0 ms"):
        assert text in watched.text("#tiles")
    waiting = page.locator("#waiting li")
    assert waiting.count() == len(run.waiting)
    assert "KV −3 blocks" in waiting.first.inner_text()
    assert f"behind r{run.waiting[0].id}" in waiting.nth(1).inner_text()
    assert f"step {run.step_id}" in page.get_attribute("#slots", "aria-label")
    assert "budget 64 tokens" in page.get_attribute("#columns", "aria-label")
    assert "of 96 blocks" in page.get_attribute("#blocks", "aria-label")
    assert watched.text("#blocks-evicted") == "3 evicted"
    assert watched.text("#waiting-count") == f"{len(run.waiting)} requests"
    assert "admitted r" in watched.text("#log")
    assert "queued: no free slot" in watched.text("#recent")
    link = page.locator("#recent a").first
    assert link.get_attribute("href") == "/ui/r/" + link.get_attribute("title")
    assert "0.4 % of the server's CPU time" in watched.text("#cost")
    assert not page.locator("#try").is_visible()


def test_charts_are_drawn_in_the_colours_of_the_grammar(open_page: Open, server: FakeServer, run: Run) -> None:
    watched = live(open_page, server, height=2200)
    for chart in ("#slots", "#columns", "#blocks"):
        watched.wait_for_colors(chart, DECODE, PREFILL)
    for strip in ("tokens", "load", "ttft", "itl"):
        assert len(watched.colors(f"#strip-{strip}")) > 3


def test_all_charts_are_printed_in_light_colours(open_page: Open, server: FakeServer, run: Run) -> None:
    """Also those that nobody has scrolled to, and whatever the theme."""
    watched = live(open_page, server)
    page = watched.page
    watched.look(390, "dark")
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    wipe = "id => { const c = document.getElementById(id); c.getContext('2d').clearRect(0, 0, c.width, c.height); }"
    page.evaluate(wipe, "slots")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert {DECODE, PREFILL} <= watched.colors("#slots")
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(244, 245, 247)"
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(17, 20, 24)"


def test_a_static_batch_shows_slots_that_are_held(open_page: Open, server: FakeServer) -> None:
    server.first = [Run(is_static=True).full(400)]
    watched = live(open_page, server)
    assert watched.text("#policy") == "static"
    watched.page.click("[data-table=slots]")
    assert "held or padding" in watched.text("#slots-table")


def test_the_keyboard_pauses_steps_pins_and_returns(open_page: Open, server: FakeServer, run: Run) -> None:
    watched = live(open_page, server)
    page = watched.page
    page.focus("#slots")
    page.keyboard.press("Space")
    assert page.get_attribute("#pause", "aria-pressed") == "true"
    page.keyboard.press("ArrowLeft")
    assert f"step {run.step_id}:" in watched.text("#readout")
    page.keyboard.press("ArrowLeft")
    assert f"step {run.step_id - 1}:" in watched.text("#readout")
    page.keyboard.press("ArrowDown")
    assert "slot 0: r" in watched.text("#readout")
    page.keyboard.press("Enter")
    watched.wait_for_text("#readout", "is pinned")
    assert page.locator("#readout a").get_attribute("href").startswith("/ui/r/chatcmpl-")
    page.keyboard.press("Escape")
    assert "is pinned" not in watched.text("#readout")
    page.keyboard.press("End")
    assert page.get_attribute("#pause", "aria-pressed") == "false"


def test_a_paused_view_stays_while_steps_go_on_coming(open_page: Open, server: FakeServer, run: Run) -> None:
    watched = live(open_page, server)
    page = watched.page
    page.click("#pause")
    watched.wait_for_drawings()
    before = page.evaluate("document.getElementById('slots').toDataURL()")
    page.wait_for_timeout(600)
    server.send(run.message(40))
    watched.wait_for_text("#server", f"{(run.now_ns - 5_000_000_000_000) / 1e9:.1f}")
    assert page.evaluate("document.getElementById('slots').toDataURL()") == before
    page.click("#pause")
    watched.wait_for("before => document.getElementById('slots').toDataURL() !== before", before)


def test_zoom_and_step_numbers_change_the_picture(open_page: Open, server: FakeServer, run: Run) -> None:
    watched = live(open_page, server)
    page = watched.page
    pictures = {page.evaluate("document.getElementById('slots').toDataURL()")}
    for selector in ("#zoom-in", "#zoom-in", "#steps", "#zoom-out"):
        page.click(selector)
        watched.wait_for("seen => !seen.includes(document.getElementById('slots').toDataURL())", list(pictures))
        pictures.add(page.evaluate("document.getElementById('slots').toDataURL()"))
    assert len(pictures) == 5
    assert page.get_attribute("#steps", "aria-pressed") == "true"


def test_a_click_pins_the_request_under_the_pointer(open_page: Open, server: FakeServer, run: Run) -> None:
    watched = live(open_page, server)
    box = watched.page.locator("#slots").bounding_box()
    watched.page.mouse.click(box["x"] + box["width"] * 0.9, box["y"] + 20)
    watched.wait_for_text("#readout", "is pinned")
    watched.page.click("#readout button")
    watched.wait_for_text("#readout", "Point at a bar")


def test_the_pinned_request_is_marked_in_all_panels(open_page: Open, server: FakeServer, run: Run) -> None:
    one = next(one for one in run.slots if one is not None)
    server.first[0]["acts"].append([run.now_ns, run.step_id, f"step {run.step_id}: kept r{one.id}, not r{one.id}0"])
    server.first[0]["acts"].append([run.now_ns, run.step_id, f"step {run.step_id}: kept r{one.id}0"])
    watched = live(open_page, server, height=2200)
    page = watched.page
    page.focus("#slots")
    for key in ("Space", "ArrowLeft", *["ArrowDown"] * (one.slot + 1), "Enter"):
        page.keyboard.press(key)
    watched.wait_for_text("#readout", f"r{one.id} is pinned")
    assert watched.text("#recent tr.pinned th") == f"r{one.id}"
    assert page.locator("#log li").nth(0).get_attribute("class") != "pinned"
    assert page.locator("#log li").nth(1).get_attribute("class") == "pinned"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_slot_chart_can_be_saved_as_png(open_page: Open, server: FakeServer, run: Run, scheme: str) -> None:
    """On the colour of its panel, for a dark chart without it cannot be read on white."""
    watched = live(open_page, server)
    watched.look(1280, scheme)
    watched.wait_for_drawings()
    name, content = saved(watched, "#save-png")
    assert re.fullmatch(rf"everystop-slots-{MOMENT}\.png", name)
    with Image.open(io.BytesIO(content)) as picture:
        colors = {color: count for count, color in picture.convert("RGB").getcolors(1 << 24) or ()}
        assert picture.width > 2 * 700
    assert {(0, 114, 178), (230, 159, 0), PANELS[scheme]} <= set(colors)
    assert max(colors, key=lambda color: colors[color]) in {PANELS[scheme], (0, 114, 178)}


def test_the_slot_chart_can_be_saved_as_svg(open_page: Open, server: FakeServer) -> None:
    """What the canvas shows, element for element: bars with their textures, names, the axis, the key, the caption."""
    run = Run(is_static=True)
    server.first = [run.full(400)]
    watched = live(open_page, server)
    name, content = saved(watched, "#save-svg")
    assert re.fullmatch(rf"everystop-slots-{MOMENT}\.svg", name)
    root = ElementTree.fromstring(content)
    names = {
        f"{{{SVG}}}{each}" for each in ("svg", "title", "defs", "rect", "g", "clipPath", "pattern", "path", "text")
    }
    assert {each.tag for each in root.iter()} <= names
    ids = {each.get("id") for each in root.iter() if each.get("id")}
    asked = set(re.findall(r"url\(#(\w+)\)", content.decode()))
    assert asked == ids
    assert any(each.startswith("texture") for each in asked)
    texts = [each.text for each in root.iter(f"{{{SVG}}}text")]
    assert {"slot 0", "slot 7", "prefill", "decode", "held or padding"} <= set(texts)
    assert any(re.fullmatch(r"r\d+", text or "") for text in texts)
    assert texts[-4:-1] == ["made-up", "static", "Everystop 0.1.0"]
    assert re.fullmatch(r"until [0-9-]+ [0-9:]+ UTC", texts[-1] or "")
    fills = {each.get("fill") for each in root.iter(f"{{{SVG}}}rect")}
    assert {"#0072B2", "#E69F00"} <= fills
    assert unlike(watched, content) < 0.02


def test_the_slot_chart_can_be_saved_while_its_table_is_shown(open_page: Open, server: FakeServer, run: Run) -> None:
    watched = live(open_page, server)
    watched.page.click("#pause")
    _, shown = saved(watched, "#save-png")
    watched.page.click("[data-table=slots]")
    _, content = saved(watched, "#save-png")
    with Image.open(io.BytesIO(shown)) as picture, Image.open(io.BytesIO(content)) as other:
        assert other.height == picture.height
        assert abs(other.width - picture.width) < 2 * 40  # a scroll bar
    root = ElementTree.fromstring(saved(watched, "#save-svg")[1])
    assert float(root.get("width") or 0) > 700
    assert "slot 7" in [each.text for each in root.iter(f"{{{SVG}}}text")]


def test_a_picture_of_the_past_says_until_when(open_page: Open, server: FakeServer, run: Run) -> None:
    """Of a view that was moved back, the right edge is not now, nor the moment at which it is saved."""
    watched = live(open_page, server)
    page = watched.page

    def words() -> list[str]:
        root = ElementTree.fromstring(saved(watched, "#save-svg")[1])
        return [each.text or "" for each in root.iter(f"{{{SVG}}}text")]

    def until(texts: list[str]) -> datetime:
        return datetime.fromisoformat(texts[-1].removeprefix("until ").removesuffix(" UTC"))

    now = words()
    assert "now" in now
    page.focus("#slots")
    for key in ("Space", *["a"] * 4):
        page.keyboard.press(key)
    watched.wait_for_drawings()
    past = words()
    assert "now" not in past
    assert not any(text.endswith(" s") for text in past), "what is not live does not look like the last seconds"
    times = [datetime.strptime(text, "%H:%M:%S") for text in past if re.fullmatch(r"\d\d:\d\d:\d\d", text)]
    assert times[-1].time() == until(past).time()
    assert (times[-1] - times[0]).seconds in (29, 30, 31), "the whole width"
    assert 2 <= (until(now) - until(past)).total_seconds() < 30


def test_a_request_that_is_held_ends_where_it_ended(open_page: Open, server: FakeServer) -> None:
    """The mark stands before what is held, as in a report, and wide waste says what it is."""
    server.first = [Run(is_static=True).full(400)]
    watched = live(open_page, server)
    watched.page.click("#steps")
    watched.wait_for_drawings()
    root = ElementTree.fromstring(saved(watched, "#save-svg")[1])
    [waste] = [
        each.get("id") for each in root.iter(f"{{{SVG}}}pattern") if any(rect.get("fill") == "#3B3B3B" for rect in each)
    ]
    texts = list(root.iter(f"{{{SVG}}}text"))
    chart_bottom = max(place(each, "y") for each in texts if (each.text or "").startswith("slot "))
    held = [each for each in root.iter(f"{{{SVG}}}rect") if each.get("fill") == f"url(#{waste})"]
    held = [each for each in held if place(each, "y") < chart_bottom + 15]
    marks = [each for each in texts if each.text == "●"]
    assert len(held) > 10
    assert len(marks) > 10
    assert any(each.text == "held" for each in texts)
    for mark in marks:
        assert not any(is_over(mark, rect) for rect in held)


def place(element: ElementTree.Element, name: str) -> float:
    return float(element.get(name) or "nan")


def is_over(text: ElementTree.Element, rect: ElementTree.Element) -> bool:
    x, y = place(text, "x") - place(rect, "x"), place(text, "y") - place(rect, "y")
    return 0 < x < place(rect, "width") and 0 < y < place(rect, "height")


def unlike(watched: Watched, svg: bytes) -> float:
    """Share of the slot chart's pixels that look clearly different in the picture; no two ways draw letters alike."""
    shown = watched.page.evaluate("document.getElementById('slots').toDataURL()")
    chart = Image.open(io.BytesIO(base64.b64decode(shown.partition(",")[2])))
    ground = Image.new("RGBA", chart.size, PANELS["light"])
    ground.alpha_composite(chart)
    other = watched.page.context.new_page()
    other.set_viewport_size({"width": 1400, "height": 900})
    other.goto("data:image/svg+xml;base64," + base64.b64encode(svg).decode())
    with Image.open(io.BytesIO(other.screenshot())) as picture:
        drawn = picture.convert("RGB").crop((0, 0, *chart.size))
    other.close()
    difference = ImageChops.difference(ground.convert("RGB"), drawn)
    bad = difference.point(lambda value: 255 * (value > 90)).convert("L").point(lambda value: 255 * (value > 0))
    return bad.histogram()[255] / (chart.width * chart.height)


def saved(watched: Watched, button: str) -> tuple[str, bytes]:
    """The name of the file that a button makes, and what is in it."""
    with watched.page.expect_download() as download:
        watched.page.click(button)
    return download.value.suggested_filename, download.value.path().read_bytes()


def test_the_steps_can_be_saved_as_they_were_told(open_page: Open, server: FakeServer, run: Run) -> None:
    name, content = saved(live(open_page, server), "#save-steps")
    assert re.fullmatch(rf"everystop-steps-{MOMENT}\.jsonl", name)
    lines = [json.loads(line) for line in content.splitlines()]
    told = [[*list(line.values())[:-1], [number for row in line["rows"] for number in row]] for line in lines]
    assert told == server.first[0]["steps"]
    assert list(lines[0])[:4] == ["step_id", "scheduled_ns", "now_ns", "execute_ns"]


def test_the_steps_can_be_saved_as_a_trace(open_page: Open, server: FakeServer, run: Run) -> None:
    name, content = saved(live(open_page, server), "#save-trace")
    assert re.fullmatch(rf"everystop-trace-{MOMENT}\.pftrace", name)
    trace = Decoded(content)
    tracks = {track.name for track in trace.tracks.values()} - {""}
    counters = {"tokens in the step", "running", "waiting", "free blocks", "held slots"}
    assert tracks == {"steps", "waiting", *(f"slot {slot}" for slot in range(8))} | counters
    assert set(trace.counts) == counters
    history = next(run.history for run in make_comparison(mixed(12, 5)).runs if run.history is not None)
    assert counters | {"steps", "waiting", "slot 0"} <= {track.name for track in picture_of(history).tracks}
    told = server.first[0]["steps"]
    steps = trace.on("steps", 0)
    assert [one.arguments["step"] for one in steps] == [step[0] for step in told]
    assert [one.end_ns - steps[0].end_ns for one in steps] == [step[2] - told[0][2] for step in told]
    assert {"decode", "mixed"} <= {one.name for one in steps} <= {"decode", "mixed", "prefill"}
    inner = [one for slot in range(8) for one in trace.on(f"slot {slot}", 1)]
    assert sum(one.arguments["tokens"] for one in inner) == sum(sum(step[-1][2::4]) for step in told)
    assert {"prefill", "decode"} <= {one.name for one in inner} <= {"prefill", "decode", "recompute"}
    stays = [one for slot in range(8) for one in trace.on(f"slot {slot}", 0)]
    over = {f"r{one.id}": one.written for one in run.all if one.finish_ns}
    assert {one.name: one.arguments["output_tokens"] for one in stays if "end" in one.arguments} == over
    free = [(now_ns, free) for now_ns, free in trace.counts["free blocks"]]
    assert free[-1][1] == told[-1][10]


def test_a_trace_of_static_batches_shows_held_slots_and_names_no_stranger(open_page: Open, server: FakeServer) -> None:
    run = Run(is_static=True, names=dict.fromkeys(range(200)))
    server.first = [run.full(300, sees="own")]
    _, content = saved(live(open_page, server), "#save-trace")
    trace = Decoded(content)
    names = {one.name for one in trace.slices}
    assert {"held", "another request"} <= names
    assert not any(re.fullmatch(r"r\d+", name) for name in names)
    assert max(value for _, value in trace.counts["held slots"]) > 0


def test_a_trace_can_be_recorded_from_one_press_to_the_next(open_page: Open, server: FakeServer, run: Run) -> None:
    watched = live(open_page, server)
    page = watched.page
    page.click("#record")
    assert page.get_attribute("#record", "aria-pressed") == "true"
    message = run.message(40)
    server.send(message)
    watched.wait_for_text("#recording", f"Recording: {len(message['steps'])} steps.")
    name, content = saved(watched, "#record")
    assert re.fullmatch(rf"everystop-trace-{MOMENT}\.pftrace", name)
    assert [one.arguments["step"] for one in Decoded(content).on("steps", 0)] == [step[0] for step in message["steps"]]
    assert watched.text("#recording") == f"Recorded {len(message['steps'])} steps."
    assert (page.get_attribute("#record", "aria-pressed"), watched.text("#record")) == ("false", "Record")
    page.click("#record")
    page.click("#record")
    assert "nothing was recorded" in watched.text("#recording")


def test_a_recording_is_saved_when_the_stream_begins_anew(open_page: Open, server: FakeServer, run: Run) -> None:
    """The page then forgets what it knew; what was recorded is not lost."""
    watched = live(open_page, server)
    page = watched.page
    page.click("#record")
    message = run.message(40)
    server.send(message)
    watched.wait_for_text("#recording", f"{len(message['steps'])} steps")
    with page.expect_download() as download:
        server.send(run.full())
    content = download.value.path().read_bytes()
    assert [one.arguments["step"] for one in Decoded(content).on("steps", 0)] == [step[0] for step in message["steps"]]
    watched.wait_for_text("#recording", "made anew")
    assert page.get_attribute("#record", "aria-pressed") == "false"


def test_targets_are_typed_in_kept_here_and_judged(open_page: Open, server: FakeServer, run: Run) -> None:
    watched = live(open_page, server)
    page = watched.page
    tile = page.locator(".tile", has=page.locator("#target-ttft"))
    assert not tile.locator(".value").is_visible()
    assert "no targets yet" in tile.inner_text()
    judged = [one for one in run.all if one.finish_ns and one.id % 7 != 5 and one.finish_ns > run.now_ns - 60 * 10**9]
    times = sorted(((one.first_ns or 0) - one.arrival_ns) / 1e6 for one in judged)
    middle_ms = times[len(times) // 2] + 0.001
    kept = sum(time_ms <= middle_ms for time_ms in times)
    assert 0 < kept < len(judged)
    page.fill("#target-ttft", f"{middle_ms:.6f}")
    assert tile.locator(".detail").inner_text() == f"{kept} of {len(judged)}"
    page.fill("#target-itl", "59")
    assert tile.locator(".value").inner_text() == "0 %"
    page.fill("#target-ttft", "")
    page.fill("#target-itl", "60")
    assert tile.locator(".value").inner_text() == "100 %"
    page.reload()
    watched.wait_for_text("#connection", "live")
    watched.wait_for_text(".tile", f"{len(judged)} of {len(judged)}")
    assert page.input_value("#target-itl") == "60"
    page.fill("#target-itl", "-3")
    assert "no targets yet" in tile.inner_text()
    assert page.evaluate("localStorage.length") == 0


def test_two_recent_requests_can_be_chosen_to_stand_side_by_side(open_page: Open, server: FakeServer, run: Run) -> None:
    watched = live(open_page, server, height=2200)
    page = watched.page
    names = [link.get_attribute("title") for link in page.locator("#recent a").all()[:2]]
    first, second = (page.locator("#recent button").nth(i) for i in range(2))
    first.focus()
    page.keyboard.press("Enter")
    assert first.get_attribute("aria-pressed") == "true"
    assert "is chosen" in watched.text("#recent-note")
    page.keyboard.press("Enter")
    assert first.get_attribute("aria-pressed") == "false"
    assert watched.text("#recent-note") == ""
    for name in names:
        server.explanations[name] = explanation(10, id=name)
    first.click()
    second.click()
    watched.wait_for_text("#beside-table", "sum = end to end")
    assert watched.address == f"{server.url}/ui/r/{names[0]}?beside={names[1]}"


def test_a_stream_that_ends_says_why(open_page: Open, server: FakeServer, run: Run) -> None:
    watched = live(open_page, server)
    server.send(run.message(1, end="the server is shutting down"))
    server.end_streams()
    watched.wait_for_text("#connection", "the server is shutting down; trying again")


def test_a_first_minute_in_several_messages_fills_the_sparklines(open_page: Open, server: FakeServer) -> None:
    run = Run()
    server.first = [run.full(400) | {"more": True}, run.message(400) | {"more": True}, run.message(400)]
    watched = live(open_page, server)
    page = watched.page
    watched.wait_for("document.querySelector('.spark').width > 50")
    drawn = page.evaluate(
        """[...document.querySelectorAll(".spark:not([hidden])")].map(canvas => {
            const {width, height} = canvas;
            const {data} = canvas.getContext('2d').getImageData(width * 0.7, 0, width * 0.1, height);
            return data.some(value => value > 0);
        })"""
    )
    assert drawn == [True] * 6
    assert page.evaluate("document.getElementById('waiting').children.length") == len(run.waiting)


def test_each_chart_can_be_read_as_a_table(open_page: Open, server: FakeServer, run: Run) -> None:
    watched = live(open_page, server)
    for panel, expected in {"slots": "decode", "columns": "ms", "blocks": "evictable", "strips": "ago"}.items():
        watched.page.click(f"[data-table={panel}]")
        assert expected in watched.text(f"#{panel}-table tbody")
        assert not watched.page.locator(f"#{panel}-chart").is_visible()


def test_requests_of_others_have_neither_name_nor_link(open_page: Open, server: FakeServer) -> None:
    run = Run(names=dict.fromkeys(range(200)))
    server.first = [run.full(sees="own")]
    watched = live(open_page, server)
    assert "another request" in watched.text("#waiting")
    assert watched.page.locator("#waiting a, #recent a").count() == 0
    assert "your requests only" in watched.text("#server")
    watched.page.click("[data-table=slots]")
    assert "another request" in watched.text("#slots-table")


def test_names_are_texts_whatever_they_look_like(open_page: Open, server: FakeServer) -> None:
    name = "<img src=x onerror=alert(1)>/../?a=b#c%2f"
    server.first = [Run(names=dict.fromkeys(range(200), name)).full()]
    watched = live(open_page, server)
    assert watched.page.locator("main img").count() == 0
    link = watched.page.locator("#recent a").first
    assert link.get_attribute("title") == name
    assert "/ui/r/%3Cimg%20src%3Dx" in link.get_attribute("href")
    link.click()
    watched.expected = ["404"]
    watched.wait_for_text("#name", name)


def test_the_page_asks_for_the_key_and_keeps_it_out_of_addresses(open_page: Open, server: FakeServer, run: Run) -> None:
    server.key = "sesame-1"
    watched = open_page(f"{server.url}/ui")
    watched.expected = ["401"]
    page = watched.page
    page.fill("#key-dialog input", "wrong")
    page.click("#key-dialog button")
    watched.wait_for_text("#key-dialog", "was not accepted")
    page.fill("#key-dialog input", "sesame-1")
    page.keyboard.press("Enter")
    watched.wait_for_text("#connection", "live")
    assert not page.locator("#key-dialog").is_visible()
    assert all("sesame" not in url for url in watched.urls)
    assert ("GET", "/ui/stream", "Bearer sesame-1") in server.asked
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
    page.reload()
    watched.wait_for_text("#connection", "live")


def test_the_page_comes_back_when_the_stream_breaks(open_page: Open, server: FakeServer, run: Run) -> None:
    watched = live(open_page, server)
    server.end_streams()
    watched.wait_for_text("#connection", "trying again")
    server.take_streams()
    watched.wait_for_text("#connection", "live")
    assert [path for _, path, _ in server.asked].count("/ui/stream") == 2


def test_the_theme_can_be_chosen_and_stays(open_page: Open, server: FakeServer, run: Run) -> None:
    watched = live(open_page, server)
    page = watched.page
    background = "getComputedStyle(document.documentElement).backgroundColor"
    assert page.evaluate(background) == "rgb(244, 245, 247)"
    page.select_option("#theme", "dark")
    assert page.evaluate(background) == "rgb(17, 20, 24)"
    page.reload()
    assert page.evaluate(background) == "rgb(17, 20, 24)"


def test_test_prompts_are_sent_and_counted(open_page: Open, server: FakeServer) -> None:
    server.first = [Run().full(can_send_test=True)]
    watched = live(open_page, server)
    watched.page.fill("input[name=number]", "4")
    watched.page.fill("input[name=tokens]", "10")
    watched.page.click("#try-form button[type=submit]")
    watched.wait_for_text("#try-result", "4 of 4 prompts answered, 24 pieces")
    assert sorted(body["max_tokens"] for body in server.bodies) == [2, 5, 7, 10]
    assert all(body["stream"] and body["model"] == "made-up" for body in server.bodies)
    assert len({prompt[:12] for body in server.bodies for prompt in body["prompt"]}) == 4


@pytest.mark.parametrize(("vary", "num_lists"), [(True, 4), (False, 1)])
def test_test_prompts_leave_connections_free(open_page: Open, server: FakeServer, vary: bool, num_lists: int) -> None:
    """A browser opens six to a server, and the stream has one; what does not get one would wait in the browser."""
    server.first = [Run().full(can_send_test=True)]
    watched = live(open_page, server)
    watched.page.fill("input[name=number]", "30")
    watched.page.set_checked("input[name=vary]", vary)
    watched.page.click("#try-form button[type=submit]")
    watched.wait_for_text("#try-result", "30 of 30 prompts answered")
    assert len(server.bodies) == num_lists
    assert sum(len(body["prompt"]) for body in server.bodies) == 30


def test_the_log_holds_thousands_of_decisions_and_few_elements(open_page: Open, server: FakeServer, run: Run) -> None:
    server.first[0]["acts"] = [[run.now_ns, i, f"step {i}: kept 7 decodes"] for i in range(4000)]
    watched = live(open_page, server, height=2200)
    assert "step 3999: kept" in watched.text("#log li >> nth=0")
    assert watched.page.locator("#log li").count() < 40
    watched.page.evaluate("document.getElementById('log').scrollTop = 1e9")
    watched.wait_for_text("#log", "step 0: kept")


def test_many_slots_fit_and_those_never_used_take_no_room(open_page: Open, server: FakeServer) -> None:
    run = Run(num_slots=256)
    server.first = [run.full(300)]
    watched = live(open_page, server)
    most = max(one.slot for one in run.all) + 1
    assert most < 200
    watched.wait_for_text("#slots-idle", f"{256 - -(-most // 8) * 8} more slots not used yet")
    assert watched.page.locator("#slots").bounding_box()["height"] < 320
    watched.wait_for_colors("#slots", DECODE)


def test_with_reduced_motion_charts_change_once_a_second(open_page: Open, server: FakeServer, run: Run) -> None:
    watched = live(open_page, server, reduced_motion="reduce")
    page = watched.page
    page.evaluate("""() => {
        window.drawings = 0;
        const context = document.getElementById("slots").getContext("2d");
        const clear = context.clearRect.bind(context);
        context.clearRect = (...box) => { window.drawings += 1; clear(...box); };
    }""")
    began_ms = page.evaluate("performance.now()")
    for _ in range(15):
        server.send(run.message(2))
        page.wait_for_timeout(60)
    assert page.evaluate("window.drawings") <= 3 + (page.evaluate("performance.now()") - began_ms - 1000) / 1000


def test_the_live_page_is_accessible_in_both_themes_and_widths(open_page: Open, server: FakeServer) -> None:
    server.first = [Run().full(150, can_send_test=True)]
    watched = live(open_page, server)
    for width, scheme in LOOKS:
        watched.look(width, scheme)
        assert watched.page.evaluate("document.documentElement.scrollWidth") <= width
        assert watched.axe() == []


def test_tables_and_definitions_are_accessible(open_page: Open, server: FakeServer) -> None:
    server.first = [Run().full(30)]
    watched = live(open_page, server, width=390)
    for button in watched.page.locator("#definitions, #pause, [data-table]").all():
        button.click()
    assert watched.page.evaluate("document.documentElement.scrollWidth") <= 390
    assert watched.axe() == []


def test_the_dialog_for_the_key_is_accessible(open_page: Open, server: FakeServer) -> None:
    server.key = "sesame"
    watched = open_page(f"{server.url}/ui")
    watched.expected = ["401"]
    watched.page.locator("#key-dialog").wait_for()
    assert watched.axe() == []
