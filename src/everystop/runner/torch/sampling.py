"""From the rows of a step that sample to what `sample` takes, and the log-probabilities of what came out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from everystop.core.plan import TokenLogprobs
from everystop.runner.torch.batch import FAILED, MASKED, LogitEdits, SamplingBatch
from everystop.runner.torch.kernel_set import KernelSet
from everystop.runner.torch.settings import FLOATS, INTEGERS
from everystop.runner.torch.steps import Rider, Step
from everystop.runner.torch.tables import Tables

Array = npt.NDArray[Any]
_NO_ID = -1


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Which rows of a step sample, and what the host knows of how; `arrays` are the device's share of it.

    `num_top` is the most log-probabilities that a row wants beside its token's own, -1 where none wants any.
    """

    rows: list[int]
    riders: list[Rider]
    arrays: dict[str, Array]
    wants_logprobs: list[int]
    num_top: int
    is_greedy: bool
    has_cuts: bool
    has_penalties: bool
    has_masks: bool

    @classmethod
    def of(cls, step: Step, tables: Tables) -> SampledRows:
        """Those of a step."""
        rows = np.flatnonzero(step.samples)
        riders = [step.riders[r] for r in rows.tolist()]
        ends = (step.starts + step.nums_tokens)[rows].astype(np.int64)
        num_kept = int((rows < len(step.riders) - step.num_padded).sum())
        wants = [i for i, rider in enumerate(riders[:num_kept]) if rider.is_taken and _num_top(rider) >= 0]
        settings = [rider.settings for rider in riders]
        has_masks = any(each.allowed is not None for each in settings)
        arrays = _arrays_of(riders, ends, step.appends[rows], tables)
        arrays |= _edits_of(riders, ends, tables)
        if wants:
            arrays["logprobs.rows"] = np.array(wants, dtype=np.int64)
        if has_masks:
            spare = tables.room.spare_seat
            seats = [spare if rider.settings.allowed is None else rider.seat for rider in riders]
            arrays["allowed.seats"] = np.array(seats, dtype=np.int64)
        return cls(
            rows=rows.tolist(),
            riders=riders,
            arrays=arrays,
            wants_logprobs=wants,
            num_top=max((_num_top(riders[i]) for i in wants), default=-1),
            is_greedy=all(each.is_greedy for each in settings),
            has_cuts=any(each.has_cuts for each in settings),
            has_penalties=any(each.has_penalties for each in settings),
            has_masks=has_masks,
        )

    @property
    def may_mask(self) -> bool:
        """Some row forbids tokens, perhaps all of them."""
        return self.has_masks or "edits.rows" in self.arrays or "words.rows" in self.arrays

    def sample(self, kernels: KernelSet, logits: Tensor, landed: Mapping[str, Tensor], tables: Tables) -> Tensor:
        """One token a row [R], or FAILED, or MASKED; part of submitted work."""
        # Looked at before, for sampling may write over the logits.
        is_sound = logits.isfinite().all(-1) if self.may_mask else None
        tokens = kernels.sample(logits, self.batch(landed, tables))
        return tokens if is_sound is None else torch.where((tokens == FAILED) & is_sound, MASKED, tokens)

    def batch(self, landed: Mapping[str, Tensor], tables: Tables) -> SamplingBatch:
        """How the rows are sampled; part of submitted work."""
        seats = landed["sampled.seats"]
        floats = dict(zip(FLOATS, tables.floats[seats].unbind(1), strict=True))
        integers = dict(zip(INTEGERS, tables.integers[seats].unbind(1), strict=True))
        return SamplingBatch(
            temperatures=floats["temperature"].float(),
            top_ks=integers["top_k"].int(),
            top_ps=floats["top_p"].contiguous(),
            min_ps=floats["min_p"].contiguous(),
            repetition_penalties=floats["repetition_penalty"].float(),
            presence_penalties=floats["presence_penalty"].float(),
            frequency_penalties=floats["frequency_penalty"].float(),
            seeds=integers["seed"].contiguous(),
            choices=integers["choice_index"].int(),
            positions=landed["sampled.ends"] - integers["num_prompt_tokens"],
            seats=seats,
            output_counts=tables.output_counts if self.has_penalties else None,
            is_in_prompt=tables.is_in_prompt if self.has_penalties else None,
            allowed=tables.allowed[landed["allowed.seats"]] if self.has_masks else None,
            edits=_edits(landed, tables),
            is_greedy=self.is_greedy,
            has_cuts=self.has_cuts,
        )

    def note(self, tokens: Tensor, landed: Mapping[str, Tensor], tables: Tables) -> None:
        """Write sampled tokens [R] where the next step looks for them; part of submitted work.

        A row that failed gets token 0; one that brings nothing new writes to the spare seat.
        """
        ids = tokens.clamp(min=0)
        tables.token_ids.view(-1).index_copy_(0, landed["sampled.slots"], ids.int())
        if self.has_penalties:
            counts = tables.output_counts.view(-1)
            places = landed["sampled.count_seats"] * tables.room.vocab_size + ids
            counts.index_add_(0, places, torch.ones_like(places, dtype=torch.int32))


def _num_top(rider: Rider) -> int:
    wanted = rider.settings.params.logprobs
    return -1 if wanted is None else wanted


def _arrays_of(riders: list[Rider], ends: Array, appends: Array, tables: Tables) -> dict[str, Array]:
    spare = tables.room.spare_seat
    seats = np.array([rider.seat for rider in riders], dtype=np.int64)
    # The spare seat's tokens are never read for a number that matters; each row has a place of its own there or not.
    writers = np.where(appends, seats, spare)
    positions = np.where(appends, ends, 0)
    arrays = {"sampled.seats": seats, "sampled.ends": ends, "sampled.slots": tables.token_slots(writers, positions)}
    if any(rider.settings.has_penalties for rider in riders):
        arrays["sampled.count_seats"] = writers
    return arrays


# --------------------------------------------------------------------------------------- edits


def _edits_of(riders: list[Rider], ends: Array, tables: Tables) -> dict[str, Array]:
    """Biases, stop ids before `min_tokens`, and bad words, with what must stand before each for it to count."""
    fixed: list[tuple[int, int, float]] = []
    words: list[tuple[int, tuple[int, ...]]] = []
    for row, rider in enumerate(riders):
        settings, num_output = rider.settings, int(ends[row]) - rider.num_prompt_tokens
        fixed += [(row, token, bias) for token, bias in settings.params.logit_bias]
        if num_output < settings.params.min_tokens:
            fixed += [(row, token, -np.inf) for token in settings.stop_ids]
        words += [(row, word) for word in settings.params.bad_word_ids if num_output >= len(word) - 1]
    arrays: dict[str, Array] = {}
    if fixed:
        arrays["edits.rows"], arrays["edits.ids"] = (np.array([f[i] for f in fixed], dtype=np.int64) for i in (0, 1))
        arrays["edits.values"] = np.array([value for _, _, value in fixed], dtype=np.float32)
    if words:
        arrays |= _words(words, riders, ends, tables)
    return arrays


def _words(
    words: list[tuple[int, tuple[int, ...]]], riders: list[Rider], ends: Array, tables: Tables
) -> dict[str, Array]:
    """Bad words: where in the table of tokens what precedes a word's last token would stand, and what it would be.

    Example, the word (5, 6, 7) of a request that samples the token at 40: 5 at 38 and 6 at 39 forbid 7. Shorter words
    are filled up with `_NO_ID`, which matches anything.
    """
    width = max(1, max(len(word) for _, word in words) - 1)
    before = np.full((len(words), width), _NO_ID, dtype=np.int32)
    slots = np.zeros((len(words), width), dtype=np.int64)
    for i, (row, word) in enumerate(words):
        num = len(word) - 1
        before[i, :num] = word[:-1]
        seat = np.full(num, riders[row].seat)
        slots[i, :num] = tables.token_slots(seat, np.arange(int(ends[row]) - num, int(ends[row])))
    return {
        "words.rows": np.array([row for row, _ in words], dtype=np.int64),
        "words.ids": np.array([word[-1] for _, word in words], dtype=np.int64),
        "words.before": before,
        "words.slots": slots,
    }


def _edits(landed: Mapping[str, Tensor], tables: Tables) -> LogitEdits | None:
    parts = []
    if "edits.rows" in landed:
        parts.append((landed["edits.rows"], landed["edits.ids"], landed["edits.values"]))
    if "words.rows" in landed:
        before = landed["words.before"]
        stands = tables.token_ids.view(-1)[landed["words.slots"]]
        is_complete = ((stands == before) | (before == _NO_ID)).all(1)
        values = torch.zeros_like(is_complete, dtype=torch.float32).masked_fill(is_complete, float("-inf"))
        parts.append((landed["words.rows"], landed["words.ids"], values))
    if not parts:
        return None
    rows, ids, values = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return LogitEdits(rows, ids, values)


# -------------------------------------------------------------------------- log-probabilities


def score(logits: Tensor, tokens: Tensor, num_top: int) -> list[Tensor]:
    """Of each row of logits [R, V]: the token's log-probability and rank [R], and the best ids and theirs [R, num_top].

    Ranks count in the order "logit descending, id ascending" from 1; 0 where the logits are not finite.
    """
    wide = logits.double()
    log_sums = wide.logsumexp(-1, keepdim=True)
    ids = tokens.clamp(min=0)[:, None]
    own = logits.gather(-1, ids)
    columns = torch.arange(logits.shape[-1], device=logits.device)
    ranks = (logits > own).sum(-1) + ((logits == own) & (columns < ids)).sum(-1) + 1
    ranks = torch.where(logits.isfinite().all(-1), ranks, 0)
    if num_top == 0:
        best = ids[:, :0]
    else:
        best = logits.sort(dim=-1, descending=True, stable=True).indices[:, :num_top]
    tops = wide.gather(-1, best) - log_sums
    return [(own.double() - log_sums)[:, 0].float(), ranks, best, tops.float()]


def read_scores(logprobs: Array, ranks: Array, best: Array, tops: Array, nums_top: list[int]) -> list[TokenLogprobs]:
    """What `score` gave, on the host, with as many of the best as each row asked for."""
    return [
        TokenLogprobs(float(logprob), int(rank), tuple(zip(ids[:num].tolist(), values[:num].tolist(), strict=True)))
        for logprob, rank, ids, values, num in zip(logprobs, ranks, best, tops, nums_top, strict=True)
    ]
