"""What each slot did, second by second: a run's history cut into stretches, one slot and one use each.

A view of the history; it decides nothing about how it is drawn.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple

from everystop.core.events import AdmitEvent, ArrivalEvent, FinishEvent, PreemptEvent
from everystop.observe.history import History, StepRecord
from everystop.observe.report.grammar import Use

SLOW_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class Stretch:
    """One slot doing one thing for one request; `ticks` are the ends of the chunks of a prefill, its own end left out,
    and `cached_share` is how much of the prompt a prefill found in the cache.
    """

    slot: int
    request_id: int
    use: Use
    start_ns: int
    end_ns: int
    ticks: tuple[int, ...] = ()
    cached_share: float = 0.0


@dataclass(frozen=True, slots=True)
class End:
    """A request left its slot for good."""

    slot: int
    request_id: int
    at_ns: int
    reason: str


@dataclass(frozen=True, slots=True)
class Level:
    """A number that holds from a time on."""

    at_ns: int
    value: int


@dataclass(frozen=True, slots=True)
class Lanes:
    """All that a slot chart shows. `batches` are (start, end) of batches that nobody else could board."""

    stretches: tuple[Stretch, ...]
    ends: tuple[End, ...]
    batches: tuple[tuple[int, int], ...]
    waiting: tuple[Level, ...]
    start_ns: int
    end_ns: int

    @property
    def num_slots(self) -> int:
        """Slots that were ever used."""
        return 1 + max((stretch.slot for stretch in self.stretches), default=-1)

    @property
    def most_waiting(self) -> int:
        """The most that ever waited."""
        return max((level.value for level in self.waiting), default=0)


@dataclass(slots=True)
class _Open:
    """A stretch that the next step may prolong."""

    step_index: int
    boarding: int
    stretch: Stretch
    end_ns: int
    ticks: list[int] = field(default_factory=list)

    def goes_on(self, cell: Cell) -> bool:
        """The cell is of the next step, and of the same use."""
        return self.stretch.use is cell.use and self.step_index == cell.step_index - 1

    def closed(self) -> Stretch:
        """The stretch; only prompts show their chunks."""
        is_chunked = self.stretch.use in (Use.PREFILL, Use.RECOMPUTE)
        return replace(self.stretch, end_ns=self.end_ns, ticks=tuple(self.ticks) if is_chunked else ())


def read_lanes(history: History, start_ns: int) -> Lanes:
    """Cut a history into what each slot did; times are those of the history, `start_ns` is when the run began."""
    steps = history.steps.since(0)
    stretches = [*_cells(history, steps), *_held(history, steps)]
    stretches.sort(key=lambda stretch: (stretch.slot, stretch.start_ns))
    finishes = [act for act in history.acts.since(0) if isinstance(act, FinishEvent)]
    return Lanes(
        tuple(stretches),
        tuple(End(act.slot, act.request_id, act.now_ns, str(act.reason)) for act in finishes if act.slot >= 0),
        tuple(_batches(history, steps)),
        tuple(_waiting(history, start_ns)),
        start_ns,
        max([act.now_ns for act in finishes] + [step.now_ns for step in steps if step.num_rows], default=start_ns),
    )


def step_begins(steps: Sequence[StepRecord]) -> list[int]:
    """When each step began: when the last one came back, or when it was planned, whichever was later."""
    begins, landed_ns = [], 0
    for step in steps:
        begins.append(max(landed_ns, step.scheduled_ns))
        landed_ns = step.now_ns
    return begins


class Cell(NamedTuple):
    """One row of one step: which slot did what. `cached_share` is told once, with the first of its prompt; `boarding`
    counts how often the request has boarded.
    """

    step_index: int
    slot: int
    request_id: int
    use: Use
    cached_share: float
    boarding: int


def read_cells(history: History) -> Iterator[Cell]:
    """All rows of all steps in their order; `step_index` counts the steps that the history remembers."""
    steps = history.steps.since(0)
    boardings = iter([act for act in history.acts.since(0) if isinstance(act, AdmitEvent)])
    boarding = next(boardings, None)
    slow = _slow_steps(steps)
    slots: dict[int, int] = {}
    boarded: Counter[int] = Counter()
    cached: dict[int, float] = {}
    reached: dict[int, int] = defaultdict(int)
    for index, step in enumerate(steps):
        while boarding is not None and boarding.step_id <= step.step_id:
            slots[boarding.request_id] = boarding.slot
            boarded[boarding.request_id] += 1
            cached[boarding.request_id] = boarding.num_cached_tokens / max(boarding.num_tokens, 1)
            boarding = next(boardings, None)
        for row, request_id in enumerate(step.request_ids):
            if request_id not in slots:
                continue  # it boarded before the history begins
            use = _use_of(history, step, row, reached, is_slow=slow[index])
            share = cached.pop(request_id, 0.0) if use is Use.PREFILL else 0.0
            yield Cell(index, slots[request_id], request_id, use, share, boarded[request_id])


def _cells(history: History, steps: Sequence[StepRecord]) -> Iterator[Stretch]:
    """Rows of steps, neighbours of one kind joined; in steps between two of a request that stayed, it was passed over.
    Time between a step of its own and the next one belongs to the first.
    """
    begins = step_begins(steps)
    open_: dict[int, _Open] = {}
    for cell in read_cells(history):
        start_ns, end_ns = begins[cell.step_index], steps[cell.step_index].now_ns
        last = open_.get(cell.request_id)
        has_stayed = last is not None and last.boarding == cell.boarding
        if last is not None and has_stayed and last.goes_on(cell):
            last.ticks.append(last.end_ns)
            last.step_index, last.end_ns = cell.step_index, end_ns
            continue
        stretch = Stretch(cell.slot, cell.request_id, cell.use, start_ns, end_ns, (), cell.cached_share)
        if last is not None:
            is_gap = has_stayed and cell.use is not Use.PADDING and last.end_ns < start_ns
            was_passed_over = is_gap and any(step.num_rows for step in steps[last.step_index + 1 : cell.step_index])
            if is_gap and not was_passed_over:
                last.end_ns = start_ns
            yield last.closed()
            if was_passed_over:
                yield replace(stretch, use=Use.SKIPPED, start_ns=last.end_ns, end_ns=start_ns)
        open_[cell.request_id] = _Open(cell.step_index, cell.boarding, stretch, end_ns)
    for last in open_.values():
        yield last.closed()


def _use_of(history: History, step: StepRecord, row: int, reached: dict[int, int], *, is_slow: bool) -> Use:
    """The use of a row; `reached` is the furthest position each request has been computed to, and is moved on."""
    if row >= step.num_rows - step.num_padded_rows:
        return Use.PADDING
    request_id, start = step.request_ids[row], step.starts[row]
    before = reached[request_id]
    reached[request_id] = max(before, start + step.nums[row])
    if start < before:
        return Use.RECOMPUTE
    trail = history.trails.get(request_id)
    is_prompt = (
        step.nums[row] > 1 if trail is None or trail.arrival is None else start < trail.arrival.num_prompt_tokens
    )
    if is_prompt:
        return Use.PREFILL
    return Use.SLOW if is_slow else Use.DECODE


def _slow_steps(steps: Sequence[StepRecord]) -> list[bool]:
    """Whether a step took more than twice the median of pure decode steps with about as many rows (up to the next
    power of two), so that a full batch is not slow beside a single row.
    """
    spans = [step.now_ns - begin for step, begin in zip(steps, step_begins(steps), strict=True)]
    usual: dict[int, list[int]] = defaultdict(list)
    for step, span in zip(steps, spans, strict=True):
        if step.num_rows and max(step.nums) == 1:
            usual[step.num_rows.bit_length()].append(span)
    medians = {size: median(values) for size, values in usual.items()}
    everything = median(medians.values()) if medians else 0.0
    return [
        span > SLOW_FACTOR * medians.get(step.num_rows.bit_length(), everything) > 0
        for step, span in zip(steps, spans, strict=True)
    ]


def _batch_ends(history: History, steps: Sequence[StepRecord]) -> list[int]:
    """When batches that hold their slots were over: nobody runs any more, and the next step no longer has those slots
    held. A member may still have to board when all others are done: then they stay held.
    """
    finished = Counter(act.step_id for act in history.acts.since(0) if isinstance(act, FinishEvent) and act.slot >= 0)
    ends = []
    for index, step in enumerate(steps):
        following = steps[index + 1] if index + 1 < len(steps) else None
        still_held = following is not None and following.num_held >= step.num_held + finished[following.step_id] > 0
        if step.num_running == 0 and not still_held:
            ends.append(step.now_ns)
    return ends


def _held(history: History, steps: Sequence[StepRecord]) -> Iterator[Stretch]:
    """From the end of a request to the end of its batch, where slots are held; computed padding is shown as such."""
    if not any(step.num_held for step in steps) or any(step.num_padded_rows for step in steps):
        return
    ends = _batch_ends(history, steps)
    for act in history.acts.since(0):
        if not isinstance(act, FinishEvent) or act.slot < 0:
            continue
        position = bisect_left(ends, act.now_ns)
        end_ns = ends[position] if position < len(ends) else history.last_ns
        if end_ns > act.now_ns:
            yield Stretch(act.slot, act.request_id, Use.HELD, act.now_ns, end_ns)


def _batches(history: History, steps: Sequence[StepRecord]) -> Iterator[tuple[int, int]]:
    """From the first boarding to the end of the batch; only where slots are held at all."""
    if not any(step.num_held for step in steps):
        return
    ends = _batch_ends(history, steps)
    boardings = [act.now_ns for act in history.acts.since(0) if isinstance(act, AdmitEvent)]
    end_ns = -1
    for at_ns in boardings:
        if at_ns < end_ns:
            continue
        position = bisect_left(ends, at_ns + 1)
        end_ns = ends[position] if position < len(ends) else history.last_ns
        yield at_ns, end_ns


def _waiting(history: History, start_ns: int) -> Iterator[Level]:
    """How many requests wait, from act to act."""
    waiting: set[int] = set()
    yield Level(start_ns, 0)
    for act in history.acts.since(0):
        if isinstance(act, ArrivalEvent | PreemptEvent):
            waiting.add(act.request_id)
        elif isinstance(act, AdmitEvent | FinishEvent):
            waiting.discard(act.request_id)
        else:
            continue
        yield Level(act.now_ns, len(waiting))


def joined(stretches: Iterable[Stretch], resolution_ns: int) -> list[Stretch]:
    """At most one stretch in each slot and `resolution_ns`: what is shorter goes to the longest that begins there.

    Stretches come sorted by slot and start; the result is too.
    """
    result: list[Stretch] = []
    longest_ns = 0
    for stretch in stretches:
        last = result[-1] if result else None
        length_ns = stretch.end_ns - stretch.start_ns
        is_near = (
            last is not None
            and last.slot == stretch.slot
            and stretch.start_ns - last.end_ns < resolution_ns
            and stretch.end_ns - last.start_ns < resolution_ns
        )
        if not is_near or last is None:
            result.append(stretch)
            longest_ns = length_ns
            continue
        keeps = last if longest_ns >= length_ns else stretch
        longest_ns = max(longest_ns, length_ns)
        result[-1] = replace(keeps, start_ns=last.start_ns, end_ns=stretch.end_ns, ticks=())
    return result
