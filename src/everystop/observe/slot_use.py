"""Where the slots of a batch went in a run: step by step, and nanosecond by nanosecond.

A slot-step is one slot in one step that computed something. A slot that was on board and got no token of the step's
budget counts as idle in it, like an empty one. Slot time covers the whole run, from its start to the last step, times
the number of slots: the time that a step was executed is divided by what each slot did in it; the time around it, and
between steps while anybody was on board, is overhead of every slot; where nobody was on board, every slot was idle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from everystop.core.events import FinishEvent
from everystop.observe.comparison import Run
from everystop.observe.formulas import static_occupancy
from everystop.observe.history import History, StepRecord

USES = ("decode", "prefill", "padding", "held", "idle", "overhead")
"""In the order in which they are drawn; of slot-steps none is overhead."""
USEFUL = ("decode", "prefill")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotUse:
    """Slot-steps and slot time of a run, by use; both sum up exactly: `slot_steps` to `num_steps` times `num_slots`,
    `slot_ns` to `span_ns` times `num_slots`.
    """

    num_slots: int
    num_steps: int
    span_ns: int
    slot_steps: Mapping[str, int]
    slot_ns: Mapping[str, int]

    @property
    def occupancy(self) -> float:
        """Share of the slot-steps that computed something for a request."""
        return sum(self.slot_steps[use] for use in USEFUL) / max(1, self.num_steps * self.num_slots)

    def as_data(self) -> dict[str, Any]:
        """As plain data, with shares."""
        num_slot_steps, num_slot_ns = max(1, self.num_steps * self.num_slots), max(1, self.span_ns * self.num_slots)
        return {
            "num_slots": self.num_slots,
            "num_steps": self.num_steps,
            "span_ns": self.span_ns,
            "occupancy": self.occupancy,
            "slot_steps": dict(self.slot_steps),
            "slot_steps_share": {use: num / num_slot_steps for use, num in self.slot_steps.items()},
            "slot_ns": dict(self.slot_ns),
            "slot_ns_share": {use: ns / num_slot_ns for use, ns in self.slot_ns.items()},
        }


def slot_use(run: Run) -> SlotUse | None:
    """Where the slots of a run went; None where its history is not known."""
    if run.history is None:
        return None
    steps, times = dict.fromkeys(USES[:-1], 0), dict.fromkeys(USES, 0)
    num_steps, cursor_ns, was_on_board = 0, run.start_ns, False
    for record, slots in slots_by_step(run.history, run.max_num_seqs):
        gap_ns = max(0, record.scheduled_ns - cursor_ns)
        times["overhead" if was_on_board else "idle"] += gap_ns * run.max_num_seqs
        around_ns = record.now_ns - max(cursor_ns, record.scheduled_ns)
        execute_ns = min(record.execute_ns, around_ns) if record.num_rows else 0
        times["overhead"] += (around_ns - execute_ns) * run.max_num_seqs
        if record.num_rows:
            num_steps += 1
            for use, num in slots.items():
                steps[use] += num
                times[use] += num * execute_ns
        cursor_ns, was_on_board = record.now_ns, record.num_running > 0
    return SlotUse(
        num_slots=run.max_num_seqs,
        num_steps=num_steps,
        span_ns=cursor_ns - run.start_ns,
        slot_steps=steps,
        slot_ns=times,
    )


def slots_by_step(history: History, num_slots: int) -> Iterator[tuple[StepRecord, dict[str, int]]]:
    """Each step, and how many slots did what in it."""
    num_finished: dict[int, int] = {}  # by the time of the step that ended them: those were on board in it
    for act in history.acts.since(history.acts.start):
        if isinstance(act, FinishEvent) and act.slot >= 0:
            num_finished[act.now_ns] = num_finished.get(act.now_ns, 0) + 1
    for record in history.steps.since(history.steps.start):
        held = max(0, record.num_held - num_finished.get(record.now_ns, 0))
        yield record, _slots(history, record, num_slots, held)


def _slots(history: History, record: StepRecord, num_slots: int, num_held: int) -> dict[str, int]:
    num_kept = record.num_rows - record.num_padded_rows
    num_decodes = 0
    for i in range(num_kept):
        if record.nums[i] == 1 and record.starts[i] >= num_prompt_tokens(history, record.request_ids[i]):
            num_decodes += 1
    return {
        "decode": num_decodes,
        "prefill": num_kept - num_decodes,
        "padding": record.num_padded_rows,
        "held": max(0, num_held - record.num_padded_rows),
        "idle": num_slots - num_kept - max(num_held, record.num_padded_rows),
    }


def num_prompt_tokens(history: History, request_id: int) -> int:
    """Length of a request's prompt; 0 of one that is not remembered."""
    trail = history.trails.get(request_id)
    return 0 if trail is None or trail.arrival is None else trail.arrival.num_prompt_tokens


def expected_occupancy(run: Run) -> float | None:
    """U = Σ lengths / Σ over batches of (slots × longest): the share of slot-steps that decode when batches of as many
    requests as there are slots run in order of arrival, prefill left aside. None unless all were there at once, before
    the first token came, without times of their own, and none failed.

    Example, 16 slots, 15 answers of 20 tokens and one of 1,000: 1,300 / 16,000 = 8.1 %.
    """
    lines = sorted(run.requests, key=lambda line: (line.sent_s, line.index))
    first_s = min((line.token_s[0] for line in lines if line.token_s), default=None)
    if first_s is None or run.max_num_seqs < 1 or len(run.good) < len(lines) or lines[-1].sent_s > first_s:
        return None
    if any(line.scheduled_s is not None for line in lines):
        return None
    return static_occupancy([line.num_output_tokens for line in lines], run.max_num_seqs)
