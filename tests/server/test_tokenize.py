"""`/tokenize` and `/detokenize`, in vLLM's and in TGI's shapes."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.server.parrot import DEADLINE_S, EOS, VOCAB, ParrotServer, parrot, wait_until

from everystop.server import aside, prompts
from everystop.server.aside import Aside


def tokenize(server: ParrotServer, **fields: Any) -> tuple[int, Any]:
    return server.post("/tokenize", fields)


def test_prompt_becomes_tokens(server: ParrotServer) -> None:
    assert tokenize(server, prompt="abc") == (
        200,
        {"count": 3, "max_model_len": 1024, "tokens": [97, 98, 99], "token_strs": None},
    )
    assert tokenize(server, prompt="ab", model="parrot", return_token_strs=True)[1]["token_strs"] == ["a", "b"]
    assert tokenize(server, prompt="é", return_token_strs=True)[1]["token_strs"] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert tokenize(server, prompt="")[1]["count"] == 0


def test_messages_become_the_tokens_that_a_chat_is_answered_from(server: ParrotServer) -> None:
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    answer = tokenize(server, messages=messages, add_generation_prompt=True)[1]
    assert bytes(answer["tokens"]) == b"abcd"
    usage = server.chat(messages)[1]["usage"]
    assert usage["prompt_tokens"] == answer["count"]


def test_tokens_become_the_text_again(server: ParrotServer) -> None:
    text = "schön 🚌\n"
    tokens = tokenize(server, prompt=text)[1]["tokens"]
    assert server.post("/detokenize", {"tokens": tokens, "model": "alias"}) == (200, {"prompt": text})
    assert server.post("/detokenize", {"tokens": []}) == (200, {"prompt": ""})
    assert server.post("/detokenize", {"tokens": [97, EOS]}) == (200, {"prompt": "a<end>"})


def test_tgi_gets_tokens_with_their_places(server: ParrotServer) -> None:
    assert tokenize(server, inputs="aé") == (
        200,
        [
            {"id": 97, "text": "a", "start": 0, "stop": 1},
            {"id": 0xC3, "text": "é", "start": 1, "stop": 2},
            {"id": 0xA9, "text": "é", "start": 1, "stop": 2},
        ],
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": [97]}, "prompt"),
        ({"prompt": "a", "no_such": 1}, "no_such"),
        ({"prompt": "a", "max_tokens": 1}, "max_tokens"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}], "chat_template": "x"}, "chat_template"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, "tools"),
        ({"prompt": "x" * 300_000}, "prompt"),
    ],
)
def test_what_cannot_be_tokenized_is_refused_by_name(server: ParrotServer, fields: Any, param: str) -> None:
    status, answer = tokenize(server, **fields)
    assert (status, answer["error"]["param"]) == (400, param)


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("fields", "said", "code"),
    [
        ({}, "there is nothing to tokenize; ", "missing_field"),
        ({"prompt": None, "model": "parrot"}, "there is nothing to tokenize; ", "missing_field"),
        ({"prompt": "a", "messages": [USER]}, "prompt and messages are given together; ", "conflicting_fields"),
        ({"prompt": "", "messages": []}, "prompt and messages are given together; ", "conflicting_fields"),
    ],
)
def test_one_source_of_tokens_must_be_given(server: ParrotServer, fields: dict[str, Any], said: str, code: str) -> None:
    _, answer = tokenize(server, **fields)
    assert answer["error"]["message"].startswith(f"{said}send either prompt, a text, or messages, a conversation")
    assert (answer["error"]["code"], answer["error"]["param"]) == (code, "prompt")
    assert tokenize(server, prompt="a", messages=None)[0] == 200


def test_a_source_besides_tgis_is_refused_in_its_dialect(server: ParrotServer) -> None:
    status, answer = tokenize(server, inputs="a", messages=[USER])
    assert (status, answer["error_type"]) == (422, "validation")
    assert answer["error"].startswith("messages and inputs are given together; send either")


@pytest.mark.parametrize("fields", [{"inputs": 7}, {"inputs": "a", "prompt": "b"}, {"inputs": "x" * 300_000}])
def test_tgis_body_gets_tgis_errors(server: ParrotServer, fields: Any) -> None:
    status, answer = tokenize(server, **fields)
    assert (status, answer["error_type"]) == (422, "validation")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "tokens"),
        ({"tokens": "abc"}, "tokens"),
        ({"tokens": [1.5]}, "tokens"),
        ({"tokens": [True]}, "tokens"),
        ({"tokens": [-1]}, "tokens"),
        ({"tokens": [VOCAB]}, "tokens"),
        ({"tokens": [2**70]}, "tokens"),
        ({"tokens": [97], "skip": 1}, "skip"),
    ],
)
def test_what_cannot_be_detokenized_is_refused_by_name(server: ParrotServer, fields: Any, param: str) -> None:
    status, answer = server.post("/detokenize", fields)
    assert (status, answer["error"]["param"]) == (400, param)


def test_unknown_models_are_not_found(server: ParrotServer) -> None:
    assert tokenize(server, prompt="a", model="gpt-4")[0] == 404
    assert server.post("/detokenize", {"tokens": [97], "model": "gpt-4"})[0] == 404


def test_a_long_text_does_not_hold_up_the_others() -> None:
    with parrot() as server:
        release = threading.Event()
        entered = threading.Event()

        def wait() -> None:
            entered.set()
            assert release.wait(60)

        server.before_long_encode = wait
        answers: list[tuple[int, Any]] = []
        asker = threading.Thread(target=lambda: answers.append(tokenize(server, prompt="x" * 20_000)))
        asker.start()
        try:
            wait_until(entered.is_set)
            assert server.complete("abc")[0] == 200
            assert tokenize(server, prompt="abc")[0] == 200
        finally:
            release.set()
            asker.join(60)
    assert answers[0][1]["count"] == 20_000


@contextlib.contextmanager
def occupied(server: ParrotServer, num: int) -> Iterator[list[tuple[int, Any]]]:
    """So many long texts, of which the first is being encoded until the context ends; the answers, which come then."""
    release, entered = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        assert release.wait(DEADLINE_S)

    server.before_long_encode = wait
    answers: list[tuple[int, Any]] = []

    def ask() -> None:
        answers.append(tokenize(server, prompt="x" * 20_000))

    askers = [threading.Thread(target=ask) for _ in range(num)]
    for asker in askers:
        asker.start()
    try:
        wait_until(entered.is_set)
        yield answers
    finally:
        release.set()
        for asker in askers:
            asker.join(DEADLINE_S)


def test_a_flood_of_long_texts_takes_nothing_from_generations() -> None:
    """As many as there may be, and none of them gets on: chats of every size are answered all the same, and what is
    beyond them is refused before its body has come.
    """
    with parrot() as server:
        with occupied(server, aside.MAX_JOBS) as answers:
            wait_until(lambda: aside_of(server).num_jobs == aside.MAX_JOBS)
            for user in ("u", "u" * prompts.INLINE_BYTES):
                assert server.chat("abc", user=user)[0] == 200
            assert tokenize(server, prompt="abc")[1]["count"] == 3, "what is little is done at once"
            for path in ("/tokenize", "/detokenize"):
                head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 20000\r\n\r\n".encode()
                with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S) as connection:
                    connection.sendall(head)
                    answer = connection.recv(65536)
                assert answer.startswith(b"HTTP/1.1 429 ")
                assert b"retry-after: 1\r\n" in answer
                assert b'"code": "aside_full"' in answer
            assert not answers
        assert [(status, answer["count"]) for status, answer in answers] == [(200, 20_000)] * aside.MAX_JOBS
        wait_until(lambda: aside_of(server).num_jobs == 0)


def test_a_long_text_whose_client_has_left_is_not_worked_on() -> None:
    with parrot() as server:
        num_encoded = 0

        def count() -> None:
            nonlocal num_encoded
            num_encoded += 1

        with occupied(server, 1):
            body = json.dumps({"prompt": "x" * 20_000}).encode()
            head = f"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S) as connection:
                connection.sendall(head + body)
                wait_until(lambda: aside_of(server).num_jobs == 2)
            wait_until(lambda: len(server.service._http.server_state.connections) == 1)
            server.before_long_encode = count
        wait_until(lambda: aside_of(server).num_jobs == 0)
        assert num_encoded == 0


def test_bodies_aside_have_a_bound_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow flood of uploads to tokenize holds no byte of what bodies of generations may hold."""
    monkeypatch.setattr(aside, "MAX_BODIES_BYTES", 100_000)
    with parrot() as server:
        head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 200000\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S) as connection:
            connection.sendall(head + b" " * 90_000)
            wait_until(lambda: tokenize(server, prompt="x" * 20_000)[0] == 429)
            status, answer = tokenize(server, prompt="x" * 20_000)
            assert (status, answer["error"]["code"]) == (429, "bodies_full")
            assert server.chat("abc", user="u" * 200_000)[0] == 200
        wait_until(lambda: tokenize(server, prompt="x" * 20_000)[0] == 200)


def aside_of(server: ParrotServer) -> Aside:
    """The server's own line for what generates nothing."""
    [route] = [route for route in server.service._http.config.app.routes if route.path == "/tokenize"]
    found = route.endpoint.__self__._aside
    assert isinstance(found, Aside)
    return found


def test_nothing_is_tokenized_before_the_model_is_there() -> None:
    with parrot(hold_loading=True) as server:
        status, headers, body = server.request("POST", "/tokenize", {"prompt": "a"})
        assert (status, json.loads(body)["error"]["code"]) == (503, "loading")
        assert "retry-after" in headers
