"""The KV cache takes its memory ahead of its use, and no more than that."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from tests.runner.invariance import storing
from tests.runner.models import make_runner, random_model
from tests.runner.test_native import admitted

from everystop.core.plan import StepPlan
from everystop.core.rows import Row
from everystop.runner.native import bytes_per_block

MIB = 1 << 20
LEAD = 64 * MIB
NUM_BLOCKS, BLOCK_SIZE = 60_000, 32
SLACK = 8 * MIB
PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_bytes(num_bytes: int) -> int:
    """Of the reserved mapping that has this size, and of nothing else in this process; 0 where there is none."""
    size_kib, rss_kib, found = -(-num_bytes // PAGE) * PAGE // 1024, 0, {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("Size", "Rss"):
            found[name] = int(value.split()[0])
        elif name == "VmFlags" and "nr" in value.split() and found["Size"] == size_kib:
            rss_kib += found["Rss"]
    return rss_kib * 1024


def settled(num_bytes: int, least_bytes: int) -> int:
    """The resident memory once it is as much, or a minute later."""
    deadline_s = time.monotonic() + 60
    while resident_bytes(num_bytes) < least_bytes and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return resident_bytes(num_bytes)


def test_pages_are_taken_ahead_of_the_furthest_block_in_use() -> None:
    model = random_model("llama", "int8")
    size = bytes_per_block(model.spec, BLOCK_SIZE, "int8")
    assert NUM_BLOCKS * size > 4 * LEAD
    runner = make_runner(model, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    try:
        assert settled(NUM_BLOCKS * size, LEAD) == pytest.approx(LEAD, abs=SLACK)
        far = NUM_BLOCKS // 2
        request = admitted(1, range(1, 20), [far])
        runner.execute(StepPlan(0, rows=[Row(1, 0, 19, 0, 18)], admitted=[request]))
        wanted = (far + 1) * size + LEAD
        assert settled(NUM_BLOCKS * size, wanted) == pytest.approx(wanted, abs=SLACK)
    finally:
        runner.close()
    assert resident_bytes(NUM_BLOCKS * size) == 0


@pytest.mark.parametrize("stored", ["float16", "int8"])
def test_a_pool_smaller_than_the_lead_is_taken_whole(stored: str) -> None:
    """The decoder reserves exactly what the sizing of the cache counts with."""
    model = storing(random_model("llama", "int8"), stored)
    size = 100 * bytes_per_block(model.spec, BLOCK_SIZE, stored)
    runner = make_runner(model, num_blocks=100, block_size=BLOCK_SIZE)
    assert settled(size, size) == -(-size // PAGE) * PAGE
    runner.close()
