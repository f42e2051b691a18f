"""A made-up explanation of one request, whose parts sum as a real one's do."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

MS = 1_000_000
LABELS = {
    "receive": "received and tokenised",
    "queue.no_slot": "queued: no free slot",
    "queue.no_blocks": "queued: too few free KV blocks",
    "prefill": "own prefill",
    "decode": "decode",
    "others_prefill": "others' prefill in its steps",
    "sampling": "sampling",
    "preempted": "preempted, until caught up",
    "host": "between its steps",
    "delivery": "detokenised and delivered",
}


class Life:
    """Grows segment by segment."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.segments: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []
        self.times: list[int] = []

    def add(self, cause: str, ns: int, num_steps: int = 0, detail: str | None = None) -> None:
        end_ns = self.now_ns + ns
        self.segments.append(
            {"start_ns": self.now_ns, "end_ns": end_ns, "cause": cause, "num_steps": num_steps, "detail": detail}
        )
        self.now_ns = end_ns

    def step(self, parts: dict[str, int], own_tokens: int, stranger_tokens: int = 0) -> None:
        """A step that served it: time by cause, tokens of its own and of a stranger's prompt beside seven decodes."""
        start_ns = self.now_ns
        self.add("host", 700_001, 1)
        for cause, ns in parts.items():
            self.add(cause, ns, 1, "mostly r77's prompt" if cause == "others_prefill" else f"{own_tokens} tokens")
        mates: list[dict[str, Any]] = [{"id": f"chatcmpl-{i:04d}", "num_tokens": 1} for i in range(7)]
        if stranger_tokens:
            mates.append({"id": None if len(self.steps) % 2 else "chatcmpl-0077", "num_tokens": stranger_tokens})
        self.steps.append(
            {
                "step_id": 1000 + len(self.steps),
                "start_ns": start_ns,
                "end_ns": self.now_ns,
                "own_ns": sum(parts.values()) - parts.get("others_prefill", 0),
                "others_ns": parts.get("others_prefill", 0),
                "host_ns": 700_001,
                "num_rows": 1 + len(mates),
                "num_tokens": own_tokens + 7 + stranger_tokens,
                "own_tokens": own_tokens,
                "mates": mates,
            }
        )


def explanation(num_tokens: int = 60, **changes: Any) -> dict[str, Any]:
    """Of a request that was queued, prefilled in three chunks, slowed by strangers, preempted once."""
    life = Life()
    life.add("receive", 1_812_345)
    life.add("queue.no_slot", 2_450 * MS, detail="behind r41")
    life.add("queue.no_blocks", 180 * MS, detail="12 blocks needed, 9 free")
    for _ in range(3):
        life.step({"prefill": 82 * MS}, 256)
    life.times.append(life.now_ns)
    for i in range(1, num_tokens):
        if i == num_tokens // 2:
            life.add("preempted", 400 * MS, 6, "300 tokens computed again")
        others = {"others_prefill": (60 + i) * MS} if i % 13 == 7 else {}
        life.step(others | {"decode": (20 + i % 5) * MS, "sampling": 900_003}, 1, 256 if others else 0)
        life.times.append(life.now_ns)
    life.add("delivery", 2_100_007)
    return _told(life) | changes


def _told(life: Life) -> dict[str, Any]:
    sums: dict[str, int] = {}
    for segment in life.segments:
        sums[segment["cause"]] = sums.get(segment["cause"], 0) + segment["end_ns"] - segment["start_ns"]
    total = life.now_ns
    causes = [
        {"cause": c, "label": LABELS[c], "ns": sums[c], "share": sums[c] / total, "is_modelled": c == "others_prefill"}
        for c in LABELS
        if c in sums
    ]
    return {
        "id": "chatcmpl-7f3a",
        "state": "finished",
        "is_live": False,
        "sentence": "2.88 s to first token: 2.45 s queued because all 8 slots were taken.",
        "received_ns": 10**12,
        "e2e_ns": total,
        "ttft_ns": life.times[0],
        "queue_ns": 2_630 * MS,
        "num_prompt_tokens": 900,
        "num_cached_tokens": 132,
        "num_output_tokens": len(life.times),
        "num_preemptions": 1,
        "num_recomputed_tokens": 300,
        "finish_reason": "length",
        "causes": causes,
        "segments": life.segments,
        "steps": life.steps,
        "tokens": _tokens(life),
        "advice": [{"cause": "queue.no_slot", "flag": "--max-num-seqs", "text": "more slots let more requests in"}],
    }


def _tokens(life: Life) -> list[dict[str, Any]]:
    first = {"at_ns": life.times[0], "gap_ns": None, "step_id": 1002, "is_outlier": False, "why": None}
    rest = [
        {
            "at_ns": at_ns,
            "gap_ns": at_ns - before_ns,
            "step_id": 1003 + i,
            "is_outlier": at_ns - before_ns > 50 * MS,
            "why": "prefill of 256 tokens of another request" if at_ns - before_ns > 50 * MS else None,
        }
        for i, (before_ns, at_ns) in enumerate(pairwise(life.times))
    ]
    return [first, *rest]
