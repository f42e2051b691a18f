"""Makes a workload of a trace, which holds lengths and times only: prompts are made of its lengths and prefix ids."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from everystop.core.durations import NS_PER_MS, NS_PER_S
from everystop.sim.traces import TraceRequest
from everystop.sim.workloads import FIRST_ID, LAST_ID, Job, Workload


def traced_workload(name: str, requests: Iterable[TraceRequest]) -> Workload:
    """An open loop of a trace's requests; a group is a tenant. Prompts are equal as far as their prefix ids are, and
    unlike all others from there on.
    """
    return Workload(name, 0, tuple(_job(i, request) for i, request in enumerate(requests)))


def _job(index: int, request: TraceRequest) -> Job:
    return Job(
        prompt=_prompt(index, request),
        max_tokens=request.num_output_tokens,
        group=request.tenant or "all",
        at_s=request.arrival_ns / NS_PER_S,
        tenant=request.tenant,
        ttft_target_ms=_ms(request.ttft_target_ns),
        itl_target_ms=_ms(request.itl_target_ns),
    )


def _prompt(index: int, request: TraceRequest) -> tuple[int, ...]:
    """Token ids: those of each prefix id for its stretch, then the request's own.

    Example, 4 tokens an id, ids (7, 8), 10 tokens: 4 of "prefix 7", 4 of "prefix 8", 2 of the request.
    """
    num_tokens, done = request.num_prompt_tokens, 0
    ids: list[int] = []
    for i, prefix_id in enumerate(request.prefix_ids):
        end = min(num_tokens, int((i + 1) * request.prefix_id_tokens))
        ids += _tokens(f"prefix {prefix_id}", end - done)
        done = max(done, end)
    return tuple(ids + _tokens(f"request {index}", num_tokens - done))


def _tokens(name: str, num: int) -> list[int]:
    """That many plain token ids, always the same for a name; fewer are the beginning of more."""
    if num <= 0:
        return []
    data = hashlib.shake_128(name.encode()).digest(4 * num)
    span = LAST_ID - FIRST_ID + 1
    return [FIRST_ID + int.from_bytes(data[i : i + 4], "little") % span for i in range(0, 4 * num, 4)]


def _ms(target_ns: int | None) -> float | None:
    return None if target_ns is None else target_ns / NS_PER_MS
