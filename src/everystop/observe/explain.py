"""Why a request took as long as it did: one sentence, causes that sum to its time exactly, and what it was beside.

An explanation is computed when somebody asks, from the history alone; nothing is prepared for it while serving.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from typing import Any, NamedTuple

from everystop.core.request import FinishReason
from everystop.observe.advice import Advice, advice_for
from everystop.observe.causes import Cause
from everystop.observe.gaps import Token, tokens_of
from everystop.observe.history import History, Trail
from everystop.observe.life import Life, Served, life_of
from everystop.observe.sentence import Story, sentence_of
from everystop.observe.waterfall import Segment, segments_of
from everystop.observe.wording import SIBLING, NameOf, number_name

LIVE = ("running", "waiting")
MAX_STEPS = 2000
MAX_MATES = 20_000  # over all steps, such as 625 steps of 32 rows
MAX_CHOICES = 8


class Mate(NamedTuple):
    """Another row of a step; `id` is None for a request that the reader may not see."""

    id: str | None
    num_tokens: int


class StepView(NamedTuple):
    """A step that served the request. Times count from the beginning of its life; `host_ns`, `own_ns`, `others_ns` and
    sampling, which is the rest, are the parts of the step; those of a preempted request count as lost all the same.
    """

    step_id: int
    start_ns: int
    end_ns: int
    own_ns: int
    others_ns: int
    host_ns: int
    num_rows: int
    num_tokens: int
    own_tokens: int
    mates: tuple[Mate, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One sequence, or an HTTP request by the one of its `num_choices` sequences that ended last; the last eight to end
    are in `choices` then.

    Times are integer nanoseconds; `ns_by_cause` sums to `e2e_ns` and `segments` cover it, both exactly. `received_ns`
    is of the engine's clock, all other times count from there. `steps` are thinned evenly where there are many.
    """

    id: str
    state: str
    is_live: bool
    sentence: str
    received_ns: int
    e2e_ns: int
    ttft_ns: int | None
    queue_ns: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_recomputed_tokens: int
    finish_reason: str | None
    ns_by_cause: dict[Cause, int]
    segments: list[Segment]
    steps: list[StepView]
    num_steps: int
    tokens: list[Token]
    advice: list[Advice]
    num_choices: int
    choices: list[Explanation]

    @property
    def steps_thinned(self) -> bool:
        """Not all steps are shown."""
        return len(self.steps) < self.num_steps

    def as_data(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        plain = ("ns_by_cause", "segments", "steps", "tokens", "advice", "choices")
        data = {name: getattr(self, name) for name in self.__slots__ if name not in plain}
        return data | {
            "causes": [self._cause_data(cause, ns) for cause, ns in self.ns_by_cause.items()],
            "segments": [segment._asdict() for segment in self.segments],
            "steps": [
                step._asdict() | {"mates": [{"id": name, "num_tokens": num} for name, num in step.mates]}
                for step in self.steps
            ],
            "steps_thinned": self.steps_thinned,
            "tokens": [token._asdict() for token in self.tokens],
            "choices": [choice.as_data() for choice in self.choices],
            "advice": [advice._asdict() for advice in self.advice],
        }

    def _cause_data(self, cause: Cause, ns: int) -> dict[str, Any]:
        share = ns / self.e2e_ns if self.e2e_ns else 0.0
        is_modelled = cause.is_modelled
        return {"cause": cause, "label": cause.label, "ns": ns, "share": share, "is_modelled": is_modelled}


def explain(history: History, request_ids: Sequence[int], *, now_ns: int, name_of: NameOf) -> Explanation:
    """Explain the sequences of one HTTP request, or one sequence.

    `name_of` names other requests, None where the reader may not see them. Raises LookupError if none of the sequences
    is remembered, which is so for the oldest after a while.
    """
    shown = last_to_end(history, request_ids, now_ns, MAX_CHOICES)
    headline = _explain_one(history, shown[0], now_ns, name_of, is_last=True)
    if len(request_ids) == 1:
        return headline
    choices = [
        _explain_one(history, each, now_ns, name_of, is_last=each is shown[0], max_mates=MAX_MATES // len(shown))
        for each in sorted(shown, key=lambda trail: trail.request_id)
    ]
    return replace(headline, num_choices=len(request_ids), choices=choices)


def tell(history: History, request_ids: Sequence[int], *, now_ns: int, name_of: NameOf) -> str:
    """The sentence of that explanation alone, at a third of the cost; raises LookupError as well."""
    (trail,) = last_to_end(history, request_ids, now_ns, 1)
    return tell_life(history, life_of(history, trail, now_ns), name_of=name_of)


def tell_life(history: History, life: Life, *, name_of: NameOf) -> str:
    """The sentence of a life that has been cut."""
    return sentence_of(Story(history, life, _beside_siblings(life.trail, name_of), state_of(life.trail)))


def _beside_siblings(trail: Trail, name_of: NameOf) -> NameOf:
    """The same names, but "its sibling" for the other sequences of its HTTP request: that one is called as it is."""
    own = range(0) if trail.client is None else trail.client.request_ids
    return lambda i: SIBLING if i in own and i != trail.request_id else name_of(i)


def last_to_end(history: History, request_ids: Sequence[int], now_ns: int, num: int) -> list[Trail]:
    """The sequences that ended last, or have not, the last one first; those that are forgotten are left out."""

    def ended(trail: Trail) -> tuple[int, int]:
        end = trail.finish or trail.refusal
        return now_ns if end is None else end.now_ns, trail.request_id

    trails = [trail for i in request_ids if (trail := history.trails.get(i)) is not None]
    if not trails:
        raise LookupError(f"request {request_ids[0] if request_ids else ''} is not remembered")
    return nlargest(num, trails, key=ended)


def _explain_one(
    history: History, trail: Trail, now_ns: int, name_of: NameOf, *, is_last: bool, max_mates: int = MAX_MATES
) -> Explanation:
    life = life_of(history, trail, now_ns, is_last=is_last)
    told_as = _beside_siblings(trail, name_of)
    client, finish, arrival = trail.client, trail.finish, trail.arrival
    state, sums = state_of(trail), life.ns_by_cause()
    first_ns = life.first_token_ns
    steps, num_steps = _steps(life, told_as, max_mates)
    return Explanation(
        id=client.name if client is not None else name_of(trail.request_id) or number_name(trail.request_id),
        state=state,
        is_live=state in LIVE or (client is not None and is_last and client.delivered_ns is None),
        sentence=sentence_of(Story(history, life, told_as, state)),
        received_ns=life.origin_ns,
        e2e_ns=life.e2e_ns,
        ttft_ns=None if first_ns is None else first_ns - life.origin_ns,
        queue_ns=sum(ns for cause, ns in sums.items() if cause.is_queue),
        num_prompt_tokens=0 if arrival is None else arrival.num_prompt_tokens,
        num_cached_tokens=life.num_cached_tokens,
        num_output_tokens=life.num_output_tokens,
        num_preemptions=len(trail.preemptions),
        num_recomputed_tokens=life.num_recomputed_tokens,
        finish_reason=None if finish is None else finish.reason.value,
        ns_by_cause=sums,
        segments=segments_of(life, told_as),
        steps=steps,
        num_steps=num_steps,
        tokens=tokens_of(history, life, told_as),
        advice=advice_for(
            sums,
            life.e2e_ns,
            num_prefill_steps=sum(one.activity is Cause.PREFILL for one in life.served),
        ),
        num_choices=1,
        choices=[],
    )


def state_of(trail: Trail) -> str:
    """waiting, running, finished, aborted, failed or refused.

    One that was answered before the engine had said how it ended has lost its client, or the engine.
    """
    if trail.refusal is not None:
        return "refused"
    if trail.finish is not None:
        return {FinishReason.ABORT: "aborted", FinishReason.ERROR: "failed"}.get(trail.finish.reason, "finished")
    if trail.client is not None and trail.client.delivered_ns is not None:
        return "aborted" if trail.client.has_left else "failed"
    return "running" if len(trail.admits) > len(trail.preemptions) else "waiting"


def _steps(life: Life, name_of: NameOf, max_mates: int) -> tuple[list[StepView], int]:
    """The steps to show, and how many there are."""
    served = life.served
    num_rows = sum(one.record.num_rows for one in served)
    most = min(MAX_STEPS, len(served) if num_rows <= max_mates else max(1, max_mates * len(served) // num_rows))
    if len(served) > most:
        served = [served[i * len(served) // most] for i in range(most)]
    names: dict[int, str | None] = {}
    for one in served:
        for request_id in one.record.request_ids:
            if request_id not in names:
                names[request_id] = name_of(request_id)
    return [_view(one, life, names) for one in served], len(life.served)


def _view(one: Served, life: Life, names: Mapping[int, str | None]) -> StepView:
    record = one.record
    mates = [Mate(names[request_id], n) for request_id, n in zip(record.request_ids, record.nums, strict=True)]
    del mates[one.row]
    return StepView(
        record.step_id,
        one.begin_ns - life.origin_ns,
        record.now_ns - life.origin_ns,
        one.share.own_ns,
        one.share.others_ns,
        one.share.host_ns,
        record.num_rows,
        sum(record.nums),
        one.num_tokens,
        tuple(mates),
    )
