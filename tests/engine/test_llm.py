"""`LLM` over the embedded model: misuse that must not cost more than its own call."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.interrupts import interruptible
from tests.model.builders import tiny_model, write_folder
from tests.model.vocabularies import sentencepiece_inner, write_tokenizer

from everystop import LLM, SamplingParams
from everystop.core.errors import ConfigError, EngineDead, EverystopError, RequestError
from everystop.model.bad_words import bad_word_ids
from everystop.model.tokenizer import RenderedPrompt

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


def test_cached_tokens_are_what_the_first_choice_found_as_in_the_servers_usage() -> None:
    """A choice that boards when the first has left finds what that one computed, which saves the caller nothing."""
    prompt, several = [100 + i for i in range(70)], SamplingParams(max_tokens=2, n=2)
    with LLM("smollm2", **SETTINGS | {"max_num_seqs": 1}) as llm:
        assert [llm.generate(prompt, several)[0].num_cached_tokens for _ in range(2)] == [0, 64]


@pytest.mark.parametrize("after_s", [0.002, 0.05, 0.3])
def test_an_interrupted_call_leaves_nothing_behind(llm: LLM, after_s: float) -> None:
    timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT))

    def call() -> None:
        timer.start()  # it may fire before this line has ended
        llm.generate(["Once upon a time"] * 64, ENDLESS)

    with interruptible(), pytest.raises(KeyboardInterrupt):
        call()
    timer.join()
    assert answer(llm) == " Paris."
    assert llm.engine._scheduler.requests == {}
    assert llm.engine._scheduler.kv.pool.num_free == llm.capacity.num_blocks


@pytest.mark.parametrize(
    ("fields", "text", "num_tokens"),
    [
        ({}, "", 3),
        ({"skip_special_tokens": False}, "<|im_end|>" * 3, 3),
        ({"stop": ("<|im_end|>",)}, "", 1),
        ({"stop": ("<|im_end|>",), "skip_special_tokens": False, "include_stop_str_in_output": True}, "<|im_end|>", 1),
        ({"stop": ("end|><",), "skip_special_tokens": False}, "<|im_", 2),
        ({"stop": ("end|><",), "skip_special_tokens": False, "include_stop_str_in_output": True}, "<|im_end|><", 2),
    ],
)
def test_control_tokens_and_stops_show_as_in_the_api(
    llm: LLM, fields: dict[str, Any], text: str, num_tokens: int
) -> None:
    [end] = llm.tokenizer.encode_rendered(RenderedPrompt(text="<|im_end|>"))
    params = SamplingParams(max_tokens=3, allowed_token_ids=(end,), ignore_eos=True, **fields)
    [choice] = llm.generate(QUESTION, params)[0].outputs
    assert (choice.text, len(choice.token_ids)) == (text, num_tokens)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("min_tokens", [0, 3])
def test_an_answer_ends_where_no_token_is_left(llm: LLM, temperature: float, min_tokens: int) -> None:
    """`min_tokens` is held up by the same settings, and cannot be had."""
    token = llm.tokenizer.encode(" the")[-1]
    params = SamplingParams(
        max_tokens=9,
        min_tokens=min_tokens,
        temperature=temperature,
        allowed_token_ids=(token,),
        bad_word_ids=((token, token),),
        stop=("zz",),
    )
    [choice] = llm.generate(QUESTION, params)[0].outputs
    assert (choice.text, choice.token_ids) == (" the", [token])
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)
    assert answer(llm) == " Paris."


def test_calls_from_several_threads_take_turns(llm: LLM) -> None:
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(answer(llm)), daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert texts == [" Paris."] * 4


def test_closing_ends_a_call_in_another_thread_and_may_be_repeated() -> None:
    llm, ends = LLM("smollm2", **SETTINGS), []

    def generate() -> None:
        try:
            llm.generate(["Once upon a time"] * 64, ENDLESS)
        except EngineDead as error:
            ends.append(error)

    thread = threading.Thread(target=generate, daemon=True)
    thread.start()
    time.sleep(0.1)
    llm.close()
    thread.join(60)
    llm.close()
    assert len(ends) == 1
    with pytest.raises(EngineDead):
        answer(llm)


@pytest.mark.parametrize(
    "ending",
    [
        "",
        "llm.close()",
        "raise SystemExit(0)",
        "del llm",
    ],
)
def test_a_program_that_ends_ends_cleanly(ending: str) -> None:
    settings = "kv_cache_memory=64 << 20, max_model_len=512"
    code = (
        f"from everystop import LLM, SamplingParams\nllm = LLM('smollm2', {settings})\n"
        f"print(llm.generate({QUESTION!r}, SamplingParams(max_tokens=2, temperature=0))[0].outputs[0].text)\n{ending}\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stdout) == (0, " Paris.\n")
    assert result.stderr == ""
    assert "leaked" not in result.stderr


def test_memory_of_a_forgotten_model_is_freed() -> None:
    llm = LLM("smollm2", **SETTINGS)
    engine, watch = weakref.ref(llm.engine), weakref.ref(llm)
    assert answer(llm) == " Paris."
    del llm
    gc.collect()
    assert watch() is None
    assert engine() is None


def test_two_models_side_by_side(llm: LLM) -> None:
    with LLM("smollm2", **SETTINGS, dtype="float32") as other:
        assert answer(other) == answer(llm) == " Paris."


def test_silent_calls_get_what_the_authors_recommend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERYSTOP_HOME", str(tmp_path / "home"))
    folder = write_tokenizer(write_folder(tmp_path / "m", tiny_model("llama", vocab_size=700)), sentencepiece_inner())
    recommended = {"temperature": 0.5, "top_k": 1, "max_new_tokens": 60}
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    settings: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 2}
    with LLM(str(folder), **settings) as llm:
        assert llm.default_params == SamplingParams(temperature=0.5, top_k=1, max_tokens=60)
        short, long = llm.generate([[5] * 3, [5] * 20])
        assert [len(output.outputs[0].token_ids) for output in (short, long)] == [60, 44]
        [asked] = llm.generate([5, 6], SamplingParams(max_tokens=7))
        assert len(asked.outputs[0].token_ids) == 7
    with LLM(str(folder), **settings, generation_config="none") as llm:
        assert llm.default_params == SamplingParams()


@pytest.mark.parametrize(("name", "words"), [("port", "port concerns the server"), ("max_num_seq", "max_num_seqs")])
def test_settings_that_could_not_be_honoured_are_refused(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM("smollm2", **{name: 9})


def test_prompts_are_scored_with_and_without_an_answer(llm: LLM) -> None:
    """What the model says of its own answer is what it said when it gave it."""
    given = SamplingParams(max_tokens=6, temperature=0, logprobs=2)
    [first] = llm.generate(QUESTION, given)
    [choice] = first.outputs
    prompt = [*first.prompt_token_ids, *choice.token_ids]
    scored = SamplingParams(max_tokens=0, prompt_logprobs=2)
    [answer_of_none] = llm.generate([prompt], scored)
    assert answer_of_none.prompt_logprobs[0] is None
    assert answer_of_none.prompt_logprobs[len(first.prompt_token_ids) :] == choice.logprobs
    assert answer_of_none.outputs[0].token_ids == []
    assert (answer_of_none.outputs[0].text, answer_of_none.outputs[0].finish_reason) == ("", "length")
    [both] = llm.generate([prompt], SamplingParams(max_tokens=2, prompt_logprobs=2, n=2, seed=1))
    assert both.prompt_logprobs == answer_of_none.prompt_logprobs
    assert first.prompt_logprobs == []


def test_bad_words_keep_an_answer_from_being_given(llm: LLM) -> None:
    words = bad_word_ids(["Paris"], partial(llm.tokenizer.encode, add_special=False))
    [plain, bound] = llm.generate([QUESTION, QUESTION], [GREEDY, SamplingParams(2, temperature=0, bad_word_ids=words)])
    assert "Paris" in plain.outputs[0].text
    assert "Paris" not in bound.outputs[0].text


def test_stop_string_waits_for_min_tokens(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    [plain] = llm.generate(QUESTION, params)
    text = plain.outputs[0].text
    stop = text[:3]
    [early] = llm.generate(QUESTION, replace(params, stop=(stop,)))
    [later] = llm.generate(QUESTION, replace(params, stop=(stop,), min_tokens=4))
    assert early.outputs[0].text == ""
    assert later.outputs[0].text.startswith(stop)
    assert len(later.outputs[0].token_ids) >= 4
