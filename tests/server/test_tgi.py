"""Hugging Face TGI's dialect: parameters, whole answers, streams of tokens, errors."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.parrot import CONTROL, EOS, ParrotDecoder, ParrotServer, parrot
from tests.server.schemas import JSON, is_valid, near
from tests.server.test_fields import takes
from tests.server.test_tenants import submitted

from everystop.core.plan import TokenLogprobs
from everystop.core.request import SamplingParams
from everystop.engine.messages import StepOutput
from everystop.server.texts import TokenText
from everystop.server.tgi import GENERATE_PARAMETERS
from everystop.server.tgi_texts import TgiText


def generate(server: ParrotServer, inputs: Any, path: str = "/generate", **parameters: Any) -> tuple[int, Any]:
    return server.post(path, {"inputs": inputs, "parameters": parameters})


def events_of(server: ParrotServer, body: dict[str, Any], path: str = "/generate_stream") -> list[Any]:
    status, headers, answer = server.request("POST", path, body)
    assert status == 200, answer
    assert headers["content-type"].startswith("text/event-stream")
    blocks = answer.decode().split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data:") and block.splitlines() == [block] for block in blocks)
    return [json.loads(block.removeprefix("data:")) for block in blocks]


def stream(server: ParrotServer, inputs: str, **parameters: Any) -> list[Any]:
    return events_of(server, {"inputs": inputs, "parameters": parameters})


def submit_params(**parameters: Any) -> SamplingParams:
    with submitted() as (server, seen):
        assert generate(server, "abc", **parameters)[0] == 200
    return seen[0].params


# Whole answers.


def test_text_comes_alone_unless_details_are_asked_for(server: ParrotServer) -> None:
    assert generate(server, "abc") == (200, {"generated_text": "abc"})


def test_details_tell_every_token_and_why_it_ended(server: ParrotServer) -> None:
    status, answer = generate(server, "ab", details=True)
    assert status == 200
    assert answer["generated_text"] == "ab"
    assert answer["details"] == {
        "finish_reason": "eos_token",
        "generated_tokens": 3,
        "seed": None,
        "prefill": [],
        "tokens": [
            {"id": 97, "text": "a", "logprob": -0.5, "special": False},
            {"id": 98, "text": "b", "logprob": -0.5, "special": False},
            {"id": EOS, "text": "<end>", "logprob": -0.5, "special": True},
        ],
    }


@pytest.mark.parametrize(
    ("parameters", "text", "reason"),
    [
        ({"max_new_tokens": 2}, "ab", "length"),
        ({"stop": ["cd"]}, "abcd", "stop_sequence"),
        ({"stop": ["f", "bc"]}, "abc", "stop_sequence"),
        ({"stop": ["<end>"]}, "abcdef", "stop_sequence"),
        ({}, "abcdef", "eos_token"),
    ],
)
def test_generation_ends_as_tgi_says(server: ParrotServer, parameters: Any, text: str, reason: str) -> None:
    answer = generate(server, "abcdef", details=True, **parameters)[1]
    assert (answer["generated_text"], answer["details"]["finish_reason"]) == (text, reason)
    last = stream(server, "abcdef", details=True, **parameters)[-1]
    assert (last["generated_text"], last["details"]["finish_reason"]) == (text, reason)


def test_at_most_100_tokens_come_where_nothing_is_said(server: ParrotServer) -> None:
    answer = generate(server, "x" * 150, details=True)[1]
    assert answer["details"]["generated_tokens"] == 100
    assert answer["details"]["finish_reason"] == "length"


def test_full_text_begins_with_the_prompt(server: ParrotServer) -> None:
    assert generate(server, "abc", return_full_text=True)[1]["generated_text"] == "abcabc"
    assert stream(server, "abc", return_full_text=True)[-1]["generated_text"] == "abcabc"


def test_truncate_keeps_the_end_of_the_prompt(server: ParrotServer) -> None:
    assert generate(server, "abcdef", truncate=2)[1]["generated_text"] == "ef"
    assert generate(server, "abc", truncate=9)[1]["generated_text"] == "abc"
    last = stream(server, "abcdef", truncate=2, details=True)[-1]
    assert last["details"]["input_length"] == 2


def test_top_tokens_stand_beside_each_token(server: ParrotServer) -> None:
    details = generate(server, "ab", details=True, top_n_tokens=2)[1]["details"]
    assert len(details["top_tokens"]) == len(details["tokens"]) == 3
    assert details["top_tokens"][0] == [
        {"id": 97, "text": "a", "logprob": -0.5, "special": False},
        {"id": 98, "text": "b", "logprob": -1.5, "special": False},
    ]
    assert [len(event["top_tokens"]) for event in stream(server, "ab", top_n_tokens=3)] == [3, 3, 3]
    assert "top_tokens" not in stream(server, "ab")[0]


@pytest.mark.parametrize("path", ["/generate", "/"])
def test_top_tokens_are_refused_where_nothing_tells_them(server: ParrotServer, path: str) -> None:
    for beside in ({}, {"details": False}, {"best_of": 2, "do_sample": True}):
        body = {"inputs": "ab", "parameters": {"top_n_tokens": 2, **beside}}
        status, answer = server.post(path, body)
        assert (status, answer["error_type"]) == (422, "validation")
        assert "top_n_tokens needs details" in answer["error"]
    for named in ({"details": True}, {"decoder_input_details": True}):
        assert server.post(path, {"inputs": "ab", "parameters": {"top_n_tokens": 2, **named}})[0] == 200
    for neutral in (0, None):
        assert server.post(path, {"inputs": "ab", "parameters": {"top_n_tokens": neutral}})[0] == 200


def test_the_root_path_answers_with_a_list_and_the_prompt(server: ParrotServer) -> None:
    assert server.post("/", {"inputs": "abc"}) == (200, [{"generated_text": "abcabc"}])
    body = {"inputs": "abc", "parameters": {"return_full_text": False}, "stream": False}
    assert server.post("/", body) == (200, [{"generated_text": "abc"}])
    assert [event["token"]["text"] for event in events_of(server, body | {"stream": True}, "/")][:3] == ["a", "b", "c"]


def test_tokens_of_the_prompt_are_told_with_what_they_were_worth(server: ParrotServer) -> None:
    details = generate(server, "abé", decoder_input_details=True)[1]["details"]
    assert [(token["id"], token["text"]) for token in details["prefill"]] == [
        (97, "a"), (98, "b"), (0xC3, "\ufffd"), (0xA9, "\ufffd")
    ]  # fmt: skip
    assert details["prefill"][0]["logprob"] is None
    assert all(token["logprob"] < 0 for token in details["prefill"][1:])
    truncated = generate(server, "abcd", decoder_input_details=True, truncate=2, do_sample=True, best_of=2)
    details = truncated[1]["details"]
    assert [token["text"] for token in details["prefill"]] == ["c", "d"]
    assert details["best_of_sequences"][0]["prefill"] == details["prefill"]


# Errors.


@pytest.mark.parametrize(
    ("parameters", "inputs", "said"),
    [
        ({"max_new_tokens": 1000}, "a" * 500, "max_new_tokens 1,000"),
        ({"max_new_tokens": 2000}, "a", "lower max_new_tokens to 1,023"),
        ({"max_new_tokens": 0}, "a", "parameters.max_new_tokens is 0"),
        ({}, "a" * 300_000, "inputs has 300,000 characters"),
        ({"top_n_tokens": 21}, "a", "parameters.top_n_tokens is 21"),
    ],
)
@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/"])
def test_errors_name_tgis_fields(
    server: ParrotServer, path: str, parameters: dict[str, Any], inputs: str, said: str
) -> None:
    status, answer = generate(server, inputs, path, **parameters)
    assert status == 422
    assert said in answer["error"]
    assert "max_tokens" not in answer["error"]


def test_too_many_choices_are_told_by_tgis_name() -> None:
    with parrot(max_num_seqs=1, max_num_queued_reqs=2) as server:
        status, answer = generate(server, "a", do_sample=True, best_of=9)
    assert (status, answer["error_type"]) == (422, "validation")
    assert answer["error"].endswith("or lower best_of")


# Streams.


def test_stream_tells_each_token_and_the_text_with_the_last(server: ParrotServer) -> None:
    events = stream(server, "ab", details=True)
    assert events == [
        {"index": 1, "token": {"id": 97, "text": "a", "logprob": -0.5, "special": False},
         "generated_text": None, "details": None},
        {"index": 2, "token": {"id": 98, "text": "b", "logprob": -0.5, "special": False},
         "generated_text": None, "details": None},
        {"index": 3, "token": {"id": EOS, "text": "<end>", "logprob": -0.5, "special": True},
         "generated_text": "ab",
         "details": {"finish_reason": "eos_token", "generated_tokens": 3, "seed": None, "input_length": 2}},
    ]  # fmt: skip


def test_stream_without_details_ends_with_the_text_alone(server: ParrotServer) -> None:
    last = stream(server, "ab")[-1]
    assert last["details"] is None
    assert last["generated_text"] == "ab"


def test_texts_of_tokens_make_up_the_text(server: ParrotServer) -> None:
    for prompt in ("schön 🚌 ok", "a\nb\u2028c\r\n", "é" * 20):
        events = stream(server, prompt)
        shown = "".join(event["token"]["text"] for event in events if not event["token"]["special"])
        assert shown == events[-1]["generated_text"] == prompt


def test_text_that_ends_inside_a_character_is_the_same_streamed_or_whole(server: ParrotServer) -> None:
    last = stream(server, "aé", max_new_tokens=2)[-1]
    assert last["token"]["text"] == "\ufffd"
    assert last["generated_text"] == generate(server, "aé", max_new_tokens=2)[1]["generated_text"] == "a\ufffd"


# Sampling.


@pytest.mark.parametrize(
    ("body", "temperature"),
    [
        ({}, 1.0),  # TGI samples where there are no parameters at all
        ({"parameters": {}}, 0.0),
        ({"parameters": {"temperature": 1.0}}, 0.0),
        ({"parameters": {"do_sample": True}}, 1.0),
        ({"parameters": {"temperature": 0.5}}, 0.5),
        ({"parameters": {"top_k": 5}}, 1.0),
        ({"parameters": {"top_p": 0.5}}, 1.0),
        ({"parameters": {"top_p": 1.0}}, 0.0),
        ({"parameters": {"repetition_penalty": 1.2}}, 0.0),
    ],
)
def test_tokens_are_sampled_only_where_a_field_means_it(body: dict[str, Any], temperature: float) -> None:
    with submitted() as (server, seen):
        assert server.post("/generate", {"inputs": "abc", **body})[0] == 200
    assert seen[0].params.temperature == temperature


def test_parameters_reach_the_engine() -> None:
    given = {"temperature": 0.7, "top_k": 3, "top_p": 0.9, "repetition_penalty": 1.1, "frequency_penalty": -0.5}
    params = submit_params(**given, seed=2**64 - 1, stop=["x", "y"], max_new_tokens=7)
    assert {name: getattr(params, name) for name in given} == given
    assert (params.seed, params.stop, params.max_tokens) == (2**63 - 1, ("x", "y"), 7)


def test_seed_is_told_where_tokens_are_sampled(server: ParrotServer) -> None:
    assert generate(server, "ab", details=True, do_sample=True, seed=2**64 - 1)[1]["details"]["seed"] == 2**64 - 1
    assert stream(server, "ab", details=True, do_sample=True, seed=7)[-1]["details"]["seed"] == 7
    assert generate(server, "ab", details=True, seed=7)[1]["details"]["seed"] is None, "greedy"
    with submitted() as (fresh, seen):
        details = generate(fresh, "ab", details=True, do_sample=True)[1]["details"]
        fresh_seeds = [message.params.seed for message in seen]
    assert isinstance(details["seed"], int)
    assert fresh_seeds == [None], "the engine draws it"


def test_best_of_gives_the_likeliest_and_the_others_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with parrot() as server:
        execute = server.runner.execute

        def favour_the_second(plan: Any) -> Any:
            result = execute(plan)
            for request_id, told in result.logprobs.items():
                result.logprobs[request_id] = [TokenLogprobs(-1.0 + request_id % 3 * 0.25, 0, one.top) for one in told]
            return result

        monkeypatch.setattr(server.runner, "execute", favour_the_second)
        answer = generate(server, "ab", details=True, do_sample=True, best_of=3)[1]
    assert answer["generated_text"] == "ab"
    assert answer["details"]["tokens"][0]["logprob"] == -0.5
    others = answer["details"]["best_of_sequences"]
    assert [other["tokens"][0]["logprob"] for other in others] == [-1.0, -0.75]
    assert all(other["generated_text"] == "ab" and other["generated_tokens"] == 3 for other in others)
    assert [type(other["seed"]) for other in others] == [int, type(None)], "only that of the first gives it again"


# What is refused, and how.


@pytest.mark.parametrize("name", GENERATE_PARAMETERS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_reader_and_schema_agree(name: str, data: st.DataObject) -> None:
    row = GENERATE_PARAMETERS[name]
    value = data.draw(st.one_of(near(row.schema), JSON).filter(lambda value: value is not None))
    assert takes(row, value) == is_valid(row.schema, value), value


@pytest.mark.parametrize(
    ("parameters", "word"),
    [
        ({"temperature": 0}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"typical_p": 0.9}, "typical_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 5000}, "lower max_new_tokens"),
        ({"truncate": 0}, "truncate"),
        ({"truncate": 1024}, "truncate"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"watermark": True}, "watermark"),
        ({"grammar": {"type": "regex", "value": "a"}}, "grammar"),
        ({"adapter_id": "x"}, "adapter_id"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 2, "do_sample": True, "seed": 1}, "best_of"),
        ({"top_n_tokens": 21}, "top_n_tokens"),
        ({"seed": -1}, "seed"),
        ({"no_such": 1}, "no_such"),
        ({"details": "yes"}, "details"),
        ({"decoder_input_details": 1}, "decoder_input_details"),
        ([], "parameters"),
    ],
)
def test_what_is_not_served_is_refused_by_name(server: ParrotServer, parameters: Any, word: str) -> None:
    for path in ("/generate", "/generate_stream", "/"):
        status, answer = server.post(path, {"inputs": "abc", "parameters": parameters})
        assert status == 422, answer
        assert set(answer) == {"error", "error_type"}
        assert answer["error_type"] == "validation"
        assert word in answer["error"]


@pytest.mark.parametrize("parameters", [{"best_of": 2, "do_sample": True}, {"decoder_input_details": True}])
def test_what_needs_the_whole_answer_is_not_streamed(server: ParrotServer, parameters: dict[str, Any]) -> None:
    status, answer = generate(server, "abc", "/generate_stream", **parameters)
    assert (status, answer["error_type"]) == (422, "validation")
    assert next(iter(parameters)) in answer["error"]


def test_neutral_values_are_taken(server: ParrotServer) -> None:
    neutral = {"typical_p": 1.0, "watermark": False, "decoder_input_details": False, "best_of": 1, "grammar": None,
               "adapter_id": None, "seed": None, "stop": [], "top_n_tokens": 0}  # fmt: skip
    assert generate(server, "abc", **neutral)[0] == 200


@pytest.mark.parametrize("body", [{}, {"inputs": ""}, {"inputs": None}, {"inputs": 7}, {"inputs": ["a"]}, [], "x"])
def test_inputs_must_be_a_text(server: ParrotServer, body: Any) -> None:
    status, answer = server.post("/generate", body)
    assert (status, answer["error_type"]) == (422, "validation")


def test_stream_belongs_to_its_own_path(server: ParrotServer) -> None:
    assert server.post("/generate", {"inputs": "a", "stream": True})[0] == 422
    assert server.post("/generate_stream", {"inputs": "a", "stream": False})[0] == 422
    assert server.post("/generate", {"inputs": "a", "stream": False})[0] == 200


def test_overload_and_failure_have_tgis_words() -> None:
    with parrot(max_num_seqs=1, max_num_queued_reqs=1) as server, server.held(), server.held():
        status, headers, body = server.request("POST", "/generate", {"inputs": "abc"})
        assert (status, json.loads(body)["error_type"]) == (429, "overloaded")
        assert int(headers["retry-after"]) >= 1
    with parrot() as server:
        server.runner.spoil = lambda request_id, position: "nan" if position == 1 else None
        status, answer = generate(server, "abc")
        assert (status, answer["error_type"]) == (424, "generation")
        events = stream(server, "abc")
        assert [set(event) for event in events] == [
            {"index", "token", "generated_text", "details"},
            {"error", "error_type"},
        ]
        assert events[-1]["error_type"] == "generation"


def test_unforeseen_failure_is_a_500_that_says_nothing(server: ParrotServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*args: object, **named: object) -> None:
        raise ValueError("secret at 0x7f001234")

    monkeypatch.setattr(server.service.state.board, "open", explode)
    status, answer = generate(server, "a")
    assert (status, answer["error_type"]) == (500, "unknown")
    assert "secret" not in answer["error"]


def test_loading_and_missing_keys_have_tgis_shape() -> None:
    with parrot(hold_loading=True) as server:
        status, headers, body = server.request("POST", "/generate", {"inputs": "a"})
        assert (status, json.loads(body)["error_type"]) == (503, "unhealthy")
        assert "retry-after" in headers
    with parrot(api_keys=("k",)) as server:
        status, _, body = server.request("GET", "/info")
        assert (status, json.loads(body)["error_type"]) == (401, "authentication")


def test_info_tells_the_limits_that_hold(server: ParrotServer) -> None:
    status, body = server.get("/info")
    info = json.loads(body)
    assert status == 200
    assert info["model_id"] == "parrot"
    assert info["max_input_tokens"] + 1 == info["max_total_tokens"] == 1024
    assert generate(server, "abc", stop=["x"] * info["max_stop_sequences"])[0] == 200
    assert generate(server, "abc", stop=["x"] * (info["max_stop_sequences"] + 1))[0] == 422
    best_of = {"do_sample": True, "best_of": info["max_best_of"] + 1}
    assert generate(server, "abc", **best_of)[0] == 422


def test_a_generation_is_known_by_the_id_of_its_answer(server: ParrotServer) -> None:
    _, headers, _ = server.request("POST", "/generate", {"inputs": "abc"})
    assert server.get(f"/v1/requests/{headers['x-request-id']}")[0] == 200


# The text of a choice, without a server.


class WordTexts:
    """Tokens are the words given; the last is a control token."""

    def __init__(self, *words: str) -> None:
        self._words = [word.encode("utf-8", "surrogateescape") for word in words]
        self.control_ids = frozenset({len(words) - 1})

    def token_bytes(self, token_id: int) -> bytes:
        return self._words[token_id]

    def text_decoder(self) -> WordDecoder:
        return WordDecoder(self)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        raise NotImplementedError

    def spans(self, text: str, *, add_special: bool = True) -> list[tuple[int, int, int]]:
        raise NotImplementedError


class WordDecoder:
    def __init__(self, texts: WordTexts) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        return "" if token_id in self._texts.control_ids else self._decoder.decode(self._texts.token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


def told(texts: WordTexts, *outputs: StepOutput) -> list[TokenText]:
    choice = TgiText(0, texts, SamplingParams())
    tokens = [piece.told for output in outputs for piece in choice.take(output)]
    assert all(token is not None for token in tokens)
    assert choice.finish_reason is not None
    return [token for token in tokens if token is not None]


def test_text_behind_a_stop_string_is_dropped_also_inside_its_token() -> None:
    texts = WordTexts("ab", "cdEFgh", "<end>")
    tokens = told(texts, StepOutput(0, (0,)), StepOutput(0, (1,), finish_reason="stop", stop_reason="bcdE"))
    assert [token.shown.text for token in tokens] == ["ab", "cdE"]
    assert tokens[-1].end is not None
    assert tokens[-1].end.text == "abcdE"


def test_the_first_place_of_a_stop_string_ends_the_text() -> None:
    texts = WordTexts("xx", "yyaayyaa", "<end>")
    tokens = told(texts, StepOutput(0, (0,)), StepOutput(0, (1,), finish_reason="stop", stop_reason="aa"))
    assert tokens[-1].end is not None
    assert tokens[-1].end.text == "xxyyaa"


def test_several_tokens_of_one_step_are_told_one_by_one() -> None:
    texts = WordTexts("a", "b", "<end>")
    tokens = told(texts, StepOutput(0, (0, 1, 2), finish_reason="stop", stop_reason=2))
    assert [(token.shown.text, token.shown.special) for token in tokens] == [
        ("a", False),
        ("b", False),
        ("<end>", True),
    ]
    assert [token.end is not None for token in tokens] == [False, False, True]
    assert tokens[-1].end is not None
    assert (tokens[-1].end.text, tokens[-1].end.num_tokens) == ("ab", 3)


def test_a_control_token_inside_is_told_but_not_in_the_text() -> None:
    texts = WordTexts("a", "b", "<x>")
    tokens = told(texts, StepOutput(0, (0, 2)), StepOutput(0, (1,), finish_reason="length"))
    assert [(token.shown.text, token.shown.special) for token in tokens] == [("a", False), ("<x>", True), ("b", False)]
    assert tokens[-1].end is not None
    assert (tokens[-1].end.text, tokens[-1].end.reason) == ("ab", "length")


def test_control_tokens_of_the_parrot_are_special(server: ParrotServer) -> None:
    status, answer = server.post("/detokenize", {"tokens": [97, CONTROL]})
    assert (status, answer) == (200, {"prompt": "a<control>"})
    assert ParrotDecoder().feed(CONTROL) == ""
