"""Hours in minutes: clients of all kinds at once, on a server with far too little memory for them.

    python -m benchmarks.soak --minutes 30                 # the embedded model
    python -m benchmarks.soak --minutes 30 --parrot        # a runner without a model, behind the same server

Some clients read their answers whole, some streamed; others go away in every phase, read slowly, send what must be
refused, or come without a key. Every answer that comes whole is compared, to the bit, with what the request yields
alone. Meanwhile the server's memory, threads and file descriptors are watched, and afterwards nothing may be left of
anybody. Prints one JSON object; exits with 1 if there is a fault.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.local_server import LocalServer, read_counters
from benchmarks.soak_clients import Client, Tally
from benchmarks.soak_queries import queries
from everystop.observe.history import RECENT_STEPS, ROW_BYTES, STEP_BYTES

ADMIN = "soak-admin"
KEYS = {"gold": "soak-gold-1", "silver": "soak-silver-1", "bronze": "soak-bronze-1"}
MODEL_OPTIONS = (
    "--max-num-seqs", "12", "--max-num-batched-tokens", "128", "--max-model-len", "768", "--kv-cache-memory", "30MiB",
    "--admission", "greedy", "--explain-history", "100",
)  # fmt: skip
PARROT = (sys.executable, "-m", "tests.soak.parrot_process")
WARM_UP_SHARE = 0.3
FIRST_CROWD_SHARE, LEAST_FIRST_CROWD_S = 1 / 30, 5.0
STEP_RECORD_BYTES = STEP_BYTES + 12 * ROW_BYTES  # of a step that all slots take part in
MOST_GROWTH_BYTES = 16 << 20
MIB = 1 << 20


@dataclass(frozen=True)
class Look:
    """What the server's process holds at some time."""

    at_s: float
    rss_bytes: int
    num_threads: int
    num_descriptors: int
    num_steps: int = 0

    def beyond(self, other: Look) -> dict[str, tuple[int, int]]:
        """What there is more of than there was, before and now."""
        threads, descriptors = (other.num_threads, self.num_threads), (other.num_descriptors, self.num_descriptors)
        pairs = {"threads": threads, "descriptors": descriptors}
        return {name: pair for name, pair in pairs.items() if pair[1] > pair[0]}

    @classmethod
    def at(cls, pid: int, num_steps: int = 0) -> Look:
        """Now, after so many steps."""
        status = Path(f"/proc/{pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        rss = int(fields["VmRSS"].split()[0]) * 1024
        return cls(time.monotonic(), rss, int(fields["Threads"]), len(os.listdir(f"/proc/{pid}/fd")), num_steps)


@dataclass(frozen=True)
class Result:
    """What came of it; `faults` is empty where all is well."""

    minutes: float
    counts: dict[str, int]
    faults: list[str]
    num_preemptions: int
    rss_mib: tuple[float, ...]  # in the course of the run, and at the end
    rss_mib_per_minute: float
    num_steps: tuple[int, int]  # when memory begins to be watched, and in all; the last 30,000 are kept in memory
    num_threads: tuple[int, int]
    num_descriptors: tuple[int, int]


class Soak:
    """One run against a server that has just been started."""

    def __init__(self, server: LocalServer, *, minutes: float, num_clients: int, seed: int, is_parrot: bool) -> None:
        self._server = server
        self._minutes = minutes
        self._num_clients = num_clients
        self._seed = seed
        self._queries = queries(60, seed, max_prompt_words=30 if is_parrot else 60, only_text=is_parrot)
        self._tally = Tally()
        self._looks: list[Look] = []

    def run(self) -> Result:
        """The sequential run, the crowd, the sequential run again; then what is left."""
        alone = self._client(0)
        answers = [alone.ask(query) for query in self._queries]
        first_s = max(LEAST_FIRST_CROWD_S, 60 * self._minutes * FIRST_CROWD_SHARE)
        self._crowd(answers, first_s)  # until then threads are made as they are needed
        before, counters = self._wait_until_nothing_is_left(None), self._counters()
        self._crowd(answers, 60 * self._minutes)
        after = self._wait_until_nothing_is_left(before)
        for query, answer in zip(self._queries, answers, strict=True):
            if (given := alone.ask(query)) != answer:
                self._tally.fault(f"after all, {query} yields {given}, and before {answer}")
        self._check_counters(counters)
        return self._result(before, after)

    def _client(self, number: int) -> Client:
        rng = random.Random(f"{self._seed}:{number}")
        return Client(self._server.url, list(KEYS.values()), self._tally, rng)

    def _crowd(self, answers: list[Any], duration_s: float) -> None:
        self._looks.clear()
        is_over = threading.Event()
        threads = [
            threading.Thread(target=self._client(i).run, args=(self._queries, answers, is_over))
            for i in range(1, self._num_clients + 1)
        ]
        for thread in threads:
            thread.start()
        end_s = time.monotonic() + duration_s
        while time.monotonic() < end_s:
            self._looks.append(Look.at(self._server.pid, int(self._counters()["steps"])))
            time.sleep(min(1.0, max(0.0, end_s - time.monotonic())))
        is_over.set()
        for thread in threads:
            thread.join(180)
        if any(thread.is_alive() for thread in threads):
            self._tally.fault("a client hangs")

    def _counters(self) -> dict[str, float]:
        return read_counters(self._metrics())

    def _metrics(self) -> str:
        headers = {"Authorization": f"Bearer {ADMIN}"}
        with urllib.request.urlopen(urllib.request.Request(f"{self._server.url}/metrics", headers=headers)) as answer:
            return str(answer.read().decode())

    def _wait_until_nothing_is_left(self, before: Look | None) -> Look:
        """Gauges at zero, descriptors and threads as before; what is not so after 30 s is a fault."""
        end_s = time.monotonic() + 30
        while True:
            time.sleep(0.5)
            look, counters = Look.at(self._server.pid), self._counters()
            gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            left = {name: counters[name] for name in gauges if counters[name]}
            grown = {} if before is None else look.beyond(before)
            if not left and not grown:
                return look
            if time.monotonic() > end_s:
                self._tally.fault(f"left over: {left}, more than before: {grown}")
                return look

    def _check_counters(self, before: dict[str, float]) -> None:
        """Nobody was told of more than was generated, and whoever came has ended."""
        after = self._counters()
        for name, value in before.items():
            is_gauge = name.startswith(("num_requests", "kv_cache", "tenant_num", "step_target"))
            if after.get(name, -1.0) < value and not is_gauge:
                self._tally.fault(f"the counter {name} fell from {value} to {after.get(name)}")
        counts = self._tally.counts
        for name, least in (("generation_tokens", "compared tokens"), ("request_success", "compared sequences")):
            if after[name] - before[name] < counts[least]:
                self._tally.fault(f"{name} grew by {after[name] - before[name]}, but there were {counts[least]}")

    def _result(self, before: Look, after: Look) -> Result:
        warm = warm_part(self._looks)
        return Result(
            minutes=self._minutes,
            counts=dict(sorted(self._tally.counts.items())),
            faults=self._tally.faults,
            num_preemptions=int(self._counters()["num_preemptions"]),
            rss_mib=tuple(round(look.rss_bytes / MIB, 1) for look in (*course(self._looks, 20), after)),
            rss_mib_per_minute=round(slope_per_minute(warm), 3),
            num_steps=(warm[0].num_steps, warm[-1].num_steps),
            num_threads=(before.num_threads, after.num_threads),
            num_descriptors=(before.num_descriptors, after.num_descriptors),
        )


def course(looks: list[Look], num: int) -> list[Look]:
    """At most so many of them, evenly spread."""
    return looks[:: -(-len(looks) // num)]


def warm_part(looks: list[Look]) -> list[Look]:
    """Without the first share, and from when the steps that the server keeps in memory are as many as they get, unless
    the run ends before.
    """
    looks = looks[int(len(looks) * WARM_UP_SHARE) :]
    return [look for look in looks if look.num_steps >= RECENT_STEPS] or looks


def slope_per_minute(looks: list[Look]) -> float:
    """Of the least squares line through the resident memory, in MiB a minute."""
    mean_s = sum(look.at_s for look in looks) / len(looks)
    mean_bytes = sum(look.rss_bytes for look in looks) / len(looks)
    spread = sum((look.at_s - mean_s) ** 2 for look in looks)
    if not spread:
        return 0.0
    rise = sum((look.at_s - mean_s) * (look.rss_bytes - mean_bytes) for look in looks)
    return rise / spread * 60 / MIB


def faults_of(result: Result) -> list[str]:
    """All that must not be: what was seen, and what makes the run worth nothing."""
    found = list(result.faults)
    first, last = (min(num, RECENT_STEPS) for num in result.num_steps)
    most_mib = (MOST_GROWTH_BYTES + (last - first) * STEP_RECORD_BYTES) / MIB
    if result.rss_mib_per_minute * result.minutes > most_mib and result.rss_mib_per_minute > 0.5:
        found.append(f"memory grows by {result.rss_mib_per_minute} MiB a minute")
    if not result.num_preemptions:
        found.append("nobody was preempted")
    if result.counts.get("compared answers", 0) < 20 * result.minutes:
        found.append("hardly any answer was compared")
    return found


def write_tenants(folder: str) -> Path:
    """A file with three tenants and their keys."""
    path = Path(folder) / "tenants.toml"
    path.write_text("".join(f'[tenant.{name}]\nkeys = ["{key}"]\n' for name, key in KEYS.items()))
    return path


def soak(*, minutes: float, num_clients: int = 24, seed: int = 1, is_parrot: bool = False) -> Result:
    """Start a server, run, and end it; its exit code after a drain must be 0."""
    with tempfile.TemporaryDirectory() as folder:
        tenants = str(write_tenants(folder))
        options = ["--tenants", tenants, "--admin-key", ADMIN, *(() if is_parrot else MODEL_OPTIONS)]
        command = {"command": PARROT} if is_parrot else {}
        with LocalServer("smollm2", options, **command) as server:
            result = Soak(server, minutes=minutes, num_clients=num_clients, seed=seed, is_parrot=is_parrot).run()
        if server.exit_code != 0:
            result.faults.append(f"the server ended with {server.exit_code}: {server.last_words[-500:]}")
    return result


def main() -> int:
    """Print the result; 1 if there is a fault."""
    parser = argparse.ArgumentParser(description="many clients of all kinds at once, and what is left of them")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long the crowd stays")
    parser.add_argument("--clients", type=int, default=24, help="clients at a time")
    parser.add_argument("--seed", type=int, default=1, help="of the requests and of what clients do")
    parser.add_argument("--parrot", action="store_true", help="a runner that repeats its prompts instead of a model")
    arguments = parser.parse_args()
    result = soak(
        minutes=arguments.minutes, num_clients=arguments.clients, seed=arguments.seed, is_parrot=arguments.parrot
    )
    found = faults_of(result)
    print(json.dumps(asdict(result) | {"faults": found}, indent=2, ensure_ascii=False))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
