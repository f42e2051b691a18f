from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.browser.explanations import explanation
from tests.browser.fake_server import FakeServer, fake_server
from tests.browser.watched import LOOKS, Watched

pytestmark = pytest.mark.browser

Open = Callable[..., Watched]
NAME = "chatcmpl-7f3a"
DECODE, PREFILL, SLOW = "0,114,178", "230,159,0", "86,180,233"


@pytest.fixture(autouse=True)  # so it begins before the pages, and ends after they are closed
def server() -> Iterator[FakeServer]:
    with fake_server() as running:
        running.explanations[NAME] = explanation()
        yield running


def shown(open_page: Open, server: FakeServer, **options: Any) -> Watched:
    watched = open_page(f"{server.url}/ui/r/{NAME}", **options)
    watched.wait_for_text("#causes", "sum = end to end")
    return watched


def test_the_blame_bar_and_its_table_sum_to_the_whole(open_page: Open, server: FakeServer) -> None:
    watched = shown(open_page, server)
    told = server.explanations[NAME]
    cells = watched.page.locator("#causes tbody tr td:nth-child(4)").all_inner_texts()
    numbers = [int(cell.replace(",", "")) for cell in cells]
    assert numbers[-1] == sum(numbers[:-1]) == told["e2e_ns"]
    parts = watched.page.locator("#blame > span").all()
    widths = [part.bounding_box()["width"] for part in parts]
    whole = watched.page.locator("#blame").bounding_box()["width"]
    assert sum(widths) == pytest.approx(whole, abs=3)
    for width, cause in zip(widths, told["causes"], strict=True):
        assert width == pytest.approx(whole * cause["share"], abs=5)
    assert "modelled share" in watched.text("#causes")


def test_sentence_facts_late_tokens_mates_and_advice_are_told(open_page: Open, server: FakeServer) -> None:
    watched = shown(open_page, server)
    told = server.explanations[NAME]
    assert watched.text("#sentence") == told["sentence"]
    assert watched.text("#state") == "finished"
    for text in ("900 (132 cached)", "1 time", "300 tokens again", "length"):
        assert text in watched.text("#facts")
    late = sum(token["is_outlier"] for token in told["tokens"])
    assert watched.page.locator("#late tbody tr").count() == late
    assert "prefill of 256 tokens" in watched.text("#late")
    link = watched.page.locator("#mates-list a").first
    assert link.get_attribute("href") == "/ui/r/chatcmpl-0077"
    assert "--max-num-seqs" in watched.text("#advice")


def test_ids_of_others_in_a_sentence_are_links(open_page: Open, server: FakeServer) -> None:
    other = "cmpl-0abb61402a597b227a0d6d1d"
    sentence = f"{NAME} waited for {other} <b>(12 tokens)</b> and for another request."
    server.explanations[NAME] = explanation(5, sentence=sentence)
    watched = shown(open_page, server)
    assert watched.text("#sentence") == sentence
    links = watched.page.locator("#sentence a")
    assert [link.get_attribute("href") for link in links.all()] == [f"/ui/r/{other}"]


def test_the_charts_are_drawn_and_zoom(open_page: Open, server: FakeServer) -> None:
    watched = shown(open_page, server, height=1800)
    page = watched.page
    for chart, other in (("#waterfall", PREFILL), ("#mates", PREFILL), ("#tokens", SLOW)):
        watched.wait_for_colors(chart, DECODE, other)
    watched.wait_for_drawings()
    whole = page.evaluate("document.getElementById('waterfall').toDataURL()")
    page.click("#zoom-in")
    watched.wait_for("whole => document.getElementById('waterfall').toDataURL() !== whole", whole)
    page.click("#whole")
    watched.wait_for("whole => document.getElementById('waterfall').toDataURL() === whole", whole)


def test_arrow_keys_go_from_token_to_token(open_page: Open, server: FakeServer) -> None:
    watched = shown(open_page, server)
    page = watched.page
    page.focus("#tokens")
    page.keyboard.press("ArrowRight")
    assert "token 1: the first" in watched.text("#readout")
    page.keyboard.press("ArrowRight")
    assert "token 2: a gap of" in watched.text("#readout")
    page.keyboard.press("ArrowLeft")
    assert "token 1: the first" in watched.text("#readout")


def test_the_life_can_be_read_as_a_table(open_page: Open, server: FakeServer) -> None:
    watched = shown(open_page, server)
    watched.page.click("#life-as-table")
    rows = watched.page.locator("#life-table tbody tr")
    assert rows.count() == len(server.explanations[NAME]["segments"])
    assert "behind r41" in watched.text("#life-table")


def test_a_request_that_is_not_over_is_asked_for_again(open_page: Open, server: FakeServer) -> None:
    server.explanations[NAME] = explanation(20, is_live=True, state="running", finish_reason=None)
    watched = shown(open_page, server)
    assert watched.text("#connection") == "live"
    assert watched.text("#state") == "running"
    server.explanations[NAME] = explanation(30)
    watched.wait_for_text("#connection", "complete")
    assert watched.text("#state") == "finished"
    asked = [path for _, path, _ in server.asked]
    watched.page.wait_for_timeout(1300)
    explain = f"/v1/requests/{NAME}/explain"
    assert [path for _, path, _ in server.asked].count(explain) == asked.count(explain) >= 2


def test_several_choices_can_be_looked_at_one_by_one(open_page: Open, server: FakeServer) -> None:
    choices = [explanation(20, sentence="The first choice."), explanation(50, sentence="The second choice.")]
    server.explanations[NAME] = explanation(50, choices=choices)
    watched = shown(open_page, server)
    assert watched.text("#sentence") == "The second choice."
    watched.page.select_option("#choice", "0")
    assert watched.text("#sentence") == "The first choice."


def test_an_unknown_request_is_said_to_be_unknown(open_page: Open, server: FakeServer) -> None:
    watched = open_page(f"{server.url}/ui/r/nobody")
    watched.expected = ["404"]
    watched.wait_for_text("#sentence", "no such request is known")
    assert watched.text("#state") == "unknown"
    assert not watched.page.locator("#life-panel").is_visible()


def test_the_page_asks_for_the_key(open_page: Open, server: FakeServer) -> None:
    server.key = "sesame"
    watched = open_page(f"{server.url}/ui/r/{NAME}")
    watched.expected = ["401"]
    watched.page.fill("#key-dialog input", "sesame")
    watched.page.keyboard.press("Enter")
    watched.wait_for_text("#causes", "sum = end to end")
    assert all("sesame" not in url for url in watched.urls)


def test_the_request_page_is_accessible_in_both_themes_and_widths(open_page: Open, server: FakeServer) -> None:
    server.explanations[NAME] = explanation(12)
    watched = shown(open_page, server)
    watched.page.click("#life-as-table")
    for width, scheme in LOOKS:
        watched.look(width, scheme)
        assert watched.page.evaluate("document.documentElement.scrollWidth") <= width
        assert watched.axe() == []
