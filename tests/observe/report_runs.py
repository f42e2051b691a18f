"""Comparisons to draw: the real scheduler over a runner whose step times are a formula, in virtual time."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from tests.core.harness import make_request, make_scheduler

from everystop.core.events import Event, StepEvent
from everystop.core.plan import StepPlan
from everystop.engine.loop import StepLoop
from everystop.observe.comparison import Comparison, RequestLine, Run
from everystop.observe.history import History
from everystop.runner.simulated import SimulatedRunner

Job = tuple[int, int, int]  # prompt tokens, output tokens, arrival in milliseconds
STRAGGLER: tuple[Job, ...] = ((24, 120, 0), *((24, 20, 0) for _ in range(15)))
START_NS = 5_000_000_000
SETTINGS: Mapping[str, Any] = {"model_id": "smollm2", "cpu": "Xeon", "seed": 7, "date": "2026-11-30T03:54:52+00:00"}


def mixed(num: int, gap_ms: int = 30) -> tuple[Job, ...]:
    """Jobs of many lengths, one after the other."""
    return tuple((20 + i * 37 % 200, 5 + i * i * 13 % 90, i * gap_ms) for i in range(num))


def fraction(*key: object) -> float:
    """A number in [0, 1) that depends on nothing but the key."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:4], "big") / (1 << 32)


class Virtual:
    """A run in virtual time: who arrives when, and what every token's time was."""

    def __init__(self, policy: str, jobs: Sequence[Job], repeat: int, scheduler: Mapping[str, Any]) -> None:
        self.policy, self.jobs, self.repeat = policy, jobs, repeat
        self.now_ns = START_NS
        self.max_num_seqs = int(scheduler.get("max_num_seqs", 8))
        self.scheduler = make_scheduler(
            policy=policy,
            **{"num_blocks": 4096, "max_num_batched_tokens": 64, "prefix_caching": False}
            | dict(scheduler)
            | {"max_num_seqs": self.max_num_seqs},
        )
        self.runner = SimulatedRunner(self._step_ns, self._advance)
        self.token_ns: list[list[int]] = [[] for _ in jobs]
        self.history = History()

    def _step_ns(self, plan: StepPlan) -> int:
        jitter = 1.0 + 0.06 * fraction(self.policy, self.repeat, plan.step_id)
        spike = 2.5 if fraction("spike", self.repeat, plan.step_id) < 0.01 else 1.0
        return round((4e6 + 3e5 * len(plan.rows) + 6e4 * plan.num_tokens) * jitter * spike)

    def _advance(self, ns: int) -> None:
        self.now_ns += ns + 250_000

    def run(self) -> Run:
        """Until the last request has ended."""
        loop = StepLoop(self.scheduler, self.runner, lambda: self.now_ns)
        due = sorted(range(len(self.jobs)), key=lambda i: self.jobs[i][2])
        while due or self.scheduler.has_work:
            while due and START_NS + self.jobs[due[0]][2] * 1_000_000 <= self.now_ns:
                self._add(due.pop(0))
            turn = loop.turn()
            self._take(turn.events)
            if turn.is_idle:
                at_ns = START_NS + self.jobs[due[0]][2] * 1_000_000 if due else self.now_ns + 1_000_000
                self.now_ns = max(self.now_ns + 1, min(at_ns, turn.wake_at_ns or at_ns))
        self._take(self.scheduler.take_events())
        self.history.catch_up()
        return self._as_run()

    def _add(self, index: int) -> None:
        prompt, output, _ = self.jobs[index]
        request = make_request(index, prompt, max_tokens=output, ignore_eos=True)
        request.arrival_ns = self.now_ns
        self.scheduler.add(request, self.now_ns)

    def _take(self, events: list[Event]) -> None:
        self.history.receive(events)
        for event in events:
            if isinstance(event, StepEvent):
                for row, tokens in zip(event.plan.rows, event.tokens, strict=True):
                    self.token_ns[row.request_id] += [event.now_ns] * len(tokens)

    def _as_run(self) -> Run:
        lines = tuple(self._line(index) for index in range(len(self.jobs)))
        return Run(
            policy=self.policy,
            repeat=self.repeat,
            duration_s=max(line.end_s for line in lines),
            requests=lines,
            start_ns=START_NS,
            max_num_seqs=self.max_num_seqs,
            history=self.history,
        )

    def _line(self, index: int) -> RequestLine:
        prompt, output, at_ms = self.jobs[index]
        token_s = tuple((ns - START_NS) / 1e9 for ns in self.token_ns[index])
        return RequestLine(
            index=index,
            group="long" if output > 100 else "short",
            num_prompt_tokens=prompt,
            num_output_tokens=len(token_s),
            scheduled_s=at_ms / 1000,
            sent_s=at_ms / 1000,
            token_s=token_s,
            end_s=token_s[-1],
            error=None,
            digest=f"{prompt}-{output}",
            request_id=index,
        )


def make_comparison(
    jobs: Sequence[Job] = STRAGGLER,
    policies: Sequence[str] = ("static", "continuous"),
    *,
    num_repeats: int = 2,
    workload: str = "straggler",
    **scheduler: Any,
) -> Comparison:
    """Every policy over the jobs, repeat by repeat; `scheduler` are arguments of `make_scheduler`."""
    runs = [Virtual(policy, jobs, repeat, scheduler).run() for repeat in range(num_repeats) for policy in policies]
    return Comparison(
        workload=workload, policies=tuple(policies), runs=tuple(runs), settings=SETTINGS, num_repeats_asked=num_repeats
    )
