from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.browser.explanations import MS, explanation
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


OTHER = "chatcmpl-99c2"
ANOTHER_SECOND = 10**12 + 10**9


def paired(open_page: Open, server: FakeServer, **options: Any) -> Watched:
    """The page with another request beside its own, received a second later, of 20 tokens."""
    server.explanations[OTHER] = explanation(20, id=OTHER, received_ns=ANOTHER_SECOND)
    watched = open_page(f"{server.url}/ui/r/{NAME}?beside={OTHER}", **options)
    watched.wait_for_text("#beside-table", "sum = end to end")
    return watched


def row_of(watched: Watched, first: str) -> list[str]:
    row = watched.page.locator("#beside-table tbody tr", has=watched.page.get_by_text(first, exact=True))
    return [str(text) for text in row.locator("td").all_inner_texts()]


def test_another_request_can_be_put_beside_and_taken_away(open_page: Open, server: FakeServer) -> None:
    server.explanations[OTHER] = explanation(20, id=OTHER)
    watched = shown(open_page, server)
    page = watched.page
    assert not page.locator("#beside-shown").is_visible()
    assert not page.locator("#beside-clear").is_visible()
    page.fill("#beside-id", f" {OTHER} ")
    page.keyboard.press("Enter")
    watched.wait_for_text("#beside-table", "sum = end to end")
    assert watched.address == f"{server.url}/ui/r/{NAME}?beside={OTHER}"
    assert page.locator("#beside-note a").get_attribute("href") == f"/ui/r/{OTHER}"
    assert row_of(watched, "output tokens") == ["output tokens", "60", "20", "−40"]
    assert row_of(watched, "prompt tokens") == ["prompt tokens", "900", "900", "the same"]
    assert row_of(watched, "sum = end to end")[3].startswith("−")
    assert "(" in row_of(watched, "decode")[1]
    page.click("#beside-clear")
    assert not page.locator("#beside-shown").is_visible()
    assert watched.address == f"{server.url}/ui/r/{NAME}"
    assert page.evaluate("document.activeElement.id") == "beside-id"


def test_both_lives_are_drawn_on_one_axis_that_zooms(open_page: Open, server: FakeServer) -> None:
    watched = paired(open_page, server, height=1800)
    page = watched.page
    watched.wait_for_colors("#beside", DECODE, PREFILL)
    assert "request 2:" in page.get_attribute("#beside", "aria-label")
    watched.wait_for_drawings()
    picture = "document.getElementById('beside').toDataURL()"
    whole = page.evaluate(picture)
    page.focus("#beside")
    page.keyboard.press("w")
    watched.wait_for(f"whole => {picture} !== whole", whole)
    page.click("#beside-whole")
    watched.wait_for(f"whole => {picture} === whole", whole)


def test_keys_go_through_both_lives_from_their_beginnings_or_by_the_clock(open_page: Open, server: FakeServer) -> None:
    watched = paired(open_page, server)
    page = watched.page
    page.focus("#beside")
    page.keyboard.press("ArrowRight")
    assert "0 ms after each was received; 1: received and tokenised" in watched.text("#beside-readout")
    assert "2: received and tokenised" in watched.text("#beside-readout")
    page.keyboard.press("ArrowRight")
    assert "2: queued: no free slot, 2.45 s: behind r41" in watched.text("#beside-readout")
    page.keyboard.press("Escape")
    assert "Point at the chart" in watched.text("#beside-readout")
    page.click("#beside-clock")
    assert page.get_attribute("#beside-clock", "aria-pressed") == "true"
    page.focus("#beside")
    page.keyboard.press("ArrowRight")
    assert "0 ms after the first of them was received" in watched.text("#beside-readout")
    assert "2: not there yet" in watched.text("#beside-readout")


def test_an_unknown_request_beside_leaves_the_page_as_it_is(open_page: Open, server: FakeServer) -> None:
    watched = open_page(f"{server.url}/ui/r/{NAME}?beside=%3Cimg%20src%3Dx%3E")
    watched.expected = ["404"]
    watched.wait_for_text("#beside-note", "no such request is known")
    assert watched.page.locator("main img").count() == 0
    assert watched.page.input_value("#beside-id") == "<img src=x>"
    assert not watched.page.locator("#beside-shown").is_visible()
    assert watched.text("#state") == "finished"
    assert watched.text("#connection") == "complete"


def test_a_request_beside_that_is_not_over_is_asked_for_again(open_page: Open, server: FakeServer) -> None:
    server.explanations[OTHER] = explanation(10, id=OTHER, is_live=True, state="running")
    watched = open_page(f"{server.url}/ui/r/{NAME}?beside={OTHER}")
    watched.wait_for_text("#beside-note", f"2 is {OTHER}, running.")
    server.explanations[OTHER] = explanation(20, id=OTHER)
    watched.wait_for_text("#beside-note", "finished after")
    assert row_of(watched, "output tokens")[2] == "20"


def test_of_several_choices_the_slowest_stands_beside(open_page: Open, server: FakeServer) -> None:
    choices = [explanation(20, id=OTHER), explanation(50, id=OTHER)]
    server.explanations[OTHER] = explanation(50, id=OTHER, choices=choices)
    watched = open_page(f"{server.url}/ui/r/{NAME}?beside={OTHER}")
    watched.wait_for_text("#beside-note", "choice 1, the slowest of 2")
    assert row_of(watched, "output tokens")[2] == "50"


def test_one_key_opens_both_requests(open_page: Open, server: FakeServer) -> None:
    server.key = "sesame"
    server.explanations[OTHER] = explanation(20, id=OTHER)
    watched = open_page(f"{server.url}/ui/r/{NAME}?beside={OTHER}")
    watched.expected = ["401"]
    watched.page.fill("#key-dialog input", "sesame")
    watched.page.keyboard.press("Enter")
    watched.wait_for_text("#beside-table", "sum = end to end")
    assert all("sesame" not in url for url in watched.urls)


def test_a_batch_mate_can_be_put_beside(open_page: Open, server: FakeServer) -> None:
    watched = shown(open_page, server)
    link = watched.page.locator("#mates-list a", has_text="side by side").first
    server.explanations["chatcmpl-0077"] = explanation(10, id="chatcmpl-0077")
    link.click()
    watched.wait_for_text("#beside-note", "2 is chatcmpl-0077")
    assert watched.address == f"{server.url}/ui/r/{NAME}?beside=chatcmpl-0077"


def test_two_requests_are_accessible_in_both_themes_and_widths(open_page: Open, server: FakeServer) -> None:
    watched = paired(open_page, server)
    for width, scheme in LOOKS:
        watched.look(width, scheme)
        assert watched.page.evaluate("document.documentElement.scrollWidth") <= width
        assert watched.axe() == []


def estimates() -> dict[str, Any]:
    """What a server makes of the request: more slots help, and half the tokens a step do not."""

    def tried(label: str, flag: str, ttft_ms: int | None, e2e_ms: int | None) -> dict[str, Any]:
        times = {"ttft_ns": ttft_ms and ttft_ms * MS, "e2e_ns": e2e_ms and e2e_ms * MS}
        return {"label": label, "flag": flag} | times

    told = {
        "about": "Estimates, from the recorded arrivals with step times fitted to 60 steps of this record",
        "remarks": ["* some of its steps are unlike any.", "Changes are against the simulation, which is far off."],
        "is_far_off": True,
        "measured": {"ttft_ns": 2_880 * MS, "e2e_ns": 5_400 * MS},
        "simulated": {"ttft_ns": 2_000 * MS, "e2e_ns": 4_000 * MS},
        "estimates": [
            tried("alone on the server", "", 100, 1_800),
            tried("--policy static (was continuous)", "--policy", None, None),
            tried("--max-num-batched-tokens 128 (was 256)", "--max-num-batched-tokens", 2_000, 4_080),
            tried("--max-num-seqs 16 (was 8) *", "--max-num-seqs", 1_000, 3_000),
        ],
    }
    return explanation() | {"what_if": told}


def offered(open_page: Open, server: FakeServer, **options: Any) -> Watched:
    server.explanations[NAME] = explanation(why_no_what_if=None)
    server.estimates[NAME] = (200, estimates())
    return shown(open_page, server, **options)


def test_estimates_are_made_when_asked_for_and_stand_beside_the_advice(open_page: Open, server: FakeServer) -> None:
    watched = offered(open_page, server)
    page = watched.page
    assert not page.locator("#what-if-shown").is_visible()
    assert "It takes up to a minute" in watched.text("#what-if-note")
    assert "Estimate:" not in watched.text("#advice")
    page.click("#what-if-ask")
    page.locator("#what-if-table").wait_for()
    rows = [row.locator("td").all_inner_texts() for row in page.locator("#what-if-table tbody tr").all()]
    assert rows == [
        ["measured", "2.88 s", "", "5.40 s", ""],
        ["simulated as it was", "2.00 s", "", "4.00 s", ""],
        ["alone on the server", "100 ms", "−95 %", "1.80 s", "−55 %"],
        ["--policy static (was continuous)", "–", "", "–", ""],
        ["--max-num-batched-tokens 128 (was 256)", "2.00 s", "+0 %", "4.08 s", "+2 %"],
        ["--max-num-seqs 16 (was 8) *", "1.00 s", "−50 %", "3.00 s", "−25 %"],
    ]
    assert watched.text("#what-if-note").startswith("Estimates, from the recorded arrivals")
    assert page.locator("#what-if-remarks strong").all_inner_texts() == [estimates()["what_if"]["remarks"][1]]
    says = "Estimate: --max-num-seqs 16 (was 8) *: to first token 1.00 s (−50 %), end to end 3.00 s (−25 %)"
    assert says in watched.text("#advice")
    assert not page.locator("#what-if-ask").is_visible()


def test_an_estimate_that_is_refused_can_be_asked_for_again(open_page: Open, server: FakeServer) -> None:
    watched = offered(open_page, server)
    watched.expected = ["429"]
    server.estimates[NAME] = (429, {"error": {"message": "another estimate is being made"}})
    watched.page.click("#what-if-ask")
    watched.wait_for_text("#what-if-note", "Another estimate is being made.")
    server.estimates[NAME] = (200, estimates())
    watched.page.click("#what-if-ask")
    watched.page.locator("#what-if-table").wait_for()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"why_no_what_if": "this server keeps no record"}, "This server keeps no record."),
        ({"why_no_what_if": None, "is_live": True}, "Estimates can be made when the request is over."),
    ],
)
def test_where_no_estimate_can_be_made_the_page_says_why(
    fields: dict[str, Any], says: str, open_page: Open, server: FakeServer
) -> None:
    server.explanations[NAME] = explanation(**fields)
    watched = shown(open_page, server)
    assert watched.text("#what-if-note") == says
    assert not watched.page.locator("#what-if-ask").is_visible()
    server.explanations[NAME] = explanation(why_no_what_if=None)
    if "is_live" in fields:
        watched.page.locator("#what-if-ask").wait_for()


def test_estimates_are_accessible_in_both_themes_and_widths(open_page: Open, server: FakeServer) -> None:
    watched = offered(open_page, server)
    assert watched.axe() == []
    watched.page.click("#what-if-ask")
    watched.page.locator("#what-if-table").wait_for()
    for width, scheme in LOOKS:
        watched.look(width, scheme)
        assert watched.page.evaluate("document.documentElement.scrollWidth") <= width
        assert watched.axe() == []
