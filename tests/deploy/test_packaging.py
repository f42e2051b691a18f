"""What an sdist and a wheel hold, by the build backend itself, of the files that git knows; nothing is compiled."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# To compile is not needed to see which files of the package a wheel gets.
HOOKS = """
import sys
from scikit_build_core.build import build_sdist, build_wheel
build_sdist(sys.argv[1])
build_wheel(sys.argv[1], {"wheel.cmake": "false", "wheel.py-api": "py3"})
"""
BESIDE = {"CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml"}


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    told = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in told.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def made(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both, made of a copy that also holds what a folder gathers while somebody works in it."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("made")
    for name in tracked:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    for name in ("src/everystop/_native.abi3.so", "src/everystop/__pycache__/x.pyc", ".venv/bin/python", "build/x.o"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).touch()
    subprocess.run([sys.executable, "-c", HOOKS, str(out)], cwd=source, capture_output=True, text=True, check=True)
    return out


def names_in_sdist(made: Path) -> set[str]:
    (path,) = made.glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        return {name.partition("/")[2] for name in sdist.getnames()}


def names_in_wheel(made: Path) -> set[str]:
    (path,) = made.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        return set(wheel.namelist())


def test_an_sdist_is_what_a_build_needs_and_nothing_else(made: Path, tracked: list[str]) -> None:
    folders = ("csrc/", "licenses/", "src/everystop/")
    wanted = {name for name in tracked if name in BESIDE or name.startswith(folders)}
    assert len(wanted) > 300
    assert wanted >= BESIDE
    assert names_in_sdist(made) == wanted | {"PKG-INFO"}


def test_a_wheel_has_every_file_of_the_package_its_licences_and_nothing_else(made: Path, tracked: list[str]) -> None:
    package = {name.removeprefix("src/") for name in tracked if name.startswith("src/everystop/")}
    assert {"everystop/py.typed", "everystop/server/ui/index.html", "everystop/observe/report/page.js"} <= package
    about = {name for name in names_in_wheel(made) if ".dist-info/" in name}
    assert names_in_wheel(made) - about == package
    licences = {name.partition("/")[2] for name in about if "/licenses/" in name}
    assert licences == {f"licenses/{name}" for name in tracked if name == "LICENSE" or name.startswith("licenses/")}
    rest = {name.partition("/")[2] for name in about if "/licenses/" not in name}
    assert rest == {"METADATA", "RECORD", "WHEEL", "entry_points.txt"}


def test_the_version_is_written_twice_and_the_same() -> None:
    from everystop import __version__

    with (ROOT / "pyproject.toml").open("rb") as file:
        assert tomllib.load(file)["project"]["version"] == __version__


def test_the_licences_of_what_is_linked_in_are_those_of_the_locked_versions() -> None:
    files = importlib.metadata.files("nanobind")
    assert files is not None
    licence = next(file for file in files if file.name == "LICENSE")
    assert (ROOT / "licenses" / "nanobind.txt").read_text() == licence.read_text()
    header = next(file for file in files if file.name == "robin_map.h").read_text()
    words = [line.strip(" *") for line in header.partition("*/")[0].splitlines()[1:]]
    assert " ".join(words).split() == (ROOT / "licenses" / "robin-map.txt").read_text().split()


def test_an_image_is_built_with_every_file_that_a_build_needs() -> None:
    """What the Dockerfile copies, and what its ignore file lets through, are the parts of an sdist and the locks."""
    folder = ROOT / "deploy" / "docker"
    copied = {
        word.rstrip("/")
        for line in (folder / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for word in line.split()[1:-1]
    }
    assert copied == BESIDE | {"csrc", "licenses", "src", "requirements"}
    let_through = {
        line[1:].partition("/")[0]
        for line in (folder / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert let_through == copied
