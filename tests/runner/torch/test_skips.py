"""In this folder a skip fails, and is counted."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

SKIPPING = """
import pytest

def test_that_skips():
    pytest.skip("no reason")

@pytest.mark.skipif(True, reason="none either")
def test_that_is_skipped(): ...

@pytest.fixture
def nothing():
    pytest.skip("nor here")

def test_whose_fixture_skips(nothing): ...

@pytest.mark.xfail
def test_that_is_known_to_fail():
    assert False

@pytest.mark.gpu
def test_that_wants_a_gpu():
    pytest.skip("there is none")
"""
MODULE = """
import pytest

pytest.importorskip("no_such_module")
"""


def test_a_skip_fails_and_is_counted(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path / "conftest.py")
    (tmp_path / "test_skipping.py").write_text(SKIPPING)
    (tmp_path / "test_module.py").write_text(MODULE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: x\n")
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--continue-on-collection-errors", str(tmp_path)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "skipped in tests/runner/torch: 4" in done.stdout
    assert "1 failed, 1 skipped, 1 xfailed, 3 errors" in done.stdout
    assert "nothing may be skipped" in done.stdout
