"""Everystop itself, as it comes, and in its float32 mode: rows beside the others."""

from __future__ import annotations

import subprocess
import sys

import everystop
from benchmarks.local_server import ROOT
from benchmarks.peers.peer import Crowd, Launch, Place, Say, Setting

DEFAULT_SLOTS, DEFAULT_BUDGET = 64, 256


class Ours:
    """The server of this checkout; other numbers of slots than the default only where more clients are sent."""

    name = "everystop"
    title = "Everystop"
    is_swept = False
    settings = (Setting("int8", {"dtype": "int8"}), Setting("float32", {"dtype": "float32"}))
    remarks = ("Everystop: default settings; float32 is its reference mode and not meant to be fast.",)

    def install(self, place: Place, say: Say) -> None:
        """Nothing to do: it is this checkout."""

    def fault(self, place: Place) -> str | None:
        """The native module may be missing."""
        try:
            from everystop import _native  # noqa: F401
        except ImportError as error:
            return f"the native module is not built: {error}; run ./everystop --version"
        return None

    def version(self, place: Place) -> str:
        """The project's version and the commit."""
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError:
            return everystop.__version__
        return f"{everystop.__version__} {done.stdout.strip()}".strip()

    def launch(self, place: Place, setting: Setting, crowd: Crowd, port: int) -> Launch:
        """`serve` on the embedded model."""
        command = [sys.executable, "-P", "-m", "everystop", "serve", "smollm2", "--port", str(port)]
        command += ["--dtype", setting.values["dtype"]]
        if crowd.num_clients > DEFAULT_SLOTS:
            budget = max(DEFAULT_BUDGET, 2 * crowd.num_clients)
            command += ["--max-num-seqs", str(crowd.num_clients), "--max-num-batched-tokens", str(budget)]
        return Launch(command=tuple(command), environment={"PYTHONDONTWRITEBYTECODE": ""})
