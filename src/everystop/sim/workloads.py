"""Workloads: which prompts are sent when, and how long their answers are; one seed gives the same bytes everywhere.

Prompts are token ids, so that no server's tokenizer is part of the measurement, and answers have a fixed length
(`ignore_eos`), so that every server does the same work. Unless a workload says otherwise no two prompts begin with the
same token: a prefix cache finds nothing. Random numbers come from SHA-256, since the standard library promises the
same sequence across versions for few of its own methods.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from everystop.core.durations import MAX_TARGET_MS, MIN_TARGET_MS
from everystop.core.errors import EverystopError

DEFAULT_SEED = 7
MAX_CLIENTS = 100_000
FIRST_ID, LAST_ID = 300, 20_000  # neither control tokens nor single bytes in the usual vocabularies


class WorkloadError(EverystopError):
    """A workload that cannot be read; the message names the line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request; `at_s` is when it is sent, in seconds from the start, or None: when a client is free. `tenant` is
    who sends it, "" for nobody in particular; the targets are the request's own, for the policy `deadline`.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    group: str = "all"
    at_s: float | None = None
    ignore_eos: bool = True
    tenant: str = ""
    ttft_target_ms: float | None = None
    itl_target_ms: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data; nobody in particular is left out, and so are targets that are not there."""
        plain = asdict(self)
        if not self.tenant:
            del plain["tenant"]
        for name in ("ttft_target_ms", "itl_target_ms"):
            if plain[name] is None:
                del plain[name]
        return plain


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs in their order, and how many clients take those without a time, each one at a time."""

    name: str
    num_clients: int
    jobs: tuple[Job, ...]

    def lines(self) -> Iterable[str]:
        """JSON lines: a header with name and number of clients, then one line a job."""
        yield json.dumps({"workload": self.name, "num_clients": self.num_clients})
        for job in self.jobs:
            yield json.dumps(job.to_dict())


def read_workload(lines: Iterable[str]) -> Workload:
    """The inverse of `Workload.lines`; raises WorkloadError, naming the line, for what is none."""
    workload: Workload | None = None
    jobs = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            if workload is None:
                workload = _read_header(_decoded(line))
            else:
                jobs.append(_read_job(_decoded(line)))
        except ValueError as error:
            raise WorkloadError(f"line {number}: {error}") from None
    if workload is None or not jobs:
        raise WorkloadError("no requests: the first line names the workload, and each further line is one request")
    if not workload.num_clients and any(job.at_s is None for job in jobs):
        raise WorkloadError("num_clients is 0, but a request has no at_s; give it a time, or a client to send it")
    return Workload(workload.name, workload.num_clients, tuple(jobs))


def _decoded(line: str) -> Any:
    """The value of a line of JSON; raises ValueError."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("not a request: lists or objects are nested too deeply; a prompt is one flat list") from None


def _read_header(plain: Any) -> Workload:
    """A workload without jobs; raises ValueError."""
    if not isinstance(plain, dict) or set(plain) != {"workload", "num_clients"}:
        raise ValueError('the first line must be {"workload": NAME, "num_clients": N}')
    if not isinstance(plain["workload"], str):
        raise ValueError(f"workload is {plain['workload']!r}; it must be text")
    num_clients = _whole(plain, "num_clients", 0)
    if num_clients > MAX_CLIENTS:
        raise ValueError(f"num_clients is {num_clients:,}; at most {MAX_CLIENTS:,} can send; write a smaller number")
    return Workload(plain["workload"], num_clients, ())


def _read_job(plain: Any) -> Job:
    """One request; raises ValueError for what is wrong with it."""
    if not isinstance(plain, dict) or not isinstance(plain.get("prompt"), list):
        raise ValueError("a request must be a JSON object with a prompt, a list of token ids")
    known = [field.name for field in fields(Job)]
    if unknown := [name for name in plain if name not in known]:
        raise ValueError(f"unknown field {unknown[0]!r}; a request has {', '.join(known)}")
    job = Job(**plain | {"prompt": tuple(plain["prompt"]), "max_tokens": _whole(plain, "max_tokens", 1)})
    if not job.prompt or not all(type(token) is int and token >= 0 for token in job.prompt):
        raise ValueError("the prompt must hold at least one token id, all of them whole numbers from 0")
    if type(job.ignore_eos) is not bool or type(job.group) is not str or type(job.tenant) is not str:
        raise ValueError("ignore_eos must be true or false, group and tenant text")
    for name, least in (("at_s", 0.0), ("ttft_target_ms", MIN_TARGET_MS), ("itl_target_ms", MIN_TARGET_MS)):
        value = getattr(job, name)
        if value is not None and (type(value) not in (int, float) or not least <= value <= MAX_TARGET_MS):
            raise ValueError(f"{name} is {value!r}; it must be a number from {least:g} to {MAX_TARGET_MS:,}")
    return job


def _whole(plain: dict[str, Any], name: str, least: int) -> int:
    value = plain.get(name)
    if type(value) is not int or value < least:
        raise ValueError(f"{name} is {value!r}; it must be a whole number from {least}")
    return value


class Dice:
    """Random numbers from SHA-256 over a name, a seed and a counter, and prompts whose first tokens all differ."""

    def __init__(self, name: str, seed: int) -> None:
        self._key = f"{name}:{seed}:".encode()
        self._counter = 0
        self._first_ids: set[int] = set()

    def fraction(self) -> float:
        """A number in [0, 1)."""
        digest = hashlib.sha256(self._key + str(self._counter).encode()).digest()
        self._counter += 1
        return (int.from_bytes(digest[:8], "big") >> 11) / (1 << 53)

    def between(self, low: int, high: int) -> int:
        """An integer in [low, high]."""
        return low + int(self.fraction() * (high - low + 1))

    def exponential(self, mean: float) -> float:
        """The gap before the next of events that come independently, in units of `mean`."""
        return -mean * math.log(1.0 - self.fraction())

    def log_normal(self, low: int, high: int) -> int:
        """An integer in [low, high] around the geometric mean; bounds lie at two deviations, what is outside is drawn
        again.
        """
        mu, sigma = (math.log(low) + math.log(high)) / 2, (math.log(high) - math.log(low)) / 4
        while True:
            bell = sum(self.fraction() for _ in range(12)) - 6.0
            if low <= (value := round(math.exp(mu + sigma * bell))) <= high:
                return value

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        """Token ids; the first differs from that of every other prompt of these dice."""
        while (first := self.between(FIRST_ID, LAST_ID)) in self._first_ids:
            pass
        self._first_ids.add(first)
        return (first, *(self.between(FIRST_ID, LAST_ID) for _ in range(num_tokens - 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Requests of one kind: the shortest and the longest prompt and answer, in tokens; lengths are drawn evenly."""

    prompt: tuple[int, int]
    output: tuple[int, int]

    @property
    def mean_cost(self) -> float:
        """Mean weighted tokens of a request: 1 for each of the prompt, 2 for each of the answer."""
        return sum(self.prompt) / 2 + sum(self.output)

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return self.prompt[1] + self.output[1]

    def job(self, dice: Dice, tenant: str, at_s: float) -> Job:
        """One request of a tenant, whose name is also its group's."""
        prompt = dice.prompt(dice.between(*self.prompt))
        return Job(prompt=prompt, max_tokens=dice.between(*self.output), group=tenant, at_s=at_s, tenant=tenant)


def burst(dice: Dice, kind: Kind, tenant: str, num: int) -> Iterator[Job]:
    """`num` requests of a tenant at once, at the start."""
    return (kind.job(dice, tenant, 0.0) for _ in range(num))


def poisson(dice: Dice, kind: Kind, tenant: str, per_s: float, seconds: float) -> Iterator[Job]:
    """A tenant's requests, independent of each other, at a mean rate until `seconds`; times in whole microseconds."""
    at_s = dice.exponential(1 / per_s)
    while at_s < seconds:
        yield kind.job(dice, tenant, round(at_s, 6))
        at_s += dice.exponential(1 / per_s)


def in_order_of_time(name: str, *streams: Iterable[Job]) -> Workload:
    """An open loop of several tenants' requests; of those at the same time each stream sends one in turn."""
    jobs = sorted(
        (job.at_s or 0.0, turn, number, job) for number, stream in enumerate(streams) for turn, job in enumerate(stream)
    )
    return Workload(name, 0, tuple(job for *_, job in jobs))


def straggler(dice: Dice) -> Workload:
    """64 clients at once; the first of each 16 wants 1,000 tokens, the others 20: a batch of 16 waits for its first."""
    jobs = []
    for i in range(64):
        group, max_tokens = ("long", 1000) if i % 16 == 0 else ("short", 20)
        jobs.append(Job(prompt=dice.prompt(dice.between(20, 28)), max_tokens=max_tokens, group=group))
    return Workload("straggler", 64, tuple(jobs))


def chat(dice: Dice) -> Workload:
    """32 clients with 4 requests each, prompts uniform and answers log-normal between 40 and 200 tokens."""
    jobs = (Job(prompt=dice.prompt(dice.between(40, 200)), max_tokens=dice.log_normal(40, 200)) for _ in range(128))
    return Workload("chat", 32, tuple(jobs))


def uniform(dice: Dice) -> Workload:
    """64 requests of equal lengths from 32 clients: static batching loses next to nothing."""
    return Workload("uniform", 32, tuple(Job(prompt=dice.prompt(64), max_tokens=128) for _ in range(64)))


def single(dice: Dice) -> Workload:
    """One client, one request at a time."""
    return Workload("single", 1, tuple(Job(prompt=dice.prompt(64), max_tokens=128) for _ in range(8)))


def prefill(dice: Dice) -> Workload:
    """Prompts of about 1,000 tokens from 8 clients, next to no answer."""
    return Workload(
        "prefill", 8, tuple(Job(prompt=dice.prompt(dice.between(950, 1050)), max_tokens=4) for _ in range(32))
    )


def shared(dice: Dice) -> Workload:
    """64 requests from 32 clients with the same first 512 tokens and 16 to 64 of their own."""
    prefix = dice.prompt(512)
    jobs = (Job(prompt=prefix + dice.prompt(dice.between(16, 64)), max_tokens=32) for _ in range(64))
    return Workload("shared", 32, tuple(jobs))


def calm(dice: Dice) -> Workload:
    """16 clients that chat, answers of about 200 tokens: the background of `stall`, alone."""
    return Workload("calm", 16, _chatter(dice))


def stall(dice: Dice) -> Workload:
    """`calm`, and every 2 seconds somebody else's prompt of 1,800 tokens: do the chats stand still?"""
    chatter = _chatter(dice)
    intruders = (Job(prompt=dice.prompt(1800), max_tokens=8, group="intruder", at_s=1.0 + 2.0 * i) for i in range(5))
    return Workload("stall", 16, (*chatter, *intruders))


def _chatter(dice: Dice) -> tuple[Job, ...]:
    return tuple(Job(prompt=dice.prompt(64), max_tokens=dice.between(150, 250), group="chat") for _ in range(64))


MAKERS: dict[str, Callable[[Dice], Workload]] = {
    maker.__name__: maker for maker in (straggler, chat, uniform, single, prefill, shared, calm, stall)
}


def make_workload(name: str, seed: int = DEFAULT_SEED) -> Workload:
    """The workload of that name; another seed gives other prompts, and other lengths where these are drawn."""
    dice = Dice("calm" if name == "stall" else name, seed)  # the chats of `stall` are those of `calm`
    return MAKERS[name](dice)
