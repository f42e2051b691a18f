"""One request as those who watch see it, and how a request stood at a time in the past."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from everystop.core.durations import NS_PER_S
from everystop.core.events import AdmitEvent, FinishEvent, PreemptEvent
from everystop.core.request import FinishReason
from everystop.observe.history import History, StepRecord, Trail

REFRESH_NS = NS_PER_S  # how often the counts of a request that just runs are told again
WAITING, RUNNING = "waiting", "running"
_ENDS = {FinishReason.ABORT: "aborted", FinishReason.ERROR: "failed"}


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request that has boarded, or has ended without.

    `version` grows with each change that is to be told, `changed_ns` is when that was. `max_gap_ns` is the longest gap
    between two of its tokens, 0 as long as there is none. `blame` is the label of the main cause of its time, if it is
    over and that has been worked out.
    """

    trail: Trail
    num_prompt_tokens: int = 0  # 0 too where the history no longer knows
    state: str = WAITING
    slot: int = -1
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    admit_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int = 0
    max_gap_ns: int = 0
    finish_ns: int | None = None
    finish_reason: str | None = None
    blame: str | None = None
    changed_ns: int = 0
    version: int = 0

    @classmethod
    def of(cls, trail: Trail) -> LiveRequest:
        """One that has done nothing yet."""
        return cls(trail, 0 if trail.arrival is None else trail.arrival.num_prompt_tokens)

    @property
    def request_id(self) -> int:
        """The id in the engine."""
        return self.trail.request_id

    @property
    def received_ns(self) -> int:
        """When its client had sent it, or, where that is not known, when the engine heard of it."""
        client = self.trail.client
        return self.trail.since_ns if client is None else client.received_ns

    @property
    def guessed_blame(self) -> str | None:
        """Of one that is over, by its times alone, what took longest: a guess beside `blame`, and marked as one. None
        where there is nothing to tell it by.
        """
        end_ns = self.finish_ns
        if end_ns is None or end_ns <= self.received_ns:
            return None
        boarded_ns = end_ns if self.admit_ns is None else self.admit_ns
        first_ns = end_ns if self.first_token_ns is None else self.first_token_ns
        stretches = {
            "≈ queued": boarded_ns - self.received_ns,
            "≈ prefill": first_ns - boarded_ns,
            "≈ decode": end_ns - first_ns,
        }
        return max(stretches, key=stretches.__getitem__)

    def admit(self, act: AdmitEvent) -> None:
        """It boards."""
        self.state, self.slot = RUNNING, act.slot
        if self.admit_ns is None:
            self.admit_ns, self.num_cached_tokens = act.now_ns, act.num_cached_tokens

    def preempt(self, _act: PreemptEvent) -> None:
        """It has lost its place."""
        self.state = WAITING
        self.num_preemptions += 1

    def finish(self, act: FinishEvent) -> None:
        """It has ended."""
        self.num_output_tokens, self.num_cached_tokens = act.num_output_tokens, act.num_cached_tokens
        self.end(_ENDS.get(act.reason, "finished"), act.now_ns, act.reason.value)

    def end(self, state: str, now_ns: int, reason: str) -> None:
        """It is over."""
        self.state, self.finish_ns, self.finish_reason = state, now_ns, reason

    def take_tokens(self, now_ns: int, num_known: int, num_new: int) -> int:
        """It has `num_known` output tokens now, `num_new` of them new. Returns the gap before them, 0 if that is not
        known; the first tokens, of which there is no gap, set `first_token_ns`.
        """
        last_ns, self.last_token_ns = self.last_token_ns, now_ns
        if self.state == RUNNING:
            self.num_output_tokens = num_known
        if not last_ns:
            if self.first_token_ns is None and num_known == num_new:
                self.first_token_ns = now_ns
            return 0
        gap_ns = now_ns - last_ns
        if gap_ns > self.max_gap_ns:
            self.max_gap_ns = gap_ns
        return gap_ns


def requests_at(history: History, before_ns: int, tokens_before_ns: int) -> Iterator[LiveRequest]:
    """The requests that had boarded before then and were not over, as they stood, with the tokens of the steps
    that came back before `tokens_before_ns`. Steps are looked through for the first tokens of each from where it
    boarded.
    """
    for trail in list(history.trails.values()):
        if trail.finish is not None and trail.finish.now_ns < before_ns:
            continue
        if not trail.admits or trail.admits[0].now_ns >= before_ns:
            continue
        acts: list[AdmitEvent | PreemptEvent] = [*trail.admits, *trail.preemptions]
        acts = sorted((act for act in acts if act.now_ns < before_ns), key=lambda act: act.now_ns)
        request = LiveRequest.of(trail)
        for act in acts:
            if isinstance(act, AdmitEvent):
                request.admit(act)
            else:
                request.preempt(act)
        request.changed_ns = acts[-1].now_ns
        _look_up_first_token(history, request, tokens_before_ns)
        yield request


def _look_up_first_token(history: History, request: LiveRequest, before_ns: int) -> None:
    for step, num_known, num_new in _tokens_before(history, request, before_ns):
        request.first_token_ns = step.now_ns if num_known == num_new else None
        request.num_output_tokens = num_known
        return


def _tokens_before(history: History, request: LiveRequest, before_ns: int) -> Iterator[tuple[StepRecord, int, int]]:
    """Steps before then that brought the request tokens, with how many it had after each, and how many were new."""
    steps = history.steps
    for position in range(history.step_position(request.trail.admits[0].step_id), steps.end):
        step = steps[position]
        if step.now_ns >= before_ns:
            return
        row = step.row_of(request.request_id)
        if row >= 0 and step.num_outputs[row]:
            num_known = step.starts[row] + step.nums[row] + step.num_outputs[row] - request.num_prompt_tokens
            yield step, num_known, step.num_outputs[row]
