"""Runs a workload on an engine without a server: submits its jobs, and notes when the engine hands tokens over.

A job without a time is sent when a client is free, on the engine's own thread and at once, so the client costs the
scheduler no step; one with a time is sent by the calling thread at that time. Ids follow the order of sending.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from everystop.core.durations import NS_PER_MS, NS_PER_S
from everystop.core.errors import EngineDead
from everystop.core.events import Event
from everystop.core.request import SamplingParams
from everystop.engine.engine import Engine
from everystop.engine.messages import StepOutput, Submit
from everystop.observe.comparison import RequestLine, Run
from everystop.observe.history import History
from everystop.sim.workloads import Job, Workload
from everystop.trial.calm import calm_interpreter

TICK_S = 0.25
MAX_SEED = 1 << 63
MAX_UNREAD = 20_000  # turns whose events are kept as they are: a run is disturbed only for the sake of memory
Progress = Callable[[int, int], None]
"""Called now and then with the number of requests that are over, and of all."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen: greedily at temperature 0; else job i draws with the seed `seed + i` in every run."""

    temperature: float = 0.0
    seed: int = 0

    def params(self, index: int, job: Job) -> SamplingParams:
        """For one job."""
        return SamplingParams(
            max_tokens=job.max_tokens,
            temperature=self.temperature,
            seed=(self.seed + index) % MAX_SEED,
            ignore_eos=job.ignore_eos,
        )


@dataclass(slots=True)
class _Note:
    """What is known of a job under way; times of the engine's clock, -1 where it did not happen."""

    request_id: int = -1
    sent_ns: int = -1
    end_ns: int = -1
    token_ns: list[int] = field(default_factory=list)
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    error: str | None = None


class EngineRun:
    """One run; `engine` is new and not yet started, and is stopped in the end, also when something is raised.

    Raises RequestError for a job that no engine would take.
    """

    def __init__(self, workload: Workload, engine: Engine, sampling: Sampling) -> None:
        self._jobs = workload.jobs
        self._num_clients = workload.num_clients
        self._engine = engine
        self._params = [sampling.params(i, job) for i, job in enumerate(workload.jobs)]
        self._notes = [_Note() for _ in workload.jobs]
        self._waiting = deque(i for i, job in enumerate(workload.jobs) if job.at_s is None)
        timed = sorted((job.at_s, i) for i, job in enumerate(workload.jobs) if job.at_s is not None)
        self._timed = deque(timed)
        self._index_of: dict[int, int] = {}
        self._num_over = 0
        self._lock = threading.Lock()  # jobs are sent by two threads
        self._is_over = threading.Event()
        self._failure: BaseException | None = None
        self._history = History(num_finished=len(workload.jobs) + 1, max_bytes=sys.maxsize)
        self._num_unread = 0
        self._start_ns = 0

    def play(self, policy: str, repeat: int, max_num_seqs: int, progress: Progress) -> Run:
        """Run to the end; raises EngineDead if the engine fails."""
        engine = self._engine
        engine.on_outputs, engine.on_events, engine.on_failure = self._take, self._hear, self._fail
        try:
            with calm_interpreter():
                self._start_ns = time.monotonic_ns()
                for _ in range(min(self._num_clients, len(self._waiting))):  # nobody else has anything to send
                    self._send_next()
                self._send_timed(0.0)
                engine.start()
                self._wait(progress)
        finally:
            self._is_over.set()  # nothing more is sent, also where it has been interrupted
            engine.stop(timeout_s=60.0)
        if self._failure is not None:
            raise EngineDead(f"the engine has failed under {policy}: {self._failure}") from self._failure
        return self._run(policy, repeat, max_num_seqs)

    def _wait(self, progress: Progress) -> None:
        """Send the timed jobs and wait for the last end."""
        while not self._is_over.is_set():
            now_s = (time.monotonic_ns() - self._start_ns) / NS_PER_S
            self._send_timed(now_s)
            pause_s = TICK_S
            if self._timed:
                pause_s = min(pause_s, max(0.0, self._timed[0][0] - now_s))
            self._is_over.wait(pause_s)
            if self._num_unread > MAX_UNREAD:
                self._num_unread = 0
                self._history.catch_up()
            progress(self._num_over, len(self._jobs))

    def _send_timed(self, now_s: float) -> None:
        while self._timed and self._timed[0][0] <= now_s:
            self._send(self._timed.popleft()[1])

    def _send_next(self) -> None:
        """A client is free: the next job without a time, if there is one."""
        if self._waiting and not self._is_over.is_set():
            self._send(self._waiting.popleft())

    def _send(self, index: int) -> None:
        job, note = self._jobs[index], self._notes[index]
        with self._lock:
            note.request_id = self._engine.allocate_ids(1)
            note.sent_ns = time.monotonic_ns()
            self._index_of[note.request_id] = index
            self._engine.submit(
                Submit(
                    note.request_id,
                    job.prompt,
                    self._params[index],
                    tenant=job.tenant,
                    ttft_target_ns=_ns(job.ttft_target_ms),
                    itl_target_ns=_ns(job.itl_target_ms),
                )
            )

    # On the engine's thread.

    def _hear(self, events: list[Event]) -> None:
        self._history.receive(events)
        self._num_unread += 1

    def _take(self, outputs: list[StepOutput]) -> None:
        now_ns = time.monotonic_ns()
        try:
            for output in outputs:
                self._note(output, now_ns)
        except Exception as error:  # the engine would go on, and this run would never end
            self._fail(error)

    def _note(self, output: StepOutput, now_ns: int) -> None:
        index = self._index_of[output.request_id]
        note = self._notes[index]
        for token_id in output.token_ids:
            note.token_ns.append(now_ns)
            note.token_ids.append(token_id)
        if output.refused or output.finish_reason is not None:
            note.end_ns, note.error = now_ns, output.error
            self._end(index)

    def _end(self, index: int) -> None:
        self._num_over += 1
        if self._num_over == len(self._jobs):
            self._is_over.set()
        elif self._jobs[index].at_s is None:
            self._send_next()

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self._is_over.set()

    # After it.

    def _run(self, policy: str, repeat: int, max_num_seqs: int) -> Run:
        self._history.catch_up()
        lines = tuple(self._line(i, note) for i, note in enumerate(self._notes))
        return Run(
            policy=policy,
            repeat=repeat,
            duration_s=max(0.0, *(line.end_s for line in lines)),
            requests=lines,
            start_ns=self._start_ns,
            max_num_seqs=max_num_seqs,
            history=self._history,
        )

    def _line(self, index: int, note: _Note) -> RequestLine:
        job = self._jobs[index]
        return RequestLine(
            index=index,
            group=job.group,
            num_prompt_tokens=len(job.prompt),
            num_output_tokens=len(note.token_ids),
            scheduled_s=job.at_s,
            sent_s=self._seconds(note.sent_ns),
            token_s=tuple(map(self._seconds, note.token_ns)),
            end_s=self._seconds(note.end_ns),
            error=note.error,
            digest=hashlib.sha256(note.token_ids.tobytes()).hexdigest()[:16],
            request_id=note.request_id,
        )

    def _seconds(self, now_ns: int) -> float:
        return (now_ns - self._start_ns) / NS_PER_S


def check_workload(workload: Workload, num_valid_tokens: int) -> Sequence[str]:
    """What is wrong with the prompts for a model with so many token ids, one sentence each."""
    return [
        f"request {i} has token id {max(job.prompt):,}, and the model has 0 to {num_valid_tokens - 1:,}"
        for i, job in enumerate(workload.jobs)
        if max(job.prompt) >= num_valid_tokens
    ]


def _ns(target_ms: float | None) -> int | None:
    return None if target_ms is None else round(target_ms * NS_PER_MS)
