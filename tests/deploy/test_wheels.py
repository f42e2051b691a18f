"""sdist and wheels as they are published: made from the last commit, then used where nothing can be compiled."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tools import wheels

ROOT = Path(__file__).resolve().parents[2]
RUNTIME = ROOT / "requirements" / "runtime.lock"
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"
BUILD_TOOLS = ("c++", "g++", "cc", "gcc", "clang", "clang++", "cmake", "ninja", "make")
MAX_NATIVE_BYTES = 2 << 20
CHAT = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "Why do buses come in threes?"}],
    "stream": True,
    "max_tokens": 48,
    "temperature": 0.8,
    "seed": 7,
    "logprobs": True,
    "top_logprobs": 3,
}
CORE = """
import pkgutil, sys, time
before, began = set(sys.modules), time.process_time()
import everystop.core
for module in pkgutil.iter_modules(everystop.core.__path__, "everystop.core."):
    __import__(module.name)
took = time.process_time() - began
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(f"{took * 1e3:.0f}", *sorted(new - sys.stdlib_module_names))
"""

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(1800)]


def python_of(version: str) -> str | None:
    """The path of a Python that can make a wheel and an environment: this one, one on the PATH, or one of pyenv's."""
    query = (
        "import ensurepip, os, sys, sysconfig, venv; "
        "assert os.path.exists(os.path.join(sysconfig.get_path('include'), 'Python.h')); "
        f"assert sys.version.startswith('{version}.'); print(os.path.realpath(sys._base_executable))"
    )
    candidates = [sys.executable] if version == RUNNING else []
    candidates.append(f"python{version}")
    candidates += map(str, sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}")))
    for candidate in candidates:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            return subprocess.run([candidate, "-c", query], capture_output=True, text=True, check=True).stdout.strip()
    return None


PYTHON = Callable[[str], str]


@pytest.fixture(scope="module")
def python() -> PYTHON:
    """A Python of a version; a test that asks for one that is not here is skipped."""
    found = {version: python_of(version) for version in VERSIONS}

    def get(version: str) -> str:
        path = found[version]
        if path is None:
            pytest.skip(f"no Python {version} with its headers and venv is on this machine")
        return path

    return get


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `python -m tools.wheels` makes, with one Python for each kind of wheel, as far as they are here."""
    ours_first = sorted(VERSIONS, key=lambda version: version != RUNNING)
    kinds = [["3.11"], [version for version in ours_first if version != "3.11"]]
    pythons = [path for kind in kinds for path in list(filter(None, map(python_of, kind)))[:1]]
    out = tmp_path_factory.mktemp("dist")
    wheels.main(["--out", str(out), *(f"--python={path}" for path in pythons)])
    return out


def wheel_for(dist: Path, version: str) -> Path:
    tag = "cp311-cp311" if version == "3.11" else "cp312-abi3"
    found = list(dist.glob(f"everystop-*-{tag}-*.whl"))
    if not found:
        pytest.skip(f"no Python that makes a wheel for {version} is on this machine")
    return found[0]


def native_module(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".so"))
        return archive.read(name)


class Installed:
    """A wheel in an environment of its own, with the locked packages, in a world without compilers and build tools."""

    def __init__(self, folder: Path, python: str, wheel: Path) -> None:
        self.folder = folder
        (folder / "bin-of-nothing").mkdir(parents=True)
        dropped = {"PYTHONPATH", "VIRTUAL_ENV", "EVERYSTOP_ISA"}
        self.environment = {name: value for name, value in os.environ.items() if name not in dropped} | {
            "PATH": str(folder / "bin-of-nothing"),
            "CC": "/nowhere/cc",
            "CXX": "/nowhere/c++",
        }
        subprocess.run([python, "-m", "venv", folder / "env"], check=True)
        self.python("-m", "pip", "install", "--quiet", "--only-binary", ":all:", "--require-hashes", "-r", str(RUNTIME))
        self.python("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", str(wheel))

    def python(self, *words: str, **variables: str) -> str:
        return self._run("python", *words, **variables)

    def everystop(self, *words: str) -> str:
        return self._run("everystop", *words)

    def _run(self, program: str, *words: str, **variables: str) -> str:
        command = [str(self.folder / "env" / "bin" / program), *words]
        result = subprocess.run(
            command, env=self.environment | variables, cwd=self.folder, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout


@pytest.fixture(scope="module")
def installed(dist: Path, python: PYTHON, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Installed]:
    """A Python's installation, made once."""
    made: dict[str, Installed] = {}

    def get(version: str) -> Installed:
        path = python(version)
        if version not in made:
            made[version] = Installed(tmp_path_factory.mktemp("installed"), path, wheel_for(dist, version))
        return made[version]

    return get


@contextlib.contextmanager
def serving(command: list[str], environment: dict[str, str], folder: Path) -> Iterator[int]:
    """The port of a server in a process of its own, which has drained and ended well at the end."""
    words = [*command, "serve", "--port", "0", "--max-model-len", "1024"]
    with subprocess.Popen(words, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            screen = iter(process.stdout)
            line = next((line for line in screen if line.startswith("Serving on ")), "it ended")
            found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
            assert found is not None, line
            yield int(found[1])
        finally:
            process.terminate()
            process.wait(60)
    assert process.returncode == 0


def get(port: int, path: str) -> tuple[int, bytes]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()


def streamed(port: int) -> list[Any]:
    """What a streamed chat says, but for its id and its time: texts, the bits of log probabilities, the fingerprint."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("POST", "/v1/chat/completions", json.dumps(CHAT), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200
        events = answer.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    told = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    return [(event["choices"], event["system_fingerprint"]) for event in told]


@pytest.fixture(scope="module")
def answer_of_the_source() -> list[Any]:
    with serving([sys.executable, "-m", "everystop"], dict(os.environ), ROOT) as port:
        return streamed(port)


def test_the_same_commit_gives_the_same_bytes_from_checkout_and_sdist(
    dist: Path, python: PYTHON, tmp_path: Path
) -> None:
    tools = wheels.Tools(python(RUNNING), tmp_path / "tools")
    checkout = wheels.clone(tmp_path / "a clone elsewhere")
    (sdist,) = dist.glob("*.tar.gz")
    assert tools.sdist(checkout, tmp_path / "sdist").read_bytes() == sdist.read_bytes()
    again, before = tools.wheel(checkout, tmp_path / "wheel"), wheel_for(dist, RUNNING)
    with zipfile.ZipFile(again) as one, zipfile.ZipFile(before) as other:
        assert one.namelist() == other.namelist()
        assert [name for name in one.namelist() if one.read(name) != other.read(name)] == []
    assert (again.name, again.read_bytes()) == (before.name, before.read_bytes())


def test_the_sums_are_those_of_the_files(dist: Path) -> None:
    lines = (dist / "SHA256SUMS").read_text().splitlines()
    assert {line.split("  ")[1] for line in lines} == {path.name for path in dist.iterdir()} - {"SHA256SUMS"}
    for line in lines:
        digest, name = line.split("  ")
        assert hashlib.sha256((dist / name).read_bytes()).hexdigest() == digest


@pytest.mark.parametrize("version", VERSIONS[:2])
def test_a_wheel_says_on_which_systems_it_runs_and_is_small(dist: Path, version: str) -> None:
    wheel = wheel_for(dist, version)
    assert re.search(rf"-manylinux_2_\d+_{platform.machine()}(\.manylinux\w+)*\.whl$", wheel.name), wheel.name
    native = native_module(wheel)
    assert len(native) < MAX_NATIVE_BYTES
    assert not [section for section in (b".symtab", b".debug_info") if section + b"\0" in native], "it is not stripped"
    assert b"libstdc++.so" not in native
    assert str(ROOT).encode() not in native


@pytest.mark.parametrize("version", VERSIONS)
def test_it_runs_where_nothing_can_be_compiled(installed: Callable[[str], Installed], version: str) -> None:
    one = installed(version)
    assert not [tool for tool in BUILD_TOOLS if shutil.which(tool, path=one.environment["PATH"])]
    assert not {path.name for path in (one.folder / "env" / "bin").iterdir()} & set(BUILD_TOOLS)
    assert re.fullmatch(r"everystop 0\.\d+\.\d+\S*\n", one.everystop("--version"))
    found = {each["name"]: each for each in json.loads(one.everystop("doctor", "--port", "0", "--json"))["findings"]}
    assert found["compiler"]["text"] == "none, and none is needed"
    assert found["version"]["text"].endswith(f"installed in {one.python('-c', IN).strip()}")
    assert {name for name, each in found.items() if each["status"] == "fail"} == set()
    assert found["kernels"]["status"] == found["packages"]["status"] == "ok"


IN = "import everystop; print(everystop.__path__[0])"


@pytest.mark.parametrize("version", VERSIONS)
def test_an_answer_is_that_of_the_source_bit_for_bit(
    installed: Callable[[str], Installed], answer_of_the_source: list[Any], version: str
) -> None:
    one = installed(version)
    with serving([str(one.folder / "env" / "bin" / "everystop")], one.environment, one.folder) as port:
        assert streamed(port) == answer_of_the_source
        assert get(port, "/ui/index.js")[0] == get(port, "/ui")[0] == 200
    assert len(answer_of_the_source) > 20


@pytest.mark.parametrize("version", VERSIONS)
def test_the_core_needs_no_package(installed: Callable[[str], Installed], version: str) -> None:
    milliseconds, *packages = installed(version).python("-c", CORE).split()
    print(f"{version}: the core is imported in {milliseconds} ms of processor time")
    assert packages == ["everystop"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the paths of x86-64")
@pytest.mark.parametrize("isa", ["portable", "avx2", "avxvnni", "avx512vnni"])
def test_every_path_of_the_kernels_is_in_it(installed: Callable[[str], Installed], isa: str) -> None:
    told = installed(RUNNING).python("-c", ISA, EVERYSTOP_ISA=isa)
    assert told.strip() == isa or f"EVERYSTOP_ISA={isa}: this CPU cannot run it" in told


ISA = """
from everystop import _native
try:
    print(_native.isa())
except ValueError as error:
    print(error)
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="a CPU of x86-64")
def test_a_cpu_without_avx_takes_the_portable_path(installed: Callable[[str], Installed]) -> None:
    qemu = shutil.which("qemu-x86_64")
    if qemu is None:
        pytest.skip("qemu-x86_64 is not installed")
    one = installed(RUNNING)
    command = [qemu, "-cpu", "Westmere", str(one.folder / "env" / "bin" / "python"), "-c", ISA]
    told = subprocess.run(command, env=one.environment, capture_output=True, text=True, check=False)
    assert (told.stdout, told.returncode) == ("portable\n", 0), told.stderr
