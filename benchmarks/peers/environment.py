"""Environments of the peers: made with venv and pip, each in a folder of its own, with a log of what was done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.peers.peer import PeerError, Say

LOG_TAIL = 12
INSTALL_TIMEOUT_S = 3 * 3600.0


def make_environment(
    folder: Path,
    requirements: Sequence[str],
    say: Say,
    *,
    options: Sequence[str] = (),
    extra: Mapping[str, str] = {},
    without: Sequence[str] = (),
) -> None:
    """A virtual environment `folder`/venv with these packages from pip's configured index; kept where it is complete.

    `options` are pip's, `extra` goes into its environment; `without` are packages that come along and are taken out
    again. Raises PeerError with the end of pip's own words.
    """
    mark = folder / "installed.json"
    wanted = {"requirements": list(requirements), "options": list(options), "environment": dict(extra)}
    wanted |= {"without": list(without)} if without else {}
    if mark.is_file() and json.loads(mark.read_text()) == wanted:
        return
    folder.mkdir(parents=True, exist_ok=True)
    say(f"installing {', '.join(requirements)} into {folder / 'venv'}")
    log = folder / "install.log"
    run([sys.executable, "-m", "venv", "--clear", str(folder / "venv")], log)
    python = str(folder / "venv" / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "install", *options, *requirements], log, extra)
    if without:
        run([*pip, "uninstall", "--yes", *without], log)
    mark.write_text(json.dumps(wanted))


def run(
    command: Sequence[str], log: Path, extra: Mapping[str, str] = {}, *, timeout_s: float = INSTALL_TIMEOUT_S
) -> None:
    """Run a command, its output appended to `log`; raises PeerError with the last lines where it fails."""
    with log.open("ab") as file:
        file.write(f"\n$ {' '.join(command)}\n".encode())
        file.flush()
        try:
            code = subprocess.run(
                command, stdout=file, stderr=file, env=os.environ | extra, timeout=timeout_s, check=False
            ).returncode
        except OSError as error:
            raise PeerError(f"{command[0]} cannot be run: {error.strerror}") from error
        except subprocess.TimeoutExpired:
            raise PeerError(f"{' '.join(command[:4])} … took longer than {timeout_s:g} s; see {log}") from None
    if code:
        raise PeerError(f"{' '.join(command[:4])} … failed with {code}; the end of {log}:\n{tail(log)}")


def tail(log: Path, lines: int = LOG_TAIL) -> str:
    """The last lines of a log."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except OSError as error:
        return f"({log}: {error.strerror})"


def package_version(python: Path, package: str) -> str:
    """The version of a package in an environment, or "not installed"."""
    code = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
    done = subprocess.run([str(python), "-c", code, package], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "not installed"
