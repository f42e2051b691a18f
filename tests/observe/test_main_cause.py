"""A glimpse at a life tells what cutting it whole would, or tells nothing."""

from __future__ import annotations

import random

import pytest
from benchmarks.dashboard import made_up_run
from tests.observe.runs import Run

from everystop.observe import main_cause as module
from everystop.observe.history import History, Trail
from everystop.observe.life import life_of
from everystop.observe.main_cause import WORTH_NUM_TOKENS, main_cause

WORST_LACK = 0.05  # of the whole time: what the told cause may fall short of the largest


def traffic(seed: int, **settings: int) -> Run:
    """Two dozen requests that come one by one, with prompts and outputs of any length."""
    rng = random.Random(seed)
    run = Run(host_ns=300_000, sample_ns=200_000, max_num_batched_tokens=64, **settings)
    for i in range(24):
        run.add(i, rng.choice([8, 60, 600]), rng.randint(30, 200))
        run.turn(rng.choice([0, 1, 30, 120]))
    run.finish()
    return run


@pytest.mark.parametrize("slots", [2, 8, 32])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_glimpse_agrees_with_the_whole_life(seed: int, slots: int) -> None:
    run = traffic(seed, max_num_seqs=slots, num_blocks=2_000)
    num_told = num_long = 0
    for trail in run.history.trails.values():
        assert trail.finish is not None
        told = module._glimpse(run.history, trail)
        num_long += trail.finish.num_output_tokens >= WORTH_NUM_TOKENS
        if told is None:
            continue
        num_told += 1
        causes = life_of(run.history, trail, run.now_ns).ns_by_cause()
        assert causes[told] >= max(causes.values()) - WORST_LACK * sum(causes.values())
    assert num_long >= 12
    assert num_told >= num_long // 2


def test_where_it_cannot_tell_the_whole_life_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    run = traffic(3, max_num_seqs=8, num_blocks=60)
    preempted = [trail for trail in run.history.trails.values() if trail.preemptions]
    assert preempted
    for trail in preempted:
        causes = life_of(run.history, trail, run.now_ns).ns_by_cause()
        assert main_cause(run.history, trail, run.now_ns) is max(causes, key=causes.__getitem__)

    def cut(history: History, trail: Trail, now_ns: int) -> None:
        raise AssertionError("a whole life has been cut")

    monkeypatch.setattr(module, "life_of", cut)
    with pytest.raises(AssertionError, match="a whole life has been cut"):
        main_cause(run.history, preempted[0], run.now_ns)


def test_steps_that_took_no_time_do_no_harm() -> None:
    """As where a clock stands still."""
    _, turns = made_up_run(600)
    history = History(num_finished=1000)
    for _, events in turns:
        history.receive(events)
    history.catch_up()
    over = [trail for trail in history.trails.values() if trail.finish is not None]
    assert max(trail.finish.num_output_tokens for trail in over if trail.finish is not None) >= WORTH_NUM_TOKENS
    for trail in over:
        main_cause(history, trail, history.last_ns)
