"""Prompts that are scored by the embedded model behind a server, as evaluation tools ask for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.server.parrot import parse_events
from tests.server.test_model import ServerProcess

pytestmark = pytest.mark.model
TEXT = "The quick brown fox jumps over the lazy dog. Étienne a mangé 3 crêpes à l'œuf 🥚. 日本語も少し。\n" * 12
GREEDY = {"temperature": 0, "seed": 1}


@pytest.fixture(scope="module")
def served() -> Iterator[ServerProcess]:
    """Chunks of 100 tokens, so that the text takes several."""
    with ServerProcess("--max-model-len", "2048", "--max-num-seqs", "8", "--max-num-prefill-tokens", "100") as server:
        yield server


def complete(served: ServerProcess, **body: Any) -> Any:
    status, _, answer = served.request("POST", "/v1/completions", {**GREEDY, **body})
    assert status == 200, answer
    return json.loads(answer)


def test_echo_is_exact_cold_and_warm_alone_and_in_company(served: ServerProcess) -> None:
    body = {"prompt": TEXT, "echo": True, "max_tokens": 0, "logprobs": 3}
    cold = complete(served, **body)
    complete(served, prompt=TEXT, max_tokens=1)
    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(complete, served, prompt=TEXT[i:], max_tokens=20) for i in range(4)]
        again = [pool.submit(complete, served, **body) for _ in range(3)]
        answers = [future.result() for future in again]
        for other in others:
            other.result()
    for answer in answers:
        assert answer["choices"] == cold["choices"]
    [choice] = cold["choices"]
    logprobs, num_tokens = choice["logprobs"], cold["usage"]["prompt_tokens"]
    assert num_tokens > 300
    assert choice["text"] == TEXT
    assert [len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [
        num_tokens
    ] * 4
    assert logprobs["token_logprobs"][0] is None
    assert all(-50 < logprob < 0 for logprob in logprobs["token_logprobs"][1:])


def test_offsets_and_tokens_join_to_the_text(served: ServerProcess) -> None:
    [choice] = complete(served, prompt=TEXT, echo=True, max_tokens=5, logprobs=0)["choices"]
    text, logprobs = choice["text"], choice["logprobs"]
    ends = [*logprobs["text_offset"][1:], len(text)]
    pieces = [text[start:end] for start, end in zip(logprobs["text_offset"], ends, strict=True)]
    assert "".join(pieces) == text
    whole = [(piece, token) for piece, token in zip(pieces, logprobs["tokens"], strict=True) if token[:6] != "bytes:"]
    assert len(whole) > 200
    assert sum(piece == token for piece, token in whole) > 0.95 * len(whole)  # others finish a character
    joined = b"".join(bytes(byte) for byte in logprobs["bytes"])
    assert joined.decode() == text


def test_both_dialects_and_the_stream_say_the_same(served: ServerProcess) -> None:
    body = {"prompt": TEXT[:400], "max_tokens": 2}
    [choice] = complete(served, **body, echo=True, logprobs=2, prompt_logprobs=2)["choices"]
    echoed = choice["logprobs"]["token_logprobs"]
    ids = complete(served, **body, return_token_ids=True)["choices"][0]["prompt_token_ids"]
    entries = zip(ids, choice["prompt_logprobs"], strict=True)
    dialect = [None if entry is None else entry[str(i)]["logprob"] for i, entry in entries]
    assert dialect == echoed[: len(ids)]
    status, _, answer = served.request(
        "POST", "/v1/completions", {**GREEDY, **body, "echo": True, "logprobs": 2, "stream": True}
    )
    assert status == 200
    streamed: list[Any] = []
    for event in parse_events(answer)[:-1]:
        for part in event["choices"]:
            streamed += (part["logprobs"] or {}).get("token_logprobs", [])
    assert streamed == echoed


def test_the_models_own_answer_is_greedy_when_it_is_scored(served: ServerProcess) -> None:
    """As lm-eval asks: context and continuation as ids, echo, one token, which is cut off again."""
    question = "The capital of France is"
    answer = complete(served, prompt=question, max_tokens=8, ignore_eos=True, logprobs=1, return_token_ids=True)
    [choice] = answer["choices"]
    context, continuation = choice["prompt_token_ids"], choice["token_ids"]
    scored = complete(served, prompt=[[*context, *continuation]], echo=True, max_tokens=1, logprobs=1)
    logprobs = scored["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][len(context) : -1] == choice["logprobs"]["token_logprobs"]
    tokens, tops = logprobs["tokens"][len(context) : -1], logprobs["top_logprobs"][len(context) : -1]
    assert all(token == max(top, key=top.__getitem__) for token, top in zip(tokens, tops, strict=True))
    wrong = complete(served, prompt=question + " Berlin", echo=True, max_tokens=0, logprobs=1)
    right = complete(served, prompt=question + " Paris", echo=True, max_tokens=0, logprobs=1)
    sums = [sum(one["choices"][0]["logprobs"]["token_logprobs"][len(context) :]) for one in (wrong, right)]
    assert sums[0] < sums[1]


def test_bad_words_and_truncation_reach_the_model(served: ServerProcess) -> None:
    question = {"prompt": "The capital of France is", "max_tokens": 6}
    assert "Paris" in complete(served, **question)["choices"][0]["text"]
    assert "Paris" not in complete(served, **question, bad_words=["Paris"])["choices"][0]["text"]
    cut = complete(served, prompt=TEXT * 9, max_tokens=0, echo=True, truncate_prompt_tokens=7, return_token_ids=True)
    [choice] = cut["choices"]
    assert len(choice["prompt_token_ids"]) == cut["usage"]["prompt_tokens"] == 7
    assert TEXT.endswith(choice["text"][-5:])
    fits = complete(served, prompt=TEXT * 9, max_tokens=48, truncate_prompt_tokens=-1, ignore_eos=True)
    assert fits["usage"]["prompt_tokens"] == 2000
    assert fits["usage"]["completion_tokens"] == 48
