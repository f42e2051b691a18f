"""Runs tasks on peers in turns: one server at a time, a fresh one for each turn, each run written down as it ends."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers import records
from benchmarks.peers.loads import Task
from benchmarks.peers.peer import Launch, Peer, PeerError, Place, Say, Setting
from benchmarks.peers.process import ServerProcess, busy_s, free_port
from benchmarks.peers.records import Record
from benchmarks.straggler import equal_answers, step_gap_ms
from everystop.trial.http_client import Target
from everystop.trial.http_load import LoadRun, run_load

WARM_UP_TOKENS, WARM_UP_CLIENTS, WARM_UP_SEED = 8, 8, 1
MAX_RUN_S = 900.0
TIMED = {
    "ttft_p50_ms": ("ttft_ms", "p50"),
    "ttft_p95_ms": ("ttft_ms", "p95"),
    "itl_p50_ms": ("itl_ms", "p50"),
    "itl_p99_ms": ("itl_ms", "p99"),
}


@dataclass(frozen=True, slots=True)
class Entrant:
    """A peer in a setting."""

    peer: Peer
    setting: Setting

    @property
    def label(self) -> str:
        """As tables and options name it."""
        return f"{self.peer.name}:{self.setting.name}"


@dataclass(slots=True)
class Session:
    """Tasks that the same server can take, one after another."""

    launch: Launch
    tasks: list[Task] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One call of `run`: where everything lies, and where the runs go."""

    place: Place
    out: Path
    say: Say
    common: Record = field(default_factory=dict)

    def turn(self, number: int, tasks: Iterable[tuple[Entrant, Task]]) -> None:
        """All tasks of a turn, entrant by entrant in the order given."""
        by_entrant: dict[str, tuple[Entrant, list[Task]]] = {}
        for entrant, task in tasks:
            by_entrant.setdefault(entrant.label, (entrant, []))[1].append(task)
        for entrant, mine in by_entrant.values():
            for session in self._sessions(entrant, mine):
                self._run_session(number, entrant, session)

    def _sessions(self, entrant: Entrant, tasks: Sequence[Task]) -> Iterator[Session]:
        """Tasks together that want the same server; two of the same requests never, for the second would be warm."""
        session: Session | None = None
        for task in tasks:
            launch = entrant.peer.launch(self.place, entrant.setting, task.crowd, 0)
            if session is None or launch != session.launch or task.kind == "answers":
                if session is not None:
                    yield session
                session = Session(launch)
            session.tasks.append(task)
        if session is not None:
            yield session

    def _run_session(self, turn: int, entrant: Entrant, session: Session) -> None:
        port = free_port()
        launch = entrant.peer.launch(self.place, entrant.setting, session.tasks[0].crowd, port)
        log = self.place.of(entrant.peer.name) / "logs" / f"{entrant.setting.name.replace(' ', '-')}.log"
        about = {
            "peer": entrant.peer.name,
            "setting": entrant.setting.name,
            "version": entrant.peer.version(self.place),
            "turn": turn,
            **self.common,
        }
        try:
            with ServerProcess(launch, port, log) as server:
                run_load(equal_answers(WARM_UP_CLIENTS, WARM_UP_TOKENS, WARM_UP_SEED), target_of(launch, server.url))
                for task in session.tasks:
                    figures = measure(server, launch, task)
                    record = {**about, "kind": task.kind, "name": task.name, "start_s": server.start_s}
                    records.append(self.out, {**record, "command": list(launch.command), "figures": figures})
                    self.say(f"{turn} {entrant.label} {task.kind} {task.name}: {in_words(figures)}")
        except (PeerError, OSError) as error:
            names = [task.name for task in session.tasks]
            failure = {**about, "kind": "failure", "name": session.tasks[0].kind, "tasks": names, "cause": str(error)}
            records.append(self.out, {**failure, "figures": {}})
            self.say(f"{turn} {entrant.label} FAILED: {error}")


def target_of(launch: Launch, url: str) -> Target:
    """How the load generator asks this server."""
    return Target(url=url, model=launch.model, extra=dict(launch.extra), max_run_s=MAX_RUN_S)


def measure(server: ServerProcess, launch: Launch, task: Task) -> dict[str, Any]:
    """Send one task's requests and sum up what its clients, the processor and the server itself tell."""
    load_average, began_s = os.getloadavg()[0], time.monotonic()
    all_s, server_s, own = busy_s(), server.cpu_s(), server.stats()
    run = run_load(task.workload, target_of(launch, server.url))
    passed_s = time.monotonic() - began_s
    all_s, server_s, own_after = busy_s() - all_s, server.cpu_s() - server_s, server.stats()
    figures = figures_of(run) | {
        "server_cpu_s": server_s,
        "generator_cpu_s": run.cpu_s,
        "load_average": load_average,
        "others_share": max(0.0, all_s - server_s - run.cpu_s) / (passed_s * (os.cpu_count() or 1)),
        "peak_bytes": server.peak_bytes(),
    }
    if own and own_after["steps"] > own["steps"]:
        front_s, step_s = (own_after[name] - own[name] for name in ("front_s", "step_s"))
        figures["front_share"] = front_s / (front_s + step_s)
    if task.kind == "rows":
        figures["step_ms"] = step_gap_ms(run)
    if task.kind == "answers":
        figures["answers"] = [record.text_hash for record in run.records]
    return figures


def figures_of(run: LoadRun) -> dict[str, Any]:
    """What clients saw, flat."""
    summary = run.summary()
    kept = ("requests", "errors", "exact_usage", "wall_s", "prompt_tokens", "output_tokens", "output_tok_s")
    figures = {name: summary[name] for name in (*kept, "total_tok_s", "events_per_token")}
    figures |= {name: summary[of][percent] for name, (of, percent) in TIMED.items()}
    if summary["errors"]:
        figures["first_error"] = next(record.error for record in run.records if record.error)
    return figures


def in_words(figures: dict[str, Any]) -> str:
    """One line about a run."""
    text = (
        f"{figures['output_tok_s']:,.0f} tok/s, {figures['wall_s']:.1f} s, {figures['events_per_token']:.2f} events a "
        f"token, TTFT p50 {figures['ttft_p50_ms']:,.0f} ms, ITL p50 {figures['itl_p50_ms']:.1f} ms, others took "
        f"{figures['others_share']:.0%} of the processors"
    )
    return f"{text}; {figures['errors']} ERRORS: {figures['first_error']}" if figures["errors"] else text


def machine() -> dict[str, Any]:
    """What the runs were taken on."""
    models = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "num_cpus": os.cpu_count(),
        "system": platform.release(),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
