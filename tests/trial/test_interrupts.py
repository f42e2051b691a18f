"""Ctrl-C is noted wherever it comes, and other signals end a process in order."""

from __future__ import annotations

import contextlib
import gc
import signal
import weakref
from collections.abc import Iterator

import pytest
from tests.interrupts import interruptible

from everystop.trial.interrupts import ENDS, ended_in_order, noted_interrupts


@pytest.fixture(autouse=True)
def usual_handler() -> Iterator[None]:
    with interruptible():
        yield


class Thing:
    """Something to collect."""


def test_an_interrupt_that_the_collector_drops_is_raised_later(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", dropped.append)
    with noted_interrupts() as check:
        check()
        thing: Thing | None = Thing()
        watch = weakref.ref(thing, lambda ref: signal.raise_signal(signal.SIGINT))
        thing = None
        gc.collect()
        assert watch() is None
        assert len(dropped) == 1
        with pytest.raises(KeyboardInterrupt):
            check()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_comes_at_once_where_it_can() -> None:
    with noted_interrupts() as check, contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
        pytest.fail("nothing was raised")
    with pytest.raises(KeyboardInterrupt):
        check()


def test_an_ignored_interrupt_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with noted_interrupts() as check:
        signal.raise_signal(signal.SIGINT)
        check()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.parametrize("number", ENDS)
def test_a_signal_that_would_kill_lets_what_was_started_be_ended(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_DFL)
    ended: list[str] = []
    try:
        with pytest.raises(SystemExit) as exit_info:
            raise_beside_what_was_started(number, ended)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert exit_info.value.code == 128 + number
    assert ended == ["server"]


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ended_in_order():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def raise_beside_what_was_started(number: signal.Signals, ended: list[str]) -> None:
    with ended_in_order(), contextlib.ExitStack() as started:
        started.callback(ended.append, "server")
        signal.raise_signal(number)
