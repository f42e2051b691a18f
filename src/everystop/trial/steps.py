"""What a step of so many decoding rows costs, by part and thread: the ledgers of a server that does nothing else.

The server runs in a process of its own, as anybody's does. As many clients as rows stream an answer each; between two
looks at the server's counters every step has exactly these rows, which the counters themselves prove.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from everystop.core.errors import EverystopError
from everystop.trial.crowd import Crowd, requests_of
from everystop.trial.own_server import Counters, OwnServer, Thread

TEAM = "everystop-team"
WARM_UP = 20  # steps after the last prompt has been computed
IDLE_TIMEOUT_S = 60.0
LEDGER, DELIVERY = "everystop_step_part_seconds_total", "everystop_delivery_part_seconds_total"
NATIVE_CPU = "everystop_step_native_cpu_seconds_total"


class StepsMixed(EverystopError):
    """Steps had other rows than they should."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """Processor time of one step in milliseconds: of the native call, of the event loop's thread, of all others in the
    server, and of the clients, who are no part of it.
    """

    native_ms: float
    event_loop_ms: float
    others_ms: float
    clients_ms: float

    @property
    def server_ms(self) -> float:
        """All of the server's."""
        return self.native_ms + self.event_loop_ms + self.others_ms

    @property
    def outside_share(self) -> float:
        """The share of the server's that is not in the native call."""
        return (self.event_loop_ms + self.others_ms) / self.server_ms if self.server_ms else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Means of `num_steps` steps of `num_rows` rows: milliseconds by part, of the engine's thread, which sum to the
    step, and of the event loop's, meanwhile; `cpu` is processor time.
    """

    num_rows: int
    num_steps: int
    first_context: int
    engine_ms: dict[str, float]
    event_loop_ms: dict[str, float]
    cpu: Cpu

    @property
    def step_ms(self) -> float:
        """The whole step."""
        return sum(self.engine_ms.values())

    @property
    def gap_ms(self) -> float:
        """From the end of a native call to the beginning of the next."""
        return self.step_ms - self.engine_ms["native"]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        shares = {"gap_share": self.gap_ms / self.step_ms, "cpu_outside_share": self.cpu.outside_share}
        return asdict(self) | {"step_ms": self.step_ms, "gap_ms": self.gap_ms, **shares}


@dataclass(frozen=True, slots=True)
class Look:
    """The server's counters, and its threads and the clients' processor time at the moment `now_ns`, close by."""

    counters: Counters
    threads: dict[int, Thread]
    clients_ns: int
    now_ns: int


class Growth:
    """What lies between two looks at a server."""

    def __init__(self, before: Look, after: Look) -> None:
        self._before = before
        self._after = after
        self.num_steps = round(self.of("everystop_steps_total"))

    def of(self, name: str, labels: str = "") -> float:
        """What a counter has grown by."""
        key = name, labels
        return self._after.counters.get(key, 0.0) - self._before.counters.get(key, 0.0)

    def by_label(self, name: str) -> dict[str, float]:
        """The same for each value of its one label."""
        labels = [text for family, text in self._after.counters if family == name]
        return {text.partition('"')[2].rstrip('"'): self.of(name, text) for text in labels}

    def check_rows(self, num_rows: int) -> None:
        """Raise StepsMixed unless every step had so many decoding rows and no others."""
        slots = self.by_label("everystop_slot_steps_total")
        num_decodes, num_idle = round(slots.pop("decode", 0)), slots.pop("idle", 0)
        num_others = round(sum(slots.values()))
        if not self.num_steps or num_others or num_decodes != num_rows * self.num_steps:
            raise StepsMixed(
                f"{self.num_steps:,} steps should have had {num_rows:,} decoding rows each; they had {num_decodes:,}, "
                f"{num_others:,} others, and {num_idle:,.0f} idle slots in all; are there too few KV blocks?"
            )

    def ms_a_step(self, name: str) -> dict[str, float]:
        """Milliseconds a step of each part."""
        return {part: 1e3 * seconds / self.num_steps for part, seconds in self.by_label(name).items()}

    def cores(self, is_counted: Callable[[int, Thread], bool]) -> float:
        """Processor time of these threads, by the time that has passed."""
        before, after = self._before.threads, self._after.threads
        kept = [i for i, thread in after.items() if is_counted(i, thread)]
        cpu_ns = sum(after[i].cpu_ns - (before[i].cpu_ns if i in before else 0) for i in kept)
        return cpu_ns / (self._after.now_ns - self._before.now_ns)

    def client_cores(self) -> float:
        """The same of the clients."""
        return (self._after.clients_ns - self._before.clients_ns) / (self._after.now_ns - self._before.now_ns)


def step_cost(before: Look, after: Look, *, pid: int, num_rows: int, context: int) -> StepCost:
    """What lies between two looks at a server, whose event loop is the thread `pid`. Raises StepsMixed."""
    growth = Growth(before, after)
    growth.check_rows(num_rows)
    engine_ms = growth.ms_a_step(LEDGER)
    step_ms = sum(engine_ms.values())
    own_native_ms = 1e3 * growth.of(NATIVE_CPU) / growth.num_steps
    return StepCost(
        num_rows=num_rows,
        num_steps=growth.num_steps,
        first_context=context,
        engine_ms=engine_ms,
        event_loop_ms=growth.ms_a_step(DELIVERY),
        cpu=Cpu(
            native_ms=growth.cores(lambda _, thread: thread.name == TEAM) * step_ms + own_native_ms,
            event_loop_ms=growth.cores(lambda i, _: i == pid) * step_ms,
            others_ms=growth.cores(lambda i, thread: i != pid and thread.name != TEAM) * step_ms - own_native_ms,
            clients_ms=growth.client_cores() * step_ms,
        ),
    )


async def measure(
    server: OwnServer, num_rows: int, *, num_steps: int, context: int, seed: int = 0, num_spare: int | None = None
) -> StepCost:
    """Have a server decode so many rows for so many steps, and say what a step cost. Answers are `num_spare` tokens
    longer, `num_steps` unless said, so that no client is done before the counters are read.

    Raises StepsMixed, CrowdFailed and ServerFailed.
    """
    num_spare = num_steps if num_spare is None else num_spare
    crowd = Crowd(requests_of(num_rows, context, WARM_UP + num_steps + num_spare, seed))

    async def look(*, is_last: bool) -> Look:
        """Reading the counters takes the server's time, which is not counted."""
        moment = server.threads(), time.thread_time_ns(), time.monotonic_ns()
        counters = await asyncio.to_thread(server.counters)
        if not is_last:
            moment = server.threads(), time.thread_time_ns(), time.monotonic_ns()
        return Look(counters, *moment)

    try:
        await crowd.connect(*server.address)
        await crowd.advance(WARM_UP)
        before = await look(is_last=False)
        await crowd.advance(num_steps)
        after = await look(is_last=True)
    finally:
        crowd.leave()
    await _until_idle(server)
    return step_cost(before, after, pid=server.pid, num_rows=num_rows, context=context)


async def _until_idle(server: OwnServer) -> None:
    """The next measurement begins when nobody is left of this one."""
    end_s = time.monotonic() + IDLE_TIMEOUT_S
    while time.monotonic() < end_s:
        counters = await asyncio.to_thread(server.counters)
        if not any(counters[f"everystop_num_requests_{state}", ""] for state in ("running", "waiting")):
            return
        await asyncio.sleep(0.02)
