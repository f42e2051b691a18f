"""Comments in a stream that say how a request waits."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import openai
import pytest
from tests.server.parrot import ParrotServer, parrot, parse_events, wait_until

from everystop.core.policy import PolicySettings, Share, make_policy
from everystop.tenants import Tenant, Tenants

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WAITING = re.compile(rb": waiting, position (\d+) of (\d+), [a-z_]+(, about \d+\.\d s)?\n")
ASKED = {"stream": True, "stream_options": {"include_progress": True}}


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everystop.server.streams.PROGRESS_S", 0.05)


@contextmanager
def busy() -> Iterator[tuple[ParrotServer, Callable[[], None]]]:
    """A server whose one place is taken, and what frees it."""
    with parrot(max_num_seqs=1) as server, server.held() as holder:
        server.runner.step_s = 0.002
        yield server, holder.close


@contextmanager
def held_step(start: int = 0, **options: Any) -> Iterator[tuple[ParrotServer, Callable[[], None]]]:
    """A server whose steps wait once they begin so far in a prompt, and what lets them go on."""
    gate = threading.Event()
    with parrot(**options) as server:
        server.runner.before_step = lambda plan: (
            (gate.wait(60), None)[1] if any(row.start >= start for row in plan.rows) else None
        )
        try:
            yield server, gate.set
        finally:
            gate.set()


@contextmanager
def posted(server: ParrotServer, **fields: Any) -> Iterator[http.client.HTTPResponse]:
    """The answer to a request, as soon as it begins."""
    with closing(server.connect()) as connection:
        connection.request("POST", COMPLETIONS, json.dumps({"prompt": "hello", **fields}))
        with connection.getresponse() as answer:
            yield answer


def first_wait(answer: http.client.HTTPResponse) -> bytes:
    """The first comment that says how the request waits, which the engine tells of when it has taken it."""
    line = answer.readline()
    while line in (b": running\n", b"\n"):
        line = answer.readline()
    return line


def test_waiting_request_is_told_its_place_and_then_served() -> None:
    with busy() as (server, free), posted(server, **ASKED) as answer:
        assert answer.getheader("x-request-id", "").startswith("cmpl-")
        found = WAITING.fullmatch(first_wait(answer))
        assert found is not None
        assert found.group(1, 2) == (b"1", b"1")
        assert answer.readline() == b"\n"
        [client] = [one for one in server.service.state.history.clients.values() if one.first_request_id == 1]
        assert client.first_sent_ns is None, "a comment is no answer"
        free()
        blocks = answer.read().decode().split("\n\n")
        events = parse_events("".join(f"{block}\n\n" for block in blocks if block[:1] == "d").encode())
        assert {block.split(",")[0] for block in blocks if block[:1] == ":"} <= {": waiting", ": running"}
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "hello"
        assert events[-1] == "[DONE]"
        assert client.first_sent_ns is not None


@pytest.mark.parametrize("options", [None, {"include_progress": False}, {"include_progress": None}])
def test_nothing_is_said_unless_asked_for(options: Any) -> None:
    with busy() as (server, free), closing(server.connect()) as connection:
        body = {"prompt": "hello", "stream": True, "stream_options": options}
        connection.request("POST", COMPLETIONS, json.dumps(body))
        wait_until(lambda: server.scheduler.num_waiting == 1)
        time.sleep(0.2)
        free()
        assert b"\n:" not in b"\n" + connection.getresponse().read()


def test_request_that_brings_tokens_has_nothing_to_say() -> None:
    with parrot() as server:
        server.runner.step_s = 0.08
        with posted(server, **ASKED) as answer:
            _, _, answered = answer.read().partition(b"data: ")
            assert answered
            assert b"\n\n:" not in answered


def test_request_that_computes_a_long_prompt_is_kept_alive() -> None:
    with held_step(64) as (server, release), posted(server, prompt="x" * 300, max_tokens=1, **ASKED) as answer:
        wait_until(lambda: answer.readline() == b": running\n")
        release()
        assert answer.read().endswith(b"data: [DONE]\n\n")


def test_refusal_before_the_first_comment_is_a_plain_400() -> None:
    with parrot() as server:
        status, body = server.complete("abc", max_tokens=5000, **ASKED)
        assert (status, body["error"]["param"]) == (400, "max_tokens")


def test_refusal_and_failure_after_the_first_comment_are_events() -> None:
    """The engine is in a long step when the request comes, so it says no only when the stream has begun."""
    policy = make_policy("fair", PolicySettings(shares={"gold": Share(max_running=1, max_queued=0)}))
    tenants = Tenants(by_name={"gold": Tenant()}, user=True)
    with held_step(policy=policy, tenants=tenants) as (server, release), server.held(user="gold"):
        with posted(server, user="gold", **ASKED) as answer:
            assert answer.status == 200
            assert answer.readline().startswith((b": waiting", b": running"))
            assert answer.readline() == b"\n"
            release()
            *_, last_event, done, end = answer.read().split(b"\n\n")
        assert json.loads(last_event.removeprefix(b"data: "))["error"]["code"] == "tenant_queue_full"
        assert (done, end) == (b"data: [DONE]", b"")


def test_client_that_leaves_while_it_waits_is_forgotten_by_the_queue() -> None:
    with busy() as (server, _):
        with posted(server, **ASKED) as answer:
            answer.readline()
            wait_until(lambda: server.scheduler.num_waiting == 1)
        wait_until(lambda: server.scheduler.num_waiting == 0)
        wait_until(lambda: server.service.state.num_open == 1)


@pytest.mark.parametrize("value", [1, "yes", [], {}])
def test_other_values_are_refused(server: ParrotServer, value: Any) -> None:
    status, body = server.complete("a", stream=True, stream_options={"include_progress": value})
    assert (status, body["error"]["param"]) == (400, "stream_options.include_progress")


def test_without_a_stream_there_is_no_progress(server: ParrotServer) -> None:
    status, body = server.complete("a", stream_options={"include_progress": True})
    assert (status, body["error"]["param"]) == (400, "stream_options")


@pytest.mark.parametrize("is_chat", [True, False])
def test_the_official_client_passes_over_comments(is_chat: bool) -> None:
    with (
        busy() as (server, free),
        openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client,
    ):
        options = {"include_progress": True, "include_usage": True}
        server.loop.call_soon_threadsafe(server.loop.call_later, 0.3, free)
        if is_chat:
            stream: Any = client.chat.completions.create(
                model="parrot",
                messages=[{"role": "user", "content": "hello"}],
                stream=True,
                stream_options=options,  # type: ignore[arg-type]
            )
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        else:
            stream = client.completions.create(
                model="parrot",
                prompt="hello",
                stream=True,
                stream_options=options,  # type: ignore[arg-type]
            )
            text = "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
        assert text == "hello"
        clients = server.service.state.history.clients.values()
        assert {one.num for one in clients} == {1}


def test_a_client_of_http_1_0_gets_comments_without_chunks() -> None:
    with busy() as (server, free):
        body = json.dumps({"prompt": "hello", **ASKED}).encode()
        head = f"POST {COMPLETIONS} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(head + body)
            received = connection.recv(65536)
            while b": waiting" not in received:
                received += connection.recv(65536)
            free()
            while chunk := connection.recv(65536):
                received += chunk
        headers, _, events = received.partition(b"\r\n\r\n")
        assert b"chunked" not in headers.lower()
        assert WAITING.search(events) is not None
        assert events.endswith(b"data: [DONE]\n\n")


def test_places_are_those_of_the_policy_not_of_the_arrival() -> None:
    policy = make_policy("shortest", PolicySettings())
    with parrot(max_num_seqs=1, policy=policy) as server, server.held(), contextlib.ExitStack() as stack:
        server.runner.step_s = 0.002
        for length in (300, 200, 100):
            stack.enter_context(server.held(headers={"x-request-id": f"of-{length}"}, prompt="x" * length))

        def places() -> list[int]:
            states = [server.get(f"/v1/requests/of-{length}")[1] for length in (300, 200, 100)]
            return [json.loads(state)["waiting"]["position"] for state in states]

        wait_until(lambda: places() == [3, 2, 1])
        with posted(server, prompt="y", **ASKED) as answer:
            first_wait(answer)
            line = b""
            while not line.startswith(b": waiting, position 1 of 4"):
                line = answer.readline()
                assert line
