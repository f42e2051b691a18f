"""Runs a client against a server to its end, and keeps what it printed and what was sent."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tests.conformance.clients import ROOT, ClientKind, Site
from tests.conformance.proxy import Exchange, RecordingProxy

CLIENT_S = 600
NOWHERE = "http://127.0.0.1:9"  # nothing listens on the port for discarding
OFFLINE = {"HTTP_PROXY": NOWHERE, "HTTPS_PROXY": NOWHERE, "NO_PROXY": "127.0.0.1"}
QUIET = {"TOKENIZERS_PARALLELISM": "false", "DO_NOT_TRACK": "1"}
OTHERS = re.compile(r"\w+_proxy|pythonpath|(openai|langchain|langsmith|litellm|hf)_\w+", re.IGNORECASE)


@dataclass(frozen=True)
class Trial:
    """How it went: the client's exit status, what it printed, and each request with the status of its answer."""

    code: int
    output: str
    complaints: str
    exchanges: list[Exchange]

    @property
    def faults(self) -> int:
        """Answers that the server blames on itself."""
        return sum(each.status >= 500 for each in self.exchanges)

    @property
    def passed(self) -> bool:
        """Whether the client asked anything, met no fault and ended without an error of its own."""
        return self.code == 0 and not self.faults and bool(self.exchanges)

    def report(self) -> str:
        """What to read of a trial that did not pass."""
        counts = f"exit status {self.code}, {len(self.exchanges)} requests, {self.faults} server faults"
        return "\n".join((counts, self.output[-3000:], self.complaints[-3000:]))


def try_client(kind: ClientKind, binaries: Path, site: Site) -> Trial:
    """Run the client behind a proxy, without a way to other machines and without settings of whoever runs it."""
    with RecordingProxy(site.url) as proxy:
        program, *arguments = kind.command(replace(site, url=proxy.url))
        done = subprocess.run(
            [str(binaries / program), *arguments],
            cwd=ROOT,
            env=surroundings(os.environ, kind, binaries, site),
            capture_output=True,
            text=True,
            timeout=CLIENT_S,
            check=False,
        )
    return Trial(done.returncode, done.stdout, done.stderr, proxy.exchanges)


def surroundings(ours: Mapping[str, str], kind: ClientKind, binaries: Path, site: Site) -> dict[str, str]:
    """The client's variables: ours, less those that are meant for some client, and what keeps it on this machine."""
    kept = {name: value for name, value in ours.items() if not OTHERS.fullmatch(name)}
    own = {"PATH": f"{binaries}:{ours['PATH']}", "HF_HOME": str(site.scratch / "hub"), "OPENAI_API_KEY": "unused"}
    hub = {} if kind.name == "aiperf" else {"HF_HUB_OFFLINE": "1"}  # with it, aiperf takes a folder for a hub's name
    return kept | QUIET | OFFLINE | hub | own
