"""The ledger: its parts sum to the time, whatever happens between two steps."""

from __future__ import annotations

import random

from everystop.core.events import LedgerEvent
from everystop.core.ledger import Ledger, StepPart
from everystop.core.plan import StepResult


def result(native_ns: int = 0, gil_wait_ns: int = 0, native_cpu_ns: int = 0) -> StepResult:
    return StepResult([], native_ns=native_ns, gil_wait_ns=gil_wait_ns, native_cpu_ns=native_cpu_ns)


def test_parts_are_named_in_the_order_of_the_event() -> None:
    assert tuple(f"{part.name.lower()}_ns" for part in StepPart) == LedgerEvent._fields[2:10]


def test_each_part_gets_the_time_before_its_mark() -> None:
    ledger = Ledger(now_ns=100)
    ledger.mark(StepPart.SCHEDULE, 103)
    ledger.executed(7, result(native_ns=50, gil_wait_ns=4, native_cpu_ns=49), 163)
    ledger.mark(StepPart.DETOKENISE, 164)
    ledger.mark(StepPart.UPDATE, 170)
    ledger.mark(StepPart.DELIVER, 180)
    event = ledger.close(182)
    assert event == LedgerEvent(
        182,
        7,
        schedule_ns=3,
        metadata_ns=6,
        native_ns=50,
        gil_wait_ns=4,
        detokenise_ns=1,
        update_ns=6,
        deliver_ns=10,
        other_ns=2,
        native_cpu_ns=49,
    )
    assert event.whole_ns == 82


def test_a_runner_that_says_nothing_was_native_all_the_time() -> None:
    ledger = Ledger()
    ledger.executed(0, result(), 30)
    event = ledger.close(30)
    assert event is not None
    assert (event.native_ns, event.metadata_ns, event.whole_ns) == (30, 0, 30)


def test_without_a_step_nothing_is_said_and_nothing_is_lost() -> None:
    """What was done for a policy that wants to wait, or for a plan without rows, is part of the next step."""
    ledger = Ledger()
    ledger.mark(StepPart.SCHEDULE, 5)
    assert ledger.close(6) is None
    ledger.executed(None, result(native_ns=2), 9)
    assert ledger.close(9) is None
    ledger.executed(3, result(native_ns=10), 20)
    event = ledger.close(21)
    assert event is not None
    assert (event.step_id, event.schedule_ns, event.native_ns, event.other_ns, event.whole_ns) == (3, 5, 12, 2, 21)
    assert ledger.close(21) is None


def test_sleep_is_nobodys_part() -> None:
    ledger = Ledger()
    ledger.mark(StepPart.DELIVER, 4)
    ledger.resume(1_000)
    ledger.executed(0, result(), 1_010)
    event = ledger.close(1_010)
    assert event is not None
    assert (event.deliver_ns, event.native_ns, event.whole_ns) == (4, 10, 14)


def test_any_marks_sum_to_the_time_awake() -> None:
    chance = random.Random(1)
    ledger, now_ns, awake_ns, told_ns = Ledger(), 0, 0, 0
    for step_id in range(2_000):
        spent_ns = chance.randrange(1_000)
        now_ns += spent_ns
        match chance.randrange(5):
            case 0:
                ledger.resume(now_ns)
                spent_ns = 0
            case 1:
                native_ns = chance.randrange(spent_ns + 1)
                gil_wait_ns = chance.randrange(spent_ns - native_ns + 1)
                ledger.executed(step_id, result(native_ns or 1, gil_wait_ns), now_ns)
            case 2:
                event = ledger.close(now_ns)
                told_ns += 0 if event is None else event.whole_ns
            case _:
                ledger.mark(chance.choice(list(StepPart)), now_ns)
        awake_ns += spent_ns
    ledger.executed(0, result(), now_ns)
    last = ledger.close(now_ns)
    assert last is not None
    assert told_ns + last.whole_ns == awake_ns
