"""What clients of OpenAI's API, of vLLM and of llama.cpp may ask beside an answer, and what it carries."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from tests.server.parrot import CONTROL, EOS, MODEL, ParrotServer, parrot, parse_events, wait_until
from tests.server.test_streaming import CHAT, COMPLETIONS, reasons_of, texts_of

from everystop.observe.request_clock import RequestClock

METRICS = {
    "time_to_first_token_ms",
    "generation_time_ms",
    "queue_time_ms",
    "mean_itl_ms",
    "tokens_per_second",
}
TIMINGS = {
    "cache_n",
    *(f"{kind}_{name}" for kind in ("prompt", "predicted") for name in ("n", "ms", "per_token_ms", "per_second")),
}
PROMPTS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "abcdef"},
    CHAT: {"messages": [{"role": "user", "content": "abcdef"}]},
}


def param_of(answer: tuple[int, Any]) -> str:
    assert answer[0] == 400, answer
    param: str = answer[1]["error"]["param"]
    return param


def shown(server: ParrotServer, prompt: Any, **fields: Any) -> str:
    """The text of an answer, the same streamed and whole."""
    status, body = server.complete(prompt, **fields)
    assert status == 200, body
    events = server.events(COMPLETIONS, {"prompt": prompt, **fields})
    text: str = body["choices"][0]["text"]
    assert "".join(texts_of(events).get(0, [])) == text
    assert reasons_of(events) == {0: [body["choices"][0]["finish_reason"]]}
    return text


@pytest.mark.parametrize(
    ("prompt", "fields", "text"),
    [
        ("abSTOPcd", {"stop": "STOP"}, "abSTOP"),
        ("abSTOPcd", {"stop": ["OPc", "ST"]}, "abST"),
        ("abSTO", {"stop": "STOP"}, "abSTO"),
        ("abcd", {"stop_token_ids": [ord("c")]}, "abc"),
        ([97, CONTROL, 98], {"stop_token_ids": [CONTROL]}, "a"),
        ([97, CONTROL, 98], {"stop_token_ids": [CONTROL], "skip_special_tokens": False}, "a<control>"),
        ("ab", {"skip_special_tokens": False}, "ab<end>"),
    ],
)
def test_the_stop_is_shown_on_request(server: ParrotServer, prompt: Any, fields: dict[str, Any], text: str) -> None:
    assert shown(server, prompt, include_stop_str_in_output=True, **fields) == text


@pytest.mark.parametrize(
    ("prompt", "fields", "text"),
    [
        ([97, CONTROL, 98], {}, "a<control>b"),
        ([97, EOS, 98], {"ignore_eos": True, "max_tokens": 3}, "a<end>b"),
        ([97, CONTROL, 98], {"stop": "l>b"}, "a<contro"),
        ([97, CONTROL, 98], {"stop_token_ids": [CONTROL]}, "a"),
    ],
)
def test_control_tokens_are_shown_on_request(
    server: ParrotServer, prompt: Any, fields: dict[str, Any], text: str
) -> None:
    assert shown(server, prompt, skip_special_tokens=False, spaces_between_special_tokens=False, **fields) == text
    assert "<" not in shown(server, prompt, **{**fields, "stop": None})


def test_a_stop_string_in_shown_control_text_ends_the_request_in_the_engine(server: ParrotServer) -> None:
    before = server.metric("generation_tokens_total")
    fields = {"ignore_eos": True, "max_tokens": 500, "skip_special_tokens": False}
    assert server.complete([97, CONTROL, 98], stop="control", **fields)[1]["choices"][0]["text"] == "a<"
    assert server.metric("generation_tokens_total") - before == 2


@pytest.mark.parametrize("skips", [True, False])
def test_a_stop_that_is_the_text_of_a_control_token_ends_the_answer_unseen(server: ParrotServer, skips: bool) -> None:
    _, body = server.complete([97, CONTROL, 98], stop=["zz", "<control>"], skip_special_tokens=skips)
    assert body["choices"][0]["text"] == "a"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 2
    _, body = server.complete("a<control>b", stop="<control>")
    assert body["choices"][0]["text"] == "a", "spelt out it is a stop like any other"


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("streams", [True, False])
def test_a_stop_that_is_a_control_token_is_shown_where_stops_are(
    server: ParrotServer, skips: bool, streams: bool
) -> None:
    fields = {"stop": ["zz", "<control>"], "skip_special_tokens": skips, "include_stop_str_in_output": True}
    if streams:
        events = server.events("/v1/completions", {"prompt": [97, CONTROL, 98], **fields})
        text = "".join(event["choices"][0]["text"] for event in events[:-1])
    else:
        text = server.complete([97, CONTROL, 98], **fields)[1]["choices"][0]["text"]
    assert text == "a<control>"
    _, body = server.complete([97, 98], stop_token_ids=[98, CONTROL], include_stop_str_in_output=True)
    assert body["choices"][0]["text"] == "ab"
    _, body = server.complete([97, CONTROL], stop_token_ids=[CONTROL], include_stop_str_in_output=True)
    assert body["choices"][0]["text"] == "a", "no stop string, so it is shown as control tokens are"


def test_blanks_between_control_tokens_are_refused_where_they_would_show(server: ParrotServer) -> None:
    assert server.complete("a", spaces_between_special_tokens=True)[0] == 200
    answer = server.complete("a", spaces_between_special_tokens=True, skip_special_tokens=False)
    assert param_of(answer) == "spaces_between_special_tokens"


def test_a_prompt_is_encoded_bare_on_request(server: ParrotServer) -> None:
    assert server.complete(["a", "b"], add_special_tokens=False)[1]["choices"][1]["text"] == "b(bare)"
    assert server.complete([97], add_special_tokens=False)[1]["choices"][0]["text"] == "a"
    assert server.complete("a", add_special_tokens=True)[1]["choices"][0]["text"] == "a"


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, ""),
        ({"add_generation_prompt": True, "continue_final_message": False, "chat_template_kwargs": {}}, ""),
        ({"add_generation_prompt": False}, '{"add_generation_prompt": false}'),
        ({"continue_final_message": True}, '{"add_generation_prompt": false, "continue_final_message": true}'),
        ({"add_special_tokens": True}, '{"add_special_tokens": true}'),
        ({"add_special_tokens": False}, ""),
        ({"chat_template_kwargs": {"thinks": False, "x": None}}, '{"variables": {"thinks": false}}'),
    ],
)
def test_chat_options_reach_the_template(server: ParrotServer, fields: dict[str, Any], options: str) -> None:
    _, body = server.chat("hi", **fields)
    assert body["choices"][0]["message"]["content"] == "hi" + options


def test_an_answer_cannot_both_continue_and_begin(server: ParrotServer) -> None:
    answer = server.chat("hi", add_generation_prompt=True, continue_final_message=True)
    assert param_of(answer) == "continue_final_message"
    assert server.chat("hi", add_generation_prompt=False, continue_final_message=True)[0] == 200


def test_usage_comes_with_every_chunk_on_request(server: ParrotServer) -> None:
    body = {**PROMPTS[COMPLETIONS], "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    events = server.events(COMPLETIONS, body)
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == [1, 2, 3, 4, 5, 6, 7, 7]
    assert all(event["usage"]["prompt_tokens"] == 6 for event in events[:-1])
    assert all(event["usage"]["total_tokens"] == 6 + n for event, n in zip(events[:-1], counts, strict=True))
    assert events[-2]["choices"] == []
    assert events[-2]["usage"] == server.complete("abcdef")[1]["usage"]


def test_continuous_usage_needs_no_usage_at_the_end(server: ParrotServer) -> None:
    body = {**PROMPTS[CHAT], "n": 2, "stream_options": {"continuous_usage_stats": True}}
    events = server.events(CHAT, body)
    assert all(event["choices"] for event in events[:-1])
    assert events[-2]["usage"]["completion_tokens"] == 14


@pytest.mark.parametrize("interval", [1, 2, 3, 4, 100])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_chunk_holds_as_many_tokens_as_are_asked_for(server: ParrotServer, path: str, interval: int) -> None:
    events = server.events(path, {**PROMPTS[path], "stream_interval": interval, "n": 2})
    rest = "bcdef"
    expected = ["a", *(rest[i : i + interval] for i in range(0, len(rest), interval))]
    assert texts_of(events) == {0: expected, 1: expected}
    assert reasons_of(events) == {0: ["stop"], 1: ["stop"]}


def test_gathered_chunks_carry_the_logprobs_of_all_their_tokens(server: ParrotServer) -> None:
    body = {**PROMPTS[COMPLETIONS], "stream_interval": 4, "logprobs": 1}
    chunks = [event["choices"][0]["logprobs"] for event in server.events(COMPLETIONS, body)[:-1]]
    assert [chunk["tokens"] for chunk in chunks if chunk] == [["a"], ["b", "c", "d", "e"], ["f", "<end>"]]
    assert [chunk["text_offset"] for chunk in chunks if chunk] == [[0], [1, 2, 3, 4], [5, 6]]


def test_what_was_gathered_is_sent_before_a_failure() -> None:
    with parrot() as server:
        server.runner.spoil = lambda request_id, at: "non-finite logits" if at == 4 else None
        events = server.events(COMPLETIONS, {**PROMPTS[COMPLETIONS], "stream_interval": 100})
        assert texts_of([*events[:2], "[DONE]"]) == {0: ["a", "bcd"]}
        assert events[-2]["error"]["code"] == "generation_failed"


@pytest.mark.parametrize("stream", [{}, {"stream": False}])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stream_interval", 2),
        ("stream_options", {"include_usage": True}),
        ("stream_options", {"include_usage": False, "continuous_usage_stats": True}),
        ("stream_options", {"include_progress": True}),
    ],
)
def test_what_concerns_streams_needs_one(server: ParrotServer, name: str, value: Any, stream: dict[str, bool]) -> None:
    assert param_of(server.complete("a", **stream, **{name: value})) == name


@pytest.mark.parametrize("stream", [{}, {"stream": False}, {"stream": None}])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "fields",
    [
        {"stream_interval": 1},
        {"stream_options": {}},
        {"stream_options": {"include_usage": False, "continuous_usage_stats": None}},
        {"stream_options": {"include_progress": False, "include_obfuscation": False}},
        {"truncation_side": "left"},
    ],
)
def test_what_asks_for_nothing_needs_nothing(
    server: ParrotServer, path: str, fields: dict[str, Any], stream: dict[str, Any]
) -> None:
    status, answer = server.post(path, {**PROMPTS[path], **stream, **fields})
    assert (status, "usage" in answer) == (200, True)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_every_answer_and_chunk_carries_the_fingerprint(server: ParrotServer, path: str) -> None:
    _, body = server.post(path, PROMPTS[path])
    assert body["system_fingerprint"] == "fp_parrot"
    assert "service_tier" not in body
    options = {"stream_options": {"include_usage": True}, "service_tier": "auto"}
    for event in server.events(path, {**PROMPTS[path], **options})[:-1]:
        assert event["system_fingerprint"] == "fp_parrot"
        assert event["service_tier"] == "default"
    assert server.post(path, {**PROMPTS[path], "service_tier": "default"})[1]["service_tier"] == "default"


def test_usage_has_openais_details(server: ParrotServer) -> None:
    usage = server.chat("details")[1]["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.fixture(scope="module")
def slow() -> Iterator[ParrotServer]:
    """A server whose steps take 5 ms."""
    with parrot() as server:
        server.runner.step_s = 0.005
        yield server


def explained(server: ParrotServer, name: str) -> Any:
    def ask() -> Any:
        return json.loads(server.get(f"/v1/requests/{name}/explain")[1])

    wait_until(lambda: not ask()["is_live"])
    return ask()


def test_metrics_are_those_of_the_explanation(slow: ParrotServer) -> None:
    _, body = slow.complete("abcdef", include_metrics=True)
    metrics, told = body["metrics"], explained(slow, body["id"])
    assert set(metrics) == METRICS
    assert metrics["time_to_first_token_ms"] == pytest.approx(told["ttft_ns"] / 1e6, abs=0.001)
    gaps_ms = [token["gap_ns"] / 1e6 for token in told["tokens"][1:]]
    assert metrics["generation_time_ms"] >= 6 * 5
    assert metrics["generation_time_ms"] == pytest.approx(sum(gaps_ms), abs=0.001)
    assert metrics["mean_itl_ms"] == pytest.approx(metrics["generation_time_ms"] / 6, abs=0.001)
    assert metrics["tokens_per_second"] == pytest.approx(1000 / metrics["mean_itl_ms"], rel=1e-3)
    assert 0 <= metrics["queue_time_ms"] <= metrics["time_to_first_token_ms"]


def test_a_single_token_has_no_gap(slow: ParrotServer) -> None:
    metrics = slow.complete("abcdef", include_metrics=True, max_tokens=1)[1]["metrics"]
    assert metrics["generation_time_ms"] == 0
    assert metrics["mean_itl_ms"] is None
    assert metrics["tokens_per_second"] is None


def test_metrics_of_a_stream_come_with_the_usage(slow: ParrotServer) -> None:
    options = {"include_metrics": True, "stream_options": {"include_usage": True}}
    events = slow.events(CHAT, {**PROMPTS[CHAT], **options})
    assert set(events[-2]["metrics"]) == METRICS
    assert events[-2]["usage"]["completion_tokens"] == 7
    assert all("metrics" not in event for event in events[:-2])
    assert param_of(slow.chat("a", stream=True, include_metrics=True)) == "include_metrics"


def test_metrics_of_several_sequences_are_null(slow: ParrotServer) -> None:
    assert slow.complete("ab", include_metrics=True, n=2)[1]["metrics"] is None
    assert slow.complete(["ab", "c"], include_metrics=True)[1]["metrics"] is None
    assert "metrics" not in slow.complete("ab")[1]


def test_the_server_can_give_metrics_unasked() -> None:
    with parrot(gives_metrics=True) as server:
        assert set(server.complete("ab")[1]["metrics"]) == METRICS
        assert "metrics" not in server.complete("ab", include_metrics=False)[1]
        events = server.events(COMPLETIONS, PROMPTS[COMPLETIONS])
        assert all("metrics" not in event for event in events[:-1])
        events = server.events(COMPLETIONS, {**PROMPTS[COMPLETIONS], "stream_options": {"include_usage": True}})
        assert set(events[-2]["metrics"]) == METRICS


def test_metrics_are_known_of_a_request_that_is_forgotten_at_once() -> None:
    with parrot(explain_history=0) as server:
        for _ in range(20):
            assert server.complete("abc", include_metrics=True)[1]["metrics"]["time_to_first_token_ms"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_in_telling_times_costs_no_answer(server: ParrotServer, stream: bool) -> None:
    def fail(clock: RequestClock) -> None:
        raise RuntimeError("no times today")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RequestClock, "read", fail)
        wishes = {"include_metrics": True, "timings_per_token": True}
        if stream:
            options = {**wishes, "stream_options": {"include_usage": True}}
            event = server.events(COMPLETIONS, {**PROMPTS[COMPLETIONS], **options})[-2]
        else:
            event = server.complete("abcdef", **wishes)[1]
    assert (event["metrics"], event["timings"]) == (None, None)
    assert event["usage"]["completion_tokens"] == 7


def test_timings_are_llama_cpps(slow: ParrotServer) -> None:
    prompt = "timings of a prompt that is found: " + "x" * 61
    slow.complete(prompt, max_tokens=1)
    _, body = slow.complete(prompt, timings_per_token=True, max_tokens=5)
    timings = body["timings"]
    assert set(timings) == TIMINGS
    assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (80, 16, 5)
    assert timings["cache_n"] == body["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert timings["prompt_ms"] >= 5
    assert timings["predicted_ms"] >= 4 * 5
    assert timings["predicted_per_token_ms"] == pytest.approx(timings["predicted_ms"] / 5, abs=0.001)
    assert timings["prompt_per_second"] == pytest.approx(16_000 / timings["prompt_ms"], rel=1e-3)


@pytest.mark.parametrize("usage", [False, True])
def test_timings_of_a_stream_come_with_every_chunk(slow: ParrotServer, usage: bool) -> None:
    options = {"timings_per_token": True, "stream_options": {"include_usage": usage}}
    go_on = slow.runner.hold_after_first_token()
    with closing(slow.connect()) as connection:
        connection.request("POST", CHAT, json.dumps({**PROMPTS[CHAT], **options, "stream": True}))
        answer = connection.getresponse()
        begun = answer.readline()
        go_on.set()
        events = parse_events(begun + answer.read())[:-1]
    slow.runner.before_step = lambda plan: None
    timings = [event["timings"] for event in events]
    assert all(set(each) == TIMINGS for each in timings)
    for name in ("predicted_n", "predicted_ms"):
        values = [each[name] for each in timings]
        assert values == sorted(values)
    assert len({each["prompt_ms"] for each in timings}) == 1
    assert timings[-1]["predicted_n"] == 7
    assert timings[0]["predicted_n"] == 1


def test_timings_are_of_one_sequence(server: ParrotServer) -> None:
    assert param_of(server.complete("ab", timings_per_token=True, n=2)) == "timings_per_token"
    assert param_of(server.complete(["a", "b"], timings_per_token=True)) == "timings_per_token"
    assert param_of(server.chat("ab", timings_per_token=True, n=2)) == "timings_per_token"


def test_completions_take_as_many_logprobs_as_chat(server: ParrotServer) -> None:
    top = server.complete("a", logprobs=20, max_tokens=1)[1]["choices"][0]["logprobs"]["top_logprobs"]
    assert len(top[0]) == 20


def test_the_name_in_the_answer_is_the_one_that_was_asked_for(server: ParrotServer) -> None:
    assert server.complete("a")[1]["model"] == MODEL
    assert server.events(CHAT, {**PROMPTS[CHAT], "model": "alias"})[0]["model"] == "alias"
