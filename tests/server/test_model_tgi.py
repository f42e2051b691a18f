"""TGI's dialect and the token paths with the embedded model: the same tokens as OpenAI's paths."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from huggingface_hub import InferenceClient
from tests.server.test_model import ServerProcess

pytestmark = pytest.mark.model
PROMPT = "The capital of France is"
TEXT = "Grüße, 世界 🚌!\n\tx = 1234"
CHAT = [{"role": "user", "content": "Name three colours."}]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess() as running:
        yield running


def post(server: ServerProcess, path: str, body: Any) -> Any:
    status, _, answer = server.request("POST", path, body)
    assert status == 200, answer
    return json.loads(answer)


def complete(server: ServerProcess, **fields: Any) -> Any:
    return post(server, "/v1/completions", {"prompt": PROMPT, "temperature": 0, "top_p": 1, "top_k": 0, **fields})


def test_greedy_text_is_that_of_a_completion(server: ServerProcess) -> None:
    text = complete(server, max_tokens=24)["choices"][0]["text"]
    parameters = {"max_new_tokens": 24, "details": True}
    answer = post(server, "/generate", {"inputs": PROMPT, "parameters": parameters})
    assert answer["generated_text"] == text
    assert "".join(token["text"] for token in answer["details"]["tokens"]) == text
    assert answer["details"]["finish_reason"] == "length"


def test_a_seed_that_was_told_gives_the_same_text_again(server: ServerProcess) -> None:
    parameters = {"max_new_tokens": 16, "do_sample": True, "details": True}
    first = post(server, "/generate", {"inputs": PROMPT, "parameters": parameters})
    seed = first["details"]["seed"]
    again = post(server, "/generate", {"inputs": PROMPT, "parameters": {**parameters, "seed": seed}})
    assert again == first
    best = post(server, "/generate", {"inputs": PROMPT, "parameters": {**parameters, "best_of": 3}})
    others = best["details"]["best_of_sequences"]
    means = [
        sum(token["logprob"] for token in one["tokens"]) / len(one["tokens"]) for one in (best["details"], *others)
    ]
    assert means[0] == max(means)


def test_huggingface_hub_streams_what_it_gets_whole(server: ServerProcess) -> None:
    with InferenceClient(server.url) as client:
        whole = client.text_generation(PROMPT, max_new_tokens=24, return_full_text=False)
        assert "".join(client.text_generation(PROMPT, max_new_tokens=24, stream=True)) == whole


def test_a_stop_string_is_the_end_of_the_text(server: ServerProcess) -> None:
    whole = complete(server, max_tokens=24)["choices"][0]["text"]
    stop = whole[5:9]
    parameters = {"max_new_tokens": 24, "stop": [stop], "details": True}
    answer = post(server, "/generate", {"inputs": PROMPT, "parameters": parameters})
    assert answer["generated_text"] == whole[: whole.index(stop) + len(stop)]
    assert answer["details"]["finish_reason"] == "stop_sequence"


def test_tokens_are_those_that_generations_count(server: ServerProcess) -> None:
    counted = post(server, "/tokenize", {"prompt": PROMPT})
    assert counted["count"] == complete(server, max_tokens=1)["usage"]["prompt_tokens"]
    by_ids = complete(server, prompt=counted["tokens"], max_tokens=8)["choices"][0]["text"]
    assert by_ids == complete(server, max_tokens=8)["choices"][0]["text"]
    chat = post(server, "/v1/chat/completions", {"messages": CHAT, "max_tokens": 1})
    assert post(server, "/tokenize", {"messages": CHAT})["count"] == chat["usage"]["prompt_tokens"]


def test_control_tokens_of_a_chat_are_written_out(server: ServerProcess) -> None:
    tokens = post(server, "/tokenize", {"messages": CHAT})["tokens"]
    text = post(server, "/detokenize", {"tokens": tokens})["prompt"]
    assert "<|im_start|>user\nName three colours.<|im_end|>" in text
    plain = post(server, "/tokenize", {"prompt": "<|im_end|>"})
    assert plain["count"] > 1, "a client's text is never a control token"


def test_text_comes_back_as_it_went(server: ServerProcess) -> None:
    tokens = post(server, "/tokenize", {"prompt": TEXT})["tokens"]
    assert post(server, "/detokenize", {"tokens": tokens})["prompt"] == TEXT
    places = post(server, "/tokenize", {"inputs": TEXT})
    assert [place["id"] for place in places] == tokens
    assert all(TEXT[place["start"] : place["stop"]] == place["text"] for place in places)
    assert {i for place in places for i in range(place["start"], place["stop"])} == set(range(len(TEXT)))
