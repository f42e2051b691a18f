"""Who is told where the time of an answered request went, and what that may cost."""

from __future__ import annotations

import pytest
from tests.observe.runs import MS, Run

from everystop.observe import aftermath
from everystop.observe.aftermath import COST_SHARE, MAX_SAVED_NS, PATIENCE_NS, Aftermath
from everystop.observe.history import Client
from everystop.observe.life import Life
from everystop.observe.thread_share import ThreadShare


class Told:
    """A run with clients, and what was told of them."""

    def __init__(self, cost_ns: int = 0) -> None:
        self.run = Run()
        self.run.now_ns = 10 * MS
        self.told: list[tuple[str, Life | None]] = []
        self.cpu_ns = 0
        self.cost_ns = cost_ns
        self.aftermath = Aftermath(self.run.history, ThreadShare(COST_SHARE, MAX_SAVED_NS, self._cpu_ns))
        self.aftermath.on_life.append(lambda client, life: self.told.append((client.name, life)))

    def _cpu_ns(self) -> int:
        self.cpu_ns += self.cost_ns
        return self.cpu_ns

    def answer(self, request_id: int, num: int = 1) -> Client:
        """A request that is answered at once."""
        client = Client(f"cmpl-{request_id}", "", request_id, num, self.run.now_ns, self.run.now_ns)
        self.run.history.add_client(client)
        self.run.add(request_id, max_tokens=3, n=num)
        self.run.finish()
        client.delivered_ns = self.run.now_ns + MS
        self.aftermath.note(client)
        return client


def test_each_request_is_told_once_with_its_whole_life() -> None:
    told = Told()
    client = told.answer(1, num=2)
    told.aftermath.tick(told.run.now_ns)
    told.aftermath.tick(told.run.now_ns)
    ((name, life),) = told.told
    assert (name, client.delivered_ns) == ("cmpl-1", told.run.now_ns + MS)
    assert life is not None
    assert life.e2e_ns == client.delivered_ns - client.received_ns
    assert sum(life.ns_by_cause().values()) == life.e2e_ns


def test_what_there_is_no_time_for_is_told_without_a_life() -> None:
    told = Told(cost_ns=MAX_SAVED_NS)
    for request_id in (1, 2, 3):
        told.answer(request_id)
    told.aftermath.tick(told.run.now_ns)
    assert [life is not None for _, life in told.told] == [True, False, False]
    told.answer(4)
    told.aftermath.tick(told.run.now_ns + 10**12)
    assert told.told[-1][1] is not None, "time has been saved up again"


def test_the_engines_word_is_waited_for_but_not_for_ever() -> None:
    told = Told()
    now_ns = told.run.now_ns
    client = Client("cmpl-9", "", 9, 1, now_ns, now_ns, delivered_ns=now_ns)
    told.run.history.add_client(client)
    told.aftermath.note(client)
    told.aftermath.tick(now_ns + 1)
    assert told.told == []
    told.aftermath.tick(now_ns + PATIENCE_NS + 1)
    assert [name for name, _ in told.told] == ["cmpl-9"]


def test_the_last_look_leaves_nobody_behind() -> None:
    told = Told()
    now_ns = told.run.now_ns
    told.aftermath.note(Client("cmpl-9", "", 9, 1, now_ns, now_ns, delivered_ns=now_ns))
    told.aftermath.tick(now_ns, is_last=True)
    assert told.told == [("cmpl-9", None)], "nothing is remembered of it"


def test_a_listener_that_fails_does_not_keep_it_from_the_others(caplog: pytest.LogCaptureFixture) -> None:
    told = Told()

    def fail(client: Client, life: Life | None) -> None:
        raise ValueError("no")

    told.aftermath.on_life.insert(0, fail)
    told.answer(1)
    told.aftermath.tick(told.run.now_ns)
    assert len(told.told) == len(caplog.records) == 1


def test_a_life_that_cannot_be_cut_keeps_nobody_from_being_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> Life:
        raise LookupError("a step is missing")

    told = Told()
    for request_id in (1, 2):
        told.answer(request_id)
    monkeypatch.setattr(aftermath, "life_of", fail)
    told.aftermath.tick(told.run.now_ns)
    assert told.told == [("cmpl-1", None), ("cmpl-2", None)]
    assert len(caplog.records) == 2
