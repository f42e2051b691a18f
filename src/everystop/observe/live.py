"""What one reader of the live stream is told: the messages, each with what has changed since the last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everystop.core.durations import NS_PER_S
from everystop.observe.block_map import NOBODY, BlockRun
from everystop.observe.live_state import LiveState, Waiter, waits_since_ns
from everystop.observe.live_teller import Strangers, Teller
from everystop.observe.waiting import STEP_RUNNING, because
from everystop.observe.wording import ANOTHER, NameOf

WAITING_SHOWN = 100
FEW_WAITING, MANY_WAITING_EVERY_NS = 20, NS_PER_S // 2
DECISIONS_A_MESSAGE = 200
STEPS_A_MESSAGE = 400
STEPS_BEHIND = 1000  # a reader that is further behind than that does not get the oldest
_NOT_OF_STRANGERS_WAITING = dict.fromkeys(("num_prompt_tokens", "since_ns", "reason", "need", "have", "behind"))


class LiveReader:
    """The messages of one stream over a `LiveState`.

    `name_of` gives the name of a request that the reader may see, else None; with `sees_all` it gives one for each.
    `server` is what the first message says of the server; `strangers` are those that the reader has met elsewhere.
    """

    def __init__(
        self,
        state: LiveState,
        *,
        name_of: NameOf,
        sees_all: bool,
        server: Mapping[str, Any],
        strangers: Strangers | None = None,
    ) -> None:
        self._state = state
        self._strangers = strangers or Strangers(name_of)
        self._teller = Teller(self._strangers, sees_all=sees_all)
        self._server = server
        self._step_position = state.steps.start
        self._decision_position = state.decisions.start
        self._version = 0
        self._blocks_version = 0
        self._waiting_ns = -MANY_WAITING_EVERY_NS
        self._is_first = True
        self._has_caught_up = False
        self.num_dropped = 0

    @property
    def is_behind(self) -> bool:
        """There are steps that have not been told."""
        return self._step_position < self._state.steps.end

    @property
    def has_news(self) -> bool:
        """Something has happened since the last message."""
        state = self._state
        return (
            self._is_first
            or self.is_behind
            or self._version != state.version
            or self._decision_position < state.decisions.end
            or self._blocks_version != state.blocks_version
        )

    def message(self, now_ns: int) -> dict[str, Any]:
        """What has changed; counts are always whole, and steps or decisions that are left out are counted."""
        state = self._state
        is_full, self._is_first = self._is_first, False
        message: dict[str, Any] = {"full": is_full, "now_ns": now_ns}
        if is_full:
            message["server"] = self._server
        message["steps"] = self._steps()
        message["requests"] = self._requests()
        message["num_waiting"] = len(state.queue.ids)
        if len(state.queue.ids) <= FEW_WAITING or now_ns - self._waiting_ns >= MANY_WAITING_EVERY_NS:
            self._waiting_ns = now_ns
            message["waiting"] = [self._waiting(waiter) for waiter in state.waiting(WAITING_SHOWN)]
        message["tiles"] = state.tiles(now_ns)
        if self._blocks_version != state.blocks_version:
            self._blocks_version = state.blocks_version
            message["kv"] = {"runs": self._block_runs()}
        message["acts"] = self._acts(is_full)
        message["dropped"] = self.num_dropped
        self._strangers.forget(2 * (len(state.requests) + WAITING_SHOWN) + 1000, state.knows)
        return message

    def _steps(self) -> list[list[object]]:
        steps, first = self._state.steps, self._step_position
        if self._has_caught_up and steps.end - first > STEPS_BEHIND:
            first = steps.end - STEPS_A_MESSAGE
        first = max(first, steps.start)
        if self._has_caught_up:
            self.num_dropped += first - self._step_position
        last = min(steps.end, first + STEPS_A_MESSAGE)
        self._step_position = last
        self._has_caught_up = self._has_caught_up or last == steps.end
        sent = steps.between(first, last)
        return self._teller.steps(sent)

    def _requests(self) -> list[dict[str, Any]]:
        changed = self._state.changed_since(self._version)
        self._version = self._state.version
        return [self._teller.request(request) for request in reversed(changed)]

    def _waiting(self, waiter: Waiter) -> dict[str, Any]:
        request_id, wait = waiter.trail.request_id, waiter.wait
        shown_id, name = self._strangers.id(request_id), self._strangers.name(request_id)
        if name is None:
            return {"id": shown_id, "name": None, "sentence": ANOTHER} | _NOT_OF_STRANGERS_WAITING
        arrival = waiter.trail.arrival
        ahead = NOBODY if wait is None else wait.behind if wait.behind != NOBODY else wait.request_id
        needs = wait if wait is not None and wait.request_id >= 0 and self._strangers.sees(wait.request_id) else None
        return {
            "id": shown_id,
            "name": name,
            "num_prompt_tokens": None if arrival is None else arrival.num_prompt_tokens,
            "since_ns": waits_since_ns(waiter.trail),
            "reason": STEP_RUNNING if wait is None else wait.reason.value,
            "sentence": because(wait, request_id, self._strangers.number),
            "need": 0 if needs is None else needs.need,
            "have": 0 if needs is None else needs.have,
            "behind": None if ahead in (NOBODY, request_id) else self._strangers.id(ahead),
        }

    def _block_runs(self) -> list[tuple[str | int, ...]]:
        return [self._block_run(run) for run in self._state.block_runs]

    def _block_run(self, run: BlockRun) -> tuple[str | int, ...]:
        shown = self._strangers.id
        told = (run.kind, run.num, shown(run.owner))
        return told if run.num_owners < 2 else (*told, run.num_owners, *map(shown, run.others))

    def _acts(self, is_full: bool) -> list[tuple[int, int, str]]:
        decisions = self._state.decisions
        first = max(self._decision_position, decisions.start, decisions.end - DECISIONS_A_MESSAGE)
        if not is_full:
            self.num_dropped += first - self._decision_position
        self._decision_position = decisions.end
        return self._teller.acts(decisions.since(first))
