from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.browser.fake_server import FakeServer, fake_server
from tests.browser.schedule import Run
from tests.browser.watched import LOOKS, Watched

pytestmark = pytest.mark.browser

Open = Callable[..., Watched]
DECODE, PREFILL, SLOW = "0,114,178", "230,159,0", "86,180,233"


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


def test_the_slot_chart_can_be_saved_as_a_picture(open_page: Open, server: FakeServer, run: Run) -> None:
    watched = live(open_page, server)
    with watched.page.expect_download() as download:
        watched.page.click("#save")
    assert download.value.suggested_filename == f"slots-step-{run.step_id}.png"
    assert download.value.path().read_bytes().startswith(b"\x89PNG")


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
        """[...document.querySelectorAll('.spark')].map(canvas => {
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
    watched.wait_for_text("#try-result", "4 of 4 prompts answered")
    assert sorted(body["max_tokens"] for body in server.bodies) == [2, 5, 7, 10]
    assert all(body["stream"] and body["model"] == "made-up" for body in server.bodies)
    assert len({body["messages"][0]["content"][:12] for body in server.bodies}) == 4


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
