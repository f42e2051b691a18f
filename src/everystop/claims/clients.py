"""What the clients of a run saw, all of them or those of one group; times in seconds."""

from __future__ import annotations

from everystop.observe.comparison import Run


def ttft_s(run: Run, group: str | None = None) -> list[float]:
    """From sending to the first token, request by request in the order of the workload."""
    return [line.ttft_s for line in run.requests if group in (None, line.group) and line.ttft_s is not None]


def itl_s(run: Run, group: str | None = None) -> list[float]:
    """All gaps between two tokens of a request."""
    return [gap_s for line in run.requests if group in (None, line.group) for gap_s in line.itl_s]


def mean_ttft_s(run: Run, group: str | None = None) -> float:
    """Of all requests that have a first token; there must be one."""
    values = ttft_s(run, group)
    return sum(values) / len(values)


def mean_e2e_s(run: Run, group: str | None = None) -> float:
    """From sending to the end; there must be a request."""
    values = [line.e2e_s for line in run.requests if group in (None, line.group)]
    return sum(values) / len(values)
