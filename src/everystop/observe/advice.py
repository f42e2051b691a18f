"""What to change where a request lost its time: cause, flag, and what the flag does; nothing where no flag helps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from everystop.observe.causes import Cause

LEAST_SHARE = 0.2


class Advice(NamedTuple):
    """A flag that acts on a cause."""

    cause: Cause
    flag: str
    text: str


_BLOCKS = ("--kv-cache-memory", "a larger KV cache holds more requests; fewer slots (--max-num-seqs) need less of it")
_TENANTS = ("--tenants", "the tenant's limits and weight are set in this file")
ADVICE: dict[Cause, tuple[str, str]] = {
    Cause.NO_SLOT: ("--max-num-seqs", "more slots let it board sooner, at the price of longer steps for all"),
    Cause.NO_BLOCKS: _BLOCKS,
    Cause.TOKEN_BUDGET: (
        "--max-num-batched-tokens",
        "larger steps take more prompts at once, and make those who decode wait longer in each",
    ),
    Cause.BATCH_BARRIER: ("--policy continuous", "a slot is used again as soon as somebody ends"),
    Cause.BATCH_FILL: ("--batch-wait-ms", "a shorter wait starts the batch sooner, with fewer in it"),
    Cause.AFTER_PREEMPT: _BLOCKS,
    Cause.TENANT_LIMIT: _TENANTS,
    Cause.OVER_SHARE: _TENANTS,
    Cause.LATE: ("--ttft-target-ms", "a target that more requests can meet puts fewer of them back"),
    Cause.PREFILL: (
        "--max-num-batched-tokens",
        "larger steps compute a long prompt in fewer of them; a prefix shared with earlier requests is not computed",
    ),
    Cause.OTHERS_PREFILL: ("--target-itl-ms", "bounds the time of a step while anybody decodes, by smaller chunks"),
    Cause.SKIPPED: (
        "--max-num-batched-tokens",
        "a step needs a token for each request that decodes, and some for prompts",
    ),
    Cause.PREEMPTED: (
        "--kv-cache-memory",
        "a larger KV cache, fewer slots (--max-num-seqs), or --admission expected preempt less",
    ),
}


def advice_for(ns_by_cause: Mapping[Cause, int], e2e_ns: int, *, num_prefill_steps: int) -> list[Advice]:
    """Advice on causes that took a fifth of the time or more, the largest first.

    A prompt that took one step is computed no sooner in larger ones.
    """
    found: dict[str, Advice] = {}
    for cause in sorted(ns_by_cause, key=lambda each: -ns_by_cause[each]):
        if cause is Cause.PREFILL and num_prefill_steps < 2:
            continue
        if cause in ADVICE and ns_by_cause[cause] >= LEAST_SHARE * e2e_ns:
            flag, text = ADVICE[cause]
            found.setdefault(flag, Advice(cause, flag, text))
    return list(found.values())
