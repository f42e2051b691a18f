"""Runs this project's AVX-VNNI path in a fresh process: by the CPU itself where it can, else under an emulator.

The emulator is a library to preload (`emulator/avxvnni.cpp`): it computes the instructions that the CPU refuses, and
prints how many there were.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = Path(__file__).parent / "emulator"
FLAGS = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror")


def cpu_flags() -> set[str]:
    """What /proc/cpuinfo says of the first CPU."""
    found = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return set(found[1].split()) if found else set()


def is_native() -> bool:
    """Whether this CPU has AVX-VNNI; skips the test where it could not even be emulated."""
    if platform.machine() not in ("x86_64", "AMD64") or not {"avx2", "fma", "f16c"} <= cpu_flags():
        pytest.skip("AVX-VNNI needs an x86-64 CPU with AVX2")
    return "avx_vnni" in cpu_flags()


def compile_source(name: str, target: Path, *flags: str) -> Path:
    """Build `emulator/NAME` with the system's compiler; skips where there is none."""
    compiler = next((found for word in ("c++", "g++", "clang++") if (found := shutil.which(word))), None)
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    subprocess.run([compiler, *FLAGS, *flags, "-o", str(target), str(SOURCES / name)], check=True, timeout=120)
    return target


class Process:
    """How to start a process that can run AVX-VNNI; without `must_trap`, one that may have no use for it."""

    def __init__(self, folder: Path, *, must_trap: bool = True) -> None:
        self._must_trap = must_trap
        self.emulated = not is_native()
        self.environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        if self.emulated:
            library = compile_source("avxvnni.cpp", folder / "libavxvnni.so", "-fPIC", "-shared")
            self.environment["LD_PRELOAD"] = str(library)

    def run(self, *command: str, timeout_s: float = 120) -> str:
        """The standard output of a command that must succeed, and, under the emulator, have used it.

        faulthandler would take the signal that the emulator lives on.
        """
        result = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
        counts = re.findall(r"^emulated: (\d+) register, (\d+) memory$", result.stderr, re.MULTILINE)
        if self._must_trap:
            assert bool(counts) == self.emulated, result.stderr
        return result.stdout

    def run_python(self, *arguments: str, timeout_s: float = 120) -> str:
        """`run` of this interpreter on the path `avxvnni`."""
        self.environment["EVERYSTOP_ISA"] = "avxvnni"
        return self.run(sys.executable, *arguments, timeout_s=timeout_s)

    def run_pytest(self, *arguments: str, timeout_s: float = 120) -> str:
        """`run_python` of pytest; every test must pass."""
        options = ("-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", "--timeout", str(timeout_s))
        output = self.run_python("-m", "pytest", *options, *arguments, timeout_s=timeout_s)
        assert " passed" in output
        assert " skipped" not in output.splitlines()[-1], output[-2000:]
        return output
