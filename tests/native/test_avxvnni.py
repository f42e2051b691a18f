"""The AVX-VNNI path really runs, on any x86-64 CPU with AVX2: natively, or its instructions under an emulator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.native.avxvnni import Process, compile_source, is_native

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Process:
    return Process(tmp_path_factory.mktemp("avxvnni"))


def test_every_instruction_follows_its_definition(process: Process, tmp_path: Path) -> None:
    """Register and memory forms, both widths, high registers; the emulator and this check agree on each lane."""
    assert process.run(str(compile_source("check.cpp", tmp_path / "check", "-mavx"))) == "0 wrong\n"


def test_a_cpu_that_lacks_it_refuses_the_path() -> None:
    if is_native():
        pytest.skip("this CPU has AVX-VNNI")
    result = subprocess.run(
        [sys.executable, "-c", "from everystop import _native; _native.isa()"],
        env=os.environ | {"EVERYSTOP_ISA": "avxvnni", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "EVERYSTOP_ISA=avxvnni: this CPU cannot run it" in result.stderr


def test_the_path_is_what_was_asked_for(process: Process) -> None:
    code = (
        "import numpy as np; from everystop import _native; x = np.ones((3, 64), np.float32);"
        "packed = _native.pack_linear('int8', x, 1);"
        "print(_native.isa(), _native.linear('int8', packed, x, 3, 64).tolist())"
    )
    assert process.run_python("-c", code) == f"avxvnni {[[64.0] * 3] * 3}\n"


def test_int8_kernels_equal_their_naive_version(process: Process) -> None:
    """A few shapes: an emulated instruction takes microseconds."""
    shapes = "1-1-1 or 6-32-64 or 7-33-65 or 5-64-1536"
    process.run_pytest(str(HERE / "test_linear.py"), "-k", f"saturate or definition or (bit_for_bit and ({shapes}))")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_kernels(process: Process) -> None:
    names = ("test_linear.py", "test_attention.py", "test_norm.py", "test_rope.py", "test_sampling.py")
    process.run_pytest(
        *(str(HERE / name) for name in names), "-k", "not every_path and not other_instruction", timeout_s=850
    )
