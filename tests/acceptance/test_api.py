"""Acceptance cases of the HTTP interface: text comes whole and once, and every end, number and refusal is right.

A check takes a server: one that repeats its prompts, or the embedded model in this process.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.acceptance.model_server import ModelServer
from tests.measuring import least
from tests.model.vocabularies import byte_level_keys, sentencepiece_inner, write_tokenizer, write_vocabulary
from tests.server.parrot import ParrotDecoder, ParrotServer, parrot, parse_events, wait_until
from tests.server.test_streaming import reasons_of, texts_of
from tokenizers import processors

from everystop.core.errors import ChatTemplateError, ChatTemplateMissing
from everystop.core.events import Event, FinishEvent
from everystop.core.plan import StepPlan
from everystop.engine.stops import StopMatcher
from everystop.model.chat_template import ChatTemplate, load_chat_template
from everystop.model.checkpoint import inspect_model
from everystop.model.tokenizer import IncrementalDetokenizer, Tokenizer
from everystop.model.tokenizer_files import load_tokenizer, tokenizer_from_folder
from everystop.server import protocol, replies
from everystop.server.board import Board, Generation
from everystop.server.service import Service
from everystop.server.streams import Reply

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Once upon a time"},
    CHAT: {"messages": [{"role": "user", "content": "Name a colour"}]},
}


def choice_of(answer: tuple[int, Any]) -> dict[str, Any]:
    """The only choice of an answer that must be there."""
    status, body = answer
    assert status == 200, body
    (choice,) = body["choices"]
    return dict(choice)


# --------------------------------------------------------------------- 37: what is said of a prompt


def check_ac_37(server: ParrotServer) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 4
    texts, numbers = [], []
    for _ in range(2):  # the second finds the prompt in the cache
        for num_top in (0, 1):
            status, body = server.complete(prompt, echo=True, max_tokens=0, logprobs=num_top)
            assert status == 200, body
            (choice,) = body["choices"]
            logprobs = choice["logprobs"]
            assert (choice["text"], choice["finish_reason"]) == (prompt, "length")
            assert body["usage"]["completion_tokens"] == 0
            assert len(logprobs["token_logprobs"]) == body["usage"]["prompt_tokens"], "not every token has a number"
            assert logprobs["token_logprobs"][0] is None
            assert all(number <= 0 for number in logprobs["token_logprobs"][1:])
            offsets = [*logprobs["text_offset"], len(prompt)]
            texts.append([prompt[start:end] for start, end in pairwise(offsets)])
            assert texts[-1] == logprobs["tokens"], "the offsets do not join to the text"
            numbers.append(logprobs["token_logprobs"])
    assert all(each == numbers[0] for each in numbers), "the numbers differ between cold and warm"
    assert logprobs["top_logprobs"][0] is None
    assert all(top for top in logprobs["top_logprobs"][1:])


def test_ac_37_echo_gives_the_prompts_logprobs(server: ParrotServer) -> None:
    check_ac_37(server)


@pytest.mark.model
def test_ac_37_on_the_embedded_model(model_server: ModelServer) -> None:
    check_ac_37(model_server)


def test_mutant_ac_37_the_prompt_without_its_numbers(own_server: ParrotServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text is echoed, and log-probabilities are those of the answer alone."""
    monkeypatch.setattr("everystop.server.prompt_report.PromptReport._infos", lambda *args: ())
    with pytest.raises(AssertionError, match="not every token has a number"):
        check_ac_37(own_server)


# --------------------------------------------------------------------- 39: characters

TEXTS = ("🙂🙃👍🏽", "สวัสดีชาวโลก", "你好，世界", "naïve café", "a\u2028b\u2029c\u0085d")


def check_ac_39(server: ParrotServer) -> None:
    """Only the tokens of a text may be chosen, so that halves of characters come as often as whole ones."""
    encode = server.service.state.model.encode
    for text in TEXTS:
        ids = list(encode(text))
        fields = {"max_tokens": 30, "temperature": 1, "seed": 3, "ignore_eos": True, "logprobs": 0}
        fields |= {"allowed_token_ids": sorted(set(ids))}
        for prompt in (text, ids[:-1]):  # the second may end inside a character
            whole = choice_of(server.complete(prompt, **fields))
            raw = b"".join(map(bytes, whole["logprobs"]["bytes"]))
            assert whole["text"] == raw.decode(errors="replace"), "the text is not what its bytes are"
            streamed = "".join(texts_of(server.events(COMPLETIONS, {"prompt": prompt, **fields}))[0])
            assert streamed == whole["text"], "the deltas joined are not the text"


def test_ac_39_joined_deltas_are_the_text(server: ParrotServer) -> None:
    """Lines are those of `str.splitlines`, the strictest of clients: see `parse_events`."""
    check_ac_39(server)
    for text in TEXTS:
        assert "".join(texts_of(server.events(COMPLETIONS, {"prompt": text}))[0]) == text


@pytest.mark.model
def test_ac_39_on_the_embedded_model(model_server: ModelServer) -> None:
    check_ac_39(model_server)


def test_mutant_ac_39_each_token_decoded_alone(own_server: ParrotServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ParrotDecoder, "feed", lambda decoder, token: bytes([token]).decode(errors="replace"))
    with pytest.raises(AssertionError, match="the text is not what its bytes are"):
        check_ac_39(own_server)


@pytest.mark.model
def test_mutant_ac_39_each_token_of_the_model_alone(model_server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def feed(decoder: IncrementalDetokenizer, token: int) -> str:
        return decoder._token_bytes(token).decode(errors="replace")

    monkeypatch.setattr(IncrementalDetokenizer, "feed", feed)
    with pytest.raises(AssertionError, match="the text is not what its bytes are"):
        check_ac_39(model_server)


def test_mutant_ac_39_line_separators_as_they_are(own_server: ParrotServer, monkeypatch: pytest.MonkeyPatch) -> None:
    as_it_is = SimpleNamespace(dumps=partial(json.dumps, ensure_ascii=False))
    monkeypatch.setattr(replies, "json", as_it_is)
    with pytest.raises((AssertionError, json.JSONDecodeError)):
        check_ac_39(own_server)


# --------------------------------------------------------------------- 40: stop strings


def pieces_of(server: ParrotServer, prompt: str) -> tuple[str, list[str]]:
    """A greedy answer, and the text of each of its tokens."""
    free = choice_of(server.complete(prompt, temperature=0, max_tokens=24, ignore_eos=True, logprobs=0))
    pieces: list[str] = free["logprobs"]["tokens"]
    assert "".join(pieces) == free["text"]
    return free["text"], pieces


def check_ac_40(server: ParrotServer, prompt: str) -> None:
    text, pieces = pieces_of(server, prompt)
    at = next(i for i in range(4, len(text)) if text[i : i + 3] not in text[:i] and text[i] != "\ufffd")
    long = next((piece for piece in pieces[3:] if len(piece) > 2 and text.count(piece[1:-1]) == 1), text[at])
    stops: list[list[str]] = [
        [text[at : at + 9]],  # across tokens
        [long[1:-1] or long],  # inside a token, where there is one so long
        [text[at : at + 5] + "Ω"],  # begins, and does not come
        [text[at : at + 4] + "Ω", text[at : at + 7]],
        [text[at : at + 2], text[at + 1 : at + 2]],  # complete with the same character
        [text[-3:] + "Ω"],  # begins at the very end
    ]
    for stop in stops:
        shown, num_tokens, reason = expected_stop(text, pieces, stop)
        fields = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "stop": stop}
        status, body = server.complete(prompt, **fields)
        assert status == 200
        choice = body["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (shown, reason), f"stop {stop}"
        assert body["usage"]["completion_tokens"] == num_tokens, f"usage with stop {stop}"
        events = server.events(COMPLETIONS, {"prompt": prompt, **fields})
        assert "".join(texts_of(events).get(0, [])) == shown, f"stream with stop {stop}"
        assert reasons_of(events) == {0: [reason]}
    for bad in ("", [""], ["a", ""], ["a"] * 100, "a" * 100_000, 7, [7], {}):
        assert server.complete(prompt, stop=bad)[0] == 400, f"stop {bad!r:.30}"


def expected_stop(text: str, pieces: list[str], stops: list[str]) -> tuple[str, int, str]:
    """Shown text, tokens counted and reason: the stop that is complete first wins, of two the longer."""
    ends = [(text.index(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    if not ends:
        return text, len(pieces), "length"
    end, minus_length = min(ends)
    num_tokens = next(n for n in range(1, len(pieces) + 1) if len("".join(pieces[:n])) >= end)
    return text[: end + minus_length], num_tokens, "stop"


def test_ac_40_nothing_of_a_stop_string_is_shown(server: ParrotServer) -> None:
    check_ac_40(server, "abcdefghijklmnopqrstuvwxyz")


@pytest.mark.model
def test_ac_40_on_the_embedded_model(model_server: ModelServer) -> None:
    check_ac_40(model_server, "Once upon a time, in a land far away,")


def test_mutant_ac_40_nothing_is_held_back(own_server: ParrotServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a stop is found only within the text of one token."""
    monkeypatch.setattr(StopMatcher, "_num_held", lambda matcher, window: 0)
    with pytest.raises(AssertionError, match=r"stop \['efghijklm'\]"):
        check_ac_40(own_server, "abcdefghijklmnopqrstuvwxyz")


def test_mutant_ac_40_what_was_held_back_is_lost(own_server: ParrotServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StopMatcher, "flush", lambda matcher: "")
    with pytest.raises(AssertionError, match="Ω"):
        check_ac_40(own_server, "abcdefghijklmnopqrstuvwxyz")


# --------------------------------------------------------------------- 41: ends and usage

OPTIONS: tuple[Any, ...] = ("absent", None, {}, {"include_usage": False}, {"include_usage": True})


def check_ac_41(server: ParrotServer) -> None:
    for path, prompt in BODIES.items():
        for n in (1, 3):
            body = {**prompt, "n": n, "max_tokens": 5, "seed": 1, "temperature": 1, "ignore_eos": True}
            status, whole = server.post(path, body)
            assert status == 200
            assert [choice["finish_reason"] for choice in whole["choices"]] == ["length"] * n
            assert whole["usage"]["completion_tokens"] == 5 * n
            for options in OPTIONS:
                asked = {} if options == "absent" else {"stream_options": options}
                events = server.events(path, body | asked)
                how = f"n {n}, stream_options {options}"
                assert events.count("[DONE]") == 1
                assert events[-1] == "[DONE]"
                assert reasons_of(events) == {index: ["length"] for index in range(n)}, how
                usages = [event for event in events[:-1] if event.get("usage") is not None]
                is_asked = options == {"include_usage": True}
                assert len(usages) == is_asked, f"{len(usages)} events with usage for {how}"
                if is_asked:
                    assert usages == [events[-2]]
                    assert usages[0]["choices"] == []
                    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
                        assert usages[0]["usage"][name] == whole["usage"][name], how


def test_ac_41_one_reason_a_choice_and_usage_where_asked_for(server: ParrotServer) -> None:
    check_ac_41(server)


@pytest.mark.model
def test_ac_41_on_the_embedded_model(model_server: ModelServer) -> None:
    check_ac_41(model_server)


def test_mutant_ac_41_empty_options_ask_for_usage(own_server: ParrotServer, monkeypatch: pytest.MonkeyPatch) -> None:
    read = protocol.read_wishes

    def read_loosely(values: dict[str, Any], **fields: Any) -> Any:
        return replace(read(values, **fields), usage="stream_options" in values)

    monkeypatch.setattr(protocol, "read_wishes", read_loosely)
    with pytest.raises(AssertionError, match=r"1 events with usage for n 1, stream_options \{\}"):
        check_ac_41(own_server)


def test_mutant_ac_41_a_prompt_counted_for_each_choice(
    own_server: ParrotServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage_event = replies.ReplyWriter.usage_event

    def count_twice(writer: replies.ReplyWriter, usage: dict[str, Any], *rest: Any) -> bytes:
        return usage_event(writer, usage | {"prompt_tokens": 3 * usage["prompt_tokens"]}, *rest)

    monkeypatch.setattr(replies.ReplyWriter, "usage_event", count_twice)
    with pytest.raises(AssertionError, match=r"stream_options \{'include_usage': True\}"):
        check_ac_41(own_server)


# --------------------------------------------------------------------- 42: prompts and their indices


def check_ac_42(server: ParrotServer) -> None:
    encode = server.service.state.model.encode
    texts = ["The sky is", "One, two, three,", "Bread and"]
    ids = [list(encode(text)) for text in texts]
    forms: list[tuple[Any, list[str]]] = [
        (texts[0], texts[:1]), (texts, texts), (ids[0], texts[:1]), (ids, texts), ([texts[1]], texts[1:2]),
    ]  # fmt: skip
    fields = {"n": 2, "max_tokens": 4, "temperature": 1, "seed": 5, "ignore_eos": True}
    alone = {text: [choice["text"] for choice in server.complete(text, **fields)[1]["choices"]] for text in texts}
    assert len({tuple(answer) for answer in alone.values()}) == 3
    for form, meant in forms:
        wanted = [text for prompt in meant for text in alone[prompt]]
        status, body = server.complete(form, **fields)
        assert status == 200, form
        assert [choice["index"] for choice in body["choices"]] == list(range(2 * len(meant)))
        assert [choice["text"] for choice in body["choices"]] == wanted, f"choices out of order for {form}"
        streamed = texts_of(server.events(COMPLETIONS, {"prompt": form, **fields}))
        assert ["".join(streamed[i]) for i in range(2 * len(meant))] == wanted, f"stream out of order for {form}"
    for bad in ([], [[]], [""], "", ["a", [1]], [1, "a"], [[1], "a"], [["a"]], [None], [1.5], {}, 7, True, [[[1]]]):
        assert server.complete(bad, **fields)[0] == 400, bad


def test_ac_42_choices_come_prompt_by_prompt(server: ParrotServer) -> None:
    check_ac_42(server)


@pytest.mark.model
def test_ac_42_on_the_embedded_model(model_server: ModelServer) -> None:
    check_ac_42(model_server)


def test_mutant_ac_42_choice_by_choice(own_server: ParrotServer, monkeypatch: pytest.MonkeyPatch) -> None:
    board_open = Board.open

    def open_shuffled(board: Board, prompts: Any, params: Any, *args: Any, **fields: Any) -> Generation:
        generation = board_open(board, prompts, params, *args, **fields)
        for i, choice in enumerate(generation.choices):
            choice.index = i % params.n * len(prompts) + i // params.n
        return generation

    monkeypatch.setattr(Board, "open", open_shuffled)
    with pytest.raises(AssertionError, match="choices out of order for"):
        check_ac_42(own_server)


# --------------------------------------------------------------------- 43: errors within a stream


def check_ac_43(server: ParrotServer, deadline_s: float = 60.0) -> float:
    """Ends the server's engine; returns the seconds from its failure to the end of the stream."""
    for path, prompt in BODIES.items():
        status, body = server.post(path, {**prompt, "n": 0, "stream": True})
        assert (status, body["error"]["param"]) == (400, "n"), "refused as a whole, before any event"
    runner = server.engine._runner
    execute = runner.execute
    with closing(server.connect()) as connection:
        body = {"prompt": "Once upon a time", "stream": True, "ignore_eos": True, "max_tokens": 900}
        connection.request("POST", COMPLETIONS, json.dumps(body))
        sock, answer = connection.sock, connection.getresponse()
        assert answer.readline().startswith(b"data: ")
        answer.readline()
        sock.settimeout(deadline_s)
        failed_s: list[float] = []

        def fail(plan: StepPlan) -> Any:
            failed_s.append(time.monotonic())
            raise RuntimeError("the roof is on fire")

        runner.execute = fail
        try:
            rest = answer.read()
            took_s = time.monotonic() - failed_s[0]
        except TimeoutError:
            raise AssertionError("the stream stays open after the failure") from None
        finally:
            runner.execute = execute
    events = parse_events(rest)
    assert events[-1] == "[DONE]"
    assert events.count("[DONE]") == 1
    assert events[-2]["error"]["code"] == "engine_failed", "no error event"
    assert "roof" not in json.dumps(events)
    return took_s


def test_ac_43_a_failing_step_ends_its_streams_with_an_error_event() -> None:
    def end_s() -> float:
        with parrot() as server:
            server.runner.step_s = 0.01
            return check_ac_43(server)

    assert least(end_s, enough=1.0, tries=5) < 1.0


@pytest.mark.model
def test_ac_43_on_the_embedded_model() -> None:
    def end_s() -> float:
        with ModelServer() as server:
            return check_ac_43(server)

    assert least(end_s, enough=1.0, tries=3) < 1.0


def test_mutant_ac_43_nobody_tells_the_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Service, "_fail", lambda service, error: None)
    with parrot() as server:
        server.runner.step_s = 0.01
        with pytest.raises(AssertionError, match="the stream stays open after the failure"):
            check_ac_43(server, deadline_s=0.5)


# --------------------------------------------------------------------- 44: clients that leave


class Ends:
    """In which step each request ended, as the engine's events say."""

    def __init__(self, server: ParrotServer) -> None:
        self.steps: dict[int, int] = {}
        receive = server.engine.on_events

        def listen(events: list[Event]) -> None:
            self.steps |= {event.request_id: event.step_id for event in events if isinstance(event, FinishEvent)}
            receive(events)

        server.engine.on_events = listen


def check_ac_44(server: ParrotServer, deadline_s: float = 60.0) -> None:
    """Two slots: one client leaves while it decodes, one in its long prefill, one in the queue; streamed and not.

    Each step takes some turns of the server's loop, so that the loop of a busy machine gets on as fast as its engine,
    and the engine steps only while somebody waits here, so that nobody gets further than is looked for.
    """
    wait = slow_down(server)
    ends = Ends(server)
    requests = server.scheduler.requests
    for stream in (True, False):
        with ExitStack() as stack:
            decoding = arrive(stack, server, wait, "a b", stream)
            wait(lambda request=requests[decoding[1]]: request.num_output_tokens > 0)
            prefilling = arrive(stack, server, wait, "a b " * 220, stream)
            wait(lambda request=requests[prefilling[1]]: request.num_computed_tokens > 0)
            waiting = arrive(stack, server, wait, "c d", stream)
            assert requests[prefilling[1]].num_output_tokens == 0
            assert requests[waiting[1]].state == "waiting"
            for connection, request_id in (waiting, prefilling, decoding):
                before = server.scheduler._next_step_id
                connection.close()
                wait(lambda request_id=request_id: request_id in ends.steps, deadline_s)
                num_steps = ends.steps[request_id] - before
                assert num_steps <= 5, f"removed {num_steps} steps after its client had left"
    wait(lambda: server.num_free_blocks == server.num_blocks)
    wait(lambda: server.service.state.num_open == 0)


def arrive(
    stack: ExitStack, server: ParrotServer, wait: Any, prompt: str, stream: bool
) -> tuple[http.client.HTTPConnection, int]:
    """A request whose answer nobody reads, and its id."""
    known = set(server.scheduler.requests)
    connection = stack.enter_context(closing(server.connect()))
    body = {"prompt": prompt, "stream": stream, "ignore_eos": True, "max_tokens": 100}
    connection.request("POST", COMPLETIONS, json.dumps(body))
    wait(lambda: set(server.scheduler.requests) - known != set())
    return connection, max(server.scheduler.requests)


def slow_down(server: ParrotServer) -> Any:
    """Each step of the engine takes 10 ms and four turns of the server's loop longer, and begins only while somebody
    waits by what is returned, which is `wait_until` otherwise.
    """
    runner = server.engine._runner
    execute, may_step = runner.execute, threading.Event()

    def slowly(plan: StepPlan) -> Any:
        while not (may_step.wait(0.05) or server.service.state.is_ending):
            pass
        may_step.clear()
        time.sleep(0.01)
        for _ in range(4):
            if not server.service.state.is_ending:
                asyncio.run_coroutine_threadsafe(asyncio.sleep(0), server.loop).result(60)
        return execute(plan)

    def wait(condition: Callable[[], bool], deadline_s: float = 60.0) -> None:
        def is_so() -> bool:
            may_step.set()
            return condition()

        wait_until(is_so, deadline_s)

    runner.execute = slowly
    return wait


def test_ac_44_requests_of_clients_that_left_are_removed() -> None:
    with parrot(max_num_seqs=2, num_blocks=200) as server:
        check_ac_44(server)


@pytest.mark.model
def test_ac_44_on_the_embedded_model() -> None:
    with ModelServer(max_num_seqs=2, max_num_batched_tokens=32) as server:
        check_ac_44(server)


def test_mutant_ac_44_nobody_watches_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async def watch(reply: Reply, *args: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Reply, "_watch", watch)
    late = r"it never came true|steps after its client had left"
    with parrot(max_num_seqs=2, num_blocks=200) as server, pytest.raises(AssertionError, match=late):
        check_ac_44(server, deadline_s=1.0)


# --------------------------------------------------------------------- 46, 47, 48: messages

STRICT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported!') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate!') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return load_tokenizer(inspect_model(write_vocabulary(tmp_path / "m.gguf", byte_level_keys())))


def turn(role: str, content: Any = "x", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def encoder(template: ChatTemplate) -> Any:
    """What a server takes to turn messages into tokens."""
    return lambda messages, *_: template.render(messages)


def test_ac_46_what_a_template_refuses_is_the_clients_error(tokenizer: Tokenizer, tmp_path: Path) -> None:
    template = ChatTemplate(STRICT, "test", tokenizer)
    for messages, reason in (
        ([turn("system"), turn("user")], "System role not supported!"),
        ([turn("user"), turn("user")], "Roles must alternate!"),
    ):
        with pytest.raises(ChatTemplateError, match=reason):
            template.render(messages)
    keys = byte_level_keys()
    del keys["tokenizer.chat_template"]
    bare = inspect_model(write_vocabulary(tmp_path / "bare.gguf", keys))
    without = load_chat_template(bare, load_tokenizer(bare))
    with pytest.raises(ChatTemplateMissing, match="chat template"):
        without.render([turn("user")])
    with parrot() as server:
        state = server.service.state
        for used, messages, reason in (
            (template, [turn("system")], "System role not supported!"),
            (template, [turn("user"), turn("user")], "Roles must alternate!"),
            (without, [turn("user")], "chat template"),
        ):
            state._model = replace(state.model, encode_chat=encoder(used))
            status, body = server.chat(messages)
            assert status == 400
            assert reason in body["error"]["message"]
        assert server.chat([])[0] == 400
        assert server.complete("still here")[0] == 200


@pytest.mark.parametrize(
    ("adds_bos", "in_template"), [(True, ""), (True, "<s>"), (True, "<s><s>"), (False, ""), (False, "<s>")]
)
def test_ac_47_begin_of_text_comes_exactly_once(tmp_path: Path, adds_bos: bool, in_template: str) -> None:
    inner = sentencepiece_inner()
    if adds_bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    ours = tokenizer_from_folder(write_tokenizer(tmp_path, inner, bos_token="<s>", eos_token="</s>"))
    source = in_template + "{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
    ids = ours.encode_rendered(ChatTemplate(source, "test", ours).render([turn("user", "the fox")]))
    written = in_template.count("<s>")
    assert ids.count(1) == (1 if adds_bos else written)
    assert ids[0] == 1 or not (adds_bos or written)
    assert ours.encode("the fox").count(1) == adds_bos


CALL = {"id": "call-1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_ac_48_shapes_of_messages(server: ParrotServer) -> None:
    accepted: list[list[dict[str, Any]]] = [
        [turn("user", "a"), turn("assistant", None, tool_calls=[CALL])],
        [turn("user", "a"), turn("assistant", "")],
        [turn("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])],
    ]
    for messages in accepted:
        assert server.chat(messages)[0] == 200, messages
    assert choice_of(server.chat(accepted[2]))["message"]["content"] == "a\nb"
    image = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    for bad in (
        turn("user", [image]),
        turn("user", [{"type": "text", "text": "a"}, image]),
        turn("user", [[{"type": "text", "text": "a"}]]),
        turn("user", [{"type": "text", "text": [{"type": "text", "text": "a"}]}]),
        turn("user", {"type": "text", "text": "a"}),
        turn("user", None),
        turn("user", 7),
        {"content": "a"},
        turn("robot"),
        "a",
        [],
    ):
        status, body = server.post(CHAT, {"messages": [bad]})
        assert status == 400, bad
        assert body["error"]["param"].startswith("messages"), bad


# --------------------------------------------------------------------- 50, 52


def test_ac_50_lone_surrogates_are_refused(server: ParrotServer) -> None:
    for text in (rb"\ud83d", rb"a\ude00b", rb"\ude00\ud83d"):
        for path, body in (
            (COMPLETIONS, b'{"prompt": "%s"}'),
            (COMPLETIONS, b'{"prompt": ["a", "%s"]}'),
            (COMPLETIONS, b'{"prompt": "a", "stop": "%s"}'),
            (COMPLETIONS, b'{"prompt": "a", "cache_salt": "%s"}'),
            (CHAT, b'{"messages": [{"role": "user", "content": "%s"}]}'),
        ):
            status, _, answer = server.request("POST", path, body % text)
            assert status == 400, (path, body % text)
            assert json.loads(answer)["error"]["type"] == "invalid_request_error"
    assert choice_of(server.post(COMPLETIONS, {"prompt": "🙂"}))["text"] == "🙂"


def test_ac_52_end_tokens_come_from_all_sources(tmp_path: Path) -> None:
    inner = sentencepiece_inner()
    inner.add_special_tokens(["<stop>", "<|eot_id|>"])
    folder = write_tokenizer(tmp_path / "folder", inner, eos_token="<stop>")
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    ids = tokenizer_from_folder(folder).eos_ids
    assert {7, 8, 9, inner.token_to_id("<stop>"), inner.token_to_id("<|eot_id|>")} <= set(ids)
    keys = byte_level_keys(**{"ggml.eos_token_id": 2, "ggml.eot_token_id": 0})
    of_gguf = load_tokenizer(inspect_model(write_vocabulary(tmp_path / "m.gguf", keys))).eos_ids
    assert {0, 2} <= set(of_gguf)


@pytest.mark.model
def test_ac_52_on_the_embedded_model(model_server: ModelServer) -> None:
    """Each of its end tokens, forced, ends the answer; and none does where they are to be ignored."""
    ends = model_server.engine._eos_token_ids
    assert len(ends) >= 2
    for end in ends:
        forced = {"temperature": 0, "max_tokens": 3, "logit_bias": {str(end): 100}}
        choice = choice_of(model_server.complete("The sky is", **forced))
        assert (choice["text"], choice["finish_reason"]) == ("", "stop")
        ignored = choice_of(model_server.complete("The sky is", **forced, ignore_eos=True))
        assert ignored["finish_reason"] == "length"
