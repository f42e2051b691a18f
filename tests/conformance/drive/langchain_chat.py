"""LangChain's `ChatOpenAI` and `OpenAI`. `python langchain_chat.py URL MODEL`."""

from __future__ import annotations

import asyncio
import sys

from langchain_openai import ChatOpenAI, OpenAI


def drive(url: str, model: str) -> str:
    """Asks the server at `url` (without /v1); raises what a client would see of a fault, returns the first answer."""
    where = {"base_url": f"{url}/v1", "api_key": "unused", "model": model, "max_retries": 0}
    chat = ChatOpenAI(**where, temperature=0, max_tokens=8)
    conversation = [("system", "Be brief."), ("human", "Name a colour.")]
    answer = chat.invoke(conversation)
    assert answer.content
    assert answer.usage_metadata["total_tokens"] == sum(
        answer.usage_metadata[f"{side}_tokens"] for side in ("input", "output")
    )
    assert answer.response_metadata["finish_reason"] in ("stop", "length")
    streamed = list(chat.stream(conversation))
    assert "".join(chunk.content for chunk in streamed) == answer.content
    counted = ChatOpenAI(**where, temperature=0, max_tokens=8, stream_usage=True)
    assert any(chunk.usage_metadata for chunk in counted.stream(conversation))
    assert [each.content for each in chat.batch([conversation] * 3)] == [answer.content] * 3
    logprobs = chat.bind(logprobs=True, top_logprobs=2).invoke(conversation).response_metadata["logprobs"]
    assert len(logprobs["content"][0]["top_logprobs"]) == 2
    assert chat.bind(stop=["zzz"]).invoke(conversation).content == answer.content
    assert asyncio.run(chat.ainvoke(conversation)).content == answer.content
    follow_up = [*conversation, ("ai", answer.content), ("human", [{"type": "text", "text": "Another one."}])]
    assert chat.invoke(follow_up).content
    extended = ChatOpenAI(**where, temperature=0.5, max_tokens=4, top_p=0.9, seed=3, extra_body={"top_k": 4})
    assert extended.invoke(conversation).content is not None
    text = OpenAI(**where, temperature=0, max_tokens=6)
    assert "".join(text.stream("Hello")) == text.invoke("Hello")
    return answer.content


if __name__ == "__main__":
    print(drive(*sys.argv[1:]))
