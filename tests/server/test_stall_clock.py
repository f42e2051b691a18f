"""How long is too long, and whose time does not count."""

from __future__ import annotations

import pytest

from everystop.server.stall_clock import LATE_S, StallClock

S = 1_000_000_000


class Engine:
    """Has had work since a time, or none."""

    def __init__(self) -> None:
        self.since_ns: int | None = 0

    def stalled_ns(self, now_ns: int) -> int:
        return 0 if self.since_ns is None else max(0, now_ns - self.since_ns)


class Machine:
    """A process that beats each second while it runs."""

    def __init__(self, timeout_s: float = 30.0) -> None:
        self.now_s = 0.0
        self.engine = Engine()
        self.clock = StallClock(timeout_s, lambda: round(self.now_s * S))
        self.clock.engine = self.engine
        self.clock.turn()

    def run(self, seconds: int, *, turns: bool = True) -> None:
        for _ in range(seconds):
            self.now_s += 1
            (self.clock.turn if turns else self.clock.beat)()


def test_a_step_that_does_not_come_back_is_late_and_then_a_stall() -> None:
    machine = Machine()
    states = []
    for _ in range(31):
        machine.run(1)
        states.append((machine.clock.is_engine_late, machine.clock.is_engine_stalled))
    assert states == [(False, False)] * 4 + [(True, False)] * 26 + [(True, True)]
    assert not machine.clock.is_loop_stalled
    assert LATE_S == 4


def test_no_work_and_no_engine_are_no_stall() -> None:
    machine = Machine()
    machine.engine.since_ns = None
    machine.run(100)
    assert machine.clock.engine_silent_s == 0
    machine.clock.engine = None
    assert not machine.clock.is_engine_late


def test_a_short_limit_is_a_limit_for_new_requests_too() -> None:
    machine = Machine(timeout_s=1.0)
    assert machine.clock.beat_s == 0.25
    for _ in range(5):
        machine.now_s += 0.25
        machine.clock.beat()
    assert machine.clock.is_engine_late
    assert machine.clock.is_engine_stalled


@pytest.mark.parametrize("stopped_s", [2, 60, 86_400])
def test_time_in_which_the_process_stood_still_counts_for_nobody(stopped_s: int) -> None:
    """As in the class's example: before the next beat, at it, and after it."""
    machine = Machine()
    machine.run(2)
    machine.now_s += stopped_s
    assert machine.clock.engine_silent_s == 2 + min(stopped_s, 1.5)
    assert machine.clock.loop_silent_s == min(stopped_s, 1.5)
    machine.clock.beat()
    assert machine.clock.engine_silent_s == machine.clock.loop_silent_s == 0
    machine.run(31, turns=False)
    assert machine.clock.is_engine_stalled, "it stands still all the same"
    assert machine.clock.is_loop_stalled


def test_an_event_loop_that_turns_again_is_well() -> None:
    machine = Machine()
    machine.run(31, turns=False)
    assert machine.clock.is_loop_stalled
    machine.run(1)
    assert machine.clock.loop_silent_s == 0


def test_nobody_who_beats_means_all_time_counts() -> None:
    """As in `everystop batch`, which watches nothing."""
    now_ns = 0
    clock = StallClock(30.0, lambda: now_ns)
    clock.engine = Engine()
    now_ns = 100 * S
    assert clock.engine_silent_s == 100
    assert clock.loop_silent_s == 0
