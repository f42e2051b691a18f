"""The workloads keep their promises, and one seed gives the same bytes on every Python."""

from __future__ import annotations

import hashlib
import statistics
from itertools import pairwise

import pytest

from everystop.sim.workloads import (
    FIRST_ID,
    LAST_ID,
    MAKERS,
    Dice,
    Kind,
    burst,
    in_order_of_time,
    make_workload,
    poisson,
    read_workload,
)

VOCABULARY = 49_152


def fingerprint(name: str, seed: int = 7) -> str:
    return hashlib.sha256("\n".join(make_workload(name, seed).lines()).encode()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("straggler", "1fe733c51f383fa6"),
        ("chat", "f9a7918193a4e56a"),
        ("uniform", "56bcf3cf4ff7bcef"),
        ("single", "500bae2d8ceb4c86"),
        ("prefill", "9aa78c1a78b05278"),
        ("shared", "60adc93c666c3f2f"),
        ("calm", "0dd4b4dd97952153"),
        ("stall", "5e254795af3592ad"),
    ],
)
def test_a_seed_gives_the_same_bytes_everywhere(name: str, expected: str) -> None:
    assert fingerprint(name) == expected


@pytest.mark.parametrize("name", MAKERS)
def test_another_seed_gives_other_prompts_and_as_many(name: str) -> None:
    one, other = make_workload(name, 7), make_workload(name, 8)
    assert len(one.jobs) == len(other.jobs)
    assert not {job.prompt for job in one.jobs} & {job.prompt for job in other.jobs}


@pytest.mark.parametrize("name", MAKERS)
def test_lines_can_be_read_back(name: str) -> None:
    workload = make_workload(name)
    assert read_workload(workload.lines()) == workload


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "shared"])
def test_prompts_differ_from_their_first_token_on(name: str) -> None:
    jobs = make_workload(name).jobs
    assert len({job.prompt[0] for job in jobs}) == len(jobs)


@pytest.mark.parametrize("name", MAKERS)
def test_prompts_hold_plain_tokens_of_the_vocabulary_and_answers_have_fixed_lengths(name: str) -> None:
    for job in make_workload(name).jobs:
        assert all(FIRST_ID <= token <= LAST_ID < VOCABULARY for token in job.prompt)
        assert job.ignore_eos
        assert job.max_tokens > 0


def test_straggler_has_one_long_answer_at_the_head_of_each_sixteen() -> None:
    workload = make_workload("straggler")
    assert workload.num_clients == len(workload.jobs) == 64
    lengths = [job.max_tokens for job in workload.jobs]
    assert lengths == ([1000] + [20] * 15) * 4
    assert [job.group for job in workload.jobs] == (["long"] + ["short"] * 15) * 4
    assert {len(job.prompt) for job in workload.jobs} <= set(range(20, 29))


def test_chat_has_four_requests_a_client_with_lengths_from_40_to_200() -> None:
    workload = make_workload("chat")
    assert (workload.num_clients, len(workload.jobs)) == (32, 128)
    prompts = [len(job.prompt) for job in workload.jobs]
    outputs = [job.max_tokens for job in workload.jobs]
    assert 40 <= min(prompts) < 60 < 180 < max(prompts) <= 200
    assert 40 <= min(outputs) < 60 < 150 < max(outputs) <= 200
    assert statistics.median(outputs) < statistics.fmean(outputs)


def test_log_normal_lengths_centre_on_the_geometric_mean() -> None:
    dice = Dice("lengths", 7)
    values = [dice.log_normal(40, 200) for _ in range(4000)]
    assert 86 <= statistics.median(values) <= 93  # sqrt(40 · 200) = 89.4
    assert (min(values), max(values)) == (40, 200)


def test_shared_prompts_have_512_tokens_in_common_and_differ_in_the_next() -> None:
    workload = make_workload("shared")
    assert (workload.num_clients, len(workload.jobs)) == (32, 64)
    assert len({job.prompt[:512] for job in workload.jobs}) == 1
    assert len({job.prompt[512] for job in workload.jobs}) == 64
    assert all(528 <= len(job.prompt) <= 576 for job in workload.jobs)


def test_stall_is_calm_with_a_long_prompt_every_two_seconds() -> None:
    calm, stall = make_workload("calm"), make_workload("stall")
    assert calm.num_clients == stall.num_clients == 16
    assert stall.jobs[: len(calm.jobs)] == calm.jobs
    intruders = stall.jobs[len(calm.jobs) :]
    assert [job.at_s for job in intruders] == [1.0, 3.0, 5.0, 7.0, 9.0]
    assert {len(job.prompt) for job in intruders} == {1800}
    assert all(job.at_s is None for job in calm.jobs)


def test_the_others_have_the_lengths_of_their_name() -> None:
    uniform, single, prefill = (make_workload(name) for name in ("uniform", "single", "prefill"))
    assert {(len(job.prompt), job.max_tokens) for job in uniform.jobs} == {(64, 128)}
    assert single.num_clients == 1
    assert {job.max_tokens for job in prefill.jobs} == {4}
    assert all(950 <= len(job.prompt) <= 1050 for job in prefill.jobs)


KIND = Kind(prompt=(20, 60), output=(40, 80))


def test_a_kind_has_lengths_within_its_ranges_and_a_mean_cost() -> None:
    jobs = list(burst(Dice("kind", 1), KIND, "a", 500))
    assert {min(len(job.prompt) for job in jobs), max(len(job.prompt) for job in jobs)} == {20, 60}
    assert {min(job.max_tokens for job in jobs), max(job.max_tokens for job in jobs)} == {40, 80}
    assert KIND.mean_cost == 40 + 2 * 60
    mean = statistics.fmean(len(job.prompt) + 2 * job.max_tokens for job in jobs)
    assert mean == pytest.approx(KIND.mean_cost, rel=0.05)
    assert {(job.tenant, job.group, job.at_s) for job in jobs} == {("a", "a", 0.0)}


def test_poisson_arrivals_have_the_rate_and_the_spread_of_independent_ones() -> None:
    times = [job.at_s or 0.0 for job in poisson(Dice("arrivals", 1), KIND, "a", per_s=10, seconds=200)]
    gaps = [b - a for a, b in pairwise(times)]
    assert times == sorted(times)
    assert times[0] > 0
    assert times[-1] < 200
    assert len(times) == pytest.approx(2000, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(statistics.fmean(gaps), rel=0.08)


def test_arrivals_of_several_tenants_are_sent_in_order_of_time_and_can_be_read_back() -> None:
    streams = [poisson(Dice(name, 3), KIND, name, per_s=5, seconds=4) for name in ("a", "b")]
    workload = in_order_of_time("two", *streams, burst(Dice("c", 3), KIND, "c", 2))
    times = [job.at_s or 0.0 for job in workload.jobs]
    assert times == sorted(times)
    assert {job.tenant for job in workload.jobs} == {"a", "b", "c"}
    assert read_workload(workload.lines()) == workload
    fingerprint_of_lines = hashlib.sha256("\n".join(workload.lines()).encode()).hexdigest()[:16]
    assert fingerprint_of_lines == "9a2563805093890d"
