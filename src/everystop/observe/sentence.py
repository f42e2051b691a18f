"""One sentence of plain English about a request: how long it took, what most of that was, and whose doing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from everystop.observe import culprits
from everystop.observe.causes import Cause
from everystop.observe.culprits import Culprit
from everystop.observe.history import History
from everystop.observe.life import Life
from everystop.observe.wording import NameOf, counted, times, who, whose
from everystop.words import duration, listed

MOST_CAUSES = 3
ENOUGH = 0.9  # of the time; what is left goes unmentioned
LEAST = 0.05


@dataclass(frozen=True, slots=True)
class Story:
    """What a sentence is about, and by which names its reader may know others."""

    history: History
    life: Life
    name_of: NameOf
    state: str

    def knows(self, request_id: int) -> bool:
        """Its reader may know that request by a name, and so what it needs and how long it is."""
        return self.name_of(request_id) is not None

    def culprit(self, culprit: Culprit) -> str:
        """Somebody and the size of the output or prompt: r41 (512 tokens); a stranger's size is not told."""
        size = f" ({counted(culprit.num_tokens, 'token')})" if self.knows(culprit.request_id) else ""
        return f"{who(culprit.request_id, self.name_of)}{size}"


def sentence_of(story: Story) -> str:
    """Of a request whose first token took more than half of its time it is about that, else about all of it."""
    life, state = story.life, story.state
    if state == "refused":
        refusal = life.trail.refusal
        return f"Refused after {duration(life.e2e_ns)}" + (f": {refusal.code}." if refusal is not None else ".")
    first_ns = life.first_token_ns
    if first_ns is not None and 2 * (first_ns - life.origin_ns) > life.e2e_ns:
        lead = f"{duration(first_ns - life.origin_ns)} to first token"
        whole = "" if state == "running" else f"; {duration(life.e2e_ns)} in all, {_output(life)}"
        return f"{_opening(story)}{lead}: {_causes(story, life.origin_ns, first_ns)}{whole}."
    told = _causes(story, life.origin_ns, life.end_ns)
    return f"{_opening(story)}{_lead(story)}: {told}."


def _opening(story: Story) -> str:
    if story.state == "aborted":
        return "Its client left; "
    if story.state == "failed":
        finish = story.life.trail.finish
        return f"Failed ({finish.detail}); " if finish is not None else "Failed; "
    return "So far " if story.state in ("waiting", "running") else ""


def _lead(story: Story) -> str:
    took = duration(story.life.e2e_ns)
    if story.state == "waiting":
        return f"{took} of waiting" if not story.life.trail.admits else f"{took}, and preempted now"
    return f"{took} for {_output(story.life)}"


def _output(life: Life) -> str:
    return counted(life.num_output_tokens, "output token")


def _causes(story: Story, first_ns: int, last_ns: int) -> str:
    """The largest causes of the time between two, up to three, until nearly all of it is told."""
    sums = story.life.ns_by_cause(first_ns, last_ns)
    told: list[str] = []
    told_ns, whole_ns = 0, last_ns - first_ns
    for cause in sorted(sums, key=lambda each: -sums[each])[:MOST_CAUSES]:
        if told and (sums[cause] < LEAST * whole_ns or told_ns >= ENOUGH * whole_ns):
            break
        told.append(f"{duration(sums[cause])} {PHRASES[cause](story, cause, last_ns)}")
        told_ns += sums[cause]
    return listed(told) if told else "nothing took any time"


# ---------------------------------------------------------------------------- phrases


def _plain(text: str) -> Callable[[Story, Cause, int], str]:
    return lambda story, cause, until_ns: text


def _receive(story: Story, cause: Cause, until_ns: int) -> str:
    arrival = story.life.trail.arrival
    return "receiving and tokenising" + (f" {_prompt(arrival.num_prompt_tokens)}" if arrival else " it")


def _prompt(num_tokens: int) -> str:
    return f"its prompt of {counted(num_tokens, 'token')}"


def _ahead(story: Story, cause: Cause) -> str:
    """Whose reason it was: "it", or "r7 ahead of it"."""
    wait = culprits.wait_of(story.life, cause)
    if wait is None or wait.request_id in (-1, story.life.trail.request_id):
        return "it"
    return f"{who(wait.request_id, story.name_of)} ahead of it"


def _num_slots(story: Story, cause: Cause) -> int:
    """How many slots were in use meanwhile; 0 where no step ended."""
    return culprits.num_slots_taken(story.history, [piece for piece in story.life.pieces if piece.cause is cause])


def _no_slot(story: Story, cause: Cause, until_ns: int) -> str:
    num = _num_slots(story, cause)
    taken = "the slot was taken" if num == 1 else f"all {num:,} slots were taken" if num else "no slot was free"
    holder = culprits.slot_holder(story.history, story.life)
    until = "" if holder is None else f" until {story.culprit(holder)} ended"
    return f"queued because {taken}{until}"


def _no_blocks(story: Story, cause: Cause, until_ns: int) -> str:
    wait = culprits.wait_of(story.life, cause)
    ahead = _ahead(story, cause)
    if wait is None or not (ahead == "it" or story.knows(wait.request_id)):
        return f"queued because {ahead} did not fit the KV cache"
    return f"queued because {ahead} needed {counted(wait.need, 'KV block')} and {wait.have:,} were free"


def _token_budget(story: Story, cause: Cause, until_ns: int) -> str:
    culprit = culprits.prefill_while_queued(story.history, story.life, cause)
    most = "" if culprit is None else f" while {story.culprit(culprit)} got most of them"
    return f"queued because no step had tokens left for {_ahead(story, cause)}{most}"


def _batch_barrier(story: Story, cause: Cause, until_ns: int) -> str:
    num = _num_slots(story, cause)
    held = "slots were" if not num else "the slot was" if num == 1 else f"{num:,} slots were"
    culprit = culprits.straggler(story.history, story.life)
    waiting = "" if culprit is None else f" waiting for {story.culprit(culprit)}"
    return f"queued because {held} held by a static batch{waiting}"


def _tenant(text: str) -> Callable[[Story, Cause, int], str]:
    def phrase(story: Story, cause: Cause, until_ns: int) -> str:
        ahead = _ahead(story, cause)
        return f"queued because {'its tenant' if ahead == 'it' else f'the tenant of {ahead}'} {text}"

    return phrase


def _prefill(story: Story, cause: Cause, until_ns: int) -> str:
    steps = [one for one in story.life.served if one.activity is cause and one.record.now_ns <= until_ns]
    arrival = story.life.trail.arrival
    num_cached = story.life.num_cached_tokens
    cached = f" ({num_cached:,} of them cached)" if num_cached else ""
    num = arrival.num_prompt_tokens if arrival is not None else 0
    return f"computing {_prompt(num)}{cached} in {counted(len(steps), 'step')}"


def _decode(story: Story, cause: Cause, until_ns: int) -> str:
    steps = [one for one in story.life.served if one.activity is cause and one.record.now_ns <= until_ns]
    num_tokens = sum(one.num_outputs for one in steps)
    if not num_tokens:
        return "decoding"
    each = duration(sum(one.share.own_ns for one in steps) // num_tokens)
    mates = round(sum(one.record.num_rows - 1 for one in steps) / len(steps))
    beside = f", beside {counted(mates, 'other')}" if mates else ""
    return f"decoding {counted(num_tokens, 'token')} ({each} each{beside})"


def _others_prefill(story: Story, cause: Cause, until_ns: int) -> str:
    found = culprits.prefill_in_steps([one for one in story.life.served if one.record.now_ns <= until_ns])
    if found is None:
        return "in others' prefill (modelled)"
    culprit = found[0]
    size = f" {counted(culprit.num_tokens, 'token')}" if story.knows(culprit.request_id) else ""
    return f"in others' prefill (modelled; most of it {whose(culprit.request_id, story.name_of)}{size})"


def _skipped(story: Story, cause: Cause, until_ns: int) -> str:
    pieces = story.life.between(story.life.origin_ns, until_ns)
    missed = culprits.num_steps_missed(story.history, pieces)
    return f"on board but left out of {counted(missed, 'step')} whose tokens went to others"


def _preempted(story: Story, cause: Cause, until_ns: int) -> str:
    num = sum(1 for event in story.life.trail.preemptions if event.now_ns <= until_ns)
    again = story.life.num_recomputed_tokens
    recomputed = f", then computing {counted(again, 'token')} again" if again else ""
    return f"preempted {times(num)} (waiting for another place{recomputed})"


PHRASES: dict[Cause, Callable[[Story, Cause, int], str]] = {
    Cause.RECEIVE: _receive,
    Cause.STEP_RUNNING: _plain("queued while a step was running"),
    Cause.NO_SLOT: _no_slot,
    Cause.NO_BLOCKS: _no_blocks,
    Cause.TOKEN_BUDGET: _token_budget,
    Cause.BATCH_BARRIER: _batch_barrier,
    Cause.BATCH_FILL: _plain("queued while a static batch waited for more requests"),
    Cause.AFTER_PREEMPT: _plain("queued in steps in which somebody lost a place and nobody got one"),
    Cause.TENANT_LIMIT: _tenant("was at one of its limits"),
    Cause.OVER_SHARE: _tenant("had had more than its share"),
    Cause.LATE: _plain("queued because it was late already, behind requests that could still be on time"),
    Cause.FORK: _plain("queued while its sibling computed their prompt"),
    Cause.PREFILL: _prefill,
    Cause.DECODE: _decode,
    Cause.OTHERS_PREFILL: _others_prefill,
    Cause.SAMPLING: _plain("sampling"),
    Cause.SKIPPED: _skipped,
    Cause.PREEMPTED: _preempted,
    Cause.HOST: _plain("in scheduling and hand-over"),
    Cause.DELIVERY: _plain("turning tokens into text and delivering it"),
    Cause.UNATTRIBUTED: _plain("of which nothing is remembered any more"),
}
