"""Runners execute plans; importing this package loads no backend (`runner.native`, `runner.torch.runner` and
`runner.simulated` do when imported).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

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


class Launched(Protocol):
    """A step that has been given to a runner."""

    def wait(self) -> StepResult:
        """Its result, once it is there; asked for once. Raises as `ModelRunner.execute`."""
        ...


@runtime_checkable
class LaunchingRunner(Protocol):
    """A runner whose steps can be launched without waiting for the tokens of the one before.

    One step may be on its way when the next is launched; they are waited for in the order of their launch.
    """

    def launch(self, plan: StepPlan) -> Launched:
        """Begin one step; raises as `ModelRunner.execute`."""
        ...


@dataclass(frozen=True, slots=True)
class Executed:
    """A step that was executed when it was launched."""

    result: StepResult

    def wait(self) -> StepResult:
        """Its result."""
        return self.result


def launcher(runner: ModelRunner) -> Callable[[StepPlan], Launched]:
    """What begins a step; a runner that cannot launch one executes it at once."""
    if isinstance(runner, LaunchingRunner):
        return runner.launch
    return lambda plan: Executed(runner.execute(plan))
