"""Where the time of the engine's thread went, summed over steps; fed by `observe.metrics`."""

from __future__ import annotations

from everystop.core.durations import NS_PER_S
from everystop.core.events import LedgerEvent
from everystop.observe.families import Family, Kind, alone, each

PARTS = tuple(name.removesuffix("_ns") for name in LedgerEvent._fields[2:10])


class LedgerCounts:
    """Sums of `LedgerEvent`: nanoseconds by part, and of processor time in the native call."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.native_cpu_ns = 0
        self._spent = [0] * len(PARTS)

    def count(self, event: LedgerEvent) -> None:
        """One more step."""
        self.num_steps += 1
        self.native_cpu_ns += event.native_cpu_ns
        self._spent = [sum(pair) for pair in zip(self._spent, event[2:10], strict=True)]

    @property
    def whole_ns(self) -> int:
        """The sum of all parts."""
        return sum(self._spent)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by part."""
        return {name: ns / NS_PER_S for name, ns in zip(PARTS, self._spent, strict=True)}


LEDGER_FAMILIES: tuple[Family[LedgerCounts], ...] = (
    Family(
        name="everystop_step_part_seconds_total",
        kind=Kind.COUNTER,
        text="Time of the engine's thread but sleep, by what it did; the parts sum to all of it",
        source="ledger",
        read=each(lambda ledger: ledger.seconds),
        labels=("part",),
    ),
    Family(
        name="everystop_step_native_cpu_seconds_total",
        kind=Kind.COUNTER,
        text="Processor time of the engine's thread in the native call, without the threads that help it",
        source="ledger",
        read=alone(lambda ledger: ledger.native_cpu_ns / NS_PER_S),
    ),
)
"""No record holds the ledger, so these cannot be counted again from one."""
