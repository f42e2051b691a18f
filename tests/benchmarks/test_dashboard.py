"""The measurement of the live stream's cost: its statistics, its made-up run, and what it prints."""

from __future__ import annotations

import random
import statistics

import pytest
from benchmarks.dashboard import Block, Reader, interval, made_up_run, micro, report

from everystop.core.events import StepEvent


def test_the_interval_covers_the_true_mean_nineteen_times_in_twenty() -> None:
    rng, num_covered = random.Random(1), 0
    for _ in range(2000):
        mean, half = interval([rng.gauss(5.0, 2.0) for _ in range(6)])
        num_covered += abs(mean - 5.0) <= half
    assert num_covered / 2000 == pytest.approx(0.95, abs=0.015)


def blocks(extra_us: float) -> list[Block]:
    """Four pairs in the order off on on off; a reader costs so many µs a step, beside a drift that pairs take out."""
    made = []
    for index in range(8):
        has_reader = index % 4 in (1, 2)
        http_us = 900.0 + index + (extra_us if has_reader else 0.0)
        made.append(Block(has_reader, http_us, 28_000.0 + http_us, 400.0))
    return made


@pytest.mark.parametrize(("extra_us", "holds"), [(60.0, True), (400.0, False)])
def test_the_cost_is_the_difference_within_pairs(
    extra_us: float, holds: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    reader = Reader("http://127.0.0.1:9")
    reader.last = b'data: {"cost": {"cpu_share": 0.0021}}\n'
    reader.num_messages = 60
    assert report(blocks(extra_us), reader, 6.0) == holds
    said = capsys.readouterr().out
    assert f"{extra_us:+.1f} ± " in said
    assert "4 pairs of blocks of 6 s, 400 steps each" in said
    assert "0.21%" in said


def test_the_made_up_run_keeps_32_rows_busy() -> None:
    _, turns = made_up_run(200)
    rows = [len(event.plan.rows) for _, events in turns for event in events if isinstance(event, StepEvent)]
    assert statistics.median(rows) == 32


def test_the_parts_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    micro(100)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["history", "line", "blocks", "state", "messages", "encoding"]
