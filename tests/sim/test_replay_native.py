"""Runs of the real engine loop on native kernels replay with identical plans: over 13,000 steps in all."""

from __future__ import annotations

import gzip
import json
import random
import time
from collections import Counter
from pathlib import Path

import pytest
from tests.runner.models import make_runner, random_model

from everystop.core.events import AdmitEvent, Event, FinishEvent, PreemptEvent, StepEvent
from everystop.core.kv_cache import KVCache
from everystop.core.limits import Limits
from everystop.core.policy import PolicySettings, Share, Targets, make_policy
from everystop.core.recording import RecordingScheduler
from everystop.core.request import FinishReason, Request, SamplingParams
from everystop.engine.loop import StepLoop
from everystop.observe.recorder import Recorder
from everystop.runner.calibration import Room, measure_step_times
from everystop.sim.replay import replay

NUM_STEPS = {  # at each depth
    "continuous": 1_700,
    "static": 1_700,
    "static-padded": 1_700,
    "fair": 1_000,
    "deadline": 1_000,
}
SETTINGS = PolicySettings(
    batch_wait_ns=200_000,
    shares={"0": Share(weight=2.0, max_running=4), "1": Share(ttft_ns=30_000_000)},
    targets=Targets(ttft_ns=5_000_000, itl_ns=2_000_000),
)
BLOCK_SIZE = 16
EOS = 3


class Traffic:
    """Random arrivals, groups, shared prefixes and aborts on a pool that is too small for them."""

    def __init__(self, scheduler: RecordingScheduler, seed: int) -> None:
        self.random = random.Random(seed)
        self.scheduler = scheduler
        self.next_id = 0

    def arrive(self) -> None:
        rng = self.random
        n = rng.choice((1, 1, 1, 3))
        stem = 16 * rng.randrange(4)
        prompt = [stem + i % 16 for i in range(rng.choice((16, 32, 48)))]
        prompt += [rng.randrange(4, 150) for _ in range(rng.randrange(1, 30))]
        params = SamplingParams(
            max_tokens=rng.randrange(1, 70), temperature=rng.choice((0.0, 1.0)), seed=rng.randrange(99), n=n
        )
        now_ns = time.monotonic_ns()
        for choice in range(n):
            request = Request(
                self.next_id + choice,
                prompt,
                params,
                eos_token_ids=(EOS,),
                group_id=self.next_id,
                choice_index=choice,
                arrival_ns=now_ns,
                tenant=str(self.next_id % 3),
            )
            self.scheduler.add(request, now_ns)
        self.next_id += n

    def maybe_abort(self) -> None:
        if self.random.random() < 0.02 and self.scheduler.requests:
            request_id = self.random.choice(list(self.scheduler.requests))
            assert self.scheduler.abort(request_id, time.monotonic_ns())


def record_run(path: Path, policy: str, depth: int, target_itl_ns: int | None = None) -> list[Event]:
    """Drive the loop for the policy's number of executed steps, then until all requests have ended."""
    recorder = Recorder(path, policy, SETTINGS)
    runner = make_runner(random_model("llama", "int8"), num_blocks=22, block_size=BLOCK_SIZE, max_num_batched_tokens=48)
    kv = KVCache(num_blocks=22, block_size=BLOCK_SIZE, enable_prefix_caching=True)
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=48, max_model_len=160, target_itl_ns=target_itl_ns)
    room = Room(num_blocks=22, block_size=BLOCK_SIZE, max_num_seqs=8, max_num_batched_tokens=48)
    times = measure_step_times(runner, room)
    scheduler = RecordingScheduler(limits, kv, make_policy(policy, SETTINGS), recorder, times)
    loop = StepLoop(scheduler, runner, time.monotonic_ns, depth=depth)
    traffic = Traffic(scheduler, seed=depth)
    events: list[Event] = []
    num_steps = 0
    while num_steps < NUM_STEPS[policy] or scheduler.has_work:
        while num_steps < NUM_STEPS[policy] and scheduler.num_waiting < 6:
            traffic.arrive()
        traffic.maybe_abort()
        turn = loop.turn()
        events += turn.events
        num_steps += any(isinstance(event, StepEvent) and event.plan.rows for event in turn.events)
    recorder.close()
    runner.close()
    return events


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", NUM_STEPS)
def test_run_on_native_kernels_replays_with_identical_plans(policy: str, depth: int, tmp_path: Path) -> None:
    events = record_run(tmp_path / "run.gz", policy, depth)
    kinds = Counter(type(event).__name__ for event in events)
    ends = Counter(event.reason for event in events if isinstance(event, FinishEvent))
    forks = sum(1 for event in events if isinstance(event, AdmitEvent) and event.forked_from >= 0)
    hits = sum(1 for event in events if isinstance(event, AdmitEvent) and event.num_cached_tokens and not event.resumed)
    preemptions = sum(1 for event in events if isinstance(event, PreemptEvent))
    num_steps = sum(1 for event in events if isinstance(event, StepEvent) and event.plan.rows)
    print(f"{policy} depth {depth}: {num_steps} steps, {preemptions} preemptions, {forks} forks, {hits} hits, {ends}")
    assert num_steps >= NUM_STEPS[policy]
    assert preemptions >= 3
    assert forks >= 10
    assert hits >= 10
    assert ends[FinishReason.ABORT] >= 10
    assert ends[FinishReason.LENGTH] >= 20
    report = replay(tmp_path / "run.gz")
    assert report.first_difference is None
    assert not report.is_truncated
    assert report.num_requests == kinds["ArrivalEvent"] == sum(ends.values())


@pytest.mark.parametrize("depth", [0, 1])
def test_run_planned_by_measured_times_replays_with_identical_plans(depth: int, tmp_path: Path) -> None:
    events = record_run(tmp_path / "run.gz", "continuous", depth, target_itl_ns=600_000)
    steps = [event for event in events if isinstance(event, StepEvent)]
    assert {event.target_ns for event in steps} == {0, 600_000}  # 0 where no decoder waits for the step
    assert len({event.predicted_ns for event in steps}) > NUM_STEPS["continuous"] / 4
    assert replay(tmp_path / "run.gz").first_difference is None


def test_replay_notices_a_changed_plan(tmp_path: Path) -> None:
    """A record whose one plan is altered must not pass as identical."""
    record_run_path = tmp_path / "run.gz"
    record_run(record_run_path, "continuous", 0)
    with gzip.open(record_run_path, "rt") as file:
        lines = [json.loads(line) for line in file]
    index = next(i for i, line in enumerate(lines) if isinstance(line, list) and line[0] == "add")
    lines[index][5] += 40  # a longer prompt than the one that was served
    with gzip.open(record_run_path, "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    assert replay(record_run_path).first_difference is not None
