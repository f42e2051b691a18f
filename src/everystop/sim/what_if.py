"""How long a recorded request would have taken under other circumstances: alone, by another policy, with other limits.

Each is the recorded traffic once more on a scheduler of its own, in virtual time, with step times fitted to that very
record: an estimate. The same is done without any change, so that the model can be held against what was measured. This
module owns which circumstances are tried, and must not know how they are told.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, NamedTuple

from everystop.core.errors import RecordError
from everystop.core.plan import StepPlan
from everystop.core.policy import make_policy
from everystop.core.request import FinishReason
from everystop.core.scheduler import Scheduler
from everystop.core.step_time import StepFeatures
from everystop.sim.fit import MIN_FIT_STEPS, fit_line
from everystop.sim.record import Record
from everystop.sim.replay import PastRun, Timeline, recorded_traffic, rerun

NOTHING, ALONE, POLICY = "nothing", "alone", "policy"
TOKENS, SLOTS, BLOCKS = "max_num_batched_tokens", "max_num_seqs", "num_blocks"
DOUBLED = {"--max-num-batched-tokens": TOKENS, "--max-num-seqs": SLOTS, "--kv-cache-memory": BLOCKS}
"""What is doubled where a flag is advised."""

BELOW_SLOTS, NOT_SERVED = "below_slots", "not_served"
"""Why there is no estimate: a server needs as many tokens a step as slots; the request never ends, or is refused."""

ENDED_BADLY = {FinishReason.ABORT: "its client left", FinishReason.ERROR: "it failed"}
CACHED_BEFORE_NS = 10**12  # what is cached of a prompt is computed so long before its request arrives alone
NOBODY = -1  # the tenant for whom that is done


class Times(NamedTuple):
    """From the last byte of a request read to the first token (None if it has none), and to the last byte of its
    answer given to the socket, in nanoseconds; of several sequences those of the one that ends last.
    """

    ttft_ns: int | None
    e2e_ns: int


class Change(NamedTuple):
    """What is different: `NOTHING`, `ALONE`, or a setting with its recorded value and the one that is tried."""

    what: str
    recorded: str | int | None = None
    tried: str | int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a change would have made of the request; without `times`, `why_not` is `BELOW_SLOTS` or `NOT_SERVED`.

    `is_beyond` tells that some step which serves it has more or fewer rows or tokens than any recorded one, so that its
    time is guessed from steps unlike it.
    """

    change: Change
    times: Times | None = None
    why_not: str = ""
    is_beyond: bool = False

    def as_data(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        ttft_ns, e2e_ns = self.times or (None, None)
        times = {"ttft_ns": ttft_ns, "e2e_ns": e2e_ns}
        return self.change._asdict() | times | {"why_not": self.why_not, "is_beyond": self.is_beyond}


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The request as measured, the same traffic simulated without any change, and with each change.

    The model is fitted to `num_steps` steps. `num_cached_tokens` of the prompt came from the prefix cache, and do so
    where the request is alone.
    """

    measured: Times
    simulated: Times
    estimates: list[Estimate]
    num_steps: int
    num_cached_tokens: int

    @property
    def errors(self) -> dict[str, float | None]:
        """How far the simulation without a change is off, as shares of what was measured; None where none was."""
        return {
            f"{name}_error": simulated / measured - 1 if simulated is not None and measured else None
            for name, simulated, measured in zip(("ttft", "e2e"), self.simulated, self.measured, strict=True)
        }

    def as_data(self) -> dict[str, Any]:
        """As plain data, for JSON; each estimate says how far the model is off for this request."""
        errors = self.errors
        return {
            "num_steps": self.num_steps,
            "num_cached_tokens": self.num_cached_tokens,
            "measured": self.measured._asdict(),
            "simulated": self.simulated._asdict() | errors,
            "estimates": [each.as_data() | errors for each in self.estimates],
        }


def what_if(run: PastRun, request_ids: Sequence[int], *, advised: Collection[str] = ()) -> WhatIf:
    """Estimates for the sequences of one HTTP request, or for one sequence.

    `advised` are the flags that its explanation names; those that a simulation can try are tried. Raises RecordError if
    the request has no end of its own, if the steps are too few to fit step times to, or if it is not served in the
    simulation of what happened.
    """
    _check(run, request_ids)
    laboratory = _Laboratory(run, request_ids)
    simulated = laboratory.estimate(Change(NOTHING)).times
    if simulated is None:
        raise RecordError(f"the request is not served when {run.record.path} is simulated with its own step times")
    return WhatIf(
        measured=laboratory.measured(),
        simulated=simulated,
        estimates=[laboratory.estimate(change) for change in _changes(run.record, advised)],
        num_steps=len(run.steps),
        num_cached_tokens=laboratory.num_cached_tokens,
    )


def _check(run: PastRun, request_ids: Sequence[int]) -> None:
    """Raise RecordError where there is nothing to compare with, or nothing to estimate by."""
    path, num_steps = run.record.path, len(run.steps)
    for why in filter(None, (_why_unfinished(run, request_id) for request_id in request_ids)):
        raise RecordError(
            f"in {path} the request has no end of its own ({why}), so there is nothing to compare an estimate with; "
            "name one that has finished"
        )
    if num_steps < MIN_FIT_STEPS:
        raise RecordError(
            f"{path} has {num_steps} steps, too few to fit step times to; record at least {MIN_FIT_STEPS}"
        )


def _why_unfinished(run: PastRun, request_id: int) -> str:
    """Why it did not end by itself; empty if it did."""
    trail = run.history.trails.get(request_id)
    if trail is not None and trail.refusal is not None:
        return "it was refused"
    if trail is None or trail.finish is None:
        return "the record ends before it"
    return ENDED_BADLY.get(trail.finish.reason, "")


def _changes(record: Record, advised: Collection[str]) -> Iterator[Change]:
    """What is tried, in the order in which it is told."""
    num_tokens = record.limits.max_num_batched_tokens
    yield Change(ALONE)
    yield Change(POLICY, record.policy, "static" if record.policy == "continuous" else "continuous")
    yield Change(TOKENS, num_tokens, num_tokens // 2)
    for flag, what in DOUBLED.items():
        if flag in advised:
            number = record.kv[what] if what == BLOCKS else getattr(record.limits, what)
            yield Change(what, number, 2 * number)


class _Laboratory:
    """Tries changes on one request of a recorded run.

    A request arrives when it was submitted, where that is known: the engine takes it when the step under way is over,
    in the simulation as then. What lies before and after is the front end's part, and taken as measured.
    """

    def __init__(self, run: PastRun, request_ids: Sequence[int]) -> None:
        trail = run.history.trails[request_ids[0]]
        self._record = run.record
        self._recorded = run.timeline
        self._ids = request_ids
        self._traffic = _as_submitted(run)
        self._cost = fit_line(run.steps, run.record.step_times)
        self._known = _Bounds.of([step.features for step in run.steps])
        self.num_cached_tokens = trail.admits[0].num_cached_tokens
        self._arrival_ns: int = next(call[1] for call in self._traffic if call[2] in request_ids)
        self._before_ns = self._after_ns = 0
        if trail.client is not None:
            end_ns = max(run.timeline.finish_ns[i] for i in request_ids)
            self._before_ns = self._arrival_ns - trail.client.received_ns
            self._after_ns = max(0, (trail.client.delivered_ns or end_ns) - end_ns)

    def measured(self) -> Times:
        """What was recorded."""
        return self._times(self._recorded, self._arrival_ns)

    def estimate(self, change: Change) -> Estimate:
        """What a change would have made of it."""
        record, traffic = _changed(self._record, change), self._traffic
        if change.what in (TOKENS, SLOTS) and record.limits.max_num_batched_tokens < record.limits.max_num_seqs:
            return Estimate(change=change, why_not=BELOW_SLOTS)
        if change.what == ALONE:
            record, traffic = self._alone()
        seen: list[StepFeatures] = []
        scheduler, plan_ns = _scheduler(record, change), self._noting(seen)
        timeline = rerun(scheduler, record, self._recorded, traffic, plan_ns, until=self._ids)
        if not all(i in timeline.finish_ns for i in self._ids):
            return Estimate(change=change, why_not=NOT_SERVED)
        times = self._times(timeline, min(timeline.arrival_ns[i] for i in self._ids))
        return Estimate(change=change, times=times, is_beyond=not self._known.hold(_Bounds.of(seen)))

    def _times(self, timeline: Timeline, arrival_ns: int) -> Times:
        """From the timeline of a run in which it arrived then."""
        last = max(self._ids, key=lambda i: (timeline.finish_ns[i], i))
        first_token_ns, origin_ns = timeline.first_token_ns.get(last), arrival_ns - self._before_ns
        return Times(
            None if first_token_ns is None else first_token_ns - origin_ns,
            timeline.finish_ns[last] + self._after_ns - origin_ns,
        )

    def _noting(self, seen: list[StepFeatures]) -> Callable[[StepPlan], int]:
        """The fitted step times; `seen` gets the features of the steps that serve the request."""
        own = frozenset(self._ids)

        def plan_ns(plan: StepPlan) -> int:
            if not own.isdisjoint(plan.rows.request_ids):
                seen.append(StepFeatures.of(plan))
            return self._cost.plan_ns(plan)

        return plan_ns

    def _alone(self) -> tuple[Record, list[list[Any]]]:
        """Its own traffic; what it found of its prompt in the prefix cache somebody else has computed long before."""
        record, num_tokens = self._record, self.num_cached_tokens
        own = [call for call in self._traffic if call[2] in self._ids]
        if not num_tokens:
            return record, own
        other = max(record.keys) + 1
        keys = record.keys[self._ids[0]][: num_tokens // record.kv["block_size"]]
        before = ["add", self._arrival_ns, other, other, 0, num_tokens, 0, 0, 1, 0, NOBODY, 0]
        later = [[kind, now_ns + CACHED_BEFORE_NS, *rest] for kind, now_ns, *rest in own]
        return replace(record, keys=record.keys | {other: keys}), [before, *later]


def _as_submitted(run: PastRun) -> list[list[Any]]:
    """The recorded traffic; who has a client arrives when that was submitted, not when the engine took it."""
    submitted = {i: client.submitted_ns for client in run.record.clients for i in client.request_ids}

    def moved(call: list[Any]) -> list[Any]:
        kind, now_ns, request_id, *rest = call
        came_ns = min(now_ns, submitted.get(request_id, now_ns)) if kind == "add" else now_ns
        return [kind, came_ns, request_id, *rest]

    return sorted(map(moved, recorded_traffic(run.record, run.timeline)), key=itemgetter(1))


def _changed(record: Record, change: Change) -> Record:
    """The record with the limits that are tried."""
    tried: dict[str, Any] = {change.what: change.tried}
    if change.what in (TOKENS, SLOTS):
        return replace(record, limits=replace(record.limits, **tried))
    return replace(record, kv=record.kv | tried) if change.what == BLOCKS else record


def _scheduler(record: Record, change: Change) -> Scheduler:
    """A fresh one, with the policy that is tried."""
    if change.what != POLICY:
        return record.make_scheduler()
    return record.make_scheduler(make_policy(str(change.tried), record.policy_settings))


class _Bounds(NamedTuple):
    """The fewest and the most rows, and tokens, of some steps."""

    min_rows: int
    max_rows: int
    min_tokens: int
    max_tokens: int

    @classmethod
    def of(cls, steps: Sequence[StepFeatures]) -> _Bounds:
        """Of at least one step."""
        rows, tokens = [step.num_rows for step in steps], [step.num_tokens for step in steps]
        return cls(min(rows), max(rows), min(tokens), max(tokens))

    def hold(self, other: _Bounds) -> bool:
        """None of the other's steps is outside."""
        are_rows_within = self.min_rows <= other.min_rows and other.max_rows <= self.max_rows
        return are_rows_within and self.min_tokens <= other.min_tokens and other.max_tokens <= self.max_tokens
