"""Acceptance cases of numbers and sampling: an answer is its request's own, to the bit, and no row spoils another."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.model.builders import tiny_model, write_folder
from tests.model.vocabularies import sentencepiece_inner, write_tokenizer
from tests.native.test_sampling import sample
from tests.runner.invariance import GREEDY, RANDOM, Prompt, Run, Setting, assert_same, make_prompts, serve, serve_alone
from tests.runner.models import load_transformer, make_runner, random_model, random_transformer
from tests.server.parrot import VOCAB, ParrotServer

from everystop.backend import choose_backend
from everystop.config import Config
from everystop.core import fitting
from everystop.core.draft import Draft
from everystop.core.errors import ConfigError
from everystop.core.events import AdmitEvent, FinishEvent, StepEvent
from everystop.core.kv_cache import KVCache
from everystop.core.limits import Limits
from everystop.core.plan import Admitted, StepPlan, StepResult
from everystop.core.policy import Continuous, Priority
from everystop.core.request import FinishReason, Request, SamplingParams
from everystop.core.scheduler import Scheduler
from everystop.engine.loop import StepLoop
from everystop.model.checkpoint import inspect_model
from everystop.model.weights import LoadedModel, load_model
from everystop.runner import native
from everystop.runner.native import NativeRunner, sampling_settings
from everystop.server import protocol
from everystop.server.opening import Opening


def tokens_of(length: int, salt: int) -> tuple[int, ...]:
    """A prompt of its own, of tokens that every model here has."""
    return tuple((salt + 17 * i + i * i // 3) % 139 + 1 for i in range(length))


@pytest.fixture(scope="module", params=["int8", "float32"])
def tiny(request: pytest.FixtureRequest) -> LoadedModel:
    """A tiny random model, for the mutants; the cases themselves run on the embedded one too."""
    return random_model("llama", request.param)


# --------------------------------------------------------------------- 03: preemption, with the model


@pytest.mark.model
def test_ac_03_on_the_embedded_model(smollm2: LoadedModel) -> None:
    """Bitwise, logprobs too; the case itself is with the scheduler's."""
    setting = Setting(
        block_size=16, max_num_seqs=1, max_num_batched_tokens=64, max_num_prefill_tokens=8, policy=Priority
    )
    for num_generated in (1, 15, 16, 17):
        slow = Prompt(tokens_of(16, num_generated), replace(RANDOM, max_tokens=num_generated + 6), priority=5)
        urgent = Prompt(
            tokens_of(20, 90),
            replace(RANDOM, max_tokens=3),
            after=lambda tokens, num=num_generated: len(tokens) >= num,
        )
        run = serve(smollm2, setting, [slow, urgent])
        assert run.preempted == [0]
        assert_same(run, serve_alone(smollm2, [slow, urgent]), f"preempted after {num_generated}")


# --------------------------------------------------------------------- 25: what the model says of a prompt


def check_ac_25(model: LoadedModel) -> None:
    """Bitwise the same in one piece, in three, and after the prompt has come into the cache."""
    tokens = tokens_of(150, 30)
    scored = Prompt(tokens, replace(GREEDY, max_tokens=3, prompt_logprobs=2))
    first = Prompt(tokens, replace(GREEDY, max_tokens=3))
    later = replace(scored, after=lambda tokens: len(tokens) == 3)
    setting = Setting(block_size=16, prefix_caching=True, max_num_batched_tokens=64)
    served = {"cold": (serve(model, setting, [scored]), 0), "warm": (serve(model, setting, [first, later]), 1)}
    assert served["cold"][0].chunk_sizes == [64, 64, 22]
    alone = serve_alone(model, [scored])
    for how, (run, index) in served.items():
        scores = run.prompt_logprobs[index, 0]
        assert len(scores) == len(tokens) - 1, f"{how}, {len(scores)} of {len(tokens) - 1} tokens have a number"
        assert scores == alone.prompt_logprobs[0, 0], f"{how}, the numbers are others"
        assert run.tokens[index, 0] == alone.tokens[0, 0]
    logits = make_runner(model).logits(tokens)[:-1].astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    expected = logits[np.arange(len(tokens) - 1), tokens[1:]] - np.log(np.exp(logits).sum(axis=1))
    np.testing.assert_allclose([score.logprob for score in scores], expected, atol=1e-4)


def test_ac_25_logprobs_of_a_prompt_cold_and_warm(tiny: LoadedModel) -> None:
    check_ac_25(tiny)


@pytest.mark.model
def test_ac_25_on_the_embedded_model(smollm2: LoadedModel) -> None:
    check_ac_25(smollm2)


def test_mutant_ac_25_found_in_the_cache_and_left_out(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scored prompt takes what it finds, and only what is computed has log-probabilities."""
    score = Draft._score

    def score_the_rest(draft: Draft, request: Request, end: int) -> None:
        request.num_planned_scores = max(request.num_planned_scores, request.num_scheduled_through)
        score(draft, request, end)

    monkeypatch.setattr(Request, "num_reusable_tokens", property(lambda request: request.num_tokens - 1))
    monkeypatch.setattr(Draft, "_score", score_the_rest)
    with pytest.raises(AssertionError, match=r"warm, .* tokens have a number"):
        check_ac_25(tiny)


# --------------------------------------------------------------------- 27: batches


def check_ac_27(model: LoadedModel, mutant: str = "none") -> None:
    """Bitwise, where the list of cases would allow 0.001."""
    lengths = (5, 70, 33, 300, 17, 1, 48, 64)
    prompts = make_prompts(lengths, 140, max_tokens=8)
    single = Setting(max_num_seqs=1, mutant=mutant)
    alone = [serve(model, single, [prompt]) for prompt in prompts]
    reference = Run(
        tokens={(i, 0): run.tokens[0, 0] for i, run in enumerate(alone)},
        logprobs={(i, 0): run.logprobs[0, 0] for i, run in enumerate(alone)},
    )
    for size in (2, 4, 8):
        run = serve(model, Setting(max_num_seqs=size, mutant=mutant), prompts[:size])
        assert max(run.batch_sizes) == size, "not all were in one step"
        assert_same(run, reference, f"in a batch of {size}")


def test_ac_27_alone_and_in_batches_to_the_bit(tiny: LoadedModel) -> None:
    check_ac_27(tiny)


@pytest.mark.model
def test_ac_27_on_the_embedded_model(smollm2: LoadedModel) -> None:
    check_ac_27(smollm2)


@pytest.mark.parametrize("mutant", ["quantize_over_batch", "split_by_rows"])
def test_mutant_ac_27_a_kernel_that_looks_at_the_batch(tiny: LoadedModel, mutant: str) -> None:
    with pytest.raises(AssertionError, match=r"in a batch of .*differ"):
        check_ac_27(tiny, mutant)


# --------------------------------------------------------------------- 28: settings follow their request


def check_ac_28(model: LoadedModel) -> None:
    """A and B plain, C biased to one token; A ends, D joins."""
    forced = 137  # which no model here says by itself
    plain = replace(GREEDY, max_tokens=24)
    prompts = [
        Prompt(tokens_of(9, 1), replace(plain, max_tokens=4)),
        Prompt(tokens_of(20, 2), plain),
        Prompt(tokens_of(14, 3), replace(plain, logit_bias=((forced, 100.0),))),
        Prompt(tokens_of(11, 4), plain, after=lambda tokens: len(tokens) == 4),
    ]
    run = serve(model, Setting(max_num_seqs=3), prompts)
    assert run.tokens[2, 0] == [forced] * 24, "the biased request is not affected in every step"
    for other in (0, 1, 3):
        assert forced not in run.tokens[other, 0], f"request {other} has another's bias"
    assert_same(run, serve_alone(model, prompts))
    joined = next(i for i, step in enumerate(run.steps) if 3 in step.plan.rows.request_ids)
    assert list(run.steps[joined].plan.rows.request_ids[:2]) == [1, 2], "rows have moved"


def test_ac_28_only_the_biased_request_is_affected(tiny: LoadedModel) -> None:
    check_ac_28(tiny)


@pytest.mark.model
def test_ac_28_on_the_embedded_model(smollm2: LoadedModel) -> None:
    check_ac_28(smollm2)


def test_mutant_ac_28_settings_by_row(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who boards gets the settings that were first used at its row."""
    admit = NativeRunner._admit
    by_row: dict[int, dict[int, SamplingParams]] = {}

    def admit_by_row(runner: NativeRunner, admitted: Admitted) -> None:
        row = len(runner._on_board)
        params = by_row.setdefault(id(runner), {}).setdefault(row, admitted.params)
        admit(runner, admitted._replace(params=params))

    monkeypatch.setattr(NativeRunner, "_admit", admit_by_row)
    with pytest.raises(AssertionError, match="request 3 has another's bias"):
        check_ac_28(tiny)


# --------------------------------------------------------------------- 29: seeds


def check_ac_29(model: LoadedModel) -> None:
    seeded = Prompt(tokens_of(20, 5), replace(RANDOM, seed=42, max_tokens=12, repetition_penalty=1.0))
    unseeded = Prompt(tokens_of(12, 6), replace(RANDOM, seed=None, max_tokens=12))
    urgent = Prompt(tokens_of(5, 7), replace(RANDOM, max_tokens=3), after=lambda tokens: len(tokens) == 5)
    slow = replace(seeded, priority=5)
    single = Setting(block_size=16, max_num_seqs=1, max_num_batched_tokens=64, policy=Priority)
    served = {
        "beside an unseeded one": (serve(model, Setting(), [unseeded, seeded]), 1),
        "as the second in a row": (serve(model, Setting(max_num_seqs=1), [seeded, seeded]), 1),
        "after a preemption": (serve(model, single, [slow, urgent]), 0),
    }
    assert served["after a preemption"][0].preempted == [0]
    three = serve(model, Setting(), [replace(seeded, params=replace(seeded.params, n=3))])
    served["as the first of three choices"] = (three, 0)
    alone = serve_alone(model, [seeded])
    for how, (run, index) in served.items():
        assert run.tokens[index, 0] == alone.tokens[0, 0], f"seed 42 gives other tokens {how}"
        assert run.logprobs[index, 0] == alone.logprobs[0, 0], f"seed 42 gives other numbers {how}"
    assert len({tuple(three.tokens[0, choice]) for choice in range(3)}) == 3, "choices are copies of each other"


def test_ac_29_a_seed_gives_the_same_stream_in_any_company(tiny: LoadedModel) -> None:
    check_ac_29(tiny)


@pytest.mark.model
def test_ac_29_on_the_embedded_model(smollm2: LoadedModel) -> None:
    check_ac_29(smollm2)


def test_mutant_ac_29_one_generator_for_all(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    state = itertools.count()

    def shared(*args: Any) -> dict[str, Any]:
        return sampling_settings(*args) | {"seed": next(state)}

    monkeypatch.setattr(native, "sampling_settings", shared)
    with pytest.raises(AssertionError, match="seed 42 gives other tokens"):
        check_ac_29(tiny)


def test_mutant_ac_29_the_choice_does_not_count(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "sampling_settings", lambda *args: sampling_settings(*args) | {"choice_index": 0})
    with pytest.raises(AssertionError, match="choices are copies of each other"):
        check_ac_29(tiny)


# --------------------------------------------------------------------- 30: banned and tied tokens


def check_ac_30(model: LoadedModel, tied: tuple[int, ...] = ()) -> None:
    """A greedy row whose best token is banned, beside a sampled row; `tied` are ids of equal logits, if there are."""
    best = serve_alone(model, [Prompt(tokens_of(15, 8), replace(GREEDY, max_tokens=1))]).tokens[0, 0][0]
    allowed = tuple(i for i in range(1, 140) if i != best)
    prompts = [
        Prompt(tokens_of(15, 8), replace(GREEDY, max_tokens=6, allowed_token_ids=allowed)),
        Prompt(tokens_of(15, 8), replace(GREEDY, max_tokens=6, logit_bias=((best, -100.0),))),
        Prompt(tokens_of(15, 9), replace(RANDOM, temperature=0.8, max_tokens=6)),
    ]
    if tied:
        for temperature in (0.0, 1e-40):
            params = replace(GREEDY, temperature=temperature, max_tokens=30, allowed_token_ids=tied, seed=3, top_p=0.5)
            prompts.append(Prompt(tokens_of(15, 10), params))
        prompts.append(Prompt(tokens_of(15, 10), replace(params, temperature=0.8, top_p=1.0)))
    run = serve(model, Setting(), prompts)
    for key, entries in run.logprobs.items():
        numbers = [entry.logprob for entry in entries] + [number for entry in entries for _, number in entry.top]
        assert all(map(math.isfinite, numbers)), f"request {key} has a log-probability that is no number"
    assert best not in (*run.tokens[0, 0], run.tokens[1, 0][0]), "a banned token was taken"
    if tied:
        for index in (3, 4):
            assert set(run.tokens[index, 0]) == {tied[0]}, "a greedy row took another than the lowest of tied ids"
        assert set(run.tokens[5, 0]) == set(tied), "a sampled row takes each of them"
    assert_same(run, serve_alone(model, prompts))


def model_with_ties(dtype: str) -> tuple[LoadedModel, tuple[int, ...]]:
    """A tiny model whose ids 50, 60 and 70 have the same logit always."""
    model = random_transformer("llama")
    with torch.no_grad():
        model.lm_head.weight[[60, 70]] = model.lm_head.weight[50].clone()
    return load_transformer(model, dtype), (50, 60, 70)


@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_ac_30_banned_and_tied_tokens_beside_a_sampled_row(dtype: str) -> None:
    check_ac_30(*model_with_ties(dtype))


@pytest.mark.model
def test_ac_30_on_the_embedded_model(smollm2: LoadedModel) -> None:
    check_ac_30(smollm2)


def test_mutant_ac_30_greedy_as_a_tiny_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    def sampled(params: SamplingParams, *args: Any) -> dict[str, Any]:
        settings = sampling_settings(params, *args)
        return settings | {"temperature": max(1e-4, settings["temperature"]), "top_p": 1.0}

    monkeypatch.setattr(native, "sampling_settings", sampled)
    with pytest.raises(AssertionError, match="a greedy row took another than the lowest of tied ids"):
        check_ac_30(*model_with_ties("float32"))


# --------------------------------------------------------------------- 31: temperatures


def test_ac_31_temperatures_are_greedy_sampled_or_refused(server: ParrotServer) -> None:
    def draws(temperature: float) -> set[int]:
        return {sample([1.0, 1.0, 0.0], temperature=temperature, seed=seed)[0] for seed in range(50)}

    assert draws(0.0) == draws(1e-40) == draws(1e-10) == {0}
    assert draws(1e-4) == {0, 1}
    for accepted in (0, 1e-40, 1e-4):
        assert server.complete("a", temperature=accepted)[0] == 200
    for refused in (b"-1", b"NaN", b'"1"', b"1e400", b"Infinity", b"true"):
        status, _, body = server.request("POST", "/v1/completions", b'{"prompt": "a", "temperature": %s}' % refused)
        assert status == 400, refused
        assert json.loads(body)["error"]["type"] == "invalid_request_error"


# --------------------------------------------------------------------- 32: a row that is no number

BAD = 143  # in none of the prompts: see `tokens_of`


class PoisonedRunner(NativeRunner):
    """In its fifth step the last token of request 1 becomes one whose embedding is NaN."""

    def __init__(self, model: LoadedModel, scheduler: Scheduler) -> None:
        weights = dict(model.weights)
        weights["embed_tokens"] = weights["embed_tokens"].copy()
        weights["embed_tokens"][BAD] = np.nan
        broken = LoadedModel(
            spec=model.spec, dtype=model.dtype, layout=model.layout, weights=weights, from_cache=False, notes=()
        )
        super().__init__(
            broken, num_blocks=64, block_size=16, max_num_batched_tokens=256, max_num_seqs=4, num_threads=2
        )
        self._scheduler = scheduler
        self._num_steps = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self._num_steps += 1
        if self._num_steps == 5:
            request = self._scheduler.requests[1]
            ids = np.array(request.token_ids, dtype=np.int32)
            ids[-1] = BAD
            settings = sampling_settings(request.params, 0, (), self.num_valid_tokens)
            table = np.array(request.block_table, dtype=np.int32)
            self._decoder.release(1)
            self._decoder.admit(1, ids, request.num_prompt_tokens, settings, table)
        return super().execute(plan)


def check_ac_32(model: LoadedModel) -> None:
    kv = KVCache(num_blocks=64, block_size=16, enable_prefix_caching=True)
    scheduler = Scheduler(Limits(max_num_seqs=4, max_num_batched_tokens=256, max_model_len=512), kv, Continuous())
    runner = PoisonedRunner(model, scheduler)
    loop = StepLoop(scheduler, runner, time.monotonic_ns)
    prompts = [Prompt(tokens_of(40, 20 + i), replace(GREEDY, max_tokens=10)) for i in range(3)]
    tokens: dict[int, list[int]] = {i: [] for i in range(4)}
    ends: dict[int, FinishEvent] = {}
    cached: dict[int, int] = {}

    def run() -> None:
        while scheduler.has_work:
            for event in loop.turn().events:
                if isinstance(event, StepEvent):
                    for row, new in zip(event.plan.rows, event.tokens, strict=True):
                        tokens[row.request_id] += new
                elif isinstance(event, FinishEvent):
                    ends[event.request_id] = event
                elif isinstance(event, AdmitEvent):
                    cached[event.request_id] = event.num_cached_tokens
            scheduler.check_integrity()

    for i, prompt in enumerate(prompts):
        scheduler.add(Request(i, prompt.token_ids, prompt.params), time.monotonic_ns())
    run()
    alone = serve_alone(model, prompts)
    assert BAD not in itertools.chain(*alone.tokens.values())
    assert ends[1].reason is FinishReason.ERROR, "the row that was no number went on"
    assert tokens[1] == alone.tokens[1, 0][: len(tokens[1])]
    assert len(tokens[1]) == 4
    for other in (0, 2):
        assert tokens[other] == alone.tokens[other, 0], f"request {other} was changed by its neighbour"
    scheduler.add(Request(3, prompts[1].token_ids, prompts[1].params), time.monotonic_ns())
    run()
    assert cached[3] == 0, "blocks of the failed request were found"
    assert tokens[3] == alone.tokens[1, 0]
    runner.close()


def test_ac_32_a_row_that_is_no_number_fails_alone_and_is_not_cached(tiny: LoadedModel) -> None:
    check_ac_32(tiny)


@pytest.mark.model
def test_ac_32_on_the_embedded_model(smollm2: LoadedModel) -> None:
    check_ac_32(smollm2)


def test_mutant_ac_32_sanitised(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no number becomes token 0."""
    monkeypatch.setattr(native, "NOT_FINITE", (0,))
    with pytest.raises(AssertionError, match="the row that was no number went on"):
        check_ac_32(tiny)


def test_mutant_ac_32_blocks_of_the_failed_row_stay(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "withdraw", lambda kv, request, start: None)
    with pytest.raises(AssertionError, match="blocks of the failed request were found"):
        check_ac_32(tiny)


# --------------------------------------------------------------------- 33: filters

Draw = Callable[..., set[int]]


def native_draw(naive: bool) -> Draw:
    """What the native sampler takes over many seeds."""

    def draw(logits: Sequence[float], **settings: Any) -> set[int]:
        return {sample(logits, seed=seed, naive=naive, **settings)[0] for seed in range(300)}

    return draw


def slow_draw(bug: str = "") -> Draw:
    """What may be taken, as the settings define it, or with a bug that a server has had."""

    def draw(
        logits: Sequence[float], *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, **_: Any
    ) -> set[int]:
        order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
        if temperature == 0:
            return {order[-1 if bug == "last of ties" else 0]}
        num_kept = min(top_k or len(order), len(order)) + (bug == "one more" and top_k > 0)
        kept = order[:num_kept]
        if bug == "all ties":
            kept = [i for i in order if logits[i] >= logits[kept[-1]]]
        weights = [math.exp(logits[i] - logits[order[0]]) for i in kept]
        total, before, nucleus = sum(weights), 0.0, set()
        for i, weight in zip(kept, weights, strict=True):
            within = before + weight / total <= top_p if bug == "none left" else before < top_p or not nucleus
            if within and weight > 0:
                nucleus.add(i)
            before += weight / total
        return nucleus

    return draw


def check_ac_33(draw: Draw) -> None:
    table: list[tuple[list[float], dict[str, float], set[int]]] = [
        ([0, 1, 1, 1, 1], {"top_k": 3}, {1, 2, 3}),
        ([1] * 12, {"top_k": 2}, {0, 1}),
        ([2, 5, 5, 5], {"top_k": 1}, {1}),
        ([1, 1, 0, 1], {"top_k": 0}, {0, 1, 2, 3}),
        ([1, 1, 0, 1], {"top_k": 4}, {0, 1, 2, 3}),
        ([1, 1, 0, 1], {"top_k": 5}, {0, 1, 2, 3}),
        ([0, 3, 3, 1], {"top_p": 0.0}, {1}),
        ([0, 3, 3, 1], {"top_p": 1e-9}, {1}),
        ([0, 1, 1, 0], {"top_p": 1.0}, {0, 1, 2, 3}),
        ([3, 3, 2, 1], {"top_k": 2, "top_p": 0.4}, {0}),
        ([3, 3, 2, 1], {"top_k": 2, "top_p": 0.6}, {0, 1}),
        ([0, 0, 9], {"top_k": 1, "top_p": 1e-9}, {2}),
        ([0, 3, 3, 1], {"temperature": 0.0, "top_p": 0.9}, {1}),
    ]
    for logits, settings, expected in table:
        drawn = draw(logits, **settings)
        assert drawn == expected, f"{logits} with {settings} gives {drawn}"


@pytest.mark.parametrize("naive", [False, True])
def test_ac_33_edges_of_the_filters(naive: bool) -> None:
    check_ac_33(slow_draw())
    check_ac_33(native_draw(naive))


@pytest.mark.parametrize("bug", ["all ties", "one more", "none left", "last of ties"])
def test_mutant_ac_33_samplers_of_others(bug: str) -> None:
    with pytest.raises(AssertionError, match="gives"):
        check_ac_33(slow_draw(bug))


# --------------------------------------------------------------------- 34: penalties


@pytest.mark.model
def test_ac_34_penalties_see_the_output_and_repetition_the_prompt_too(smollm2: LoadedModel) -> None:
    prompt = (7042, 7042, 1165, 7042, 7042, 1165, 7042, 7042)
    runner = make_runner(smollm2)
    logits = runner.logits(prompt)[-1].astype(np.float64)
    first = int(logits.argmax())
    following = runner.logits((*prompt, first))[-1].astype(np.float64)
    runner.close()

    def served(**penalties: float) -> list[int]:
        params = replace(GREEDY, max_tokens=2, **penalties)
        return serve(smollm2, Setting(), [Prompt(prompt, params)]).tokens[0, 0]

    penalised = following.copy()
    penalised[first] -= 2.0
    for penalty in ("presence_penalty", "frequency_penalty"):
        assert served(**{penalty: 2.0}) == [first, int(penalised.argmax())], "the output alone counts"
    repeated = logits.copy()
    seen = np.unique(prompt)
    repeated[seen] = np.where(logits[seen] > 0, logits[seen] / 1.9, logits[seen] * 1.9)
    assert served(repetition_penalty=1.9)[0] == int(repeated.argmax())


# --------------------------------------------------------------------- 35: ids that are none

BAD_IDS = (-1, VOCAB, VOCAB + 1, 2**31, 2**63, "12", 1.5, True)


def check_ac_35(server: ParrotServer) -> None:
    bodies: list[dict[str, Any]] = [{"prompt": "abc", "stop_token_ids": [bad], "min_tokens": 1} for bad in BAD_IDS]
    bodies += [{"prompt": [97, bad]} for bad in BAD_IDS]
    bodies += [{"prompt": [[97], [bad]]} for bad in BAD_IDS]
    bodies += [{"prompt": "abc", "allowed_token_ids": [bad]} for bad in BAD_IDS]
    keys = [str(bad) for bad in BAD_IDS if bad != "12"] + ["", "a", "１", "1e1", " 1", "01", "+1", "1_0", "00"]
    bodies += [{"prompt": "abc", "logit_bias": {key: 1}} for key in keys]
    bodies += [{"prompt": "abc", "logit_bias": {"5": bias}} for bias in ("1", True, 1e9, [], -101)]
    for body in bodies:
        status, answer = server.post("/v1/completions", body | {"max_tokens": 2})
        assert status == 400, f"{body} was answered with {status}"
        assert answer["error"]["type"] == "invalid_request_error"
    assert server.get("/health")[0] == 200
    assert server.complete("ok")[1]["choices"][0]["text"] == "ok"


def test_ac_35_ids_outside_the_vocabulary_are_refused(server: ParrotServer) -> None:
    check_ac_35(server)


def test_mutant_ac_35_ids_are_not_looked_at(own_server: ParrotServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (protocol, fitting):
        monkeypatch.setattr(module, "check_ids", lambda name, ids, num_valid_tokens: None)
    with pytest.raises((AssertionError, OverflowError), match="was answered with"):
        check_ac_35(own_server)


# --------------------------------------------------------------------- 38: the type of the numbers


def test_ac_38_bfloat16_is_widened_and_float16_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One weight lies beyond the range of float16."""
    model = tiny_model("llama", vocab_size=1000)
    with torch.no_grad():
        model.model.norm.weight[3] = 70_000.0
    stored = write_folder(tmp_path / "stored", model, dtype=torch.bfloat16)
    widened = tiny_model("llama", vocab_size=1000)
    widened.load_state_dict({name: tensor.bfloat16().float() for name, tensor in model.state_dict().items()})
    loaded, wanted = (
        load_model(inspect_model(stored), dtype="float32", num_threads=1),
        load_transformer(widened, "float32"),
    )
    ids = tokens_of(30, 1)
    logits = make_runner(loaded).logits(ids)
    assert np.isfinite(logits).all()
    np.testing.assert_array_equal(logits, make_runner(wanted).logits(ids))
    with pytest.raises(ConfigError, match=r"float16.*cpu.*int8.*float32"):
        choose_backend(Config(dtype="float16", device="cpu"))
    monkeypatch.setenv("EVERYSTOP_HOME", str(tmp_path / "home"))
    write_tokenizer(stored, sentencepiece_inner(), bos_token="<s>", eos_token="</s>")
    for dtype in ("float32", "int8"):
        opening = Opening(Config(model=str(stored), dtype=dtype, max_num_seqs=2, threads=1), "http://127.0.0.1:1")
        opening.load().engine.stop()
        assert f"arithmetic {dtype}," in opening.screen()
