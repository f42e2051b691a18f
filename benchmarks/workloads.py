"""Workloads: which prompts arrive when and how long their answers are; the same seed makes the same workload.

`python benchmarks/workloads.py NAME` prints one as JSON lines. Prompts are token ids drawn at random, so no two share a
block unless the workload says so; answers have a fixed length (`ignore_eos`), so that every server does the same work.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass

FIRST_ID, LAST_ID = 300, 20_000  # plain tokens in every vocabulary of interest


@dataclass(frozen=True, slots=True)
class Job:
    """One request. `at_s` is its arrival in seconds in an open loop; closed loops take jobs in order."""

    prompt: tuple[int, ...]
    max_tokens: int
    group: str = "all"
    at_s: float | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs, and how many clients send them, each one at a time (None: every job at its own `at_s`)."""

    name: str
    num_clients: int | None
    jobs: tuple[Job, ...]


def straggler(rng: random.Random) -> Workload:
    """64 at once; one in 16 has a long answer. A static batch waits for it, a continuous one does not."""
    jobs = []
    for i in range(64):
        is_long = i % 16 == 1
        jobs.append(Job(_ids(rng, rng.randint(20, 28)), 1000 if is_long else 20, "long" if is_long else "short"))
    return Workload("straggler", 64, tuple(jobs))


def chat(rng: random.Random) -> Workload:
    """32 clients, 4 turns each of unrelated talk, lengths log-normal between 40 and 200 tokens."""
    jobs = [Job(_ids(rng, _log_normal(rng, 40, 200)), _log_normal(rng, 40, 200)) for _ in range(128)]
    return Workload("chat", 32, tuple(jobs))


def uniform(rng: random.Random) -> Workload:
    """Equal lengths, where static batching loses nothing."""
    return Workload("uniform", 32, tuple(Job(_ids(rng, 64), 128) for _ in range(64)))


def single(rng: random.Random) -> Workload:
    """One client, one request at a time."""
    return Workload("single", 1, tuple(Job(_ids(rng, 64), 128) for _ in range(8)))


def prefill(rng: random.Random) -> Workload:
    """Long prompts, next to no answer."""
    return Workload("prefill", 8, tuple(Job(_ids(rng, rng.randint(950, 1050)), 4) for _ in range(32)))


def shared(rng: random.Random) -> Workload:
    """64 requests with a common beginning of 512 tokens and an own end of at most 88, 32 of them at once."""
    common = _ids(rng, 512)
    return Workload("shared", 32, tuple(Job(common + _ids(rng, rng.randint(40, 88)), 32) for _ in range(64)))


def stall(rng: random.Random) -> Workload:
    """16 decoders, and a prompt of 4,000 tokens every second: how long do the decoders stand still?"""
    decoders = [Job(_ids(rng, 64), 400, "decoder", 0.0) for _ in range(16)]
    prompts = [Job(_ids(rng, 4000), 4, "prompt", 1.0 + i) for i in range(4)]
    return Workload("stall", None, tuple(decoders + prompts))


def calm(rng: random.Random) -> Workload:
    """The decoders of `stall` alone."""
    return Workload("calm", None, tuple(Job(_ids(rng, 64), 400, "decoder", 0.0) for _ in range(16)))


WORKLOADS: dict[str, Callable[[random.Random], Workload]] = {
    make.__name__: make for make in (straggler, chat, uniform, single, prefill, shared, stall, calm)
}


def make_workload(name: str, seed: int = 7) -> Workload:
    """The workload of that name; the same for the same seed on every machine."""
    return WORKLOADS[name](random.Random(f"{name}:{seed}"))


def _ids(rng: random.Random, num: int) -> tuple[int, ...]:
    return tuple(rng.randrange(FIRST_ID, LAST_ID) for _ in range(num))


def _log_normal(rng: random.Random, low: int, high: int) -> int:
    """Most values near the geometric mean; 95 % would lie inside the bounds, the rest is drawn again."""
    mu, sigma = (math.log(low) + math.log(high)) / 2, (math.log(high) - math.log(low)) / 4
    while not low <= (value := round(rng.lognormvariate(mu, sigma))) <= high:
        pass
    return value


def main() -> None:
    """Print a workload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=WORKLOADS)
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    for job in make_workload(arguments.name, arguments.seed).jobs:
        print(json.dumps(asdict(job)))


if __name__ == "__main__":
    main()
