"""What runs must have in common for a claim to conclude anything from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.claims.labs import make_lab

from everystop.claims.lab import LabError, Trial, check_outputs
from everystop.claims.refill import mixed_answers
from everystop.observe.comparison import RequestLine, Run


def test_runs_that_did_not_do_the_same_work_conclude_nothing() -> None:
    workload = mixed_answers(4)
    trials = {policy: Trial(workload, policy) for policy in ("static", "continuous")}
    runs = make_lab().runs(trials)
    check_outputs(trials, runs)
    odd = replace(runs["continuous"][0].requests[2], digest="another")
    runs["continuous"] = [with_request(runs["continuous"][0], odd)]
    with pytest.raises(LabError, match="differ between static and continuous"):
        check_outputs(trials, runs)


def test_a_failed_request_concludes_nothing() -> None:
    trials = {"only": Trial(mixed_answers(4), "continuous")}
    run = make_lab().runs(trials)["only"][0]
    failed = replace(run.requests[1], error="logits_not_finite")
    with pytest.raises(LabError, match=r"only: request 1 failed \(logits_not_finite\)"):
        check_outputs(trials, {"only": [with_request(run, failed)]})


def with_request(run: Run, line: RequestLine) -> Run:
    """The run with one request replaced."""
    return replace(run, requests=tuple(line if each.index == line.index else each for each in run.requests))
