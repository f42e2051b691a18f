"""Plays a workload in virtual time: the server's scheduler and step loop, a cost model in place of the model, and
clients whose records look like those of the load generator.
"""

from __future__ import annotations

import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from benchmarks.trial import Tenancy, Trial, read_options
from everystop.assembly import Capacity, build_scheduler, plans_by_time
from everystop.config import Config
from everystop.core.errors import RequestError
from everystop.core.events import Event, FinishEvent, StepEvent
from everystop.core.request import Request, SamplingParams
from everystop.core.scheduler import Scheduler
from everystop.core.step_time import UNKNOWN_STEP_TIMES, StepTimeModel
from everystop.engine.loop import StepLoop
from everystop.runner.simulated import SimulatedRunner
from everystop.sim.clock import Clock
from everystop.sim.cost import StepCost
from everystop.sim.workloads import Job, Workload
from everystop.trial.http_client import ClientRecord, Usage
from everystop.trial.http_load import LoadRun

NS_PER_S = 10**9


class VirtualStage:
    """The server's scheduler; a step takes what the cost model says, and the KV cache holds whatever may run."""

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost

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
            config = read_options([*options, *(tenancy.write(Path(folder)) if tenancy else ())])
            capacity = virtual_capacity(config)
            cost, step_times = self._cost, UNKNOWN_STEP_TIMES
            if plans_by_time(config) and isinstance(cost, StepTimeModel):
                step_times = cost
            scheduler = build_scheduler(config, capacity, step_times=step_times)
        clients = _Clients(workload, self._cost.request_ns)
        clients.serve(scheduler, self._cost, stop_s)
        return Trial(clients.run, capacity.num_tokens, clients.events if wants_events else [])


def virtual_capacity(config: Config) -> Capacity:
    """As many blocks as the longest requests need on all slots, which is what `serve` takes where memory allows."""
    if config.max_model_len is None or config.kv_cache_memory is not None:
        raise SystemExit("in virtual time the KV cache follows from --max-model-len; leave out --kv-cache-memory")
    if config.kv_cache_dtype != "auto":
        raise SystemExit("--kv-cache-dtype has no effect in virtual time; leave it out")
    num_blocks = config.max_num_seqs * -(-config.max_model_len // config.block_size)
    return Capacity(
        num_blocks=num_blocks, block_size=config.block_size, num_bytes=0, max_model_len=config.max_model_len
    )


class _Clients:
    """Sends timed jobs to a scheduler in virtual time and fills the records that real clients would have filled; every
    token comes to them `delay_ns` later.
    """

    def __init__(self, workload: Workload, delay_ns: float) -> None:
        if any(job.at_s is None for job in workload.jobs):
            raise SystemExit(f"{workload.name} has jobs without a time; in virtual time every job needs one")
        self.events: list[Event] = []
        self.run = LoadRun(workload.name, 0, [])
        self._coming = deque(workload.jobs)
        self._clock = Clock()
        self._delay_ns = delay_ns

    def serve(self, scheduler: Scheduler, cost: StepCost, stop_s: float | None) -> None:
        """Go on until all is done, or until `stop_s`, which cuts off the rest."""
        clock, coming = self._clock, self._coming
        loop = StepLoop(scheduler, SimulatedRunner(cost.plan_ns, clock.advance), lambda: clock.now_ns)
        stop_ns = sys.maxsize if stop_s is None else round(stop_s * NS_PER_S)
        while (coming or scheduler.has_work) and clock.now_ns < stop_ns:
            while coming and _time_ns(coming[0]) <= clock.now_ns:
                self._send(scheduler, coming.popleft())
            turn = loop.turn()
            self._note(turn.events)
            if turn.is_idle:
                wakes = [turn.wake_at_ns or stop_ns, _time_ns(coming[0]) if coming else stop_ns]
                clock.advance_to(min(wakes))
        for record in self.run.records:
            record.is_cut = record.end_s < 0

    def _send(self, scheduler: Scheduler, job: Job) -> None:
        request_id = len(self.run.records)
        record = ClientRecord(request_id, job.group, len(job.prompt), job.max_tokens, sent_s=job.at_s or 0.0)
        self.run.records.append(record)
        request = Request(
            request_id,
            job.prompt,
            SamplingParams(max_tokens=job.max_tokens),
            arrival_ns=_time_ns(job),
            tenant=job.tenant,
        )
        try:
            scheduler.add(request, request.arrival_ns)
        except RequestError as error:
            record.error, record.end_s = str(error), record.sent_s

    def _note(self, events: list[Event]) -> None:
        self.events += events
        for event in events:
            if isinstance(event, StepEvent):
                for request_id, tokens in zip(event.plan.rows.request_ids, event.tokens, strict=True):
                    self.run.records[request_id].event_s += [self._seen_s(event.now_ns)] * len(tokens)
            elif isinstance(event, FinishEvent):
                record = self.run.records[event.request_id]
                record.end_s, record.is_done = self._seen_s(event.now_ns), True
                record.usage = Usage(event.num_prompt_tokens, event.num_output_tokens)

    def _seen_s(self, now_ns: int) -> float:
        return (now_ns + self._delay_ns) / NS_PER_S


def _time_ns(job: Job) -> int:
    return round((job.at_s or 0.0) * NS_PER_S)
