"""The official Python client: every kind of call that the two routes take. `python openai_python.py URL MODEL`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import openai

MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a colour."}]


def drive(url: str, model: str) -> None:
    """Asks the server at `url` (without /v1); raises what a client would see of a fault."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
        assert model in [each.id for each in client.models.list()]
        assert client.models.retrieve(model).id == model
        chat(client, model)
        completions(client, model)
        errors(client, model)
    asyncio.run(concurrently(url, model))


def chat(client: openai.OpenAI, model: str) -> None:
    """Whole and streamed, with choices, log-probabilities and usage."""
    request: dict[str, Any] = {"model": model, "messages": MESSAGES, "temperature": 0, "max_tokens": 8}
    whole = client.chat.completions.create(**request, n=2, logprobs=True, top_logprobs=2, seed=7, user="somebody")
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.system_fingerprint
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.completion_tokens_details is not None
    assert whole._request_id
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert all(len(token.top_logprobs) == 2 and token.bytes is not None for token in logprobs.content)
    text, usage = "", None
    for chunk in client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
        assert chunk.system_fingerprint == whole.system_fingerprint
    assert text == whole.choices[0].message.content
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    with client.chat.completions.stream(**request) as stream:
        assert len(list(stream)) > 2
        assert stream.current_completion_snapshot.choices[0].message.content == text
    parts = [{"type": "text", "text": "Name"}, {"type": "text", "text": "a colour."}]
    request["messages"] = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    client.chat.completions.create(**request, stop=None, response_format={"type": "text"}, metadata={"a": "b"})
    extras = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "include_metrics": True, "timings_per_token": True}
    extended = client.chat.completions.create(**request, extra_body=extras)
    assert extended.model_extra is not None
    assert extended.model_extra["metrics"]["time_to_first_token_ms"] > 0
    assert extended.model_extra["timings"]["predicted_n"] > 0


def completions(client: openai.OpenAI, model: str) -> None:
    """Prompts of every form, streamed and whole."""
    request: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 6}
    ids = [72, 101, 108, 108, 111]
    for prompt, num in (("Hello", 1), (["Hello", "there"], 2), (ids, 1), ([ids, ids[:2]], 2)):
        whole = client.completions.create(**request, prompt=prompt, n=2, logprobs=1)
        assert [choice.index for choice in whole.choices] == list(range(2 * num))
        assert whole.choices[0].logprobs is not None
        assert whole.choices[0].logprobs.tokens
    texts = [chunk.choices[0].text for chunk in client.completions.create(**request, prompt="Hello", stream=True)]
    assert "".join(texts) == client.completions.create(**request, prompt="Hello").choices[0].text
    stopped = client.completions.create(**request, prompt="Hello", stop=["e", "o"], logit_bias={"5": -100})
    assert stopped.choices[0].finish_reason in ("stop", "length")


def errors(client: openai.OpenAI, model: str) -> None:
    """Each status is the exception that the client has for it."""
    for error, code, request in (
        (openai.NotFoundError, "model_not_found", {"model": "gone", "messages": MESSAGES}),
        (openai.BadRequestError, "unsupported_field", {"model": model, "messages": MESSAGES, "tools": [tool()]}),
        (openai.BadRequestError, "invalid_value", {"model": model, "messages": MESSAGES, "temperature": -1}),
    ):
        caught = raised(error, partial(client.chat.completions.create, **request))
        assert caught.code == code, caught


def raised(kind: type[Exception], call: Callable[[], Any]) -> Any:
    """The exception of that kind which a call must raise."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def tool() -> dict[str, Any]:
    """A function that no model here can call."""
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


async def concurrently(url: str, model: str) -> None:
    """Eight requests of the asynchronous client at once."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
        request: dict[str, Any] = {"model": model, "messages": MESSAGES, "temperature": 0, "max_tokens": 5}
        answers = await asyncio.gather(*(client.chat.completions.create(**request) for _ in range(8)))
    assert len({answer.choices[0].message.content for answer in answers}) == 1


if __name__ == "__main__":
    drive(*sys.argv[1:])
