"""What a peer is: how it is installed, in which settings it is run, how it is started, and what to say beside it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from everystop.core.errors import EverystopError

NUM_THREADS = 2
DEFAULT_CONTEXT = 2048
Say = Callable[[str], None]


class PeerError(EverystopError):
    """A peer that cannot be installed, started or measured; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Place:
    """The folder that everything lies in: an environment for each peer, and the weights in each one's format."""

    root: Path

    def of(self, peer: str) -> Path:
        """The folder of one peer."""
        return self.root / peer

    def python(self, peer: str) -> Path:
        """The interpreter of a peer's environment."""
        return self.of(peer) / "venv" / "bin" / "python"

    @property
    def weights(self) -> Path:
        """Where the weights lie."""
        return self.root / "weights"

    @property
    def hf(self) -> Path:
        """The dequantised weights as a Hugging Face folder, float32."""
        return self.weights / "hf"

    @property
    def w8a8(self) -> Path:
        """The same as int8 with a scale an output row, activations quantised a token (compressed-tensors)."""
        return self.weights / "hf-w8a8"

    def gguf(self, kind: str) -> Path:
        """The same as a GGUF file of that kind."""
        return self.weights / f"smollm2-{kind}.gguf"


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to run a peer: its name in tables, and what it is made of."""

    name: str
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """What a server is started for: clients at once, and the longest prompt and answer together, in tokens."""

    num_clients: int
    max_context: int = DEFAULT_CONTEXT


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How a server is started and asked; `environment` is added to this process's own.

    `ready_path` answers 200 once it serves; `stats_path`, where there is one, gives a JSON object of its own figures.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    ready_path: str = "/health"
    stats_path: str | None = None
    model: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    start_timeout_s: float = 180.0


class Peer(Protocol):
    """One server that is measured.

    With `is_swept` its settings are a sweep, of which the best for each workload is taken; without, each is a row of
    its own.
    """

    name: str
    title: str
    is_swept: bool
    settings: tuple[Setting, ...]
    remarks: tuple[str, ...]

    def install(self, place: Place, say: Say) -> None:
        """Make its environment and its weights, where they are not there yet; raises PeerError with the cause."""

    def fault(self, place: Place) -> str | None:
        """Why it cannot be started, or None."""

    def version(self, place: Place) -> str:
        """What is installed."""

    def launch(self, place: Place, setting: Setting, crowd: Crowd, port: int) -> Launch:
        """How to start it in that setting, for that many clients, on that port of the loopback."""


def first_cpus(num: int = NUM_THREADS) -> list[int]:
    """The first so many processors that this process may use."""
    return sorted(os.sched_getaffinity(0))[:num]
