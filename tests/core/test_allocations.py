"""A decode row that changes nothing costs no allocation, as counted in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from everystop.core.policy import POLICIES

ROOT = Path(__file__).parent.parent.parent
NUMS_ROWS = (16, 48)
COUNT = f"""
from benchmarks.scheduler import blocks_of_a_step
from everystop.core.policy import POLICIES
for policy in POLICIES:
    print(policy, *(blocks for num_rows in {NUMS_ROWS} for blocks in blocks_of_a_step(num_rows, policy)))
"""
KEEP_ONE_A_ROW = """
from everystop.core.draft import Draft
write_rows, kept = Draft.write_rows, []
def write_and_keep(self):
    kept.append([object() for _ in self.decoders])
    return write_rows(self)
Draft.write_rows = write_and_keep
"""


def blocks_by_policy(program: str) -> dict[str, list[float]]:
    """(while the plan is out, left behind) at the one number of rows, and then at the other, of each policy."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", program]
    lines = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return {policy: [float(blocks) for blocks in rest] for policy, *rest in map(str.split, lines.splitlines())}


@pytest.fixture(scope="module")
def counted() -> dict[str, list[float]]:
    return blocks_by_policy(COUNT)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_decode_row_allocates_nothing(policy: str, counted: dict[str, list[float]]) -> None:
    few_out, few_left, many_out, many_left = counted[policy]
    assert 0 < few_out == many_out, "a plan has the same parts, however many rows"
    assert few_left == many_left == 0


def test_one_object_a_row_is_seen() -> None:
    few_out, few_left, many_out, many_left = blocks_by_policy(KEEP_ONE_A_ROW + COUNT)["continuous"]
    num_more_rows = NUMS_ROWS[1] - NUMS_ROWS[0]
    assert many_out - few_out == many_left - few_left == num_more_rows
