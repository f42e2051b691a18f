"""Makes what is published: an sdist of the last commit and, from it, a wheel for each Python that is named.

    python -m tools.wheels --python python3.11 --python python3.12

A wheel of 3.11 is for that alone, one of 3.12 or newer for all from 3.12 on (the stable ABI). What is not committed is
left out, the build tools are those of `requirements/wheels.lock`, and flags from the environment do not reach the
compiler; so the same commit, compiler and Python give the same bytes. Standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "wheels.lock"
# The C++ library comes along: as new a one as a compiler's own is on few systems. Its unwinder does not, for that would
# ask for a newer libc.
LINK = "-static-libstdc++ -Wl,--exclude-libs,ALL"
LEFT_OUT = ("CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CMAKE_ARGS", "PYTHONPATH")
LAST_COMMITS_TIME = ("log", "-1", "--format=%ct")
SDIST = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"


def main(arguments: list[str]) -> int:
    """Write the files and their sums to a folder, and print them."""
    parser = argparse.ArgumentParser(prog="python -m tools.wheels", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", metavar="FOLDER", type=Path, default=ROOT / "dist", help="(default: dist)")
    parser.add_argument(
        "--python", metavar="PYTHON", action="append", help="one to build for; may be repeated (default: this one)"
    )
    options = parser.parse_args(arguments)
    if told("git", "-C", str(ROOT), "status", "--porcelain"):
        print("wheels: what is not committed is left out", file=sys.stderr)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="everystop-wheels-") as name:
        made = build(Path(name), options.python or [sys.executable])
        kept = [Path(shutil.copy(path, options.out)) for path in made]
    sums = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in kept)
    (options.out / "SHA256SUMS").write_text(sums)
    for path in kept:
        print(f"{path.name}  {path.stat().st_size:,} bytes{native_size(path)}")
    return 0


def build(folder: Path, pythons: list[str]) -> list[Path]:
    """The sdist and the wheels, somewhere in `folder`."""
    checkout = clone(folder / "clone")
    tools = [Tools(python, folder / f"tools-{number}") for number, python in enumerate(pythons)]
    sdist = tools[0].sdist(checkout, folder / "sdist")
    return [sdist, *(each.wheel(sdist, folder / f"wheel-{number}") for number, each in enumerate(tools))]


def clone(folder: Path) -> Path:
    """The last commit, in a folder of its own."""
    run("git", "clone", "--quiet", str(ROOT), str(folder))
    return folder


class Tools:
    """The locked build tools in an environment of one Python, made in `folder`."""

    def __init__(self, python: str, folder: Path) -> None:
        run(python, "-m", "venv", str(folder))
        self._python = str(folder / "bin" / "python")
        kept = {key: value for key, value in os.environ.items() if key not in LEFT_OUT and "SKBUILD" not in key}
        self._environment = kept | {
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "LDFLAGS": LINK,
            "SOURCE_DATE_EPOCH": os.environ.get("SOURCE_DATE_EPOCH")
            or told("git", "-C", str(ROOT), *LAST_COMMITS_TIME),
        }
        self._pip("install", "--quiet", "--require-hashes", "--requirement", str(LOCK))

    def sdist(self, checkout: Path, folder: Path) -> Path:
        """The sdist of a checkout, made in a new folder."""
        run(self._python, "-c", SDIST, str(folder), environment=self._environment, cwd=checkout)
        return only(folder)

    def wheel(self, source: Path, folder: Path) -> Path:
        """The wheel of an sdist or a checkout, named for the systems that it runs on; made in a new folder."""
        plain, named = folder / "plain", folder / "named"
        self._pip("wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(plain), str(source))
        repair = [self._python, "-m", "auditwheel", "repair", "--wheel-dir", str(named), str(only(plain))]
        run(*repair, environment=self._environment)
        return only(named)

    def _pip(self, *words: str) -> None:
        command = [self._python, "-m", "pip", "--disable-pip-version-check", "--no-cache-dir", *words]
        run(*command, environment=self._environment)


def only(folder: Path) -> Path:
    """The one file of a folder."""
    (path,) = folder.iterdir()
    return path


def native_size(path: Path) -> str:
    """What of a wheel is its native module."""
    if path.suffix != ".whl":
        return ""
    with zipfile.ZipFile(path) as wheel:
        (module,) = (entry for entry in wheel.infolist() if entry.filename.endswith(".so"))
    return f", {module.filename}: {module.file_size:,}"


def told(*command: str) -> str:
    """What a command prints."""
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def run(*command: str, environment: dict[str, str] | None = None, cwd: Path | None = None) -> None:
    """Run a command; where it fails, print all it said and end."""
    try:
        result = subprocess.run(
            command, env=environment, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    except OSError as error:
        raise SystemExit(f"wheels: {command[0]} cannot be run: {error.strerror}") from error
    if result.returncode:
        print(result.stdout, file=sys.stderr)
        raise SystemExit(f"wheels: {' '.join(command[:5])} … ended with {result.returncode}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
