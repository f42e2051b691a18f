"""Runs a workload several times under each policy, in turns, and keeps what there is when it is interrupted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from everystop.core.errors import EverystopError
from everystop.observe.comparison import Comparison, Run
from everystop.sim.workloads import Workload
from everystop.trial.interrupts import noted_interrupts

WARM_UP_TOKENS = 32


class WarmUpFailed(EverystopError):
    """Not one request of the warm-up was answered, so nothing can be measured."""


class Play(Protocol):
    """Runs a workload once under a policy."""

    def __call__(self, workload: Workload, policy: str, repeat: int, progress: Callable[[int, int], None]) -> Run: ...


class Watcher(Protocol):
    """Hears how far a comparison has come."""

    def begin(self, policy: str, repeat: int | None) -> None:
        """A run begins; the warm-up has no repeat."""
        ...

    def advance(self, num_over: int, num_all: int) -> None:
        """So many of the run's requests are over."""
        ...


def warm_up_workload(workload: Workload, num_jobs: int) -> Workload:
    """The first jobs all at once, with answers of at most 32 tokens: enough to touch memory and start threads. Their
    prompts are reversed, so that no server's prefix cache learns those of the workload.
    """
    jobs = tuple(
        replace(job, prompt=job.prompt[::-1], at_s=None, max_tokens=min(job.max_tokens, WARM_UP_TOKENS))
        for job in workload.jobs[:num_jobs]
    )
    return Workload(workload.name, len(jobs), jobs)


def in_turn(names: Sequence[str], repeat: int) -> list[str]:
    """The order of a repeat: as given, and backwards in each second one, so that coming first is no advantage."""
    return list(names) if repeat % 2 == 0 else list(reversed(names))


def compare(
    workload: Workload,
    policies: Sequence[str],
    num_repeats: int,
    play: Play,
    watcher: Watcher,
    *,
    num_warm_up_jobs: int,
    settings: Mapping[str, Any],
) -> Comparison:
    """Warm up, then A B B A A B …; on Ctrl-C the runs that are whole, or KeyboardInterrupt again if there is none.

    Raises WarmUpFailed.
    """
    runs: list[Run] = []
    try:
        with noted_interrupts() as check:

            def advance(num_over: int, num_all: int) -> None:
                check()
                watcher.advance(num_over, num_all)

            watcher.begin(policies[-1], None)
            _check_answered(play(warm_up_workload(workload, num_warm_up_jobs), policies[-1], 0, advance))
            for repeat in range(num_repeats):
                for policy in in_turn(policies, repeat):
                    watcher.begin(policy, repeat)
                    runs.append(play(workload, policy, repeat, advance))
                    check()
    except KeyboardInterrupt:
        if not runs:
            raise
    return Comparison(
        workload=workload.name,
        policies=tuple(policies),
        runs=tuple(runs),
        settings=settings,
        num_repeats_asked=num_repeats,
    )


def _check_answered(warm_up: Run) -> None:
    """A wrong key, a wrong name of the model: what fails every request of the warm-up would fail every other one."""
    errors = [line.error for line in warm_up.requests if line.error is not None]
    if errors and len(errors) == len(warm_up.requests):
        raise WarmUpFailed(f"all {len(errors)} requests of the warm-up failed, so nothing is measured: {errors[0]}")
