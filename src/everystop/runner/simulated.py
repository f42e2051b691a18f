"""A runner without a model: step times come from a function, tokens are filler; for the simulator and for replay."""

from __future__ import annotations

from collections.abc import Callable

from everystop.core.plan import StepPlan, StepResult

FILLER_TOKEN = 0


def filler(request_id: int, num_tokens: int) -> int:
    """The same token for every row."""
    return FILLER_TOKEN


class SimulatedRunner:
    """Executes nothing; `step_ns(plan)` says how long a step takes, `advance(ns)` moves the virtual clock by it, and
    `token_of(request_id, num_tokens)` is what a request of so many tokens samples.

    `busy_ns` is the time of all steps so far.
    """

    def __init__(
        self,
        step_ns: Callable[[StepPlan], int],
        advance: Callable[[int], None],
        token_of: Callable[[int, int], int] = filler,
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
            rows=[(token_of(i, start + n),) if offset < n else () for i, start, n, _, offset in plan.rows.tuples()],
            execute_ns=duration_ns,
        )

    def close(self) -> None:
        """Nothing to release."""
