"""Server-sent events: one a token, whole characters, one end a choice, and nothing of a stop string."""

from __future__ import annotations

import http.client
import threading
from typing import Any

import pytest
from tests.server.parrot import CONTROL, EOS, ParrotServer, parrot, wait_until

from everystop.core.plan import StepPlan

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def texts_of(events: list[Any]) -> dict[int, list[str]]:
    """The pieces of each choice's text that are not empty, from either kind of stream."""
    texts: dict[int, list[str]] = {}
    for event in events[:-1]:
        for choice in event["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            texts.setdefault(choice["index"], []).extend([text] if text else [])
    return texts


def reasons_of(events: list[Any]) -> dict[int, list[str]]:
    reasons: dict[int, list[str]] = {}
    for event in events[:-1]:
        for choice in event["choices"]:
            if choice["finish_reason"] is not None:
                reasons.setdefault(choice["index"], []).append(choice["finish_reason"])
    return reasons


def test_each_token_is_its_own_event(server: ParrotServer) -> None:
    events = server.events(COMPLETIONS, {"prompt": "hello"})
    assert texts_of(events) == {0: ["h", "e", "l", "l", "o"]}
    assert reasons_of(events) == {0: ["stop"]}
    assert len(events) == 5 + 1 + 1
    assert events[-1] == "[DONE]"
    assert {(event["id"], event["created"], event["model"]) for event in events[:-1]} == {
        (events[0]["id"], events[0]["created"], "parrot")
    }


def test_chat_opens_every_choice_with_its_role_and_ends_it_with_an_empty_delta(server: ParrotServer) -> None:
    events = server.events(CHAT, {"messages": [{"role": "user", "content": "hey"}], "n": 3})
    for index in range(3):
        own = [choice for event in events[:-1] for choice in event["choices"] if choice["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert [choice["delta"] for choice in own[1:-1]] == [{"content": "h"}, {"content": "e"}, {"content": "y"}]
        assert own[-1] == {"index": index, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert {event["object"] for event in events[:-1]} == {"chat.completion.chunk"}


@pytest.mark.parametrize(
    "text", ["🙂🙃", "สวัสดี", "你好，世界", "a\u2028b\u2029c\u0085d\x0b\x0c\x1ce", 'q"\\\n\r\t\x00', "é"]
)
def test_joined_deltas_are_the_text(server: ParrotServer, text: str) -> None:
    events = server.events(COMPLETIONS, {"prompt": text})
    pieces = texts_of(events)[0]
    assert "".join(pieces) == text
    assert pieces == list(text), "one event for each character, none for half of one"
    assert server.complete(text)[1]["choices"][0]["text"] == text


def test_invalid_bytes_come_as_replacement_characters_at_the_end(server: ParrotServer) -> None:
    events = server.events(COMPLETIONS, {"prompt": [97, *"🙂".encode()[:3]]})
    assert "".join(texts_of(events)[0]) == "a\ufffd"
    assert reasons_of(events) == {0: ["stop"]}


def test_control_tokens_are_counted_and_not_shown(server: ParrotServer) -> None:
    body = {"prompt": [97, CONTROL, 98], "stream_options": {"include_usage": True}}
    events = server.events(COMPLETIONS, body)
    assert texts_of(events) == {0: ["a", "b"]}
    assert events[-2]["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("prompt", "stop", "shown"),
    [
        ("xABCDEFGHIJy", "DEFGHIJ", "xABC"),
        ("abcDEFx", "DEFGHIJ", "abcDEFx"),
        ("abcDEF", "DEFGHIJ", "abcDEF"),
        ("one\n\ntwo", ["two", "\n\n"], "one"),
        ("café🙂end", "é🙂", "caf"),
        ("STOP", "STOP", ""),
        ("aaab", "aab", "a"),
    ],
)
def test_nothing_of_a_stop_string_is_sent(server: ParrotServer, prompt: str, stop: Any, shown: str) -> None:
    events = server.events(COMPLETIONS, {"prompt": prompt, "stop": stop, "stream_options": {"include_usage": True}})
    assert "".join(texts_of(events).get(0, [])) == shown
    assert reasons_of(events) == {0: ["stop"]}
    status, whole = server.complete(prompt, stop=stop)
    assert status == 200
    assert whole["choices"][0]["text"] == shown
    assert whole["usage"] == events[-2]["usage"] | {"prompt_tokens_details": whole["usage"]["prompt_tokens_details"]}


def test_a_stop_string_that_only_the_end_completes_ends_the_answer(server: ParrotServer) -> None:
    """The last token is half a character, which shows once no more can come: until then nothing matches."""
    _, body = server.complete([97, 0xC3, 98], max_tokens=2, stop="\ufffd")
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("a", "stop")


def test_usage_counts_the_token_that_ended_a_stop(server: ParrotServer) -> None:
    _, body = server.complete("abSTOPcd", stop="STOP")
    assert body["usage"]["completion_tokens"] == 6


def test_a_stop_ends_the_request_in_the_engine(server: ParrotServer) -> None:
    before = server.metric("generation_tokens_total")
    server.complete("abSTOPcd", stop="STOP", ignore_eos=True, max_tokens=500)
    assert server.metric("generation_tokens_total") - before == 6


@pytest.mark.parametrize(
    "options", [None, {}, {"include_usage": None}, {"include_usage": False}, {"include_usage": True}]
)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_usage_comes_once_if_asked_for(server: ParrotServer, path: str, n: int, options: Any) -> None:
    body: dict[str, Any] = (
        {"prompt": "abc"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "abc"}]}
    )
    body |= {"n": n, "stream_options": options}
    events = server.events(path, body)
    assert reasons_of(events) == {index: ["stop"] for index in range(n)}
    assert events.count("[DONE]") == 1
    asked = bool(options and options.get("include_usage"))
    with_usage = [event for event in events[:-1] if event.get("usage") is not None]
    assert len(with_usage) == asked
    if asked:
        assert with_usage == [events[-2]]
        assert events[-2]["choices"] == []
        assert events[-2]["usage"]["prompt_tokens"] == 3
        assert events[-2]["usage"]["completion_tokens"] == 4 * n
        assert all(event["usage"] is None for event in events[:-2])
    else:
        assert all("usage" not in event for event in events[:-1])
        assert all(event["choices"] for event in events[:-1])


def test_logprobs_come_with_their_tokens(server: ParrotServer) -> None:
    body = {"messages": [{"role": "user", "content": "aé"}], "logprobs": True, "top_logprobs": 2}
    events = server.events(CHAT, body)
    pieces = [event["choices"][0] for event in events[:-1] if event["choices"][0]["logprobs"]]
    assert [piece["delta"]["content"] for piece in pieces] == ["a", "é", ""]
    assert [len(piece["logprobs"]["content"]) for piece in pieces] == [1, 2, 1]
    assert all(len(token["top_logprobs"]) == 2 for piece in pieces for token in piece["logprobs"]["content"])
    body = {"prompt": "aé", "logprobs": 1}
    chunks = [event["choices"][0]["logprobs"] for event in server.events(COMPLETIONS, body)[:-1]]
    assert [chunk["text_offset"] for chunk in chunks if chunk] == [[0], [1, 1], [2]]


def test_one_of_n_that_ends_first_does_not_end_the_others(server: ParrotServer) -> None:
    events = server.events(COMPLETIONS, {"prompt": ["a", "abcdef"]})
    assert {index: "".join(pieces) for index, pieces in texts_of(events).items()} == {0: "a", 1: "abcdef"}
    assert reasons_of(events) == {0: ["stop"], 1: ["stop"]}


def test_cached_tokens_are_reported(server: ParrotServer) -> None:
    prompt = "a prompt of its own for the cache: " + "x" * 61
    assert server.complete(prompt, max_tokens=1)[1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert server.complete(prompt, max_tokens=1, n=2)[1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 80}
    salted = server.complete(prompt, max_tokens=1, cache_salt="mine")
    assert salted[1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def spoiled(server: ParrotServer, position: int) -> None:
    server.runner.spoil = lambda request_id, at: "non-finite logits" if at == position else None


def test_a_failed_row_ends_its_stream_with_an_error_event() -> None:
    with parrot() as server:
        spoiled(server, 2)
        events = server.events(COMPLETIONS, {"prompt": "abcd"})
        assert texts_of([*events[:2], "[DONE]"]) == {0: ["a", "b"]}
        assert events[-2]["error"]["code"] == "generation_failed"
        assert "non-finite" in events[-2]["error"]["message"]
        assert events[-1] == "[DONE]"
        status, body = server.complete("abcd")
        assert (status, body["error"]["type"]) == (500, "server_error")
        assert server.complete("a", max_tokens=1)[0] == 200


def test_a_failed_row_leaves_other_clients_alone() -> None:
    with parrot() as server:
        server.runner.spoil = lambda request_id, at: "non-finite logits" if (request_id, at) == (0, 3) else None
        server.runner.step_s = 0.005
        answers: list[Any] = []
        threads = [threading.Thread(target=lambda: answers.append(server.complete("abcdefgh"))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(status for status, _ in answers) == [200, 200, 200, 500]
        assert {body["choices"][0]["text"] for status, body in answers if status == 200} == {"abcdefgh"}


def read_event(answer: http.client.HTTPResponse) -> bytes:
    line = answer.readline()
    assert answer.readline() == b"\n"
    return line


def open_stream(
    server: ParrotServer, prompt: str = "abcdefgh", **fields: Any
) -> tuple[http.client.HTTPConnection, Any]:
    """A stream that never ends by itself, whose first event has been read."""
    import json

    connection = server.connect()
    body = {"prompt": prompt, "stream": True, "ignore_eos": True, **fields}
    connection.request("POST", COMPLETIONS, json.dumps(body))
    answer = connection.getresponse()
    read_event(answer)
    return connection, answer


def test_a_dying_engine_ends_every_stream_and_health_says_so() -> None:
    with parrot() as server:
        server.runner.step_s = 0.002
        connection, answer = open_stream(server)
        waiting: list[Any] = []
        thread = threading.Thread(target=lambda: waiting.append(server.complete("abc", ignore_eos=True)))
        thread.start()
        wait_until(lambda: server.metric("num_requests_running") == 2)

        def fail(plan: StepPlan) -> None:
            raise RuntimeError("the roof is on fire")

        server.runner.before_step = fail
        rest = answer.read()
        connection.close()
        thread.join()
        assert rest.endswith(b"data: [DONE]\n\n")
        assert rest.count(b"[DONE]") == 1
        assert b'"code": "engine_failed"' in rest
        assert waiting[0][0] == 503
        assert server.get("/health") == (503, b'{"status":"failed"}')
        status, headers, _ = server.request("POST", COMPLETIONS, {"prompt": "a"})
        assert status == 503
        assert int(headers["retry-after"]) > 0
        assert server.metric("num_requests_running") == 0
        assert any("roof" in line for line in server.says)
        server.stop()
        assert server.join() == 1


def test_a_stuck_engine_turns_health_to_503_and_ends_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everystop.server.stall_clock.LATE_S", 0.3)
    with parrot(stall_timeout=600.0) as server:
        server.runner.step_s = 0.002
        connection, answer = open_stream(server)
        gate = threading.Event()
        server.runner.before_step = lambda plan: (gate.wait(60), None)[1]
        server.service.state.stall_clock.timeout_s = 0.6
        wait_until(lambda: server.get("/health") == (503, b'{"status":"stuck"}'))
        rest = answer.read()
        connection.close()
        assert b'"code": "engine_failed"' in rest
        server.service.state.stall_clock.timeout_s = 600.0
        server.runner.before_step = lambda plan: None
        gate.set()
        wait_until(lambda: server.get("/health")[0] == 200)
        assert server.complete("ab")[1]["choices"][0]["text"] == "ab"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_blocks(stream: bool) -> None:
    """In the queue, while decoding, streaming or not: nothing of it stays."""
    with parrot(max_num_seqs=2) as server:
        server.runner.step_s = 0.002
        connections = []
        for _ in range(5):  # 2 run, 3 wait
            connection = server.connect()
            body = b'{"prompt": "abcdefgh", "ignore_eos": true, "stream": %s}' % (b"true" if stream else b"false")
            connection.request("POST", COMPLETIONS, body)
            connections.append(connection)
        wait_until(lambda: server.metric("num_requests_waiting") == 3 and server.metric("num_requests_running") == 2)
        for connection in connections:
            connection.close()
        wait_until(lambda: server.num_free_blocks == server.num_blocks)
        wait_until(lambda: server.metric("num_requests_running") + server.metric("num_requests_waiting") == 0)
        assert server.service.state.board.num_sequences == 0
        wait_until(lambda: server.service.state.num_open == 0)
        assert server.metric("request_success_total", 'finished_reason="abort"') == 5
        assert server.complete("ok")[1]["choices"][0]["text"] == "ok"


def test_streams_closed_after_a_few_events_leave_nothing() -> None:
    with parrot() as server:
        for i in range(60):
            connection, answer = open_stream(server, n=1 + i % 3)
            for _ in range(i % 3):
                read_event(answer)
            answer.close()
            connection.close()
        wait_until(lambda: not server.scheduler.requests and server.num_free_blocks == server.num_blocks)
        assert server.service.state.board.num_sequences == 0
        assert server.complete("ok")[0] == 200


def test_a_slow_reader_gets_everything(server: ParrotServer) -> None:
    connection, answer = open_stream(server, max_tokens=900)
    events = 1
    while (line := answer.readline()) != b"data: [DONE]\n":
        events += line.startswith(b"data: ")
    connection.close()
    assert events == 900 + 1


def test_end_token_in_mid_stream_is_not_shown(server: ParrotServer) -> None:
    events = server.events(COMPLETIONS, {"prompt": [97, EOS, 98], "ignore_eos": True, "max_tokens": 4})
    assert texts_of(events) == {0: ["a", "b", "a"]}
