"""A scheduler that tells a listener of every call; it decides nothing, so a recorded run is the run itself."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Protocol

from everystop.core.errors import RequestError
from everystop.core.events import Event, FinishEvent
from everystop.core.kv_cache import KVCache
from everystop.core.limits import Limits
from everystop.core.plan import StepPlan, StepResult
from everystop.core.policy.base import Policy
from everystop.core.request import Request
from everystop.core.scheduler import Scheduler
from everystop.core.step_time import UNKNOWN_STEP_TIMES, StepTimeModel

RECORD_VERSION = 2
"""Of the calls below as a record writes them; one that a replay would misread gets the next number.

Version 1 has no requests whose prompts are scored, and is otherwise the same.
"""


class Listener(Protocol):
    """Hears of each call once it has been carried out; must neither raise nor keep the caller waiting."""

    def started(self, settings: dict[str, dict[str, Any]]) -> None:
        """A scheduler begins, with nothing in its cache; `settings` holds the fields of `limits`, `kv` and
        `step_times`.
        """

    def added(self, request: Request, now_ns: int) -> None:
        """A request was taken."""

    def refused(self, request: Request, now_ns: int) -> None:
        """A request was refused by the scheduler."""

    def declined(self, request: Request, now_ns: int) -> None:
        """A request was refused by whoever asks, before it came to the scheduler."""

    def aborted(self, request_id: int, now_ns: int) -> None:
        """A request was aborted, perhaps one that is unknown or has ended."""

    def scheduled(self, plan: StepPlan, now_ns: int) -> None:
        """A plan was made."""

    def updated(self, plan: StepPlan, result: StepResult, now_ns: int, ended: list[int]) -> None:
        """A result was taken back, and these requests have ended since the last one."""


class RecordingScheduler(Scheduler):
    """A `Scheduler` in every respect, with a listener."""

    def __init__(
        self,
        limits: Limits,
        kv: KVCache,
        policy: Policy,
        listener: Listener,
        step_times: StepTimeModel = UNKNOWN_STEP_TIMES,
    ) -> None:
        super().__init__(limits, kv, policy, step_times)
        self._listener = listener
        geometry = {
            "num_blocks": kv.pool.num_blocks,
            "block_size": kv.block_size,
            "enable_prefix_caching": kv.enable_prefix_caching,
        }
        listener.started({"limits": asdict(limits), "kv": geometry, "step_times": asdict(step_times)})

    def add(self, request: Request, now_ns: int) -> None:
        try:
            super().add(request, now_ns)
        except RequestError:
            self._listener.refused(request, now_ns)
            raise
        self._listener.added(request, now_ns)

    def note_refusal(self, request: Request, error: RequestError, now_ns: int) -> None:
        super().note_refusal(request, error, now_ns)
        self._listener.declined(request, now_ns)

    def abort(self, request_id: int, now_ns: int) -> bool:
        known = super().abort(request_id, now_ns)
        self._listener.aborted(request_id, now_ns)
        return known

    def schedule(self, now_ns: int) -> StepPlan:
        plan = super().schedule(now_ns)
        self._listener.scheduled(plan, now_ns)
        return plan

    def update(self, plan: StepPlan, result: StepResult, now_ns: int) -> list[Event]:
        events = super().update(plan, result, now_ns)
        ended = [event.request_id for event in events if type(event) is FinishEvent]
        self._listener.updated(plan, result, now_ns, ended)
        return events
