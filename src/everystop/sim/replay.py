"""Drives a fresh scheduler by a recorded run: the same calls must give the same plans; another policy shows what it
would have done.

Prefix hits come from the recorded block keys, and tokens are filler, but for those at which a request stopped.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everystop.core.errors import RequestError
from everystop.core.events import ArrivalEvent, Event, FinishEvent, PreemptEvent, StepEvent
from everystop.core.plan import StepPlan
from everystop.core.policy import PolicySettings, make_policy
from everystop.core.scheduler import Scheduler
from everystop.core.step_time import UNKNOWN_STEP_TIMES, StepTimeModel
from everystop.engine.loop import StepLoop
from everystop.observe.history import History
from everystop.runner.simulated import SimulatedRunner
from everystop.sim.clock import Clock
from everystop.sim.cost import CostModel
from everystop.sim.fit import TimedStep, fit_line
from everystop.sim.past import Past
from everystop.sim.record import Record
from everystop.sim.redrive import Redrive

log = logging.getLogger("everystop.record")


@dataclass(slots=True)
class Timeline:
    """When requests arrived, brought their first token and ended, by request id, and the gaps between tokens; in
    nanoseconds. `tenant` has the number that stands for each request's tenant in the record.
    """

    arrival_ns: dict[int, int] = field(default_factory=dict)
    first_token_ns: dict[int, int] = field(default_factory=dict)
    finish_ns: dict[int, int] = field(default_factory=dict)
    num_tokens: Counter[int] = field(default_factory=Counter)
    itl_ns: list[int] = field(default_factory=list)
    num_steps: int = 0
    num_preemptions: int = 0
    tenant: dict[int, str] = field(default_factory=dict)
    _last_token_ns: dict[int, int] = field(default_factory=dict)

    def note(self, events: list[Event]) -> None:
        """Take in the events of a call."""
        for event in events:
            if isinstance(event, ArrivalEvent):
                self.arrival_ns[event.request_id] = event.now_ns
                self.tenant[event.request_id] = event.tenant
            elif isinstance(event, FinishEvent):
                self.finish_ns[event.request_id] = event.now_ns
            elif isinstance(event, PreemptEvent):
                self.num_preemptions += 1
            elif isinstance(event, StepEvent):
                self.num_steps += bool(event.plan.rows)
                for request_id, tokens in zip(event.plan.rows.request_ids, event.tokens, strict=True):
                    if tokens:
                        last_ns = self._last_token_ns.get(request_id)
                        if last_ns is None:
                            self.first_token_ns[request_id] = event.now_ns
                        else:
                            self.itl_ns.append(event.now_ns - last_ns)
                        self._last_token_ns[request_id] = event.now_ns
                        self.num_tokens[request_id] += len(tokens)

    def ttft_ns(self) -> list[int]:
        """Arrival to first token, of every request that got one."""
        return list(self.ttft_by_request().values())

    def ttft_by_request(self) -> dict[int, int]:
        """The same, by request id."""
        return {request_id: when - self.arrival_ns[request_id] for request_id, when in self.first_token_ns.items()}

    def e2e_ns(self) -> list[int]:
        """Arrival to end, of every request that ended."""
        return [when - self.arrival_ns[request_id] for request_id, when in self.finish_ns.items()]

    def span_ns(self) -> int:
        """First arrival to last end."""
        return max(self.finish_ns.values(), default=0) - min(self.arrival_ns.values(), default=0)


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What a replay found.

    `first_difference` is the step whose plan is not the recorded one, None if all are. `is_truncated` tells that the
    record ends in the middle, and `may_go_on` that what there is of it is whole, as while it is being written.
    `replayed` is the same run again, or what another policy would have made of it; then `baseline` is the recorded
    policy in the same simulation, so that what differs is the policy's doing. `recorded_policy` is its name.
    """

    policy: str
    num_plans: int
    num_requests: int
    first_difference: int | None
    is_truncated: bool
    recorded: Timeline
    replayed: Timeline
    baseline: Timeline | None = None
    recorded_policy: str = ""
    may_go_on: bool = False


Change = Callable[[str, PolicySettings], PolicySettings]
"""From the name of the policy to simulate and the recorded settings to those that it gets."""


def replay(path: Path, *, policy: str | None = None, change: Change | None = None) -> ReplayReport:
    """Replay a record under its own policy, comparing every plan, and then under another one if `policy` names it, or
    with other settings if `change` makes them from the recorded ones.

    That runs in virtual time: each request brings as many tokens as recorded, unless its client left, and a step takes
    what a cost model fitted to the recorded steps says. A policy that needs step times gets the same ones, if the
    record has none. Raises RecordError, and what `change` raises.
    """
    record = Record.read(path)
    simulated, settings = policy or record.policy, record.policy_settings
    if change is not None:
        settings = change(simulated, settings)
    recorded = Timeline()
    redrive = Redrive(record, recorded.note)
    redrive.run()
    replayed, baseline = recorded, None
    if (simulated != record.policy or change is not None) and redrive.first_difference is None:
        cost = fit_line(redrive.steps, record.step_times)
        other = make_policy(simulated, settings)
        is_measured = other.needs_step_times and record.step_times == UNKNOWN_STEP_TIMES
        calls = recorded_traffic(record, recorded)
        scheduler = record.make_scheduler(other, cost if is_measured else None)
        replayed = rerun(scheduler, record, recorded, calls, cost.plan_ns)
        baseline = rerun(record.make_scheduler(), record, recorded, calls, cost.plan_ns)
    return ReplayReport(
        simulated,
        redrive.num_plans,
        redrive.num_requests,
        redrive.first_difference,
        record.is_truncated,
        recorded,
        replayed,
        baseline,
        record.policy,
        record.may_go_on,
    )


def predict(path: Path, cost: CostModel) -> ReplayReport:
    """A recorded run beside what the simulator makes of its arrivals under these step times and the same policy.

    Raises RecordError, also if the recorded plans are not what this version plans.
    """
    record = Record.read(path)
    recorded = Timeline()
    redrive = _repeat(record, recorded.note)
    return ReplayReport(
        record.policy,
        redrive.num_plans,
        redrive.num_requests,
        None,
        record.is_truncated,
        recorded,
        rerun(record.make_scheduler(), record, recorded, recorded_traffic(record, recorded), cost.plan_ns),
        may_go_on=record.may_go_on,
    )


def timed_steps(path: Path) -> tuple[list[TimedStep], StepTimeModel]:
    """What each step of a record computed, and how long it took; and the step times that its server measured when it
    started (unknown ones of an older record). Raises RecordError, also if its plans differ.
    """
    record = Record.read(path)
    return _repeat(record, lambda events: None).steps, record.step_times


def recorded_events(path: Path) -> list[Event]:
    """Every event of a recorded run, made again by repeating its calls; tenants are numbered as in the record.

    Raises RecordError, also if its plans differ.
    """
    events: list[Event] = []
    _repeat(Record.read(path), events.extend)
    return events


def history_of_record(path: Path) -> History:
    """All that happened in a recorded run, with its recorded times; nothing of it is forgotten.

    Tenants are numbered as in the record. Of a record that was cut off or damaged, what came before, with a warning in
    the log. Raises RecordError for a file that is no record, or whose plans are not what this version plans.
    """
    return _remember(_read(path))[0]


@dataclass(frozen=True, slots=True)
class PastRun:
    """A recorded run that has been read and repeated once: what it was told, what happened, and how long steps took."""

    record: Record
    history: History
    timeline: Timeline
    steps: list[TimedStep]


def past_run(path: Path) -> PastRun:
    """All that a record tells, as `history_of_record` and under the same conditions."""
    record, timeline = _read(path), Timeline()
    history, redrive = _remember(record, timeline.note)
    return PastRun(record, history, timeline, redrive.steps)


def _read(path: Path) -> Record:
    record = Record.read(path)
    if record.may_go_on:
        log.warning(
            "the record %s has no end: it may still be being written, or was cut off; this is what it says so far", path
        )
    elif record.is_truncated:
        log.warning("the record %s is cut off or damaged: this is what it says up to there", path)
    return record


def _remember(record: Record, note: Callable[[list[Event]], None] = lambda events: None) -> tuple[History, Redrive]:
    past = Past(record)

    def hear(events: list[Event]) -> None:
        past.hear(events)
        note(events)

    redrive = _repeat(record, hear)
    past.fold()
    return past.history, redrive


def histories_of_record(record: Record, first_ids: Sequence[int]) -> list[History]:
    """What happened in each of several stretches of a recorded run: one begins with the arrival of each of these
    requests, which stand in their order, and ends where the next begins.

    Raises RecordError, also if the record's plans differ.
    """
    pasts = {request_id: Past(record) for request_id in first_ids}
    current: Past | None = None

    def hear(events: list[Event]) -> None:
        nonlocal current
        first = 0
        for i, event in enumerate(events):
            if isinstance(event, ArrivalEvent) and event.request_id in pasts:
                if current is not None:
                    current.hear(events[first:i])
                first, current = i, pasts[event.request_id]
        if current is not None:
            current.hear(events[first:])

    _repeat(record, hear)
    for past in pasts.values():
        past.fold()
    return [past.history for past in pasts.values()]


def _repeat(record: Record, hear: Callable[[list[Event]], None]) -> Redrive:
    redrive = Redrive(record, hear)
    redrive.run()
    redrive.check_same()
    return redrive


def recorded_traffic(record: Record, recorded: Timeline) -> list[list[Any]]:
    """The calls of a record that come from its clients, in order: arrivals, and departures before the end."""

    def is_traffic(call: list[Any]) -> bool:
        kind, now_ns, request_id, *_ = call
        return bool(kind == "add" or (kind == "abort" and recorded.finish_ns.get(request_id, now_ns) >= now_ns))

    return [call for call in record.calls if is_traffic(call)]


def rerun(
    scheduler: Scheduler,
    record: Record,
    recorded: Timeline,
    calls: Iterable[list[Any]],
    plan_ns: Callable[[StepPlan], int],
    *,
    until: Collection[int] = (),
) -> Timeline:
    """Arrivals and departures on a fresh scheduler, in virtual time, in which a plan takes `plan_ns` nanoseconds.

    Each request brings as many tokens as recorded, unless its client leaves; what was refused then stays away. The run
    is over when all is done, or already when each of `until` has ended.
    """
    timeline, clock = Timeline(), Clock()
    loop = StepLoop(scheduler, SimulatedRunner(plan_ns, clock.advance), lambda: clock.now_ns)
    waiting = deque(calls)
    left = {call[2] for call in waiting if call[0] == "abort"}
    while (waiting or scheduler.has_work) and not (until and all(i in timeline.finish_ns for i in until)):
        while waiting and waiting[0][1] <= clock.now_ns:
            kind, now_ns, request_id, *_ = call = waiting.popleft()
            if kind == "abort":
                scheduler.abort(request_id, now_ns)
            else:
                num_tokens = 0 if request_id in left else recorded.num_tokens[request_id]
                with suppress(RequestError):  # which this policy, or at this pace, does not take
                    scheduler.add(record.make_request(call, num_tokens or call[6]), now_ns)
        turn = loop.turn()
        timeline.note(turn.events)
        if turn.is_idle:
            wakes = [when for when in (turn.wake_at_ns, waiting[0][1] if waiting else None) if when is not None]
            if not wakes:
                break
            clock.advance_to(min(wakes))
    return timeline
