"""Hugging Face's own client against TGI's dialect and against /v1, on the server without weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import (
    GenerationError,
    HfHubHTTPError,
    OverloadedError,
    ValidationError,
)
from tests.server.parrot import MODEL, ParrotServer, parrot

MESSAGES = [{"role": "user", "content": "schön 🚌"}]


@pytest.fixture
def client(server: ParrotServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[InferenceClient]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with InferenceClient(f"http://127.0.0.1:{server.port}") as running:
        yield running


@pytest.fixture(scope="module")
def server() -> Iterator[ParrotServer]:
    with parrot() as running:
        yield running


def test_text_is_generated(client: InferenceClient) -> None:
    assert client.text_generation("abc", return_full_text=False) == "abc"
    assert client.text_generation("abc", return_full_text=True) == "abcabc"
    assert client.text_generation("abcdef", max_new_tokens=2, return_full_text=False) == "ab"


def test_details_are_understood(client: InferenceClient) -> None:
    answer = client.text_generation("aé", details=True, top_n_tokens=2, do_sample=True, seed=3, return_full_text=False)
    assert answer.generated_text == "aé"
    assert answer.details is not None
    assert answer.details.finish_reason == "eos_token"
    assert answer.details.generated_tokens == len(answer.details.tokens) == 4
    assert answer.details.seed == 3
    assert [token.text for token in answer.details.tokens] == ["a", "", "é", "<end>"]
    assert answer.details.top_tokens is not None
    assert [len(top) for top in answer.details.top_tokens] == [2, 2, 2, 2]


def test_best_of_is_understood(client: InferenceClient) -> None:
    answer = client.text_generation("ab", details=True, do_sample=True, best_of=2, return_full_text=False)
    assert answer.details is not None
    assert answer.details.best_of_sequences is not None
    assert [other.generated_text for other in answer.details.best_of_sequences] == ["ab"]


def test_tokens_are_streamed(client: InferenceClient) -> None:
    assert list(client.text_generation("abc", stream=True)) == ["a", "b", "c", "<end>"]


def test_details_are_streamed(client: InferenceClient) -> None:
    events = list(client.text_generation("abc", stream=True, details=True, stop=["b"], return_full_text=False))
    assert [event.index for event in events] == [1, 2]
    assert [event.token.text for event in events] == ["a", "b"]
    assert [event.generated_text for event in events] == [None, "ab"]
    details = events[-1].details
    assert details is not None
    assert (details.finish_reason, details.generated_tokens, details.input_length) == ("stop_sequence", 2, 3)


def test_a_stream_works_from_asyncio(server: ParrotServer) -> None:
    async def listen() -> list[str]:
        async with AsyncInferenceClient(f"http://127.0.0.1:{server.port}") as client:
            return [text async for text in await client.text_generation("abc", stream=True)]

    assert asyncio.run(listen()) == ["a", "b", "c", "<end>"]


@pytest.mark.parametrize("stream", [False, True])
def test_wrong_values_are_validation_errors(client: InferenceClient, stream: bool) -> None:
    with pytest.raises(ValidationError, match="temperature"):
        list(client.text_generation("abc", temperature=-1.0, stream=stream))
    with pytest.raises(ValidationError, match="grammar"):
        list(client.text_generation("abc", grammar={"type": "regex", "value": "a"}, stream=stream))


def test_overload_and_failure_are_their_own_errors() -> None:
    with (
        parrot(max_num_seqs=1, max_num_queued_reqs=1) as server,
        InferenceClient(f"http://127.0.0.1:{server.port}") as client,
        server.held(),
        server.held(),
        pytest.raises(OverloadedError),
    ):
        client.text_generation("abc")
    with parrot() as server, InferenceClient(f"http://127.0.0.1:{server.port}") as client:
        server.runner.spoil = lambda request_id, position: "nan" if position == 1 else None
        with pytest.raises(GenerationError):
            client.text_generation("abc")
        with pytest.raises(GenerationError):
            list(client.text_generation("abc", stream=True))


def test_a_key_is_sent_and_asked_for() -> None:
    with parrot(api_keys=("k",)) as server:
        with InferenceClient(f"http://127.0.0.1:{server.port}", token="k") as client:
            assert client.text_generation("abc", return_full_text=False) == "abc"
        with (
            InferenceClient(f"http://127.0.0.1:{server.port}", token="other") as client,
            pytest.raises(Exception, match="key") as caught,
        ):
            client.text_generation("abc")
        assert caught.value.__cause__ is None or isinstance(caught.value.__cause__, HfHubHTTPError)


def test_chats_are_answered_whole_and_streamed(client: InferenceClient) -> None:
    answer = client.chat_completion(MESSAGES, model=MODEL, logprobs=True, top_logprobs=2)
    assert answer.choices[0].message.content == "schön 🚌"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is not None
    assert answer.usage.completion_tokens == len(answer.choices[0].logprobs.content)
    events = list(client.chat_completion(MESSAGES, model=MODEL, stream=True, stream_options={"include_usage": True}))
    assert "".join(event.choices[0].delta.content or "" for event in events if event.choices) == "schön 🚌"
    assert events[-1].usage is not None
    assert events[-1].usage.prompt_tokens == len("schön 🚌".encode())


def test_a_chat_needs_no_name_of_a_model(client: InferenceClient, server: ParrotServer) -> None:
    """As with TGI: the client sends a name that stands for whatever is served."""
    answer = client.chat_completion(MESSAGES, max_tokens=3)
    assert (answer.choices[0].message.content, answer.model) == ("sch", MODEL)
    events = list(client.chat_completion(MESSAGES, stream=True))
    assert "".join(event.choices[0].delta.content or "" for event in events) == "schön 🚌"
    with InferenceClient(base_url=f"http://127.0.0.1:{server.port}/v1") as other:
        assert other.chat_completion(MESSAGES, model="tgi").model == MODEL


def test_the_openai_spelling_works_too(client: InferenceClient) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=3)
    assert answer.choices[0].message.content == "sch"
    assert answer.choices[0].finish_reason == "length"


def test_the_description_of_the_server_is_found(server: ParrotServer) -> None:
    url = f"http://127.0.0.1:{server.port}"
    with InferenceClient(url, provider="hf-inference") as client:
        assert client.get_endpoint_info(model=url)["model_id"] == MODEL
        assert client.health_check(model=url)
