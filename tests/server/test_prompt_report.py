"""What answers say of prompts: echoed text, log-probabilities in both dialects, token ids; and prompts that are cut.

The parrot gives the prompt's token at position p the log-probability -p/8 and rank 2, behind the next letter.
"""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from tests.server.parrot import CONTROL, EOS, ParrotServer, ParrotTexts, parrot
from tests.server.test_requests import check_sum
from tests.server.test_streaming import CHAT, COMPLETIONS, reasons_of, texts_of

from everystop.core.plan import StepPlan, TokenLogprobs
from everystop.core.request import SamplingParams
from everystop.engine.messages import StepOutput
from everystop.server.prompt_report import PromptReport
from everystop.server.wishes import Wishes


def error_of(answer: tuple[int, Any]) -> dict[str, Any]:
    assert answer[0] == 400, answer
    error: dict[str, Any] = answer[1]["error"]
    return error


def choices_of(answer: tuple[int, Any]) -> list[dict[str, Any]]:
    assert answer[0] == 200, answer
    choices: list[dict[str, Any]] = answer[1]["choices"]
    return choices


def streamed(server: ParrotServer, body: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """A streamed completion put together again, by choice: text, and the four lists of its log-probabilities."""
    choices: dict[int, dict[str, Any]] = {}
    for event in server.events(COMPLETIONS, body)[:-1]:
        for part in event["choices"]:
            whole = choices.setdefault(part["index"], {"text": "", "logprobs": {}})
            whole["text"] += part["text"]
            for name, values in (part["logprobs"] or {}).items():
                whole["logprobs"].setdefault(name, []).extend(values or [])
            whole["finish_reason"] = part["finish_reason"]
    return choices


# ------------------------------------------------------------------------------- echo


def test_echo_with_nothing_generated_scores_the_prompt(server: ParrotServer) -> None:
    answer = server.complete("abc", echo=True, max_tokens=0, logprobs=1)
    [choice] = choices_of(answer)
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c"]
    assert logprobs["token_logprobs"] == [None, -0.125, -0.25]
    assert logprobs["top_logprobs"] == [None, {"c": -0.0625, "b": -0.125}, {"d": -0.0625, "c": -0.25}]
    assert logprobs["text_offset"] == [0, 1, 2]
    usage = answer[1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 0, 3)


def test_echo_stands_before_the_answer_in_text_and_lists(server: ParrotServer) -> None:
    [choice] = choices_of(server.complete("abc", echo=True, max_tokens=2, logprobs=0))
    assert choice["text"] == "abcab"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c", "a", "b"]
    assert logprobs["token_logprobs"] == [None, -0.125, -0.25, -0.5, -0.5]
    assert logprobs["top_logprobs"] is None
    assert [choice["text"][i] for i in logprobs["text_offset"]] == logprobs["tokens"]


def test_echo_without_logprobs_is_text_alone(server: ParrotServer) -> None:
    for max_tokens, text in ((0, "abc"), (2, "abcab")):
        [choice] = choices_of(server.complete("abc", echo=True, max_tokens=max_tokens))
        assert (choice["text"], choice["logprobs"]) == (text, None)


def test_echoed_prompt_is_not_searched_for_stops(server: ParrotServer) -> None:
    [choice] = choices_of(server.complete("abSTOPc", echo=True, stop="STOP"))
    assert choice["text"] == "abSTOPcab"


def test_echo_shows_whole_characters_and_control_tokens_as_asked(server: ParrotServer) -> None:
    """The prompt ends inside of a character, which the answer does not finish: it begins anew."""
    prompt = [*"aé".encode(), CONTROL, *"é".encode()[:1]]
    [choice] = choices_of(server.complete(prompt, echo=True, max_tokens=1, logprobs=0))
    assert choice["text"] == "aé\ufffda"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 2, 3]
    [choice] = choices_of(server.complete(prompt, echo=True, max_tokens=1, skip_special_tokens=False))
    assert choice["text"] == "aé<control>\ufffda"


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("prompts", ["abc", ["abc", "z", "defgh"]])
@pytest.mark.parametrize("n", [1, 2])
def test_echo_is_the_same_in_a_stream(
    server: ParrotServer, prompts: Any, n: int, logprobs: int | None, max_tokens: int
) -> None:
    body = {"prompt": prompts, "n": n, "echo": True, "logprobs": logprobs, "max_tokens": max_tokens}
    whole = choices_of(server.post(COMPLETIONS, body))
    texts = prompts if isinstance(prompts, list) else [prompts]
    assert [choice["index"] for choice in whole] == list(range(n * len(texts)))
    parts = streamed(server, body)
    for choice in whole:
        part, text = parts[choice["index"]], texts[choice["index"] // n]
        assert choice["text"] == part["text"] == text + text[:max_tokens]
        assert choice["finish_reason"] == part["finish_reason"]
        for name, values in (choice["logprobs"] or {}).items():
            assert part["logprobs"][name] == (values or [])
        if logprobs is not None:
            num_tokens = len(text) + min(max_tokens, len(text) + 1)
            assert len(choice["logprobs"]["token_logprobs"]) == num_tokens


def test_echo_of_a_long_prompt_comes_whole_over_many_steps(server: ParrotServer) -> None:
    """The parrot's steps have 64 tokens."""
    text = "abcdefgh" * 100
    body = {"prompt": text, "echo": True, "logprobs": 1, "max_tokens": 1}
    [choice] = choices_of(server.post(COMPLETIONS, body))
    assert choice["logprobs"]["token_logprobs"] == [None, *(-i / 8 for i in range(1, 800)), -0.5]
    events = server.events(COMPLETIONS, body)
    assert texts_of(events) == {0: [text, "a"]}
    assert reasons_of(events) == {0: ["length"]}


def test_echo_gathers_with_a_stream_interval(server: ParrotServer) -> None:
    body = {"prompt": "abcd", "echo": True, "max_tokens": 4, "stream_interval": 3}
    assert "".join(texts_of(server.events(COMPLETIONS, body))[0]) == "abcdabcd"


# ------------------------------------------------------------------- prompt_logprobs


def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
    return {str(token): {"logprob": logprob, "rank": rank, "decoded_token": chr(token)}}


def test_prompt_logprobs_have_vllms_shape_in_completions(server: ParrotServer) -> None:
    first, second = choices_of(server.complete(["ab", "c"], prompt_logprobs=1, max_tokens=1))
    assert first["prompt_logprobs"] == [None, entry(98, -0.125, 2) | entry(99, -0.0625, 1)]
    assert second["prompt_logprobs"] == [None]
    assert (first["text"], first["logprobs"]) == ("a", None)


def test_prompt_logprobs_have_vllms_shape_in_chat(server: ParrotServer) -> None:
    status, body = server.chat("ab", prompt_logprobs=0, max_tokens=1)
    assert status == 200
    assert body["prompt_logprobs"] == [None, entry(98, -0.125, 2)]
    assert "prompt_logprobs" not in body["choices"][0]


def test_prompt_token_comes_first_and_once(server: ParrotServer) -> None:
    """Of the best two the second is the prompt's own."""
    [choice] = choices_of(server.complete("ab", prompt_logprobs=2, max_tokens=1))
    assert list(choice["prompt_logprobs"][1].items()) == list((entry(98, -0.125, 2) | entry(99, -0.0625, 1)).items())


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_prompt_logprobs_alone_without_an_answer(server: ParrotServer, path: str) -> None:
    body = {"prompt": "abc"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "abc"}]}
    status, answer = server.post(path, {**body, "prompt_logprobs": 0, "max_tokens": 0})
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["choices"][0]["finish_reason"] == "length"
    where = answer["choices"][0] if path == COMPLETIONS else answer
    assert len(where["prompt_logprobs"]) == 3


def test_both_dialects_at_once_show_what_each_asked(server: ParrotServer) -> None:
    [choice] = choices_of(server.complete("ab", echo=True, logprobs=1, prompt_logprobs=3, max_tokens=0))
    assert choice["logprobs"]["top_logprobs"][1] == {"c": -0.0625, "b": -0.125}
    assert len(choice["prompt_logprobs"][1]) == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"echo": 1}, "echo"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"truncation_side": "right"}, "truncation_side"),
        ({"truncate_prompt_tokens": 2, "truncation_side": "middle"}, "truncation_side"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 2**31}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": True}, "truncate_prompt_tokens"),
        ({"bad_words": "a"}, "bad_words"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": ["a"] * 129}, "bad_words"),
    ],
)
def test_what_cannot_be_is_refused_by_name(server: ParrotServer, fields: dict[str, Any], param: str) -> None:
    assert error_of(server.complete("abc", **fields))["param"] == param


def test_bad_words_reach_the_engine_as_they_are_spelled_inside_a_text(
    server: ParrotServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parrot writes "(bare)" where nothing special is put around a text."""
    seen: list[Any] = []
    submit = server.engine.submit
    monkeypatch.setattr(server.engine, "submit", lambda message: (seen.append(message), submit(message))[1])
    assert server.complete("abc", bad_words=["b", " c"])[0] == 200
    assert seen[0].params.bad_word_ids == (tuple(b"b(bare)"), tuple(b"c(bare)"))


def test_max_tokens_0_needs_something_to_ask_of_a_chat(server: ParrotServer) -> None:
    assert error_of(server.chat("abc", max_tokens=0))["param"] == "max_tokens"
    assert error_of(server.chat("abc", max_completion_tokens=0))["param"] == "max_completion_tokens"


def test_large_answer_is_written_whole(server: ParrotServer) -> None:
    """Beside the event loop: 16,000 numbers."""
    [choice] = choices_of(server.complete("abcdefgh" * 100, echo=True, logprobs=19, max_tokens=0))
    assert len(choice["logprobs"]["top_logprobs"][1]) == 19
    assert choice["logprobs"]["token_logprobs"] == [None, *(-i / 8 for i in range(1, 800))]


def test_request_that_generates_nothing_is_counted_and_explained() -> None:
    with parrot() as server:
        _, headers, _ = server.request("POST", COMPLETIONS, {"prompt": "abc", "echo": True, "max_tokens": 0})
        name = headers["x-request-id"]
        status, body = server.get(f"/v1/requests/{name}/explain")
        told = json.loads(body)
        assert status == 200
        check_sum(told)
        assert (told["num_output_tokens"], told["ttft_ns"], told["tokens"]) == (0, None, [])
        assert server.metric("request_success_total", 'finished_reason="length"') == 1
        assert server.metric("prompt_tokens_total") == 3
        assert server.metric("generation_tokens_total") == 0


def test_prompt_logprobs_bypass_the_cache_and_the_cache_stays_right() -> None:
    text = "abcdefgh" * 10
    with parrot() as server:
        for fields, num_cached in (({}, 0), ({"prompt_logprobs": 0}, 0), ({}, 64), ({"echo": True, "logprobs": 0}, 0)):
            status, body = server.complete(text, max_tokens=1, **fields)
            assert status == 200
            assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == num_cached, fields


def test_failure_inside_a_scored_prompt_fails_the_request_alone() -> None:
    with parrot() as server:
        server.runner.spoil = lambda request_id, position: "logits_not_finite"
        assert server.complete("abc", echo=True, logprobs=1, max_tokens=1)[0] == 500
        server.runner.spoil = lambda request_id, position: None
        assert server.complete("abc", echo=True, logprobs=1, max_tokens=1)[0] == 200


def test_client_that_leaves_while_its_prompt_is_scored_is_forgotten() -> None:
    with parrot() as server:
        begun, release = threading.Event(), threading.Event()

        def wait(plan: StepPlan) -> None:
            if plan.prompt_logits:
                begun.set()
                release.wait(60)

        server.runner.before_step = wait
        with server.held(prompt="a" * 500, echo=True, logprobs=0):
            assert begun.wait(60)
        release.set()
        assert server.complete("abc")[0] == 200
        assert not server.scheduler.requests
        assert server.num_free_blocks == server.num_blocks


# ---------------------------------------------------------------------------- token ids


def test_token_ids_of_prompt_and_answer(server: ParrotServer) -> None:
    for prompts, expected in (("ab", [[97, 98]]), ([[97], [98, 99]], [[97], [98, 99]])):
        choices = choices_of(server.complete(prompts, return_token_ids=True, n=2))
        assert [choice["prompt_token_ids"] for choice in choices] == [ids for ids in expected for _ in range(2)]
        assert [choice["token_ids"] for choice in choices] == [[*ids, EOS] for ids in expected for _ in range(2)]


def test_token_ids_in_chat_stand_where_vllm_has_them(server: ParrotServer) -> None:
    status, body = server.chat("ab", return_token_ids=True, max_tokens=2)
    assert status == 200
    assert body["prompt_token_ids"] == [97, 98]
    assert body["choices"][0]["token_ids"] == [97, 98]
    assert "token_ids" not in server.chat("ab")[1]["choices"][0]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("fields", [{}, {"stop": "de"}, {"stream_interval": 3}, {"n": 2}])
def test_token_ids_in_a_stream_are_those_of_the_whole(server: ParrotServer, path: str, fields: dict[str, Any]) -> None:
    text = "abécdef"
    body = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    events = server.events(path, {**body, **fields, "return_token_ids": True})[:-1]
    ids: dict[int, list[int]] = {}
    for event in events:
        for choice in event["choices"]:
            ids.setdefault(choice["index"], []).extend(choice.get("token_ids", []))
    whole = {name: value for name, value in fields.items() if name != "stream_interval"}
    choices = choices_of(server.post(path, {**body, **whole, "return_token_ids": True}))
    assert ids == {choice["index"]: choice["token_ids"] for choice in choices}
    places = [event if path == CHAT else event["choices"][0] for event in events]
    told = [place["prompt_token_ids"] for place in places if "prompt_token_ids" in place]
    assert told == [list(text.encode())] * len(choices)


def test_tokens_are_named_by_their_ids(server: ParrotServer) -> None:
    fields = {"return_tokens_as_token_ids": True, "max_tokens": 1}
    [choice] = choices_of(server.complete("ab", echo=True, logprobs=1, **fields))
    assert choice["logprobs"]["tokens"] == ["token_id:97", "token_id:98", "token_id:97"]
    assert list(choice["logprobs"]["top_logprobs"][1]) == ["token_id:99", "token_id:98"]
    assert choice["text"] == "aba"
    _, body = server.chat("ab", logprobs=True, top_logprobs=1, **fields)
    [token] = body["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["top_logprobs"][0]["token"]) == ("token_id:97", "token_id:97")


def test_names_by_id_need_tokens_that_are_named(server: ParrotServer) -> None:
    for answer in (
        server.complete("ab", return_tokens_as_token_ids=True),
        server.complete("ab", return_tokens_as_token_ids=True, prompt_logprobs=1),
        server.chat("ab", return_tokens_as_token_ids=True, logprobs=False),
    ):
        status, body = answer
        assert status == 400
        assert (body["error"]["param"], body["error"]["code"]) == ("return_tokens_as_token_ids", "conflicting_fields")
        assert "logprobs" in body["error"]["message"]
    for neutral in (None, False):
        assert server.complete("ab", return_tokens_as_token_ids=neutral)[0] == 200
        assert server.chat("ab", return_tokens_as_token_ids=neutral)[0] == 200
    assert server.complete("ab", return_tokens_as_token_ids=True, logprobs=0)[0] == 200


# --------------------------------------------------------------------------- truncation


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, "fgh"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, "fgh"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, "abc"),
        ({"truncate_prompt_tokens": 8}, "abcdefgh"),
        ({"truncate_prompt_tokens": 9}, "abcdefgh"),
        ({"truncate_prompt_tokens": -1}, "abcdefgh"),
    ],
)
def test_prompt_is_cut_to_so_many_tokens(server: ParrotServer, fields: dict[str, Any], kept: str) -> None:
    for prompt in ("abcdefgh", list(b"abcdefgh")):
        answer = server.complete(prompt, echo=True, max_tokens=0, **fields)
        assert choices_of(answer)[0]["text"] == kept
        assert answer[1]["usage"]["prompt_tokens"] == len(kept)
    _, body = server.chat("abcdefgh", max_tokens=1, return_token_ids=True, **fields)
    assert bytes(body["prompt_token_ids"]).decode() == kept


@pytest.mark.parametrize(("max_tokens", "num_kept"), [(1, 1023), (24, 1000), (None, 1023)])
def test_prompt_is_cut_to_what_fits(server: ParrotServer, max_tokens: int | None, num_kept: int) -> None:
    fields = {"truncate_prompt_tokens": -1, "max_tokens": max_tokens, "ignore_eos": True}
    status, body = server.complete([97] * 3000, **fields)
    assert status == 200
    assert body["usage"]["prompt_tokens"] == num_kept


def test_prompt_is_cut_to_what_a_small_cache_holds_beside_the_answer() -> None:
    with parrot(num_blocks=16) as server:  # 256 tokens, and a context of 1,024
        for more, num_kept, num_output in (({"max_tokens": 6}, 250, 6), ({"min_tokens": 9}, 247, 9), ({}, 255, 1)):
            fields = {"truncate_prompt_tokens": -1, "ignore_eos": True, **more}
            status, body = server.complete([97] * 3000, **fields)
            assert status == 200, body
            assert body["usage"]["prompt_tokens"] == num_kept
            assert body["usage"]["completion_tokens"] == num_output


# ------------------------------------------------------------------------- out of order


def test_choices_that_are_ahead_wait_for_the_prompt_of_the_first() -> None:
    """A sibling may compute the prompt where the first choice has lost its place."""
    params = SamplingParams(prompt_logprobs=0, logprobs=0, n=2)
    report = PromptReport([(97, 98, 99)], params, Wishes(echo=True), ParrotTexts())
    ahead, ended = StepOutput(11, (97,)), StepOutput(11, (98,), finish_reason="length")
    assert report.ready([ahead, ended], 10) == []
    assert report.ready([StepOutput(10, (), prompt_logprobs=(TokenLogprobs(-1.0, 1, ()),))], 10) == []
    last = StepOutput(10, (), prompt_logprobs=(TokenLogprobs(-2.0, 1, ()),))
    assert report.ready([last], 10) == [ahead, ended, last]
    failed = StepOutput(10, (), finish_reason="error", error="…")
    assert PromptReport([(97, 98)], params, Wishes(echo=True), ParrotTexts()).ready([failed], 10) == [failed]
