"""Explanations are worked out beside the event loop, a few at a time, of a history that goes on meanwhile."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from tests.server.parrot import parrot, wait_until
from tests.server.test_requests import ask, check_sum, send
from tests.server.test_tokenize import aside_of, occupied

from everystop.observe.waiting import WaitingState
from everystop.server import aside, inquiry


def test_nothing_of_it_is_done_on_the_event_loop_and_it_tells_of_the_moment_of_the_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    explain = inquiry.explain
    release, threads = threading.Event(), list[str]()

    def wait_and_explain(*args: Any, **named: Any) -> Any:
        threads.append(threading.current_thread().name)
        assert release.wait(60)
        return explain(*args, **named)

    monkeypatch.setattr(inquiry, "explain", wait_and_explain)
    answers: list[tuple[int, Any]] = []
    with parrot(max_num_seqs=1, explain_history=1) as server:
        with server.held():
            name = next(iter(server.service.state.history.clients))
            wait_until(lambda: ask(server, name, "")[1]["state"] == "running")
            asker = threading.Thread(target=lambda: answers.append(ask(server, name)))
            asker.start()
            wait_until(lambda: bool(threads))
        for _ in range(3):
            assert server.complete("abc")[0] == 200
        wait_until(lambda: ask(server, name, "")[0] == 404)
        release.set()
        asker.join(60)
    [(status, told)] = answers
    assert (status, told["state"], told["id"]) == (200, "running", name)
    check_sum(told)
    assert [thread.startswith("everystop-aside") for thread in threads] == [True]


def test_beyond_the_limit_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    with parrot() as server:
        name = send(server, {"prompt": "abc"})[1]
        with occupied(server, aside.MAX_JOBS):
            wait_until(lambda: aside_of(server).num_jobs == aside.MAX_JOBS)
            monkeypatch.setattr(inquiry.Inquiry, "__init__", lambda *args: pytest.fail("it was looked at"))
            status, headers, answer = server.request("GET", f"/v1/requests/{name}/explain")
            assert (status, json.loads(answer)["error"]["code"]) == (429, "aside_full")
            assert headers["retry-after"] == "1"


def test_where_a_request_stands_is_told_by_its_first_sequence_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting_state, told = inquiry.waiting_state, list[WaitingState]()

    def count(*args: Any, **named: Any) -> WaitingState | None:
        state = waiting_state(*args, **named)
        told.extend([] if state is None else [state])
        return state

    monkeypatch.setattr(inquiry, "waiting_state", count)
    with parrot(max_num_seqs=1) as server, server.held(), server.held(prompt=["ab"] * 64, max_tokens=1):
        name = list(server.service.state.history.clients)[1]

        def look() -> Any:
            told.clear()
            status, looked = ask(server, name, "")
            assert status == 200
            return looked

        wait_until(lambda: look()["waiting"] is not None)  # the engine tells of them after its step
        found = look()
        assert (found["num_waiting_sequences"], found["waiting"]["position"]) == (64, 1)
        assert len(told) == 1
