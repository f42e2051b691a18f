"""What `deadline` does for those who have targets, in virtual time, beside first come, first served."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from tests.core.harness import make_request, make_scheduler
from tests.core.test_pace import MACHINE, MS, Drive
from tests.sim.traffic import NS_PER_MS, NS_PER_S, Arrival, Simulation, poisson

from everystop.core.events import StepEvent
from everystop.core.policy import Continuous, Deadline, Policy, Share, Targets

SECONDS = 60
PROMPTS, OUTPUTS = range(50, 801), range(10, 41)  # a second serves about 8 such requests
SHORT_PROMPTS, LONG_PROMPTS = range(20, 200), range(200, 1201)
STRICT_NS, RELAXED_NS = 400 * NS_PER_MS, 30 * NS_PER_S
SHARES = {"strict": Share(ttft_ns=STRICT_NS), "relaxed": Share(ttft_ns=RELAXED_NS)}


def serve(policy: Policy, arrivals: list[Arrival], until_ns: int | None = SECONDS * NS_PER_S) -> Simulation:
    return Simulation(policy, max_num_seqs=32, max_num_batched_tokens=128).run(arrivals, until_ns=until_ns)


def share_met(simulation: Simulation, tenant: str, target_ns: int) -> float:
    """Of the tenant's requests whose deadline has passed, those whose first token came in time."""
    due = [
        r for r in simulation.requests.values() if r.tenant == tenant and r.arrival_ns + target_ns < SECONDS * NS_PER_S
    ]
    never = 2 * SECONDS * NS_PER_S
    met = [simulation.first_token_ns.get(r.request_id, never) - r.arrival_ns <= target_ns for r in due]
    assert len(met) > 50
    return sum(met) / len(met)


def flood(tenant: str, per_s: float, seed: int) -> Iterator[Arrival]:
    return poisson(random.Random(seed), tenant, per_s, SECONDS, PROMPTS, OUTPUTS)


@pytest.mark.parametrize(("per_s", "least"), [(10, 0.65), (16, 0.5)])
def test_under_overload_more_first_tokens_come_in_time(per_s: float, least: float) -> None:
    target_ns = NS_PER_S
    arrivals = list(flood("all", per_s, 1))
    met = share_met(serve(Deadline(Targets(target_ns)), arrivals), "all", target_ns)
    baseline = share_met(serve(Continuous(), arrivals), "all", target_ns)
    print(f"{per_s} requests a second: {met:.1%} in time, first come, first served {baseline:.1%}")
    assert met > max(least, 2 * baseline)


def test_strict_tenant_is_on_time_while_the_relaxed_one_absorbs() -> None:
    """Together they ask for more than there is."""
    strict = poisson(random.Random(1), "strict", 8, SECONDS, SHORT_PROMPTS, OUTPUTS)
    relaxed = poisson(random.Random(2), "relaxed", 5, SECONDS, LONG_PROMPTS, OUTPUTS)
    arrivals = [*strict, *relaxed]
    deadline, first_come = serve(Deadline(shares=SHARES), arrivals), serve(Continuous(), arrivals)
    for name, run in (("deadline", deadline), ("first come, first served", first_come)):
        met = [share_met(run, tenant, target) for tenant, target in (("strict", STRICT_NS), ("relaxed", RELAXED_NS))]
        print(f"{name}: strict {met[0]:.1%} in time, relaxed {met[1]:.1%}, served {sum(run.served().values()):,}")
    assert share_met(deadline, "strict", STRICT_NS) > 0.95
    assert share_met(deadline, "relaxed", RELAXED_NS) > 0.95
    assert share_met(first_come, "strict", STRICT_NS) < 0.5
    assert sum(deadline.served().values()) >= 0.95 * sum(first_come.served().values())


def test_late_requests_are_all_served_though_overload_never_ends() -> None:
    """Of those who came in the first ten seconds, nobody is left at the end."""
    simulation = serve(Deadline(Targets(NS_PER_S)), list(flood("all", 10, 3)))
    early = [r.request_id for r in simulation.requests.values() if r.arrival_ns < 10 * NS_PER_S]
    assert len(early) > 80
    assert all(request_id in simulation.finish_ns for request_id in early)


@pytest.mark.parametrize("depth", [0, 1])
def test_steps_are_short_for_decoders_with_a_target_and_long_without(depth: int) -> None:
    """Long prompts all the time; four decoders with 30 ms between tokens come and go."""
    scheduler = make_scheduler(
        policy=Deadline(Targets(ttft_ns=10**12)), step_times=MACHINE, num_blocks=3_000, block_size=32,
        max_num_seqs=12, max_num_batched_tokens=512,
    )  # fmt: skip
    drive = Drive(scheduler, depth=depth)
    for i in range(3):
        scheduler.add(make_request(i, 6_000, max_tokens=2), drive.now_ns)
    drive.turn()
    for i in range(3, 7):
        scheduler.add(make_request(i, 4, max_tokens=60, itl_target_ns=30 * MS), drive.now_ns)
    drive.run()
    beside = [step for step in drive.steps if any(row.request_id >= 3 and row.start > 4 for row in step.plan.rows)]
    assert len(beside) >= 58
    assert all(step.execute_ns <= 1.1 * 30 * MS for step in beside)
    assert sorted(step.execute_ns for step in beside)[len(beside) // 2] >= 0.8 * 30 * MS
    without = [step for step in drive.steps[len(beside) + 4 :] if is_full_of_prompts(step)]
    assert len(without) > 10
    assert all(step.plan.num_tokens == 512 for step in without[:-2])


def is_full_of_prompts(step: StepEvent) -> bool:
    return max((row.num_tokens for row in step.plan.rows), default=0) > 100
