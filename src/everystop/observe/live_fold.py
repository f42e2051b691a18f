"""How steps and acts of a history become what is told of them: steps as they are sent, requests as they stand, and
decisions. It keeps all that it has taken in.
"""

from __future__ import annotations

from collections import deque

from everystop.core.events import AdmitEvent, ArrivalEvent, FinishEvent, PreemptEvent, RefuseEvent, WaitEvent
from everystop.observe.decision_log import Decision, is_told
from everystop.observe.history import Act, History, StepRecord, Trail
from everystop.observe.live_request import REFRESH_NS, RUNNING, LiveRequest, requests_at
from everystop.observe.log import Log


class LiveFold:
    """Folds `history` step by step. `changed` holds the requests in the order in which they have changed."""

    def __init__(self, history: History) -> None:
        self.requests: dict[int, LiveRequest] = {}
        self.changed: dict[int, LiveRequest] = {}
        self.num_running = 0
        self.version = 0
        self.steps: Log[list[object]] = Log()
        self.decisions: Log[Decision] = Log()
        self._history = history
        self._told: list[Act] = []
        self._over: deque[LiveRequest] = deque()
        self._last: StepRecord | None = None
        self._act_position = 0

    def _begin(self, before_ns: int, tokens_before_ns: int) -> None:
        """The requests as they stood when the window began."""
        for request in requests_at(self._history, before_ns, tokens_before_ns):
            self.requests[request.request_id] = request
            self.num_running += request.state == RUNNING
            self._touch(request, request.changed_ns)

    def _take_acts(self, step: StepRecord | None) -> None:
        """The acts up to the planning of a step, or all; one of a later step ends it."""
        acts = self._history.acts
        self._act_position = max(self._act_position, acts.start)
        while self._act_position < acts.end:
            act = acts[self._act_position]
            if step is not None and is_later(act, step):
                return
            self._act_position += 1
            self._take_act(act)
            if is_told(act):
                self._told.append(act)

    def _take_act(self, act: Act) -> None:
        if isinstance(act, WaitEvent | ArrivalEvent):
            return
        request = self._meet(act.request_id)
        self.num_running -= request.state == RUNNING
        match act:
            case AdmitEvent():
                request.admit(act)
            case PreemptEvent():
                request.preempt(act)
            case FinishEvent():
                request.finish(act)
            case RefuseEvent():
                request.end("refused", act.now_ns, act.code)
        self.num_running += request.state == RUNNING
        if request.finish_ns is not None:
            self._over.append(request)
            self._note_end(request)
        self._touch(request, act.now_ns)

    def _take_step(self, step: StepRecord) -> None:
        requests, now_ns = self.requests, step.now_ns
        riders = [requests.get(i) or self._meet_rider(i, now_ns) for i in step.request_ids]
        num_prefill, num_outputs, gaps = 0, 0, dict[int, int]()
        num_own = step.num_rows - step.num_padded_rows
        for request, start, num, num_new in zip(
            riders[:num_own], step.starts, step.nums, step.num_outputs, strict=False
        ):
            num_prompt = request.num_prompt_tokens
            if num > 1 or start < num_prompt:
                num_prefill += num
            if num_new:
                num_outputs += num_new
                gap_ns = request.take_tokens(now_ns, start + num + num_new - num_prompt, num_new)
                if gap_ns:
                    gaps[gap_ns] = gaps.get(gap_ns, 0) + num_new
                    if now_ns - request.changed_ns >= REFRESH_NS and request.state == RUNNING:
                        self._touch(request, now_ns)
                elif request.first_token_ns == now_ns:
                    self._note_first_token(request, now_ns)
        self._note_outputs(now_ns, num_outputs, gaps)
        self._last = step
        self.steps.append(_as_sent(step, [request.slot for request in riders], num_prefill))
        if self._told:
            self._decide(_decision(step, riders[:num_own], tuple(self._told)))

    def _note_end(self, request: LiveRequest) -> None:
        """A request is over."""

    def _note_outputs(self, now_ns: int, num_outputs: int, gaps: dict[int, int]) -> None:
        """A step has brought tokens; `gaps` counts them by the time since the last of the same request."""

    def _note_first_token(self, request: LiveRequest, now_ns: int) -> None:
        """A request has its first token."""
        self._touch(request, now_ns)

    def _decide(self, decision: Decision) -> None:
        self.decisions.append(decision)
        self._told.clear()

    def _touch(self, request: LiveRequest, now_ns: int) -> None:
        self.version += 1
        request.version, request.changed_ns = self.version, now_ns
        self.changed.pop(request.request_id, None)
        self.changed[request.request_id] = request

    def _meet(self, request_id: int) -> LiveRequest:
        """The request; one that the history has forgotten already has no past."""
        request = self.requests.get(request_id)
        if request is None:
            trail = self._history.trails.get(request_id) or Trail(request_id)
            request = self.requests[request_id] = LiveRequest.of(trail)
        return request

    def _meet_rider(self, request_id: int, now_ns: int) -> LiveRequest:
        """One that had ended before the window and has a row in it: a padded one, or one that comes back in vain."""
        request = self._meet(request_id)
        if request.trail.admits:
            request.slot = request.trail.admits[-1].slot
        request.state, request.changed_ns = "finished", now_ns
        self._over.append(request)
        return request

    def changed_since(self, version: int) -> list[LiveRequest]:
        """Requests that have changed since then, the last first."""
        found = []
        for request in reversed(self.changed.values()):
            if request.version <= version:
                break
            found.append(request)
        return found


def is_later(act: Act, step: StepRecord) -> bool:
    """An act that comes after the planning of a step, and is no end that this step has brought."""
    if isinstance(act, AdmitEvent | PreemptEvent | FinishEvent):
        return act.step_id > step.step_id
    return act.now_ns > step.scheduled_ns


def _decision(step: StepRecord, riders: list[LiveRequest], acts: tuple[Act, ...]) -> Decision:
    """What a step did; `riders` are those of its rows that are no padding."""
    boarded = {act.request_id for act in acts if isinstance(act, AdmitEvent)}
    computed, num_decodes, num_prompts = dict[int, int](), 0, 0
    for request, start, num in zip(riders, step.starts, step.nums, strict=False):
        if request.request_id in boarded:
            computed[request.request_id] = start + num
        elif num > 1 or start < request.num_prompt_tokens:
            num_prompts += 1
        else:
            num_decodes += 1
    return Decision(step.now_ns, step.step_id, num_decodes, num_prompts, acts, computed)


def _as_sent(step: StepRecord, slots: list[int], num_prefill: int) -> list[object]:
    """A step as the stream sends it; the rows are flat, four numbers each."""
    flat: list[int] = [0] * (4 * len(slots))
    flat[0::4], flat[1::4], flat[2::4], flat[3::4] = slots, step.request_ids, step.nums, step.num_outputs
    return [
        step.step_id,
        step.scheduled_ns,
        step.now_ns,
        step.execute_ns,
        sum(step.nums) - num_prefill - step.num_padded_rows,
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
