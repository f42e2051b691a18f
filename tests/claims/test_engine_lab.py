"""The lab of the real engine, on the embedded model, and what it takes for a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.claims.labs import make_lab

from everystop.claims import fragmentation, straggler
from everystop.claims.everything import CLAIMS
from everystop.claims.kv_memory import memory_use
from everystop.claims.lab import EngineLab, LabError, Trial, check_outputs
from everystop.claims.refill import mixed_answers, slot_gaps
from everystop.claims.results import read_results
from everystop.claims.steps import useful_share
from everystop.cli import main
from everystop.config import Config
from everystop.observe.comparison import RequestLine, Run
from everystop.observe.formulas import static_steps
from everystop.sim.workloads import Workload


class Silence:
    """Watches nothing."""

    def begin(self, words: str) -> None:
        """As `Watcher`."""

    def advance(self, num_over: int, num_all: int) -> None:
        """As `Watcher`."""


@pytest.mark.model
def test_the_engine_takes_the_steps_that_virtual_time_says() -> None:
    lab = EngineLab(Config(), 1, Silence())
    workload = mixed_answers(24)
    trials = {policy: Trial(workload, policy, {"max_num_seqs": 8}) for policy in ("static", "continuous")}
    try:
        real, virtual = lab.runs(trials), make_lab().runs(trials)
    finally:
        lab.close()
    for policy in trials:
        assert useful_share(real[policy][0]) == useful_share(virtual[policy][0])
        assert slot_gaps(real[policy][0]) == slot_gaps(virtual[policy][0])
    lengths = [job.max_tokens for job in workload.jobs]
    assert useful_share(real["static"][0]) == sum(lengths) / (8 * static_steps(lengths, 8))


@pytest.mark.model
def test_the_engine_reserves_the_blocks_that_virtual_time_says() -> None:
    jobs = fragmentation.conversations().jobs[:8]
    trial = Trial(Workload("few", 8, jobs), "continuous", {"block_size": 16, "max_num_seqs": 4})
    lab = EngineLab(Config(), 1, Silence())
    try:
        real, virtual = lab.runs({"x": trial})["x"][0], make_lab().runs({"x": trial})["x"][0]
    finally:
        lab.close()
    assert memory_use(real, 16) == memory_use(virtual, 16)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_command_measures_every_claim(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main(["claims", "--out", str(tmp_path), "--repeats", "1"]) == 0
    results = read_results(tmp_path)
    assert list(results) == [claim.number for claim in CLAIMS]
    counts = {c.figure.name: c.verdict.value for c in results[1].findings.conditions}
    assert counts["steps of a single row"] == "held"
    assert (tmp_path / "claims" / f"{straggler.CLAIM.number}-{straggler.CLAIM.name}.png").exists()


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
