"""Runs a workload in virtual time: the scheduler, policy and KV cache that a server would have, with step times from a
cost model in place of the model. The same workload and cost give the same run.

As in `trial.on_engine` a job without a time is sent when a client is free, and ids follow the order of sending.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass, field

from everystop.assembly import Capacity, build_scheduler
from everystop.config import Config
from everystop.core.durations import NS_PER_MS, NS_PER_S
from everystop.core.errors import RequestError
from everystop.core.events import Event, FinishEvent
from everystop.core.request import FinishReason, Request, SamplingParams
from everystop.engine.loop import StepLoop
from everystop.observe.comparison import RequestLine, Run
from everystop.observe.history import History
from everystop.runner.simulated import SimulatedRunner
from everystop.sim.clock import Clock
from everystop.sim.cost import StepCost
from everystop.sim.workloads import Workload


@dataclass(slots=True)
class _Note:
    """What is known of a job under way, in nanoseconds of virtual time; -1 where it did not happen."""

    request_id: int = -1
    sent_ns: int = -1
    end_ns: int = -1
    token_ns: list[int] = field(default_factory=list)
    error: str | None = None


class VirtualRun:
    """One run of a workload on a scheduler of this configuration; a run is played once."""

    def __init__(
        self,
        workload: Workload,
        config: Config,
        cost: StepCost,
        *,
        num_blocks: int,
    ) -> None:
        self._workload = workload
        self._config = config
        num_tokens = num_blocks * config.block_size
        self._capacity = Capacity(
            num_blocks=num_blocks,
            block_size=config.block_size,
            num_bytes=0,
            max_model_len=min(config.max_model_len or num_tokens, num_tokens),
        )
        self._scheduler = build_scheduler(config, self._capacity)
        self._clock = Clock()
        runner = SimulatedRunner(cost.plan_ns, self._clock.advance)
        self._loop = StepLoop(self._scheduler, runner, lambda: self._clock.now_ns)
        self._notes = [_Note() for _ in workload.jobs]
        self._waiting = deque(i for i, job in enumerate(workload.jobs) if job.at_s is None)
        timed = sorted((round(job.at_s * NS_PER_S), i) for i, job in enumerate(workload.jobs) if job.at_s is not None)
        self._timed = deque(timed)
        self._index_of: dict[int, int] = {}
        self._num_over = 0
        self._history = History(num_finished=len(workload.jobs) + 1, max_bytes=sys.maxsize)

    def play(self, policy: str, repeat: int) -> Run:
        """Run to the end."""
        for _ in range(min(self._workload.num_clients, len(self._waiting))):
            self._send_next()
        while self._num_over < len(self._workload.jobs):
            self._send_timed()
            turn = self._loop.turn()
            self._hear(turn.events)
            if turn.is_idle and self._num_over < len(self._workload.jobs):
                self._sleep(turn.wake_at_ns)
        self._hear(self._scheduler.take_events())
        self._history.catch_up()
        self._note_tokens()
        return self._run(policy, repeat)

    def _sleep(self, wake_at_ns: int | None) -> None:
        """Until the scheduler wants to be asked again, or the next job is sent."""
        times = [] if wake_at_ns is None else [wake_at_ns]
        times += [self._timed[0][0]] if self._timed else []
        assert times, "nothing runs, nothing is to be sent, and not all jobs are over"
        self._clock.advance_to(min(times))

    def _send_timed(self) -> None:
        """Jobs whose time came during a step keep it: they waited for the rest of the step."""
        while self._timed and self._timed[0][0] <= self._clock.now_ns:
            at_ns, index = self._timed.popleft()
            self._send(index, at_ns)

    def _send_next(self) -> None:
        if self._waiting:
            self._send(self._waiting.popleft(), self._clock.now_ns)

    def _send(self, index: int, now_ns: int) -> None:
        job, note = self._workload.jobs[index], self._notes[index]
        note.request_id, note.sent_ns = len(self._index_of), now_ns
        self._index_of[note.request_id] = index
        request = Request(
            note.request_id,
            job.prompt,
            SamplingParams(max_tokens=job.max_tokens, temperature=0.0, ignore_eos=True),
            arrival_ns=now_ns,
            tenant=job.tenant,
            ttft_target_ns=None if job.ttft_target_ms is None else round(job.ttft_target_ms * NS_PER_MS),
            itl_target_ns=None if job.itl_target_ms is None else round(job.itl_target_ms * NS_PER_MS),
        )
        try:
            self._scheduler.add(request, now_ns)
        except RequestError as error:
            note.end_ns, note.error = now_ns, str(error)
            self._end(index)

    def _hear(self, events: list[Event]) -> None:
        self._history.receive(events)
        for event in events:
            if isinstance(event, FinishEvent):
                note = self._notes[self._index_of[event.request_id]]
                note.end_ns = event.now_ns
                note.error = None if event.reason is FinishReason.LENGTH else f"ended by {event.reason.value}"
                self._end(self._index_of[event.request_id])

    def _end(self, index: int) -> None:
        self._num_over += 1
        if self._workload.jobs[index].at_s is None:
            self._send_next()

    def _note_tokens(self) -> None:
        for record in self._history.steps.since(self._history.steps.start):
            for request_id, num in zip(record.request_ids, record.num_outputs, strict=True):
                if num:
                    self._notes[self._index_of[request_id]].token_ns += [record.now_ns] * num

    def _run(self, policy: str, repeat: int) -> Run:
        lines = tuple(self._line(i, note) for i, note in enumerate(self._notes))
        return Run(
            policy=policy,
            repeat=repeat,
            duration_s=max(line.end_s for line in lines),
            requests=lines,
            start_ns=0,
            max_num_seqs=self._config.max_num_seqs,
            history=self._history,
        )

    def _line(self, index: int, note: _Note) -> RequestLine:
        """Tokens are filler, so outputs are equal where their lengths are."""
        job = self._workload.jobs[index]
        return RequestLine(
            index=index,
            group=job.group,
            num_prompt_tokens=len(job.prompt),
            num_output_tokens=len(note.token_ns),
            scheduled_s=job.at_s,
            sent_s=note.sent_ns / NS_PER_S,
            token_s=tuple(now_ns / NS_PER_S for now_ns in note.token_ns),
            end_s=note.end_ns / NS_PER_S,
            error=note.error,
            digest=f"{len(note.token_ns)} tokens",
            request_id=note.request_id,
        )
