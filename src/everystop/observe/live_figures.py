"""The figures of the verdict strip: how things stand, and how fast they went over the last minute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from everystop.core.durations import NS_PER_S
from everystop.observe.recent import WINDOW_S, RecentSum, RecentValues


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Latencies and rates over the last 60 s, within 1 %; None where nothing was seen."""

    slots_busy: int
    slots: int
    num_waiting: int
    oldest_wait_ns: int
    kv_used_share: float
    output_tokens_per_s: float
    ttft_p50_ns: int | None
    ttft_p95_ns: int | None
    itl_p50_ns: int | None
    itl_p99_ns: int | None


class RecentFigures:
    """Counts tokens and latencies; an engine that runs only `since_ns` has its rate over that time."""

    def __init__(self, since_ns: int) -> None:
        self._since_ns = since_ns
        self._ttft, self._itl, self._tokens = RecentValues(), RecentValues(), RecentSum()
        self._quantiles: list[int | None] = [None] * 4
        self._worked_out_ns = -NS_PER_S

    def add_first_token(self, now_ns: int, ttft_ns: int) -> None:
        """A request has got its first token so long after it was received."""
        self._ttft.add(now_ns, {ttft_ns: 1})

    def add_step(self, now_ns: int, num_outputs: int, gaps: Mapping[int, int]) -> None:
        """A step has brought so many tokens, and of those that follow another so many after each gap."""
        self._tokens.add(now_ns, num_outputs)
        self._itl.add(now_ns, gaps)

    def latencies(self, now_ns: int) -> list[int | None]:
        """TTFT p50 and p95, ITL p50 and p99; worked out once a second."""
        if now_ns - self._worked_out_ns >= NS_PER_S:
            self._worked_out_ns = now_ns
            self._quantiles = self._ttft.quantiles(now_ns, (0.5, 0.95)) + self._itl.quantiles(now_ns, (0.5, 0.99))
        return self._quantiles

    def output_tokens_per_s(self, now_ns: int) -> float:
        """The mean rate."""
        seconds = min(max((now_ns - self._since_ns) / NS_PER_S, 1.0), WINDOW_S)
        return round(self._tokens.total(now_ns) / seconds, 1)
