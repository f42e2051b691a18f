"""The live page scrolled back: what it says while the past is fetched, where it cannot be, and when all begins anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.browser.fake_server import FakeServer, fake_server
from tests.browser.schedule import Run
from tests.browser.watched import LOOKS, Watched
from tests.server.parrot import parrot

pytestmark = pytest.mark.browser

Open = Callable[..., Watched]
ENDING = "the server is shutting down and takes no more requests"
NOTHING = "Nothing earlier is remembered."


@pytest.fixture(autouse=True)  # so it begins before the pages, and ends after they are closed
def server() -> Iterator[FakeServer]:
    with fake_server() as running:
        running.first = [Run().full()]
        yield running


def live(open_page: Open, server: FakeServer) -> Watched:
    watched = open_page(f"{server.url}/ui")
    watched.wait_for_text("#connection", "live")
    watched.page.focus("#slots")
    return watched


def num_asked(server: FakeServer) -> int:
    return sum(path.startswith("/ui/past?") for _, path, _ in server.asked)


def test_what_is_being_fetched_is_announced(open_page: Open, server: FakeServer) -> None:
    server.tells_past.clear()
    watched = live(open_page, server)
    watched.page.keyboard.press("a")
    watched.wait_for_text("#past", "Loading what was before")
    assert watched.page.get_attribute("#past", "role") == "status"
    for _ in range(3):
        watched.page.keyboard.press("a")
    server.tells_past.set()
    watched.wait_for_text("#past", NOTHING)
    assert num_asked(server) == 1
    watched.page.keyboard.press("End")
    watched.wait_for("document.getElementById('past').textContent === ''")


@pytest.mark.parametrize(
    ("status", "why"),
    [(503, ENDING), (503, "the engine has failed"), (429, "2 stretches of the past are being made; try again")],
)
def test_a_refusal_is_told_and_asked_again_when_the_view_moves(
    open_page: Open, server: FakeServer, status: int, why: str
) -> None:
    """Not before: a pointer over the chart, or a message of the stream, asks nothing."""
    server.past_error = (status, why)
    watched = live(open_page, server)
    watched.expected = [str(status)]
    watched.page.keyboard.press("a")
    watched.wait_for_text("#past", f"What was before could not be loaded: {why}.")
    watched.page.hover("#slots", position={"x": 300, "y": 40})
    watched.page.hover("#slots", position={"x": 500, "y": 40})
    watched.wait_for_drawings()
    assert num_asked(server) == 1
    server.past_error = None
    watched.page.keyboard.press("a")
    watched.wait_for_text("#past", NOTHING)
    assert num_asked(server) == 2


def test_a_server_that_is_gone_is_told(open_page: Open, server: FakeServer) -> None:
    watched = live(open_page, server)
    watched.expected = ["Failed to load resource"]
    watched.page.route("**/ui/past?*", lambda route: route.abort())
    watched.page.keyboard.press("a")
    watched.wait_for_text("#past", "What was before could not be loaded: Failed to fetch.")
    watched.page.unroute("**/ui/past?*")
    watched.page.keyboard.press("a")
    watched.wait_for_text("#past", NOTHING)


def test_an_answer_for_an_earlier_stream_is_dropped(open_page: Open, server: FakeServer) -> None:
    """The server may be another one by then."""
    server.tells_past.clear()
    watched = live(open_page, server)
    watched.page.keyboard.press("a")
    watched.wait_for_text("#past", "Loading")
    watched.page.keyboard.press("End")
    server.end_streams()
    watched.wait_for_text("#connection", "trying again")
    server.take_streams()
    watched.wait_for_text("#connection", "live")
    assert watched.text("#past") == ""
    with watched.page.expect_response("**/ui/past?*"):
        server.tells_past.set()
    watched.wait_for_drawings()
    assert watched.text("#past") == ""
    watched.page.keyboard.press("a")
    watched.wait_for_text("#past", NOTHING)
    assert num_asked(server) == 2


def test_an_error_is_forgotten_when_the_stream_begins_anew(open_page: Open, server: FakeServer) -> None:
    server.past_error = (503, ENDING)
    watched = live(open_page, server)
    watched.expected = ["503"]
    watched.page.keyboard.press("a")
    watched.wait_for_text("#past", ENDING)
    server.past_error = None
    server.end_streams()
    watched.wait_for_text("#connection", "trying again")
    server.take_streams()
    watched.wait_for_text("#past", NOTHING)


def test_what_it_says_fits_and_is_accessible(open_page: Open, server: FakeServer) -> None:
    server.past_error = (503, ENDING)
    watched = live(open_page, server)
    watched.expected = ["503"]
    watched.page.keyboard.press("a")
    watched.wait_for_text("#past", ENDING)
    for width, scheme in LOOKS:
        watched.look(width, scheme)
        assert watched.page.evaluate("document.documentElement.scrollWidth") <= width
        assert watched.axe() == []


def test_a_real_engine_that_has_failed_tells_no_past(open_page: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everystop.observe.live_state.WINDOW_NS", 1)

    def fail(_: object) -> None:
        raise RuntimeError("the roof is on fire")

    with parrot() as real:
        real.complete("an early passenger")
        watched = open_page(f"http://127.0.0.1:{real.port}/ui")
        watched.expected = ["503"]
        watched.wait_for_text("#connection", "live")
        real.runner.before_step = fail
        real.post("/v1/completions", {"prompt": "abc"})
        watched.wait_for_text("#connection", "trying again")
        watched.page.focus("#slots")
        watched.page.keyboard.press("a")
        watched.wait_for_text("#past", "What was before could not be loaded: the engine")
        watched.close()
