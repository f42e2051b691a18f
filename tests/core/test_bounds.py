"""The bounds of docs/policies.md, on random settings and traffic: what one may lose to others, whatever they do.

Steps are counted as plans with rows, from the first that is planned after a request has arrived. The formulas stand
here as they stand in the document.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import count
from math import ceil
from typing import Any

import pytest
from tests.core.harness import make_request, make_scheduler

from everystop.core.events import PreemptEvent
from everystop.core.plan import StepPlan, StepResult
from everystop.core.policy import POLICIES, Deadline, Targets
from everystop.core.request import Request, RequestState
from everystop.core.scheduler import Scheduler
from everystop.core.step_time import StepTimeModel
from everystop.engine.loop import StepLoop
from everystop.runner.simulated import SimulatedRunner

STEP_NS = 1_000_000
LONG_NS = 10**15
LATEST_TARGET = Targets(ttft_ns=LONG_NS)
IN_ORDER_OF_ARRIVAL = ("continuous", "priority", "fair", "deadline")  # among requests that are alike
NUM_EPISODES = 60


def blocks_of(num_tokens: int, block_size: int) -> int:
    return ceil(num_tokens / block_size)


def prompt_steps(num_tokens: int, *, left: int, block_size: int, num_before: int) -> int | None:
    """Bound 1: steps for a prompt of which `num_tokens` are to be computed, behind `num_before` prompts in keep order,
    where prompts get at least `left` tokens a step. None where there is no bound but the work of those before it.
    """
    if left >= 2 * block_size and left >= 2**num_before * block_size:
        return ceil(blocks_of(num_tokens, block_size) / max(1, left // 2 ** (num_before + 1) // block_size))
    share = left >> num_before
    if num_before > 1 or share < 1:
        return None
    return blocks_of(num_tokens, block_size) * ceil(block_size / ceil(share / 2))


def boarding_steps(before: list[Request], *, left: int, block_size: int) -> int:
    """Bound 2: steps until a request boards that these go before, be it one by one, each computed anew."""
    total = 1
    for request in before:
        num_tokens = request.num_prompt_tokens + request.max_tokens
        steps = prompt_steps(num_tokens, left=left, block_size=block_size, num_before=0)
        assert steps is not None
        total += steps + request.max_tokens
    return total


class Run:
    """A scheduler without a model, turn by turn, and in which step whom happened what."""

    def __init__(self, scheduler: Scheduler, depth: int) -> None:
        self.scheduler = scheduler
        self.now_ns = 0
        self.num_steps = 0
        self.requests: dict[int, Request] = {}
        self.arrived: dict[int, int] = {}
        self.boarded: dict[int, int] = {}
        self.first_token: dict[int, int] = {}
        self.last_row: dict[int, int] = {}
        self.widest_gap = 0
        self.num_preemptions = 0
        self._runner = SimulatedRunner(lambda plan: STEP_NS, self._advance)
        self._loop = StepLoop(scheduler, self, lambda: self.now_ns, depth=depth)

    def add(self, request: Request) -> Request:
        request.arrival_ns = self.now_ns
        self.requests[request.request_id] = request
        self.arrived[request.request_id] = self.num_steps
        self.scheduler.add(request, self.now_ns)
        return request

    def turn(self) -> None:
        turn = self._loop.turn()
        for event in turn.events:
            if isinstance(event, PreemptEvent):
                self.num_preemptions += 1
        if turn.is_idle:
            self.now_ns = max(self.now_ns + STEP_NS, turn.wake_at_ns or 0)

    def execute(self, plan: StepPlan) -> StepResult:
        """As the runner of the loop: note who gets a row, and how long ago a decoder had its last one."""
        for request_id in plan.preempted:
            self.last_row.pop(request_id, None)
        for admitted in plan.admitted:
            self.boarded.setdefault(admitted.request_id, self.num_steps)
        for row in plan.rows[: len(plan.rows) - plan.num_padded_rows]:
            if row.logits_from < row.num_tokens:
                self.first_token.setdefault(row.request_id, self.num_steps)
                last = self.last_row.get(row.request_id, self.num_steps)
                self.widest_gap = max(self.widest_gap, self.num_steps - last)
                self.last_row[row.request_id] = self.num_steps
        self.num_steps += bool(plan.rows)
        return self._runner.execute(plan)

    def close(self) -> None:
        """Nothing to release."""

    def _advance(self, ns: int) -> None:
        self.now_ns += ns

    def waited(self, request: Request) -> int:
        """Steps from the request's arrival to the one that has its first token, that one included, or to the last."""
        last = self.first_token.get(request.request_id, self.num_steps - 1)
        return last - self.arrived[request.request_id] + 1


def make_run(policy: str, depth: int, **settings: Any) -> Run:
    """A run in which nobody is ever late, and equal requests always seem equally long: what `deadline` makes of those
    that are not has its own tests.
    """
    scheduler = make_scheduler(policy=Deadline(LATEST_TARGET) if policy == "deadline" else policy, **settings)
    if scheduler._pace is not None:
        scheduler._pace.learn = lambda *step, **how: None  # type: ignore[method-assign]
    return Run(scheduler, depth)


def random_settings(rng: random.Random) -> dict[str, Any]:
    """Budgets of 16 to 512 tokens, never fewer than sequences, as `serve` demands."""
    budget = rng.choice([16, 17, 31, 32, 33, 64, 100, 128, 200, 256, 384, 512])
    return {
        "block_size": rng.choice([1, 4, 8, 16, 16, 32, 32, 64]),
        "prefix_caching": rng.random() < 0.5,
        "max_num_batched_tokens": budget,
        "max_num_seqs": rng.choice([4, 8, 16]),
        "max_num_prefill_tokens": rng.choice([None, None, 2, 16, 40, 100]),
        "max_prefill_per_decode": rng.choice([None, None, 1, 5]),
        "max_model_len": 10**6,
    }


def prompt_tokens_left(settings: dict[str, Any], num_decoders: int) -> int:
    """What a step has for prompts beside so many decoders at least."""
    beside = 64 if settings["max_prefill_per_decode"] else 10**9
    limit = min(settings["max_num_prefill_tokens"] or 10**9, beside)
    return min(settings["max_num_batched_tokens"] - num_decoders, limit)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", IN_ORDER_OF_ARRIVAL)
def test_long_prompts_delay_a_short_one_by_no_more_than_the_bound(policy: str, depth: int) -> None:
    """Bound 1: one or two prompts without end before it, decoders beside it, more prompts all the time behind it."""
    num_bounded: Counter[int] = Counter()
    for episode in range(NUM_EPISODES):
        rng = random.Random(f"bound 1:{policy}:{depth}:{episode}")
        settings = random_settings(rng)
        num_before = 1 if policy == "deadline" else rng.choice([1, 2, 2])
        left = prompt_tokens_left(settings, settings["max_num_seqs"] - 1 - num_before)
        num_tokens = rng.randint(1, 300)
        bound = prompt_steps(num_tokens, left=left, block_size=settings["block_size"], num_before=num_before)
        if bound is None:
            continue
        run = make_run(policy, depth, num_blocks=100_000, **settings)
        ids = count()
        for _ in range(rng.randint(0, settings["max_num_seqs"] - 2 - num_before)):
            run.add(make_request(next(ids), 1, max_tokens=9_000))
        while len(run.first_token) < len(run.requests):  # before that they are prompts, too
            run.turn()
        for _ in range(rng.randint(0, 3)):
            run.turn()
        for _ in range(num_before):
            run.add(make_request(next(ids), [7] * (left * (bound + 12) + 64), max_tokens=1, cache_salt=f"{next(ids)}"))
        for _ in range(rng.randint(1, 6)):
            run.turn()
        short = run.add(make_request(next(ids), num_tokens, max_tokens=2))
        while short.request_id not in run.first_token:
            for _ in range(rng.randint(0, 2)):
                run.add(make_request(next(ids), rng.randint(num_tokens, 400), max_tokens=3))
            run.turn()
            assert run.waited(short) <= bound, (episode, settings, num_tokens, num_before)
        num_bounded[num_before] += 1
        assert not run.num_preemptions
    assert num_bounded[1] >= NUM_EPISODES // 10
    assert num_bounded[2] >= NUM_EPISODES // 10 or policy == "deadline"  # which lets the third wait in line


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("max_num_batched_tokens", [32, 33, 48, 63, 64])
def test_budget_of_one_block_is_shared_too(max_num_batched_tokens: int, depth: int) -> None:
    """The long prompt would take the whole block in every step, and so all of the budget or nearly all."""
    run = make_run("continuous", depth, block_size=32, num_blocks=500, max_num_batched_tokens=max_num_batched_tokens)
    run.add(make_request(0, 4_500, max_tokens=1))
    for _ in range(3):
        run.turn()
    short = run.add(make_request(1, 30, max_tokens=1))
    while short.request_id not in run.first_token:
        run.turn()
    assert run.waited(short) <= 2


def test_long_prompt_computes_something_in_every_step_however_deep_it_is() -> None:
    """Planned by time: in the end a step has room for 14 of its tokens, which is no block, but for 200 of a new one."""
    model = StepTimeModel(token_ns=100_000, prefill_pair_ns=200)
    settings = {"block_size": 32, "num_blocks": 1_000, "max_num_batched_tokens": 512, "max_num_seqs": 8}
    run = make_run("continuous", 0, step_times=model, target_itl_ns=20_000_000, **settings)
    long = run.add(make_request(0, 6_000, max_tokens=1))
    ids = count(1)
    while long.request_id not in run.first_token:
        while run.scheduler.num_waiting < 2:
            run.add(make_request(next(ids), 300, max_tokens=1))
        before = long.num_scheduled_through
        run.turn()
        assert long.num_scheduled_through > before or long.state is RequestState.FINISHED


def hot_request(rng: random.Random, request_id: int, length: int) -> Request:
    """All of its prompt but the last token is that of the others."""
    return make_request(request_id, [*range(length - 1), 10_000 + request_id], max_tokens=rng.randint(1, 40))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", [*IN_ORDER_OF_ARRIVAL, "shortest", "static", "thrifty"])
def test_cold_prompt_boards_before_hot_ones_that_come_after_it(policy: str, depth: int) -> None:
    """Bound 2: prompts that the cache holds all but whole arrive faster than they can be served, for ever."""
    num_preemptions = 0
    for episode in range(NUM_EPISODES // 3):
        rng = random.Random(f"bound 2:{policy}:{depth}:{episode}")
        settings = random_settings(rng) | {"prefix_caching": True}
        block_size, length = settings["block_size"], 6 * settings["block_size"] + rng.randint(1, 40)
        num_blocks = blocks_of(length + 40, block_size) * rng.choice([2, 3, 8]) + 1
        run = make_run(policy, depth, num_blocks=num_blocks, **settings)
        ids = count()
        for _ in range(2 * settings["max_num_seqs"]):
            run.add(hot_request(rng, next(ids), length))
        for _ in range(rng.randint(1, 30)):
            run.turn()
        before = list(run.scheduler.requests.values())
        cold = run.add(make_request(next(ids), [5] * length, max_tokens=2, cache_salt="cold"))
        after: list[Request] = []
        left = prompt_tokens_left(settings, settings["max_num_seqs"] - 1)
        bound = boarding_steps(before, left=left, block_size=block_size)
        while cold.request_id not in run.boarded:
            while run.scheduler.num_waiting < 3 * settings["max_num_seqs"]:
                after.append(run.add(hot_request(rng, next(ids), length)))
            run.turn()
            assert run.num_steps - run.arrived[cold.request_id] <= bound, (episode, settings)
        overtaken_by = [
            r.request_id for r in after if run.boarded.get(r.request_id, 10**9) < run.boarded[cold.request_id]
        ]
        assert not overtaken_by
        assert after
        assert any(r.num_cached_tokens for r in run.requests.values())
        num_preemptions += run.num_preemptions
    assert num_preemptions or policy == "static"


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", POLICIES)
def test_decoder_has_a_token_in_every_step_while_prompts_stream_in(policy: str, depth: int) -> None:
    """Bound 3: as long as it keeps its place; a budget below the number of decoders, which `serve` refuses, makes them
    take turns.
    """
    num_turns_taken = 0
    for episode in range(NUM_EPISODES // 3):
        rng = random.Random(f"bound 3:{policy}:{depth}:{episode}")
        settings = random_settings(rng)
        if rng.random() < 0.3:
            settings |= {"max_num_batched_tokens": rng.randint(1, 7), "max_num_seqs": 16}
        run = Run(make_scheduler(policy=policy, num_blocks=20_000, batch_wait_ns=STEP_NS, **settings), depth)
        ids = count()
        for _ in range(120):
            while run.scheduler.num_waiting < 4:
                run.add(random_request(rng, next(ids), max_prompt=300, max_tokens=50))
            run.turn()
        bound = ceil(settings["max_num_seqs"] / settings["max_num_batched_tokens"])
        num_turns_taken += bound > 1
        assert run.widest_gap <= bound, (episode, settings)
        assert run.num_steps > 100
        assert not run.num_preemptions or run.scheduler.policy.may_displace
    assert num_turns_taken


@pytest.mark.parametrize("policy", POLICIES)
def test_decoder_waits_for_blocks_only_if_it_loses_its_place(policy: str) -> None:
    """Bound 3 in a pool that is too small: without a plan on its way no decoder is passed over."""
    num_preemptions = 0
    for episode in range(NUM_EPISODES // 3):
        rng = random.Random(f"bound 3, scarce:{policy}:{episode}")
        settings = random_settings(rng) | {"max_model_len": 120}
        num_blocks = blocks_of(150, settings["block_size"])
        run = Run(make_scheduler(policy=policy, num_blocks=num_blocks, **settings), 0)
        ids = count()
        for _ in range(100):
            while run.scheduler.num_waiting < 4:
                run.add(random_request(rng, next(ids), max_prompt=50, max_tokens=60))
            run.turn()
        assert run.widest_gap <= 1
        num_preemptions += run.num_preemptions
    assert num_preemptions > 20


def random_request(rng: random.Random, request_id: int, *, max_prompt: int, max_tokens: int) -> Request:
    """Sometimes with a prefix that others have, of any tenant, urgency and patience."""
    prompt = [*range(rng.choice([0, 0, 40])), *([request_id] * rng.randint(1, max_prompt))][:max_prompt]
    return make_request(
        request_id,
        prompt,
        max_tokens=rng.randint(1, max_tokens),
        priority=rng.randrange(3),
        tenant=rng.choice("abc"),
        ttft_target_ns=rng.choice([None, 5 * STEP_NS, 200 * STEP_NS]),
        itl_target_ns=rng.choice([None, STEP_NS // 2, 3 * STEP_NS]),
    )


class Watch:
    """Asserts, at each preemption, that whoever has been preempted often enough goes only after all who have not."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.num_spared = self.num_watched = 0
        self._limit = scheduler.limits.max_preemptions
        self._running = scheduler.running
        self._preempt = scheduler.displacement.preempt
        scheduler.displacement.preempt = self._look_first  # type: ignore[method-assign]

    def _look_first(self, victim: Request, *how: Any) -> int:
        num_at_front = sum(r.num_preemptions >= self._limit for r in self._running.values())
        if victim.num_preemptions >= self._limit:
            assert num_at_front == len(self._running), "a request at the front was preempted before others"
        self.num_spared += victim.num_preemptions < self._limit and num_at_front > 0
        self.num_watched += 1
        return self._preempt(victim, *how)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", POLICIES)
def test_request_preempted_often_enough_is_preempted_last(policy: str, depth: int) -> None:
    num_spared = num_watched = 0
    for episode in range(NUM_EPISODES // 3):
        rng = random.Random(f"front:{policy}:{depth}:{episode}")
        settings = random_settings(rng) | {"max_model_len": 120, "max_preemptions": rng.choice([1, 1, 2])}
        scheduler = make_scheduler(policy=policy, num_blocks=blocks_of(150, settings["block_size"]), **settings)
        watch = Watch(scheduler)
        run = Run(scheduler, depth)
        ids = count()
        for _ in range(150):
            while scheduler.num_waiting < 4:
                run.add(random_request(rng, next(ids), max_prompt=50, max_tokens=60))
            run.turn()
        num_spared += watch.num_spared
        num_watched += watch.num_watched
    assert num_watched > 20
    assert num_spared > 2


def test_of_two_long_prompts_the_earlier_gets_no_less_than_the_later() -> None:
    """80 tokens a step, blocks of 32: half of it, cut to a border, would leave the earlier one with a few."""
    run = make_run("continuous", 0, block_size=32, num_blocks=500, max_num_batched_tokens=80, max_num_seqs=2)
    earlier = run.add(make_request(0, 3_000, max_tokens=1))
    for _ in range(5):
        run.turn()
    later = run.add(make_request(1, 3_000, max_tokens=1))
    run.turn()
    first, second = earlier.num_scheduled_through, later.num_scheduled_through
    for _ in range(20):
        run.turn()
    assert earlier.num_scheduled_through - first >= later.num_scheduled_through - second >= 20 * 32
