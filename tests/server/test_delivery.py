"""The ledger of the event loop's thread: parts of a delivery, and what a running server says of both threads."""

from __future__ import annotations

import itertools
import json
from contextlib import closing

import pytest
from tests.server.parrot import parrot, wait_until

from everystop.core.events import Event, LedgerEvent
from everystop.observe.ledger import PARTS
from everystop.server.delivery import Deliveries, DeliveryPart


class Clock:
    """A second passes whenever the test says so."""

    def __init__(self) -> None:
        self.now_s = 0

    def __call__(self) -> int:
        return self.now_s * 1_000_000_000


def make() -> tuple[Deliveries, Clock]:
    clock = Clock()
    return Deliveries(clock), clock


def test_the_parts_of_a_delivery_sum_to_its_time() -> None:
    deliveries, clock = make()
    clock.now_s = 100
    deliveries.begin()
    clock.now_s += 1
    deliveries.handed_out(2, 2)
    for reader in ("a", "b"):
        clock.now_s += 2
        deliveries.take_turn(reader)
        clock.now_s += 4
        deliveries.mark(DeliveryPart.DETOKENISE, reader)
        clock.now_s += 8
        deliveries.mark(DeliveryPart.ENCODE, reader)
        clock.now_s += 16
        deliveries.give_turn(reader)
    assert deliveries.seconds == {"detokenise": 8.0, "encode": 16.0, "write": 32.0, "other": 5.0}
    assert sum(deliveries.seconds.values()) == clock.now_s - 100
    assert (deliveries.num, deliveries.num_outputs) == (1, 2)


def test_nothing_counts_between_two_deliveries() -> None:
    deliveries, clock = make()
    for _ in range(2):
        clock.now_s += 50
        deliveries.begin()
        deliveries.handed_out(1, 1)
        deliveries.take_turn("a")
        clock.now_s += 3
        deliveries.give_turn("a")
    assert deliveries.seconds == {"detokenise": 0.0, "encode": 0.0, "write": 6.0, "other": 0.0}


def test_a_reader_that_waits_for_its_client_loses_the_turn() -> None:
    """Its time belongs to those who work meanwhile, and what it marks when it comes back is not counted."""
    deliveries, clock = make()
    deliveries.begin()
    deliveries.handed_out(2, 2)
    deliveries.take_turn("slow")
    clock.now_s += 1
    deliveries.mark(DeliveryPart.ENCODE, "slow")
    deliveries.take_turn("quick")
    clock.now_s += 2
    deliveries.give_turn("quick")
    clock.now_s += 50
    deliveries.give_turn("slow")
    deliveries.mark(DeliveryPart.ENCODE, "slow")
    assert deliveries.seconds == {"detokenise": 0.0, "encode": 1.0, "write": 2.0, "other": 0.0}


def test_a_reader_that_comes_late_is_counted_from_then_on() -> None:
    deliveries, clock = make()
    deliveries.begin()
    deliveries.handed_out(1, 0)
    clock.now_s += 50
    deliveries.take_turn("late")
    clock.now_s += 2
    deliveries.give_turn("late")
    assert deliveries.seconds == {"detokenise": 0.0, "encode": 0.0, "write": 2.0, "other": 0.0}


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_server_says_where_the_time_of_both_threads_went(is_streamed: bool) -> None:
    with parrot() as server:
        ledgers: list[LedgerEvent] = []
        receive = server.engine.on_events

        def listen(events: list[Event]) -> None:
            ledgers.extend(event for event in events if isinstance(event, LedgerEvent))
            receive(events)

        server.engine.on_events = listen
        server.runner.step_s = 0.001
        if is_streamed:
            assert server.events("/v1/completions", {"prompt": "abcdefgh" * 4, "max_tokens": 20})[-1] == "[DONE]"
        else:
            server.complete("abcdefgh" * 4, max_tokens=20)
        wait_until(lambda: not server.scheduler.has_work)
        for before, after in itertools.pairwise(ledgers):
            assert after.whole_ns == after.now_ns - before.now_ns
        assert len(ledgers) == server.metric("steps_total") == 20
        for part in PARTS:
            spent_ns = sum(getattr(ledger, f"{part}_ns") for ledger in ledgers)
            label = f'part="{part}"'
            assert server.metric("step_part_seconds_total", label) == pytest.approx(spent_ns / 1e9, abs=1e-12)
        assert server.metric("step_part_seconds_total", 'part="native"') >= 0.020
        assert 1 <= server.metric("deliveries_total") <= 20
        assert server.metric("delivered_outputs_total") == 20
        for part in ("detokenise", "encode", "write", "other"):
            assert server.metric("delivery_part_seconds_total", f'part="{part}"') > 0, part


def test_a_client_that_leaves_ends_its_turn() -> None:
    with parrot() as server:
        server.runner.step_s = 0.002
        with closing(server.connect()) as connection:
            connection.request(
                "POST", "/v1/completions", json.dumps({"prompt": "ab", "ignore_eos": True, "stream": True})
            )
            assert connection.getresponse().read(1)
        wait_until(lambda: not server.scheduler.has_work)
        assert server.events("/v1/completions", {"prompt": "ab"})[-1] == "[DONE]"
        deliveries = server.service.state.board.deliveries
        wait_until(lambda: deliveries._reader is None)
