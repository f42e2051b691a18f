"""Which requests were good: their first token came in time, and each later one in time after the one before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everystop.observe.comparison import RequestLine, Run

DEMANDS = ("slo_ttft_ms", "slo_itl_ms")
"""The settings of a comparison that say so; None, or absent, is no demand."""


def is_demanding(settings: Mapping[str, Any]) -> bool:
    """Something is demanded of requests."""
    return any(settings.get(name) is not None for name in DEMANDS)


def demands_s(settings: Mapping[str, Any]) -> dict[str, float]:
    """What is demanded of durations, in seconds, by the first part of their figures' names: ttft, itl."""
    found = {name.split("_")[1]: settings.get(name) for name in DEMANDS}
    return {kind: demand_ms / 1e3 for kind, demand_ms in found.items() if demand_ms is not None}


def num_good(run: Run, settings: Mapping[str, Any]) -> int:
    """Requests of the run that were good."""
    return sum(is_good(line, settings) for line in run.requests)


def is_good(line: RequestLine, settings: Mapping[str, Any]) -> bool:
    """It ended without an error and had what is demanded."""
    ttft_ms, itl_ms = (settings.get(name) for name in DEMANDS)
    if line.error is not None or line.ttft_s is None:
        return False
    if ttft_ms is not None and line.ttft_s * 1e3 > ttft_ms:
        return False
    return itl_ms is None or max(line.itl_s, default=0.0) * 1e3 <= itl_ms
