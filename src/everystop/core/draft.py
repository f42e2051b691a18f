"""A step being planned: who is dealt which tokens, until it is written as the rows of a plan."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from everystop.core.batch import Riders
from everystop.core.budget import StepBudget
from everystop.core.plan import PromptLogits, StepPlan
from everystop.core.request import Request
from everystop.core.rows import Row


@dataclass(slots=True)
class Chunk:
    """Tokens dealt to a prefilling request: `num_tokens` from position `start` on."""

    request: Request
    start: int
    num_tokens: int


@dataclass(slots=True)
class Draft:
    """Who gets a row, before the rows are written; `guest` boards first, in somebody's place.

    `skipped_from` says where those stood who have skipped blocks in this step.
    """

    plan: StepPlan
    now_ns: int
    budget: StepBudget
    decoders: list[Request]
    guest: Request | None
    chunks: list[Chunk] = field(default_factory=list)
    skipped_from: dict[int, int] = field(default_factory=dict)

    @property
    def num_recomputed_tokens(self) -> int:
        """Tokens of the chunks that had been there before a preemption."""
        num_recomputed = 0
        for chunk in self.chunks:
            num_recomputed += max(0, min(chunk.request.num_lost_tokens - chunk.start, chunk.num_tokens))
        return num_recomputed

    def strike(self, request_ids: set[int]) -> None:
        """These requests get no row after all."""
        self.decoders = [request for request in self.decoders if request.request_id not in request_ids]
        self.chunks = [chunk for chunk in self.chunks if chunk.request.request_id not in request_ids]

    def write_rows(self) -> Riders:
        """Write the plan's rows, and note what is in flight; returns who is behind them."""
        rows, step_id, decoders = self.plan.rows, self.plan.step_id, self.decoders
        starts = array("q")
        for request in decoders:
            starts.append(request.num_computed_tokens + request.num_in_flight)
            request.num_in_flight += 1
            request.num_pending_samples += 1
            request.last_served_step = step_id
        rows.append_decodes([request.request_id for request in decoders], starts)
        riders = Riders(decoders.copy(), [request.epoch for request in decoders])
        for chunk in self.chunks:
            request, num_tokens = chunk.request, chunk.num_tokens
            is_last = chunk.start + num_tokens == request.num_tokens + request.num_pending_samples
            samples = is_last and request.max_tokens > 0
            rows.append(Row(request.request_id, chunk.start, num_tokens, 0, num_tokens - samples))
            riders.append(request, request.epoch)
            if request.is_scoring:
                self._score(request, chunk.start + num_tokens)
            request.num_in_flight += num_tokens
            request.num_pending_samples += samples
            request.last_served_step = step_id
        return riders

    def _score(self, request: Request, end: int) -> None:
        """Have the logits of its prompt computed up to position `end`, from where they have been planned on: what was
        planned before a preemption has been, or will be, delivered, and is not asked for again.
        """
        first, end = request.num_planned_scores, min(end, request.num_scored_tokens)
        if end > first:
            self.plan.prompt_logits.append(PromptLogits(request.request_id, first, end - first))
            request.num_planned_scores = end
