"""The bench on the real model: one set of weights for all engines, the same outputs under every policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from everystop.config import Config
from everystop.observe.comparison import Run
from everystop.observe.slot_use import slot_use
from everystop.origin import commit
from everystop.sim.workloads import Dice, Job, Workload
from everystop.trial.bench import Bench
from everystop.trial.on_engine import EngineRun, Sampling
from everystop.trial.repeats import compare


class Silent:
    """Watches nothing."""

    def begin(self, policy: str, repeat: int | None) -> None: ...

    def advance(self, num_over: int, num_all: int) -> None: ...


def small_stragglers() -> Workload:
    dice = Dice("small", 7)
    jobs = (Job(prompt=dice.prompt(24), max_tokens=6 if i % 4 else 24) for i in range(12))
    return Workload("small", 12, tuple(jobs))


@pytest.mark.model
def test_policies_compute_the_same_outputs_in_the_steps_that_they_need() -> None:
    config = Config(max_num_seqs=4, max_num_batched_tokens=128, kv_cache_memory=64 << 20)
    bench = Bench(config)

    def play(workload: Workload, policy: str, repeat: int, progress: Callable[[int, int], None]) -> Run:
        engine = bench.engine(replace(config, policy=policy))
        return EngineRun(workload, engine, Sampling()).play(policy, repeat, 4, progress)

    policies = ("static", "static-padded", "continuous", "deadline")
    comparison = compare(small_stragglers(), policies, 1, play, Silent(), num_warm_up_jobs=8, settings={})
    described = bench.describe()
    bench.close()
    assert comparison.equality().num_equal == 12
    assert comparison.equality().holds
    assert comparison.num_errors == 0
    overheads: list[float] = []
    for policy, expected in (("static", 72), ("static-padded", 72), ("continuous", 36)):
        for run in comparison.runs_of(policy):
            use = slot_use(run)
            assert use is not None
            assert expected <= use.num_steps <= expected + 4
            assert use.slot_steps["decode"] == 3 * 23 + 9 * 5
            assert use.slot_ns["overhead"] > 0
            overheads.append(use.slot_ns["overhead"] / sum(use.slot_ns.values()))
    assert min(overheads) < 0.2, "others on the machine hold up one run or another, not each"
    assert described["num_kv_blocks"] == bench.capacity.num_blocks
    assert len(described["model_sha256"][0]) == 64
    assert described["commit"] == commit()
    assert not any(Path(name).is_absolute() for name in described["model_files"])
