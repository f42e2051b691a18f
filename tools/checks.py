"""Runs linters, type checker and tests for `../everystop test`; all of them, also after one has failed.

The arguments go to pytest, whose summary is the last line; the exit status is 0 only where everything passed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
ORDINARY = "not slow and not gpu and not peers"


def main(arguments: list[str]) -> int:
    """Run every check, name those that failed, then run pytest."""
    failed = [title for title, command in static_checks().items() if not passes(title, command)]
    if failed:
        print(f"FAILED before the tests: {', '.join(failed)}", flush=True)
    print("pytest", flush=True)
    tests = subprocess.run([sys.executable, "-P", "-m", "pytest", "-m", ORDINARY, *arguments], cwd=ROOT, check=False)
    return tests.returncode or int(bool(failed))


def static_checks() -> dict[str, list[str]]:
    """The commands that read the source without running it."""
    folders, suffixes = (ROOT / "csrc", ROOT / "tests"), {".cpp", ".hpp", ".h"}
    sources = sorted(str(path) for folder in folders for path in folder.rglob("*") if path.suffix in suffixes)
    return {
        "ruff check": [str(BIN / "ruff"), "check", "--quiet", "."],
        "ruff format": [str(BIN / "ruff"), "format", "--check", "--quiet", "."],
        "mypy": [str(BIN / "mypy"), "--strict", "src/everystop"],
        "clang-format": [str(BIN / "clang-format"), "--dry-run", "-Werror", *sources],
    }


def passes(title: str, command: list[str]) -> bool:
    """Run one check; its own output is shown."""
    print(title, flush=True)
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
