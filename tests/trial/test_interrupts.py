"""Ctrl-C is noted wherever it comes."""

from __future__ import annotations

import contextlib
import gc
import signal
import weakref
from collections.abc import Iterator

import pytest

from everystop.trial.interrupts import noted_interrupts


@pytest.fixture(autouse=True)
def usual_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Thing:
    """Something to collect."""


def test_an_interrupt_that_the_collector_drops_is_raised_later(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped = []
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
