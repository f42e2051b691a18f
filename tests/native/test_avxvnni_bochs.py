"""The AVX-VNNI path on an independent emulator, which decodes and computes its instructions by itself."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from tests.native.avxvnni import SOURCES as EMULATOR
from tests.native.avxvnni import is_native
from tests.native.bochs import SOURCES, Run, compile_module, find_bochs, link_static, run_on_bochs
from tests.native.object_code import VPDPBUSD, compilers, fixed_code

from everystop import _native

NUM_CASES = 18  # of each arithmetic, in machine/linear.cpp
INVALID_OPCODE = "exception 6 error 0 at "

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The object files of the linear layers."""
    find_bochs()
    return compile_module(tmp_path_factory.mktemp("build"))


@pytest.fixture(scope="module")
def linear(objects: list[Path]) -> Path:
    """The program that runs the linear layers on many shapes."""
    return link_static(objects[0].parents[3] / "linear", [SOURCES / "linear.cpp", *objects])


@pytest.fixture(scope="module")
def linear_on_bochs(linear: Path) -> Run:
    """What that program says there, where nobody tells it which path to take."""
    return run_on_bochs(linear.parent / "linear-run", linear)


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program that holds the four instructions against their definition."""
    find_bochs()
    return link_static(tmp_path_factory.mktemp("check") / "check", [EMULATOR / "check.cpp"], "-mavx")


def run_here(program: Path, isa: str) -> str:
    """What a program prints on this machine's CPU on the path `isa`."""
    return subprocess.run(
        [program], env={"EVERYSTOP_ISA": isa}, capture_output=True, text=True, timeout=300, check=True
    ).stdout


def bits_of(text: str, dtype: str) -> list[str]:
    """The rows of results in one arithmetic, as hexadecimal digits, without what is said of them."""
    sections = re.findall(rf"^{dtype} m=.*\n((?:[0-9a-f]+\n)+)", text, re.MULTILINE)
    return [row for rows in sections for row in rows.splitlines()]


def test_every_instruction_follows_its_definition(check: Path, tmp_path: Path) -> None:
    """In the forms, widths and registers in which the emulator that the other tests preload is held against it."""
    assert run_on_bochs(tmp_path / "run", check) == Run("0 wrong\n", "exit 0")


def test_a_cpu_without_them_refuses_the_instructions(check: Path, tmp_path: Path) -> None:
    """So it is the CPU that Bochs makes which carries them out."""
    assert run_on_bochs(tmp_path / "run", check, without="avx_vnni").ending.startswith(INVALID_OPCODE)


def test_the_path_is_chosen_by_what_the_cpu_says(linear: Path, linear_on_bochs: Run, tmp_path: Path) -> None:
    assert linear_on_bochs.text.startswith("path avxvnni\n")
    refused = run_on_bochs(tmp_path / "run", linear, "EVERYSTOP_ISA=avxvnni", without="avx_vnni")
    assert "EVERYSTOP_ISA=avxvnni: this CPU cannot run it; it supports portable, avx2 " in refused.text
    assert refused.ending == "exit 1"


def test_int8_results_are_those_of_the_naive_version_and_of_the_portable_path(
    linear: Path, linear_on_bochs: Run
) -> None:
    counts = re.findall(r"^int8 m=.*: (\d+) unlike naive", linear_on_bochs.text, re.MULTILINE)
    assert counts == ["0"] * NUM_CASES
    bits = bits_of(linear_on_bochs.text, "int8")
    assert len(set(bits)) > 100
    assert bits == bits_of(run_here(linear, "portable"), "int8")


@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_a_row_has_the_same_bits_alone_and_in_batches_of_every_size(linear_on_bochs: Run, dtype: str) -> None:
    counts = re.findall(rf"^{dtype} m=.*, (\d+) rows unlike alone$", linear_on_bochs.text, re.MULTILINE)
    assert counts == ["0"] * NUM_CASES
    assert linear_on_bochs.ending == "exit 0"


def test_the_preloaded_emulator_gives_the_same_bits(objects: list[Path], linear_on_bochs: Run) -> None:
    """The same object files on this CPU, which carries AVX-VNNI out itself or has it emulated."""
    sources = [SOURCES / "linear.cpp", *objects]
    if not is_native():
        sources.append(EMULATOR / "avxvnni.cpp")
    program = link_static(objects[0].parents[3] / "linear-here", sources)
    assert run_here(program, "avxvnni") == linear_on_bochs.text


def test_the_installed_module_holds_the_code_that_ran(objects: list[Path]) -> None:
    module = Path(_native.__file__)
    if not compilers(objects[0]) <= compilers(module):
        pytest.skip("the installed module was made by another compiler")
    stretches = [stretch for path in objects for stretch in fixed_code(path, min_bytes=64)]
    code = module.read_bytes()
    assert [stretch.hex() for stretch in stretches if stretch not in code] == []
    num_instructions = sum(len(VPDPBUSD.findall(stretch)) for stretch in stretches)
    assert num_instructions == len(VPDPBUSD.findall(code)) >= 12
