"""Messages as the live stream sends them, for what reads it."""

from __future__ import annotations

from typing import Any

MS, S = 10**6, 10**9
START_NS = 100 * S
SERVER = {
    "model": "parrot",
    "version": "1.2.3",
    "policy": "continuous",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "num_blocks": 100,
    "sees": "all",
}
TILES = {
    "slots_busy": 2,
    "slots": 8,
    "num_waiting": 1,
    "oldest_wait_ns": 1_400 * MS,
    "kv_used_share": 0.3,
    "output_tokens_per_s": 312.4,
    "ttft_p50_ns": 45 * MS,
    "ttft_p95_ns": 340 * MS,
    "itl_p50_ns": 30 * MS,
    "itl_p99_ns": 120 * MS,
}


def request(request_id: int, **fields: Any) -> dict[str, Any]:
    """A request that runs in the slot of its number and has no token yet."""
    return {
        "id": request_id,
        "name": f"cmpl-{request_id}",
        "state": "running",
        "slot": request_id,
        "admit_ns": START_NS,
        "first_token_ns": None,
        "finish_ns": None,
        "num_prompt_tokens": 100,
        "num_cached_tokens": 0,
        "num_output_tokens": 0,
        "arrival_ns": START_NS - 20 * MS,
        "finish_reason": None,
        "num_preemptions": 0,
        "max_gap_ns": 0,
        "blame": None,
    } | fields


def step(begin_ns: int, end_ns: int, rows: list[tuple[int, int, int, int]], **counts: int) -> list[Any]:
    """A step of rows (slot, request, tokens, outputs)."""
    num_padded = counts.get("num_padded", 0)
    num_prefill = sum(num for _, _, num, _ in rows if num > 1)
    num_decode = len(rows) - num_padded - sum(num > 1 for _, _, num, _ in rows)
    flat = [number for row in rows for number in row]
    running, waiting, held = (counts.get(f"num_{name}", 0) for name in ("running", "waiting", "held"))
    counted = [num_decode, num_prefill, num_padded, running or len(rows), waiting, held, 70, 20, 3]
    return [end_ns // MS, begin_ns, end_ns, end_ns - begin_ns, *counted, flat]


def message(now_ns: int, **fields: Any) -> dict[str, Any]:
    """One of those that follow the first."""
    return {
        "full": False,
        "now_ns": now_ns,
        "steps": [],
        "requests": [],
        "num_waiting": 0,
        "waiting": [],
        "tiles": TILES,
        "acts": [],
        "dropped": 0,
        "uptime_s": 65.0,
        "more": False,
    } | fields


def first(now_ns: int, **fields: Any) -> dict[str, Any]:
    """The first, of `server`."""
    server = SERVER | fields.pop("server", {})
    return message(now_ns, **fields) | {"full": True, "server": server}
