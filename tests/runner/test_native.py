"""The native runner: its logits against transformers, and what it does with plans."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from tests.model.builders import write_folder
from tests.runner.invariance import storing
from tests.runner.models import (
    load_transformer,
    make_runner,
    random_model,
    random_transformer,
    reference_logits,
    transformer_from_gguf,
)

from everystop.core.kv_cache import KVCache
from everystop.core.limits import Limits
from everystop.core.plan import NO_TOKEN_LEFT, Admitted, NewBlocks, StepPlan
from everystop.core.policy import Continuous
from everystop.core.request import SamplingParams
from everystop.core.rows import Row
from everystop.core.scheduler import Scheduler
from everystop.engine.engine import Engine
from everystop.engine.messages import StepOutput, Submit
from everystop.model.checkpoint import inspect_model
from everystop.model.home import Home
from everystop.model.tokenizer_files import load_tokenizer
from everystop.model.weights import LoadedModel, load_model
from everystop.runner.native import NOT_FINITE, NOT_TAKEN, NativeRunner, Scores, bytes_per_block

GREEDY = SamplingParams(temperature=0.0)
TEXT = Path(__file__).parent.parent / "data" / "founding_documents.txt"
ROPE = {"rope_theta": 10_000.0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {}),
    "qwen2 with its biases": ("qwen2", {"hidden_size": 120}),
    "qwen3 with its norms": ("qwen3", {}),
    "a head for each query": ("llama", {"num_key_value_heads": 6}),
    "one KV head": ("qwen3", {"num_key_value_heads": 1}),
    "linear rope": ("llama", {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 2.0}}),
    "llama3 rope": (
        "llama",
        {
            "rope_parameters": ROPE
            | {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "yarn rope": (
        "qwen3",
        {"rope_parameters": ROPE | {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64}},
    ),
}


# ------------------------------------------------------------------ against transformers


def assert_close(logits: np.ndarray, reference: np.ndarray, tolerance: float) -> None:
    """Logits within the tolerance; the best token equal wherever the best two are further apart than that."""
    assert np.abs(logits - reference).max() < tolerance
    best_two = np.partition(reference, -2, axis=1)[:, -2:]
    clear = best_two[:, 1] - best_two[:, 0] > tolerance
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(logits.argmax(axis=1)[clear], reference.argmax(axis=1)[clear])


@pytest.mark.parametrize("variant", VARIANTS)
def test_tiny_models_of_each_family_equal_transformers(variant: str) -> None:
    architecture, overrides = VARIANTS[variant]
    model = random_transformer(architecture, **overrides)
    runner = make_runner(load_transformer(model, "float32"), max_num_batched_tokens=100)
    rng = np.random.default_rng(0)
    for length in (1, 5, 300):
        ids = rng.integers(0, 150, length).tolist()
        assert_close(runner.logits(ids), reference_logits(model, ids), 1e-4)


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype"), [("int8", "auto"), ("int8", "float16"), ("float32", "float16"), ("float32", "int8")]
)
def test_int8_and_stored_keys_follow_float32_closely(dtype: str, kv_cache_dtype: str) -> None:
    ids = np.random.default_rng(1).integers(0, 150, 200).tolist()
    exact = make_runner(random_model("llama", "float32")).logits(ids)
    rounded = make_runner(storing(random_model("llama", dtype), kv_cache_dtype)).logits(ids)
    assert np.corrcoef(exact.ravel(), rounded.ravel())[0, 1] > 0.999
    assert np.abs(exact - rounded).max() > 0


def test_weights_and_the_cache_have_types_of_their_own() -> None:
    """auto is int8 beside int8 and float32 beside float32; what is named is stored beside either."""
    ids = np.random.default_rng(2).integers(0, 150, 100).tolist()

    def logits(dtype: str, kv_cache_dtype: str) -> bytes:
        return make_runner(storing(random_model("llama", dtype), kv_cache_dtype)).logits(ids).tobytes()

    assert logits("int8", "auto") == logits("int8", "int8") != logits("int8", "float16")
    assert len({logits("float32", stored) for stored in ("auto", "float16", "int8")}) == 3
    with pytest.raises(ValueError, match="kv_cache_dtype must be float32, float16 or int8, not fp8"):
        make_runner(storing(random_model("llama", "int8"), "fp8"))


@pytest.fixture(scope="module")
def reference_model(smollm2_path: Path) -> transformers.PreTrainedModel:
    """The embedded model in transformers, float32."""
    return transformer_from_gguf(smollm2_path)


def text_tokens(smollm2_path: Path) -> list[int]:
    """The public-domain text (Declaration of Independence, Constitution, Gettysburg Address) as token ids."""
    return load_tokenizer(inspect_model(smollm2_path), Home.from_environment()).encode(TEXT.read_text())


def load_embedded(smollm2_path: Path, dtype: str) -> LoadedModel:
    """The embedded model, from the user's cache where it is there."""
    return load_model(inspect_model(smollm2_path), dtype=dtype, num_threads=2, home=Home.from_environment())


@pytest.mark.model
@pytest.mark.timeout(900)
def test_the_embedded_model_equals_transformers(
    smollm2_path: Path, reference_model: transformers.PreTrainedModel
) -> None:
    """Twenty-two prompts of 1 to 600 tokens, taken from all over the text."""
    text = text_tokens(smollm2_path)
    runner = make_runner(load_embedded(smollm2_path, "float32"))
    lengths = (1, 2, 3, 4, 5, 7, 8, 13, 15, 16, 17, 24, 31, 32, 33, 48, 64, 65, 100, 150, 257, 600)
    for index, length in enumerate(lengths):
        ids = text[index * 300 : index * 300 + length]
        assert_close(runner.logits(ids), reference_logits(reference_model, ids), 1e-3)


@cache
def scores_of(smollm2_path: Path, dtype: str, kv_cache_dtype: str = "auto") -> Scores:
    """How well the embedded model predicts the text, in windows of 2,048 tokens; computed once."""
    runner = make_runner(storing(load_embedded(smollm2_path, dtype), kv_cache_dtype))
    scores: Scores = runner.score(text_tokens(smollm2_path), window=2048)
    runner.close()
    return scores


@pytest.mark.model
@pytest.mark.timeout(900)
def test_an_int8_cache_costs_hardly_any_perplexity(smollm2_path: Path, record_property: Any) -> None:
    """Keys and values in int8 against float16 beside int8 weights, and against float32 beside float32. Anything that
    changes a rounding moves int8 weights by up to half a percent; float32 weights show what the cache alone does.
    """
    for dtype, wide, most, least in (("int8", "float16", 1.005, 0.955), ("float32", "float32", 1.003, 0.983)):
        plain, small = (scores_of(smollm2_path, dtype, stored) for stored in (wide, "int8"))
        agreement = float((plain.best_ids == small.best_ids).mean())
        figures = {wide: plain.perplexity, "int8": small.perplexity, "top1_agreement": agreement}
        record_property(f"kv_cache_of_{dtype}", figures)
        print(f"weights {dtype}, KV cache:", figures)
        assert small.perplexity < most * plain.perplexity
        assert agreement > least


@pytest.mark.model
@pytest.mark.timeout(900)
def test_int8_perplexity_is_within_one_percent(smollm2_path: Path, record_property: Any) -> None:
    assert len(text_tokens(smollm2_path)) >= 8000
    scores = {dtype: scores_of(smollm2_path, dtype) for dtype in ("float32", "int8")}
    agreement = (scores["int8"].best_ids == scores["float32"].best_ids).mean()
    record_property("perplexities", {dtype: score.perplexity for dtype, score in scores.items()})
    record_property("top1_agreement", agreement)
    print({dtype: score.perplexity for dtype, score in scores.items()}, "top-1 agreement", agreement)
    assert scores["int8"].perplexity < 1.01 * scores["float32"].perplexity
    assert agreement > 0.94


# --------------------------------------------------------------------------------- plans


def admitted(
    request_id: int, token_ids: Sequence[int], blocks: Sequence[int], params: SamplingParams = GREEDY, **fields: Any
) -> Admitted:
    """A request on board, its prompt all of `token_ids`."""
    defaults: dict[str, Any] = {"choice_index": 0, "stop_token_ids": (), "slot": 0, "adapter": ""}
    num_prompt = fields.pop("num_prompt_tokens", len(token_ids))
    return Admitted(
        request_id=request_id,
        token_ids=tuple(token_ids),
        num_prompt_tokens=num_prompt,
        params=params,
        block_table=tuple(blocks),
        **defaults | fields,
    )


@pytest.fixture
def runner() -> NativeRunner:
    """A tiny float32 model with 64 blocks of 32."""
    return make_runner(random_model("llama", "float32"))


def generate(runner: NativeRunner, request: Admitted, num_tokens: int) -> list[int]:
    """Prefill in one piece, then decode; the request stays on board."""
    length = len(request.token_ids)
    plan = StepPlan(0, rows=[Row(request.request_id, 0, length, 0, length - 1)], admitted=[request])
    tokens = list(runner.execute(plan).rows[0])
    for i in range(num_tokens - 1):
        plan = StepPlan(i + 1, rows=[Row(request.request_id, length + i, 1, 0, 0)])
        tokens += runner.execute(plan).rows[0]
    return tokens


def test_greedy_generation_follows_the_logits(runner: NativeRunner) -> None:
    prompt = [5, 17, 42, 9]
    tokens = generate(runner, admitted(1, prompt, range(2)), 30)
    runner.execute(StepPlan(99, released=[1]))
    logits = runner.logits(prompt + tokens)
    assert tokens == logits[3:-1].argmax(axis=1).tolist()


def test_a_chunk_that_samples_nothing_gives_no_token(runner: NativeRunner) -> None:
    request = admitted(1, range(1, 51), range(2))
    assert runner.execute(StepPlan(0, rows=[Row(1, 0, 20, 0, 20)], admitted=[request])).rows == [()]
    chunked = runner.execute(StepPlan(1, rows=[Row(1, 20, 30, 0, 29)])).rows
    whole = runner.execute(StepPlan(2, rows=[Row(2, 0, 50, 0, 49)], admitted=[request._replace(request_id=2)])).rows
    assert len(chunked[0]) == 1
    assert chunked == whole


def test_time_spent_sampling_is_told_where_a_row_samples(runner: NativeRunner) -> None:
    request = admitted(1, range(1, 51), range(2))
    chunk = runner.execute(StepPlan(0, rows=[Row(1, 0, 20, 0, 20)], admitted=[request]))
    last = runner.execute(StepPlan(1, rows=[Row(1, 20, 30, 0, 29)]))
    assert chunk.sample_ns == 0
    assert 0 < last.sample_ns < last.execute_ns


def test_the_runner_tells_how_long_it_was_without_the_interpreter(runner: NativeRunner) -> None:
    request = admitted(1, range(1, 51), range(2))
    result = runner.execute(StepPlan(0, rows=[Row(1, 0, 50, 0, 49)], admitted=[request]))
    assert 0 < result.native_ns <= result.execute_ns - result.gil_wait_ns
    assert result.gil_wait_ns >= 0
    assert result.native_cpu_ns > 0


@pytest.mark.parametrize("block_size", [16, 32, 128])
@pytest.mark.parametrize(("dtype", "kv_cache_dtype"), [("int8", "auto"), ("float32", "auto"), ("int8", "float16")])
def test_what_is_fetched_ahead_changes_no_bit(dtype: str, kv_cache_dtype: str, block_size: int) -> None:
    """Enough rows and contexts for layers to fetch keys and values of the next attention, in blocks out of order."""
    logprobs = []
    for fetches in (True, False):
        model = storing(random_model("llama", dtype), kv_cache_dtype)
        runner = make_runner(model, num_blocks=400, max_num_seqs=32, block_size=block_size)
        runner._decoder.set_fetching(fetches)
        params = SamplingParams(temperature=0.0, logprobs=3)
        tables = [[9 * (i * 7 % 30) + k for k in range(9)] for i in range(30)]
        requests = [admitted(i, range(1 + i % 7, 100 + i), tables[i], params) for i in range(30)]
        for i, request in enumerate(requests):
            length = len(request.token_ids)
            plan = StepPlan(i, rows=[Row(i, 0, length - 1, 0, length - 1)], admitted=[request])
            runner.execute(plan)
        rows = [Row(i, len(request.token_ids) - 1, 1, 0, 0) for i, request in enumerate(requests)]
        logprobs.append(runner.execute(StepPlan(30, rows=rows)).logprobs)
        runner.close()
    assert len(logprobs[0]) == 30
    assert logprobs[0] == logprobs[1]


def test_rows_are_read_from_any_buffer_of_int64(runner: NativeRunner) -> None:
    decoder = runner._decoder
    for rows in (np.empty((0, 5), dtype=np.int64), array("q")):
        assert decoder.step(rows) == []
    for wrong in (
        np.zeros((1, 5), dtype=np.int32),
        np.zeros((1, 4), dtype=np.int64),
        array("q", [0] * 6),
        b"12345678" * 5,
    ):
        with pytest.raises(ValueError, match="a row has 5 entries of int64"):
            decoder.step(wrong)


def test_a_row_may_compute_positions_again(runner: NativeRunner) -> None:
    tokens = generate(runner, admitted(1, [3, 4, 5], range(2)), 10)
    again = runner.execute(StepPlan(50, rows=[Row(1, 5, 4, 0, 3)])).rows
    assert again == [(tokens[6],)]
    assert runner.execute(StepPlan(51, rows=[Row(1, 12, 1, 0, 0)])).rows != [()]


def test_copied_and_replaced_blocks_hold_the_same_tokens(runner: NativeRunner) -> None:
    """A fork continues on copies of its sibling's blocks exactly as the sibling does."""
    expected = generate(runner, admitted(1, range(1, 41), (0, 1)), 5)
    fork = admitted(2, range(1, 41), (0, 7))
    plan = StepPlan(9, rows=[Row(2, 39, 1, 0, 0)], admitted=[fork], copies=[(1, 7)])
    tokens = list(runner.execute(plan).rows[0])
    plan = StepPlan(10, rows=[Row(2, 40, 1, 0, 0)], new_blocks=[NewBlocks(2, 0, (9, 8, 3))], copies=[(0, 9), (7, 8)])
    tokens += runner.execute(plan).rows[0]
    assert tokens == expected[:2]


def test_padded_rows_change_nothing(runner: NativeRunner) -> None:
    """They may even lie where a finished request has no block any more."""
    expected = generate(runner, admitted(1, range(1, 30), range(2)), 4)
    request = admitted(2, range(1, 30), range(2, 4))
    tokens = generate(runner, request, 2)
    finished = admitted(3, range(1, 33), [5])
    generate(runner, finished, 1)
    for start in (30, 31):
        plan = StepPlan(start, rows=[Row(2, start, 1, 0, 0), Row(3, 32, 1, 0, 0)], num_padded_rows=1)
        tokens += runner.execute(plan).rows[0]
    assert tokens == expected


def test_logprobs_come_only_for_those_who_asked(runner: NativeRunner) -> None:
    asks = SamplingParams(temperature=0.0, logprobs=3)
    plan = StepPlan(
        0,
        rows=[Row(1, 0, 3, 0, 2), Row(2, 0, 3, 0, 2), Row(3, 0, 2, 0, 2)],
        admitted=[
            admitted(1, [4, 5, 6], [0]),
            admitted(2, [4, 5, 6], [1], asks),
            admitted(3, [4, 5, 6], [2], asks),
        ],
    )
    result = runner.execute(plan)
    assert list(result.logprobs) == [2]
    (entry,) = result.logprobs[2]
    assert entry.rank == 1
    assert entry.top[0] == (result.rows[1][0], entry.logprob)
    assert len(entry.top) == 3
    assert result.execute_ns > 0


def test_seeds_and_choices_choose_the_draw(runner: NativeRunner) -> None:
    def outcome(seed: int, choice: int) -> list[int]:
        params = SamplingParams(temperature=3.0, seed=seed)
        tokens = generate(runner, admitted(1, [4, 5, 6], [0], params, choice_index=choice), 12)
        runner.execute(StepPlan(99, released=[1]))
        return tokens

    assert outcome(42, 0) == outcome(42, 0)
    assert len({tuple(outcome(seed, choice)) for seed in (-1, 42, 2**63) for choice in (0, 1, 2)}) == 9


def test_min_tokens_masks_stop_ids_that_exist(runner: NativeRunner) -> None:
    (first,) = generate(runner, admitted(1, [4, 5, 6], [0]), 1)
    params = SamplingParams(temperature=0.0, min_tokens=1)
    (masked,) = generate(runner, admitted(2, [4, 5, 6], [1], params, stop_token_ids=(first, 10**6)), 1)
    assert masked != first


def test_a_row_without_a_token_says_so_and_leaves_the_others_alone(runner: NativeRunner) -> None:
    """A word of the only allowed token twice: in the second step no token is left, which is no failure."""
    expected = generate(runner, admitted(1, [4, 5, 6], [0]), 3)
    runner.execute(StepPlan(9, released=[1]))
    params = SamplingParams(temperature=0.0, allowed_token_ids=(7,), bad_word_ids=((7, 7),), logprobs=1)
    requests = [admitted(1, [4, 5, 6], [0]), admitted(2, [4, 5, 6], [1], params)]
    plan = StepPlan(10, rows=[Row(i, 0, 3, 0, 2) for i in (1, 2)], admitted=requests)
    assert runner.execute(plan).rows == [(expected[0],), (7,)]
    result = runner.execute(StepPlan(11, rows=[Row(i, 3, 1, 0, 0) for i in (1, 2)]))
    assert (result.rows, result.logprobs) == ([(expected[1],), NO_TOKEN_LEFT], {})
    plan = StepPlan(12, rows=[Row(1, 4, 1, 0, 0)], released=[2])
    assert runner.execute(plan).rows == [(expected[2],)]


def test_padded_vocabulary_rows_are_never_sampled() -> None:
    model = random_model("llama", "float32")
    whole = make_runner(model)
    narrow = make_runner(model, num_valid_tokens=40)
    ids = list(range(1, 30))
    np.testing.assert_array_equal(narrow.logits(ids), whole.logits(ids)[:, :40])
    params = SamplingParams(temperature=5.0, seed=1)
    assert max(generate(narrow, admitted(1, ids, [0, 1, 2], params), 50)) < 40


@pytest.mark.parametrize(("dtype", "kv_cache_dtype"), [("float32", "auto"), ("int8", "auto"), ("int8", "int8")])
def test_a_row_that_is_not_finite_fails_alone(dtype: str, kv_cache_dtype: str) -> None:
    """One token's embedding is NaN: its request fails, also in later steps, and nobody else notices."""
    model = storing(random_model("llama", dtype), kv_cache_dtype)
    poisoned = {name: array.copy() if name == "embed_tokens" else array for name, array in model.weights.items()}
    poisoned["embed_tokens"][77] = np.nan
    broken = replace(model, weights=poisoned)
    expected = generate(make_runner(model), admitted(1, [1, 2, 3], [0]), 2)
    runner = make_runner(broken)
    requests = [admitted(1, [1, 2, 3], [0]), admitted(2, [1, 77, 3], [1]), admitted(3, [1, 2, 3], [2])]
    plan = StepPlan(0, rows=[Row(i, 0, 3, 0, 2) for i in (1, 2, 3)], admitted=requests)
    assert runner.execute(plan).rows == [(expected[0],), NOT_FINITE, (expected[0],)]
    plan = StepPlan(1, rows=[Row(i, 3, 1, 0, 0) for i in (1, 2, 3)])
    assert runner.execute(plan).rows == [(expected[1],), NOT_FINITE, (expected[1],)]
    # The blocks of the failed request serve the next one.
    plan = StepPlan(2, rows=[Row(4, 0, 3, 0, 2)], admitted=[admitted(4, [1, 2, 3], [1])], released=[2])
    assert runner.execute(plan).rows == [(expected[0],)]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (StepPlan(0, rows=[Row(9, 0, 1, 0, 0)]), "request 9 is not on board"),
        (StepPlan(0, rows=[Row(1, 0, 4, 0, 3)]), "ends at position 4 of 3 known tokens"),
        (StepPlan(0, rows=[Row(1, -1, 1, 0, 0)]), "malformed"),
        (StepPlan(0, rows=[Row(1, 0, 0, 0, 0)]), "malformed"),
        (StepPlan(0, rows=[Row(2, 0, 40, 0, 39)]), "its blocks hold 32"),
        (StepPlan(0, rows=[Row(1, 0, 1, 0, 1)] * 9), "rows"),
        (StepPlan(0, copies=[(0, 64)]), "block 64 is outside the pool of 64"),
        (StepPlan(0, new_blocks=[NewBlocks(1, 0, (-1,))]), "block -1 is outside"),
        (StepPlan(0, new_blocks=[NewBlocks(1, 5, (1,))]), "none can be set from index 5"),
        (StepPlan(0, admitted=[admitted(1, [1], [0])]), "on board already"),
        (StepPlan(0, admitted=[admitted(3, [1], [64])]), "block 64"),
        (StepPlan(0, admitted=[admitted(3, [], [0])]), "prompt tokens"),
    ],
)
def test_impossible_plans_are_refused_and_the_runner_lives(runner: NativeRunner, plan: StepPlan, message: str) -> None:
    setup = StepPlan(0, admitted=[admitted(1, [1, 2, 3], [0]), admitted(2, range(1, 41), [1])])
    runner.execute(setup)
    with pytest.raises(ValueError, match=message):
        runner.execute(plan)
    assert len(runner.execute(StepPlan(1, rows=[Row(1, 0, 3, 0, 2)])).rows[0]) == 1


@pytest.mark.parametrize(
    ("token_ids", "params"),
    [
        ([*range(1, 40), 150], {}),
        ([*range(1, 40), -1], {}),
        (range(1, 41), {"allowed_token_ids": (150,)}),
        (range(1, 41), {"allowed_token_ids": (2**40,)}),
        (range(1, 41), {"logit_bias": ((150, 1.0),)}),
    ],
)
def test_a_request_that_cannot_be_taken_fails_alone(
    runner: NativeRunner, token_ids: Sequence[int], params: dict[str, Any]
) -> None:
    """Another that shares its first block in the same step gets what it would get alone."""
    first, expected = generate(runner, admitted(9, range(1, 40), [2, 3]), 2)
    other = admitted(1, range(1, 40), [0, 1])
    bad = admitted(2, token_ids, [0, 4], SamplingParams(**{"temperature": 0.0, "logprobs": 1, **params}))
    plan = StepPlan(0, rows=[Row(2, 0, 40, 0, 39), Row(1, 32, 7, 0, 6)], admitted=[bad, other], released=[9])
    result = runner.execute(plan)
    assert result.rows == [NOT_TAKEN, (first,)]
    assert result.logprobs == {}
    # A row that was planned before the failure was known fails too; then the id may be used again.
    plan = StepPlan(1, rows=[Row(2, 40, 1, 0, 0), Row(1, 39, 1, 0, 0)])
    assert runner.execute(plan).rows == [NOT_TAKEN, (expected,)]
    again = admitted(2, range(1, 40), [0, 1])
    plan = StepPlan(2, rows=[Row(2, 0, 39, 0, 38)], admitted=[again], released=[2, 1])
    assert runner.execute(plan).rows == [(first,)]


def test_choices_share_their_allowed_ids(runner: NativeRunner) -> None:
    """Converted once for the n choices of a request, which have one tuple; never mixed up with another's."""
    few, many = SamplingParams(allowed_token_ids=(7,)), SamplingParams(allowed_token_ids=(8, 9))
    first = runner._allowed_ids(few)
    assert runner._allowed_ids(replace(few, seed=3)) is first
    requests = [admitted(i, [1, 2, 3], [i], few if i % 2 else many, choice_index=i) for i in range(6)]
    rows = runner.execute(StepPlan(0, rows=[Row(i, 0, 3, 0, 2) for i in range(6)], admitted=requests)).rows
    assert rows[1::2] == [(7,)] * 3
    assert {row[0] for row in rows[::2]} <= {8, 9}


def test_an_engine_outlives_a_request_that_cannot_be_taken() -> None:
    """Its client gets an error, its blocks come back, and the next request is served."""
    model = random_model("llama", "float32")
    kv = KVCache(num_blocks=8, block_size=32, enable_prefix_caching=True)
    scheduler = Scheduler(Limits(max_num_seqs=4), kv, Continuous())
    engine = Engine(scheduler, make_runner(model, num_blocks=8, max_num_seqs=4), eos_token_ids=())
    outputs: queue.SimpleQueue[list[StepOutput]] = queue.SimpleQueue()
    engine.on_outputs = outputs.put
    engine.start()
    try:
        engine.submit(
            Submit(engine.allocate_ids(1), (1, 2, 3), SamplingParams(allowed_token_ids=(10**6,), max_tokens=9))
        )
        (failed,) = outputs.get(timeout=60)
        assert failed.finish_reason == "error"
        assert NOT_TAKEN in str(failed.error)
        assert kv.pool.num_free == 8
        engine.submit(Submit(engine.allocate_ids(1), (1, 2, 3), SamplingParams(max_tokens=1)))
        (served,) = outputs.get(timeout=60)
        assert (served.finish_reason, len(served.token_ids)) == ("length", 1)
    finally:
        engine.stop()


OPEN_AT_THE_END = """
import sys, threading, time
from pathlib import Path
from everystop.model.checkpoint import inspect_model
from everystop.model.weights import load_model
from everystop.runner.native import NativeRunner

model = load_model(inspect_model(Path(sys.argv[1])), dtype="float32", num_threads=1)
runner = NativeRunner(
    model, num_blocks=8, block_size=32, max_num_batched_tokens=64, max_num_seqs=2, num_threads=2
)

def compute():
    while True:
        runner.logits([1] * 64)

if sys.argv[2] == "busy":
    threading.Thread(target=compute, daemon=True).start()
    time.sleep(0.1)
else:
    runner.logits([1] * 64)
"""


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_a_process_that_ends_with_a_decoder_open_ends_cleanly(tmp_path: Path, state: str) -> None:
    """A daemon thread that comes back from a step finds no interpreter any more; five times, for it is a race."""
    folder = write_folder(tmp_path, random_transformer("llama"))
    command = [sys.executable, "-c", OPEN_AT_THE_END, str(folder), state]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    for _ in range(5 if state == "busy" else 1):
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_weights_of_another_shape_are_refused() -> None:
    model = random_model("llama", "float32")
    for name, change in (("norm", lambda a: a[:-1]), ("layers.0.o", lambda a: a[64:]), ("layers.1.qkv", None)):
        weights = dict(model.weights)
        if change is None:
            del weights[name]
        else:
            weights[name] = change(weights[name])
        broken = LoadedModel(
            spec=model.spec, dtype="float32", layout=model.layout, weights=weights, from_cache=False, notes=()
        )
        with pytest.raises(ValueError, match=name):
            make_runner(broken)


def test_blocks_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="block_size must be"):
        make_runner(random_model("llama", "float32"), block_size=48)


def test_bytes_per_block_counts_keys_and_padded_values() -> None:
    spec = random_model("llama", "int8").spec
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim) == (2, 2, 20)
    assert bytes_per_block(spec, 32, "float16") == 2 * 2 * 32 * (20 + 32) * 2
    assert bytes_per_block(spec, 32, "float32") == 2 * bytes_per_block(spec, 32, "float16")
    assert bytes_per_block(spec, 32, "int8") == 2 * 2 * 32 * (20 + 32 + 8)
