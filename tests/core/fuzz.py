"""Random traffic over random small configurations, checked against the oracle after every step; counts its coverage.

An episode is one configuration: arrivals, groups, shared prefixes, aborts in every state, failing rows, then a drain.
Everything follows from the seed of the episode, which a failure names.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import count

from tests.core.harness import Harness, eos, make_request, make_scheduler, state_of

from everystop.core.errors import RequestError
from everystop.core.policy import POLICIES
from everystop.core.request import RequestState
from everystop.core.step_time import StepTimeModel

# States in which requests are aborted, with weights that make up for how rare they are.
ABORT_WEIGHTS = {
    "waiting": 1.5,
    "forking": 100,
    "running-prefill": 16,
    "running-decode": 30,
    "preempted": 1000,
    "in flight": 3,
    "finished or unknown": 1.5,
}
ABORT_RATES = (0.0, 0.1, 0.3)  # a step; requests in a rare state are aborted whenever it is not 0
STEPS_PER_EPISODE = 160
ROTATION = (*POLICIES, "priority", "priority")  # which preempts most


class Episode:
    """One configuration under random traffic."""

    def __init__(self, seed: str, policy: str, depth: int, abort_rate: float, *, is_late: bool = False) -> None:
        self.rng = rng = random.Random(seed)
        self.block_size = rng.choice([1, 2, 3, 4, 8])
        self.num_blocks = rng.randint(24, 72) // self.block_size + 2
        self.max_num_seqs = rng.choice([1, 2, 4, 8, 12, 12, 16])
        self.context = rng.choice([24, 64, 1000])
        cap = rng.choice([None, None, None, 1, 5, 16])
        self.harness = Harness(
            make_scheduler(
                policy=policy,
                num_blocks=self.num_blocks,
                block_size=self.block_size,
                prefix_caching=rng.random() < 0.75,
                batch_wait_ns=rng.choice([0, 3_500_000]),
                ageing_ns=rng.choice([5_000_000, 50_000_000, 10**12]),
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=rng.choice([1, 4, 9, 17, 24, 40, 64, 64]),
                max_num_prefill_tokens=cap,
                max_model_len=self.context,
                max_preemptions=rng.choice([0, 2, 8, 8, 8]),
                admission=rng.choice(["greedy"] * 4 + ["expected"]),
                target_itl_ns=rng.choice([None, None, 400_000, 1_500_000]),
                step_times=StepTimeModel(step_ns=300_000, token_ns=50_000),
            ),
            depth=depth,
            is_late=is_late,
        )
        self.load = rng.choice([0.7, 1.2, 2.0]) * self.max_num_seqs
        self.prefixes = [[rng.randrange(64) for _ in range(rng.randint(1, 30))] for _ in range(3)]
        self.abort_rate = abort_rate
        self.failure_rate = rng.choice([0.0, 0.0, 0.02])
        self.ids = count()

    def run(self, num_steps: int) -> None:
        """Traffic for a number of turns, then the drain."""
        for _ in range(num_steps):
            self._arrive()
            self._abort_some()
            self._fail_some()
            self.harness.turn()
        self.harness.run(max_turns=self.drain_bound())

    def drain_bound(self) -> int:
        """Turns within which everything that is left must be done, however it is preempted.

        The first in keep order never loses its blocks and gets a token at least every `max_num_seqs` steps: its whole
        length, computed once more for good, times the number that can take turns, bounds its time at the front.
        """
        scheduler = self.harness.scheduler
        left = sum(r.num_prompt_tokens + r.max_tokens + 3 for r in scheduler.requests.values())
        return left * self.max_num_seqs + 10

    def _arrive(self) -> None:
        scheduler, rng = self.harness.scheduler, self.rng
        while len(scheduler.requests) < self.load and rng.random() < 0.6:
            n = rng.choice([1, 1, 1, 2, 3])
            first = next(self.ids)
            choices = [first, *(next(self.ids) for _ in range(n - 1))]
            prompt = self._prompt()
            fields = self._fields(n, first)
            for k, request_id in enumerate(choices):
                request = make_request(request_id, prompt, choice_index=k, **fields)
                try:
                    self.harness.add(request)
                except RequestError:
                    assert request_id in self.harness.refused

    def _prompt(self) -> list[int]:
        rng = self.rng
        earlier = list(self.harness.finished)
        if earlier and rng.random() < 0.2:  # the next turn of a chat
            last = self.harness.requests[rng.choice(earlier)]
            return [*last.token_ids, rng.randrange(64)]
        prefix = rng.choice(self.prefixes) if rng.random() < 0.6 else []
        return [*prefix, *(rng.randrange(64) for _ in range(rng.randint(0 if prefix else 1, 25)))]

    def _fields(self, n: int, first: int) -> dict[str, object]:
        rng = self.rng
        return {
            "n": n,
            "group_id": first,
            "max_tokens": rng.choice([None, 0, 1, 2, 20, 30, 40, 60]),
            "min_tokens": rng.choice([0, 0, 4]),
            "prompt_logprobs": rng.choice([None, None, 0]),
            "temperature": rng.choice([0.0, 1.0]),
            "seed": rng.randrange(4),
            "stop": rng.choice([(), (), (), ("s",)]),
            "stop_token_ids": rng.choice([(), (), (), (5, 40)]),
            "ignore_eos": rng.random() < 0.7,
            "eos_token_ids": eos(),
            "priority": rng.randrange(6),
            "ttft_target_ns": rng.choice([None, None, 4_000_000, 80_000_000]),
            "itl_target_ns": rng.choice([None, None, 500_000, 3_000_000]),
            "tenant": rng.choice("aabc"),
            "cache_salt": rng.choice(["", "", "", "a"]),
            "logit_bias": rng.choice([(), (), ((3, 1.0),)]),
        }

    def _abort_some(self) -> None:
        rng, scheduler = self.rng, self.harness.scheduler
        is_rare = self.abort_rate and any(r.state is RequestState.PREEMPTED for r in scheduler.requests.values())
        if not self.harness.requests or rng.random() >= (0.97 if is_rare else self.abort_rate):
            return
        by_state: dict[str, list[int]] = {"finished or unknown": [*self.harness.finished, 10**9]}
        for request in scheduler.requests.values():
            by_state.setdefault(state_of(request), []).append(request.request_id)
        states = sorted(by_state)
        state = rng.choices(states, [ABORT_WEIGHTS[state] for state in states])[0]
        request_id = rng.choice(by_state[state])
        if rng.random() < 0.25:
            self.harness.abort_before_execution.append(request_id)
        else:
            self.harness.abort(request_id)

    def _fail_some(self) -> None:
        if self.rng.random() < self.failure_rate and self.harness.scheduler.running:
            self.harness.runner.fail[self.rng.choice(list(self.harness.scheduler.running))] = "nan_logits"


def fuzz(num_steps: int, *, seed: int = 0) -> Counter[str]:
    """At least `num_steps` steps over every policy and both depths; returns the coverage. Failures name the episode."""
    coverage: Counter[str] = Counter()
    for episode in count():
        if coverage["steps"] >= num_steps:
            return coverage
        cycle, index = divmod(episode, len(ROTATION))
        policy, depth = ROTATION[index], cycle % 2
        name = f"{seed}:{episode}:{policy}:{depth}"
        is_late = cycle % 4 == 3  # every other one of those at depth 1
        run = Episode(name, policy, depth, abort_rate=ABORT_RATES[(index + cycle) % len(ABORT_RATES)], is_late=is_late)
        try:
            run.run(STEPS_PER_EPISODE)
        except Exception as error:
            error.add_note(f"fuzz episode {name!r}, after {run.harness.counts['steps']} steps")
            raise
        counts = run.harness.counts
        coverage += counts
        coverage["evictions"] += run.harness.scheduler.kv.pool.num_evicted
        coverage[f"steps under {policy}"] += counts["steps"]
        coverage[f"steps at depth {depth}"] += counts["steps"]
        coverage["steps executed late"] += counts["steps"] * is_late
        coverage["failed rows"] += counts["finished by error"]
    raise AssertionError("unreachable")
