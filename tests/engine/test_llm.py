"""`LLM` over the embedded model: misuse that must not cost more than its own call."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from everystop import LLM, SamplingParams
from everystop.core.errors import EngineDead, EverystopError, RequestError

pytestmark = pytest.mark.model
SETTINGS: dict[str, Any] = {"kv_cache_memory": 64 << 20, "max_model_len": 512, "max_num_seqs": 8}
QUESTION, GREEDY = "The capital of France is", SamplingParams(max_tokens=2, temperature=0)
ENDLESS = SamplingParams(max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2", **SETTINGS) as llm:
        yield llm


def answer(llm: LLM) -> str:
    return llm.generate(QUESTION, GREEDY)[0].outputs[0].text


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        ([1, 2.5], {}),
        ([-1], {}),
        ("", {}),
        ([[]], {}),
        (b"ab", {}),
        ("\ud83d", {}),
        ([1] * 600, {}),
        ("a", {"top_k": 10**30}),
        ("a", {"seed": 1.5}),
        ("a", {"stop": (b"x",)}),
        ("a", {"logprobs": 65}),
        ("a", {"repetition_penalty": 1e-300}),
        ("a", {"stop": "ab"}),
    ],
)
def test_a_bad_call_is_refused_and_the_next_one_served(llm: LLM, prompt: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        llm.generate(prompt, SamplingParams(**{"max_tokens": 2, **fields}))
    assert answer(llm) == " Paris."


def test_prompts_of_every_kind(llm: LLM) -> None:
    ids = llm.tokenizer.encode(QUESTION)
    prompts = [QUESTION, tuple(ids), np.array(ids), [np.int64(token) for token in ids]]
    assert {output.outputs[0].text for output in llm.generate(prompts, GREEDY)} == {" Paris."}
    assert llm.generate(np.array(ids), GREEDY)[0].outputs[0].text == " Paris."
    assert llm.generate([], GREEDY) == []
    with pytest.raises(EverystopError, match="2 prompts, but 1"):
        llm.generate(["a", "b"], [GREEDY])


@pytest.mark.parametrize("after_s", [0.002, 0.05, 0.3])
def test_an_interrupted_call_leaves_nothing_behind(llm: LLM, after_s: float) -> None:
    timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["Once upon a time"] * 64, ENDLESS)
    timer.join()
    assert answer(llm) == " Paris."
    assert llm.engine._scheduler.requests == {}
    assert llm.engine._scheduler.kv.pool.num_free == llm.capacity.num_blocks


def test_calls_from_several_threads_take_turns(llm: LLM) -> None:
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(answer(llm)), daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert texts == [" Paris."] * 4


def test_closing_ends_a_call_in_another_thread_and_may_be_repeated() -> None:
    llm, ends = LLM("smollm2", **SETTINGS), []

    def generate() -> None:
        try:
            llm.generate("Once", ENDLESS)
        except EngineDead as error:
            ends.append(error)

    thread = threading.Thread(target=generate, daemon=True)
    thread.start()
    time.sleep(0.1)
    llm.close()
    thread.join(30)
    llm.close()
    assert len(ends) == 1
    with pytest.raises(EngineDead):
        answer(llm)


def test_two_models_side_by_side(llm: LLM) -> None:
    with LLM("smollm2", **SETTINGS, dtype="float32") as other:
        assert answer(other) == answer(llm) == " Paris."
