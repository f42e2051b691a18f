"""What the scheduler did in a step, in one plain sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from everystop.core.events import AdmitEvent, FinishEvent, PreemptEvent, RefuseEvent, WaitEvent, WaitReason
from everystop.core.request import FinishReason
from everystop.observe.history import Act
from everystop.observe.waiting_room import NOBODY, Waiter, why_it_waits

NO_STEP = -1
STRANGER = "another request"

Sees = Callable[[int], bool]


class Decision(NamedTuple):
    """The acts of one step, or, where `step_id` is NO_STEP, of a time without one.

    `num_decodes` and `num_prompts` are the rows of those that were on board before; `computed` says up to which
    position the step computes those that boarded in it.
    """

    now_ns: int
    step_id: int
    num_decodes: int
    num_prompts: int
    acts: tuple[Act, ...]
    computed: Mapping[int, int]


def is_told(act: Act) -> bool:
    """Whether the log tells of an act: not of arrivals, nor of all that wait behind somebody."""
    if isinstance(act, WaitEvent):
        return act.reason is not WaitReason.BEHIND
    return isinstance(act, AdmitEvent | PreemptEvent | FinishEvent | RefuseEvent)


def sentence(decision: Decision, num_slots: int, sees: Sees) -> str:
    """Example: "step 1042: kept 7 decodes, admitted r17 (256 of 900 prompt tokens); r12 waits: needs 3 more KV blocks".

    Requests that the reader may not see are "another request", without lengths.
    """
    boarded = [_admitted(act, decision, sees) for act in decision.acts if isinstance(act, AdmitEvent)]
    first = ", ".join([*_kept(decision), *boarded])
    others = [_told(act, num_slots, sees, has_boarded=bool(boarded)) for act in decision.acts]
    text = "; ".join(filter(None, [first, *_refused(decision, sees), *dict.fromkeys(others)]))
    return text if decision.step_id == NO_STEP else f"step {decision.step_id}: {text}"


def name(request_id: int, sees: Sees) -> str:
    """r17, or "another request"."""
    return f"r{request_id}" if sees(request_id) else STRANGER


def _kept(decision: Decision) -> list[str]:
    kept = []
    if decision.num_decodes:
        kept.append(f"{decision.num_decodes} decode{'s' * (decision.num_decodes > 1)}")
    if decision.num_prompts:
        kept.append(f"{decision.num_prompts} prompt{'s' * (decision.num_prompts > 1)} in progress")
    return [f"kept {' and '.join(kept)}"] if kept else []


def _admitted(act: AdmitEvent, decision: Decision, sees: Sees) -> str:
    who, verb = name(act.request_id, sees), "took back" if act.resumed else "admitted"
    if not sees(act.request_id):
        return f"{verb} {who}"
    if act.forked_from != NOBODY:
        return f"{verb} {who} (its prompt was computed by {name(act.forked_from, sees)})"
    end = decision.computed.get(act.request_id, act.num_cached_tokens)
    cached = f", {act.num_cached_tokens:,} of them cached" if act.num_cached_tokens else ""
    return f"{verb} {who} ({end:,} of {act.num_tokens:,} {'' if act.resumed else 'prompt '}tokens{cached})"


def _refused(decision: Decision, sees: Sees) -> Iterator[str]:
    """Refusals by their cause."""
    causes: dict[str, list[str]] = {}
    for act in decision.acts:
        if isinstance(act, RefuseEvent):
            cause = f" ({act.code})" if sees(act.request_id) else ""
            causes.setdefault(cause, []).append(name(act.request_id, sees))
    for cause, names in causes.items():
        yield f"refused {names[0] if len(names) == 1 else f'{len(names)} requests'}{cause}"


def _told(act: Act, num_slots: int, sees: Sees, *, has_boarded: bool) -> str:
    """One act that is no boarding and no refusal; "" for one that the log does not tell of."""
    match act:
        case PreemptEvent():
            lost = f", which loses {act.num_lost_tokens:,} computed tokens" if sees(act.request_id) else ""
            return f"preempted {name(act.request_id, sees)}{lost}"
        case FinishEvent():
            return _ended(act, sees)
        case WaitEvent() if act.reason is not WaitReason.BEHIND:
            return _waits(act, num_slots, sees, "nobody else boards" if has_boarded else "nobody boards")
        case _:
            return ""


def _ended(act: FinishEvent, sees: Sees) -> str:
    who = name(act.request_id, sees)
    if act.reason is FinishReason.ABORT:
        return f"{who} was aborted"
    if act.reason is FinishReason.ERROR:
        return f"{who} failed" + (f" ({act.detail})" if sees(act.request_id) else "")
    return f"{who} finished" + (f" ({act.reason}, {_tokens(act.num_output_tokens)})" if sees(act.request_id) else "")


def _tokens(num: int) -> str:
    return f"{num:,} token{'s' * (num != 1)}"


def _waits(act: WaitEvent, num_slots: int, sees: Sees, nobody: str) -> str:
    waiter = Waiter(act.request_id, act.now_ns, act.reason, act.need, act.have, act.behind)
    if act.request_id != NOBODY and not sees(act.request_id):
        return f"{STRANGER} waits"
    who = nobody if act.request_id == NOBODY else f"{name(act.request_id, sees)} waits"
    return f"{who}: {why_it_waits(waiter, num_slots, lambda other: name(other, sees))}"
