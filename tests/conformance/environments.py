"""The environments that clients run in: the tests' own, `.venv/clients`, and for the largest one each."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.conformance.clients import ROOT, ClientKind
from tools.environment import CLIENTS, lock_file

APART = ROOT / "build" / "conformance"


class NotInstalledError(Exception):
    """A client is not where it should be; the message says what installs it."""


def environment(kind: ClientKind, folder: Path = APART) -> Path:
    """The `bin` of the client's environment; one that is the client's own is made in the folder where it is missing.

    Raises `NotInstalledError` where another environment does not hold the version that its lock file names.
    """
    if kind.lock is None:
        return _apart(kind, folder)
    home = Path(sys.prefix) / ("" if kind.lock == "dev" else CLIENTS.name)
    wanted, found = pinned(kind.distribution, kind.lock), version(kind, home / "bin")
    if found != wanted:
        there = f"{kind.distribution} {found}" if found else f"no {kind.distribution}"
        raise NotInstalledError(
            f"{home} holds {there}, and {kind.lock}.lock names {wanted}: run ./everystop test, with any selection of "
            "tests, which installs it"
        )
    return home / "bin"


def _apart(kind: ClientKind, folder: Path) -> Path:
    home, stamp = folder / kind.name, folder / kind.name / "installed.txt"
    if not stamp.is_file() or stamp.read_text() != kind.package:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        subprocess.run([str(home / "bin" / "pip"), "install", "--quiet", kind.package], check=True)
        stamp.write_text(kind.package)
    return home / "bin"


def pinned(distribution: str, lock: str) -> str:
    """The version that a lock file names."""
    found = re.search(rf"^{re.escape(distribution)}==(\S+)", lock_file(lock).read_text(), re.MULTILINE)
    assert found, f"{lock}.lock does not name {distribution}"
    return found[1]


def version(kind: ClientKind, binaries: Path) -> str | None:
    """The client's version, as it is installed."""
    python, code = binaries / "python", f"import importlib.metadata as m; print(m.version({kind.distribution!r}))"
    if not python.exists():
        return None
    done = subprocess.run([str(python), "-I", "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
