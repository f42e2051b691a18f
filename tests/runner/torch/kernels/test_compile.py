"""Every kernel compiles for the GPUs that are served, without one, and none spills or asks for too much."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


def compiled(*arguments: str) -> str:
    """What `tools.gpu_kernels --check` prints; it fails where a kernel is unfit."""
    command = [sys.executable, "-m", "tools.gpu_kernels", "--check", *arguments]
    result = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def _environment() -> dict[str, str]:
    import os

    return os.environ | {"PYTHONPATH": str(ROOT / "src"), "TRITON_INTERPRET": "0"}


def test_kernels_of_a_large_model_compile_for_hopper() -> None:
    assert "for 9.0; 0 unfit" in compiled("--only", "9.0", "--kernels", "Llama")


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["8.0", "8.9", "9.0", "10.0", "12.0"])
def test_all_kernels_compile(capability: str) -> None:
    assert f"for {capability}; 0 unfit" in compiled("--only", capability)
