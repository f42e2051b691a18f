"""`/tokenize` and `/detokenize`, in vLLM's and in TGI's shapes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.server.parrot import EOS, VOCAB, ParrotServer, parrot, wait_until


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
        import threading

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


def test_nothing_is_tokenized_before_the_model_is_there() -> None:
    with parrot(hold_loading=True) as server:
        status, headers, body = server.request("POST", "/tokenize", {"prompt": "a"})
        assert (status, json.loads(body)["error"]["code"]) == (503, "loading")
        assert "retry-after" in headers
