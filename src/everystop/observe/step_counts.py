"""What is counted of each step: its time, its tokens, and what every slot did in it; fed by `observe.metrics`."""

from __future__ import annotations

from typing import NamedTuple

from everystop.core.durations import NS_PER_S
from everystop.core.events import StepEvent
from everystop.observe.buckets import STEP_S, STEP_TOKENS
from everystop.observe.histogram import Histogram

SLOT_STATES = ("prefill", "decode", "padding", "held_finished", "wasted", "idle")


class StepRows(NamedTuple):
    """The rows of a step that were somebody's: prompts (and what is computed again) in rows of any length, decodes."""

    num_prefills: int
    num_prefill_tokens: int
    num_decodes: int


class StepCounts:
    """Counts of steps that computed something; those that only told the runner who had left are none.

    In each of them every slot is in one of `SLOT_STATES`, so the counts of all states sum to steps times slots. Wasted
    is a row whose request ended while it was computed, held_finished a slot whose request has ended and whose batch
    has not; padding is such a slot that is computed all the same.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_steps = 0
        self.num_over_target = 0
        self.target_s = 0.0
        self.execute_time = Histogram(STEP_S, NS_PER_S)
        self.whole_time = Histogram(STEP_S, NS_PER_S)
        self.tokens = Histogram(STEP_TOKENS)
        self.prefill_tokens = Histogram(STEP_TOKENS)
        self.decode_tokens = Histogram(STEP_TOKENS)
        self.slots = dict.fromkeys(SLOT_STATES, 0)
        self.occupancy = 0.0
        self._landed_ns = 0

    def count(self, event: StepEvent, rows: StepRows, num_held: int) -> None:
        """A step is back; `num_held` finished requests kept their slots during it."""
        began_ns, self._landed_ns = max(event.scheduled_ns, self._landed_ns), event.now_ns
        num_rows = len(event.tokens)
        if not num_rows:
            return
        self.num_steps += 1
        self.num_over_target += event.predicted_ns > event.target_ns
        if event.target_ns:
            self.target_s = event.target_ns / NS_PER_S
        self.execute_time.add(event.execute_ns)
        self.whole_time.add(event.now_ns - began_ns)
        self.tokens.add(event.plan.num_tokens)
        self.prefill_tokens.add(rows.num_prefill_tokens)
        self.decode_tokens.add(rows.num_decodes)
        self._count_slots(num_rows, event.plan.num_padded_rows, rows, num_held)

    def _count_slots(self, num_rows: int, num_padded: int, rows: StepRows, num_held: int) -> None:
        slots, num_useful = self.slots, rows.num_prefills + rows.num_decodes
        num_kept, num_finished = num_rows - num_padded, max(num_held, num_padded)
        slots["prefill"] += rows.num_prefills
        slots["decode"] += rows.num_decodes
        slots["padding"] += num_padded
        slots["held_finished"] += num_finished - num_padded
        slots["wasted"] += num_kept - num_useful
        slots["idle"] += max(0, self.num_slots - num_kept - num_finished)
        self.occupancy = num_useful / max(1, self.num_slots)
