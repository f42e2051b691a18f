"""The ledger of the engine's thread: all of its time but sleep, cut into parts that sum to it.

It reads no clock: whoever keeps it says what time it is when a part has ended. Between two ends there is nothing that
is not some part's, so the sum is exact.
"""

from __future__ import annotations

from enum import IntEnum

from everystop.core.events import LedgerEvent
from everystop.core.plan import StepResult


class StepPart(IntEnum):
    """What the time went to, in the order of `LedgerEvent`."""

    SCHEDULE = 0
    METADATA = 1
    NATIVE = 2
    GIL_WAIT = 3
    DETOKENISE = 4
    UPDATE = 5
    DELIVER = 6
    OTHER = 7


class Ledger:
    """Adds up the parts from one step to the next. What is done between two sleeps without executing anything counts
    for the next step; so does what follows a step, such as delivering its outputs.
    """

    __slots__ = ("_last_ns", "_native_cpu_ns", "_spent", "_step_id")

    def __init__(self, now_ns: int = 0) -> None:
        self._last_ns = now_ns
        self._spent = [0] * len(StepPart)
        self._step_id = -1
        self._native_cpu_ns = 0

    def resume(self, now_ns: int) -> None:
        """The thread has slept until now."""
        self._last_ns = now_ns

    def mark(self, part: StepPart, now_ns: int) -> None:
        """All since the last mark was this part's."""
        self._spent[part] += now_ns - self._last_ns
        self._last_ns = now_ns

    def executed(self, step_id: int | None, result: StepResult, now_ns: int) -> None:
        """The runner is back with the result of a step; a plan without rows has no id, for it is none. A runner that
        does not say what it did was native all the time.
        """
        spent_ns = now_ns - self._last_ns
        native_ns, gil_wait_ns = result.native_ns or spent_ns, result.gil_wait_ns
        self._spent[StepPart.NATIVE] += native_ns
        self._spent[StepPart.GIL_WAIT] += gil_wait_ns
        self._spent[StepPart.METADATA] += spent_ns - native_ns - gil_wait_ns
        self._native_cpu_ns += result.native_cpu_ns
        self._step_id = self._step_id if step_id is None else step_id
        self._last_ns = now_ns

    def close(self, now_ns: int) -> LedgerEvent | None:
        """The parts since the last call, the rest being `OTHER`; None where no step has been executed since."""
        self.mark(StepPart.OTHER, now_ns)
        if self._step_id < 0:
            return None
        event = LedgerEvent._make((now_ns, self._step_id, *self._spent, self._native_cpu_ns))
        self._spent, self._step_id, self._native_cpu_ns = [0] * len(StepPart), -1, 0
        return event
