"""What the bodies of requests may hold, and what answers they get."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.parrot import EOS, VOCAB, ParrotServer, parrot

from everystop.core.errors import RequestError
from everystop.core.plan import NO_TOKEN_LEFT
from everystop.core.request import SamplingParams
from everystop.server import json_faults, json_shape
from everystop.server.errors import ModelUnknown
from everystop.server.json_body import BYTES_PER_VALUE, MAX_VALUES, parse_json
from everystop.server.json_shape import MAX_DIGITS
from everystop.server.openai_fields import CHAT_FIELDS, COMPLETION_FIELDS, PARAMETER_FIELDS
from everystop.server.protocol import Accepted, check_model

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def error_of(answer: tuple[int, Any], status: int = 400) -> dict[str, Any]:
    assert answer[0] == status, answer
    error: dict[str, Any] = answer[1]["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_completion_has_openais_shape(server: ParrotServer) -> None:
    status, body = server.complete("abc", model="parrot")
    assert status == 200
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["model"] == "parrot"
    assert body["choices"] == [{"index": 0, "text": "abc", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_chat_has_openais_shape(server: ParrotServer) -> None:
    status, body = server.chat("hello", max_completion_tokens=2)
    assert status == 200
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    message = {"role": "assistant", "content": "he", "refusal": None}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
    assert body["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99]], ["ab", "c"]),
    ],
)
def test_prompt_forms_and_indices(server: ParrotServer, prompt: Any, texts: list[str]) -> None:
    status, body = server.complete(prompt, n=2)
    assert status == 200
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * len(texts)))
    assert [choice["text"] for choice in body["choices"]] == [text for text in texts for _ in range(2)]
    assert body["usage"]["prompt_tokens"] == sum(map(len, texts))
    assert body["usage"]["completion_tokens"] == 2 * sum(len(text) + 1 for text in texts)


@pytest.mark.parametrize(
    "prompt",
    ["", [], [[]], [""], ["a", 1], [1, "a"], ["a", [1]], [[1], "a"], [[1], []], [1.5], [True], 1, {}, [[[1]]], [None]],
)
def test_bad_prompts_are_refused(server: ParrotServer, prompt: Any) -> None:
    assert error_of(server.complete(prompt))["param"] == "prompt"


@pytest.mark.parametrize("bad", [-1, VOCAB, VOCAB + 1, 2**31, 2**63, "12", 1.5, True])
@pytest.mark.parametrize("field", ["prompt", "stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_ids_outside_the_vocabulary_are_refused(server: ParrotServer, field: str, bad: Any) -> None:
    if field == "logit_bias" and bad == "12":
        bad = "x"
    value = {str(bad): 1} if field == "logit_bias" else [97, bad]
    fields = {"prompt": "a", field: value}
    assert error_of(server.post(COMPLETIONS, fields))["param"] == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", [1]),
        ("temperature", 101),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.0),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-46),  # 0 as float32: once the end of the engine
        ("repetition_penalty", 1e-38),  # once logits that were not finite
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("seed", 1.5),
        ("seed", 2**64),
        ("n", 0),
        ("n", -1),
        ("n", 10**9),
        ("n", "1"),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("max_tokens", 2**40),
        ("stop", ""),
        ("stop", [""]),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", ["x"] * 17),
        ("stop", "x" * 1025),
        ("stop", {}),
        ("ignore_eos", 1),
        ("stream", "yes"),
        ("logit_bias", []),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"1": "1"}),
        ("logit_bias", {str(i): 1 for i in range(1025)}),
        ("model", 1),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_values_out_of_range_are_refused_by_name(server: ParrotServer, path: str, field: str, value: Any) -> None:
    body = {"prompt": "a"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
    error = error_of(server.post(path, {**body, field: value}))
    assert error["param"].split("[")[0] == field
    assert field in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("temperature", [0, 1e-40, 1e-4, 2, 100])
def test_temperatures_that_are_taken(server: ParrotServer, temperature: float) -> None:
    assert server.complete("a", temperature=temperature)[0] == 200


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "0x1", "01", "1" * 6000])
def test_numbers_that_json_does_not_know_are_refused(server: ParrotServer, number: str) -> None:
    body = f'{{"prompt": "a", "temperature": {number}}}'.encode()
    assert error_of(server.post(COMPLETIONS, body))["code"] == "invalid_json"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"1", b"\xff", b'"a"', b'{"prompt": "a",}', b"[" * 100_000])
def test_bodies_that_are_no_json_objects_are_refused(server: ParrotServer, body: bytes) -> None:
    assert error_of(server.post(COMPLETIONS, body))["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("junk", "num_values"),
    [
        (b"1", 1),
        (b"0.12345678901234567890", 1),
        (b'""', 1),
        (b"[]", 4),
        (b"{}", 4),
        (b"[[[]]]", 10),
        (b'{"a":1}', 7),
        (b'{"a":1,"b":[]}', 14),
    ],
)
def test_more_values_than_can_be_made_at_once_are_refused_undecoded(
    junk: bytes, num_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_items = int(MAX_VALUES / (num_values + (len(junk) + 1) / BYTES_PER_VALUE)) + 1
    monkeypatch.setattr(msgspec.json, "decode", lambda _: {})
    monkeypatch.setattr(json_shape, "has_equal_keys", lambda marks, value: False)
    parse_json(b'{"metadata":0,"store":[' + b",".join([junk] * (num_items - 20)) + b"]}")
    monkeypatch.setattr(msgspec.json, "decode", lambda _: pytest.fail("it was decoded"))
    with pytest.raises(RequestError, match=r"at most 1,350,000 are taken; send less at once") as caught:
        parse_json(b'{"metadata":0,"store":[' + b",".join([junk] * num_items) + b"]}")
    assert caught.value.code == "body_too_complex"


def test_many_keys_are_refused_undecoded_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    body = b'{"metadata":{' + b",".join(b'"%d":1' % key for key in range(400_000)) + b"}}"
    monkeypatch.setattr(msgspec.json, "decode", lambda _: pytest.fail("it was decoded"))
    with pytest.raises(RequestError, match=r"399,999 commas, 2 arrays and objects, 400,001 keys, and 4,") as caught:
        parse_json(body)
    assert caught.value.code == "body_too_complex"


@pytest.mark.parametrize("digits", [MAX_DIGITS + 1, 2_000, 4_300, 5_000])
@pytest.mark.parametrize("number", ["{}", "-{}", "[{}]", '[1,"9",{}]', "0.{}", '{{"b":{}}}'])
def test_long_numbers_are_refused_undecoded(digits: int, number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_faults, "number_refused", lambda body: RequestError("long"))
    monkeypatch.setattr(msgspec.json, "decode", lambda _: pytest.fail("it was decoded"))
    with pytest.raises(RequestError, match="long"):
        parse_json(f'{{"metadata":{number.format("7" * digits)}}}'.encode())


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "one, [two] {three}: and so on " * 1_000_000},
        {"prompt": "314159" * 1_000 + '", 1' + "0" * 5_000},
        {"prompt": list(range(1 << 20))},
        {"messages": [{"role": "user", "content": str(i)} for i in range(100_000)]},
        {"metadata": [10**399, 7]},
    ],
)
def test_what_can_be_served_is_no_complex_body(body: dict[str, Any]) -> None:
    assert parse_json(json.dumps(body).encode()) == body


def test_digits_of_several_numbers_are_not_one_number() -> None:
    body = {"a": {str(i): i for i in range(1_000)}, "b": [7] * 1_000, "c": [[8]] * 500}
    assert parse_json(json.dumps(body, separators=(",", ":")).encode()) == body


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "\\ud83d and more"}',
        b'{"prompt": "\\udc00"}',
        b'{"prompt": "a", "stop": "\\ud83d"}',
        b'{"prompt": ["a", "\\ud83dx"]}',
        b'{"messages": [{"role": "user", "content": "\\ud83d"}]}',
        b'{"prompt": "\xed\xa0\xbd"}',
    ],
)
def test_lone_surrogates_are_refused(server: ParrotServer, body: bytes) -> None:
    path = CHAT if b"messages" in body else COMPLETIONS
    assert error_of(server.post(path, body))["code"] == "invalid_json"
    assert server.complete("ok")[1]["choices"][0]["text"] == "ok"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_null_means_absent_for_every_field(server: ParrotServer, path: str) -> None:
    known = COMPLETION_FIELDS if path == COMPLETIONS else CHAT_FIELDS
    body = dict.fromkeys([*known, "a_field_of_tomorrow"])
    body |= {"prompt": "a"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
    assert server.post(path, body)[0] == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("field", ["a_field_of_tomorrow", "typical_p", "guided_json", "x" * 1000])
def test_unknown_fields_are_refused_by_name(server: ParrotServer, path: str, field: str) -> None:
    body = {"prompt": "a"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
    error = error_of(server.post(path, {**body, field: 1}))
    assert error["code"] == "unsupported_field"
    assert field[:60] in error["message"]


NEUTRAL: dict[str, list[tuple[str, Any]]] = {
    COMPLETIONS: [
        ("echo", False),
        ("logprob_token_ids", []),
        ("best_of", 1),
        ("suffix", ""),
        ("use_beam_search", False),
        ("length_penalty", 1.0),
        ("skip_special_tokens", True),
        ("service_tier", "auto"),
        ("user", "someone"),
        ("metadata", {"a": "b"}),
        ("store", True),
    ],
    CHAT: [
        ("tools", []),
        ("tool_choice", "none"),
        ("parallel_tool_calls", True),
        ("response_format", {"type": "text"}),
        ("modalities", ["text"]),
        ("service_tier", "default"),
        ("store", False),
        ("add_generation_prompt", True),
    ],
}
REFUSED: dict[str, list[tuple[str, Any]]] = {
    COMPLETIONS: [
        ("logprob_token_ids", [5]),
        ("best_of", 2),
        ("suffix", "x"),
        ("use_beam_search", True),
        ("priority", 5),
    ],
    CHAT: [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("functions", [{"name": "f"}]),
        ("modalities", ["text", "audio"]),
        ("chat_template", "{{ messages }}"),
        ("service_tier", "priority"),
    ],
}


@pytest.mark.parametrize(("path", "field", "value"), [(p, *item) for p, items in NEUTRAL.items() for item in items])
def test_neutral_values_are_taken(server: ParrotServer, path: str, field: str, value: Any) -> None:
    body = {"prompt": "a"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
    assert server.post(path, {**body, field: value})[0] == 200


@pytest.mark.parametrize(("path", "field", "value"), [(p, *item) for p, items in REFUSED.items() for item in items])
def test_what_is_not_served_is_refused_by_name(server: ParrotServer, path: str, field: str, value: Any) -> None:
    body = {"prompt": "a"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
    error = error_of(server.post(path, {**body, field: value}))
    assert error["code"] == "unsupported_field"
    assert error["param"] == field


def test_every_parameter_reaches_the_engine(server: ParrotServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A field that were read and dropped would be ignored silently."""
    sent = {
        "min_tokens": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.2,
        "presence_penalty": 0.3, "frequency_penalty": 0.4, "seed": 11, "n": 2, "stop": "zz", "stop_token_ids": [3],
        "ignore_eos": True, "logit_bias": {"5": 2}, "allowed_token_ids": [97], "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }  # fmt: skip
    assert set(sent) == set(PARAMETER_FIELDS)
    seen: list[Any] = []
    submit = server.engine.submit
    monkeypatch.setattr(server.engine, "submit", lambda message: (seen.append(message), submit(message)))
    status, _ = server.complete("a", max_tokens=4, logprobs=2, cache_salt="s", **sent)
    assert status == 200
    params = seen[0].params
    expected = {**sent, "stop": ("zz",), "stop_token_ids": (3,), "logit_bias": ((5, 2.0),), "allowed_token_ids": (97,)}
    for name, value in {**expected, "max_tokens": 4, "logprobs": 2}.items():
        assert getattr(params, name) == value, name
    assert seen[0].cache_salt == "s"


def test_allowed_ids_reach_the_engine_once_each(server: ParrotServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million copies of one id would be read again for each of the n choices, on the engine's thread."""
    seen: list[Any] = []
    submit = server.engine.submit
    monkeypatch.setattr(server.engine, "submit", lambda message: (seen.append(message), submit(message)))
    assert server.complete("a", allowed_token_ids=[98, 97] * 1000)[0] == 200
    assert seen[0].params.allowed_token_ids == (97, 98)


@pytest.mark.parametrize("top_k", [0, -1])
def test_top_k_0_and_minus_1_mean_all(server: ParrotServer, monkeypatch: pytest.MonkeyPatch, top_k: int) -> None:
    seen: list[Any] = []
    submit = server.engine.submit
    monkeypatch.setattr(server.engine, "submit", lambda message: (seen.append(message), submit(message)))
    assert server.complete("a", top_k=top_k)[0] == 200
    assert seen[0].params.top_k == 0


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "status", "num_output"),
    [
        (1021, 3, 200, 3),
        (1022, 2, 200, 2),
        (1022, 3, 400, 0),
        (1023, 1, 200, 1),
        (1023, 2, 400, 0),
        (1024, 1, 400, 0),
        (1025, 1, 400, 0),
        (1023, None, 200, 1),
        (1024, None, 400, 0),
    ],
)
def test_context_limit_to_the_token(
    server: ParrotServer, num_prompt: int, max_tokens: int | None, status: int, num_output: int
) -> None:
    """The parrot's limit is 1,024 tokens: prompt and output must fit, and the message has the right numbers."""
    got, body = server.complete([97] * num_prompt, max_tokens=max_tokens, ignore_eos=True)
    assert got == status
    if status == 200:
        assert body["usage"]["completion_tokens"] == num_output
        assert body["choices"][0]["finish_reason"] == "length"
    else:
        assert body["error"]["code"] == "context_length_exceeded"
        assert f"{num_prompt:,}" in body["error"]["message"]
        assert "1,024" in body["error"]["message"] or "1,023" in body["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_refusal_by_the_engine_is_a_plain_400_that_names_the_field(server: ParrotServer, stream: bool) -> None:
    error = error_of(server.complete([97] * 2000, stream=stream))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    error = error_of(server.complete([97] * 1000, max_tokens=100, stream=stream))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")


@pytest.mark.parametrize("stream", [False, True])
def test_min_tokens_that_do_not_fit_beside_the_prompt_are_refused_with_the_numbers(
    server: ParrotServer, stream: bool
) -> None:
    error = error_of(server.complete("abc", min_tokens=1022, stream=stream))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "min_tokens")
    assert all(number in error["message"] for number in ("min_tokens 1,022", "1,025", "1,024", "1,021"))
    error = error_of(server.complete(["abc", "a" * 1000], min_tokens=25))
    assert "to 24" in error["message"], "of two prompts the one that leaves too little room"
    usage = server.complete("a" * 1020, min_tokens=4, ignore_eos=True)[1]["usage"]
    assert usage["completion_tokens"] == 4


def test_the_length_that_a_model_recommends_gives_way_to_min_tokens() -> None:
    with parrot() as server:
        model = server.service.state.model
        accepted = replace(model.accepted, defaults=SamplingParams(max_tokens=5))
        server.service.state._model = replace(model, accepted=accepted)
        for fields, num_tokens in (({}, 5), ({"min_tokens": 9}, 9), ({"max_tokens": 7}, 7)):
            usage = server.complete("abc", ignore_eos=True, **fields)[1]["usage"]
            assert usage["completion_tokens"] == num_tokens
        assert error_of(server.complete("abc", min_tokens=5000))["param"] == "min_tokens"


def test_text_far_beyond_the_context_is_refused_before_tokenizing(server: ParrotServer) -> None:
    error = error_of(server.complete("a" * 2_000_000))
    assert error["code"] == "context_length_exceeded"


def test_too_many_sequences_are_refused(server: ParrotServer) -> None:
    assert "sequences" in error_of(server.complete(["a"] * 100, n=100))["message"]
    assert "prompts" in error_of(server.complete(["a"] * 10_000))["message"]


@pytest.mark.parametrize("logprobs", [-1, 21, 10**6, True, "1"])
def test_logprobs_of_completions_are_bounded(server: ParrotServer, logprobs: Any) -> None:
    assert error_of(server.complete("a", logprobs=logprobs))["param"] == "logprobs"


@pytest.mark.parametrize("fields", [{"logprobs": True, "top_logprobs": 21}, {"top_logprobs": 2}, {"logprobs": 1}])
def test_logprobs_of_chat_are_bounded(server: ParrotServer, fields: dict[str, Any]) -> None:
    assert error_of(server.chat("a", **fields))["param"] in fields


def test_logprobs_of_completions(server: ParrotServer) -> None:
    _, body = server.complete("h\u00e9", logprobs=2)
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "<end>"]
    assert logprobs["bytes"] == [[104], [195], [169], list(b"<end>")]
    assert logprobs["token_logprobs"] == [-0.5] * 4
    assert logprobs["text_offset"] == [0, 1, 1, 2]
    assert logprobs["top_logprobs"][0] == {"h": -0.5, "i": -1.5}
    assert body["usage"]["completion_tokens"] == 4


def test_logprobs_0_gives_the_chosen_token_alone(server: ParrotServer) -> None:
    logprobs = server.complete("a", logprobs=0)[1]["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "<end>"]
    assert logprobs["top_logprobs"] is None


def test_logprobs_of_chat(server: ParrotServer) -> None:
    _, body = server.chat("ab", logprobs=True, top_logprobs=1, max_tokens=1)
    content = body["choices"][0]["logprobs"]["content"]
    alternative = {"token": "a", "logprob": -0.5, "bytes": [97]}
    assert content == [{**alternative, "top_logprobs": [alternative]}]
    assert server.chat("ab", logprobs=False)[1]["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {}}]},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "x", "cache_control": None}]},
        {"role": "assistant", "content": "x", "refusal": None, "audio": None, "annotations": [], "tool_calls": None},
        {"role": "system", "content": "be brief", "name": "boss"},
        {"role": "developer", "content": "be brief"},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ],
)
def test_message_shapes_that_are_taken(server: ParrotServer, message: dict[str, Any]) -> None:
    assert server.chat([message, {"role": "user", "content": "hi"}])[0] == 200


def test_text_parts_are_joined_by_line_ends(server: ParrotServer) -> None:
    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    _, body = server.chat([{"role": "user", "content": parts}])
    assert body["choices"][0]["message"]["content"] == "x\ny"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        {},
        "hi",
        [[]],
        [[{"role": "user", "content": "a"}]],
        [{"content": "a"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "assistant", "content": None}],
        [{"role": "wizard", "content": "a"}],
        [{"role": 1, "content": "a"}],
        [{"role": "user", "content": 1}],
        [{"role": "user", "content": {"type": "text", "text": "a"}}],
        [{"role": "user", "content": [["a"]]}],
        [{"role": "user", "content": ["a"]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text", "text": 1}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "text", "text": "a", "image": "b"}]}],
        [{"role": "user", "content": "a", "images": []}],
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}],
        [{"role": "user", "content": [{"type": "file", "file": {"file_id": "x"}}]}],
        [{"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}],
    ],
)
def test_message_shapes_that_are_refused(server: ParrotServer, messages: Any) -> None:
    error = error_of(server.post(CHAT, {"messages": messages}))
    assert error["param"].startswith("messages")


def test_template_errors_are_the_clients(server: ParrotServer) -> None:
    twice = [{"role": "user", "content": "a"}] * 2
    assert error_of(server.chat(twice))["message"] == "roles must alternate"


def test_missing_fields_are_named(server: ParrotServer) -> None:
    assert error_of(server.post(COMPLETIONS, {}))["param"] == "prompt"
    assert error_of(server.post(CHAT, {}))["param"] == "messages"


def test_contradictions_are_refused(server: ParrotServer) -> None:
    assert error_of(server.chat("a", max_tokens=1, max_completion_tokens=2))["param"] == "max_tokens"
    assert error_of(server.complete("a", min_tokens=5, max_tokens=2))["param"] == "min_tokens"
    assert error_of(server.complete("a", stream_options={"include_usage": True}))["param"] == "stream_options"
    assert server.chat("abc", max_tokens=1, max_completion_tokens=1)[1]["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("fields", [{"allowed_token_ids": [EOS]}, {"allowed_token_ids": [97], "stop_token_ids": [97]}])
def test_min_tokens_of_which_none_could_be_chosen_are_refused(server: ParrotServer, fields: dict[str, Any]) -> None:
    error = error_of(server.complete("a", min_tokens=1, **fields))
    assert error["param"] == "min_tokens"
    assert "allowed_token_ids names only tokens that end the answer" in error["message"]
    assert server.complete("a", min_tokens=0, **fields)[0] == 200
    more = {**fields, "allowed_token_ids": [98, *fields["allowed_token_ids"]]}
    assert server.complete("a", min_tokens=1, **more)[0] == 200


def test_another_model_is_404(server: ParrotServer) -> None:
    error = error_of(server.complete("a", model="gpt-5"), 404)
    assert error["code"] == "model_not_found"
    assert error["message"] == "the model 'gpt-5' is not served here; send 'parrot' or 'alias', or no model"
    assert server.complete("a", model="alias")[1]["model"] == "alias"


def test_the_error_about_a_model_names_no_more_than_can_be_read() -> None:
    accepted = Accepted(tuple(f"model-{i}" for i in range(30)), VOCAB, 1024)
    with pytest.raises(ModelUnknown) as caught:
        check_model("x" * 1000, accepted)
    message = str(caught.value)
    assert "'model-0' or 'model-1'" in message
    assert "'model-7' (22 more are listed by /v1/models), or no model" in message
    assert len(message) < 300


@pytest.mark.parametrize(
    ("fields", "n"), [({"best_of": 3}, 1), ({"best_of": 3, "n": 2}, 2), ({"best_of": 3, "n": 4}, 4)]
)
def test_best_of_that_is_not_n_is_refused_with_the_numbers(server: ParrotServer, fields: Any, n: int) -> None:
    error = error_of(server.complete("a", **fields))
    assert (error["param"], error["code"]) == ("best_of", "unsupported_field")
    assert f"best_of is 3 and n is {n}, " in error["message"]
    assert "set n to 3" in error["message"]


def test_stop_token_ids_and_ignore_eos(server: ParrotServer) -> None:
    _, body = server.complete("abcd", stop_token_ids=[ord("c")])
    assert body["choices"][0] == {"index": 0, "text": "ab", "logprobs": None, "finish_reason": "stop"}
    assert body["usage"]["completion_tokens"] == 3
    _, body = server.complete([97, EOS, 98], ignore_eos=True, max_tokens=6)
    assert body["choices"][0]["text"] == "abab"
    assert body["choices"][0]["finish_reason"] == "length"


def test_body_json_is_utf8(server: ParrotServer) -> None:
    _, headers, body = server.request("POST", COMPLETIONS, {"prompt": "é🙂 "})
    assert headers["content-type"] == "application/json"
    assert json.loads(body.decode())["choices"][0]["text"] == "é🙂 "


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_no_json_brings_the_server_to_500(server: ParrotServer, path: str, data: st.DataObject) -> None:
    known = sorted(COMPLETION_FIELDS if path == COMPLETIONS else CHAT_FIELDS)
    body = data.draw(st.dictionaries(st.sampled_from(known), JSON, max_size=4))
    if data.draw(st.booleans()):
        body |= {"prompt": "ab"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "ab"}]}
    status, _, answer = server.request("POST", path, body)
    is_late = status == 504 and body.get("timeout") is not None  # a machine that stands still may need more than it
    assert is_late or status in (200, 400, 404), answer
    assert status == 200 or set(json.loads(answer)) == {"error"}


def test_a_chats_errors_name_the_length_that_it_sent(server: ParrotServer) -> None:
    for name in ("max_completion_tokens", "max_tokens"):
        for fields in ({}, {"min_tokens": 5000}):
            error = error_of(server.chat("a", **{name: 2000, **fields}))
            assert f"{name} 2" in error["message"]
            assert error["param"] == ("min_tokens" if fields else name)


@pytest.mark.parametrize("model", ["tgi", "dummy"])
def test_a_name_that_stands_for_any_model_is_the_first_one(server: ParrotServer, model: str) -> None:
    """It is served nowhere, so nobody finds it on the list."""
    assert server.complete("a", model=model)[1]["model"] == "parrot"
    assert server.post("/tokenize", {"prompt": "a", "model": model})[0] == 200
    assert server.get(f"/v1/models/{model}")[0] == 404


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_where_the_settings_leave_no_token(stream: bool) -> None:
    """As a runner tells it; which is no failure, of the request or of anybody."""
    with parrot() as server:
        server.runner.spoil = lambda request_id, position: NO_TOKEN_LEFT if position == 2 else None
        if stream:
            events = server.events(COMPLETIONS, {"prompt": "abcd"})
            choices = [event["choices"][0] for event in events[:-1]]
            assert ("".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]) == ("ab", "stop")
        else:
            status, body = server.complete("abcd", logprobs=1, stop=["zz"])
            assert (status, body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == (200, "ab", "stop")
            assert body["usage"]["completion_tokens"] == 2
        assert server.metric("request_success_total", "stop") == 1
        assert server.num_free_blocks == server.num_blocks
