"""Drives a fresh scheduler by a recorded run: the same calls must give the same plans; another policy shows what it
would have done.

The format of a record is described in `everystop.observe.recorder`. It has no token ids: every token is filler or a
stop token, and prefix hits come from the recorded block keys.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everystop.core.errors import EverystopError, RequestError
from everystop.core.events import ArrivalEvent, Event, FinishEvent, StepEvent
from everystop.core.kv_cache import KVCache
from everystop.core.plan import StepPlan, StepResult
from everystop.core.policy import AGEING_NS, Share, make_policy
from everystop.core.request import Request, SamplingParams
from everystop.core.scheduler import Limits, Scheduler
from everystop.engine.loop import StepLoop
from everystop.runner.simulated import FILLER_TOKEN, SimulatedRunner

RECORD_VERSION = 1
STOP_TOKEN = FILLER_TOKEN + 1


class RecordError(EverystopError):
    """A file that is no record, or one of a version that cannot be replayed."""


@dataclass(slots=True)
class Timeline:
    """When requests arrived, brought their first token and ended, in nanoseconds, by request id."""

    arrival_ns: dict[int, int] = field(default_factory=dict)
    first_token_ns: dict[int, int] = field(default_factory=dict)
    finish_ns: dict[int, int] = field(default_factory=dict)
    num_tokens: Counter[int] = field(default_factory=Counter)
    num_steps: int = 0

    def note(self, events: list[Event]) -> None:
        """Take in the events of a call."""
        for event in events:
            if isinstance(event, ArrivalEvent):
                self.arrival_ns[event.request_id] = event.now_ns
            elif isinstance(event, FinishEvent):
                self.finish_ns[event.request_id] = event.now_ns
            elif isinstance(event, StepEvent):
                self.num_steps += bool(event.plan.rows)
                for row, tokens in zip(event.plan.rows, event.tokens, strict=True):
                    if tokens:
                        self.first_token_ns.setdefault(row.request_id, event.now_ns)
                        self.num_tokens[row.request_id] += len(tokens)

    def ttft_ns(self) -> list[int]:
        """Arrival to first token, of every request that got one."""
        return [when - self.arrival_ns[request_id] for request_id, when in self.first_token_ns.items()]

    def e2e_ns(self) -> list[int]:
        """Arrival to end, of every request that ended."""
        return [when - self.arrival_ns[request_id] for request_id, when in self.finish_ns.items()]


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What a replay found.

    `first_difference` is the step whose plan is not the recorded one, None if all are. `is_truncated` tells that the
    record ends in the middle. `replayed` is the same run again, or what another policy would have made of it.
    """

    policy: str
    num_plans: int
    num_requests: int
    first_difference: int | None
    is_truncated: bool
    recorded: Timeline
    replayed: Timeline


def replay(path: Path, *, policy: str | None = None) -> ReplayReport:
    """Replay a record under its own policy, comparing every plan, and then under another one if `policy` names it.

    Another policy runs in virtual time: each request brings as many tokens as recorded, unless its client left, and a
    step takes what a line fitted to the recorded steps (time over tokens) says. Raises RecordError.
    """
    record = Record.read(path)
    redrive = _Redrive(record)
    redrive.run()
    replayed = redrive.timeline
    if policy is not None and policy != record.policy:
        replayed = _simulate(record, policy, redrive)
    return ReplayReport(
        policy or record.policy,
        redrive.num_plans,
        redrive.num_requests,
        redrive.first_difference,
        record.is_truncated,
        redrive.timeline,
        replayed,
    )


@dataclass(slots=True)
class Record:
    """A record in memory: the header's settings, the calls in order, and each request's block keys."""

    policy: str
    policy_settings: dict[str, Any]
    limits: Limits
    kv: dict[str, Any]
    calls: list[list[Any]]
    keys: dict[int, list[bytes]]
    is_truncated: bool

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read a record; one that was cut off is good up to there. Raises RecordError."""
        lines = _Lines(path)
        header = next(iter(lines), None)
        if not isinstance(header, dict) or header.get("everystop_record") != RECORD_VERSION:
            raise RecordError(f"{path} is not a record of version {RECORD_VERSION}; write one with --record")
        record = cls(
            header["policy"],
            {
                "batch_wait_ns": header["batch_wait_ns"],
                "ageing_ns": header.get("ageing_ns") or AGEING_NS,
                "shares": {str(number): Share(*share) for number, share in enumerate(header.get("shares", ()))},
            },
            Limits(**header["limits"]),
            header["kv"],
            [],
            {},
            is_truncated=False,
        )
        for call in lines:
            if call[0] == "keys":
                record.keys[call[1]] = [bytes.fromhex(key) for key in call[2]]
            else:
                record.calls.append(call)
        record.is_truncated = lines.is_truncated
        return record

    def make_scheduler(self, policy: str) -> Scheduler:
        """A scheduler as the recorded one was at its start, with this policy."""
        return Scheduler(self.limits, KVCache(**self.kv), make_policy(policy, **self.policy_settings))

    def make_request(self, call: list[Any], max_tokens: int | None) -> Request:
        """The request of an `add`, with filler for a prompt and the recorded keys."""
        _, now_ns, request_id, group_id, choice_index, num_prompt, _, min_tokens, n, num_stop_ids, tenant, priority = (
            call
        )
        stop_ids = (STOP_TOKEN,) if num_stop_ids else ()
        return Request(
            request_id,
            [FILLER_TOKEN] * num_prompt,
            SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, n=n, stop_token_ids=stop_ids),
            arrival_ns=now_ns,
            group_id=group_id,
            choice_index=choice_index,
            tenant=str(tenant),
            priority=priority,
            block_keys=list(self.keys.get(request_id, ())),
        )


class _Lines:
    """The JSON lines of a file, up to the first that is damaged or cut off."""

    def __init__(self, path: Path) -> None:
        self.is_truncated = False
        self._iterator = self._read(path)

    def __iter__(self) -> Iterator[Any]:
        return self._iterator

    def _read(self, path: Path) -> Iterator[Any]:
        try:
            with gzip.open(path, "rt", encoding="ascii") as file:
                for line in file:
                    yield json.loads(line)
        except FileNotFoundError:
            raise RecordError(f"there is no record {path}") from None
        except (EOFError, OSError, ValueError):
            self.is_truncated = True


class _Redrive:
    """Repeats the recorded calls one by one; `first_difference` is the first step whose plan differs."""

    def __init__(self, record: Record) -> None:
        self.timeline = Timeline()
        self.step_times: list[tuple[int, int]] = []
        self.num_plans = self.num_requests = 0
        self.first_difference: int | None = None
        self._record = record
        self._scheduler = record.make_scheduler(record.policy)
        self._on_its_way: deque[tuple[StepPlan, int]] = deque()

    def run(self) -> None:
        """Repeat every call, up to the first difference: what comes after it means nothing."""
        for call in self._record.calls:
            getattr(self, "_" + call[0])(call)
            if self.first_difference is not None:
                break

    def _add(self, call: list[Any]) -> None:
        self._scheduler.add(self._record.make_request(call, call[6]), call[1])
        self.num_requests += 1

    def _refuse(self, call: list[Any]) -> None:
        try:
            self._scheduler.add(self._record.make_request(call, call[6]), call[1])
        except RequestError:
            return
        raise RecordError(f"request {call[2]} was refused when recorded, and is taken now")

    def _abort(self, call: list[Any]) -> None:
        self._scheduler.abort(call[2], call[1])

    def _schedule(self, call: list[Any]) -> None:
        _, now_ns, _, _, fingerprint = call
        plan = self._scheduler.schedule(now_ns)
        self.num_plans += 1
        if plan.fingerprint() != fingerprint:
            self.first_difference = plan.step_id
        elif not plan.is_noop:
            self._on_its_way.append((plan, now_ns))

    def _update(self, call: list[Any]) -> None:
        _, now_ns, execute_ns, rows, stopped = call
        plan, scheduled_ns = self._on_its_way.popleft()
        result = StepResult([_tokens(row) for row in rows], stopped=dict.fromkeys(stopped, ""), execute_ns=execute_ns)
        self.timeline.note(self._scheduler.update(plan, result, now_ns))
        if plan.rows:
            self.step_times.append((plan.num_tokens, execute_ns or now_ns - scheduled_ns))


def _tokens(row: int | list[int] | str) -> tuple[int, ...] | str:
    if isinstance(row, str):
        return row
    num, *stops = [row] if isinstance(row, int) else row
    return tuple(STOP_TOKEN if i in stops else FILLER_TOKEN for i in range(num))


def _fit(step_times: list[tuple[int, int]]) -> tuple[float, float]:
    """Least squares of time over tokens: (nanoseconds a step, nanoseconds a token), neither negative."""
    if not step_times:
        return 0.0, 0.0
    n = len(step_times)
    mean_x, mean_y = sum(x for x, _ in step_times) / n, sum(y for _, y in step_times) / n
    spread = sum((x - mean_x) ** 2 for x, _ in step_times)
    slope = max(0.0, sum((x - mean_x) * (y - mean_y) for x, y in step_times) / spread) if spread else 0.0
    return max(0.0, mean_y - slope * mean_x), slope


def _simulate(record: Record, policy: str, redrive: _Redrive) -> Timeline:
    """The recorded arrivals and departures under another policy, in virtual time."""
    step_ns, token_ns = _fit(redrive.step_times)
    timeline, clock = Timeline(), _Clock()
    scheduler = record.make_scheduler(policy)
    runner = SimulatedRunner(lambda plan: round(step_ns + token_ns * plan.num_tokens), clock.advance)
    loop = StepLoop(scheduler, runner, lambda: clock.now_ns)
    left = {call[2] for call in record.calls if call[0] == "abort"}
    calls = deque(call for call in record.calls if call[0] in ("add", "abort"))
    while calls or scheduler.has_work:
        while calls and calls[0][1] <= clock.now_ns:
            kind, now_ns, request_id, *_ = call = calls.popleft()
            if kind == "abort":
                scheduler.abort(request_id, now_ns)
            else:
                num_tokens = 0 if request_id in left else redrive.timeline.num_tokens[request_id]
                scheduler.add(record.make_request(call, num_tokens or call[6]), now_ns)
        turn = loop.turn()
        timeline.note(turn.events)
        if turn.is_idle:
            wakes = [when for when in (turn.wake_at_ns, calls[0][1] if calls else None) if when is not None]
            if not wakes:
                break
            clock.now_ns = max(clock.now_ns, min(wakes))
    return timeline


@dataclass(slots=True)
class _Clock:
    """Virtual time."""

    now_ns: int = 0

    def advance(self, ns: int) -> None:
        """Let time pass."""
        self.now_ns += ns
