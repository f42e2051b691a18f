"""Drives real scheduler, loop and runner over a set of requests, and returns every bit that clients would see.

Knows no reference implementation and imports no torch, so that it also runs in a fresh process per instruction set.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from everystop.core.events import AdmitEvent, Event, FinishEvent, PreemptEvent, StepEvent
from everystop.core.kv_cache import KVCache
from everystop.core.limits import Limits
from everystop.core.plan import StepPlan, StepResult, TokenLogprobs
from everystop.core.policy import Continuous, Policy
from everystop.core.request import FinishReason, Request, SamplingParams
from everystop.core.scheduler import Scheduler
from everystop.engine.loop import StepLoop
from everystop.model.checkpoint import inspect_model
from everystop.model.weights import LoadedModel, load_model
from everystop.runner import ModelRunner
from everystop.runner.native import NativeRunner

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2)
RANDOM = SamplingParams(
    temperature=1.0,
    top_p=0.9,
    seed=11,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    max_tokens=12,
    logprobs=2,
)


@dataclass(frozen=True)
class Prompt:
    """One client request: tokens, parameters, and when it arrives: at a step, or when a given condition holds."""

    token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    after: Callable[[Sequence[int]], bool] | None = None  # of the tokens of request 0


@dataclass(frozen=True)
class Setting:
    """How the requests are served."""

    block_size: int = 32
    num_tokens: int = 24 * 1024  # that the cache holds
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    max_num_prefill_tokens: int | None = None
    prefix_caching: bool = False
    num_threads: int = 1
    depth: int = 0
    policy: Callable[[], Policy] = Continuous
    mutant: str = "none"


@dataclass
class Run:
    """What clients saw, by (prompt, choice), and what the step records say."""

    tokens: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    logprobs: dict[tuple[int, int], list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[tuple[int, int], list[TokenLogprobs]] = field(default_factory=lambda: defaultdict(list))
    events: list[Event] = field(default_factory=list)

    @property
    def steps(self) -> list[StepEvent]:
        """The executed steps."""
        return [event for event in self.events if isinstance(event, StepEvent)]

    @property
    def batch_sizes(self) -> set[int]:
        """Rows of the steps."""
        return {len(step.plan.rows) for step in self.steps if step.plan.rows}

    @property
    def chunk_sizes(self) -> list[int]:
        """Tokens of all prefill rows."""
        return [row.num_tokens for step in self.steps for row in step.plan.rows if row.num_tokens > 1]

    @property
    def num_hits(self) -> int:
        """Requests that boarded with cached tokens."""
        return sum(event.num_cached_tokens > 0 for event in self.events if isinstance(event, AdmitEvent))

    @property
    def num_forks(self) -> int:
        """Choices that shared a sibling's prompt."""
        return sum(event.forked_from >= 0 for event in self.events if isinstance(event, AdmitEvent))

    @property
    def preempted(self) -> list[int]:
        """Request ids in the order in which they lost their blocks."""
        return [event.request_id for event in self.events if isinstance(event, PreemptEvent)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel(LoadedModel):
    """A model whose keys and values are to be stored in a type of their own."""

    kv_cache_dtype: str


def storing(model: LoadedModel, kv_cache_dtype: str) -> StoredModel:
    """The same model with such a KV cache."""
    return StoredModel(
        **{each.name: getattr(model, each.name) for each in fields(LoadedModel)}, kv_cache_dtype=kv_cache_dtype
    )


def make_runner(model: Any, *, num_threads: int, mutant: str = "none", **limits: Any) -> ModelRunner:
    """The runner of a model: native, or of PyTorch, which computes on as many threads as it was told elsewhere."""
    if isinstance(model, LoadedModel):
        stored = model.kv_cache_dtype if isinstance(model, StoredModel) else "auto"
        runner = NativeRunner(model, num_threads=num_threads, kv_cache_dtype=stored, **limits)
        runner._decoder.set_mutant(mutant)
        return runner
    from everystop.runner.torch.runner import RunnerLimits, TorchRunner

    assert mutant == "none"
    return TorchRunner(model, RunnerLimits(**limits))


def serve(model: LoadedModel, setting: Setting, prompts: Sequence[Prompt]) -> Run:
    """Serve all prompts to their end."""
    num_blocks = setting.num_tokens // setting.block_size
    kv = KVCache(num_blocks=num_blocks, block_size=setting.block_size, enable_prefix_caching=setting.prefix_caching)
    limits = Limits(
        max_num_seqs=setting.max_num_seqs,
        max_num_batched_tokens=setting.max_num_batched_tokens,
        max_num_prefill_tokens=setting.max_num_prefill_tokens,
        max_model_len=1024,
    )
    scheduler = Scheduler(limits, kv, setting.policy())
    runner = make_runner(
        model,
        num_blocks=num_blocks,
        block_size=setting.block_size,
        max_num_batched_tokens=setting.max_num_batched_tokens,
        max_num_seqs=setting.max_num_seqs,
        num_threads=setting.num_threads,
        mutant=setting.mutant,
    )
    run, keys = Run(), {}

    def inspect(plan: StepPlan, result: StepResult) -> None:
        # Rows of a request that has ended meanwhile (depth 1) are dropped by `update`, so here too.
        for row, tokens in zip(plan.rows, result.rows, strict=True):
            assert not isinstance(tokens, str), tokens
            request = scheduler.requests.get(row.request_id)
            if request is not None and tokens:
                run.logprobs[keys[row.request_id]] += result.logprobs[row.request_id]
        for request_id, scores in result.prompt_logprobs.items():
            if request_id in scheduler.requests:
                run.prompt_logprobs[keys[request_id]] += scores

    loop = StepLoop(scheduler, runner, time.monotonic_ns, depth=setting.depth, inspect=inspect)
    waiting = list(enumerate(prompts))
    next_id = 0
    while waiting or scheduler.has_work:
        for index, prompt in list(waiting):
            if prompt.after is not None and not prompt.after(run.tokens.get((0, 0), [])):
                continue
            waiting.remove((index, prompt))
            first_id = next_id
            for choice in range(prompt.params.n):
                keys[next_id] = (index, choice)
                run.tokens[index, choice], run.logprobs[index, choice] = [], []
                request = Request(
                    next_id,
                    prompt.token_ids,
                    prompt.params,
                    group_id=first_id,
                    choice_index=choice,
                    priority=prompt.priority,
                )
                scheduler.add(request, time.monotonic_ns())
                next_id += 1
        turn = loop.turn()
        scheduler.check_integrity()
        for event in turn.events:
            if isinstance(event, StepEvent):
                for row, tokens in zip(event.plan.rows, event.tokens, strict=True):
                    run.tokens[keys[row.request_id]] += tokens
            if isinstance(event, FinishEvent):
                assert event.reason is FinishReason.LENGTH
        run.events += turn.events
    runner.close()
    for key, tokens in run.tokens.items():
        assert len(tokens) == prompts[key[0]].params.max_tokens == len(run.logprobs[key])
    return run


def assert_same(run: Run, reference: Run, note: str = "") -> None:
    """Bitwise: the tokens, and every float of the log-probabilities."""
    for key, tokens in run.tokens.items():
        assert tokens == reference.tokens[key], f"{note}: tokens of {key} differ"
        assert run.logprobs[key] == reference.logprobs[key], f"{note}: log-probabilities of {key} differ"
        scores = reference.prompt_logprobs[key]
        assert run.prompt_logprobs[key] == scores, f"{note}: the prompt of {key} scores differ"


def serve_alone(model: LoadedModel, prompts: Sequence[Prompt]) -> Run:
    """Each choice of each prompt in a server of its own: one thread, no prefix cache, the prompt in one piece."""
    total = Run()
    for index, prompt in enumerate(prompts):
        for choice in range(prompt.params.n):
            # A request alone has choice 0 of 1, so the others are reached through their own index.
            single = _SingleChoice(model, replace(prompt, after=None), choice).run()
            total.tokens[index, choice] = single.tokens[0, choice]
            total.logprobs[index, choice] = single.logprobs[0, choice]
            total.prompt_logprobs[index, choice] = single.prompt_logprobs[0, choice]
    return total


class _SingleChoice:
    """One choice of a request, served with nobody else on board."""

    def __init__(self, model: LoadedModel, prompt: Prompt, choice: int) -> None:
        self._model, self._prompt, self._choice = model, prompt, choice

    def run(self) -> Run:
        """Serve it."""
        kv = KVCache(num_blocks=256, block_size=32, enable_prefix_caching=False)
        limits = Limits(max_num_seqs=1, max_num_batched_tokens=2048, max_model_len=1024)
        scheduler = Scheduler(limits, kv, Continuous())
        runner = make_runner(
            self._model, num_blocks=256, block_size=32, max_num_batched_tokens=2048, max_num_seqs=1, num_threads=1
        )
        run, key = Run(), (0, self._choice)
        run.tokens[key], run.logprobs[key] = [], []

        def inspect(_: StepPlan, result: StepResult) -> None:
            for entries in result.logprobs.values():
                run.logprobs[key] += entries
            for entries in result.prompt_logprobs.values():
                run.prompt_logprobs[key] += entries

        loop = StepLoop(scheduler, runner, time.monotonic_ns, inspect=inspect)
        request = Request(0, self._prompt.token_ids, replace(self._prompt.params, n=1), choice_index=self._choice)
        scheduler.add(request, time.monotonic_ns())
        while scheduler.has_work:
            run.events += loop.turn().events
        runner.close()
        run.tokens[key] += [token for step in run.steps for tokens in step.tokens for token in tokens]
        assert run.batch_sizes == {1}
        return run


def make_prompts(lengths: Sequence[int], vocab_size: int, max_tokens: int = 12, n: int = 1) -> list[Prompt]:
    """Prompts of given lengths, alternately greedy and random, each with tokens and a seed of its own."""
    prompts = []
    for index, length in enumerate(lengths):
        params = replace(GREEDY if index % 2 == 0 else RANDOM, max_tokens=max_tokens, n=n)
        if params.seed is not None:
            params = replace(params, seed=100 + index)
        ids = tuple((7 + 31 * index + 13 * i + i * i // 5) % (vocab_size - 1) + 1 for i in range(length))
        prompts.append(Prompt(ids, params))
    return prompts


LENGTHS = (1, 45, 17, 300, 32, 3, 257, 64, 16, 90, 31, 2, 256, 33, 15, 128, 5, 40, 70, 9, 21, 55, 100, 12, 47, 63, 65,
           8, 30, 26, 80, 4)  # fmt: skip
CHUNKS = (7, 16, 33, 256, None)
BLOCK_SIZES = (16, 32, 64)


def matrix() -> Iterator[tuple[int, Setting]]:
    """Each chunk size with each block size; batch sizes, threads, prefix cache and depth take turns."""
    batch_sizes = itertools.cycle((2, 5, 32, 3, 16, 8, 4))
    threads = itertools.cycle((1, 2, 3, 4))
    for turn, (chunk, block_size) in enumerate(itertools.product(CHUNKS, BLOCK_SIZES)):
        yield (
            next(batch_sizes),
            Setting(
                block_size=block_size,
                max_num_prefill_tokens=chunk,
                prefix_caching=turn % 2 == 1,
                num_threads=next(threads),
                depth=turn // 2 % 2,
            ),
        )


def check_batch(model: LoadedModel, reference: Run, prompts: Sequence[Prompt], size: int, setting: Setting) -> None:
    """The first `size` prompts together equal the reference; the records show that they really were together."""
    batch = prompts[:size]
    run = serve(model, replace(setting, max_num_seqs=size), batch)
    assert_same(run, reference, f"{size} requests, {setting}")
    assert max(run.batch_sizes) == size, "not all were in one step"
    chunk = setting.max_num_prefill_tokens
    longest = max(len(prompt.token_ids) for prompt in batch)
    if chunk is None:
        assert all(len(prompt.token_ids) in (1, *run.chunk_sizes) for prompt in batch), "a prompt was cut"
    else:
        assert max(run.chunk_sizes) <= chunk
        if longest > chunk:
            assert sum(run.chunk_sizes) > len(batch), "no prompt was cut"
            assert any(row.start > 0 and row.num_tokens > 1 for step in run.steps for row in step.plan.rows), (
                "no chunk began inside a prompt"
            )


def check_small_matrix(
    folder: str, dtype: str, kv_cache_dtype: str, num_prompts: str = "8", max_tokens: str = "130"
) -> dict[str, Any]:
    """A smaller matrix in this process's instruction-set path, for a fresh process; returns what it did.

    `max_tokens` must last until the last prompt has come on board, in chunks of 7 tokens.
    """
    from everystop import _native

    model = storing(load_model(inspect_model(Path(folder)), dtype=dtype, num_threads=1), kv_cache_dtype)
    prompts = make_prompts(LENGTHS[: int(num_prompts)], model.spec.vocab_size, max_tokens=int(max_tokens))
    reference = serve_alone(model, prompts)
    settings = [
        Setting(block_size=block_size, max_num_prefill_tokens=chunk, num_threads=num_threads, prefix_caching=hits)
        for chunk, block_size, num_threads, hits in ((7, 16, 2, True), (33, 32, 3, False), (None, 64, 1, True))
    ]
    for setting in settings:
        check_batch(model, reference, prompts, len(prompts), setting)
    return {"isa": _native.isa(), "cases": len(settings)}
