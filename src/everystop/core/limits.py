"""The limits that a scheduler keeps to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a step and a sequence may use, and who boards; see the flags of the same names.

    `admission` is one of `ADMISSIONS`: `greedy` lets whoever is next board as soon as there are blocks for what it is
    now, `expected` when there are for what it and the running ones are expected to become. `max_num_scored_tokens`
    bounds the prompt tokens whose logits a step computes, where it is planned by time: step times know nothing of them.
    `max_prefill_per_decode` bounds those of a step that is not, beside many decoders; see `core.budget.prefill_beside`.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 256
    max_num_prefill_tokens: int | None = None
    max_model_len: int = 8192
    max_preemptions: int = 8
    admission: str = "greedy"
    target_itl_ns: int | None = None
    # None as in records that know of no such limit
    max_num_scored_tokens: int | None = None
    max_prefill_per_decode: int | None = None
