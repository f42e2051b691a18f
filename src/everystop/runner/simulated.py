"""A runner without a model: step times come from a function, tokens are filler; for the simulator and for replay."""

from __future__ import annotations

from collections.abc import Callable

from everystop.core.plan import Row, StepPlan, StepResult

FILLER_TOKEN = 0


def filler(row: Row) -> int:
    """The same token for every row."""
    return FILLER_TOKEN


class SimulatedRunner:
    """Executes nothing; `step_ns(plan)` says how long a step takes, `advance(ns)` moves the virtual clock by it, and
    `token_of(row)` is what a row samples. `busy_ns` is the time of all steps so far.
    """

    def __init__(
        self,
        step_ns: Callable[[StepPlan], int],
        advance: Callable[[int], None],
        token_of: Callable[[Row], int] = filler,
    ) -> None:
        self._step_ns = step_ns
        self._advance = advance
        self._token_of = token_of
        self.busy_ns = 0

    def execute(self, plan: StepPlan) -> StepResult:
        """One token for each row that samples, after the step's time has passed."""
        duration_ns = self._step_ns(plan)
        self._advance(duration_ns)
        self.busy_ns += duration_ns
        token_of = self._token_of
        return StepResult(
            # By place, in half the time of by name: row[4] is `logits_from`, row[2] `num_tokens`.
            rows=[(token_of(row),) if row[4] < row[2] else () for row in plan.rows],
            execute_ns=duration_ns,
        )

    def close(self) -> None:
        """Nothing to release."""
