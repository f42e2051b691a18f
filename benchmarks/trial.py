"""One run of a workload of several tenants: what the clients saw, and what the scheduler did.

A stage takes a workload and flags of `serve`. This one is a server of this checkout; `virtual` has the other. The
events of a server are made again from its record, so they are those of the run itself.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from benchmarks.local_server import LocalServer
from everystop.cli import settings
from everystop.config import Config
from everystop.core.events import ArrivalEvent, Event
from everystop.sim.record import Record
from everystop.sim.replay import recorded_events
from everystop.sim.workloads import Dice, Kind, Workload, burst, in_order_of_time
from everystop.trial.http_client import Target
from everystop.trial.http_load import LoadRun, run_load

HEADER = "x-tenant"
WARM_UP = Kind(prompt=(20, 40), output=(8, 16))


@dataclass(frozen=True, slots=True)
class Trial:
    """What a run was. `events` are the scheduler's, with the names of tenants, and empty unless asked for."""

    run: LoadRun
    num_kv_tokens: int
    events: list[Event] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Tenancy:
    """The tenants that a server is told of: their weights, and how many requests some of them may run at a time."""

    weights: Mapping[str, float]
    max_running: Mapping[str, int] = field(default_factory=dict)

    def write(self, folder: Path) -> list[str]:
        """Write the file; returns the flags that name it."""
        lines = [f'header = "{HEADER}"']
        for name, weight in self.weights.items():
            lines += [f"[tenant.{name}]", f"weight = {weight:g}"]
            if name in self.max_running:
                lines.append(f"max_running = {self.max_running[name]}")
        path = folder / "tenants.toml"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return ["--tenants", str(path)]


class Stage(Protocol):
    """Where a workload is run."""

    def play(
        self,
        workload: Workload,
        options: Sequence[str],
        *,
        tenancy: Tenancy | None = None,
        stop_s: float | None = None,
        wants_events: bool = False,
    ) -> Trial:
        """Run the workload on a fresh server with these flags, until `stop_s` or until all is done."""
        ...


class RealStage:
    """A server of this checkout, a fresh one for each run; all of them keep a record, so that none is slower for it."""

    def __init__(self, model: str) -> None:
        self._model = model

    def play(
        self,
        workload: Workload,
        options: Sequence[str],
        *,
        tenancy: Tenancy | None = None,
        stop_s: float | None = None,
        wants_events: bool = False,
    ) -> Trial:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "record.gz"
            flags = [*options, *(tenancy.write(Path(folder)) if tenancy else ()), "--record", str(path)]
            with LocalServer(self._model, flags) as server:
                run_load(
                    in_order_of_time("warm-up", burst(Dice("warm-up", 1), WARM_UP, "", 16)), Target(url=server.url)
                )
                server.wait_idle()
                run = run_load(workload, Target(url=server.url, stop_s=stop_s, tenant_header=HEADER, timeout_s=1200.0))
                server.wait_idle(60)
            kv = Record.read(path).kv
            names = list(tenancy.weights) if tenancy else []
            events = [_named(event, names) for event in recorded_events(path)] if wants_events else []
            return Trial(run, kv["num_blocks"] * kv["block_size"], events)


def _named(event: Event, names: Sequence[str]) -> Event:
    """A record numbers the tenants, those of the file first and in its order."""
    if isinstance(event, ArrivalEvent) and int(event.tenant) < len(names):
        return event._replace(tenant=names[int(event.tenant)])
    return event


def read_options(options: Sequence[str]) -> Config:
    """The configuration that these flags of `serve` make, whatever the environment says."""
    parser = argparse.ArgumentParser()
    settings.add_options(parser)
    return settings.make_config(parser.parse_args(list(options)), environment={})
