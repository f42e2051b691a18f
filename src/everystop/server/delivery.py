"""The ledger of the event loop's thread: what it does with the outputs of a step, from the moment it has them until the
last reader has written, in parts that sum to it. Asyncio thread only.

It goes on while the engine's thread computes the next step, so it is no part of a step's time: on a machine with a core
to spare it costs a step nothing, on a full one the threads that compute lose what it takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import IntEnum

from everystop.core.durations import NS_PER_S
from everystop.observe.families import Family, Kind, alone, each


class DeliveryPart(IntEnum):
    """What the time went to: tokens to text, text to events, events to the socket, and all that comes between."""

    DETOKENISE = 0
    ENCODE = 1
    WRITE = 2
    OTHER = 3


class Deliveries:
    """Adds up the parts of all deliveries.

    Readers take turns. A reader has the turn from when it wakes to its next sleep; whoever loses it on the way, because
    a slow client makes it wait, marks nothing any more. So no time counts twice, and none while nothing is delivered.
    """

    def __init__(self, now: Callable[[], int] = time.monotonic_ns) -> None:
        self._now = now
        self._spent = [0] * len(DeliveryPart)
        self._last_ns = 0
        self._num_due = 0
        self._reader: object = None
        self.num = 0
        self.num_outputs = 0

    def begin(self) -> None:
        """The outputs of a step are here; whoever has not read the last ones by now is in no hurry."""
        self._last_ns = self._now()
        self._num_due = 0
        self._reader = None

    def handed_out(self, num_outputs: int, num_readers: int) -> None:
        """So many readers have been woken for them."""
        self.num += 1
        self.num_outputs += num_outputs
        self._num_due = num_readers
        self._mark(DeliveryPart.OTHER)

    def take_turn(self, reader: object) -> None:
        """A reader has woken up. One that nobody has woken for this step begins a delivery of its own."""
        if self._num_due:
            self._num_due -= 1
            self._mark(DeliveryPart.OTHER)
        else:
            self._last_ns = self._now()
        self._reader = reader

    def mark(self, part: DeliveryPart, reader: object) -> None:
        """All since the last mark was this part's, if this reader still has the turn."""
        if self._reader is reader:
            self._mark(part)

    def give_turn(self, reader: object) -> None:
        """The reader has written, and reads on or ends."""
        if self._reader is reader:
            self._mark(DeliveryPart.WRITE)
            self._reader = None

    def _mark(self, part: DeliveryPart) -> None:
        now_ns = self._now()
        self._spent[part] += now_ns - self._last_ns
        self._last_ns = now_ns

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by part."""
        return {part.name.lower(): ns / NS_PER_S for part, ns in zip(DeliveryPart, self._spent, strict=True)}


DELIVERY_FAMILIES: tuple[Family[Deliveries], ...] = (
    Family(
        name="everystop_delivery_part_seconds_total",
        kind=Kind.COUNTER,
        text="Time of the event loop's thread from the outputs of a step to the last write, by what it did",
        source="delivery of a step",
        read=each(lambda deliveries: deliveries.seconds),
        labels=("part",),
    ),
    Family(
        name="everystop_deliveries_total",
        kind=Kind.COUNTER,
        text="Steps of which something was delivered",
        source="delivery of a step",
        read=alone(lambda deliveries: deliveries.num),
    ),
    Family(
        name="everystop_delivered_outputs_total",
        kind=Kind.COUNTER,
        text="Outputs that were delivered: one a request and step",
        source="delivery of a step",
        read=alone(lambda deliveries: deliveries.num_outputs),
    ),
)
