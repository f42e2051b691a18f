"""Hugging Face's `InferenceClient`, its chat calls. `python hub.py URL MODEL`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError

MESSAGES: list[Any] = [{"role": "user", "content": "Name a colour."}]


def drive(url: str, model: str) -> None:
    """Asks the server at `url` (without /v1); raises what a client would see of a fault."""
    client = huggingface_hub.InferenceClient(base_url=f"{url}/v1", api_key="unused", timeout=60)
    request: dict[str, Any] = {"model": model, "messages": MESSAGES, "temperature": 0, "max_tokens": 8}
    whole = client.chat_completion(**request, logprobs=True, top_logprobs=2, stop=["zzz"], seed=1, top_p=0.9)
    assert whole.choices[0].message.content
    assert whole.choices[0].logprobs is not None
    assert whole.usage.completion_tokens > 0
    text = ""
    for chunk in client.chat_completion(**request, stream=True, stream_options={"include_usage": True}):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    plain = client.chat.completions.create(**request)
    assert text == plain.choices[0].message.content
    extended = client.chat_completion(**request, extra_body={"top_k": 5})
    assert extended.choices[0].finish_reason in ("stop", "length")
    error = raised(HfHubHTTPError, lambda: client.chat_completion(**{**request, "temperature": -1}))
    assert error.response.status_code == 400
    assert "temperature" in str(error)


def raised(kind: type[Exception], call: Callable[[], Any]) -> Any:
    """The exception of that kind which a call must raise."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


if __name__ == "__main__":
    drive(*sys.argv[1:])
