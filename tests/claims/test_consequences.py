"""Claims 5 to 9 in virtual time: what they count is exact there, and they fail where their cause is taken away."""

from __future__ import annotations

import math
from statistics import fmean

import pytest
from tests.claims.labs import figures_of, make_lab

from everystop.claims import fragmentation, no_gain, price, quiet_tenant, trade
from everystop.claims.clients import itl_s, mean_e2e_s, mean_ttft_s, ttft_s
from everystop.claims.findings import Verdict
from everystop.claims.kv_memory import MemoryUse, memory_use
from everystop.claims.lab import Trial
from everystop.claims.steps import history_of
from everystop.observe.comparison import Run
from everystop.sim.cost import CostModel
from everystop.sim.workloads import Dice, Job, Workload

NOTHING_SHARED = CostModel(step_ns=1e4, token_ns=2e6)
FREE_PROMPTS = CostModel(step_ns=5e6, row_ns=2e5)


def make_run(*lengths: tuple[int, int], block_size: int = 16) -> Run:
    """Requests of (prompt, answer) tokens at once."""
    dice = Dice("claims", 1)
    jobs = tuple(Job(prompt=dice.prompt(prompt), max_tokens=answer) for prompt, answer in lengths)
    trial = Trial(Workload("w", len(jobs), jobs), "continuous", {"block_size": block_size})
    return make_lab().simulate(trial, CostModel(step_ns=1e6))


def test_memory_is_counted_after_each_step_as_the_example_says() -> None:
    use = memory_use(make_run((20, 3)), 16)
    assert use == MemoryUse(num_requests=2, num_used=41, num_reserved=64, num_prompt=40, num_whole=46)
    assert use.wasted_share == pytest.approx(23 / 64)
    assert use.wasted_of(2 * 2048) == pytest.approx(1 - 41 / 4096)


def test_memory_of_a_sequence_grows_by_whole_blocks() -> None:
    # 15 tokens stand after the prefill and 16 after the next step, in one block; the 17th takes another.
    assert memory_use(make_run((15, 4)), 16).num_reserved == 2 * 16 + 32
    assert memory_use(make_run((15, 4), block_size=32), 32).num_reserved == 3 * 32


def test_a_prompt_that_is_cut_reserves_before_it_fills() -> None:
    use = memory_use(make_run((300, 2), block_size=32), 32)
    assert use.num_used == 256 + 300  # 256 tokens a step; the third step is its last
    assert use.num_reserved == 2 * math.ceil(301 / 32) * 32


def test_clients_are_told_apart_by_group() -> None:
    run = make_lab().runs({"x": Trial(trade.with_stragglers(), "static")})["x"][0]
    assert len(ttft_s(run, "long")) == 4
    assert len(itl_s(run, "long")) == 4 * (trade.LONG - 1)
    assert len(itl_s(run)) == run.num_output_tokens - trade.NUM_JOBS
    assert mean_ttft_s(run) == pytest.approx(fmean(ttft_s(run)))
    assert mean_e2e_s(run, "long") > mean_e2e_s(run, "short")


def test_a_static_batch_of_the_trade_boards_in_one_step() -> None:
    trial = Trial(trade.with_stragglers(), "static", {"max_num_batched_tokens": trade.STEP_TOKENS})
    run = make_lab().runs({"x": trial})["x"][0]
    steps = history_of(run).steps
    mixed = [record for record in steps.since(steps.start) if 1 in record.nums and max(record.nums) > 1]
    assert not mixed


def test_nothing_is_gained_where_rows_share_nothing() -> None:
    assert trade.measure(make_lab(2, NOTHING_SHARED)).verdict is Verdict.DID_NOT_HOLD


def test_prompts_that_cost_nothing_hurt_nobody() -> None:
    found = price.measure(make_lab(2, FREE_PROMPTS))
    assert figures_of(found)[
        "chats' ITL p99 with each prompt in one step, times without long prompts"
    ].value == pytest.approx(1, abs=0.1)
    assert found.verdict is Verdict.DID_NOT_HOLD


def test_the_gap_between_tokens_grows_with_the_chunk() -> None:
    data = price.measure(make_lab(1)).data
    assert data["p99_ms"] == sorted(data["p99_ms"])
    assert data["calm_ms"] < data["p99_ms"][0]
    assert data["ttft_ms"] == sorted(data["ttft_ms"], reverse=True)


def test_room_for_little_more_than_is_needed_wastes_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fragmentation, "WINDOW", 256)
    assert fragmentation.measure(make_lab(1)).verdict is Verdict.DID_NOT_HOLD


def test_a_tenant_that_is_not_loud_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet_tenant, "LEAST_FLOOD", 1)
    monkeypatch.setattr(quiet_tenant, "MOST_FLOOD", 1)
    found = quiet_tenant.measure(make_lab(2))
    assert figures_of(found)["quiet tenant's mean TTFT, first come, first served over alone"].value < 1.5
    assert found.verdict is Verdict.DID_NOT_HOLD


def test_a_tiny_cache_has_as_many_blocks_as_it_says() -> None:
    run = make_lab().runs({"x": no_gain.trial("continuous", *no_gain.cases()["tiny KV cache"])})["x"][0]
    steps = history_of(run).steps
    assert steps[steps.end - 1].num_free_blocks == no_gain.TINY_BLOCKS
    assert no_gain.recomputed_share(run) > 0.05


def test_lengths_differ_as_they_are_told_to() -> None:
    assert set(no_gain.lengths(0.0, 20)) == {no_gain.MEAN_TOKENS}
    drawn = [no_gain.variation(deviation) for deviation in no_gain.DEVIATIONS]
    assert drawn == sorted(drawn)
    assert fmean(no_gain.lengths(no_gain.WIDE, 500)) == pytest.approx(no_gain.MEAN_TOKENS, rel=0.15)


def test_arrivals_keep_their_rate() -> None:
    jobs = no_gain.at_rate(no_gain.spread(0.0, 400), 20.0).jobs
    assert jobs[-1].at_s == pytest.approx(400 / 20.0, rel=0.1)
