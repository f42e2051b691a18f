"""The pages over the real server, its stream and its explanations; only the model is missing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.browser.watched import Watched
from tests.server.parrot import ParrotServer, parrot, wait_until

from everystop.core.policy import PolicySettings
from everystop.observe.recorder import Recorder

pytestmark = pytest.mark.browser

Open = Callable[..., Watched]


@contextmanager
def busy(server: ParrotServer, num: int = 5, key: str | None = None) -> Iterator[list[str]]:
    """Sends requests of 40 steps, which take half a minute until the block is left; their ids come as they end."""
    server.runner.step_s = 0.8
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"prompt": "a passenger with a long prompt " * 3, "max_tokens": 40, "ignore_eos": True}
    names: list[str] = []
    threads = [
        threading.Thread(target=lambda: names.append(server.post("/v1/completions", body, headers)[1]["id"]))
        for _ in range(num)
    ]
    for thread in threads:
        thread.start()
    yield names
    server.runner.step_s = 0.001
    for thread in threads:
        thread.join()


@contextmanager
def visited(open_page: Open, server: ParrotServer, path: str = "/ui", **options: Any) -> Iterator[Watched]:
    """A page of the server, which is closed before the server ends: it would miss it, and say so."""
    watched = open_page(f"http://127.0.0.1:{server.port}{path}", **options)
    yield watched
    watched.close()


def test_a_request_can_be_watched_and_then_asked_why_it_was_slow(open_page: Open) -> None:
    with parrot(max_num_seqs=2) as server, visited(open_page, server, height=2200) as watched:
        watched.wait_for_text("#connection", "live")
        with busy(server) as names:
            watched.wait_for_text("#waiting", "no slot")
            watched.wait_for_text("#verdict", "All 2 slots are busy")
        watched.wait_for_text("#verdict", "nobody waits")
        watched.wait_for_text("#recent", "● length")
        watched.wait_for_text("#log", "finished (length, 40 tokens)")
        watched.page.locator("#columns[aria-label*='budget 64 tokens; last step']").wait_for()
        assert watched.page.locator("#try").is_visible()
        watched.page.locator("#recent a").first.click()
        watched.wait_for_text("#causes", "sum = end to end")
        assert watched.text("#name") in names
        cells = watched.page.locator("#causes tbody tr td:nth-child(4)").all_inner_texts()
        numbers = [int(cell.replace(",", "")) for cell in cells]
        assert numbers[-1] == sum(numbers[:-1])
        assert "to first token" in watched.text("#sentence")
        assert watched.axe() == []


def test_test_prompts_reach_the_model(open_page: Open) -> None:
    with parrot() as server, visited(open_page, server) as watched:
        watched.page.fill("input[name=number]", "3")
        watched.page.click("#try-form button[type=submit]")
        watched.wait_for_text("#try-result", "3 of 3 prompts answered")


def test_test_prompts_are_all_there_at_once(open_page: Open) -> None:
    """None of them waits in the browser, so what it measures is what the server does."""
    with parrot(max_num_seqs=1) as server, visited(open_page, server) as watched:
        watched.wait_for_text("#connection", "live")
        server.runner.step_s = 0.2
        for name, value in {"number": 16, "words": 4, "tokens": 8}.items():
            watched.page.fill(f"input[name={name}]", str(value))
        watched.page.click("#try-form button[type=submit]")
        wait_until(lambda: server.scheduler.num_waiting == 15)
        server.runner.step_s = 0.001
        watched.wait_for_text("#try-result", "16 of 16 prompts answered")


def test_a_test_prompt_that_fails_is_told(open_page: Open) -> None:
    with parrot() as server, visited(open_page, server) as watched:
        watched.expected = ["400"]
        watched.wait_for_text("#connection", "live")
        watched.page.fill("input[name=tokens]", "4000")
        watched.page.uncheck("input[name=vary]")
        watched.page.fill("input[name=number]", "2")
        watched.page.click("#try-form button[type=submit]")
        watched.wait_for_text("#try-result", "0 of 2 prompts answered")
        watched.wait_for_text("#try-result", "2 failed: ")


def test_with_keys_a_caller_sees_its_own_requests_only(open_page: Open) -> None:
    keys = ("mine", "yours")
    with parrot(api_keys=keys, max_num_seqs=2) as server, visited(open_page, server) as watched:
        watched.expected = ["401"]
        watched.page.fill("#key-dialog input", "mine")
        watched.page.keyboard.press("Enter")
        watched.wait_for_text("#server", "your requests only")
        with busy(server, key="yours"):
            watched.wait_for_text("#waiting", "another request")
            watched.wait_for_text("#verdict", "All 2 slots are busy")
        watched.wait_for_text("#verdict", "nobody waits")
        assert watched.page.locator("#recent a").count() == 0
        with busy(server, num=1, key="mine"):
            watched.wait_for_text("#recent", "running")
        watched.wait_for_text("#recent", "● length")
        watched.page.locator("#recent a").first.click()
        watched.wait_for_text("#causes", "sum = end to end")
        assert all("mine" not in url for url in watched.urls)


def test_a_request_of_somebody_else_is_unknown(open_page: Open) -> None:
    with parrot(api_keys=("mine", "yours")) as server:
        with busy(server, num=1, key="yours") as names:
            pass
        watched = open_page(f"http://127.0.0.1:{server.port}/ui/r/{names[0]}")
        watched.expected = ["401", "404"]
        watched.page.fill("#key-dialog input", "mine")
        watched.page.keyboard.press("Enter")
        watched.wait_for_text("#state", "unknown")
        assert "no request" in watched.text("#sentence")


def test_a_request_of_somebody_else_cannot_be_put_beside(open_page: Open) -> None:
    with parrot(api_keys=("mine", "yours")) as server:
        with busy(server, num=1, key="yours") as theirs:
            pass
        with busy(server, num=2, key="mine") as own:
            pass
        watched = open_page(f"http://127.0.0.1:{server.port}/ui/r/{own[0]}?beside={theirs[0]}")
        watched.expected = ["401", "404"]
        watched.page.fill("#key-dialog input", "mine")
        watched.page.keyboard.press("Enter")
        watched.wait_for_text("#beside-note", "no request")
        assert not watched.page.locator("#beside-shown").is_visible()
        watched.page.fill("#beside-id", own[1])
        watched.page.click("#beside-form button[type=submit]")
        watched.wait_for_text("#beside-table", "sum = end to end")
        assert watched.axe() == []


def test_a_server_that_records_estimates_what_would_have_been(open_page: Open, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run.gz", "continuous", PolicySettings())
    with parrot(recorder=recorder, max_num_seqs=2) as server:
        with busy(server, num=3) as names:
            pass
        with visited(open_page, server, f"/ui/r/{names[-1]}") as watched:
            watched.page.click("#what-if-ask")
            watched.wait_for_text("#what-if-table", "alone on the server")
            watched.wait_for_text("#what-if-remarks", "Changes are against the simulation as it was")
            assert watched.page.locator("#what-if-table tbody tr").count() >= 5
            assert watched.axe() == []


def test_scrolling_back_fetches_what_was_before_the_page(open_page: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream tells a moment only; the rest comes when somebody goes there."""
    monkeypatch.setattr("everystop.observe.live_state.WINDOW_NS", 1)
    monkeypatch.setattr("everystop.observe.live_past.STEPS_A_STRETCH", 15)
    with parrot(max_num_seqs=2) as server:
        server.post("/v1/completions", {"prompt": "an early passenger", "max_tokens": 40, "ignore_eos": True})
        with visited(open_page, server, height=2200) as watched:
            watched.wait_for_text("#connection", "live")
            assert "finished" not in watched.text("#log")
            watched.page.locator("#slots").focus()
            watched.page.keyboard.press("a")
            watched.wait_for_text("#past", "Nothing earlier is remembered.")
            watched.wait_for_text("#log", "finished (length, 40 tokens)")
            watched.wait_for_text("#recent", "● length")
