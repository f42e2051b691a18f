"""Whatever is sent, under whatever policy: every output is what the request yields alone, and every slot is accounted
for.
"""

from __future__ import annotations

import hashlib
import json
import random
from array import array

import pytest
from tests.core.hash_model import HashModelRunner, solo
from tests.trial.stand import BLOCK_SIZE, make_engine

from everystop.core.policy import POLICIES
from everystop.observe.comparison import Comparison, Run, from_json, to_json
from everystop.observe.slot_use import slot_use
from everystop.sim.workloads import Job, Workload
from everystop.trial.on_engine import EngineRun, Sampling

NUM_RUNS = 200
NUM_BLOCKS = 8  # of 16 tokens: not enough for four of the longest


def some_workload(rng: random.Random) -> Workload:
    """Up to 16 requests, some with a common prefix, some at a time of their own."""
    common = tuple(rng.randrange(1000) for _ in range(rng.choice((0, 16, 40))))
    jobs = tuple(
        Job(
            prompt=(*(common if rng.random() < 0.5 else ()), *(rng.randrange(1000) for _ in range(rng.randint(1, 20)))),
            max_tokens=rng.randint(1, 60) if rng.random() < 0.2 else rng.randint(1, 12),
            at_s=rng.uniform(0, 0.01) if rng.random() < 0.3 else None,
        )
        for _ in range(rng.randint(1, 16))
    )
    return Workload("fuzz", rng.randint(1, 16), jobs)


def check_outputs(run: Run, workload: Workload, sampling: Sampling) -> None:
    for line, job in zip(run.requests, workload.jobs, strict=True):
        expected = solo(job.prompt, sampling.params(line.index, job), limit_tokens=NUM_BLOCKS * BLOCK_SIZE).token_ids
        assert line.error is None
        assert line.digest == hashlib.sha256(array("i", expected).tobytes()).hexdigest()[:16]
        assert line.num_output_tokens == len(line.token_s) == len(expected)


def check_slots(run: Run) -> None:
    use = slot_use(run)
    assert use is not None
    assert min(use.slot_steps.values()) >= 0
    assert min(use.slot_ns.values()) >= 0
    assert sum(use.slot_steps.values()) == use.num_steps * use.num_slots
    assert sum(use.slot_ns.values()) == use.span_ns * use.num_slots


def check_round_trip(run: Run) -> None:
    comparison = Comparison(workload="fuzz", policies=(run.policy,), runs=(run,), settings={}, num_repeats_asked=1)
    data = json.loads(json.dumps(to_json(comparison)))
    assert to_json(from_json(data)) == data


def test_outputs_are_equal_and_slots_add_up_over_200_fuzzed_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gc.collect", lambda: 0)  # the test session is no garbage, and large
    runner = HashModelRunner(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    seen: dict[str, int] = dict.fromkeys(POLICIES, 0)
    num_preemptions = 0
    for seed in range(NUM_RUNS):
        rng = random.Random(seed)
        workload, policy = some_workload(rng), rng.choice(list(POLICIES))
        sampling = Sampling(temperature=rng.choice((0.0, 1.0)), seed=seed)
        engine = make_engine(runner, policy, batch_wait_ms=1, num_blocks=NUM_BLOCKS)
        run = EngineRun(workload, engine, sampling).play(policy, 0, 4, lambda num_over, num_all: None)
        check_outputs(run, workload, sampling)
        check_slots(run)
        check_round_trip(run)
        assert run.history is not None
        num_preemptions += sum(len(trail.preemptions) for trail in run.history.trails.values())
        assert not runner.known_requests
        seen[policy] += 1
    assert min(seen.values()) > 5
    assert num_preemptions > 10
