"""The lab of the real engine, on the embedded model."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.claims.labs import make_lab

from everystop.claims import straggler
from everystop.claims.everything import CLAIMS
from everystop.claims.lab import EngineLab, Trial
from everystop.claims.refill import mixed_answers, slot_gaps
from everystop.claims.results import read_results
from everystop.claims.steps import useful_share
from everystop.cli import main
from everystop.config import Config
from everystop.observe.formulas import static_steps

pytestmark = pytest.mark.model


class Silence:
    """Watches nothing."""

    def begin(self, words: str) -> None:
        """As `Watcher`."""

    def advance(self, num_over: int, num_all: int) -> None:
        """As `Watcher`."""


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


@pytest.mark.slow
def test_the_whole_command_measures_every_claim(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main(["claims", "--out", str(tmp_path), "--repeats", "1"]) == 0
    results = read_results(tmp_path)
    assert list(results) == [claim.number for claim in CLAIMS]
    counts = {c.figure.name: c.verdict.value for c in results[1].findings.conditions}
    assert counts["steps of a single row"] == "held"
    assert (tmp_path / "claims" / f"{straggler.CLAIM.number}-{straggler.CLAIM.name}.png").exists()
