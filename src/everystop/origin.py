"""Where this program runs from: a clone of its repository, at which commit, or a place where it is installed."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GIT_S = 5.0


def is_clone() -> bool:
    """Whether this runs from a clone, where the kernels are built on the spot."""
    return (ROOT / "csrc").is_dir() and (ROOT / "pyproject.toml").is_file()


def commit() -> str | None:
    """The commit of the clone, with "-dirty" where files differ from it; None where there is no clone, or no git."""
    git = shutil.which("git")
    if git is None or not is_clone():
        return None
    command = [git, "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        told = subprocess.run(command, capture_output=True, text=True, timeout=GIT_S, check=False)
        if told.returncode == 0:
            return told.stdout.strip()
    return None
