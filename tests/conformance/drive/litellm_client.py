"""LiteLLM by its providers `openai/` and `hosted_vllm/`. `python litellm_client.py URL MODEL`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network for prices

import litellm

MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a colour."}]


def drive(url: str, model: str) -> str:
    """Asks the server at `url` (without /v1); raises what a client would see of a fault, returns an answer."""
    for provider in ("openai", "hosted_vllm"):
        where = {"model": f"{provider}/{model}", "api_base": f"{url}/v1", "api_key": "unused", "num_retries": 0}
        request: dict[str, Any] = {**where, "messages": MESSAGES, "temperature": 0, "max_tokens": 8}
        whole = litellm.completion(**request, n=2, logprobs=True, top_logprobs=2, user="somebody")
        assert len(whole.choices) == 2
        assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
        text, usage = "", None
        for chunk in litellm.completion(**request, stream=True, stream_options={"include_usage": True}):
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = getattr(chunk, "usage", None) or usage
        assert text == whole.choices[0].message.content
        assert usage is not None
        extended = litellm.completion(**request, top_p=0.9, seed=2, stop=["zzz"], extra_body={"top_k": 4})
        assert extended.choices[0].finish_reason in ("stop", "length")
        assert asyncio.run(litellm.acompletion(**request)).choices[0].message.content == text
        impossible = {**request, "temperature": -1}
        assert "temperature" in str(raised(litellm.BadRequestError, partial(litellm.completion, **impossible)))
    text_request: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": "unused", "temperature": 0, "max_tokens": 6}
    answer = litellm.text_completion(model=f"text-completion-openai/{model}", prompt="Hello", **text_request)
    assert answer.choices[0].text is not None
    return text


def raised(kind: type[Exception], call: Callable[[], Any]) -> Any:
    """The exception of that kind which a call must raise."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


if __name__ == "__main__":
    print(drive(*sys.argv[1:]))
