"""Repeats a recorded run call by call on a fresh scheduler, which must make the recorded plans and so the same events.

Prefix hits come from the recorded block keys, and tokens are filler, but for those at which a request stopped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from everystop.core.errors import RecordError, RequestError
from everystop.core.events import Event
from everystop.core.plan import StepPlan, StepResult
from everystop.core.step_time import StepFeatures
from everystop.runner.simulated import FILLER_TOKEN
from everystop.sim.fit import TimedStep
from everystop.sim.record import STOP_TOKEN, Record


class Redrive:
    """Repeats the recorded calls one by one; `first_difference` is the first step whose plan differs.

    `hear` gets the events of the run, as many at a time as come between two steps. `steps` is what each step computed,
    and how long it took. A record that was cut off lacks the block keys of requests that had not ended then: where that
    makes a plan differ, the run is over.
    """

    def __init__(self, record: Record, hear: Callable[[list[Event]], None]) -> None:
        self.steps: list[TimedStep] = []
        self.num_plans = self.num_requests = 0
        self.first_difference: int | None = None
        self._is_over = False
        self._record = record
        self._hear = hear
        self._scheduler = record.make_scheduler()
        self._on_its_way: deque[tuple[StepPlan, int]] = deque()
        self._last_update: tuple[int, int] = (-2, 0)  # step id and time

    def run(self) -> None:
        """Repeat every call, up to the first difference: what comes after it means nothing.

        Raises RecordError for a call that cannot be repeated.
        """
        for number, call in enumerate(self._record.calls):
            try:
                events = getattr(self, "_" + call[0])(call)
            except (AssertionError, AttributeError, IndexError, KeyError, RequestError, TypeError, ValueError) as error:
                raise RecordError(
                    f"call {number} of {self._record.path} ({call!s:.60}) cannot be repeated "
                    f"({type(error).__name__}: {error}); record the run anew"
                ) from error
            if self.first_difference is not None or self._is_over:
                return
            if events:
                self._hear(events)
        self._hear(self._scheduler.take_events())

    def check_same(self) -> None:
        """Raise RecordError if a plan differs."""
        if self.first_difference is not None:
            raise RecordError(
                f"the plan of step {self.first_difference} in {self._record.path} is not what this version plans; "
                "record the run anew"
            )

    def _add(self, call: list[Any]) -> None:
        self._scheduler.add(self._record.make_request(call, call[6]), call[1])
        self.num_requests += 1

    def _refuse(self, call: list[Any]) -> None:
        try:
            self._scheduler.add(self._record.make_request(call, call[6]), call[1])
        except RequestError:
            return
        raise ValueError("it is not refused now")

    def _decline(self, call: list[Any]) -> None:
        self._scheduler.note_refusal(self._record.make_request(call, call[6]), RequestError(""), call[1])

    def _abort(self, call: list[Any]) -> None:
        self._scheduler.abort(call[2], call[1])

    def _schedule(self, call: list[Any]) -> None:
        _, now_ns, _, _, fingerprint = call
        plan = self._scheduler.schedule(now_ns)
        self.num_plans += 1
        if plan.fingerprint() != fingerprint:
            self._is_over = (
                self._record.is_truncated and not self._scheduler.requests.keys() <= self._record.keys.keys()
            )
            self.first_difference = None if self._is_over else plan.step_id
        elif not plan.is_noop:
            self._on_its_way.append((plan, now_ns))

    def _update(self, call: list[Any]) -> list[Event]:
        _, now_ns, execute_ns, rows, stopped, *sample_ns = call
        plan, scheduled_ns = self._on_its_way.popleft()
        result = StepResult(
            [_tokens(row) for row in rows], {}, dict.fromkeys(stopped, ""), execute_ns, sample_ns[0] if sample_ns else 0
        )
        events = self._scheduler.update(plan, result, now_ns)
        if plan.rows:
            last_step_id, last_ns = self._last_update
            is_next = plan.step_id == last_step_id + 1 and 0 < execute_ns <= now_ns - last_ns
            host_ns = now_ns - last_ns - execute_ns if is_next else None
            self.steps.append(TimedStep(StepFeatures.of(plan), execute_ns or now_ns - scheduled_ns, host_ns))
            self._last_update = (plan.step_id, now_ns)
        return events


def _tokens(row: int | list[int] | str) -> tuple[int, ...] | str:
    if isinstance(row, str):
        return row
    num, *stops = [row] if isinstance(row, int) else row
    return tuple(STOP_TOKEN if i in stops else FILLER_TOKEN for i in range(num))
