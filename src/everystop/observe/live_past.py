"""What the live stream told of an earlier stretch of a history, made again for one who scrolls back."""

from __future__ import annotations

from typing import Any

from everystop.core.durations import NS_PER_S
from everystop.observe.history import History
from everystop.observe.live_fold import LiveFold, is_later
from everystop.observe.live_teller import Teller

PAST_NS = 600 * NS_PER_S
STRETCH_NS = 30 * NS_PER_S
STEPS_A_STRETCH = 1500
ROWS_A_STRETCH = 30_000
STEPS_A_TURN = 50  # some 20 ms of work at 256 rows


class LivePast(LiveFold):
    """The last steps that came back before `before_ns`, over at most 30 s, and none from before `since_ns`.

    Stretches follow each other without a gap: each begins with the acts that the step before it leaves over. `go_on`
    does the work; `message` tells what has come of it.
    """

    def __init__(self, history: History, *, before_ns: int, since_ns: int) -> None:
        super().__init__(history)
        history.catch_up()
        steps = history.steps
        oldest = history.position_at(since_ns)
        self._end = max(oldest, history.position_at(before_ns))
        self._step_position = self._first_step(oldest)
        self.more = self._step_position > oldest
        self.from_ns = self.now_ns = before_ns
        if self._step_position < self._end:
            self.now_ns = steps[self._end - 1].now_ns
            self.from_ns = self._board()

    def _first_step(self, oldest: int) -> int:
        """Position of the first step of the stretch."""
        steps, end = self._history.steps, self._end
        if end == oldest:
            return end
        first = max(oldest, end - STEPS_A_STRETCH, self._history.position_at(steps[end - 1].now_ns - STRETCH_NS))
        position, num_rows = end - 1, steps[end - 1].num_rows
        while position > first and num_rows + steps[position - 1].num_rows <= ROWS_A_STRETCH:
            position -= 1
            num_rows += steps[position].num_rows
        return position

    def _board(self) -> int:
        """Find the first act of the stretch, and the requests as they stood then; returns from when the stretch is."""
        history = self._history
        steps, acts, first = history.steps, history.acts, self._step_position
        if first == steps.start:
            self._act_position = acts.start
            begin_ns = steps[first].scheduled_ns
            known_ns = acts[acts.start].now_ns if len(acts) else begin_ns
            self._begin(min(known_ns, begin_ns), begin_ns)
            return begin_ns
        before = steps[first - 1]
        position = history.act_position(before.scheduled_ns)
        while position < acts.end and not is_later(acts[position], before):
            position += 1
        begin_ns = acts[position].now_ns if position < acts.end else before.now_ns + 1
        self._begin(begin_ns, before.now_ns + 1)
        for act in acts.between(history.act_position(begin_ns), position):
            self._take_act(act)
        self._act_position = position
        return before.now_ns

    def go_on(self) -> bool:
        """Take in some more steps; True if that were not all."""
        end = min(self._end, self._step_position + STEPS_A_TURN)
        for step in self._history.steps.between(self._step_position, end):
            self._take_acts(step)
            self._take_step(step)
        self._step_position = end
        return end < self._end

    def message(self, teller: Teller) -> dict[str, Any]:
        """The stretch in the form of a message of the stream, with `from_ns` and whether there is `more` before it."""
        return {
            "from_ns": self.from_ns,
            "now_ns": self.now_ns,
            "steps": teller.steps(self.steps.since(0)),
            "requests": [teller.request(request) for request in self.changed.values()],
            "acts": teller.acts(self.decisions.since(0)),
            "more": self.more,
        }
