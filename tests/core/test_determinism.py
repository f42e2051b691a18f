"""The same calls give the same plans, byte for byte, whatever the hash seed of the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PROGRAM = """
from tests.core.fuzz import ABORT_RATES, Episode
from everystop.core.policy import POLICIES
for number in range(2 * len(POLICIES)):
    depth, index = divmod(number, len(POLICIES))
    episode = Episode(f"determinism:{number}", POLICIES[index], depth, ABORT_RATES[(index + depth) % 3])
    episode.run(120)
    for plan in episode.harness.plans:
        print(plan.to_json())
"""


def plans_of_a_process(hash_seed: str) -> bytes:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, check=True).stdout


@pytest.fixture(scope="module")
def reference() -> bytes:
    return plans_of_a_process("0")


@pytest.mark.parametrize("hash_seed", ["1", "4294967295", "random"])
def test_hash_seed_changes_no_plan(hash_seed: str, reference: bytes) -> None:
    assert reference.count(b"\n") > 800
    assert plans_of_a_process(hash_seed) == reference
