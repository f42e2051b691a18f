"""One step: schedule, execute, update. Engine, simulator and replay run this same code; standard library only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from everystop.core.events import Event
from everystop.core.ledger import Ledger, StepPart
from everystop.core.plan import StepPlan, StepResult
from everystop.core.scheduler import Scheduler
from everystop.runner import Executed, Launched, ModelRunner, launcher


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn of the loop did: the events, and a plan with its result if one was taken back."""

    events: list[Event]
    plan: StepPlan | None = None
    result: StepResult | None = None
    wake_at_ns: int | None = None

    @property
    def is_idle(self) -> bool:
        """Nothing was computed and nothing is on its way."""
        return self.plan is None


class StepLoop:
    """Turns of schedule, execute and update over one scheduler and one runner.

    `depth` 0 takes each result back before the next step is planned; depth 1 plans and launches the next step first, so
    that a runner has it when it is done with the last one. `inspect` sees each plan and result before `update` (stop
    strings are found there). `now` returns integer nanoseconds of a monotonic clock. A `ledger` is told where the time
    of a turn goes.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        now: Callable[[], int],
        *,
        depth: int = 0,
        inspect: Callable[[StepPlan, StepResult], None] | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        assert depth in (0, 1)
        self.scheduler = scheduler
        self._launch = launcher(runner)
        self._now = now
        self._depth = depth
        self._inspect = inspect
        self._ledger = ledger
        self._pending: tuple[StepPlan, Launched] | None = None

    def turn(self) -> Turn:
        """Plan and launch one step, and take back the one that is due."""
        plan = self.scheduler.schedule(self._now())
        self._mark(StepPart.SCHEDULE)
        launched = None if plan.is_noop else (plan, self._begin(plan))
        if self._depth == 0:
            due = launched
        else:
            due, self._pending = self._pending, launched
        if due is None:
            if self._pending is not None:
                return Turn(self.scheduler.take_events(), plan=self._pending[0])
            return Turn(self.scheduler.take_events(), wake_at_ns=plan.wake_at_ns)
        done, result = due[0], self._finish(*due)
        if self._inspect is not None:
            self._inspect(done, result)
            self._mark(StepPart.DETOKENISE)
        events = self.scheduler.update(done, result, self._now())
        self._mark(StepPart.UPDATE)
        return Turn(events, done, result)

    def _begin(self, plan: StepPlan) -> Launched:
        launched = self._launch(plan)
        if isinstance(launched, Executed):
            self._note(plan, launched.result)
        else:
            self._mark(StepPart.METADATA)
        return launched

    def _finish(self, plan: StepPlan, launched: Launched) -> StepResult:
        result = launched.wait()
        if not isinstance(launched, Executed):
            self._note(plan, result)
        return result

    def _note(self, plan: StepPlan, result: StepResult) -> None:
        """The runner has just come back with a result."""
        if self._ledger is not None:
            self._ledger.executed(plan.step_id if plan.rows else None, result, self._now())

    def _mark(self, part: StepPart) -> None:
        if self._ledger is not None:
            self._ledger.mark(part, self._now())
