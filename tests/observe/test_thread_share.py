"""What may be spent of a thread's time, and when there is more."""

from __future__ import annotations

import pytest

from everystop.observe.thread_share import ThreadShare, free

MS = 1_000_000


class Worker:
    """A thread whose clock is turned by hand."""

    def __init__(self) -> None:
        self.cpu_ns = 0
        self.share = ThreadShare(0.01, 100 * MS, lambda: self.cpu_ns)

    def work(self, ms: int) -> None:
        with self.share.paid():
            self.cpu_ns += ms * MS


def test_what_is_spent_comes_back_slowly_and_no_more_than_is_saved_up() -> None:
    worker = Worker()
    worker.share.refill(0)
    for has_time in (True, True, False):
        assert worker.share.has_time is has_time
        worker.work(60)
    worker.share.refill(8_000 * MS)
    assert not worker.share.has_time, "180 ms were spent, 80 have come in"
    worker.share.refill(8_200 * MS)
    assert worker.share.has_time
    worker.share.refill(10**15)
    worker.work(99)
    assert worker.share.has_time
    worker.work(1)
    assert not worker.share.has_time


def test_work_that_fails_is_paid_as_well() -> None:
    worker = Worker()

    def fail() -> None:
        with worker.share.paid():
            worker.cpu_ns += 100 * MS
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert not worker.share.has_time


def test_free_work_is_never_over() -> None:
    share = free()
    for _ in range(3):
        with share.paid():
            sum(range(1000))
        assert share.has_time
