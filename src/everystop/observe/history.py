"""What has happened, kept in memory: the last steps and the requests that were in them, as a view of the one event
schema and of what the HTTP side says about its clients.

It knows numbers and times, never a token or a text. The engine's thread only hands event lists over; they are folded in
when somebody looks, so that nothing here can slow or stop a step.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from everystop.core.events import (
    AdmitEvent,
    ArrivalEvent,
    BlockEvent,
    Event,
    FinishEvent,
    LedgerEvent,
    LineEvent,
    PreemptEvent,
    RefuseEvent,
    StepEvent,
    WaitEvent,
)
from everystop.core.step_time import UNKNOWN_STEP_TIMES, StepFeatures, StepTimeModel
from everystop.core.step_time_fit import StepTimeFit
from everystop.observe.log import Log
from everystop.observe.queue import Queue

Act = ArrivalEvent | RefuseEvent | AdmitEvent | PreemptEvent | WaitEvent | FinishEvent

STEP_BYTES = 900  # a step without its rows, as measured by `sys.getsizeof` over its parts
ROW_BYTES = 25
ACT_BYTES = 200
RECENT_STEPS = 30_000  # ten minutes of steps of 20 ms
DEFAULT_BYTES = 256 << 20
MAX_DIGITS = 19  # of a request's number


def _now_ns(item: StepRecord | Act) -> int:
    return item.now_ns


def _step_id(record: StepRecord) -> int:
    return record.step_id


class StepRecord(NamedTuple):
    """One executed step, without token ids. Columns run parallel: `request_ids`, `starts` (positions), `nums` (tokens
    computed) and `num_outputs` (tokens accepted); the last `num_padded_rows` rows were computed and thrown away.

    `step_times` is what was known of step times when it came back. Counts are those after the step.
    """

    step_id: int
    scheduled_ns: int
    now_ns: int
    execute_ns: int
    request_ids: array[int]
    starts: array[int]
    nums: array[int]
    num_outputs: bytes
    num_padded_rows: int
    num_running: int
    num_waiting: int
    num_held: int
    num_free_blocks: int
    num_cached_blocks: int
    num_evicted_blocks: int
    num_wasted_rows: int
    num_recomputed_tokens: int
    target_ns: int
    predicted_ns: int
    step_times: StepTimeModel
    sample_ns: int = 0

    @classmethod
    def of(cls, event: StepEvent, step_times: StepTimeModel) -> StepRecord:
        """The numbers of a step event."""
        rows = event.plan.rows
        return cls(
            event.plan.step_id,
            event.scheduled_ns,
            event.now_ns,
            event.execute_ns,
            rows.request_ids,
            rows.starts,
            rows.nums_tokens,
            bytes(map(len, event.tokens)),
            event.plan.num_padded_rows,
            event.num_running,
            event.num_waiting,
            event.num_held,
            event.num_free_blocks,
            event.num_cached_blocks,
            event.num_evicted_blocks,
            event.num_wasted_rows,
            event.num_recomputed_tokens,
            event.target_ns,
            event.predicted_ns,
            step_times,
            event.sample_ns,
        )

    @property
    def num_rows(self) -> int:
        """Rows computed, padded ones included."""
        return len(self.request_ids)

    def row_of(self, request_id: int) -> int:
        """Index of the request's row, -1 if it has none; a padded row is nobody's."""
        try:
            index = self.request_ids.index(request_id)
        except ValueError:
            return -1
        return index if index < self.num_rows - self.num_padded_rows else -1


class Answer(NamedTuple):
    """What a client got: the HTTP status (0: it left before), the error's code, tokens, why its choices ended, and
    whether it came as a stream.
    """

    status: int = 0
    error_code: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: str = ""
    is_streamed: bool = False


@dataclass(slots=True)
class Client:
    """One HTTP request: `name` is the id that its answer carries, `given_name` the id that the client gave it itself,
    `owner` whose key it was sent with.

    Its sequences (prompts times n) are `num` consecutive requests. `received_ns` is when the last byte of the body had
    been read, `submitted_ns` when the engine was told, `first_sent_ns` and `delivered_ns` when the first and the last
    byte of the answer were given to the socket (None: not yet; comments that say how it waits do not count). A client
    that `has_left` never gets its last byte: then `delivered_ns` is when the server saw it go. `tenant` is whose
    request the scheduler takes it for; `answer` is set once all is over. `trace_context` are the headers that say which
    trace it belongs to, until it has been traced.
    """

    name: str
    owner: str
    first_request_id: int
    num: int
    received_ns: int
    submitted_ns: int
    first_sent_ns: int | None = None
    delivered_ns: int | None = None
    given_name: str = ""
    has_left: bool = False
    tenant: str = ""
    answer: Answer | None = None
    trace_context: dict[str, str] | None = None

    @property
    def request_ids(self) -> range:
        """Its sequences."""
        return range(self.first_request_id, self.first_request_id + self.num)


@dataclass(slots=True)
class Trail:
    """What the events say of one request, in their order; `refusal` is set instead of all else for one never taken.

    `ahead` is why whoever was next waited when this one arrived.
    """

    request_id: int
    arrival: ArrivalEvent | None = None
    admits: list[AdmitEvent] = field(default_factory=list)
    preemptions: list[PreemptEvent] = field(default_factory=list)
    finish: FinishEvent | None = None
    refusal: RefuseEvent | None = None
    client: Client | None = None
    ahead: WaitEvent | None = None

    @property
    def is_over(self) -> bool:
        """Nothing more will happen in the engine."""
        return self.finish is not None or self.refusal is not None

    @property
    def is_waiting(self) -> bool:
        """It has arrived and holds no slot."""
        return self.arrival is not None and not self.is_over and len(self.admits) == len(self.preemptions)

    @property
    def since_ns(self) -> int:
        """When the engine first heard of it."""
        first = self.arrival or self.refusal
        return 0 if first is None else first.now_ns


class History:
    """Steps, acts (all other events) and requests of one engine, and the queue as it is now.

    Remembered are the requests that are not over, the last `num_finished` that are, and the steps and acts since the
    first of them arrived, at least the last 30,000 steps; all this up to about `max_bytes`, beyond which the oldest
    finished requests, and then the oldest steps, are forgotten. `receive` may be called from any thread, the rest from
    one only.
    """

    def __init__(
        self,
        *,
        num_finished: int = sys.maxsize,
        max_bytes: int = DEFAULT_BYTES,
        step_times: StepTimeModel = UNKNOWN_STEP_TIMES,
    ) -> None:
        self.steps: Log[StepRecord] = Log()
        self.acts: Log[Act] = Log()
        self.trails: dict[int, Trail] = {}
        self.clients: dict[str, Client] = {}
        self.queue = Queue()
        self.last_ns = 0
        self.num_refused = 0
        self.blocks: BlockEvent | None = None  # the last time that somebody asked
        self.num_finished = num_finished
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._given: dict[str, dict[str, Client]] = {}  # by the names that clients gave, then by ours
        self._over: deque[int] = deque()
        self._inbox: deque[Sequence[Event]] = deque()
        self._fit = StepTimeFit(step_times)
        self._last_landed_ns = 0

    def receive(self, events: Sequence[Event]) -> None:
        """Hand over the events of one turn of the engine; they count from the next `catch_up` on."""
        self._inbox.append(events)

    def catch_up(self) -> None:
        """Fold in all that has been handed over, and forget what is too old."""
        if not self._inbox:
            return
        while self._inbox:
            for event in self._inbox.popleft():
                self._fold(event)
        self._forget()

    def add_client(self, client: Client) -> None:
        """An HTTP request has been submitted; to be called before `catch_up` can meet its arrival."""
        self.clients[client.name] = client
        if client.given_name:
            self._given.setdefault(client.given_name, {})[client.name] = client
        for request_id in client.request_ids:
            self._trail(request_id).client = client

    def clients_called(self, name: str) -> Iterator[Client]:
        """The remembered clients that a name may mean: whose answer has that id; who gave it themselves, the last one
        first; whose sequence has that number in the engine, with or without an r before it.
        """
        if name in self.clients:
            yield self.clients[name]
        yield from reversed(self._given.get(name, {}).values())
        trail = self.trail_called(name)
        if trail is not None and trail.client is not None:
            yield trail.client

    def trail_called(self, name: str) -> Trail | None:
        """The remembered sequence whose number in the engine that is: 41 or r41; None if it is no number of one."""
        number = name.removeprefix("r")
        is_number = number.isascii() and number.isdecimal() and len(number) < MAX_DIGITS
        return self.trails.get(int(number)) if is_number else None

    @property
    def step_times(self) -> StepTimeModel:
        """What is known now of how long steps take."""
        return self._fit.model

    @property
    def num_bytes(self) -> int:
        """About how much memory steps and acts take."""
        return self._num_bytes

    def step_position(self, step_id: int) -> int:
        """Position in `steps` of the first step with that id or a later one."""
        return self.steps.position_of(step_id, _step_id)

    def position_at(self, now_ns: int) -> int:
        """Position in `steps` of the step that was running then, or was the next to: the first to come back later."""
        return self.steps.position_of(now_ns, _now_ns)

    def act_position(self, now_ns: int) -> int:
        """Position in `acts` of the first of that time or later."""
        return self.acts.position_of(now_ns, _now_ns)

    def steps_since_ns(self, now_ns: int) -> list[StepRecord]:
        """The remembered steps that came back at that time or later."""
        return self.steps.since(self.steps.position_of(now_ns, _now_ns))

    def acts_since_ns(self, now_ns: int) -> list[Act]:
        """The remembered acts of that time or later."""
        return self.acts.since(self.act_position(now_ns))

    def steps_between_ns(self, after_ns: int, until_ns: int) -> list[StepRecord]:
        """The remembered steps that came back after the one time and not after the other."""
        steps = self.steps
        return steps.between(steps.position_of(after_ns + 1, _now_ns), steps.position_of(until_ns + 1, _now_ns))

    def acts_between_ns(self, first_ns: int, last_ns: int) -> list[Act]:
        """The remembered acts from the one time to the other, both included."""
        return self.acts.between(self.act_position(first_ns), self.act_position(last_ns + 1))

    @property
    def acts_known_ns(self) -> int:
        """From when on all acts are remembered."""
        acts, steps = self.acts, self.steps
        if not acts.start:
            return 0
        return acts[acts.start].now_ns if len(acts) else steps[steps.start].scheduled_ns

    def _trail(self, request_id: int) -> Trail:
        trail = self.trails.get(request_id)
        if trail is None:
            trail = self.trails[request_id] = Trail(request_id)
        return trail

    def _fold(self, event: Event) -> None:
        self.last_ns = max(self.last_ns, event.now_ns)
        if isinstance(event, StepEvent):
            self._fold_step(event)
            return
        if isinstance(event, BlockEvent):
            self.blocks = event
            return
        if isinstance(event, LineEvent):
            self.queue.line_up(event)
            return
        if isinstance(event, LedgerEvent):
            return
        self.acts.append(event)
        self._num_bytes += ACT_BYTES
        ahead = self.queue.head
        self.queue.observe(event)
        if isinstance(event, WaitEvent):
            return
        trail = self._trail(event.request_id)
        match event:
            case ArrivalEvent():
                trail.arrival, trail.ahead = event, ahead
            case AdmitEvent():
                trail.admits.append(event)
            case PreemptEvent():
                trail.preemptions.append(event)
            case FinishEvent():
                trail.finish = event
                self._over.append(event.request_id)
            case RefuseEvent():
                trail.refusal = event
                self.num_refused += 1
                self._over.append(event.request_id)

    def _fold_step(self, event: StepEvent) -> None:
        """A step took from the last one's return to its own, or from its own planning if it was waited for."""
        if event.plan.rows:
            began_ns = max(self._last_landed_ns, event.scheduled_ns)
            self._fit.observe(StepFeatures.of(event.plan), event.execute_ns or event.now_ns - began_ns)
        self._last_landed_ns = event.now_ns
        record = StepRecord.of(event, self._fit.model)
        self.steps.append(record)
        if self.queue.parked:
            self.queue.land(record.request_ids, record.starts, record.nums)
        self._num_bytes += STEP_BYTES + ROW_BYTES * record.num_rows

    def _forget(self) -> None:
        """Drop the oldest finished requests beyond the limits, then the steps and acts that nobody needs any more."""
        while self._over and (len(self._over) > self.num_finished or self._num_bytes > self._max_bytes):
            self._forget_request(self._over.popleft())
            if self._num_bytes > self._max_bytes:
                self._forget_unneeded()
        self._forget_unneeded()
        while self._num_bytes > self._max_bytes and len(self.steps) > 1:
            self._drop_steps(self.steps.start + (len(self.steps) + 1) // 2)
            self._drop_acts(self.steps[self.steps.start].scheduled_ns)

    def _forget_request(self, request_id: int) -> None:
        trail = self.trails.pop(request_id)
        client = trail.client
        if client is not None and not any(i in self.trails for i in client.request_ids):
            self._forget_client(client)

    def _forget_client(self, client: Client) -> None:
        self.clients.pop(client.name, None)
        namesakes = self._given.get(client.given_name, {})
        namesakes.pop(client.name, None)
        if not namesakes:
            self._given.pop(client.given_name, None)

    def _forget_unneeded(self) -> None:
        """Steps and acts from before the oldest remembered request; the last ones stay for their own sake."""
        first = next(iter(self.trails.values()), None)
        needed_ns = self.last_ns if first is None else first.since_ns
        steps = self.steps
        position = min(steps.position_of(needed_ns, _now_ns), max(steps.start, steps.end - RECENT_STEPS))
        if position > steps.start:
            self._drop_steps(position)
            self._drop_acts(min(needed_ns, steps[position].scheduled_ns))

    def _drop_steps(self, position: int) -> None:
        for record in self.steps.between(self.steps.start, position):
            self._num_bytes -= STEP_BYTES + ROW_BYTES * record.num_rows
        self.steps.forget_before(position)

    def _drop_acts(self, before_ns: int) -> None:
        acts = self.acts
        position = acts.position_of(before_ns, _now_ns)
        self._num_bytes -= ACT_BYTES * (position - acts.start)
        acts.forget_before(position)
