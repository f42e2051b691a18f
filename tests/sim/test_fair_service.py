"""What the fair policy guarantees, on the simulated runner in virtual time: the paper's bound, shares, and latency.

The bound is theorem 4.4 of Sheng et al. (arXiv 2401.00588): while two tenants both have requests waiting, their
service differs by no more than 2 · max(w_p · longest prompt, w_q · tokens in the KV cache).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations

import pytest
from tests.sim.traffic import NS_PER_S, Arrival, Simulation, percentile, poisson

from everystop.core.policy import Continuous, Fair, Policy, Share

BLOCK_SIZE = 16
SECONDS = 60
NUM_BLOCKS = 40
LONGEST_PROMPT = 120
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5, "d": 1.0}


def bursts(rng: random.Random) -> Iterator[Arrival]:
    """Four tenants with different rates and lengths, who come in bursts and fall silent in between."""
    for tenant in WEIGHTS:
        longest_prompt, longest_output = rng.choice([8, 40, LONGEST_PROMPT]), rng.choice([4, 30, 100])
        now_ns = 0
        while now_ns < 8 * NS_PER_S:
            now_ns += round(rng.expovariate(1) * rng.choice([0.02, 0.2, 2]) * NS_PER_S)
            for _ in range(rng.choice([1, 5, 20])):
                yield Arrival(now_ns, tenant, rng.randint(1, longest_prompt), rng.randint(1, longest_output))


def widest_gap(simulation: Simulation, weights: dict[str, float]) -> float:
    """The largest difference of service over weight, over all pairs of tenants and all times in which both waited."""
    widest = 0.0
    for first, second in combinations(weights, 2):
        gap = least = most = 0.0
        done = 0
        for num_services, waiting in simulation.waiting_after:
            both = first in waiting and second in waiting
            for service in simulation.services[done:num_services]:
                if service.tenant == first:
                    gap += service.cost / weights[first]
                elif service.tenant == second:
                    gap -= service.cost / weights[second]
                least, most = min(least, gap), max(most, gap)
            if both:
                widest = max(widest, most - least)
            else:
                gap = least = most = 0.0
            done = num_services
    return widest


def serve_bursts(policy: Policy, seed: int, depth: int) -> Simulation:
    simulation = Simulation(
        policy, num_blocks=NUM_BLOCKS, depth=depth, notes_waiting=True, max_num_seqs=8, max_num_batched_tokens=64
    )
    return simulation.run(bursts(random.Random(seed)))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_service_of_backlogged_tenants_differs_by_no_more_than_the_bound(is_weighted: bool, depth: int) -> None:
    weights = WEIGHTS if is_weighted else dict.fromkeys(WEIGHTS, 1.0)
    bound = 2 * max(LONGEST_PROMPT, 2 * NUM_BLOCKS * BLOCK_SIZE) / min(weights.values())
    shares = {tenant: Share(weight) for tenant, weight in weights.items()}
    simulations = [serve_bursts(Fair(shares), seed, depth) for seed in range(8)]
    gaps = [widest_gap(simulation, weights) for simulation in simulations]
    assert max(gaps) <= bound
    assert max(gaps) > bound / 20, "somebody must have been backlogged"
    assert sum(simulation.num_preemptions for simulation in simulations) > 0
    assert all(len(simulation.finish_ns) == len(simulation.requests) for simulation in simulations)
    unfair = max(widest_gap(serve_bursts(Continuous(), seed, depth), weights) for seed in range(8))
    print(f"\nlargest difference of service: {max(gaps):,.0f} of {bound:,.0f} allowed, first come {unfair:,.0f}")
    assert unfair > bound, "the traffic must be one that first come, first served treats unfairly"


def flood(rng: random.Random, tenant: str, per_s: float) -> Iterator[Arrival]:
    return poisson(rng, tenant, per_s, SECONDS, range(20, 60), range(40, 80))


def serve_for_a_minute(policy: Policy, arrivals: list[Arrival]) -> Simulation:
    """At most 16 at once: about 26 requests a second of the floods' kind, 4,600 of weighted service."""
    simulation = Simulation(policy, max_num_seqs=16, max_num_batched_tokens=128)
    return simulation.run(arrivals, until_ns=SECONDS * NS_PER_S)


@pytest.mark.parametrize(("weight", "rate"), [(1.0, 30), (2.0, 60), (4.0, 60)])
def test_two_greedy_tenants_are_served_by_their_weights(weight: float, rate: float) -> None:
    """Both demand more than half the capacity; the second, with the weight, at another rate and in vain bursts."""
    rng = random.Random(7)
    arrivals = [*flood(rng, "a", 40), *flood(rng, "b", rate)]
    fair = serve_for_a_minute(Fair({"b": Share(weight)}), arrivals)
    served, baseline = fair.served(), serve_for_a_minute(Continuous(), arrivals).served()
    print(f"\nweights 1:{weight:g}: served {dict(served)}, first come, first served {dict(baseline)}")
    assert min(served.values()) > 50_000
    assert served["b"] / served["a"] == pytest.approx(weight, rel=0.1)
    assert sum(served.values()) >= 0.95 * sum(baseline.values())


def test_quiet_tenant_hardly_feels_a_flood() -> None:
    """It asks for a fifth of the capacity, the flood for ten times as much."""
    quiet = list(flood(random.Random(1), "quiet", 5.2))
    everybody = [*quiet, *flood(random.Random(2), "flood", 52)]
    alone = serve_for_a_minute(Fair(), quiet)
    fair, first_come = serve_for_a_minute(Fair(), everybody), serve_for_a_minute(Continuous(), everybody)
    p95 = {name: percentile(s.ttft_ns("quiet"), 0.95) for name, s in [("alone", alone), ("fair", fair)]}
    p95_fcfs = percentile(first_come.ttft_ns("quiet"), 0.95)
    total, total_fcfs = sum(fair.served().values()), sum(first_come.served().values())
    print(
        f"\nTTFT p95, ms: {p95['alone'] / 1e6:.0f} alone, {p95['fair'] / 1e6:.0f} fair, {p95_fcfs / 1e6:.0f} first come"
    )
    print(f"service {total / total_fcfs:.1%}, {fair.num_preemptions} displaced")
    assert p95["fair"] * 5 <= p95_fcfs
    assert p95["fair"] <= 2.5 * p95["alone"]
    assert total >= 0.95 * total_fcfs
    assert len(fair.ttft_ns("quiet")) >= 0.98 * len(quiet)
