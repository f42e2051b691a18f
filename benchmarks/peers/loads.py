"""What is measured: which requests are sent by how many clients, made anew for each turn so that no cache is warm.

The workloads are the project's own (`everystop.sim.workloads`); the three others are sweeps over one number each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.peers.peer import DEFAULT_CONTEXT, Crowd
from benchmarks.straggler import equal_answers
from everystop.sim.workloads import DEFAULT_SEED, Dice, Job, Workload, make_workload

WORKLOADS = {"single": 1, "chat": 32, "straggler": 32, "uniform": 32, "prefill": 32}
"""Workloads, and from how many clients each is sent."""

NUM_CLIENTS = (1, 2, 4, 8, 16, 32, 64)
NUM_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (128, 512, 1024, 2048, 4096, 8000)
NUM_COMPARED, NUM_CROWDING = 24, 32
ROWS_TOKENS, MANY_ROWS_TOKENS = 96, 192
CONTEXT_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One run: `kind` says what is asked, `name` which workload it is or at which number of the sweep."""

    kind: str
    name: str
    workload: Workload
    crowd: Crowd


def workload_tasks(names: Sequence[str], turn: int, limit: int | None) -> list[Task]:
    """The project's workloads; `limit` sends only the first so many requests."""
    tasks = []
    for name in names:
        made = make_workload(name, DEFAULT_SEED + turn)
        workload = Workload(name, WORKLOADS[name], made.jobs[:limit])
        tasks.append(Task(kind="workload", name=name, workload=workload, crowd=Crowd(num_clients=WORKLOADS[name])))
    return tasks


def client_tasks(counts: Sequence[int], turn: int, limit: int | None) -> list[Task]:
    """Equal requests, prompts and answers of 64 tokens, from one client and from many."""
    tasks = []
    for count in counts:
        dice = Dice(f"clients {count}", DEFAULT_SEED + turn)
        num_jobs = min(limit or 1 << 30, max(4, 2 * count))
        jobs = tuple(Job(prompt=dice.prompt(64), max_tokens=64) for _ in range(num_jobs))
        workload = Workload(f"clients {count}", count, jobs)
        tasks.append(Task(kind="clients", name=str(count), workload=workload, crowd=Crowd(num_clients=count)))
    return tasks


def context_tasks(lengths: Sequence[int], turn: int, limit: int | None) -> list[Task]:
    """One client, one prompt of each length twice; the answer tells what a token costs behind so many."""
    tasks = []
    crowd = Crowd(num_clients=1, max_context=max(DEFAULT_CONTEXT, max(lengths) + 2 * CONTEXT_TOKENS))
    for length in lengths:
        dice = Dice(f"context {length}", DEFAULT_SEED + turn)
        jobs = tuple(Job(prompt=dice.prompt(length), max_tokens=CONTEXT_TOKENS) for _ in range(min(limit or 2, 2)))
        tasks.append(Task(kind="context", name=str(length), workload=Workload("context", 1, jobs), crowd=crowd))
    return tasks


def row_tasks(counts: Sequence[int], turn: int, limit: int | None) -> list[Task]:
    """As many requests as rows, which decode together."""
    tasks = []
    for count in counts:
        tokens = ROWS_TOKENS if count <= NUM_CLIENTS[-1] else MANY_ROWS_TOKENS
        workload = equal_answers(count, tokens, seed=100 * (DEFAULT_SEED + turn) + count)
        tasks.append(Task(kind="rows", name=str(count), workload=workload, crowd=Crowd(num_clients=count)))
    return tasks


def answer_tasks(turn: int) -> list[Task]:
    """The same requests from one client, then, together with more, from many; on a fresh server each."""
    dice = Dice("answers", DEFAULT_SEED + turn)
    jobs = tuple(Job(prompt=dice.prompt(dice.between(40, 200)), max_tokens=48) for _ in range(NUM_CROWDING))
    crowd = Crowd(num_clients=NUM_CROWDING)
    alone = Workload("answers", 1, jobs[:NUM_COMPARED])
    return [
        Task(kind="answers", name="alone", workload=alone, crowd=crowd),
        Task(kind="answers", name="crowded", workload=Workload("answers", NUM_CROWDING, jobs), crowd=crowd),
    ]


def make_tasks(
    kind: str, turn: int, *, names: Sequence[str] = (), counts: Sequence[int] = (), limit: int | None = None
) -> list[Task]:
    """The tasks of a kind for one turn; all of it where no names or counts are given."""
    sweeps: Mapping[str, tuple[Callable[[Sequence[int], int, int | None], list[Task]], Sequence[int]]] = {
        "clients": (client_tasks, NUM_CLIENTS),
        "context": (context_tasks, CONTEXTS),
        "rows": (row_tasks, NUM_ROWS),
    }
    if kind == "workload":
        return workload_tasks(names or tuple(WORKLOADS), turn, limit)
    if kind == "answers":
        return answer_tasks(turn)
    make, all_counts = sweeps[kind]
    return make(counts or all_counts, turn, limit)


KINDS = ("workload", "clients", "context", "rows", "answers")
