"""The KV cache takes its memory ahead of its use, and no more than that."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
from tests.runner.models import make_runner, random_model
from tests.runner.test_native import admitted

from everystop.core.plan import StepPlan
from everystop.core.rows import Row
from everystop.runner.native import bytes_per_block

MIB = 1 << 20
LEAD = 64 * MIB
NUM_BLOCKS, BLOCK_SIZE = 30_000, 32
SLACK = 8 * MIB


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def settled(is_there: Callable[[int], bool]) -> int:
    """The resident memory once it is as wanted, or ten seconds later."""
    deadline_s = time.monotonic() + 10
    while not is_there(resident_bytes()) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return resident_bytes()


def test_pages_are_taken_ahead_of_the_furthest_block_in_use() -> None:
    model = random_model("llama", "int8")
    make_runner(model).close()  # what only the first runner takes
    size = bytes_per_block(model.spec, BLOCK_SIZE, "int8")
    assert NUM_BLOCKS * size > 4 * LEAD
    before = resident_bytes()
    runner = make_runner(model, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    try:
        assert settled(lambda now: now - before >= LEAD) - before == pytest.approx(LEAD, abs=SLACK)
        far = NUM_BLOCKS // 2
        request = admitted(1, range(1, 20), [far])
        runner.execute(StepPlan(0, rows=[Row(1, 0, 19, 0, 18)], admitted=[request]))
        wanted = (far + 1) * size + LEAD
        assert settled(lambda now: now - before >= wanted) - before == pytest.approx(wanted, abs=SLACK)
    finally:
        runner.close()
    assert settled(lambda now: now - before < SLACK) - before < SLACK


def test_a_pool_smaller_than_the_lead_is_taken_whole() -> None:
    model = random_model("llama", "int8")
    make_runner(model).close()
    before = resident_bytes()
    runner = make_runner(model, num_blocks=100, block_size=BLOCK_SIZE)
    size = 100 * bytes_per_block(model.spec, BLOCK_SIZE, "int8")
    assert settled(lambda now: now - before >= size) - before == pytest.approx(size, abs=SLACK)
    runner.close()
