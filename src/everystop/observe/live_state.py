"""The last minute of an engine, kept ready for those who watch: steps as they are sent, the requests, who waits, and
figures over the minute.

One `LiveState` serves all readers; it follows a `History` from where it was made, and costs nothing while there is
none. It knows what happened, not who may see it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from everystop.core.durations import NS_PER_S
from everystop.core.events import (
    AdmitEvent,
    ArrivalEvent,
    FinishEvent,
    PreemptEvent,
    RefuseEvent,
    WaitEvent,
)
from everystop.core.request import FinishReason
from everystop.observe.block_map import BlockRun, block_runs
from everystop.observe.decision_log import NO_STEP, Decision, is_told
from everystop.observe.history import Act, History, Log, StepRecord, Trail
from everystop.observe.recent import WINDOW_S, RecentSum, RecentValues
from everystop.observe.waiting_room import WaitingRoom

WINDOW_NS = WINDOW_S * NS_PER_S
STEPS_A_TURN = 400  # about 10 ms of work at 32 rows
REFRESH_NS = NS_PER_S  # how often the counts of a request that just runs are told again
QUIET_NS = NS_PER_S  # acts that no step has followed for so long are told without one
ACTS_BEFORE = 20_000  # from which the reasons are taken that still held when the window began
BLOCKS_EVERY_NS = NS_PER_S // 2
BLOCKS_A_LOOK = 8192  # with more blocks, they are looked at less often

_ENDS = {FinishReason.ABORT: "aborted", FinishReason.ERROR: "failed"}


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request that has boarded, or has ended without; `version` grows with each change that is to be told."""

    trail: Trail
    state: str = "waiting"
    slot: int = -1
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    admit_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    max_gap_ns: int | None = None
    finish_ns: int | None = None
    finish_reason: str | None = None
    changed_ns: int = 0
    version: int = 0

    @property
    def request_id(self) -> int:
        """The id in the engine."""
        return self.trail.request_id

    @property
    def num_prompt_tokens(self) -> int:
        """Its prompt's length; 0 where the history no longer knows, or has never known."""
        return 0 if self.trail.arrival is None else self.trail.arrival.num_prompt_tokens

    @property
    def received_ns(self) -> int:
        """When its client had sent it, or, where that is not known, when the engine heard of it."""
        client = self.trail.client
        return self.trail.since_ns if client is None else client.received_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """The figures of the verdict strip; latencies and rates over the last 60 s, None where nothing was seen."""

    slots_busy: int
    slots: int
    num_waiting: int
    oldest_wait_ns: int
    kv_used_share: float
    output_tokens_per_s: float
    ttft_p50_ns: int | None
    ttft_p95_ns: int | None
    itl_p50_ns: int | None
    itl_p99_ns: int | None


class LiveState:
    """Follows `history` from 60 s before `now_ns`.

    The engine runs since `since_ns`; `ask_blocks` has it say who holds which blocks.
    """

    def __init__(
        self,
        history: History,
        *,
        now_ns: int,
        since_ns: int,
        num_slots: int,
        num_blocks: int,
        ask_blocks: Callable[[], None],
    ) -> None:
        history.catch_up()
        self.num_slots = num_slots
        self.num_blocks = num_blocks
        self.requests: dict[int, LiveRequest] = {}
        self.changed: dict[int, LiveRequest] = {}  # the last to change stands last
        self.room = WaitingRoom()
        self.steps: Log[list[object]] = Log()
        self.decisions: Log[Decision] = Log()
        self.block_runs: list[BlockRun] = []
        self.blocks_version = 0
        self.version = 0
        self.num_running = 0
        self._history = history
        self._ask_blocks = ask_blocks
        self._ttft, self._itl, self._tokens = RecentValues(), RecentValues(), RecentSum()
        self._told: list[Act] = []
        self._over: deque[LiveRequest] = deque()
        self._last: StepRecord | None = None
        self._blocks_asked_ns = 0
        self._blocks_asked_step = -1
        self._blocks_seen: object = None
        self._latencies: tuple[int, list[int | None]] = (-NS_PER_S, [None] * 4)
        self._step_position = history.steps.end - len(history.steps_since_ns(now_ns - WINDOW_NS))
        self._act_position = history.acts.end - len(history.acts_since_ns(now_ns - WINDOW_NS))
        self._since_ns = since_ns
        self._board_those_from_before(now_ns - WINDOW_NS)

    # ------------------------------------------------------------------ follow

    def catch_up(self, now_ns: int) -> bool:
        """Take in what has happened, as much as is done in one go; True if there is more."""
        history = self._history
        history.catch_up()
        end = min(history.steps.end, self._step_position + STEPS_A_TURN)
        for step in history.steps.between(self._step_position, end):
            self._take_acts(step)
            self._take_step(step)
        self._step_position = max(end, self._step_position)
        if self._step_position < history.steps.end:
            return True
        self._take_acts(None)
        if self._told and now_ns - self._told[0].now_ns > QUIET_NS:
            self._decide(None, now_ns)
        self._look_at_blocks(now_ns)
        self._forget(now_ns - WINDOW_NS)
        return False

    def _take_acts(self, step: StepRecord | None) -> None:
        """The acts up to the planning of a step, or all; one of a later step ends it."""
        acts = self._history.acts
        self._act_position = max(self._act_position, acts.start)
        while self._act_position < acts.end:
            act = acts[self._act_position]
            if step is not None and _is_later(act, step):
                return
            self._act_position += 1
            self._take_act(act)
            if is_told(act):
                self._told.append(act)

    def _take_act(self, act: Act) -> None:
        match act:
            case WaitEvent():
                self.room.note(act)
            case ArrivalEvent():
                self.room.arrive(act.request_id, act.now_ns)
            case AdmitEvent():
                self._admit(act)
            case PreemptEvent():
                self._preempt(act)
            case FinishEvent():
                self._finish(act)
            case RefuseEvent():
                self._end(self._meet(act.request_id), "refused", act.now_ns, act.code)

    def _admit(self, act: AdmitEvent) -> None:
        self.room.leave(act.request_id)
        request = self._meet(act.request_id)
        request.state, request.slot = "running", act.slot
        self.num_running += 1
        if request.admit_ns is None:
            request.admit_ns, request.num_cached_tokens = act.now_ns, act.num_cached_tokens
        self._touch(request, act.now_ns)

    def _preempt(self, act: PreemptEvent) -> None:
        self.room.come_back(act.request_id, act.now_ns)
        self.room.unpark(act.request_id)
        request = self._meet(act.request_id)
        request.state = "waiting"
        request.num_preemptions += 1
        self.num_running -= 1
        self._touch(request, act.now_ns)

    def _finish(self, act: FinishEvent) -> None:
        self.room.leave(act.request_id)
        self.room.unpark(act.request_id)
        request = self._meet(act.request_id)
        self.num_running -= request.state == "running"
        request.num_output_tokens, request.num_cached_tokens = act.num_output_tokens, act.num_cached_tokens
        self._end(request, _ENDS.get(act.reason, "finished"), act.now_ns, act.reason.value)

    def _end(self, request: LiveRequest, state: str, now_ns: int, reason: str) -> None:
        request.state, request.finish_ns, request.finish_reason = state, now_ns, reason
        self._over.append(request)
        self._touch(request, now_ns)

    def _take_step(self, step: StepRecord) -> None:
        slots: list[int] = []
        num_decodes = num_prefill_tokens = num_prompts = num_outputs = 0
        gaps: Counter[int] = Counter()
        boarded = {act.request_id for act in self._told if isinstance(act, AdmitEvent)}
        computed: dict[int, int] = {}
        num_own = step.num_rows - step.num_padded_rows
        rows = zip(step.request_ids, step.starts, step.nums, step.num_outputs, strict=True)
        for index, (request_id, start, num, num_out) in enumerate(rows):
            request = self.requests.get(request_id) or self._meet_rider(request_id, step.now_ns)
            slots.append(request.slot)
            if index >= num_own:
                continue
            if request_id in boarded:
                computed[request_id] = start + num
            if start >= request.num_prompt_tokens and num == 1:
                num_decodes += request_id not in boarded
            else:
                num_prefill_tokens += num
                num_prompts += request_id not in boarded
            if num_out:
                num_outputs += num_out
                num_known = start + num + num_out - request.num_prompt_tokens
                gap_ns = self._take_tokens(request, step.now_ns, num_known, num_out)
                if gap_ns is not None:
                    gaps[gap_ns] += num_out
        self._tokens.add(step.now_ns, num_outputs)
        if gaps:
            self._itl.add(step.now_ns, gaps)
        self._last = step
        self.steps.append(_as_sent(step, slots, num_prefill_tokens))
        if self._told:
            self._decide(step, step.now_ns, num_decodes, num_prompts, computed)

    def _take_tokens(self, request: LiveRequest, now_ns: int, num_output_tokens: int, num_new: int) -> int | None:
        """It has so many output tokens now, some of them new; returns the gap before the last, if it is known."""
        gap_ns = None
        if request.first_token_ns is None and num_output_tokens == num_new:
            request.first_token_ns = now_ns
            self._ttft.add(now_ns, {now_ns - request.received_ns: 1})
            self.room.unpark(request.request_id)
            self._touch(request, now_ns)
        elif request.last_token_ns is not None:
            gap_ns = now_ns - request.last_token_ns
            request.max_gap_ns = max(gap_ns, request.max_gap_ns or 0)
        request.last_token_ns = now_ns
        if request.state == "running":
            request.num_output_tokens = num_output_tokens
            if now_ns - request.changed_ns >= REFRESH_NS:
                self._touch(request, now_ns)
        return gap_ns

    def _decide(
        self,
        step: StepRecord | None,
        now_ns: int,
        num_decodes: int = 0,
        num_prompts: int = 0,
        computed: dict[int, int] | None = None,
    ) -> None:
        step_id = NO_STEP if step is None else step.step_id
        self.decisions.append(Decision(now_ns, step_id, num_decodes, num_prompts, tuple(self._told), computed or {}))
        self._told.clear()

    def _touch(self, request: LiveRequest, now_ns: int) -> None:
        self.version += 1
        request.version, request.changed_ns = self.version, now_ns
        self.changed.pop(request.request_id, None)
        self.changed[request.request_id] = request

    def _look_at_blocks(self, now_ns: int) -> None:
        """Ask the engine when something has happened since it was asked last, and take what it has answered."""
        event = self._history.blocks
        if event is not None and event is not self._blocks_seen:
            self._blocks_seen = event
            runs = block_runs(event)
            if runs != self.block_runs:
                self.block_runs = runs
                self.blocks_version += 1
        every_ns = BLOCKS_EVERY_NS * max(1, self.num_blocks // BLOCKS_A_LOOK)
        news = self._step_position + self._act_position
        if news != self._blocks_asked_step and now_ns - self._blocks_asked_ns >= every_ns:
            self._blocks_asked_step, self._blocks_asked_ns = news, now_ns
            self._ask_blocks()

    def _forget(self, before_ns: int) -> None:
        """Drop what is older than a minute."""
        while self._over and self._over[0].changed_ns < before_ns:
            request = self._over.popleft()
            if self._last is not None and request.request_id in self._last.request_ids:
                request.changed_ns = before_ns  # its slot is held, and it is still computed
                self._over.append(request)
                continue
            self.requests.pop(request.request_id, None)
            self.changed.pop(request.request_id, None)
        steps, decisions = self.steps, self.decisions
        steps.forget_before(steps.position_of(before_ns, _sent_ns))
        decisions.forget_before(decisions.position_of(before_ns, _decided_ns))

    # ------------------------------------------------------------------- begin

    def _meet(self, request_id: int) -> LiveRequest:
        """The request; one that the history has forgotten already has no past."""
        request = self.requests.get(request_id)
        if request is None:
            trail = self._history.trails.get(request_id) or Trail(request_id)
            request = self.requests[request_id] = LiveRequest(trail)
        return request

    def _meet_rider(self, request_id: int, now_ns: int) -> LiveRequest:
        """One that had ended before the window and has a row in it: a padded one, or one that comes back in vain."""
        request = self._meet(request_id)
        if request.trail.admits:
            request.slot = request.trail.admits[-1].slot
        request.state, request.changed_ns = "finished", now_ns
        self._over.append(request)
        return request

    def _board_those_from_before(self, before_ns: int) -> None:
        """The requests that had arrived by then and were not over, as they stood."""
        for trail in list(self._history.trails.values()):
            if trail.arrival is None or trail.arrival.now_ns >= before_ns:
                continue
            if trail.finish is not None and trail.finish.now_ns < before_ns:
                continue
            admits = [act for act in trail.admits if act.now_ns < before_ns]
            preemptions = [act for act in trail.preemptions if act.now_ns < before_ns]
            if len(admits) == len(preemptions):
                since_ns = preemptions[-1].now_ns if preemptions else trail.arrival.now_ns
                (self.room.come_back if preemptions else self.room.arrive)(trail.request_id, since_ns)
            if admits:
                self._board_from_before(LiveRequest(trail), admits, preemptions)
        acts = self._history.acts
        for act in acts.between(self._act_position - ACTS_BEFORE, self._act_position):
            if isinstance(act, WaitEvent):
                self.room.note(act)
        for request in self.requests.values():
            if request.num_output_tokens:
                self.room.unpark(request.request_id)

    def _board_from_before(
        self, request: LiveRequest, admits: list[AdmitEvent], preemptions: list[PreemptEvent]
    ) -> None:
        is_running = len(admits) > len(preemptions)
        request.state = "running" if is_running else "waiting"
        self.num_running += is_running
        request.slot, request.num_preemptions = admits[-1].slot, len(preemptions)
        request.admit_ns, request.num_cached_tokens = admits[0].now_ns, admits[0].num_cached_tokens
        for step, num_output_tokens in self._tokens_before(request, admits[0].step_id):
            request.first_token_ns, request.num_output_tokens = step.now_ns, num_output_tokens
            break
        self.requests[request.request_id] = request
        self._touch(request, admits[-1].now_ns)

    def _tokens_before(self, request: LiveRequest, step_id: int) -> Iterator[tuple[StepRecord, int]]:
        """Steps from before the window that brought the request tokens, with how many it had then."""
        steps = self._history.steps
        for step in steps.between(self._history.step_position(step_id), self._step_position):
            row = step.row_of(request.request_id)
            if row >= 0 and step.num_outputs[row]:
                yield step, step.starts[row] + step.nums[row] + step.num_outputs[row] - request.num_prompt_tokens

    # -------------------------------------------------------------------- tell

    def knows(self, request_id: int) -> bool:
        """It is among the requests, or waits."""
        return request_id in self.requests or request_id in self.room

    def prompt_length(self, request_id: int) -> int | None:
        """Tokens of a waiting request's prompt, if the history knows it."""
        trail = self._history.trails.get(request_id)
        return None if trail is None or trail.arrival is None else trail.arrival.num_prompt_tokens

    def changed_since(self, version: int) -> list[LiveRequest]:
        """Requests that have changed since then, the last first."""
        found = []
        for request in reversed(self.changed.values()):
            if request.version <= version:
                break
            found.append(request)
        return found

    def tiles(self, now_ns: int) -> Tiles:
        """The figures now; quantiles are worked out once a second."""
        last, oldest_ns = self._last, self.room.oldest_ns
        if now_ns - self._latencies[0] >= NS_PER_S:
            figures = self._ttft.quantiles(now_ns, (0.5, 0.95)) + self._itl.quantiles(now_ns, (0.5, 0.99))
            self._latencies = (now_ns, figures)
        ttft_p50_ns, ttft_p95_ns, itl_p50_ns, itl_p99_ns = self._latencies[1]
        seconds = min(max(now_ns - self._since_ns, NS_PER_S), WINDOW_NS) / NS_PER_S
        num_free = self.num_blocks if last is None else last.num_free_blocks
        return Tiles(
            slots_busy=self.num_running,
            slots=self.num_slots,
            num_waiting=len(self.room),
            oldest_wait_ns=0 if oldest_ns is None else max(0, now_ns - oldest_ns),
            kv_used_share=round(1 - num_free / self.num_blocks, 4),
            output_tokens_per_s=round(self._tokens.total(now_ns) / seconds, 1),
            ttft_p50_ns=ttft_p50_ns,
            ttft_p95_ns=ttft_p95_ns,
            itl_p50_ns=itl_p50_ns,
            itl_p99_ns=itl_p99_ns,
        )


def _is_later(act: Act, step: StepRecord) -> bool:
    """An act that comes after the planning of a step, and is no end that this step has brought."""
    if isinstance(act, AdmitEvent | PreemptEvent | FinishEvent):
        return act.step_id > step.step_id
    return act.now_ns > step.scheduled_ns


def _as_sent(step: StepRecord, slots: list[int], num_prefill_tokens: int) -> list[object]:
    """A step as the stream sends it; the rows are flat, four numbers each."""
    flat: list[int] = [0] * (4 * len(slots))
    flat[0::4], flat[1::4], flat[2::4], flat[3::4] = slots, step.request_ids, step.nums, step.num_outputs
    num_prefill = num_prefill_tokens
    num_decode = sum(step.nums) - num_prefill - step.num_padded_rows
    return [
        step.step_id,
        step.scheduled_ns,
        step.now_ns,
        step.execute_ns,
        num_decode,
        num_prefill,
        step.num_padded_rows,
        step.num_running,
        step.num_waiting,
        step.num_held,
        step.num_free_blocks,
        step.num_cached_blocks,
        step.num_evicted_blocks,
        flat,
    ]


def _sent_ns(step: list[object]) -> int:
    now_ns = step[2]
    assert isinstance(now_ns, int)
    return now_ns


def _decided_ns(decision: Decision) -> int:
    return decision.now_ns
