"""Fuzzed schedules as a history sees them, with clocks that move between any two looks, and an oracle that is slow."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import pairwise
from typing import Any, NamedTuple

from tests.core.fuzz import Episode
from tests.core.hash_model import STEP_NS

from everystop.core.events import AdmitEvent, ArrivalEvent, FinishEvent, PreemptEvent, StepEvent
from everystop.core.plan import StepPlan, StepResult
from everystop.core.request import RequestState
from everystop.core.rows import Row
from everystop.engine.loop import Turn
from everystop.observe.history import History


class Window(NamedTuple):
    """The time of a step: from its planning, or the return of the one before, to its own return."""

    step_id: int
    begin_ns: int
    end_ns: int


CLOCK_NS = 40_000  # most that passes between two looks at the clock


class Watched(Episode):
    """An episode whose events a history receives at every turn. Steps say at times how long they executed and sampled,
    at times not. `reasons` are the scheduler's own words by the time of each planning: for each request that has never
    boarded why it waits, None where it may be any of the reasons of those passed over.
    """

    def __init__(self, seed: str, policy: str, depth: int, abort_rate: float) -> None:
        super().__init__(seed, policy, depth, abort_rate)
        self.history = History()
        self.policy = policy
        self.depth = depth
        self.reasons: dict[int, dict[int, str | None]] = {}
        self.clock = random.Random(seed)
        self._num_seen = 0
        harness = self.harness
        harness._is_checking = False
        harness.loop._now = self._tick
        self._schedule, harness.scheduler.schedule = harness.scheduler.schedule, self._note_reasons  # type: ignore[method-assign]
        self._execute, harness.runner.execute = harness.runner.execute, self._run_step  # type: ignore[method-assign]

    def _tick(self) -> int:
        self.harness.now_ns += self.clock.choice([1, 2, CLOCK_NS])
        return self.harness.now_ns

    def _run_step(self, plan: StepPlan) -> StepResult:
        result = self._execute(plan)
        result.execute_ns = self.clock.choice([0, STEP_NS // 2 + 1, STEP_NS])
        result.sample_ns = self.clock.choice([0, STEP_NS // 9])
        return result

    def _note_reasons(self, now_ns: int) -> StepPlan:
        plan = self._schedule(now_ns)
        scheduler = self.harness.scheduler
        head_id, reason = scheduler.roster._wait_log._last
        reasons: dict[int, str | None] = {}
        for request in scheduler.requests.values():
            if request.num_preemptions:
                continue
            if request.state is RequestState.FORKING:
                reasons[request.request_id] = "fork"
            elif request.state is RequestState.WAITING and reason is not None:
                is_exact = request.request_id == head_id or not self.policy.startswith(("fair", "deadline"))
                reasons[request.request_id] = reason.value if is_exact else None
        self.reasons[now_ns] = reasons
        return plan

    def catch_up(self) -> None:
        """Tell the history what has happened since."""
        events = self.harness.events
        self.history.receive(events[self._num_seen :])
        self._num_seen = len(events)
        self.history.catch_up()

    def turn(self) -> Turn:
        """One turn, with traffic before it."""
        self._arrive()
        self._abort_some()
        self._fail_some()
        turn = self.harness.turn()
        self.catch_up()
        return turn

    def drain(self) -> None:
        """Let all that is left come to its end."""
        self.harness.run(max_turns=self.drain_bound())
        self.catch_up()


class Oracle:
    """What requests that have ended were doing at any time, from the bare events."""

    def __init__(self, events: list[Any]) -> None:
        self.arrivals = {e.request_id: e for e in events if isinstance(e, ArrivalEvent)}
        self.finishes = {e.request_id: e for e in events if isinstance(e, FinishEvent)}
        self.admits: dict[int, list[AdmitEvent]] = defaultdict(list)
        self.preempts: dict[int, list[PreemptEvent]] = defaultdict(list)
        self.windows: list[Window] = []
        self.own: dict[int, list[tuple[Window, Row]]] = defaultdict(list)
        self.outputs: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for event in events:
            if isinstance(event, AdmitEvent):
                self.admits[event.request_id].append(event)
            elif isinstance(event, PreemptEvent):
                self.preempts[event.request_id].append(event)
            elif isinstance(event, StepEvent):
                self._take_step(event)

    def _take_step(self, event: StepEvent) -> None:
        begin_ns = max(event.scheduled_ns, self.windows[-1].end_ns if self.windows else 0)
        window = Window(event.plan.step_id, begin_ns, event.now_ns)
        self.windows.append(window)
        num_kept = len(event.plan.rows) - event.plan.num_padded_rows
        for row, tokens in zip(event.plan.rows[:num_kept], event.tokens[:num_kept], strict=True):
            self.own[row.request_id].append((window, Row(*row)))
            self.outputs[row.request_id] += [(event.now_ns, event.plan.step_id)] * len(tokens)

    def ns_by_kind(self, request_id: int) -> dict[str, int]:
        """How long a request was queued, preempted, skipped, or else on board, asking in the middle of each stretch in
        which nothing happened to anybody.
        """
        start, end = self.arrivals[request_id].now_ns, self.finishes[request_id].now_ns
        times = {start, end, *(w.begin_ns for w in self.windows), *(w.end_ns for w in self.windows)}
        times |= {e.now_ns for e in (*self.admits[request_id], *self.preempts[request_id])}
        sums: dict[str, int] = defaultdict(int)
        for first, last in pairwise(sorted(t for t in times if start <= t <= end)):
            sums[self.kind_at(request_id, (first + last) / 2)] += last - first
        return dict(sums)

    def kind_at(self, request_id: int, t: float) -> str:
        """What the request was doing at a time within its life."""
        own = self.own[request_id]
        inside = next(((window, row) for window, row in own if window.begin_ns <= t < window.end_ns), None)
        if inside is not None:
            window, row = inside
            lost = [e for e in self.preempts[request_id] if e.step_id <= window.step_id]
            return "preempted" if self._is_catching_up(request_id, lost, window.step_id, row.start) else "on board"
        admits = [e for e in self.admits[request_id] if e.now_ns <= t]
        preempts = [e for e in self.preempts[request_id] if e.now_ns <= t]
        if not admits:
            return "queue"
        next_id = max((window.step_id for window, _ in own if window.end_ns <= t), default=-1) + 1
        if self._is_catching_up(request_id, preempts, next_id, -1):
            return "preempted"
        if not any(window.end_ns <= t and window.step_id >= admits[-1].step_id for window, _ in own):
            return "queue"  # boarded, while the step before its first was running
        return "skipped" if self._is_skipped(request_id, t) else "on board"

    def _is_catching_up(self, request_id: int, preempts: list[PreemptEvent], next_id: int, start: int) -> bool:
        """After these preemptions, and up to a row from `start` on in the step of that id, the request has not come up
        again to where it had been.
        """
        if not preempts:
            return False
        lost = max(e.num_lost_tokens for e in preempts)
        since = [row for w, row in self.own[request_id] if preempts[-1].step_id <= w.step_id < next_id]
        return start < lost and not any(row.start + row.num_tokens >= lost for row in since)

    def _is_skipped(self, request_id: int, t: float) -> bool:
        """A step of others ends between now and whatever happens to the request next."""
        own_ids = {window.step_id for window, _ in self.own[request_id]}
        following = [window.begin_ns for window, _ in self.own[request_id] if window.begin_ns > t]
        following += [e.now_ns for e in self.preempts[request_id] if e.now_ns > t]
        until_ns = min([*following, self.finishes[request_id].now_ns])
        return any(w.end_ns > t and w.begin_ns < until_ns and w.step_id not in own_ids for w in self.windows)
