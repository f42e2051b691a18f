"""What fair-prefix promises, in virtual time: fairness within its bound, and more prefix hits than `fair` for it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from tests.sim.traffic import NS_PER_S, Arrival, Simulation

from everystop.core.policy import Fair, FairPrefix, Policy, Share

BLOCK_SIZE = 16
NUM_BLOCKS = 120
QUANTUM = 1_500
NUM_OUTPUT = range(4, 20)


def documents(
    rng: random.Random, tenant: str, num: int, num_documents: int, num_prompt: int = 264
) -> Iterator[Arrival]:
    """Questions about a few long documents, all there at the start, each about another one than the one before."""
    for i in range(num):
        document = 1 + i % num_documents + (ord(tenant) << 8)
        yield Arrival(0, tenant, num_prompt, rng.choice(NUM_OUTPUT), document)


def serve(policy: Policy, arrivals: list[Arrival], depth: int = 0) -> Simulation:
    simulation = Simulation(
        policy,
        num_blocks=NUM_BLOCKS,
        depth=depth,
        notes_waiting=True,
        prefix_caching=True,
        max_num_seqs=4,
        max_num_batched_tokens=128,
    )
    return simulation.run(arrivals)


def widest_gap(simulation: Simulation, weights: dict[str, float]) -> float:
    """The largest difference of the two tenants' service over weight, over all times in which both waited."""
    first, second = weights
    gap = least = most = 0.0
    done = 0
    for num_services, waiting in simulation.waiting_after:
        if not {first, second} <= waiting:
            break  # they wait from the start, until one has no more
        for service in simulation.services[done:num_services]:
            gap += service.cost / weights[first] if service.tenant == first else -service.cost / weights[second]
            least, most = min(least, gap), max(most, gap)
        done = num_services
    return most - least


def bound(weights: dict[str, float], quantum: int) -> float:
    return 2 * (quantum + 2 * NUM_BLOCKS * BLOCK_SIZE / min(weights.values()))


def hot_and_cold(seed: int) -> list[Arrival]:
    """One tenant asks about one document, the other about another one each time: locality would serve the first."""
    rng = random.Random(seed)
    return [*documents(rng, "a", 600, 1), *documents(rng, "b", 60, 60)]


@pytest.mark.parametrize(("weight", "depth"), [(1.0, 0), (1.0, 1), (2.5, 0)])
def test_service_of_backlogged_tenants_differs_by_no_more_than_the_bound(weight: float, depth: int) -> None:
    weights = {"a": 1.0, "b": weight}
    shares = {tenant: Share(one) for tenant, one in weights.items()}
    gaps = [widest_gap(serve(FairPrefix(shares, QUANTUM), hot_and_cold(seed), depth), weights) for seed in range(2)]
    print(f"\nweights 1 and {weight:g}: largest difference {max(gaps):,.0f} of {bound(weights, QUANTUM):,.0f}")
    assert QUANTUM / 2 < max(gaps) <= bound(weights, QUANTUM)


def test_longest_prefix_match_alone_would_be_unfair_to_that_traffic() -> None:
    weights = {"a": 1.0, "b": 1.0}
    gap = widest_gap(serve(FairPrefix(quantum=10**9), hot_and_cold(0)), weights)
    print(f"\nwithout an end to the quantum: {gap:,.0f}")
    assert gap > bound(weights, QUANTUM)


def test_more_prefix_hits_than_fair_at_the_same_shares() -> None:
    """Three tenants with eight documents of 256 tokens each: 24 need 384 blocks, and the cache has 120."""
    rng = random.Random(5)
    arrivals = [a for tenant in "abc" for a in documents(rng, tenant, 160, 8)]
    rng.shuffle(arrivals)
    arrivals = [arrival._replace(now_ns=i) for i, arrival in enumerate(arrivals)]
    runs = {policy: serve(policy, arrivals) for policy in (Fair(), FairPrefix(quantum=QUANTUM))}
    fair, local = runs.values()
    num_prompt = sum(arrival.num_prompt for arrival in arrivals)
    hits = [sum(run.num_cached.values()) / num_prompt for run in (fair, local)]
    print(f"\nprompt tokens from the cache, fair and fair-prefix: {hits[0]:.1%}, {hits[1]:.1%}; seconds: ", end="")
    print(f"{fair.now_ns / NS_PER_S:.1f}, {local.now_ns / NS_PER_S:.1f}")
    assert hits[1] > 0.5
    assert hits[1] > 2 * hits[0]
    assert local.now_ns < 0.8 * fair.now_ns, "what need not be computed is time saved"
    for run in (fair, local):
        assert len(run.finish_ns) == len(arrivals)
        half_ns = run.now_ns // 2
        done = dict.fromkeys("abc", 0)
        for service in run.services:
            if service.now_ns <= half_ns:
                done[service.tenant] += service.cost
        assert max(done.values()) - min(done.values()) <= bound({"a": 1.0}, QUANTUM)


def test_everybody_is_served_within_a_minute_whatever_the_prefixes() -> None:
    arrivals = sorted(
        Arrival(i * NS_PER_S // 50, tenant, 64, 4, document)
        for i in range(600)
        for tenant, document in [("a", 1), ("b", i + 2)]
    )
    local = serve(FairPrefix(quantum=QUANTUM), arrivals)
    assert len(local.finish_ns) == len(arrivals)
    assert local.num_cached
