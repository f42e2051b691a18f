"""Log-probabilities of prompts: those of a full forward pass, and bitwise the same however the prompt is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import transformers
from tests.runner.invariance import (
    BLOCK_SIZES,
    GREEDY,
    RANDOM,
    Prompt,
    Run,
    Setting,
    assert_same,
    make_prompts,
    serve,
    serve_alone,
)
from tests.runner.models import (
    load_transformer,
    make_runner,
    random_model,
    random_transformer,
    reference_logits,
    transformer_from_gguf,
)

from everystop.core.plan import Admitted, PromptLogits, StepPlan, TokenLogprobs
from everystop.core.policy import Priority
from everystop.core.request import SamplingParams
from everystop.core.rows import Row
from everystop.model.checkpoint import inspect_model
from everystop.model.home import Home
from everystop.model.weights import LoadedModel, load_model
from everystop.runner.native import NOT_FINITE, NOT_TAKEN, NativeRunner

SCORED = SamplingParams(temperature=0.0, max_tokens=3, logprobs=2, prompt_logprobs=3)


@pytest.fixture(scope="module", params=("int8", "float32"))
def tiny(request: pytest.FixtureRequest) -> LoadedModel:
    """A tiny model with sizes that fit no vector."""
    return random_model("llama", request.param)


def naive_scores(logits: np.ndarray, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """By definition, in float64, from logits [T, V] after each token."""
    scores = []
    for row, token in zip(logits[:-1].astype(np.float64), token_ids[1:], strict=True):
        logprobs = row - row.max() - np.log(np.exp(row - row.max()).sum())
        order = np.lexsort((np.arange(len(row)), -row))  # ties to the lowest id
        top = tuple((int(i), float(logprobs[i])) for i in order[:num_top])
        scores.append(TokenLogprobs(float(logprobs[token]), int(np.flatnonzero(order == token)[0]) + 1, top))
    return scores


def assert_close(scores: Sequence[TokenLogprobs], expected: Sequence[TokenLogprobs], tolerance: float) -> None:
    assert len(scores) == len(expected)
    for score, other in zip(scores, expected, strict=True):
        assert abs(score.logprob - other.logprob) < tolerance
        assert np.allclose([lp for _, lp in score.top], [lp for _, lp in other.top], atol=tolerance)


def score(model: LoadedModel, token_ids: Sequence[int], num_top: int, setting: Setting = Setting()) -> Run:  # noqa: B008
    prompt = Prompt(tuple(token_ids), replace(SCORED, prompt_logprobs=num_top, max_tokens=0))
    return serve(model, setting, [prompt])


@pytest.mark.parametrize("length", [1, 2, 5, 90])
@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_scores_are_those_of_the_models_own_logits(tiny: LoadedModel, length: int, num_top: int) -> None:
    """The runner's logits apart from plans are the same bits, so ids and ranks agree exactly."""
    token_ids = make_prompts([length], tiny.spec.vocab_size)[0].token_ids
    scores = score(tiny, token_ids, num_top, Setting(max_num_prefill_tokens=33)).prompt_logprobs[0, 0]
    expected = naive_scores(make_runner(tiny).logits(token_ids), token_ids, num_top)
    assert_close(scores, expected, 1e-5)
    assert [(s.rank, [i for i, _ in s.top]) for s in scores] == [(s.rank, [i for i, _ in s.top]) for s in expected]


def test_scores_are_those_of_transformers() -> None:
    model = random_transformer("llama")
    token_ids = np.random.default_rng(4).integers(0, 150, 200).tolist()
    scores = score(load_transformer(model, "float32"), token_ids, 5).prompt_logprobs[0, 0]
    assert_close(scores, naive_scores(reference_logits(model, token_ids), token_ids, 5), 1e-4)


def test_sampled_and_scored_tokens_agree_to_the_bit(tiny: LoadedModel) -> None:
    """What the model said of its own answer, it says again when the answer stands in a prompt."""
    [prompt] = make_prompts([40], tiny.spec.vocab_size, max_tokens=25)
    run = serve(tiny, Setting(), [prompt])
    answer, logprobs = run.tokens[0, 0], run.logprobs[0, 0]
    scores = score(tiny, (*prompt.token_ids, *answer), 2).prompt_logprobs[0, 0]
    assert scores[39:] == logprobs


def mixed(vocab_size: int, max_tokens: int = 30) -> list[Prompt]:
    """Eight requests: some are scored, some generate nothing, and some only generate."""
    prompts = make_prompts((33, 90, 1, 64, 150, 17, 2, 47), vocab_size, max_tokens=max_tokens)
    for index, wish in {0: 0, 1: 3, 2: 1, 4: 20, 6: 2, 7: 5}.items():
        params = replace(prompts[index].params, prompt_logprobs=wish)
        prompts[index] = replace(
            prompts[index], params=replace(params, max_tokens=0 if index in (4, 7) else max_tokens)
        )
    return prompts


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize(
    ("chunk", "num_threads", "depth"), [(7, 2, 0), (16, 1, 1), (33, 3, 1), (256, 2, 0), (None, 4, 1)]
)
def test_scores_are_the_same_in_any_batch_and_in_any_chunks(
    tiny: LoadedModel, block_size: int, chunk: int | None, num_threads: int, depth: int
) -> None:
    prompts = mixed(tiny.spec.vocab_size)
    setting = Setting(
        block_size=block_size,
        max_num_seqs=8,
        max_num_prefill_tokens=chunk,
        prefix_caching=depth == 1,
        num_threads=num_threads,
        depth=depth,
    )
    run = serve(tiny, setting, prompts)
    assert max(run.batch_sizes) >= 6
    reference = serve_alone(tiny, prompts)
    assert len(reference.prompt_logprobs[4, 0]) == 149
    assert not reference.prompt_logprobs[3, 0]
    assert_same(run, reference)


def test_few_slots_score_many_positions_in_pieces(tiny: LoadedModel) -> None:
    """One slot, so that logits are computed 16 at a time."""
    prompts = mixed(tiny.spec.vocab_size, max_tokens=4)
    assert_same(serve(tiny, Setting(max_num_seqs=1), prompts), serve_alone(tiny, prompts))
    small = Setting(max_num_seqs=1, max_num_batched_tokens=3)
    assert_same(serve(tiny, small, prompts[:2]), serve_alone(tiny, prompts[:2]))


def test_scores_are_the_same_with_a_warm_cache(tiny: LoadedModel) -> None:
    """The prompt is in the cache when it is asked for again, scored or not."""
    [first] = make_prompts([130], tiny.spec.vocab_size, max_tokens=6)
    again = replace(first, after=lambda tokens: len(tokens) == 6)
    prompts = [first, replace(again, params=replace(first.params, prompt_logprobs=2)), again]
    run = serve(tiny, Setting(prefix_caching=True, max_num_prefill_tokens=50), prompts)
    assert run.num_hits == 1
    assert_same(run, serve_alone(tiny, prompts))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_scores_survive_preemption_in_the_middle_of_the_prompt(
    tiny: LoadedModel, prefix_caching: bool, depth: int
) -> None:
    """The second is displaced chunk after chunk, by urgent ones that come when the first has so many tokens."""
    vocab_size = tiny.spec.vocab_size
    [first, *others] = make_prompts((10, 200, 5, 5, 5), vocab_size, max_tokens=24)
    slow = replace(others[0], priority=9, params=replace(others[0].params, prompt_logprobs=4, max_tokens=5))
    urgent = [
        Prompt(
            prompt.token_ids,
            replace(prompt.params, max_tokens=2),
            priority=1,
            after=lambda tokens, k=k: len(tokens) >= 2 + 4 * k,
        )
        for k, prompt in enumerate(others[1:])
    ]
    setting = Setting(
        block_size=16,
        max_num_seqs=2,
        max_num_prefill_tokens=16,
        prefix_caching=prefix_caching,
        depth=depth,
        policy=Priority,
    )
    prompts = [first, slow, *urgent]
    run = serve(tiny, setting, prompts)
    assert run.preempted.count(1) >= 2
    assert len(run.prompt_logprobs[1, 0]) == 199
    assert_same(run, serve_alone(tiny, prompts))


def test_scores_survive_a_tight_pool(tiny: LoadedModel) -> None:
    prompts = make_prompts((60, 33, 90, 17, 48, 75, 20, 64), tiny.spec.vocab_size, max_tokens=60)
    prompts = [replace(p, params=replace(p.params, prompt_logprobs=i % 3)) for i, p in enumerate(prompts)]
    for prefix_caching in (False, True):
        setting = Setting(
            block_size=16, num_tokens=420, max_num_seqs=8, max_num_prefill_tokens=40, prefix_caching=prefix_caching
        )
        run = serve(tiny, setting, prompts)
        assert len(run.preempted) >= 3
        assert_same(run, serve_alone(tiny, prompts))


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_first_choice_scores_for_all(tiny: LoadedModel, prefix_caching: bool) -> None:
    prompts = make_prompts((50, 33), tiny.spec.vocab_size, max_tokens=12, n=3)
    prompts = [replace(prompt, params=replace(prompt.params, prompt_logprobs=1)) for prompt in prompts]
    run = serve(tiny, Setting(prefix_caching=prefix_caching, max_num_prefill_tokens=33), prompts)
    assert run.num_forks >= 2
    assert [len(run.prompt_logprobs[0, choice]) for choice in range(3)] == [49, 0, 0]
    assert_same(run, serve_alone(tiny, prompts))


@pytest.mark.parametrize("mutant", ["quantize_over_batch", "split_by_rows"])
def test_a_kernel_that_looks_at_the_batch_is_found_by_scores(tiny: LoadedModel, mutant: str) -> None:
    [prompt] = make_prompts([60], tiny.spec.vocab_size)
    scores = [
        score(tiny, prompt.token_ids, 1, Setting(mutant=mutant, max_num_prefill_tokens=chunk)).prompt_logprobs[0, 0]
        for chunk in (1, None)
    ]
    assert len(scores[0]) == len(scores[1]) == 59
    assert scores[0] != scores[1]


def test_bad_words_are_the_same_in_any_batch(tiny: LoadedModel) -> None:
    """Words of one and two tokens, taken from what each request would say without them."""
    prompts = make_prompts((33, 17, 50, 8), tiny.spec.vocab_size, max_tokens=40)
    free = serve_alone(tiny, prompts)
    bound = []
    for index, prompt in enumerate(prompts):
        tokens = free.tokens[index, 0]
        words = ((tokens[3],), (tokens[10], tokens[11]), (tokens[20], tokens[21], tokens[22]))
        bound.append(replace(prompt, params=replace(prompt.params, bad_word_ids=words)))
    run = serve(tiny, Setting(block_size=16, num_tokens=256, max_num_seqs=4, max_num_prefill_tokens=20), bound)
    assert run.preempted
    assert_same(run, serve_alone(tiny, bound))
    for index, prompt in enumerate(bound):
        tokens = run.tokens[index, 0]
        assert tokens != free.tokens[index, 0]
        for word in prompt.params.bad_word_ids:
            assert all(tuple(tokens[i : i + len(word)]) != word for i in range(len(tokens)))


# ------------------------------------------------------------------------- plans by hand


def admitted(request_id: int, token_ids: Sequence[int], params: SamplingParams) -> Admitted:
    return Admitted(request_id, tuple(token_ids), len(token_ids), params, 0, (), (request_id,), request_id, "")


def chunk(runner: NativeRunner, params: SamplingParams, *prompts: PromptLogits) -> list[TokenLogprobs]:
    plan = StepPlan(0, [Row(1, 0, 8, 0, 8)], [admitted(1, range(1, 11), params)], prompt_logits=list(prompts))
    return runner.execute(plan).prompt_logprobs[1]


def test_any_part_of_a_row_can_be_scored() -> None:
    model = random_model("llama", "int8")
    whole = chunk(make_runner(model), SCORED, PromptLogits(1, 0, 8))
    for start, num in ((0, 1), (3, 5), (7, 1), (2, 3)):
        assert chunk(make_runner(model), SCORED, PromptLogits(1, start, num)) == whole[start : start + num]


@pytest.mark.parametrize("wrong", [PromptLogits(1, 0, 9), PromptLogits(1, -1, 2), PromptLogits(1, 3, 0)])
def test_what_the_row_does_not_compute_is_refused(wrong: PromptLogits) -> None:
    with pytest.raises(ValueError, match="prompt tokens to score"):
        chunk(make_runner(random_model("llama", "int8")), SCORED, wrong)


def test_last_token_of_a_prompt_has_no_next_one_and_others_no_wish() -> None:
    model = random_model("llama", "int8")
    row, wanted = Row(1, 0, 4, 0, 3), PromptLogits(1, 0, 4)
    for params, logits in ((SCORED, wanted), (replace(SCORED, prompt_logprobs=None), PromptLogits(1, 0, 3))):
        plan = StepPlan(0, [row], [admitted(1, range(1, 5), params)], prompt_logits=[logits])
        with pytest.raises(ValueError, match="prompt tokens to score"):
            make_runner(model).execute(plan)


def test_logits_that_are_not_finite_fail_the_request_alone() -> None:
    """The embedding of token 7 is spoiled; the neighbour's scores are those that it has alone."""
    model = load_transformer(random_transformer("llama"), "float32")
    embedding = np.asarray(model.weights["embed_tokens"]).reshape(model.spec.vocab_size, -1).copy()
    spoiled = embedding.copy()
    spoiled[7] = np.nan
    good = make_runner(replace(model, weights={**model.weights, "embed_tokens": embedding}))
    bad = make_runner(replace(model, weights={**model.weights, "embed_tokens": spoiled}))
    plan = StepPlan(
        0,
        [Row(1, 0, 4, 0, 4), Row(2, 0, 4, 0, 3)],
        [admitted(1, (3, 7, 9, 4, 5), SCORED), admitted(2, (11, 12, 13, 14), SCORED)],
        prompt_logits=[PromptLogits(1, 0, 4), PromptLogits(2, 0, 3)],
    )
    result = bad.execute(plan)
    assert result.rows[0] == NOT_FINITE
    assert list(result.prompt_logprobs) == [2]
    assert result.prompt_logprobs[2] == good.execute(plan).prompt_logprobs[2]


def test_request_that_cannot_be_taken_fails_and_its_neighbour_is_scored() -> None:
    """A prompt token beyond those that can be sampled has no log-probability."""
    runner = make_runner(random_model("llama", "int8"), num_valid_tokens=100)
    plan = StepPlan(
        0,
        [Row(1, 0, 4, 0, 3), Row(2, 0, 4, 0, 3)],
        [admitted(1, (3, 120, 9, 4), SCORED), admitted(2, (11, 12, 13, 14), SCORED)],
        prompt_logits=[PromptLogits(1, 0, 3), PromptLogits(2, 0, 3)],
    )
    result = runner.execute(plan)
    assert result.rows[0] == NOT_TAKEN
    assert list(result.prompt_logprobs) == [2]
    assert len(result.prompt_logprobs[2]) == 3


# -------------------------------------------------------------------- the embedded model


@pytest.mark.model
@pytest.mark.timeout(600)
def test_the_embedded_models_scores_are_those_of_transformers(smollm2_path: Path) -> None:
    reference: transformers.PreTrainedModel = transformer_from_gguf(smollm2_path)
    model = load_model(inspect_model(smollm2_path), dtype="float32", num_threads=2, home=Home.from_environment())
    token_ids = make_prompts([300], 40_000)[0].token_ids
    scores = score(model, token_ids, 1, Setting(max_num_prefill_tokens=100)).prompt_logprobs[0, 0]
    assert_close(scores, naive_scores(reference_logits(reference, token_ids), token_ids, 1), 1e-3)


@pytest.mark.model
@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_the_embedded_models_scores_in_a_mixed_batch(smollm2_path: Path, dtype: str) -> None:
    """Three chunks and more, warm and cold, beside requests that only generate, with preemption."""
    model = load_model(inspect_model(smollm2_path), dtype=dtype, num_threads=2, home=Home.from_environment())
    prompts = make_prompts((70, 120, 33, 90), 40_000, max_tokens=36)
    shared = prompts[1].token_ids[:100]
    prompts += [
        Prompt((*shared, 11, 12, 13), replace(RANDOM, n=2, max_tokens=20, prompt_logprobs=2)),
        Prompt((*shared, 21, 22), replace(GREEDY, max_tokens=0, prompt_logprobs=1)),
    ]
    prompts[0] = replace(prompts[0], params=replace(prompts[0].params, prompt_logprobs=5))
    setting = Setting(max_num_prefill_tokens=40, max_num_batched_tokens=64, prefix_caching=True, num_threads=2)
    run = serve(model, replace(setting, num_tokens=11 * 32, max_num_seqs=7), prompts)
    assert run.preempted
    assert_same(run, serve_alone(model, prompts))
