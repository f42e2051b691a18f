"""What the scheduler did in a step, in one plain sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from everystop.core.events import AdmitEvent, FinishEvent, PreemptEvent, RefuseEvent, WaitEvent, WaitReason
from everystop.core.request import FinishReason
from everystop.observe.history import Act
from everystop.observe.queue import NOBODY
from everystop.observe.waiting import reason_text
from everystop.observe.wording import ANOTHER, NameOf, counted, who

NO_STEP = -1


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


def sentence(decision: Decision, name_of: NameOf) -> str:
    """Example: "step 1042: kept 7 decodes, admitted r17 (256 of 900 prompt tokens); r12 waits: no slot is free".

    Of requests that `name_of` does not name it says only that it is another request.
    """
    boarded = [_admitted(act, decision, name_of) for act in decision.acts if isinstance(act, AdmitEvent)]
    first = ", ".join([*_kept(decision), *boarded])
    nobody = "nobody else boards" if boarded else "nobody boards"
    others = [_told(act, name_of, nobody) for act in decision.acts]
    text = "; ".join(filter(None, [first, *_refused(decision, name_of), *dict.fromkeys(others)]))
    return text if decision.step_id == NO_STEP else f"step {decision.step_id}: {text}"


def _kept(decision: Decision) -> list[str]:
    kept = []
    if decision.num_decodes:
        kept.append(counted(decision.num_decodes, "decode"))
    if decision.num_prompts:
        kept.append(f"{counted(decision.num_prompts, 'prompt')} in progress")
    return [f"kept {' and '.join(kept)}"] if kept else []


def _admitted(act: AdmitEvent, decision: Decision, name_of: NameOf) -> str:
    text = f"{'took back' if act.resumed else 'admitted'} {who(act.request_id, name_of)}"
    if name_of(act.request_id) is None:
        return text
    if act.forked_from != NOBODY:
        return f"{text} (its prompt was computed by {who(act.forked_from, name_of)})"
    end = decision.computed.get(act.request_id, act.num_cached_tokens)
    cached = f", {act.num_cached_tokens:,} of them cached" if act.num_cached_tokens else ""
    return f"{text} ({end:,} of {act.num_tokens:,} {'' if act.resumed else 'prompt '}tokens{cached})"


def _refused(decision: Decision, name_of: NameOf) -> Iterator[str]:
    """Refusals by their cause."""
    causes: dict[str, list[str]] = {}
    for act in decision.acts:
        if isinstance(act, RefuseEvent):
            cause = f" ({act.code})" if name_of(act.request_id) else ""
            causes.setdefault(cause, []).append(who(act.request_id, name_of))
    for cause, names in causes.items():
        yield f"refused {names[0] if len(names) == 1 else counted(len(names), 'request')}{cause}"


def _told(act: Act, name_of: NameOf, nobody: str) -> str:
    """One act that is no boarding and no refusal; "" for one that the log does not tell of."""
    match act:
        case PreemptEvent():
            lost = f", which loses {counted(act.num_lost_tokens, 'computed token')}"
            return f"preempted {who(act.request_id, name_of)}{lost if name_of(act.request_id) else ''}"
        case FinishEvent():
            return _ended(act, name_of)
        case WaitEvent(request_id=request_id, reason=reason) if reason is not WaitReason.BEHIND:
            if request_id == NOBODY:
                return f"{nobody}: {reason_text(act, name_of)}"
            text = f": {reason_text(act, name_of)}" if name_of(request_id) else ""
            return f"{who(request_id, name_of)} waits{text}"
        case _:
            return ""


def _ended(act: FinishEvent, name_of: NameOf) -> str:
    name = name_of(act.request_id)
    if name is None:
        return f"{ANOTHER} ended"
    if act.reason is FinishReason.ABORT:
        return f"{name} was aborted"
    if act.reason is FinishReason.ERROR:
        return f"{name} failed ({act.detail})"
    return f"{name} finished ({act.reason}, {counted(act.num_output_tokens, 'token')})"
