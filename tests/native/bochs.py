"""Runs static Linux programs on a CPU that Bochs, an independent emulator, computes instruction by instruction.

Bochs boots a ROM made here (`machine/`): a kernel of a few system calls, and the program. Bochs 3.0 is the first
version with a CPU that has AVX-VNNI; `machine/install-bochs DIR` gets it where Debian's own is older.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = Path(__file__).parent / "machine"
MODEL = "arrow_lake"
# A kernel has no system below it, and leaves a program's vector registers alone.
KERNEL_FLAGS = (
    "-std=c++17",
    "-O2",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-ffreestanding",
    "-nostdlib",
    "-static",
    "-no-pie",
    "-fno-pic",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-stack-protector",
    "-fno-asynchronous-unwind-tables",
    "-fno-tree-loop-distribute-patterns",
    "-fcf-protection=none",
    "-mno-red-zone",
    "-mgeneral-regs-only",
)
# The module's sources that the linear layers consist of, but for their bindings.
LINEAR_SOURCES = (
    "isa",
    "linear",
    "linear_avx2",
    "linear_avx512",
    "linear_avxvnni",
    "linear_naive",
    "linear_portable",
    "thread_team",
)


def tool(name: str) -> str:
    """The path of a program, beside this interpreter or on the PATH; skips the test where there is none."""
    found = shutil.which(name, path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    if found is None:
        pytest.skip(f"there is no {name}")
    return found


@functools.cache
def knows_model(bochs: str) -> bool:
    """Whether a Bochs has the model of CPU that these tests run on."""
    result = subprocess.run(
        [bochs, "-help", "cpu"], stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False
    )
    return re.search(rf"^{MODEL}$", (result.stdout + result.stderr).decode(), re.MULTILINE) is not None


def find_bochs() -> str:
    """The Bochs on the PATH; skips the test where there is none, or one without a CPU with AVX-VNNI."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("the programs that run on it are compiled on x86-64")
    bochs = shutil.which("bochs")
    if bochs is None:
        pytest.skip("there is no Bochs on the PATH (docs/decisions.md, AVX-VNNI, says how to get one)")
    if not knows_model(bochs):
        pytest.skip(f"{bochs} has no model {MODEL}: Bochs 3.0 is the first that has AVX-VNNI")
    return bochs


def run_tool(*command: str, folder: Path, timeout_s: float = 300) -> None:
    """Run a compiler or the like, which must succeed."""
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"


def compile_module(folder: Path) -> list[Path]:
    """The object files of the linear layers, made from the project's sources by its build, with its flags."""
    if not (folder / "build.ninja").exists():
        options = ("-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}")
        run_tool(
            tool("cmake"),
            "-S",
            str(ROOT),
            "-B",
            str(folder),
            *options,
            f"-DPython_EXECUTABLE={sys.executable}",
            folder=folder,
        )
    names = [f"CMakeFiles/_native.dir/csrc/{name}.cpp.o" for name in LINEAR_SOURCES]
    objects = [folder / name for name in names]
    objects[0].parent.mkdir(parents=True, exist_ok=True)  # only building the whole target would make it
    run_tool(tool("ninja"), *names, folder=folder)
    return objects


def link_static(target: Path, sources: Iterable[Path], *flags: str) -> Path:
    """A program that needs nothing of the system but its kernel."""
    options = ("-std=c++17", "-O2", "-Wall", "-Wextra", f"-I{ROOT / 'csrc'}", "-static", "-no-pie", "-s")
    run_tool(tool("c++"), *options, *flags, "-o", str(target), *map(str, sources), folder=target.parent)
    return target


def make_rom(folder: Path, program: Path, environment: Iterable[str]) -> Path:
    """What the CPU starts with: the kernel, the program, and the strings of its environment."""
    shutil.copy(program, folder / "program")
    (folder / "environment").write_bytes(b"".join(text.encode() + b"\0" for text in environment) + b"\0")
    linked = folder / "rom.elf"
    script = ("-Wl,--build-id=none", f"-Wl,-T,{SOURCES / 'rom.ld'}")
    sources = (str(SOURCES / "reset.S"), str(SOURCES / "kernel.cpp"))
    run_tool(tool("c++"), *KERNEL_FLAGS, *script, "-o", str(linked), *sources, folder=folder)
    rom = folder / "rom.bin"
    run_tool(tool("objcopy"), "-O", "binary", str(linked), str(rom), folder=folder)
    assert rom.stat().st_size == 1 << 22
    return rom


class Run(NamedTuple):
    """What a program printed, and how it ended: "exit 0", or "exception 6 error 0 at 401a2b" (in hexadecimal)."""

    text: str
    ending: str


def configure(folder: Path, rom: Path, without: str) -> Path:
    """The file that tells Bochs what its machine is; what the machine writes to its serial port is in `output`."""
    screen_rom = folder / "screen.rom"
    screen_rom.write_bytes(bytes(512))  # nobody runs it, but there must be one
    excluded = f', exclude_features="{without}"' if without else ""
    lines = (
        "config_interface: textconfig",
        "display_library: term",
        "plugin_ctrl: speaker=0",
        f"cpu: model={MODEL}, ips=1000000, reset_on_triple_fault=0{excluded}",
        "memory: guest=128, host=128",
        f'romimage: file="{rom}"',
        f'vgaromimage: file="{screen_rom}"',
        f'com1: enabled=1, mode=file, dev="{folder / "output"}"',
        f'log: "{folder / "log"}"',
        "panic: action=fatal",
    )
    path = folder / "bochsrc"
    path.write_text("\n".join(lines) + "\n")
    return path


def run_on_bochs(folder: Path, program: Path, *environment: str, without: str = "", timeout_s: float = 500) -> Run:
    """Run a static program on a CPU of Bochs, which shall lack the feature `without`, in a new `folder`."""
    bochs = find_bochs()
    folder.mkdir()
    configuration = configure(folder, make_rom(folder, program, environment), without)
    with (folder / "screen").open("wb") as screen:  # no terminal, but it insists on the name of one
        subprocess.run(
            [bochs, "-q", "-f", str(configuration)],
            cwd=folder,
            env=os.environ | {"TERM": "vt100"},
            stdin=subprocess.DEVNULL,
            stdout=screen,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,  # it always stops with an error, if only because it was asked to stop
        )
    output = folder / "output"
    assert output.exists(), (folder / "screen").read_text(errors="replace")
    text, _, ending = output.read_text().removesuffix("\n").rpartition("\n")
    return Run(text, ending)
