"""Looks at a claim again, with more repeats, while those so far leave it undecided."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from everystop.claims.findings import NUM_LOOKS, Findings
from everystop.claims.lab import Lab, Trial, check_outputs
from everystop.claims.model_work import ModelWork
from everystop.observe.comparison import Run
from everystop.sim.cost import StepCost
from everystop.trial.machine_limits import MachineLimits


def look(measure: Callable[[Lab], Findings], lab: Lab) -> Findings:
    """What a claim finds: with the lab's repeats, and while that is undecided, with twice as many as before, up to
    `NUM_LOOKS` times in all. Raises LabError.
    """
    growing = GrowingLab(lab)
    findings = measure(growing)
    for _ in range(NUM_LOOKS - 1):
        if not findings.may_be_decided:
            break
        growing.double()
        findings = measure(growing)
    return findings


class GrowingLab:
    """A lab that keeps the runs of a claim: after `double`, the same trials only run as often as is missing."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._factor = 1
        self._kept: list[tuple[dict[str, Trial], dict[str, list[Run]]]] = []

    @property
    def num_repeats(self) -> int:
        """Of a look from now on."""
        return self._lab.num_repeats * self._factor

    @property
    def client_cpu_s(self) -> float:
        """As `Lab.client_cpu_s`."""
        return self._lab.client_cpu_s

    def double(self) -> None:
        """Have the next look take twice the repeats of the last."""
        self._factor *= 2

    def runs(self, trials: Mapping[str, Trial], *, once: bool = False) -> dict[str, list[Run]]:
        """As `Lab.runs`; the runs of an earlier look come first. What runs once is not run again."""
        kept = self._kept_of(dict(trials))
        wanted = 1 if once else self.num_repeats
        for first in range(min(map(len, kept.values())), wanted, self._lab.num_repeats):
            for name, runs in self._lab.runs(trials, once=once).items():
                kept[name] += [replace(run, repeat=first + run.repeat) for run in runs]
        check_outputs(trials, kept)
        return {name: list(runs) for name, runs in kept.items()}

    def _kept_of(self, trials: dict[str, Trial]) -> dict[str, list[Run]]:
        for known, kept in self._kept:
            if known == trials:
                return kept
        kept = {name: [] for name in trials}
        self._kept.append((trials, kept))
        return kept

    def simulate(self, trial: Trial, cost: StepCost, num_blocks: int | None = None) -> Run:
        """As `Lab.simulate`."""
        return self._lab.simulate(trial, cost, num_blocks)

    def limits(self) -> MachineLimits:
        """As `Lab.limits`."""
        return self._lab.limits()

    def work(self) -> ModelWork:
        """As `Lab.work`."""
        return self._lab.work()

    def describe(self) -> dict[str, Any]:
        """As `Lab.describe`."""
        return self._lab.describe()
