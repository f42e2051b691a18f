"""The last minute of an engine, kept ready for those who watch: steps as they are sent, the requests, who waits, and
figures over the minute.

One `LiveState` serves all readers; it follows a `History` from where it was made, and costs nothing while there is
none. It knows what happened, not who may see it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from everystop.core.durations import NS_PER_S
from everystop.core.events import WaitEvent
from everystop.observe.blame import Blame
from everystop.observe.block_map import BlockRun, block_runs
from everystop.observe.decision_log import NO_STEP, Decision
from everystop.observe.history import History, Trail
from everystop.observe.live_figures import RecentFigures, Tiles
from everystop.observe.live_fold import LiveFold
from everystop.observe.live_request import LiveRequest
from everystop.observe.recent import WINDOW_S

WINDOW_NS = WINDOW_S * NS_PER_S
STEPS_A_TURN = 400  # some 20 ms of work at 32 rows
QUIET_NS = NS_PER_S  # acts that no step has followed for so long are told without one
BLOCKS_EVERY_NS = NS_PER_S // 2
BLOCKS_A_LOOK = 8192  # with more blocks, they are looked at less often


class Waiter(NamedTuple):
    """A waiting request, and why it waits; None where only a step is running."""

    trail: Trail
    wait: WaitEvent | None


def waits_since_ns(trail: Trail) -> int:
    """When a waiting request came, or came back."""
    return trail.preemptions[-1].now_ns if trail.preemptions else trail.since_ns


class LiveState(LiveFold):
    """Follows `history` from 60 s before `now_ns`.

    The engine runs since `since_ns`; `ask_blocks` has it say who holds which blocks, `ask_line` who boards in which
    order.
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
        ask_line: Callable[[], None],
    ) -> None:
        super().__init__(history)
        history.catch_up()
        self.num_slots = num_slots
        self.num_blocks = num_blocks
        self.queue = history.queue
        self.block_runs: list[BlockRun] = []
        self.blocks_version = 0
        self._ask_blocks = ask_blocks
        self._ask_line = ask_line
        self._line_asked_at = -1
        self._figures = RecentFigures(since_ns)
        self._blame = Blame(history)
        self._blocks_asked_ns = 0
        self._blocks_asked_at = -1
        self._blocks_seen: object = None
        self._step_position = history.steps.end - len(history.steps_since_ns(now_ns - WINDOW_NS))
        self._act_position = history.acts.end - len(history.acts_since_ns(now_ns - WINDOW_NS))
        self._begin(now_ns - WINDOW_NS, now_ns - WINDOW_NS)

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
            self._decide(Decision(now_ns, NO_STEP, 0, 0, tuple(self._told), {}))
        for request in self._blame.tick(now_ns):
            self._touch(request, request.changed_ns)
        self._look_at_blocks(now_ns)
        self._forget(now_ns - WINDOW_NS)
        return False

    def _note_end(self, request: LiveRequest) -> None:
        self._blame.note(request)

    def _note_outputs(self, now_ns: int, num_outputs: int, gaps: dict[int, int]) -> None:
        self._figures.add_step(now_ns, num_outputs, gaps)

    def _note_first_token(self, request: LiveRequest, now_ns: int) -> None:
        self._figures.add_first_token(now_ns, now_ns - request.received_ns)
        super()._note_first_token(request, now_ns)

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
        position = self._step_position + self._act_position
        if self.queue.ids and position != self._line_asked_at:
            self._line_asked_at = position
            self._ask_line()
        if position != self._blocks_asked_at and now_ns - self._blocks_asked_ns >= every_ns:
            self._blocks_asked_at, self._blocks_asked_ns = position, now_ns
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

    # -------------------------------------------------------------------- tell

    def knows(self, request_id: int) -> bool:
        """It is among the requests, or waits."""
        return request_id in self.requests or self.queue.holds(request_id)

    def waiting(self, most: int) -> list[Waiter]:
        """The first of those that wait, in the order in which they would board."""
        ids = self.queue.in_order(most)
        return [Waiter(self._history.trails.get(i) or Trail(i), self.queue.reason_of(i)) for i in ids]

    @property
    def oldest_wait_ns(self) -> int:
        """Since when the one that came first has waited, this time; `last_ns` of the history if nobody waits."""
        ids = self.queue.ids
        trail = self._history.trails.get(ids[0]) if ids else None
        return self._history.last_ns if trail is None else waits_since_ns(trail)

    def tiles(self, now_ns: int) -> Tiles:
        """The figures now."""
        figures = self._figures
        num_free = self.num_blocks if self._last is None else self._last.num_free_blocks
        ttft_p50_ns, ttft_p95_ns, itl_p50_ns, itl_p99_ns = figures.latencies(now_ns)
        return Tiles(
            slots_busy=self.num_running,
            slots=self.num_slots,
            num_waiting=len(self.queue.ids),
            oldest_wait_ns=max(0, now_ns - self.oldest_wait_ns) if self.queue.ids else 0,
            kv_used_share=round(1 - num_free / self.num_blocks, 4),
            output_tokens_per_s=figures.output_tokens_per_s(now_ns),
            ttft_p50_ns=ttft_p50_ns,
            ttft_p95_ns=ttft_p95_ns,
            itl_p50_ns=itl_p50_ns,
            itl_p99_ns=itl_p99_ns,
        )


def _sent_ns(step: list[object]) -> int:
    now_ns = step[2]
    assert isinstance(now_ns, int)
    return now_ns


def _decided_ns(decision: Decision) -> int:
    return decision.now_ns
