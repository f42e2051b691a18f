"""The scripted runs behind the golden step logs: one scenario under each policy, each plan one JSON line.

After a wanted change of the scheduler, write them again and read the difference:

    PYTHONPATH=src python -m tests.core.golden_runs
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tests.core.harness import STEP_NS, Harness, eos, make_request, make_scheduler

from everystop.core.plan import StepPlan
from everystop.core.policy import POLICIES

FOLDER = Path(__file__).parent / "golden"


def run(policy: str, depth: int = 0) -> Harness:
    """Admission, chunks, a hit, a fork, aborts of a running and of a waiting request, preemption and a failure."""
    scheduler = make_scheduler(
        policy=policy,
        num_blocks=12,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=10,
        batch_wait_ns=2 * STEP_NS,
    )
    harness = Harness(scheduler, depth=depth)
    harness.add(make_request(0, list(range(13)), max_tokens=14, priority=2, tenant="a"))
    harness.add_group(1, [9, 8, 7, 6, 5, 4], 2, max_tokens=9, temperature=1.0, seed=11, priority=1, tenant="b")
    for _ in range(4):
        harness.turn()
    ends = {"temperature": 1.0, "seed": 5, "eos_token_ids": eos()}
    harness.add(make_request(3, [*range(12), 99, 98], max_tokens=12, tenant="a", priority=1, **ends))
    harness.add(make_request(4, [*range(8), 77], max_tokens=20, tenant="b"))
    for _ in range(5):
        harness.turn()
    harness.add(make_request(5, 3, max_tokens=2))
    harness.abort(5)
    harness.abort(1)
    harness.add(make_request(6, 20, max_tokens=8, priority=3, tenant="a"))
    harness.add(make_request(7, 7, max_tokens=25, priority=1, tenant="c", ttft_target_ns=4 * STEP_NS))
    for _ in range(8):
        harness.turn()
    harness.runner.fail[7] = "nan_logits"
    harness.run()
    return harness


def lines(plans: list[StepPlan]) -> Iterator[str]:
    """Plans as JSON lines, empty fields left out and parameters with them, so that a difference is easy to read."""
    for plan in plans:
        fields = json.loads(plan.to_json())
        for admitted in fields["admitted"]:
            admitted[3] = {name: value for name, value in admitted[3].items() if name in ("max_tokens", "n", "seed")}
        yield json.dumps(
            {name: value for name, value in fields.items() if value not in ([], None, 0) or name == "step_id"}
        )


def main() -> None:
    """Write all golden logs."""
    for policy in POLICIES:
        text = "".join(line + "\n" for line in lines(run(policy).plans))
        (FOLDER / f"{policy}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
