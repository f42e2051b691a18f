"""Who was in which slot, and what each step did for him: a request's time on board, its prefill chunks and decode runs,
and slots that a finished request held.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from everystop.core.events import AdmitEvent, FinishEvent, PreemptEvent
from everystop.core.request import FinishReason
from everystop.observe.history import History, StepRecord, Trail
from everystop.observe.trace.tracks import Arguments, Canvas, Pen, present
from everystop.observe.wording import number_name

PREFILL, RECOMPUTE, DECODE, PADDING = "prefill", "recompute", "decode", "padding"
NEVER = 1 << 62


class Span(NamedTuple):
    """When a step was at work: from the last one's return, or its own planning, to its own return."""

    start_ns: int
    end_ns: int


@dataclass(slots=True)
class Stretch:
    """Rows of one kind in consecutive steps; a prefill chunk is one row."""

    kind: str
    start_ns: int
    end_ns: int
    num_tokens: int
    first_step_id: int
    last_step: int  # position in the history
    num_steps: int = 1


@dataclass(slots=True)
class Stay:
    """A request in a slot, from its boarding until it left, or (`admit` None) as the finished one that holds it."""

    request_id: int
    slot: int
    start_ns: int
    end_ns: int
    num_prompt_tokens: int
    admit: AdmitEvent | None = None
    exit: FinishEvent | PreemptEvent | None = None
    is_last: bool = True
    stretches: list[Stretch] = field(default_factory=list)

    @property
    def last_step_id(self) -> int:
        """No step from this one on has a row for it."""
        return self.exit.step_id if isinstance(self.exit, PreemptEvent) else NEVER

    def kind_of(self, start: int, num_tokens: int) -> str:
        """What a row of this stay does."""
        if self.admit is None:
            return PADDING
        if num_tokens == 1 and start >= self.num_prompt_tokens:
            return DECODE
        return RECOMPUTE if self.admit.resumed else PREFILL

    def add_row(self, span: Span, step: int, record: StepRecord, row: int) -> str | None:
        """Draw one row, as far as it lies in this stay; returns its kind, None if it does not."""
        start_ns, end_ns = max(span.start_ns, self.start_ns), min(span.end_ns, self.end_ns)
        if end_ns <= start_ns:
            return None
        num_tokens = record.nums[row]
        kind = self.kind_of(record.starts[row], num_tokens)
        last = self.stretches[-1] if self.stretches else None
        if last is not None and kind in (DECODE, PADDING) and last.kind == kind and last.last_step == step - 1:
            last.end_ns, last.last_step = end_ns, step
            last.num_tokens += num_tokens
            last.num_steps += 1
        else:
            self.stretches.append(Stretch(kind, start_ns, end_ns, num_tokens, record.step_id, step))
        return kind


def spans_of(records: Iterable[StepRecord]) -> Iterator[Span]:
    """The time of each step."""
    landed_ns = 0
    for record in records:
        yield Span(max(landed_ns, record.scheduled_ns), record.now_ns)
        landed_ns = record.now_ns


def stays_of(trail: Trail, last_ns: int) -> list[Stay]:
    """A request's times on board; one that is still there stays until `last_ns`."""
    stays: list[Stay] = []
    num_prompt = 0 if trail.arrival is None else trail.arrival.num_prompt_tokens
    exits: list[PreemptEvent | FinishEvent] = [*trail.preemptions]
    if trail.finish is not None and len(trail.admits) > len(trail.preemptions):
        exits.append(trail.finish)
    for i, admit in enumerate(trail.admits):
        exit_ = exits[i] if i < len(exits) else None
        end_ns = last_ns if exit_ is None else exit_.now_ns
        is_last = i + 1 == len(trail.admits)
        stays.append(Stay(trail.request_id, admit.slot, admit.now_ns, end_ns, num_prompt, admit, exit_, is_last))
    return stays


def holds_of(records: list[StepRecord], finishes: list[FinishEvent]) -> list[Stay]:
    """Slots that finished requests held, as the counts after each step tell; `finishes` in the order of time.

    Held slots are given back all together when a step is planned: if the counts after a step show it, when that step
    was planned, or, where that was before the last look at the counts, when the next one was.
    """
    holds: list[Stay] = []
    held: list[Stay] = []
    done = iter(finishes)
    finish = next(done, None)
    for i, record in enumerate(records):
        new: list[Stay] = []
        while finish is not None and finish.now_ns <= record.now_ns:
            if finish.slot >= 0 and finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
                new.append(Stay(finish.request_id, finish.slot, finish.now_ns, record.now_ns, 0))
            finish = next(done, None)
        is_news = i == 0 or record.scheduled_ns >= records[i - 1].now_ns
        planned_ns = record.scheduled_ns if is_news or i + 1 == len(records) else records[i + 1].scheduled_ns
        if len(held) + len(new) > record.num_held:
            for stay in held:
                stay.end_ns = max(stay.start_ns, min(planned_ns, record.now_ns))
            holds += held
            held = []
        held += new[len(new) - (record.num_held - len(held)) :] if record.num_held > len(held) else []
        for stay in held:
            stay.end_ns = record.now_ns
    return holds + held


class SlotTracks:
    """All stays of a history with their rows, drawn slot by slot."""

    def __init__(self, history: History) -> None:
        records = history.steps.since(0)
        finishes = [act for act in history.acts.since(0) if isinstance(act, FinishEvent)]
        self.stays = {i: stays_of(trail, history.last_ns) for i, trail in history.trails.items() if trail.admits}
        self.holds = {hold.request_id: hold for hold in holds_of(records, finishes)}
        self.spans = list(spans_of(records))
        self.num_prefill_tokens = [self._add_step(step, record) for step, record in enumerate(records)]
        self._names = {i: trail.client.name for i, trail in history.trails.items() if trail.client is not None}

    def _add_step(self, step: int, record: StepRecord) -> int:
        """Give each row to whom it served; returns the tokens of prompts among them, computed again or not."""
        span, num_prefill = self.spans[step], 0
        num_real = record.num_rows - record.num_padded_rows
        for row, request_id in enumerate(record.request_ids):
            stay = self._stay_at(request_id, record.step_id) if row < num_real else self.holds.get(request_id)
            kind = None if stay is None else stay.add_row(span, step, record, row)
            if kind in (PREFILL, RECOMPUTE):
                num_prefill += record.nums[row]
        return num_prefill

    def _stay_at(self, request_id: int, step_id: int) -> Stay | None:
        for stay in reversed(self.stays.get(request_id, ())):
            if stay.admit is not None and stay.admit.step_id <= step_id:
                return stay if step_id < stay.last_step_id else None
        return None

    def draw(self, canvas: Canvas, parent: int) -> None:
        """One track a slot."""
        by_slot: dict[int, list[Stay]] = {}
        for stay in (*(stay for stays in self.stays.values() for stay in stays), *self.holds.values()):
            by_slot.setdefault(stay.slot, []).append(stay)
        for slot in range(max(by_slot, default=-1) + 1):
            pen = canvas.pen(f"slot {slot}", parent)
            for stay in sorted(by_slot.get(slot, ()), key=lambda stay: (stay.start_ns, stay.end_ns)):
                if stay.admit is not None or stay.start_ns < stay.end_ns:
                    self._draw_stay(pen, stay)

    def _draw_stay(self, pen: Pen, stay: Stay) -> None:
        if stay.admit is None:
            pen.begin(stay.start_ns, "held", (("request", number_name(stay.request_id)),))
        else:
            flow = stay.request_id + 1
            pen.begin(stay.start_ns, number_name(stay.request_id), self._boarding(stay), flow, ends_flow=stay.is_last)
        for stretch in stay.stretches:
            counts = (("tokens", stretch.num_tokens), ("step", stretch.first_step_id))
            more = (("steps", stretch.num_steps),) if stretch.num_steps > 1 else ()
            pen.slice(stretch.start_ns, stretch.end_ns, stretch.kind, (*counts, *more))
        pen.end(stay.end_ns, leaving(stay.exit))

    def _boarding(self, stay: Stay) -> Arguments:
        admit = stay.admit
        assert admit is not None
        return present(
            [
                ("id", self._names.get(stay.request_id)),
                ("prompt_tokens", stay.num_prompt_tokens),
                ("tokens", admit.num_tokens),
                ("cached_tokens", admit.num_cached_tokens),
                ("resumed", "yes" if admit.resumed else None),
                ("forked_from", number_name(admit.forked_from) if admit.forked_from >= 0 else None),
            ]
        )


def leaving(event: FinishEvent | PreemptEvent | None) -> Arguments:
    """How a stay, or a wait, ended."""
    if isinstance(event, PreemptEvent):
        return (("end", "preempted"), ("lost_tokens", event.num_lost_tokens))
    if isinstance(event, FinishEvent):
        return (("end", event.reason.value), ("output_tokens", event.num_output_tokens))
    return ()
