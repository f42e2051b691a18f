"""Cuts the life of one request into consecutive pieces with one cause each, from what the history remembers of it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

from everystop.core.events import AdmitEvent, PreemptEvent, WaitEvent
from everystop.observe.causes import Cause
from everystop.observe.history import History, StepRecord, Trail
from everystop.observe.reasons import reasons
from everystop.observe.step_share import StepShare, share_of


class Served(NamedTuple):
    """A step that computed a row of the request: which row, when the step began, and how its time is divided.

    `activity` is what the row did: PREFILL up to the last token of the prompt, then DECODE; PREEMPTED while it computed
    again what a preemption had cost.
    """

    record: StepRecord
    row: int
    begin_ns: int
    share: StepShare
    activity: Cause

    @property
    def num_tokens(self) -> int:
        """Tokens of its own that were computed."""
        return self.record.nums[self.row]

    @property
    def num_outputs(self) -> int:
        """Tokens that came out."""
        return self.record.num_outputs[self.row]


class Piece(NamedTuple):
    """A stretch of time and its cause; `wait` is the scheduler's reason, `served` the step."""

    start_ns: int
    end_ns: int
    cause: Cause
    wait: WaitEvent | None = None
    served: Served | None = None

    @property
    def ns(self) -> int:
        """Its length."""
        return self.end_ns - self.start_ns


@dataclass(slots=True)
class Life:
    """The pieces cover the time from `origin_ns` to `end_ns` exactly, in order; none is empty."""

    trail: Trail
    origin_ns: int
    end_ns: int
    pieces: list[Piece] = field(default_factory=list)
    served: list[Served] = field(default_factory=list)
    num_recomputed_tokens: int = 0

    @property
    def e2e_ns(self) -> int:
        """Its whole length so far."""
        return self.end_ns - self.origin_ns

    def between(self, first_ns: int, last_ns: int) -> list[Piece]:
        """The pieces that touch the time between the two."""
        first = bisect_right(self.pieces, first_ns, key=lambda piece: piece.end_ns)
        last = bisect_left(self.pieces, last_ns, key=lambda piece: piece.start_ns)
        return self.pieces[first:last]

    def ns_by_cause(self, first_ns: int | None = None, last_ns: int | None = None) -> dict[Cause, int]:
        """How long each cause lasted, in order of the causes, in all or between two times."""
        first_ns = self.origin_ns if first_ns is None else first_ns
        last_ns = self.end_ns if last_ns is None else last_ns
        sums = dict.fromkeys(Cause, 0)
        for piece in self.between(first_ns, last_ns):
            sums[piece.cause] += min(piece.end_ns, last_ns) - max(piece.start_ns, first_ns)
        return {cause: ns for cause, ns in sums.items() if ns}

    @property
    def num_output_tokens(self) -> int:
        """Tokens that have come out, also in steps that are forgotten where it is over."""
        finish = self.trail.finish
        return finish.num_output_tokens if finish is not None else sum(served.num_outputs for served in self.served)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that came from the prefix cache when it first boarded."""
        admits = self.trail.admits
        return admits[0].num_cached_tokens if admits else 0

    @property
    def first_token_ns(self) -> int | None:
        """When the first token came out: in the step that reached the prompt's end; None if that is forgotten."""
        first = next((served for served in self.served if served.num_outputs), None)
        arrival = self.trail.arrival
        if first is None or arrival is None:
            return None
        end = first.record.starts[first.row] + first.num_tokens
        return first.record.now_ns if end == arrival.num_prompt_tokens else None


def life_of(history: History, trail: Trail, now_ns: int, *, is_last: bool = True) -> Life:
    """The life of one sequence up to its end, or up to `now_ns`.

    `is_last` says that it ended the answer of its client, which was delivered afterwards; others end for themselves.
    """
    client, finish = trail.client, trail.finish or trail.refusal
    origin_ns = trail.since_ns if client is None else client.received_ns
    if client is None or (finish is not None and not is_last):
        end_ns = now_ns if finish is None else finish.now_ns
    else:
        end_ns = now_ns if client.delivered_ns is None else client.delivered_ns
    return _Cutter(history, Life(trail, origin_ns, max(origin_ns, end_ns))).cut()


class _Cutter:
    """Moves along a life and cuts it behind itself."""

    def __init__(self, history: History, life: Life) -> None:
        self._history = history
        self._life = life
        self._trail = life.trail
        self._at_ns = life.origin_ns
        self._is_served = False  # since it boarded
        self._is_behind = False  # it has lost its place and not yet computed again what that cost
        self._num_lost_tokens = 0
        self._num_reached = 0  # the furthest position that it has reached
        self._skipped_until_ns = 0  # the return of the last step that left it out
        self._moves: list[AdmitEvent | PreemptEvent] = []

    def cut(self) -> Life:
        """All pieces."""
        trail, life = self._trail, self._life
        if trail.client is not None:
            self._hand_over(trail.client.submitted_ns)
        if trail.arrival is not None:
            self._wait_to_board()
            if trail.admits:
                self._stay()
        if trail.is_over:
            self._to(life.end_ns, Cause.DELIVERY)
        assert self._at_ns == life.end_ns
        return life

    def _to(self, until_ns: int, cause: Cause, wait: WaitEvent | None = None, served: Served | None = None) -> None:
        until_ns = min(until_ns, self._life.end_ns)
        if until_ns > self._at_ns:
            self._life.pieces.append(Piece(self._at_ns, until_ns, cause, wait, served))
            self._at_ns = until_ns

    @property
    def _over_ns(self) -> int:
        """When it ended in the engine."""
        finish = self._trail.finish
        return self._life.end_ns if finish is None else finish.now_ns

    # ---------------------------------------------------------------- waiting

    def _hand_over(self, submitted_ns: int) -> None:
        """Until the engine has taken it, which it does between two steps."""
        self._to(submitted_ns, Cause.RECEIVE)
        first = self._trail.arrival or self._trail.refusal
        if first is None:
            self._to(self._life.end_ns, Cause.STEP_RUNNING)
            return
        landed = self._history.steps_between_ns(submitted_ns, first.now_ns)
        if landed:
            self._to(landed[-1].now_ns, Cause.STEP_RUNNING)
        self._to(first.now_ns, Cause.HOST)

    def _wait_to_board(self) -> None:
        trail = self._trail
        assert trail.arrival is not None
        until_ns = trail.admits[0].now_ns if trail.admits else self._over_ns
        known_ns = self._history.acts_known_ns
        if known_ns > trail.arrival.now_ns:
            self._to(min(known_ns, until_ns), Cause.UNATTRIBUTED)
        for changed_ns, wait in reasons(self._history, trail, until_ns):
            self._to(changed_ns, Cause.STEP_RUNNING if wait is None else Cause.of_wait(wait.reason), wait)

    # --------------------------------------------------------------- on board

    def _stay(self) -> None:
        """From the first boarding to the end in the engine."""
        history, trail = self._history, self._trail
        self._moves = sorted([*trail.admits, *trail.preemptions], key=lambda move: move.step_id)
        self._num_reached = trail.admits[0].num_cached_tokens
        steps = history.steps
        first_id = trail.admits[0].step_id
        last_id = trail.finish.step_id if trail.finish is not None else first_id + (1 << 62)
        position = history.step_position(first_id)
        if position == steps.start and len(steps) and steps[position].step_id > first_id:
            self._to(min(steps[position].scheduled_ns, self._over_ns), Cause.UNATTRIBUTED)
        landed_ns = steps[position - 1].now_ns if position > steps.start else 0
        for record in steps.between(position, steps.end):
            if record.step_id > last_id or record.scheduled_ns >= self._life.end_ns:
                break
            row, begin_ns = record.row_of(trail.request_id), max(record.scheduled_ns, landed_ns)
            landed_ns = record.now_ns
            if begin_ns >= self._over_ns and landed_ns > self._over_ns:
                break
            self._move_to(record.step_id)
            if row < 0:
                self._skipped_until_ns = landed_ns
            else:
                self._pass_to(begin_ns)
                self._serve(record, row, begin_ns)
        self._move_to(last_id)
        if trail.is_over:
            self._pass_to(self._over_ns)
        else:
            self._pass_to(self._skipped_until_ns)
            self._to(self._life.end_ns, self._activity_now())

    def _serve(self, record: StepRecord, row: int, begin_ns: int) -> None:
        start, end = record.starts[row], record.starts[row] + record.nums[row]
        if self._is_behind and start >= self._num_lost_tokens:
            self._is_behind = False
        activity = Cause.PREEMPTED if self._is_behind else Cause.DECODE
        if not self._is_behind and start < self._num_prompt_tokens:
            activity = Cause.PREFILL
        served = Served(record, row, begin_ns, share_of(record, row, begin_ns), activity)
        self._life.served.append(served)
        self._life.num_recomputed_tokens += max(0, min(end, self._num_reached) - start)
        self._num_reached = max(self._num_reached, end)
        self._cut_step(served)
        self._is_served = True
        self._skipped_until_ns = 0
        if end >= self._num_lost_tokens:
            self._is_behind = False

    def _cut_step(self, served: Served) -> None:
        """The parts of a step in the order of time; others' prefill is no certain part of it, and comes after its own.

        Host work is put first, though a little of it comes last.
        """
        until_ns = min(served.record.now_ns, self._over_ns)
        if served.activity is Cause.PREEMPTED:
            self._to(until_ns, Cause.PREEMPTED, served=served)
            return
        at_ns = served.begin_ns
        for ns, cause in zip(
            served.share, (Cause.HOST, served.activity, Cause.OTHERS_PREFILL, Cause.SAMPLING), strict=True
        ):
            at_ns += ns
            self._to(min(at_ns, until_ns), cause, served=served)

    def _move_to(self, step_id: int) -> None:
        """It has lost its place, and boarded, as the plans up to that step say."""
        while self._moves and self._moves[0].step_id <= step_id:
            move = self._moves.pop(0)
            self._pass_to(move.now_ns)
            self._is_served = False
            if isinstance(move, PreemptEvent):
                self._is_behind = True
                self._num_lost_tokens = max(self._num_lost_tokens, move.num_lost_tokens)

    def _pass_to(self, until_ns: int) -> None:
        """Time in which no step served it, and it neither lost its place nor boarded."""
        until_ns = min(until_ns, self._over_ns)
        if self._is_behind:
            self._to(until_ns, Cause.PREEMPTED)
        elif not self._is_served:
            self._to(until_ns, Cause.STEP_RUNNING)  # it has boarded, and the step before its first is still running
        else:
            self._to(min(self._skipped_until_ns, until_ns), Cause.SKIPPED)
            self._to(until_ns, Cause.HOST)

    def _activity_now(self) -> Cause:
        """What a request on board that lives is taken to be doing since the last step: what it would do next."""
        if self._is_behind:
            return Cause.PREEMPTED
        return Cause.PREFILL if self._num_reached < self._num_prompt_tokens else Cause.DECODE

    @property
    def _num_prompt_tokens(self) -> int:
        arrival = self._trail.arrival
        return 0 if arrival is None else arrival.num_prompt_tokens
