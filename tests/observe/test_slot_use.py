"""Where the slots went, against what the scheduler held at every step."""

from __future__ import annotations

import pytest
from tests.core.harness import make_request, make_scheduler
from tests.core.hash_model import STEP_NS, HashModelRunner
from tests.observe.test_comparison import line, run

from everystop.core.plan import StepPlan
from everystop.core.scheduler import Scheduler
from everystop.engine.loop import StepLoop
from everystop.observe.comparison import Run
from everystop.observe.history import History
from everystop.observe.slot_use import USES, expected_occupancy, slot_use, slots_by_step

NUM_SLOTS = 4
OVERHEAD_NS = 50_000


class Watched:
    """A scheduler that is driven to the end while somebody counts what its slots do in each step."""

    def __init__(self, policy: str, num_blocks: int) -> None:
        self.scheduler: Scheduler = make_scheduler(
            policy=policy, max_num_seqs=NUM_SLOTS, num_blocks=num_blocks, block_size=4, max_num_batched_tokens=16
        )
        self.now_ns = 0
        self.seen: list[dict[str, int]] = []
        self.history = History()
        runner = HashModelRunner(num_blocks=num_blocks, block_size=4, before_execute=self.look)
        self.loop = StepLoop(self.scheduler, runner, self.tell)

    def tell(self) -> int:
        self.now_ns += OVERHEAD_NS
        return self.now_ns

    def look(self, plan: StepPlan) -> None:
        self.now_ns += STEP_NS
        if not plan.rows:
            return
        kept = plan.rows[: len(plan.rows) - plan.num_padded_rows]
        requests = self.scheduler.requests
        num_decodes = sum(
            row.num_tokens == 1 and row.start >= requests[row.request_id].num_prompt_tokens for row in kept
        )
        num_held = len(self.scheduler.held)
        self.seen.append(
            {
                "decode": num_decodes,
                "prefill": len(kept) - num_decodes,
                "padding": plan.num_padded_rows,
                "held": num_held - plan.num_padded_rows,
                "idle": NUM_SLOTS - len(kept) - num_held,
            }
        )

    def drive(self) -> None:
        while self.scheduler.has_work:
            turn = self.loop.turn()
            self.history.receive(turn.events)
            if turn.wake_at_ns is not None:
                self.now_ns = max(self.now_ns, turn.wake_at_ns)
        self.history.catch_up()


def driven(policy: str, num_blocks: int) -> Watched:
    watched = Watched(policy, num_blocks)
    for i in range(11):
        request = make_request(i, 3 + 5 * (i % 3), max_tokens=20 if i % 4 == 0 else 2 + i % 5)
        watched.scheduler.add(request, watched.now_ns)
    watched.drive()
    return watched


@pytest.mark.parametrize("num_blocks", [16, 64])
@pytest.mark.parametrize("policy", ["static", "static-padded", "continuous", "shortest", "priority"])
def test_each_slot_does_in_each_step_what_the_scheduler_had_it_do(policy: str, num_blocks: int) -> None:
    watched = driven(policy, num_blocks)
    found = [slots for record, slots in slots_by_step(watched.history, NUM_SLOTS) if record.num_rows]
    assert found == watched.seen
    assert all(sum(slots.values()) == NUM_SLOTS for slots in found)
    if policy.startswith("static"):
        assert any(slots["held"] + slots["padding"] for slots in found)


def as_run(watched: Watched) -> Run:
    made = run("p", 0, history=watched.history)
    return Run(
        policy="p",
        repeat=0,
        duration_s=1.0,
        requests=made.requests,
        start_ns=0,
        max_num_seqs=NUM_SLOTS,
        history=watched.history,
    )


@pytest.mark.parametrize("policy", ["static", "static-padded", "continuous"])
def test_slot_steps_and_slot_time_sum_up_exactly(policy: str) -> None:
    watched = driven(policy, 64)
    use = slot_use(as_run(watched))
    assert use is not None
    assert use.num_steps == len(watched.seen)
    assert use.slot_steps == {name: sum(slots[name] for slots in watched.seen) for name in USES[:-1]}
    assert sum(use.slot_steps.values()) == use.num_steps * NUM_SLOTS
    assert sum(use.slot_ns.values()) == use.span_ns * NUM_SLOTS
    assert use.slot_ns["decode"] == use.slot_steps["decode"] * STEP_NS
    assert use.slot_ns["held"] == use.slot_steps["held"] * STEP_NS
    assert 0 < use.slot_ns["overhead"] < use.span_ns * NUM_SLOTS / 4
    shares = use.as_data()["slot_ns_share"]
    assert sum(shares.values()) == pytest.approx(1.0)


def test_time_before_anybody_boards_and_between_batches_of_nobody_is_idle() -> None:
    watched = Watched("continuous", 64)
    watched.now_ns = 7_000_000
    watched.scheduler.add(make_request(0, 3, max_tokens=2), watched.now_ns)
    watched.drive()
    first_end_ns = watched.now_ns
    watched.now_ns += 5_000_000
    watched.scheduler.add(make_request(1, 3, max_tokens=2), watched.now_ns)
    watched.drive()
    use = slot_use(as_run(watched))
    assert use is not None
    working_idle = use.slot_steps["idle"] * STEP_NS
    waiting = 12_000_000 * NUM_SLOTS
    assert first_end_ns > 7_000_000
    assert waiting <= use.slot_ns["idle"] - working_idle <= waiting + 8 * OVERHEAD_NS * NUM_SLOTS


def test_without_a_history_nothing_is_known() -> None:
    assert slot_use(run("server")) is None


def test_expected_occupancy_is_the_formula_of_batches_in_order_of_arrival() -> None:
    lengths = [1000, *[20] * 15]
    lines = tuple(
        line(i, num_output_tokens=n, sent_s=0.0, token_s=(1.0, 2.0), end_s=2.0) for i, n in enumerate(lengths)
    )
    made = Run(policy="static", repeat=0, duration_s=2.0, requests=lines, start_ns=0, max_num_seqs=16, history=None)
    assert expected_occupancy(made) == pytest.approx(1300 / 16000)
    late = (*lines[:-1], line(15, num_output_tokens=20, sent_s=1.5, token_s=(1.8,), end_s=2.0))
    assert expected_occupancy(Run(**{**_fields(made), "requests": late})) is None
    failed = (*lines[:-1], line(15, sent_s=0.0, error="refused", token_s=()))
    assert expected_occupancy(Run(**{**_fields(made), "requests": failed})) is None
    timed = (line(0, num_output_tokens=20, scheduled_s=0.0, sent_s=0.0, token_s=(1.8,), end_s=2.0), *lines[1:])
    assert expected_occupancy(Run(**{**_fields(made), "requests": timed})) is None


def _fields(made: Run) -> dict[str, object]:
    return {name: getattr(made, name) for name in made.__dataclass_fields__}
