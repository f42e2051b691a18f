"""Runners execute plans; importing this package loads no backend (`runner.native`, `runner.simulated` do when
imported).
"""

from __future__ import annotations

from typing import Protocol

from everystop.core.plan import StepPlan, StepResult


class ModelRunner(Protocol):
    """Executes step plans in the order in which they are given.

    State per request (block table, token ids, penalty counts, generator key) is keyed by `request_id`, created by
    `StepPlan.admitted` and dropped by `released` and `preempted`; nothing is keyed by row.
    """

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step and return its tokens; raises only for failures that end the engine."""
        ...

    def close(self) -> None:
        """Release threads and memory."""
        ...
