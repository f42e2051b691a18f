from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random

import pytest
from tests.claims.labs import make_lab

from everystop.claims.findings import NUM_LOOKS, Condition, Findings, Verdict, counted, measured
from everystop.claims.lab import Lab, LabError, Trial
from everystop.claims.looks import look
from everystop.observe.comparison import Run
from everystop.sim.workloads import Dice, Job, Workload


def make_trials(seed: int = 7) -> dict[str, Trial]:
    dice = Dice("looks", seed)
    workload = Workload("looks", 2, tuple(Job(prompt=dice.prompt(4), max_tokens=3) for _ in range(2)))
    return {policy: Trial(workload, policy) for policy in ("static", "continuous")}


class CountingLab:
    """A lab in virtual time that notes how often it was asked to run, and may change what comes out."""

    def __init__(self, num_repeats: int) -> None:
        self._lab = make_lab(num_repeats)
        self.num_repeats = num_repeats
        self.num_asked = 0
        self.spoil: Callable[[Run], Run] = lambda run: run

    def __getattr__(self, name: str) -> object:
        return getattr(self._lab, name)

    def runs(self, trials: Mapping[str, Trial], *, once: bool = False) -> dict[str, list[Run]]:
        self.num_asked += 1
        return {name: [self.spoil(run) for run in runs] for name, runs in self._lab.runs(trials, once=once).items()}


def findings(values: Sequence[float], at_least: float) -> Findings:
    return Findings(headline="", how="", conditions=(Condition(figure=measured("x", values, "×"), at_least=at_least),))


def measure_with(values: Sequence[float], at_least: float) -> Callable[[Lab], Findings]:
    """As many of the values as there are runs."""

    def measure(lab: Lab) -> Findings:
        runs = lab.runs(make_trials())
        assert {name: [run.repeat for run in each] for name, each in runs.items()} == {
            name: list(range(lab.num_repeats)) for name in ("static", "continuous")
        }
        return findings(values[: lab.num_repeats], at_least)

    return measure


def test_what_is_decided_is_not_run_again() -> None:
    lab = CountingLab(3)
    assert look(measure_with([2.0, 2.01, 2.02], 1.5), lab).verdict is Verdict.HELD
    assert lab.num_asked == 1


@pytest.mark.parametrize(("at_least", "verdict"), [(1.5, Verdict.HELD), (2.5, Verdict.DID_NOT_HOLD)])
def test_what_is_undecided_is_run_on_until_it_is_decided(at_least: float, verdict: Verdict) -> None:
    lab = CountingLab(3)
    values = [1.7, 2.0, 2.3, 2.0, 2.0, 2.0]
    assert findings(values[:3], at_least).verdict is Verdict.UNDECIDED
    found = look(measure_with(values, at_least), lab)
    assert found.verdict is verdict
    assert found.conditions[0].figure.num_repeats == 6
    assert lab.num_asked == 2


def test_what_stays_undecided_ends_after_the_last_look() -> None:
    lab = CountingLab(2)
    found = look(measure_with([1.0, 4.0] * 4, 2.0), lab)
    assert found.verdict is Verdict.UNDECIDED
    assert found.conditions[0].figure.num_repeats == 2 * 2 ** (NUM_LOOKS - 1)
    assert lab.num_asked == 4


def test_one_repeat_and_counts_are_looked_at_once() -> None:
    lab = CountingLab(1)
    assert look(measure_with([2.0], 2.0), lab).verdict is Verdict.UNDECIDED
    assert lab.num_asked == 1
    num_looks = 0

    def count(lab: Lab) -> Findings:
        nonlocal num_looks
        num_looks += 1
        return Findings(headline="", how="", conditions=(Condition(figure=counted("x", [1, 3]), at_least=2),))

    assert look(count, CountingLab(3)).verdict is Verdict.UNDECIDED
    assert num_looks == 1


def test_what_is_to_run_once_runs_once_in_all_looks() -> None:
    lab = CountingLab(2)

    def measure(lab: Lab) -> Findings:
        assert len(lab.runs(make_trials(), once=True)["static"]) == 1
        return findings([1.0, 4.0] * 4, 2.0)

    look(measure, lab)
    assert lab.num_asked == 1


def test_outputs_are_compared_across_looks() -> None:
    lab = CountingLab(2)

    def spoil(run: Run) -> Run:
        if lab.num_asked < 2:
            return run
        return replace(run, requests=[replace(line, digest="other") for line in run.requests])

    lab.spoil = spoil
    with pytest.raises(LabError, match="outputs of the same requests differ"):
        look(measure_with([1.0, 4.0] * 4, 2.0), lab)


def test_all_looks_together_are_wrong_as_seldom_as_one() -> None:
    """A figure whose true value is its bound is called held or failed in at most one of twenty."""
    random, num_wrong, num_tried = Random(7), 0, 2000
    for _ in range(num_tried):
        values = [2.0 * random.lognormvariate(0, 0.2) for _ in range(20)]
        looks = [Condition(figure=measured("x", values[:n], "×"), at_least=2.0).verdict for n in (5, 10, 20)]
        num_wrong += any(verdict is not Verdict.UNDECIDED for verdict in looks)
    assert num_wrong / num_tried <= 0.05
