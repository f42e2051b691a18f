"""How much one answer may hold at once: what is too much is refused before any of it is computed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.server.parrot import ParrotServer, parrot

from everystop.core.errors import RequestError
from everystop.server import answer_size, tgi
from everystop.server.prompts import Parse, prepare
from everystop.server.protocol import parse_chat, parse_completion

CONTEXT = 8192
MESSAGES = [{"role": "user", "content": "abc"}]
CHOICES = {"best_of": 20, "do_sample": True}
SCORED = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20}


@pytest.fixture(scope="module")
def wide() -> Iterator[ParrotServer]:
    with parrot(max_model_len=CONTEXT, num_blocks=1024) as server:
        yield server


def read(server: ParrotServer, parse: Parse, body: dict[str, Any]) -> None:
    prepare(server.service.state.model, parse, json.dumps(body).encode())


def refusal(server: ParrotServer, parse: Parse, body: dict[str, Any]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(server, parse, body)
    assert caught.value.code == "too_many_logprobs"
    return caught.value


ORDINARY: dict[str, tuple[Parse, dict[str, Any]]] = {
    "a chat of any length with all alternatives": (parse_chat, SCORED),
    "a completion of any length with all alternatives": (parse_completion, {"prompt": "abc", "logprobs": 20}),
    "many choices": (parse_completion, {"prompt": "abc", "n": 128, "max_tokens": 256, "logprobs": 5}),
    "text alone": (parse_completion, {"prompt": ["abc"] * 8, "n": 128, "max_tokens": 8000}),
    "a stream": (parse_chat, SCORED | {"n": 128, "stream": True}),
    "a batch of log-likelihoods": (
        parse_completion,
        {"prompt": [[97] * 8000] * 12, "echo": True, "logprobs": 1, "max_tokens": 1},
    ),
    "a chat's prompt, which its choices share": (
        parse_chat,
        {"messages": [{"role": "user", "content": "a" * 6000}], "prompt_logprobs": 20, "n": 8, "max_tokens": 1},
    ),
    "all that TGI tells": (
        tgi.parse_generate,
        {"inputs": "abc", "parameters": {"max_new_tokens": 8000, "details": True, "top_n_tokens": 20}},
    ),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_requests_are_taken(wide: ParrotServer, name: str) -> None:
    read(wide, *ORDINARY[name])


TOO_MUCH: dict[str, tuple[Parse, dict[str, Any], str, tuple[str, ...]]] = {
    "choices of a chat": (
        parse_chat,
        SCORED | {"n": 20, "max_tokens": 500},
        "top_logprobs",
        ("210,000", "n = 20", "up to 500 tokens", "of 21 a token", "200,000", "a smaller max_tokens", "a stream"),
    ),
    "choices of a chat of any length": (parse_chat, SCORED | {"n": 2}, "top_logprobs", ("max_tokens is left out",)),
    "prompts": (
        parse_completion,
        {"prompt": ["abc"] * 100, "logprobs": 4, "max_tokens": 401},
        "logprobs",
        ("200,500", "prompts: 100"),
    ),
    "chosen tokens alone": (parse_completion, {"prompt": "a", "logprobs": 0, "n": 128, "max_tokens": 1563}, "n", ()),
    "prompt and answer together": (
        parse_completion,
        {"prompt": [[97] * 4000] * 2, "echo": True, "logprobs": 20, "max_tokens": 1000},
        "logprobs",
        ("42,000", "168,000 of the prompts"),
    ),
    "prompts that are told once for each choice": (
        parse_completion,
        {"prompt": [97] * 5000, "prompt_logprobs": 9, "n": 5, "max_tokens": 1},
        "prompt_logprobs",
        ("250,000",),
    ),
    "token ids": (
        parse_completion,
        {"prompt": "abc", "n": 100, "max_tokens": 2001, "return_token_ids": True},
        "return_token_ids",
        ("200,100 token ids",),
    ),
    "a stream that keeps tokens back": (
        parse_chat,
        SCORED | {"n": 2, "stream": True, "stream_interval": 5000},
        "top_logprobs",
        ("210,000", "a smaller stream_interval"),
    ),
    "TGI's choices": (
        tgi.parse_generate,
        {"inputs": "abc", "parameters": CHOICES | {"max_new_tokens": 500, "details": True, "top_n_tokens": 20}},
        "top_n_tokens",
        ("210,000", "best_of = 20", "a smaller max_new_tokens"),
    ),
    "TGI's prompt, which each choice repeats": (
        tgi.parse_generate,
        {"inputs": "a" * 5000, "parameters": {"best_of": 41, "do_sample": True, "decoder_input_details": True}},
        "decoder_input_details",
        ("205,000",),
    ),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_one_answer_cannot_hold_is_refused_in_numbers(wide: ParrotServer, name: str) -> None:
    parse, body, param, words = TOO_MUCH[name]
    error = refusal(wide, parse, body)
    assert error.param == param
    for word in words:
        assert word in str(error)


def test_advice_is_what_the_dialect_can_do(wide: ParrotServer) -> None:
    parse, body, _, _ = TOO_MUCH["TGI's choices"]
    assert "a stream" not in str(refusal(wide, parse, body))


def test_bound_itself_is_taken(wide: ParrotServer) -> None:
    body: dict[str, Any] = {"prompt": "abc", "logprobs": 0, "n": 100, "max_tokens": answer_size.MAX_ENTRIES // 100}
    read(wide, parse_completion, body)
    refusal(wide, parse_completion, body | {"max_tokens": body["max_tokens"] + 1})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", SCORED | {"n": 20, "max_tokens": 500}),
        ("/v1/completions", {"prompt": "abc", "n": 20, "max_tokens": 500, "logprobs": 20}),
        ("/generate", TOO_MUCH["TGI's choices"][1]),
    ],
)
def test_nothing_of_it_reaches_the_engine(
    wide: ParrotServer, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wide.engine, "submit", None)
    assert wide.post(path, body)[0] in (400, 422)
