"""How long static batches waited for company before they began, and how much of a difference to another policy that is.

It looks at what the scheduler said of who waits (`WaitReason.BATCH_FILL`), so a policy that never waits has no waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from everystop.core.durations import NS_PER_MS, NS_PER_S
from everystop.core.events import AdmitEvent, ArrivalEvent, FinishEvent, WaitEvent, WaitReason
from everystop.observe.comparison import Comparison, Run
from everystop.observe.history import History
from everystop.words import in_time, listed, percent

SETTING = "batch_wait_ms"
"""Milliseconds by policy."""
NOTABLE = 0.1
"""Share of a difference from which on the wait must be spoken of."""


@dataclass(frozen=True, slots=True)
class BatchWaits:
    """Waits in nanoseconds: of each batch that waited, and of all requests in them, summed up."""

    batches_ns: tuple[int, ...]
    requests_ns: int

    def as_data(self) -> dict[str, Any]:
        """As plain data."""
        waits_ms = [ns / NS_PER_MS for ns in self.batches_ns]
        return {
            "num_batches": len(waits_ms),
            "median_ms": median(waits_ms) if waits_ms else 0.0,
            "max_ms": max(waits_ms, default=0.0),
        }


def batch_waits(runs: Sequence[Run]) -> BatchWaits:
    """Those of several runs, one after the other; none where there is no history."""
    found = [_batch_waits(run.history) for run in runs if run.history is not None]
    batches_ns = tuple(ns for each in found for ns in each.batches_ns)
    return BatchWaits(batches_ns, sum(each.requests_ns for each in found))


def _batch_waits(history: History) -> BatchWaits:
    """From the moment that somebody waited only for company until the batch began."""
    batches, requests_ns = [], 0
    arrived: dict[int, int] = {}
    since_ns: int | None = None
    for act in history.acts.since(history.acts.start):
        match act:
            case ArrivalEvent():
                arrived[act.request_id] = act.now_ns
            case WaitEvent(reason=WaitReason.BATCH_FILL) if since_ns is None:
                since_ns = act.now_ns
            case AdmitEvent():
                if since_ns is not None:
                    batches.append(act.now_ns - since_ns)
                    requests_ns += sum(act.now_ns - max(at_ns, since_ns) for at_ns in arrived.values())
                since_ns = None
                arrived.pop(act.request_id, None)
            case FinishEvent():
                arrived.pop(act.request_id, None)
    return BatchWaits(tuple(batches), requests_ns)


def batch_wait_remarks(comparison: Comparison) -> Iterator[str]:
    """A sentence for each policy that waits and other that does not, of which one is the baseline, where the waits are
    a notable part of what lies between them.
    """
    waiting = [policy for policy in comparison.policies if batch_waits(comparison.runs_of(policy)).batches_ns]
    for policy in waiting:
        for other in comparison.policies:
            if other not in waiting and comparison.policies[0] in (policy, other):
                shares = {what: share for what, share in _shares(comparison, policy, other) if share >= NOTABLE}
                if shares:
                    yield _remark(comparison, policy, other, shares)


def _shares(comparison: Comparison, policy: str, other: str) -> Iterator[tuple[str, float]]:
    """Which share of a difference the waits are, 0 where the policy that waits was not the slower one."""
    pairs = list(comparison.pairs(policy, other))
    waits = [batch_waits([run]) for run, _ in pairs]
    mean_s = sum(each.requests_ns / max(1, len(run.good)) for each, (run, _) in zip(waits, pairs, strict=True))
    yield "in mean TTFT", _share(mean_s / NS_PER_S, sum(_ttft_s(run) - _ttft_s(beside) for run, beside in pairs))
    whole_s = sum(sum(each.batches_ns) for each in waits) / NS_PER_S
    yield (
        "in the time for all requests",
        _share(whole_s, sum(run.duration_s - beside.duration_s for run, beside in pairs)),
    )


def _ttft_s(run: Run) -> float:
    """The mean; 0 where there is none."""
    return fmean([line.ttft_s or 0.0 for line in run.good] or [0.0])


def _share(part: float, whole: float) -> float:
    return min(1.0, part / whole) if whole > 0 else 0.0


def _remark(comparison: Comparison, policy: str, other: str, shares: dict[str, float]) -> str:
    waits_s = [ns / NS_PER_S for ns in batch_waits(comparison.runs_of(policy)).batches_ns]
    setting = (comparison.settings.get(SETTING) or {}).get(policy)
    option = "--batch-wait-ms" if setting is None else f"--batch-wait-ms {setting}"
    parts = listed([f"{percent(share)} of the difference {what}" for what, share in shares.items()])
    batches = f"{len(waits_s):,} batch{'' if len(waits_s) == 1 else 'es'}"
    return (
        f"{policy} waited for company before {batches}, {in_time(median(waits_s))} of each in the median and "
        f"{in_time(max(waits_s))} at most ({option}): time in which it computed nothing. That is {parts} to {other}; "
        "--batch-wait-ms 0 leaves it out."
    )


def batch_wait_setting(comparison: Comparison) -> str:
    """What was set, in words; nothing where no policy waits, or where it is not known."""
    settings = comparison.settings.get(SETTING) or {}
    return listed([f"{policy} waits up to {ms} ms for a batch to fill" for policy, ms in settings.items()])
