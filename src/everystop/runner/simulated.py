"""A runner without a model: step times come from a function, tokens are filler; for the simulator and for replay."""

from __future__ import annotations

from collections.abc import Callable

from everystop.core.plan import StepPlan, StepResult

FILLER_TOKEN = 0


class SimulatedRunner:
    """Executes nothing; `step_ns(plan)` says how long a step takes and `advance(ns)` moves the virtual clock by it."""

    def __init__(
        self, step_ns: Callable[[StepPlan], int], advance: Callable[[int], None], token: int = FILLER_TOKEN
    ) -> None:
        self._step_ns = step_ns
        self._advance = advance
        self._token = token

    def execute(self, plan: StepPlan) -> StepResult:
        """One filler token for each row that samples, after the step's time has passed."""
        duration_ns = self._step_ns(plan)
        self._advance(duration_ns)
        sampled, nothing = (self._token,), ()
        rows = [sampled if row.logits_from < row.num_tokens else nothing for row in plan.rows]
        return StepResult(rows=list(rows), execute_ns=duration_ns)

    def close(self) -> None:
        """Nothing to release."""
